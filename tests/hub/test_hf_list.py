"""The rows of `rlkit jobs list`."""

from __future__ import annotations

import pytest
from huggingface_hub import JobInfo

from rlkit.engines.hf_list import job_rows, total_usd

pytestmark = pytest.mark.hub


def job(stage: str, labels: dict[str, str] | None, flavor: str = "h200", seconds: int = 360) -> JobInfo:
    return JobInfo(
        id="abc",
        flavor=flavor,
        labels=labels,
        status={"stage": stage},
        owner={"id": "0", "name": "me", "type": "user"},
        durations={"runningSecs": seconds},
        endpoint="https://hub",
    )


def test_row_says_what_a_job_is_and_costs() -> None:
    (row,) = job_rows([job("RUNNING", {"run": "r", "role": "replica", "replica": "1"})], {"h200": 5.0})
    assert row.to_dict() == {
        "run": "r",
        "name": "replica-1",
        "stage": "RUNNING",
        "flavor": "h200",
        "minutes": 6.0,
        "usd": 0.5,
        "id": "abc",
        "url": "https://hub/jobs/me/abc",
        "alive": True,
    }


def test_what_is_not_known_is_not_guessed() -> None:
    rows = job_rows([job("ODD", None, flavor="new"), job("ERROR", {"role": "trainer"})], {"h200": 5.0})
    assert [(row.run, row.name, row.usd, row.alive) for row in rows] == [
        ("?", "?", None, True),
        ("?", "trainer", 0.5, False),
    ]
    assert total_usd(rows) == 0.5
