from __future__ import annotations

import pytest

from rlkit.admission.law import Reading, ReplicaState, decide
from rlkit.admission.readings import PageReader
from rlkit.admission.spread import RECENT_READINGS, SpeedMeter, load_spread, speed_spread


def states(*speeds: float | None) -> list[ReplicaState]:
    return [ReplicaState(running=4, waiting=0, tokens_each=speed) for speed in speeds]


def test_a_replica_of_half_the_speed_is_half_behind_the_others() -> None:
    assert speed_spread(states(10.0, 10.0, 5.0)) == pytest.approx(0.5)
    assert speed_spread(states(10.0, 10.0)) == 0.0


@pytest.mark.parametrize("speeds", [(), (10.0,), (10.0, None), (0.0, 0.0)])
def test_nothing_is_said_of_one_replica_or_of_silent_or_standing_ones(speeds: tuple[float | None, ...]) -> None:
    assert speed_spread(states(*speeds)) is None


def test_load_counts_what_runs_and_what_waits() -> None:
    busy, idle = ReplicaState(running=10, waiting=5), ReplicaState(running=5, waiting=0)

    assert load_spread([busy, idle]) == 1.0
    assert load_spread([busy, ReplicaState(running=1)]) is None
    assert load_spread([idle]) is None


def test_tokens_are_those_of_a_request_that_ran_over_the_last_readings() -> None:
    meter = SpeedMeter()

    assert meter.note("0", None, None, 2) is None
    assert meter.note("0", 300, 2, 4) == 100.0
    assert meter.note("0", None, 4, 4) == 100.0
    assert meter.note("0", -1, 4, 4) == 100.0
    assert meter.note("0", 100, 1, 1) == 100.0
    assert meter.note("0", 0, 4, 4) == 50.0
    for _ in range(RECENT_READINGS):
        latest = meter.note("0", 10, 1, 1)
    assert latest == 10.0
    assert SpeedMeter().note("0", 0, 0, 0) is None


def page(first: tuple[int, int], second: tuple[int, int] | None) -> str:
    """What the proxy merges: running requests and generated tokens of each replica."""
    rows = {"0": first, "1": second}
    known = {name: row for name, row in rows.items() if row is not None}
    running = [f'vllm:num_requests_running{{replica="{name}"}} {row[0]}' for name, row in known.items()]
    tokens = [f'vllm:generation_tokens_total{{replica="{name}"}} {row[1]}' for name, row in known.items()]
    gauge, counter = "# TYPE vllm:num_requests_running gauge", "# TYPE vllm:generation_tokens counter"
    return "\n".join([gauge, *running, counter, *tokens]) + "\n"


def spread_of(reader: PageReader, text: str | None) -> float | None:
    return decide(Reading(0.0, reader.read(text), 0, 0, 0), 1, "fixed", "").speed_spread


def test_two_pages_in_a_row_say_which_replica_is_slow() -> None:
    reader = PageReader()

    assert spread_of(reader, page((2, 100), (2, 100))) is None
    assert spread_of(reader, page((2, 300), (2, 150))) == pytest.approx(0.75)


def test_a_replica_that_missed_a_page_is_not_compared_over_another_time() -> None:
    reader = PageReader()
    reader.read(page((2, 100), (2, 100)))

    assert spread_of(reader, page((2, 200), None)) is None  # one does not say
    assert spread_of(reader, page((2, 300), (2, 300))) is None  # and has counted for twice as long
    assert spread_of(reader, page((2, 400), (2, 400))) == 0.0
