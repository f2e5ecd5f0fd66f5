"""What stages and answers mean for a run."""

from __future__ import annotations

import pytest
from huggingface_hub import JobStage
from huggingface_hub._jobs_api import TERMINAL_JOB_STAGES
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines.hf_watch import (
    UNHEALTHY_AFTER,
    JobWatch,
    Limits,
    Reading,
    observe_all,
    phase_of,
    server_problem,
)

pytestmark = pytest.mark.hub

LIMITS = Limits(scheduling_s=600, ready_s=300)


def replica() -> JobWatch:
    return JobWatch("replica-0", "h200", True, LIMITS, started_at=0)


def test_every_stage_of_the_client_is_known() -> None:
    assert {stage for stage in JobStage if phase_of(stage) == "ended"} == set(TERMINAL_JOB_STAGES)
    assert not [stage for stage in JobStage if phase_of(stage) == "unknown"]
    assert phase_of("UPDATING") == "running"


def test_way_to_ready() -> None:
    watch = replica()
    assert watch.observe(1, Reading("SCHEDULING")) == (None, [])
    assert watch.observe(2, Reading("RUNNING", healthy=False)) == (None, ["replica-0 is running"])
    assert watch.observe(3, Reading("RUNNING", healthy=True)) == (None, [])
    assert watch.ready


@pytest.mark.parametrize("stage", ["COMPLETED", "CANCELED", "ERROR", "DELETED"])
def test_end_is_a_failure_with_the_hubs_words(stage: str) -> None:
    failure, _ = replica().observe(1, Reading(stage, "Job failed with exit code: 1"))
    assert failure is not None
    assert failure.text == f"replica-0 ended in stage {stage} (Job failed with exit code: 1)"


def test_scheduling_without_end_names_the_flavor() -> None:
    watch = replica()
    assert watch.observe(600, Reading("SCHEDULING"))[0] is None
    failure, _ = watch.observe(601, Reading("SCHEDULING"))
    assert failure is not None
    assert "h200" in failure.text
    assert "hardware.scheduling_minutes" in failure.text


def test_unknown_stage_is_told_once_and_waited_out() -> None:
    watch = replica()
    failure, told = watch.observe(1, Reading("QUEUED_ON_MARS"))
    assert failure is None
    assert len(told) == 1
    assert "QUEUED_ON_MARS" in told[0]
    assert watch.observe(2, Reading("QUEUED_ON_MARS")) == (None, [])
    assert watch.observe(601, Reading("QUEUED_ON_MARS"))[0] is not None


def test_running_server_that_never_answers() -> None:
    watch = replica()
    watch.observe(100, Reading("RUNNING", healthy=False))
    assert watch.observe(400, Reading("RUNNING", healthy=False))[0] is None
    assert watch.observe(401, Reading("RUNNING", healthy=False))[0] is not None


def test_server_that_stops_answering_gets_three_looks() -> None:
    watch = replica()
    watch.observe(1, Reading("RUNNING", healthy=True))
    assert watch.answers
    looks = [watch.observe(2 + look, Reading("RUNNING", healthy=False))[0] for look in range(UNHEALTHY_AFTER)]
    assert [failure is None for failure in looks] == [True, True, False]
    assert not watch.answers


def test_a_good_look_in_between_forgives() -> None:
    watch = replica()
    for healthy in [True, False, False, True, False, False]:
        assert watch.observe(1, Reading("RUNNING", healthy=healthy))[0] is None


@given(st.lists(st.integers(0, 10_000), min_size=1))
def test_a_hub_that_is_away_ends_no_running_run(times: list[int]) -> None:
    watch = replica()
    watch.observe(0, Reading("RUNNING", healthy=True))
    assert all(watch.observe(now, Reading(None)) == (None, []) for now in sorted(times))


def test_all_failures_are_told_at_once() -> None:
    watches = {name: JobWatch(name, "h200", True, LIMITS, 0) for name in ("replica-0", "replica-1")}
    failures, _ = observe_all(watches, 1, {name: Reading("ERROR") for name in watches})
    assert [failure.job for failure in failures] == ["replica-0", "replica-1"]


GOOD = {
    "vllm_config": {
        "parallel_config": {"data_parallel_size": 1},
        "lora_config": {"max_loras": 6, "max_lora_rank": 8},
    }
}


def changed(section: str, **values: object) -> dict[str, object]:
    config: dict[str, object] = {**GOOD["vllm_config"]}
    before = config[section]
    assert isinstance(before, dict)
    config[section] = {**before, **values}
    return {"vllm_config": config}


def test_server_that_serves_what_is_needed() -> None:
    assert server_problem(GOOD, rank=8, slots=6) is None


@pytest.mark.parametrize(
    ("info", "word"),
    [
        ({}, "vllm_config"),
        (changed("parallel_config", data_parallel_size=2), "data_parallel_size is 2"),
        (changed("lora_config", max_loras=5), "max_loras is 5"),
        (changed("lora_config", max_lora_rank=1), "max_lora_rank is 1"),
        ({"vllm_config": {"parallel_config": {}, "lora_config": None}}, "no adapters"),
    ],
)
def test_server_that_does_not(info: dict[str, object], word: str) -> None:
    assert word in (server_problem(info, rank=8, slots=6) or "")
