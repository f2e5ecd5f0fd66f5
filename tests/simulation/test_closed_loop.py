"""The simulator, calibrated on one real run of this machine, against two others: real TRL and real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.long
def test_one_real_run_predicts_two_others(tmp_path: Path) -> None:
    # One server: half the time to start, and the runs are no longer than they have to be.
    command = [sys.executable, "tests/bench/closed_loop.py", "--out", str(tmp_path / "runs"), "--json"]
    done = subprocess.run(
        [*command, "--set", "serve.replicas=1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
