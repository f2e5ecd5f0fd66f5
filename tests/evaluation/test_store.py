from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from rlkit.errors import BadInput
from rlkit.evaluation import evaluate, store
from rlkit.evaluation.interventions import Labelled, label
from rlkit.evaluation.scenarios import Scenario, scenarios
from rlkit.evaluation.store import LabelStore, run_key


def labelled(scenario: Scenario, seed: int) -> Labelled:
    frame = pd.DataFrame({"perf/step_s": [0.1 + seed, 1 / 3]}, index=pd.RangeIndex(1, 3, name="global_step"))
    return Labelled(scenario, seed, frame, {"trainer": 0.05, "generation": 1 / 3}, {"rows": 0.01})


def test_a_run_comes_back_to_the_last_digit(tmp_path: Path) -> None:
    run = label(scenarios(1)[0], 0, steps=6)
    labels = LabelStore(tmp_path)
    labels.put(run, steps=6)
    again = labels.get(run.scenario, 0, steps=6)

    assert again is not None
    assert (again.sides, again.causes) == (run.sides, run.causes)
    pd.testing.assert_frame_equal(again.frame, run.frame, check_exact=True)
    assert labels.get(run.scenario, 1, steps=6) is None
    assert labels.get(run.scenario, 0, steps=7) is None


def test_whatever_changes_the_run_changes_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = scenarios(1)[0]
    other = replace(scenario, physics=replace(scenario.physics, score_s=scenario.physics.score_s + 1e-9))
    keys = {run_key(scenario, 0), run_key(scenario, 1), run_key(other, 0), run_key(replace(scenario, slowness=2.0), 0)}
    monkeypatch.setattr(store, "simulator_version", lambda: "another")

    assert len(keys | {run_key(scenario, 0)}) == 5
    assert run_key(scenario, 0) == run_key(scenarios(1)[0], 0)


def test_all_that_a_label_follows_from_is_in_its_key() -> None:
    package = Path(store.__file__).parents[1]
    listed = {file for name in store.SIMULATES for file in files(package / name)}
    parsing = {package / name for name in PARSING}

    assert imported_by(package / "evaluation" / "interventions.py") - parsing <= listed


# Recipes are parsed by these; what comes out is in the key, as are the scenarios.
PARSING = ("errors.py", "recipe.py", "recipe_bounds.py", "recipe_layers.py", "refusals.py", "evaluation/scenarios.py")


def files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*.py") if file.name != "__init__.py"] if path.is_dir() else [path]


def imported_by(file: Path) -> set[Path]:
    """The package's modules that a module imports, and itself."""
    root, found, left = Path(store.__file__).parents[2], set[Path](), [file]
    while left:
        module = left.pop()
        if module in found:
            continue
        found.add(module)
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlkit"):
                names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
                left += [path for name in names if (path := root / f"{name.replace('.', '/')}.py").exists()]
    return found


def test_an_evaluation_goes_on_with_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, labels = scenarios(3), LabelStore(tmp_path)
    for scenario in drawn[:2]:
        labels.put(labelled(scenario, 0))
    labels.put(labelled(drawn[0], 1))

    assert {run.scenario for run in evaluate.judge_stored(drawn, labels, seeds=2)} == {drawn[0].name}
    labels.put(labelled(drawn[1], 1))
    monkeypatch.setattr(evaluate, "process_pool", None)  # nothing is simulated
    assert len(evaluate.evaluate(drawn[:2], labels, seeds=2)) == 4


def test_a_store_that_cannot_be_written_is_refused_before_anything_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="choose another --store"):
        evaluate.evaluate([], LabelStore(tmp_path / "file" / "store"))


def test_a_run_that_was_half_written_is_not_there(tmp_path: Path) -> None:
    scenario, labels = scenarios(1)[0], LabelStore(tmp_path)
    labels.put(labelled(scenario, 0))
    (tmp_path / f"{run_key(scenario, 0)}.parquet").write_bytes(b"PAR1")

    assert labels.get(scenario, 0) is None
