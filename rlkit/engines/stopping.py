"""How a run is ended from outside: the signal that its engine takes as Ctrl-C, and who sends it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import psutil

from rlkit.engines.state import is_going_on, read_state, state_in_words
from rlkit.errors import BadInput
from rlkit.run_folder import RunFolder


def ask_to_stop(folder: RunFolder) -> int:
    """End the run in `folder` as Ctrl-C would: its jobs are stopped, and the folder can be resumed; the engine's pid.

    Returns at once, the jobs take some seconds. Raises BadInput when nothing runs there.
    """
    if not is_going_on(folder):
        raise BadInput(f"{folder.path}: no run to stop, {state_in_words(folder)}")
    pid = int(read_state(folder)["pid"])
    # A run inside this very process (a notebook's cell) ends as its cell does when it is interrupted.
    wanted = signal.SIGINT if pid == os.getpid() else signal.SIGTERM
    try:
        psutil.Process(pid).send_signal(wanted)
    except psutil.Error as error:
        raise BadInput(f"{folder.path}: cannot stop process {pid}: {error}") from None
    return pid


@contextlib.contextmanager
def first_stop_held_back() -> Iterator[None]:
    """Finish the block before a Ctrl-C or SIGTERM is raised; only a Ctrl-C after it gets through at once.

    In another thread than the main one nothing is held back: no signal reaches it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that is ignored stays so: who started this process wanted that. None: no handler of Python's.
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    previous = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
    held: list[int] = []

    def hold(number: int, frame: object) -> None:
        held.append(number)
        # A SIGTERM that is repeated within milliseconds is a kernel's (rlkit.sigterm); a person who repeats has waited.
        if signal.SIGINT in previous:
            signal.signal(signal.SIGINT, previous[signal.SIGINT])

    for number in previous:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])
