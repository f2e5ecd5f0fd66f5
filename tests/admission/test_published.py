from __future__ import annotations

import pytest
from law_readings import CAPACITY, LONGEST, Bench, Fluid, run, state

from rlkit.admission.law import make_law


def bench(ceiling: int = 512, longest: int = LONGEST) -> Bench:
    return Bench(make_law("published", ceiling=ceiling, max_model_len=longest))


def started(cap: int = 20, ceiling: int = 512) -> Bench:
    """One that has begun at this cap."""
    begun = bench(ceiling)
    assert begun.see(state(capacity=cap * LONGEST)).cap == cap
    return begun


@pytest.mark.parametrize(
    ("capacity", "ceiling", "cap"), [(CAPACITY, 512, 20), (CAPACITY, 8, 8), (LONGEST - 1, 512, 1), (2 * LONGEST, 1, 1)]
)
def test_starts_at_the_sequences_that_fit(capacity: int, ceiling: int, cap: int) -> None:
    decision = bench(ceiling).see(state(capacity=capacity))
    assert (decision.cap, decision.reason) == (cap, "sized")


def test_the_start_counts_all_replicas() -> None:
    assert bench().see(state(), state(capacity=50_000)).cap == 30


def test_polls_every_five_seconds() -> None:
    assert bench().law.poll_s == 5.0


def test_usage_above_080_cuts_by_30_percent_once_until_in_flight_has_drained() -> None:
    law = started(20)
    assert law.see(state(0.8)).reason == "held"
    assert (law.see(state(0.81)).cap, law.decisions[-1].reason) == (14, "cut")
    for in_flight in (20, 17, 15):
        assert (law.see(state(0.9), in_flight=in_flight).cap, law.decisions[-1].reason) == (14, "latched")
    assert (law.see(state(0.9), in_flight=14).cap, law.decisions[-1].reason) == (9, "cut")


def test_a_cut_under_which_nothing_has_to_drain_does_not_latch() -> None:
    law = started(20)
    assert [law.see(state(0.9), in_flight=5).cap for _ in range(2)] == [14, 9]


def test_usage_below_060_grows_by_25_percent_once_per_turnover() -> None:
    law = started(20)
    assert law.see(state(0.59), completed=19).cap == 20
    assert (law.see(state(0.59), completed=1).cap, law.decisions[-1].reason) == (25, "grown")
    assert law.see(state(0.3), completed=24).cap == 25
    assert law.see(state(0.3), completed=1).cap == 32


@pytest.mark.parametrize("seen", [state(0.6), state(0.7), state(0.3, waiting=1), state(0.3, waiting=None)])
def test_does_not_grow_otherwise(seen: object) -> None:
    law = started(20)
    assert law.see(seen, completed=1000).cap == 20  # type: ignore[arg-type]


def test_a_cut_begins_the_turnover_anew() -> None:
    law = started(20)
    law.see(state(0.5), completed=15)
    assert law.see(state(0.9), in_flight=14).cap == 14
    assert law.see(state(0.5), completed=13).cap == 14
    assert law.see(state(0.5), completed=1).cap == 18


def test_the_fullest_replica_decides() -> None:
    law = bench()
    law.see(state(), state())
    assert law.see(state(0.1), state(0.85)).cap == 28


def test_growth_is_alive_at_the_smallest_cap_and_a_cut_of_it_stays_at_one() -> None:
    law = started(1)
    assert (law.see(state(1.0)).cap, law.decisions[-1].reason) == (1, "held")
    assert [law.see(state(0.1), completed=9).cap for _ in range(3)] == [2, 3, 4]


def test_never_grows_above_the_ceiling() -> None:
    law = started(20, ceiling=22)
    assert law.see(state(0.1), completed=100).cap == 22
    assert law.see(state(0.1), completed=100).reason == "held"


def test_holds_the_cap_when_nothing_is_readable() -> None:
    law = started(20)
    law.see(state(0.9))
    for seen in (None, state(usage=None)):
        assert (law.see(seen, completed=1000).cap, law.decisions[-1].reason) == (14, "blind")


def test_only_servers_that_never_were_readable_run_at_the_ceiling() -> None:
    law = bench(64)
    assert [law.see(None).cap for _ in range(4)] == [1, 1, 64, 64]
    assert law.decisions[-1].reason == "unmetered"
    assert (law.see(state()).cap, law.decisions[-1].reason) == (20, "sized")


def test_swings_around_what_fits_without_leaving_it() -> None:
    law = bench()
    run(law, [Fluid(1500), Fluid(1500)], readings=400, rollouts=512)
    settled = law.decisions[200:]
    assert all(70 <= decision.cap <= 120 for decision in settled)
    assert all(0.5 < (decision.usage or 0) < 0.9 for decision in settled)
