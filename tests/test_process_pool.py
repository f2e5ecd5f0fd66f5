"""A pool's processes end with the block that has them, however it is left."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

# Two processes in the middle of a task when the signal comes.
STOPPED = """
import os, signal, time
from rlkit.process_pool import process_pool
from rlkit.sigterm import sigterm_as_exit
with sigterm_as_exit(), process_pool(2) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    tasks = [pool.submit(time.sleep, 600) for _ in range(8)]
    while sum(task.running() for task in tasks) < 2:
        time.sleep(0.01)
    signal.raise_signal(signal.{name})
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_leaves_no_process_and_no_warning(name: str) -> None:
    script = STOPPED.format(name=name)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if name == "SIGTERM":
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "")
    assert "leaked" not in ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))
