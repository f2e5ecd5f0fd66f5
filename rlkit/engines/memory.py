"""How much memory the jobs of a run take together, at most."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from rlkit.machine import GIB


class PeakMemory:
    """The largest sum that `look` has seen, in GiB; None where the system does not say."""

    def __init__(self) -> None:
        self.gib: float | None = None

    def look(self, pids: Iterable[int]) -> None:
        """Add up these processes and all below them.

        Proportional set size: a page that several processes share (torch's libraries, mostly) is counted once in all.
        """
        total = sum(_proportional_bytes(process) for pid in pids for process in _family(pid))
        if total:
            self.gib = max(self.gib or 0.0, total / GIB)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _proportional_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error, AttributeError):  # AttributeError: only Linux has it
        return int(process.memory_full_info().pss)
    return 0
