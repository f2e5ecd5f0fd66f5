"""One job of a run: a process in a group of its own, with a log file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from rlkit.engines.guard import POLL_S, Guard, end_group, group_alive

# What an error shows of a log: enough for a Python traceback's end, short enough to read.
TAIL_LINES = 15
TAIL_BYTES = 16_384


class Job:
    """A started process and everything it started; `stop` ends them all."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path, guard: Guard) -> None:
        self.name, self.log, self._guard = name, log, guard
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
            )
        guard.add(self.pid)

    @property
    def pid(self) -> int:
        """The process's id, which is its group's too."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> None:
        """Return when the process has ended. Raises subprocess.TimeoutExpired."""
        self._process.wait(timeout_s)

    def how_it_ended(self) -> str:
        """The exit code in words."""
        code = self.exit_code
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(stream.tell() - TAIL_BYTES, 0))
            text = stream.read().decode("utf-8", "replace")
            return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
        return ""

    def ask_to_stop(self) -> None:
        """SIGTERM to the process and its children; `stop` then waits for them."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        """End the process and its children: SIGTERM, and SIGKILL after `grace_s` seconds."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        # The leader may be gone while its children live on: a killed trainer leaves its rollout worker.
        if self.exit_code is None or group_alive(self.pid):
            end_group(self.pid, grace_s=0 if self.exit_code is None else 2 * POLL_S)
        self._process.wait()
        self._guard.remove(self.pid)
