from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from recorded_runs import recipe
from run_folders import run_folder
from typer.testing import CliRunner, Result

from rlkit import terminal
from rlkit.cli import app
from rlkit.simulation import published_fit
from rlkit.simulation.published_fit import CellFit, Constants, PublishedFit

FITTED = PublishedFit(
    Constants(),
    {"row_s": (0.2945, 0.3)},
    (CellFit("r1-dp2:perf/fwd_bwd_s", 21.9, 21.0, 21.8, True), CellFit("r1-dp2:wall_clock_min", 207, 200, 206, False)),
    12,
)


def rlkit_(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], Sequence[str]]]:
    """What the fit was asked for; it takes no time here."""
    calls: list[tuple[Sequence[str], Sequence[str]]] = []

    def fit(hold_out: Sequence[str], only: Sequence[str], on_simulated: Callable[[int, int], None]) -> PublishedFit:
        calls.append((hold_out, only))
        for done in range(1, 41):
            on_simulated(done, 40)
        return FITTED

    monkeypatch.setattr(published_fit, "fit_published", fit)
    return calls


def test_a_fit_shows_constants_and_residuals(
    asked: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "COUNT_EVERY_S", 0.0)
    out = tmp_path / "constants.json"
    options = ("--hold-out", "r1-dp2:wall_clock_min", "--only", "row_s")
    result = rlkit_("--published", *options, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert asked == [(["r1-dp2:wall_clock_min"], ["row_s"])]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["row_s", "0.2945", "0.3", "+1.9%"] in rows
    assert ["r1-dp2:perf/fwd_bwd_s", "21.9", "21", "21.8", "-0.5%"] in rows
    assert ["r1-dp2:wall_clock_min", "207", "200", "206", "-0.5%", "held", "out"] in rows
    assert "simulating the published runs: 40 of 40" in result.stderr
    assert json.loads(out.read_text())["physics"]["row_s"] == 0.2945


def test_a_fit_as_json(asked: list[object], tmp_path: Path) -> None:
    result = rlkit_("--published", "--json", "--out", str(tmp_path / "constants.json"))
    assert [cell["fitted"] for cell in json.loads(result.stdout)["cells"]] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "calibrate: name real runs, or give --published"),
        (("a-run", "--published"), "calibrate: name real runs, or give --published"),
        (("a-run", "--hold-out", "r1-dp2"), "--hold-out and --only: belong to --published"),
        (("--published", "--out", "nowhere/constants.json"), "--out nowhere/constants.json: there is no folder"),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = rlkit_(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


def test_a_simulated_run_is_nothing_to_fit_to(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    folder.recipe.write_text(recipe().with_overrides(["engine=sim"]).to_yaml())
    result = rlkit_(str(folder.path), "--out", str(tmp_path / "constants.json"))
    assert (result.exit_code, "a simulated run; constants are fitted to real ones" in result.stderr) == (2, True)
    assert not (tmp_path / "constants.json").exists()
