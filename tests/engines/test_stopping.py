"""A run is ended from outside by its folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkit.engines.state import is_going_on
from rlkit.engines.stopping import ask_to_stop, first_stop_held_back
from rlkit.errors import BadInput
from rlkit.run_folder import RunFolder
from rlkit.sigterm import sigterm_as_exit

# Unwinds as an engine does, and says so.
ENGINE = """
import signal, sys, time
from pathlib import Path
from rlkit.engines.lock import RunLock
from rlkit.run_folder import RunFolder
from rlkit.sigterm import sigterm_as_exit
with RunLock(RunFolder(Path(sys.argv[1]))) as lock, sigterm_as_exit():
    lock.note("running")
    try:
        print("ready", flush=True)
        signal.pause()
    except SystemExit:
        lock.note("stopped")
        raise
"""


def test_the_engine_that_runs_in_a_folder_unwinds(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-c", ENGINE, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        assert is_going_on(folder)
        assert ask_to_stop(folder) == engine.pid
        assert engine.wait(30) == 128 + signal.SIGTERM
    assert json.loads(folder.state.read_text())["status"] == "stopped"
    assert not is_going_on(folder)


def test_a_signal_that_is_repeated_does_not_interrupt_the_unwinding() -> None:
    """A Jupyter kernel that is shut down sends it again and again."""
    cleaned = []

    def stopped() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(SystemExit) as ended, sigterm_as_exit():
        stopped()
    assert cleaned
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_first_stop_waits_for_the_end_of_what_must_be_finished() -> None:
    done = []

    def work(first: int) -> None:
        with sigterm_as_exit(), first_stop_held_back():
            for _ in range(3):
                signal.raise_signal(first)
                if first == signal.SIGINT:
                    break
            done.append(first)

    with pytest.raises(SystemExit):
        work(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        work(signal.SIGINT)
    assert done == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_ctrl_c_after_the_first_stop_gets_through() -> None:
    done = []

    def impatient() -> None:
        with first_stop_held_back():
            signal.raise_signal(signal.SIGINT)
            done.append("held back")
            signal.raise_signal(signal.SIGINT)
            done.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        impatient()
    assert done == ["held back"]


def test_where_nothing_runs_there_is_nothing_to_stop(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(BadInput, match="no run to stop, it was not started"):
        ask_to_stop(folder)
    gone = {"status": "running", "pid": 2**22, "updated": time.time()}
    folder.state.write_text(json.dumps(gone))
    with pytest.raises(BadInput, match="no run to stop, it was killed"):
        ask_to_stop(folder)
