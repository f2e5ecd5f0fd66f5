"""The guard ends listed process groups when its engine is gone, however that happened."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from rlkit.engines.guard import Guard, end_group, group_alive

# A job with a child of its own; both print their pid, and the child ignores SIGTERM as a busy vLLM engine may.
STUBBORN_FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def start_family() -> tuple[subprocess.Popen[str], int]:
    leader = subprocess.Popen(
        [sys.executable, "-c", STUBBORN_FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    with leader.stdout:
        return leader, int(leader.stdout.readline())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_end_group_ends_a_child_that_ignores_sigterm() -> None:
    leader, child = start_family()
    end_group(leader.pid, grace_s=0.2)
    leader.wait()
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=10)
    assert gone(child)


def test_a_killed_engine_leaves_nothing_wherever_it_was_started(tmp_path: Path) -> None:
    # As a notebook's kernel or a user in another folder does: nothing of rlkit is in the working directory.
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE.format(family=STUBBORN_FAMILY)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert engine.stdout is not None
    with engine.stdout:
        family = [psutil.Process(int(pid)) for pid in engine.stdout.readline().split()]
    assert len(family) == 2
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    psutil.wait_procs(family, timeout=20)
    assert all(gone(process.pid) for process in family)


ENGINE = """
import subprocess, sys, time
from rlkit.engines.guard import Guard
with Guard() as guard:
    command = [sys.executable, "-c", '''{family}''']
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    guard.add(job.pid)
    print(job.pid, job.stdout.readline().strip(), flush=True)
    time.sleep(600)
"""


def test_a_removed_group_is_left_alone() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with Guard() as guard:
        guard.add(sleeper.pid)
        guard.remove(sleeper.pid)
    assert sleeper.poll() is None
    assert group_alive(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
