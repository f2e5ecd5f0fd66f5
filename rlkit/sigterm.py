"""SIGTERM as an exit that unwinds: what a command or an engine has begun is ended, as by Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

TERMINATED = 128 + signal.SIGTERM  # what a shell expects of a program that SIGTERM ended


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Let `kill <pid>` unwind as Ctrl-C does, so that processes are stopped and the state is noted.

    In a block inside another one, and in another thread than the main one, nothing changes.
    """
    inside = signal.getsignal(signal.SIGTERM) is _exit_now
    if inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _exit_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit_now(number: int, frame: object) -> NoReturn:
    # A Jupyter kernel that is shut down repeats the signal within milliseconds: once is enough, jobs take longer.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
