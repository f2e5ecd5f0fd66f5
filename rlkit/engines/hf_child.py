"""A process inside a Job, which ends with what started it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping


def start_child(
    stack: contextlib.ExitStack, command: list[str], grace_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command`; when `stack` closes it has `grace_s` seconds to end. `environment` adds to this process's."""
    child = subprocess.Popen(command, env={**os.environ, **(environment or {})})
    stack.callback(_end, child, grace_s)
    return child


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
