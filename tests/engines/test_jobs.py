"""A job ends with all its children, and its log's end can be told."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlkit.engines.guard import Guard
from rlkit.engines.jobs import Job


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard() as running:
        yield running


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_log_and_exit_code(tmp_path: Path, guard: Guard) -> None:
    job = Job(
        "job", python("import sys; print('one'); print(); print('two'); sys.exit(4)"), {}, tmp_path / "l/a.log", guard
    )
    job.wait(10)
    assert job.how_it_ended() == "exited with code 4"
    assert job.tail() == "one\ntwo"
    assert job.tail(1) == "two"
    job.stop(1)


def test_environment_reaches_the_job(tmp_path: Path, guard: Guard) -> None:
    job = Job("job", python("import os; print(os.environ['COLOUR'])"), {"COLOUR": "blue"}, tmp_path / "a.log", guard)
    job.wait(10)
    assert job.tail() == "blue"
    job.stop(1)


def test_a_second_job_appends_to_the_log(tmp_path: Path, guard: Guard) -> None:
    for word in ("first", "second"):
        job = Job("job", python(f"print('{word}')"), {}, tmp_path / "a.log", guard)
        job.wait(10)
        job.stop(1)
    assert (tmp_path / "a.log").read_text() == "first\nsecond\n"


def test_stop_ends_the_children_of_a_job_that_is_gone(tmp_path: Path, guard: Guard) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    job = Job("job", python(code), {}, tmp_path / "a.log", guard)
    job.wait(10)
    child = psutil.Process(int(job.tail()))
    job.stop(1)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_killed_job_says_so(tmp_path: Path, guard: Guard) -> None:
    job = Job("job", python("import time; time.sleep(600)"), {}, tmp_path / "a.log", guard)
    assert job.how_it_ended() == "is running"
    psutil.Process(job.pid).kill()
    job.wait(10)
    assert job.how_it_ended() == "was killed by SIGKILL"
    job.stop(1)


def test_a_command_that_does_not_exist_is_told(tmp_path: Path, guard: Guard) -> None:
    with pytest.raises(FileNotFoundError):
        Job("job", ["/nowhere/at/all"], {}, tmp_path / "a.log", guard)


def test_stop_is_a_sigterm_first(tmp_path: Path, guard: Guard) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print('up', flush=True)
time.sleep(600)"""
    job = Job("job", python(code), {}, tmp_path / "a.log", guard)
    with subprocess.Popen(["tail", "-f", "-n", "+1", str(job.log)], stdout=subprocess.PIPE) as follow:
        assert follow.stdout is not None
        follow.stdout.readline()
        follow.kill()
    job.stop(10)
    assert job.exit_code == 7
