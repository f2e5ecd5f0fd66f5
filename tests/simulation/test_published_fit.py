from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.errors import BadInput
from rlkit.simulation.calibration import load_constants
from rlkit.simulation.constants import CHASE, Physics
from rlkit.simulation.published import PublishedRun, published_runs
from rlkit.simulation.published_fit import Constants, PublishedFit, fit_published, fittable

# Two of the nine runs, sixteen steps each, are all that the trainer's constants need.
TRAINER = ("row_mfu", "recompute_share")
CELLS = {"row_mfu": "r1-dp2-tb16k:perf/fwd_bwd_s", "recompute_share": "r1-dp2-tb16k-nockpt:perf/fwd_bwd_s"}


def fit(runs: list[PublishedRun], *hold_out: str) -> PublishedFit:
    return fit_published(hold_out, TRAINER, runs, part=0.03, whole=0.03, processes=1)


def changed(cell: str, value: float) -> list[PublishedRun]:
    name, _, figure = cell.partition(":")
    return [
        replace(run, figures={**run.figures, figure: value}) if run.name == name else run for run in published_runs()
    ]


def test_a_slower_trainer_is_found_in_the_cells_that_say_so() -> None:
    fitted = fit(changed(CELLS["row_mfu"], 5.6 * 1.2))
    before, after = fitted.values["row_mfu"]
    assert after < before * 0.85
    assert {cell.cell: round(cell.error, 2) for cell in fitted.cells} == dict.fromkeys(sorted(CELLS.values()), 0.0)
    assert all(cell.fitted for cell in fitted.cells)


def test_a_cell_that_is_held_out_is_never_looked_at() -> None:
    held = CELLS["recompute_share"]
    real, garbage = fit(published_runs(), held), fit(changed(held, 1234.5), held)
    assert real.constants == garbage.constants
    assert list(real.values) == ["row_mfu"]  # nothing else says what the other one is
    shown = {cell.cell: cell for cell in garbage.cells}
    assert not shown[held].fitted
    assert shown[held].published == 1234.5


def test_a_fit_is_read_as_constants(tmp_path: Path) -> None:
    fitted = PublishedFit(Constants(Physics(row_s=0.3)), {"row_s": (0.2945, 0.3)}, (), 1)
    fitted.save(tmp_path / "constants.json")
    physics, workload = load_constants(tmp_path / "constants.json", "Qwen/Qwen2.5-Math-1.5B")
    assert (physics.row_s, workload) == (0.3, CHASE)
    assert load_constants(tmp_path / "constants.json", "another/model")[1] is None
    assert json.loads((tmp_path / "constants.json").read_text())["constants"]["row_s"] == {
        "before": 0.2945,
        "after": 0.3,
    }


def test_every_fitted_constant_can_be_scaled() -> None:
    for origin in fittable():
        assert Constants().scaled(origin.name, 2.0) != Constants()


def test_names_that_there_are_not_are_refused() -> None:
    with pytest.raises(BadInput, match="--hold-out r9: no published cell"):
        fit_published(["r9"])
    with pytest.raises(BadInput, match="--hold-out r1-dp2:speed: no published cell"):
        fit_published(["r1-dp2:speed"])
    with pytest.raises(BadInput, match="--only pause_s: no fitted constant; there are: iteration_s"):
        fit_published(only=["pause_s"])
    with pytest.raises(BadInput, match="nothing is left"):
        fit_published(["r1-dp2"], ["row_s"])
