"""What a run's folder says of its run."""

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlkit.engines.lock import RunLock
from rlkit.engines.state import read_state, state_in_words
from rlkit.run_folder import RunFolder


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps("x")])
def test_a_broken_state_file_reads_as_none(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    folder.state.write_text(text)
    assert read_state(folder) == {}
    assert state_in_words(folder) == "it was not started"


@pytest.mark.parametrize(
    ("status", "details", "words"),
    [
        ("running", {}, f"it is running (process {os.getpid()})"),
        ("failed", {"error": "replica-0 exited with code 1:\nlog"}, "it failed: replica-0 exited with code 1"),
        ("failed", {}, "it failed"),
        ("stopped", {}, "it was stopped"),
        ("finished", {"steps": 3}, "it finished"),
    ],
)
def test_how_a_run_stands(tmp_path: Path, status: Any, details: dict[str, Any], words: str) -> None:
    folder = RunFolder(tmp_path / "run")
    with RunLock(folder) as lock:
        lock.note(status, **details)
    assert state_in_words(folder) == words


def test_a_run_whose_engine_is_gone_was_killed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    nobody = next(pid for pid in range(2, 10**6) if not psutil.pid_exists(pid))
    for pid, updated in ((nobody, time.time()), (os.getpid(), psutil.Process().create_time() - 60), ("?", 0)):
        # The second: this process has the number of one that ended before it began.
        folder.state.write_text(json.dumps({"status": "running", "pid": pid, "updated": updated}))
        assert state_in_words(folder) == "it was killed"
