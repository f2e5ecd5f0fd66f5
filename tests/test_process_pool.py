"""A pool's processes end with the block that has them, however it is left."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

# Processes in the middle of a task when the signal comes, and more tasks that wait.
STOPPED = """
import os, signal, threading, time
from rlkit.process_pool import process_pool
from rlkit.sigterm import sigterm_as_exit
with sigterm_as_exit(), process_pool(2) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    task = pool.submit(time.sleep, 600)
    def stop():
        while not task.running():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.{name})
    threading.Thread(target=stop).start()
    list(pool.map(time.sleep, [600] * 8))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_leaves_no_process_and_no_warning(name: str) -> None:
    script = STOPPED.format(name=name)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if name == "SIGTERM":
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "")
    else:
        assert ended.stderr.count("Traceback") == 1  # of KeyboardInterrupt, which the command line tells in a line
    assert "leaked" not in ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))
