"""The published chase as simulated runs: made once, read again, as long as asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit import five_runs
from rlkit.engines import Event
from rlkit.errors import BadInput
from rlkit.five_runs import open_chase, published_chase

RUNS = Path(__file__).parents[1] / "runs"
FIRST = str(RUNS / "published" / "r1-dp2-tb16k.yaml")
SECOND = str(RUNS / "published" / "r1-dp2-tb16k-nockpt.yaml")


def test_the_five_are_told_in_their_order() -> None:
    names = ["r1-dp2", "r1-dp2-tb16k", "r1-dp2-tb16k-nockpt", "r1-dp3-tb16k-nockpt", "r1-dp3-inflight384"]
    assert [run.name for run in published_chase()] == names
    assert [recipe.name for recipe in five_runs._chosen([])] == names


def test_runs_are_the_first_steps_of_their_recipes_and_are_made_once(tmp_path: Path) -> None:
    events: list[Event] = []
    made = open_chase([], [FIRST, SECOND], "sim", 8, 1, tmp_path, on_event=events.append)
    assert list(made) == ["r1-dp2-tb16k", "r1-dp2-tb16k-nockpt"]
    for run in made.values():
        assert run.recipe is not None
        assert (run.recipe.engine, run.recipe.train.steps, run.recipe.train.seed) == ("sim", 500, 1)
        assert list(run.frame.index) == list(range(1, 9))
    assert [event.total for event in events if event.kind == "step"] == [8] * 16
    again = open_chase([], [FIRST, SECOND], "sim", 8, 1, tmp_path, on_event=lambda event: pytest.fail(event.text))
    assert again["r1-dp2-tb16k"].frame.equals(made["r1-dp2-tb16k"].frame)
    read = open_chase([str(tmp_path / "r1-dp2-tb16k"), "r1-dp2-tb16k-nockpt"], [], "", 0, 0, tmp_path)
    assert list(read) == list(made)


def test_another_length_or_seed_is_another_run_under_its_recipes_name(tmp_path: Path) -> None:
    short = open_chase([], [FIRST], "sim", 6, 0, tmp_path)
    longer = open_chase([], [FIRST], "sim", 8, 0, tmp_path)
    seeded = open_chase([], [FIRST], "sim", 6, 1, tmp_path)
    assert list(short) == list(longer) == list(seeded) == ["r1-dp2-tb16k"]
    assert sorted(path.name for path in tmp_path.glob("r1*")) == ["r1-dp2-tb16k", "r1-dp2-tb16k-2", "r1-dp2-tb16k-3"]
    assert len(longer["r1-dp2-tb16k"].frame) == 8
    assert not seeded["r1-dp2-tb16k"].frame["perf/step_s"].equals(short["r1-dp2-tb16k"].frame["perf/step_s"])


def test_without_steps_a_run_is_as_long_as_its_published_one() -> None:
    assert [five_runs._published_steps(run.recipe) for run in published_chase()] == [500, 154, 134, 134, 500]


@pytest.mark.parametrize(
    ("engine", "steps", "recipes", "said"),
    [
        ("hf", 0, [FIRST], "engine 'hf': sim or local"),
        ("", 0, [FIRST], "r1-dp2-tb16k: engine hf rents hardware"),
        ("sim", -1, [FIRST], "steps: -1"),
        ("sim", 4, [FIRST, FIRST], "two of them have one name"),
        ("sim", 4, ["nowhere.yaml"], "nowhere.yaml: cannot read the recipe"),
    ],
)
def test_what_cannot_be_run_is_told_before_anything_starts(
    engine: str, steps: int, recipes: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        open_chase([], recipes, engine, steps, 0, tmp_path)
    assert not list(tmp_path.glob("r1*"))
