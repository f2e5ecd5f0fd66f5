"""Processes that share one computation, and that end with it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


@contextlib.contextmanager
def process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new interpreters whose processes are gone after the block: at once when an error or a stop leaves it.

    The tasks have nothing to finish: what one was at is lost then.
    """
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_leave_stops_to_the_parent)
    try:
        yield pool
    except BaseException:
        # Public from Python 3.14 on, as kill_workers.
        running = list((pool._processes or {}).values())
        # Before its processes end: else the pool takes it for a crash, and stumbles over tasks that map has cancelled.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.kill()
        for process in running:
            process.join()
        raise
    pool.shutdown()


def _leave_stops_to_the_parent() -> None:
    """Ctrl-C, and timeout(1), signal the whole group: processes that end on their own say so, or look like a crash."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
