"""Processes that share one computation, and that end with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


@contextlib.contextmanager
def process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new interpreters whose processes are gone after the block: at once when an error or a stop leaves it.

    The tasks have nothing to finish: what one was at is lost then.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            # Public from Python 3.14 on, as terminate_workers. The pool takes it for a crash, and leaves the rest.
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
