"""A sweep without work is over at once, and nothing that was made from something else stays."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlkit import sweep_current, sweep_run
from rlkit.cli import app
from rlkit.errors import BadInput
from rlkit.sweep import Sweep, load_sweep
from rlkit.sweep_current import code_digest, note_written
from rlkit.sweep_folder import Ended, Summary, SweepFolder, asked_for, write_json

ROOT = Path(__file__).parents[1]
SUMMARY = Summary("trainer", "high", "It is.", "Change it.", 20, 1.0, 0.3, None, {"perf/step_s": 1.0})


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    file = tmp_path / "g.yaml"
    file.write_text(f"recipe: {ROOT}/runs/local.yaml\ngrid: {{engine: [sim], train.seed: [0, 1]}}\nsteps: 12\n")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "out")


def made(grid: Path, folder: SweepFolder) -> Sweep:
    """A sweep whose points have ended, with a table and an index."""
    sweep = load_sweep(grid)
    ended = {}
    for point in sweep.points:
        folder.run(point).path.mkdir(parents=True)
        ended[point.key] = Ended(point.key, "done", summary=SUMMARY)
        write_json(folder.record(point), ended[point.key].to_dict())
    write_json(folder.plan, asked_for(sweep))
    for file in (folder.table, folder.table.with_suffix(".json"), folder.index):
        file.write_text("[]")
    note_written(sweep, folder, ended, code_digest())
    return sweep


def finished(sweep: Sweep, folder: SweepFolder) -> dict[str, Ended] | None:
    return sweep_current.finished(sweep, folder, code_digest())


def test_what_was_made_from_the_same_is_left_alone(grid: Path, folder: SweepFolder) -> None:
    sweep = made(grid, folder)
    found = finished(sweep, folder)
    assert found is not None
    assert list(found) == [point.key for point in sweep.points]
    assert found[sweep.points[0].key].summary == SUMMARY
    assert finished(sweep.limited(5), folder) == found  # how many at once is in no page


CHANGES: dict[str, Callable[[SweepFolder, Sweep], object]] = {
    "the table is another": lambda folder, sweep: folder.table.write_text("[1]"),
    "its twin is gone": lambda folder, sweep: folder.table.with_suffix(".json").unlink(),
    "the index is gone": lambda folder, sweep: folder.index.unlink(),
    "the note is broken": lambda folder, sweep: folder.written.write_text("{"),
    "the note is gone": lambda folder, sweep: folder.written.unlink(),
    "the plan is another's": lambda folder, sweep: write_json(folder.plan, asked_for(replace(sweep, name="other"))),
    "the plan is gone": lambda folder, sweep: folder.plan.unlink(),
    "a point has not ended": lambda folder, sweep: folder.record(sweep.points[1]).unlink(),
    "a point ended otherwise": lambda folder, sweep: write_json(
        folder.record(sweep.points[1]), Ended(sweep.points[1].key, "failed", "it broke").to_dict()
    ),
    "a point has another figure": lambda folder, sweep: write_json(
        folder.record(sweep.points[1]),
        Ended(sweep.points[1].key, "done", summary=replace(SUMMARY, step_s=2.0)).to_dict(),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_disk_makes_all_of_it_anew(change: str, grid: Path, folder: SweepFolder) -> None:
    sweep = made(grid, folder)
    CHANGES[change](folder, sweep)
    assert finished(sweep, folder) is None


def test_other_points_or_another_name_make_all_of_it_anew(grid: Path, folder: SweepFolder, tmp_path: Path) -> None:
    sweep = made(grid, folder)
    assert finished(replace(sweep, points=sweep.points[:1]), folder) is None
    assert finished(replace(sweep, fields=("engine",)), folder) is None
    assert finished(replace(sweep, name="other"), folder) is None
    folder.path.rename(tmp_path / "renamed")  # the page's title is the folder's name
    assert finished(sweep, SweepFolder(tmp_path / "renamed")) is None


def test_other_code_or_packages_make_all_of_it_anew(
    grid: Path, folder: SweepFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, page = tmp_path / "code", tmp_path / "page.ipynb"
    (code / "deep").mkdir(parents=True)
    (code / "deep" / "report.css").write_text("a")
    page.write_text("a")
    monkeypatch.setattr(sweep_current, "PACKAGE", code)
    monkeypatch.setattr(sweep_current, "INDEX", page)
    sweep = made(grid, folder)
    for file in (code / "deep" / "report.css", page):
        file.write_text("b")
        assert finished(sweep, folder) is None
        file.write_text("a")
        assert finished(sweep, folder) is not None
    monkeypatch.setattr("rlkit.sweep_current.metadata.version", lambda name: "0")
    assert finished(sweep, folder) is None


def test_another_sweep_that_goes_on_in_the_folder_is_not_looked_past(grid: Path, folder: SweepFolder) -> None:
    sweep = made(grid, folder)
    with (folder.path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="a sweep is going on here"):
            finished(sweep, folder)


def test_looking_changes_nothing_also_for_another_sweep(grid: Path, folder: SweepFolder) -> None:
    """It may be of rented points, and whoever is asked for their price may say no."""
    sweep = made(grid, folder)
    assert finished(replace(sweep, name="other"), folder) is None
    assert finished(sweep, folder) is not None


def test_a_sweep_that_begins_takes_the_note_away(
    grid: Path, folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed when the plan is written, and the table is still that of the sweep before."""
    sweep = made(grid, folder)
    seen: list[bool] = []
    monkeypatch.setattr(sweep_run, "write_table", lambda *_: seen.append(folder.written.exists()))
    sweep_run.run_sweep(sweep, folder.path)
    assert seen == [False]


def test_a_folder_that_is_not_there_is_not_made(grid: Path, folder: SweepFolder) -> None:
    assert finished(load_sweep(grid), folder) is None
    assert not folder.path.exists()


def test_the_command_writes_once_and_retries_what_failed(
    grid: Path, folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = made(grid, folder)
    failed = {point.key: Ended(point.key, "failed", "it broke") for point in sweep.points}
    for point in sweep.points:
        write_json(folder.record(point), failed[point.key].to_dict())
    asked: list[bool] = []

    def run(planned: Sweep, out: Path, tell: object, retry: bool) -> dict[str, Ended]:
        asked.append(retry)
        return failed

    monkeypatch.setattr("rlkit.sweep_run.run_sweep", run)
    monkeypatch.setattr("rlkit.sweep_run.write_index", lambda where: where.index.write_text(f"page {len(asked)}"))
    for options in ([], [], ["--retry-failed"], []):
        ended = CliRunner().invoke(app, ["sweep", str(grid), "--out", str(folder.path), *options])
        assert (ended.exit_code, "2 failed" in ended.stdout) == (3, True), ended.output
    assert asked == [False, True]


def test_code_that_is_edited_while_a_sweep_goes_on_did_not_make_its_page(
    grid: Path, folder: SweepFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = made(grid, folder)
    folder.written.unlink()
    (tmp_path / "code").mkdir()
    monkeypatch.setattr(sweep_current, "PACKAGE", tmp_path / "code")
    monkeypatch.setattr("rlkit.sweep_run.run_sweep", lambda *_: all_done(sweep))
    monkeypatch.setattr("rlkit.sweep_run.write_index", lambda where: (tmp_path / "code" / "new.py").touch())
    assert CliRunner().invoke(app, ["sweep", str(grid), "--out", str(folder.path)]).exit_code == 0
    assert folder.written.is_file()
    assert finished(sweep, folder) is None


def all_done(sweep: Sweep) -> dict[str, Ended]:
    return {point.key: Ended(point.key, "done", summary=SUMMARY) for point in sweep.points}


def test_a_sweep_without_work_imports_nothing_that_takes_its_time(grid: Path, folder: SweepFolder) -> None:
    made(grid, folder)
    code = (
        "import sys; from typer.testing import CliRunner; from rlkit.cli import app\n"
        f"ended = CliRunner().invoke(app, ['sweep', {str(grid)!r}, '--out', {str(folder.path)!r}, '--json'])\n"
        "assert ended.exit_code == 0, ended.output\n"
        "print(sorted({'nbformat', 'nbconvert', 'papermill', 'pandas', 'plotly', 'ipykernel'} & set(sys.modules)))"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout == "[]\n"
    assert json.loads((folder.path / "sweep.json").read_text())["name"] == "g"
