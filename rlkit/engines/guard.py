"""Ends the jobs when the engine cannot: a small process that outlives a killed one.

The engine writes the process group of each job it starts (`+<pgid>`) and of each that ended (`-<pgid>`) into the
guard's standard input. When that pipe closes, however the engine ended, the guard ends every group still listed. A
group rather than a process, since vLLM and the rollout worker have children of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import TracebackType

# Long enough for vLLM to release its sockets on SIGTERM, short enough that nobody takes the machine for stuck.
GRACE_S = 3.0
POLL_S = 0.1


class Guard:
    """The engine's side: a context manager around the guard process."""

    def __enter__(self) -> Guard:
        # As a file, since it needs the standard library alone: `-m rlkit...` would depend on the working directory (an
        # editable install is found through site, not through a path) and import half of rlkit first.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal must not reach it
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def add(self, pgid: int) -> None:
        """A job started."""
        self._tell(f"+{pgid}")

    def remove(self, pgid: int) -> None:
        """A job and all its children ended."""
        self._tell(f"-{pgid}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def end_group(pgid: int, grace_s: float = GRACE_S) -> None:
    """SIGTERM to a process group, SIGKILL to what is left of it after `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    _signal(pgid, signal.SIGTERM)
    while group_alive(pgid) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal(pgid, signal.SIGKILL)


def group_alive(pgid: int) -> bool:
    """Whether any process of the group exists (a zombie nobody reaped counts)."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _signal(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def main() -> None:
    """Read groups until the pipe closes, then end those still listed."""
    groups: dict[int, None] = {}
    for line in sys.stdin:
        pgid = int(line[1:])
        if line.startswith("+"):
            groups[pgid] = None
        else:
            groups.pop(pgid, None)
    # Last started, first ended: the trainer before the proxy before the replicas.
    for pgid in reversed(groups):
        _signal(pgid, signal.SIGTERM)
    for pgid in reversed(groups):
        end_group(pgid)


if __name__ == "__main__":
    main()
