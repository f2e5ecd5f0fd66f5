"""What a view of a run that goes on shows, from rows, from a folder, from trackio."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from recorded_runs import recipe, recorded

from rlkit.engines import launch
from rlkit.errors import BadInput
from rlkit.live import FIGURES, PANELS, Look, changed, page, panels, progress, seconds_left
from rlkit.live_source import FolderSource, ProjectSource
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.step_rows import frame_of_rows
from rlkit.tracking import write_run

NOW = datetime(2026, 1, 5, 12, tzinfo=UTC)


def rows(recording: str = "learning-run") -> list[dict[str, Any]]:
    """steps.jsonl's rows, as the trainer writes them."""
    frame = recorded(recording).drop(columns="timestamp")
    logged = [(int(str(step)), row.dropna().items()) for step, row in frame.iterrows()]
    return [{"global_step": step, **{str(name): value for name, value in numbers}} for step, numbers in logged]


def look(steps: int = 50, going_on: bool = True, plan: Recipe | None = None, **more: Any) -> Look:
    frame = frame_of_rows(rows()[:steps], NOW)
    status = "it is running (process 7)" if going_on else "it finished"
    return Look("mine", frame, plan or recipe(), status, going_on, not going_on, NOW, **more)


def test_rows_become_the_frame_with_a_clock_that_ends_now() -> None:
    frame = frame_of_rows(rows(), NOW)
    assert list(frame.index) == list(recorded("learning-run").index)
    assert frame["timestamp"].max() == NOW
    apart = frame["timestamp"].diff().dt.total_seconds().iloc[1:]
    assert apart.tolist() == pytest.approx(frame["perf/step_s"].iloc[1:].tolist(), abs=1e-5)
    assert frame_of_rows([], NOW).empty


def test_steps_that_were_run_again_after_a_resume_count_once() -> None:
    again = [*rows()[:10], *rows()[8:12]]
    assert list(frame_of_rows(again, NOW).index) == list(range(1, 13))


def test_a_run_that_goes_on_shows_its_verdict_progress_and_eight_figures() -> None:
    shown = panels(look(20, cap="32 may be in flight, as asked; the law would allow 40."))
    assert tuple(shown) == PANELS
    text = Page(page(shown)).text
    assert Page(page(shown)).first_bold.startswith("Generation-bound: ")
    assert "Step 20 of 50 · about " in text
    assert "it is running (process 7)" in text
    assert "The cap: 32 may be in flight, as asked" in text
    assert page(shown).count('role="img"') == 7  # nothing was held back: that one is a sentence
    assert Page(page(shown)).external == []


def test_only_what_changed_is_sent_again() -> None:
    before, after = panels(look(20)), panels(look(21))
    assert set(changed(before, after)) >= {"progress", "step", "queue", "reward"}
    assert changed(before, before) == {}
    assert panels(look(20), before)["step"] is before["step"]


def test_before_the_first_step_there_is_the_engines_log() -> None:
    shown = panels(look(0, log=("starting 2 vLLM replicas",)))
    assert all(shown[name] == "" for name in FIGURES)
    assert "Undetermined" in shown["verdict"]
    assert "starting 2 vLLM replicas" in shown["progress"]
    assert "starting 2" not in progress(look(20, log=("starting 2 vLLM replicas",)))


def test_what_is_left_is_reckoned_at_the_pace_of_the_last_steps() -> None:
    frame = frame_of_rows([{"global_step": n, "perf/step_s": 100.0 if n < 30 else 2.0} for n in range(1, 60)], NOW)
    assert seconds_left(frame, 59, 100) == pytest.approx(82.0)
    assert seconds_left(frame, 59, None) is None
    assert seconds_left(frame.iloc[:0], 0, 100) is None
    assert "left" not in progress(look(20, going_on=False))


def test_a_run_that_stands_still_is_said_to_be_stalled_only_while_it_goes_on() -> None:
    later = Look(**{**vars(look(40)), "at": NOW + timedelta(hours=1)})
    assert "Stalled" in panels(later)["verdict"]
    over = Look(**{**vars(later), "going_on": False})
    assert "Stalled" not in panels(over)["verdict"]


def folder_with(tmp_path: Path, pid: int, steps: int = 5) -> RunFolder:
    folder = RunFolder(tmp_path / "mine")
    folder.path.mkdir()
    folder.recipe.write_text(recipe().with_overrides(["cap.policy=rlkit"]).to_yaml(), encoding="utf-8")
    folder.state.write_text(json.dumps({"status": "running", "pid": pid, "updated": time.time()}), encoding="utf-8")
    folder.steps.write_text("".join(json.dumps(row) + "\n" for row in rows()[:steps]), encoding="utf-8")
    return folder


def test_a_folder_is_read_as_it_grows_and_again_only_then(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, os.getpid())
    source = FolderSource(folder)
    first = source.look()
    assert (len(first.frame), first.going_on, first.over) == (5, True, False)
    assert source.look().frame is first.frame
    with folder.steps.open("a") as lines:
        lines.write(json.dumps(rows()[5]) + '\n{"global_step": 7, "rew')
    assert len(source.look().frame) == 6


def test_what_is_asked_lies_in_the_folder_and_the_caps_last_word_is_shown(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, os.getpid())
    source = FolderSource(folder)
    assert source.cannot() == ("", "")
    source.ask(9)
    assert json.loads(folder.control.read_text()) == {"max_inflight": 9}
    folder.cap.write_text('{"text": "old"}\n{"text": "9 may be in flight, as asked."}\n{"text": "half')
    assert source.look().cap == "9 may be in flight, as asked."


def test_a_run_that_is_over_takes_no_orders(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 2**22)
    source = FolderSource(folder)
    seen = source.look()
    assert (seen.going_on, seen.over, seen.status) == (False, True, "it was killed")
    assert source.cannot() == ("it was killed", "it was killed")
    with pytest.raises(BadInput, match="no run to stop"):
        source.stop()


def test_an_engine_that_has_only_just_begun_can_be_stopped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    source = FolderSource(folder, child)
    assert (source.look().status, source.look().over) == ("it is starting", False)
    source.stop()
    child.wait(30)
    assert source.look().over


def test_a_folder_in_which_nothing_began_is_waited_for(tmp_path: Path) -> None:
    seen = FolderSource(RunFolder(tmp_path / "nowhere")).look()
    assert (seen.going_on, seen.over, len(seen.frame)) == (False, False, 0)


def test_a_simulated_run_can_be_watched_from_its_first_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "simulated")
    plan = recipe().with_overrides(["engine=sim", "train.steps=12", "sampling.max_completion_length=32"])
    source, seen = FolderSource(folder), list[int]()
    launch(plan, folder, lambda event: seen.append(len(source.look().frame)))
    assert seen[-12:] == list(range(1, 13))
    assert (source.look().over, source.look().status) == (True, "it finished")


def test_a_trackio_run_that_somebody_else_writes_is_watched(tmp_path: Path) -> None:
    source = ProjectSource("shared", "theirs")
    numbers = [{**row} for row in rows()]
    start = datetime.now(UTC) - timedelta(seconds=60)
    waiting = source.look()
    assert (len(waiting.frame), waiting.over) == (0, False)
    assert "trackio project 'shared' does not exist" in waiting.status
    run_id = write_run("shared", "theirs", numbers[:8], [start + timedelta(seconds=n) for n in range(8)])
    assert (len(source.look().frame), source.look().going_on) == (8, True)
    write_run("shared", "theirs", numbers[8:9], [datetime.now(UTC)], run_id=run_id)
    assert len(source.look().frame) == 9
    with pytest.raises(BadInput, match="can only be watched; give its folder"):
        source.stop()


def test_a_trackio_run_that_has_been_silent_for_long_is_over() -> None:
    old = datetime.now(UTC) - timedelta(hours=2)
    write_run("shared", "old", rows()[:8], [old] * 8)
    seen = ProjectSource("shared").look()
    assert (seen.going_on, seen.over) == (False, True)
    assert seen.status == "it logged last 120 minutes ago"
