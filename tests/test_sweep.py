"""A grid as data: what its points are, what they are known by, what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_notebook

from rlkit.errors import BadInput
from rlkit.sweep import Limits, Point, Sweep, load_sweep, next_point, parallel, plain, plan_sweep

ROOT = Path(__file__).parents[1]
LOCAL = str(ROOT / "runs" / "local.yaml")
PUBLISHED = str(ROOT / "runs" / "published" / "r1-dp2.yaml")


def planned(folder: Path = ROOT, recipe: str = LOCAL, **data: Any) -> Sweep:
    return plan_sweep({"recipe": recipe} | data, folder, "grid.yaml")


def notebook(path: Path, source: str = "recipe: str = ''\nfolder: str = ''\ncount: int = 1\nname: str = ''") -> str:
    cells = [new_code_cell(source, metadata={"tags": ["parameters"]})]
    nbformat.write(new_notebook(cells=cells), path)
    return str(path)


def test_a_grid_is_every_combination_and_the_listed_points_with_every_seed() -> None:
    grid = {"rollout.max_inflight_tasks": [8, 16], "serve.replicas": [1, 2]}
    sweep = planned(grid=grid, points=[{"rollout.queue_maxsize": 48}], seeds=[3, 4], steps=7)
    assert [point.number for point in sweep.points] == list(range(1, 11))
    assert sweep.fields == (*grid, "train.seed", "rollout.queue_maxsize")
    assert {point.recipe.train.steps for point in sweep.points} == {7}
    first, second, *_, last = sweep.points
    assert first.label == "rollout.max_inflight_tasks=8, serve.replicas=1, train.seed=3"
    assert (second.recipe.train.seed, second.recipe.serve.replicas) == (4, 1)
    assert last.label == "train.seed=4, rollout.queue_maxsize=48"
    assert last.recipe.rollout.queue_maxsize == 48
    assert last.recipe.rollout.max_inflight_tasks == sweep.base.rollout.max_inflight_tasks
    assert len({point.key for point in sweep.points}) == 10


def test_a_field_with_one_value_is_set_and_tells_nothing_apart() -> None:
    sweep = planned(grid={"engine": ["sim"], "serve.replicas": [1, 2]})
    assert [point.recipe.engine for point in sweep.points] == ["sim", "sim"]
    assert sweep.fields == ("serve.replicas",)
    assert sweep.points[0].label == "serve.replicas=1"
    assert planned(points=[{}]).points[0].label == "as it is"


def test_the_same_content_is_the_same_point_wherever_it_stands() -> None:
    small = planned(grid={"serve.replicas": [1, 2, 2]})
    large = planned(grid={"serve.replicas": [3, 2, 1]})
    assert len(small.points) == 2
    assert {point.key for point in small.points} < {point.key for point in large.points}
    assert small.points[0].key != planned(grid={"serve.replicas": [1]}, steps=9).points[0].key


def test_another_notebook_or_parameter_is_another_point(tmp_path: Path) -> None:
    book = notebook(tmp_path / "a.ipynb")
    keys = {
        point.key
        for sweep in (
            planned(points=[{}]),
            planned(points=[{}], notebook=book),
            planned(points=[{"count": 1}], notebook=book),
            planned(points=[{"count": 2}], notebook=book),
        )
        for point in sweep.points
    }
    assert len(keys) == 4


def test_values_keep_their_types(tmp_path: Path) -> None:
    book = notebook(tmp_path / "a.ipynb", "recipe: str = ''\nfolder: str = ''\nx: object = 0\ny: str = ''")
    values = [np.int64(3), np.float32(0.5), (1, 2), Path("a/b"), None, True, "007", np.array([1, 2])]
    sweep = planned(grid={"x": values, "y": ["007"]}, notebook=book)
    assert [point.parameters["x"] for point in sweep.points] == [3, 0.5, [1, 2], "a/b", None, True, "007"]
    assert {type(point.parameters["y"]) for point in sweep.points} == {str}
    learning_rates = planned(grid={"train.learning_rate": np.array([1e-5, 1e-4])})
    assert [point.recipe.train.learning_rate for point in learning_rates.points] == [1e-5, 1e-4]


def test_a_grid_file_is_read_with_yamls_types(tmp_path: Path) -> None:
    (tmp_path / "grids").mkdir()
    file = tmp_path / "grids" / "lengths.yaml"
    file.write_text(f"recipe: {LOCAL}\ngrid: {{train.learning_rate: [1e-5], model.revision: ['007', null]}}\n")
    sweep = load_sweep(file)
    assert sweep.name == "lengths"
    assert [point.recipe.model.revision for point in sweep.points] == ["007", None]
    assert sweep.points[0].recipe.train.learning_rate == 1e-5


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_what_yaml_could_hold_stays_as_it_is(value: object) -> None:
    found = plain(value, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"grid": {"serve.replica": [1]}}, r"grid\.yaml: point 1: serve\.replica: unknown field"),
        ({"grid": {"serve.replicas": [0]}}, r"grid\.yaml: point 1: serve\.replicas: .*0"),
        ({"grid": {"serve.replicas": ["2"]}}, r"serve\.replicas: .*'2'"),
        ({"grid": {"serve": [1]}}, r"serve: is a section of the recipe"),
        ({"grid": {"replicas": [1]}}, r"replicas: neither a field of the recipe nor a parameter of point\.ipynb"),
        ({"grid": {"folder": ["x"]}}, r"folder: the sweep gives each point its own"),
        ({"grid": {"serve.replicas": []}}, r"grid: serve\.replicas: expected at least one value"),
        ({"grid": {"serve.replicas": 2}}, r"grid\.serve\.replicas: .*2"),
        ({}, "nothing to vary"),
        ({"grids": {}}, r"grids: unknown field"),
        ({"grid": {"train.seed": [1]}, "seeds": [1]}, r"train\.seed: give it in the grid or as seeds"),
        ({"points": [{"train.steps": 3}], "steps": 4}, r"train\.steps: give it in the grid or as steps"),
        ({"grid": {"train.seed": list(range(10_001))}}, "10,001 points, at most 10,000"),
        ({"grid": {"serve.replicas": [object()]}}, "a object is no value"),
        ({"points": [{}], "limits": {"jobs": 0}}, r"limits\.jobs: .*0"),
        ({"points": [{}], "recipe": "nowhere.yaml"}, r"nowhere\.yaml: cannot read the recipe"),
        ({"points": [{}], "notebook": "nowhere.ipynb"}, r"nowhere\.ipynb: cannot read the notebook"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line_before_anything_starts(data: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told) as caught:
        planned(**data)
    assert "\n" not in str(caught.value)


def test_parameters_are_checked_against_the_notebook(tmp_path: Path) -> None:
    book = notebook(tmp_path / "a.ipynb")
    with pytest.raises(BadInput, match=r"parameter count: expected int, got '1'"):
        planned(points=[{"count": "1"}], notebook=book)
    with pytest.raises(BadInput, match=r"typo: neither .* \(its parameters: count, name\)"):
        planned(points=[{"typo": 1}], notebook=book)
    bare = notebook(tmp_path / "b.ipynb", "folder: str = ''")
    with pytest.raises(BadInput, match=r"has no parameter recipe; a point needs recipe and folder"):
        planned(points=[{}], notebook=bare)


@pytest.mark.parametrize("content", ["a: [", "- 1", "\xff"])
def test_a_file_that_is_no_grid_is_told_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "g.yaml").write_text(content, encoding="latin-1")
    with pytest.raises(BadInput, match=r"g\.yaml: "):
        load_sweep(tmp_path / "g.yaml")
    with pytest.raises(BadInput, match=r"x\.yaml: cannot read the grid: No such file"):
        load_sweep(tmp_path / "x.yaml")


def test_a_recipe_is_no_grid_and_told_in_a_short_line(tmp_path: Path) -> None:
    for content in ("extends: local.yaml\n", "name: mine\nsteps: 5\n"):
        (tmp_path / "a recipe.yaml").write_text(content)
        with pytest.raises(BadInput) as failure:
            load_sweep(tmp_path / "a recipe.yaml")
        assert str(failure.value) == (
            f"{tmp_path}/a recipe.yaml: a recipe, not a grid; `rlkit run '{tmp_path}/a recipe.yaml'` runs it, and a"
            " grid names it (`recipe:` and `grid:`, as in runs/sweeps/in-flight.yaml)"
        )


def test_what_is_wrong_with_a_grid_is_not_taken_for_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text("recipe: x.yaml\nengine: sim\n")
    with pytest.raises(BadInput, match=r"g\.yaml: engine: unknown field"):
        load_sweep(tmp_path / "g.yaml")


def test_a_grid_that_names_a_grid(tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text("recipe: h.yaml\nseeds: [0]\n")
    (tmp_path / "h.yaml").write_text("recipe: x.yaml\nseeds: [0]\n")
    with pytest.raises(BadInput, match=r"h\.yaml: a grid, not a recipe"):
        load_sweep(tmp_path / "g.yaml")


def test_simulations_fill_the_cores_and_a_local_run_has_them_to_itself() -> None:
    free = Limits()
    assert [parallel(engine, free, cores=4) for engine in ("sim", "local", "hf")] == [4, 1, 1]
    assert parallel("local", Limits(jobs=3), cores=4) == 3
    points = planned(grid={"engine": ["local", "sim"], "train.seed": [0, 1]}).points
    waiting, running = list(points), list[Point]()
    while (point := next_point(waiting, running, free, cores=2)) is not None:
        waiting.remove(point)
        running.append(point)
    assert [point.recipe.engine for point in running] == ["local", "sim", "sim"]
    assert next_point(waiting, [], free, cores=2) == points[1]
    assert next_point([], running, free, cores=2) is None


def test_rented_points_say_what_each_and_all_may_cost() -> None:
    hf = {"train.seed": [0, 1, 2], "hardware.budget_usd": [10]}
    with pytest.raises(BadInput, match=r"limits\.usd: missing, and 3 points are on rented hardware"):
        planned(recipe=PUBLISHED, grid=hf)
    with pytest.raises(BadInput, match=r"hardware\.budget_usd: not set, and point 1 runs on engine hf"):
        planned(recipe=PUBLISHED, grid={"train.seed": [0]}, limits={"usd": 25})
    assert len(planned(recipe=PUBLISHED, grid=hf, limits={"usd": 25}).points) == 3


def test_the_recipes_in_git_make_sweeps() -> None:
    chase = load_sweep(ROOT / "runs" / "sweeps" / "chase.yaml")
    assert len(chase.points) == 200
    assert {point.recipe.engine for point in chase.points} == {"sim"}
    assert len(load_sweep(ROOT / "runs" / "sweeps" / "in-flight.yaml").points) == 6
