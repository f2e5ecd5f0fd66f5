"""How the command is stopped: while it imports what it needs, and later."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rlkit import doctor
from rlkit.cli import app

# Sends Ctrl-C when a module is first asked for, as early or late as one likes.
INTERRUPTED_AT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
sys.argv = ["rlkit", "doctor"]
from rlkit.console import main
main()
"""


@pytest.mark.parametrize("module", ["rlkit.cli", "typer", "rlkit.terminal", "rlkit.doctor"])
def test_interrupted_while_importing(module: str) -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_AT.format(module=module)], capture_output=True, text=True)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert ended.stderr.strip().endswith("stopped")
    assert len(ended.stderr.strip().splitlines()) == 1


def test_command_runs() -> None:
    ended = subprocess.run([sys.executable, "-m", "rlkit", "--help"], capture_output=True, text=True)
    assert ended.returncode == 0
    assert "doctor" in ended.stdout


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_says_so_in_one_line(
    number: signal.Signals, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped() -> list[doctor.Line]:
        signal.raise_signal(number)
        return []

    monkeypatch.setattr(doctor, "examine", stopped)
    ended = CliRunner().invoke(app, ["doctor"])
    assert (ended.exit_code, ended.stdout, ended.stderr) == (exit_code, "", "rlkit: stopped\n")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
