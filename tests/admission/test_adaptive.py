from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from law_readings import CAPACITY, LONGEST, Bench, Fluid, run, state

from rlkit.admission.law import Reading, ReplicaState, make_law


def bench(ceiling: int = 512, longest: int = LONGEST) -> Bench:
    return Bench(make_law("rlkit", ceiling=ceiling, max_model_len=longest))


def settled(*servers: Fluid, rollouts: int = 512, readings: int = 400, ceiling: int = 512) -> Bench:
    """One that has governed these servers for a while."""
    law = bench(ceiling)
    run(law, list(servers), readings, rollouts)
    return law


def caps(law: Bench, last: int) -> list[int]:
    return [decision.cap for decision in law.decisions[-last:]]


@pytest.mark.parametrize(
    ("capacity", "ceiling", "cap"), [(CAPACITY, 512, 20), (CAPACITY, 8, 8), (LONGEST - 1, 512, 1), (None, 512, 4)]
)
def test_starts_at_what_certainly_fits(capacity: int | None, ceiling: int, cap: int) -> None:
    decision = bench(ceiling).see(state(capacity=capacity))
    assert (decision.cap, decision.reason) == (cap, "sized")


@pytest.mark.parametrize("tokens", [50, 300, 1000, 4000])
def test_settles_below_a_full_cache_and_stands_still(tokens: int) -> None:
    law = settled(Fluid(tokens), Fluid(tokens), rollouts=5000, ceiling=5000)
    last = caps(law, 100)
    assert max(last) - min(last) <= max(2, 0.06 * min(last))
    fits = 2 * CAPACITY / tokens
    assert 0.5 * fits <= min(last) <= max(last) < 0.97 * fits
    assert not any(decision.waiting for decision in law.decisions)


def test_on_the_way_up_it_does_not_overshoot() -> None:
    law = settled(Fluid(1000), Fluid(1000))
    assert max(caps(law, 400)) <= 1.06 * max(caps(law, 50))


def test_more_rollouts_on_a_replica_need_less_room_each() -> None:
    few, many = settled(Fluid(10_000)), settled(Fluid(100), rollouts=5000, ceiling=5000)
    assert (few.decisions[-1].usage or 0) + 0.15 < (many.decisions[-1].usage or 0)


def test_follows_rollouts_that_become_longer_and_shorter() -> None:
    law = bench()
    servers = [Fluid(1000), Fluid(1000)]
    run(law, servers, 300, 512)
    before = law.law.cap
    for server in servers:
        server.tokens = 2000
    run(law, servers, 200, 512)
    after = law.law.cap
    assert 0.4 * before < after < 0.55 * before
    for server in servers:
        server.tokens = 1000
    run(law, servers, 300, 512)
    assert law.law.cap > 0.9 * before


def test_a_cache_that_never_fills_leaves_the_ceiling() -> None:
    law = settled(Fluid(50), Fluid(50), rollouts=600)
    assert set(caps(law, 300)) == {512}


def test_a_spike_does_not_cut_twice() -> None:
    law = settled(Fluid(1000), Fluid(1000))
    before = law.law.cap
    spike = [state(0.99, running=before // 2)] * 2
    first = law.see(*spike, in_flight=before, completed=before // 8).cap
    after = [law.see(*spike, in_flight=before, completed=0).cap for _ in range(5)]
    assert 0.8 * before <= first < before
    assert after == [first] * 5


def test_a_cut_never_raises_the_cap() -> None:
    law = bench()
    law.see(state())
    # More in flight than the cap: the limit was cut before, and what runs is still more than it allows.
    for waiting in (5, 20):
        before = law.law.cap
        law.see(state(0.4, running=60, waiting=waiting), in_flight=80, completed=5)
        decision = law.see(state(0.4, running=60, waiting=waiting), in_flight=80, completed=5)
        assert decision.cap <= before


def test_the_cap_is_never_below_one_and_grows_again_from_there() -> None:
    law = bench()
    law.see(state(capacity=LONGEST))
    for _ in range(50):
        law.see(state(1.0, running=1, waiting=3, preemptions=7, capacity=LONGEST), in_flight=4, completed=1)
    assert law.law.cap == 1
    for _ in range(200):
        law.see(state(0.05, running=1, capacity=LONGEST), completed=1)
    assert law.law.cap >= 4


@pytest.mark.parametrize("cap", [1, 2, 3, 5])
def test_growth_is_alive_at_small_caps(cap: int) -> None:
    law = bench()
    assert law.see(state(capacity=cap * LONGEST)).cap == cap
    run(law, [Fluid(100, capacity=cap * LONGEST, polls=1)], 100, 512)
    assert law.law.cap > 4 * cap


def test_does_not_grow_while_the_gate_holds_nobody_back() -> None:
    law = settled(Fluid(100), rollouts=10)
    assert law.law.cap == 20


def test_does_not_grow_on_an_idle_engine() -> None:
    law = bench()
    law.see(state(0.0, running=0))
    for _ in range(100):
        assert law.see(state(0.0, running=0), completed=0).cap <= 20


def test_does_not_grow_on_an_engine_that_fails_everything_at_once() -> None:
    law = bench()
    law.see(state(0.0, running=0))
    for _ in range(100):
        assert law.see(state(0.0, running=0), completed=5000).cap <= 20


def test_does_not_grow_while_requests_wait_or_a_replica_is_silent() -> None:
    law = settled(Fluid(1000), Fluid(1000), readings=40)
    law.see(state(0.2, running=20), state(0.2, running=20), completed=10)
    before = law.law.cap
    for seen in ([state(0.2, running=20), state(0.2, running=20, waiting=1)], [state(0.2, running=20), None]):
        for _ in range(4):
            assert law.see(*seen, completed=10).cap <= 1.11 * before


def test_requests_that_keep_waiting_bring_the_cap_down_at_any_usage() -> None:
    """A limit of the server's own, such as max_num_seqs: the cache is a third full and requests wait."""
    law = settled(Fluid(500, max_running=60), readings=600)
    last = caps(law, 100)
    assert 50 <= min(last) <= max(last) <= 66
    assert (law.decisions[-1].usage or 1) < 0.33


def test_requests_that_wait_for_a_moment_do_not() -> None:
    law = settled(Fluid(1000))
    before = law.law.cap
    for waiting in (30, 0, 30, 0):
        law.see(state(0.6, running=60, waiting=waiting), completed=8)
    assert law.law.cap > 0.85 * before


def test_requests_that_wait_in_a_pause_do_not() -> None:
    law = settled(Fluid(1000))
    before = law.law.cap
    for _ in range(20):
        law.see(state(0.7, running=60, waiting=9), completed=0)
    assert law.law.cap >= 0.9 * before


def test_preemptions_make_room_and_the_same_count_does_not_count_again() -> None:
    law, other = settled(Fluid(1000)), settled(Fluid(1000))
    for one, preemptions in ((law, 25), (other, 0)):
        one.see(state(0.95, running=70, preemptions=preemptions), completed=8)
        run(one, [Fluid(1000)], 40, 512)
    assert 0.8 * other.law.cap < law.law.cap < other.law.cap
    assert caps(law, 10)[0] == caps(law, 1)[0]


def test_preemptions_at_every_reading_do_not_drive_it_to_nothing() -> None:
    law = settled(Fluid(1000))
    before = law.law.cap
    for _ in range(500):
        law.see(state(0.95 * law.law.cap / before, running=law.law.cap, preemptions=30), completed=8)
    assert law.law.cap > 0.5 * before


def test_a_pause_that_clears_the_cache_is_not_a_lack_of_it() -> None:
    law, undisturbed = settled(Fluid(1000)), settled(Fluid(1000))
    for _ in range(20):
        running = law.law.cap
        law.see(state(0.1, running=10, waiting=running - 10, preemptions=running), in_flight=running, completed=1)
        law.see(state(0.4, running=40, waiting=running - 40), in_flight=running, completed=4)
        run(law, [Fluid(1000)], 10, 512)
    run(undisturbed, [Fluid(1000)], 240, 512)
    assert law.law.cap > 0.9 * undisturbed.law.cap


def test_a_counter_that_restarts_is_no_signal() -> None:
    law = settled(Fluid(1000))
    before = law.law.cap
    law.see(state(0.7, running=before, preemptions=None, restarted=True), completed=8)
    assert law.law.cap >= 0.95 * before


def test_data_parallel_engines_count_once() -> None:
    """The capacity of a replica is that of all its engines: one of two engines starts as two replicas do."""
    assert bench().see(state(capacity=2 * CAPACITY)).cap == bench().see(state(), state()).cap == 40


def test_holds_the_last_cap_when_readings_stop() -> None:
    law = settled(Fluid(1000))
    before = law.law.cap
    for seen in (None, state(usage=None)):
        for _ in range(30):
            assert law.see(seen, completed=100).cap == before
            assert law.decisions[-1].reason == "blind"
    assert "stays" in law.decisions[-1].text


def test_only_servers_that_never_were_readable_run_at_the_ceiling() -> None:
    law = bench(64)
    assert [law.see(None).cap for _ in range(4)] == [1, 1, 64, 64]
    assert law.decisions[-1].reason == "unmetered"
    assert (law.see(state()).cap, law.decisions[-1].reason) == (20, "sized")


def test_the_worst_replica_decides() -> None:
    law = settled(Fluid(1000), Fluid(1000, capacity=CAPACITY // 2))
    even = settled(Fluid(1000, capacity=CAPACITY // 2), Fluid(1000, capacity=CAPACITY // 2))
    assert law.law.cap == pytest.approx(even.law.cap, rel=0.1)
    assert max(decision.usage or 0 for decision in law.decisions) < 0.9


def test_a_replica_that_joins_raises_the_cap_in_proportion() -> None:
    law = settled(Fluid(1000), Fluid(1000))
    before = law.law.cap
    share = before // 2
    busy = state(share / 100, running=share)
    decision = law.see(busy, busy, state(0.0, running=0), completed=8)
    assert decision.reason == "resized"
    assert decision.cap == pytest.approx(1.5 * before, rel=0.12)
    run(law, [Fluid(1000)] * 3, 200, 512)
    assert law.law.cap == pytest.approx(1.5 * before, rel=0.1)


def test_a_replica_that_joins_with_less_cache_is_not_overrun() -> None:
    law = settled(Fluid(1000))
    before = law.law.cap
    small = Fluid(1000, capacity=CAPACITY // 4)
    law.see(Fluid(1000).load(before), state(0.0, running=0, capacity=small.capacity), completed=8)
    run(law, [Fluid(1000), small], 3, 512)
    assert law.law.cap <= before


def test_a_replica_that_leaves_lowers_the_cap_in_proportion_and_a_missed_reading_does_not() -> None:
    law = settled(Fluid(1000), Fluid(1000))
    before = law.law.cap
    busy = state(before / 200, running=before // 2)
    for _ in range(5):
        assert law.see(busy, None, completed=4).cap >= 0.9 * before
    law.see(busy, busy, completed=4)
    reasons = [law.see(busy, None, completed=4).reason for _ in range(8)]
    assert reasons.count("resized") == 1
    assert law.law.cap == pytest.approx(before / 2, rel=0.15)


def test_says_what_it_did_in_a_sentence_with_its_numbers() -> None:
    law = settled(Fluid(1000))
    changed = next(decision for decision in law.decisions if decision.reason == "grown")
    assert str(changed.cap) in changed.text
    assert "KV usage" in changed.text
    assert changed.to_dict()["cap"] == changed.cap


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.none()
                | st.builds(
                    ReplicaState,
                    usage=st.none() | st.floats(0, 1),
                    running=st.none() | st.integers(0, 300),
                    waiting=st.none() | st.integers(0, 300),
                    waiting_for_capacity=st.none() | st.integers(0, 300),
                    preemptions=st.none() | st.integers(0, 1000),
                    capacity_tokens=st.none() | st.integers(0, 10**7),
                    restarted=st.booleans(),
                ),
                max_size=3,
            ),
            st.integers(0, 600),
            st.integers(0, 600),
            st.integers(0, 1000),
        ),
        max_size=40,
    ),
    st.sampled_from(["published", "rlkit"]),
)
def test_whatever_the_servers_say_the_cap_stays_between_one_and_the_ceiling(
    readings: list[tuple[list[ReplicaState | None], int, int, int]], policy: str
) -> None:
    law = make_law(policy, ceiling=100, max_model_len=1000)  # type: ignore[arg-type]
    for time, (states, in_flight, held, completed) in zip(itertools.count(), readings, strict=False):
        replicas = {str(number): one for number, one in enumerate(states)}
        decision = law.observe(Reading(float(time), replicas, in_flight, held, completed))
        assert 1 <= decision.cap <= 100
        assert decision.cap == law.cap
