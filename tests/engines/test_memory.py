"""Peak memory of a family of processes."""

import subprocess
import sys

import psutil
import pytest

from rlkit.engines.memory import PeakMemory

MIB = 2**20


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux tells a process's proportional share")
def test_a_child_counts_and_the_peak_stays() -> None:
    code = f"block = bytearray({80 * MIB}); print('up', flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    family = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert family.stdout is not None
    assert family.stdin is not None
    with family.stdout, family.stdin:
        family.stdout.readline()
        memory = PeakMemory()
        memory.look([family.pid])
        family.stdin.write("\n")
    family.wait()
    assert memory.gib is not None
    peak = memory.gib
    assert peak * 1024 > 80
    memory.look([family.pid])
    assert memory.gib == peak
