"""`rlkit stop` and `rlkit cap`, at a process that takes the signal as an engine does and at a folder's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_live import folder_with
from typer.testing import CliRunner

from rlkit.cli import app

# The engine's part: it notes itself, unwinds at SIGTERM, and notes how it ended.
ENGINE = """
import json, os, pathlib, sys, time
from rlkit.sigterm import sigterm_as_exit
state = pathlib.Path(sys.argv[1])
note = lambda status: state.write_text(json.dumps({"status": status, "pid": os.getpid(), "updated": time.time()}))
with sigterm_as_exit():
    try:
        note("running")
        print("noted", flush=True)
        time.sleep(60)
    finally:
        note("stopped")
"""


def rlkit(*arguments: str | Path) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [str(one) for one in arguments])
    return ended.exit_code, ended.output


@pytest.mark.parametrize("as_json", [True, False])
def test_a_run_is_stopped_from_another_terminal(tmp_path: Path, as_json: bool) -> None:
    folder = folder_with(tmp_path, os.getpid())
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(folder.state)], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    with engine.stdout:
        assert engine.stdout.readline() == "noted\n"
        code, said = rlkit("stop", folder.path, *(["--json"] if as_json else []))
    assert code == 0, said
    if as_json:
        assert json.loads(said) == {"folder": str(folder.path), "pid": engine.pid, "stopped": True}
    else:
        assert said == f"{folder.path}: it was stopped; `rlkit run {folder.path}` resumes it\n"
    assert json.loads(folder.state.read_text())["status"] == "stopped"
    engine.wait(10)


def test_where_nothing_runs_nothing_is_stopped(tmp_path: Path) -> None:
    code, said = rlkit("stop", tmp_path / "nowhere")
    assert (code, "no such run; give a run's folder, or the name of a run under" in said) == (2, True)
    code, said = rlkit("stop", folder_with(tmp_path, 2**22).path)
    assert (code, "no run to stop, it was killed" in said) == (2, True)


def test_the_cap_is_held_lower_and_let_go(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, os.getpid())
    code, said = rlkit("cap", folder.path, "5")
    assert (code, said) == (0, "at most 5 rollouts are admitted from the next reading of the servers on\n")
    assert json.loads(folder.control.read_text()) == {"max_inflight": 5}
    code, said = rlkit("cap", folder.path, "auto", "--json")
    assert (code, json.loads(said)) == (0, {"folder": str(folder.path), "max_inflight": None})
    assert json.loads(folder.control.read_text()) == {"max_inflight": None}


@pytest.mark.parametrize(
    ("most", "said"),
    [
        ("65", "outside 1 to 64"),
        ("0", "outside 1"),
        ("few", "or auto"),
        ("-3", "'-3': give a whole number of rollouts, 1 or more, or auto"),
        ("2.5", "'2.5': give a whole number"),
        ("--jsn", "'--jsn': give a whole number"),
    ],
)
def test_a_limit_that_is_none_changes_nothing(tmp_path: Path, most: str, said: str) -> None:
    folder = folder_with(tmp_path, os.getpid())
    code, output = rlkit("cap", folder.path, most)
    assert (code, said in output) == (2, True), output
    assert not folder.control.exists()


def test_a_run_that_is_over_has_no_cap_to_change(tmp_path: Path) -> None:
    code, said = rlkit("cap", folder_with(tmp_path, 2**22).path, "5")
    assert (code, "no run whose cap could be changed, it was killed" in said) == (2, True)
