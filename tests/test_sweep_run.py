"""A sweep executed with small notebooks: failures, dead kernels, types, resuming, stopping."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import psutil
import pytest
from html_page import Page
from nbformat.v4 import new_code_cell, new_notebook

from rlkit.errors import BadInput, RunFailed
from rlkit.sweep import Point, Sweep, plan_sweep
from rlkit.sweep_folder import Ended, SweepFolder, in_words, read_ended
from rlkit.sweep_kernels import Kernels
from rlkit.sweep_run import run_sweep

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "tests" / "bench"
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
PARAMETERS = """recipe: str = ""
folder: str = ""
mode: str = ""
text: str = ""
pair: list = []
nothing: object = 0
flag: bool = True"""
# What a point does, by its mode; one that dies once leaves a mark behind.
CELL = """import os, time
from pathlib import Path
from rlkit.sweep_point import run_point
assert "left_over" not in globals()
left_over = 1
if mode == "fail":
    raise ValueError("on purpose\\nsecond line")
if mode == "die":
    os._exit(9)
if mode == "die once" and not Path("mark").exists():
    Path("mark").touch()
    os._exit(9)
if mode == "sleep":
    time.sleep(600)
if mode == "types":
    import ipykernel
    assert ipykernel.get_connection_info(unpack=True)["transport"] == "ipc"  # no port that somebody else may take
    assert (text, pair, nothing, flag) == ("007", [1, 2], None, False), (text, pair, nothing, flag)
if mode != "idle":
    run_point(recipe, folder)
print("ran as", mode)"""


def planned(tmp_path: Path, points: list[dict[str, Any]], **changes: Any) -> Sweep:
    cells = [new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), new_code_cell(CELL)]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), tmp_path / "p.ipynb")
    data = {"recipe": str(ROOT / "runs" / "local.yaml"), "notebook": "p.ipynb", "steps": 12, "points": points}
    return plan_sweep(data | changes, tmp_path)


def test_failures_are_kept_and_stop_no_other_and_what_has_ended_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder given as the command line has it, relative to where it is called; the notebook is somewhere else."""
    (tmp_path / "called").mkdir()
    monkeypatch.chdir(tmp_path / "called")
    types = {"text": "007", "pair": (1, 2), "nothing": None, "flag": False}
    modes = ["fail", "die", "types", "die once", "idle"]
    points = [{"engine": "sim", "mode": mode, **(types if mode == "types" else {})} for mode in modes]
    sweep, out = planned(tmp_path, points, limits={"jobs": 2}), SweepFolder(Path("out"))
    told: list[int] = []
    ended = run_sweep(sweep, out.path, lambda point, end, count: told.append(count))
    assert told == [1, 2, 3, 4, 5]
    failed, dead, typed, revived, idle = (ended[point.key] for point in sweep.points)
    assert (failed.status, failed.attempts) == ("failed", 1)
    assert failed.error == 'p.ipynb: code cell 2 (assert "left_over" not in globals()): ValueError: on purpose'
    assert (dead.status, dead.attempts) == ("failed", 2)
    assert "the kernel died" in str(dead.error)
    assert (typed.status, typed.error, typed.attempts) == ("done", None, 1)
    assert (revived.status, revived.attempts) == ("done", 2)
    assert "left no run in its folder" in str(idle.error)
    assert "(its kernel died 2 times)" in in_words(sweep.points[1], dead)
    assert "(its kernel died 1 time)" in in_words(sweep.points[3], revived)
    assert typed.summary is not None
    assert typed.summary.steps == 12

    assert Path.cwd() == tmp_path / "called"
    assert (tmp_path / "mark").exists()  # a kernel is where its notebook is
    table = pd.read_parquet(out.table)
    assert table["parameter.mode"].tolist() == modes
    assert table["status"].tolist() == ["failed", "failed", "done", "done", "failed"]
    assert table["verdict"].notna().tolist() == [False, False, True, True, False]
    assert table["perf/step_s"].notna().sum() == 2
    assert pd.read_json(out.table.with_suffix(".json"))["name"].tolist() == table["name"].tolist()
    pages = [Page(out.run(point).report.read_text()) for point in sweep.points]
    assert all(page.external == [] for page in pages)
    assert pages[0].first_bold.startswith("Failed: p.ipynb: code cell 2")
    assert "ran as types" in pages[2].text

    again = run_sweep(sweep, out.path, lambda point, end, count: told.append(count))
    assert len(told) == 5
    assert again == ended
    assert pd.read_parquet(out.table).equals(table)
    first = replace(sweep, points=sweep.points[:1])
    assert run_sweep(first, out.path, lambda point, end, count: told.append(count), retry_failed=True).keys() == {
        first.points[0].key
    }
    assert len(told) == 6


def test_a_sweep_that_is_stopped_leaves_no_kernel_and_keeps_what_has_ended(tmp_path: Path) -> None:
    points = [{"engine": "sim", "mode": mode} for mode in ("fail", "sleep")]
    sweep, out = planned(tmp_path, points, limits={"jobs": 2}), SweepFolder(tmp_path / "out")

    threads: list[int] = []

    def stop(point: Point, ended: Ended, count: int) -> None:
        for child in psutil.Process().children(recursive=True):
            if "rlkit.sweep_nursery" in child.cmdline() and child.ppid() == os.getpid():  # not one of its forks
                threads.append(child.num_threads())
        raise KeyboardInterrupt

    before = set(psutil.Process().children(recursive=True))  # other tests' process pools leave a tracker behind
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, out.path, stop)
    assert time.monotonic() - began < 300  # the sleeper would have taken 600
    assert set(psutil.Process().children(recursive=True)) <= before
    assert threads == [1]  # what forks has no thread that a fork would miss
    first, second = sweep.points
    assert read_ended(out, first) is not None
    assert read_ended(out, second) is None
    assert pd.read_parquet(out.table)["status"].tolist() == ["failed", "waiting"]


def test_only_a_stopped_kernel_that_never_was_ready_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("papermill")
    never = "Error occurred while starting new kernel client for kernel 1: Kernel died before replying to kernel_info"
    kernels = Kernels()
    log.error(never)
    kernels.stop(grace_s=0)
    log.error(never)
    log.error("another")
    kernels.close()
    log.error(never)
    assert caplog.messages == [never, "another", never]


def test_a_folder_with_something_else_or_another_sweep_in_it_is_refused(tmp_path: Path) -> None:
    sweep = planned(tmp_path, [{"mode": "idle"}])
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").touch()
    with pytest.raises(BadInput, match="holds a run, not a sweep"):
        run_sweep(sweep, run)
    busy = tmp_path / "busy"
    busy.mkdir()
    with (busy / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="a sweep is going on here"):
            run_sweep(sweep, busy)


def test_rented_points_start_while_all_may_be_paid_and_one_that_failed_was_paid_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [{"engine": "hf", "hardware.budget_usd": 10.0, "train.seed": seed} for seed in range(4)]
    sweep = planned(tmp_path, points, limits={"usd": 25, "jobs": 4})

    def billed(notebook: Path, values: dict[str, Any], **client: Any) -> None:
        seed = Path(values["recipe"]).read_text()
        if "seed: 0" in seed:  # its engine noted what it was billed before it failed
            (Path(values["folder"]) / "state.json").write_text('{"status": "failed", "usd": 2.0}')
        raise RunFailed("on purpose")

    monkeypatch.setattr("rlkit.sweep_run.execute_notebook", billed)
    ended = run_sweep(sweep, tmp_path / "out")
    assert [ended[point.key].status for point in sweep.points] == ["failed", "failed", "failed", "skipped"]
    assert [ended[point.key].spent_usd for point in sweep.points] == [2, 10, 10, 0]
    left = "limits.usd: $3.00 of $25.00 is left and this run may take $10.00"
    assert ended[sweep.points[3].key].error == left
    # What was paid stays paid, also for the points that are tried again.
    again = run_sweep(sweep, tmp_path / "out", retry_failed=True)
    own = "hardware.budget_usd: all of $10.00 are spent by this run"
    assert [again[point.key].error for point in sweep.points] == [left.replace("10.00", "8.00"), own, own, left]


def test_a_kernel_that_cannot_start_is_tried_twice_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = planned(tmp_path, [{"engine": "sim", "mode": "idle"}, {"engine": "sim", "mode": "fail"}])

    def timed_out(*_: Any, **__: Any) -> None:
        raise RuntimeError("Kernel didn't respond in 60 seconds")

    monkeypatch.setattr("rlkit.sweep_run.execute_notebook", timed_out)
    ended = list(run_sweep(sweep, tmp_path / "out").values())
    assert [(end.status, end.attempts) for end in ended] == [("failed", 2)] * 2
    assert ended[0].error == "p.ipynb: RuntimeError: Kernel didn't respond in 60 seconds"


def test_a_record_of_another_content_or_a_broken_one_is_no_record(tmp_path: Path) -> None:
    sweep, out = planned(tmp_path, [{"mode": "idle"}]), SweepFolder(tmp_path / "out")
    record = out.record(sweep.points[0])
    record.parent.mkdir(parents=True)
    for text in ("", "[1]", "{}", '{"key": "other", "status": "done", "summary": null}'):
        record.write_text(text)
        assert read_ended(out, sweep.points[0]) is None


@pytest.mark.slow
def test_a_sweep_killed_twice_comes_to_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    from sweep import measure

    grid = tmp_path / "grid.yaml"
    grid.write_text(
        f"recipe: {ROOT / 'runs' / 'local.yaml'}\nsteps: 12\n"
        "grid: {engine: [sim], serve.replicas: [1, 2, 3], rollout.max_inflight_tasks: [8, 16, 32, 64]}\n"
    )
    took = measure(grid, tmp_path, kills=2)
    assert took["done"] == took["points"] == 12
    assert took["same_rows"]
    assert took["left_running"] == 0
    assert took["pages"] == 13


@pytest.mark.slow
@pytest.mark.long
def test_a_real_point_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    points = [{"train.seed": 0}, {"train.seed": 1, "reward": "rlkit.training.rewards:nowhere"}, {"train.seed": 2}]
    data = {"recipe": str(ROOT / "runs" / "local.yaml"), "steps": 3, "points": points}
    sweep = plan_sweep(data, tmp_path)
    ended = run_sweep(sweep, tmp_path / "out", lambda point, end, count: print(in_words(point, end), file=sys.stderr))
    assert [ended[point.key].status for point in sweep.points] == ["done", "failed", "done"]
    assert "nowhere" in str(ended[sweep.points[1].key].error)
    table = pd.read_parquet(tmp_path / "out" / "results.parquet")
    assert table["steps"].notna().tolist() == [True, False, True]
