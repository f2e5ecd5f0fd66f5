"""What is said of work that takes a while."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from rlkit import terminal


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What stderr gets where no terminal is."""
    file = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=file, soft_wrap=True))
    return file


def test_work_that_takes_a_while_is_one_line(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    say = terminal.say

    def tell(text: str, console: Console) -> None:
        say(text, console)
        told.set()

    monkeypatch.setattr(terminal, "say", tell)
    monkeypatch.setattr(terminal, "QUIET_S", 0.0)
    with terminal.working("simulating [this]"):
        assert told.wait(60)
    assert shown.getvalue() == "simulating [this] ...\n"


def test_quick_work_is_not_told(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "QUIET_S", 3600.0)
    with terminal.working("simulating") as told:
        told(1, 2)
    with pytest.raises(KeyboardInterrupt), terminal.working("simulating"):
        raise KeyboardInterrupt
    assert shown.getvalue() == ""
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_how_much_is_done_is_a_line_now_and_then(shown: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "QUIET_S", 3600.0)
    monkeypatch.setattr(terminal, "COUNT_EVERY_S", 0.0)
    with terminal.working("simulating") as told:
        told(1, 2)
        told(2, 2)
    assert shown.getvalue() == "simulating: 1 of 2\nsimulating: 2 of 2\n"


def test_a_terminal_has_a_spinner_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=file, force_terminal=True, width=80))
    with terminal.working("simulating [this]") as told:
        told(3, 8)
    assert "simulating [this] 3 of 8 " in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")
