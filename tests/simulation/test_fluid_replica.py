from __future__ import annotations

import math
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.simulation.replica import Capacity, FluidReplica, Rates, Sequence

RATES = Rates(base_s=0.01, sequence_s=0.001, token_s=1e-5, prefill_token_s=1e-4)
ROOMY = Capacity(kv_tokens=1e6)
names = count()


def sequence(prompt: int = 32, completion: int = 100, name: int | None = None) -> Sequence:
    return Sequence((next(names) if name is None else name, 0), prompt, completion)


def run(replica: FluidReplica, until: float = math.inf) -> list[tuple[float, Sequence]]:
    ended = []
    while replica.next_at <= until and replica.next_at < math.inf:
        now = replica.next_at
        ended += [(now, one) for one in replica.fire(now)]
    return ended


def test_one_sequence_takes_the_sum_of_its_iterations() -> None:
    replica = FluidReplica(RATES, ROOMY)
    replica.submit(0.0, sequence(prompt=32, completion=100))
    [(at, _)] = run(replica)
    # Prefill, then 100 iterations over a context that grows by one each.
    decode = sum(0.01 + 0.001 + 1e-5 * (32 + k + 0.5) for k in range(100))
    assert at == pytest.approx(32 * 1e-4 + decode, rel=1e-9)
    assert (replica.running, replica.finished) == (0, 1)
    assert 0.0 <= replica.usage < 1e-9


def test_time_may_pass_in_any_pieces() -> None:
    ends = []
    for pieces in (1, 7, 100):
        replica = FluidReplica(RATES, ROOMY)
        replica.submit(0.0, sequence())
        replica.submit(0.0, sequence(completion=150))
        for piece in range(pieces):
            replica.advance(0.9 * piece / pieces)
        ends.append([at for at, _ in run(replica)])
    assert ends[1] == pytest.approx(ends[0])
    assert ends[2] == pytest.approx(ends[0])


def test_a_newcomer_s_prefill_stalls_everybody() -> None:
    alone, joined = FluidReplica(RATES, ROOMY), FluidReplica(RATES, ROOMY)
    for replica in (alone, joined):
        replica.submit(0.0, sequence(completion=100))
    joined.submit(0.5, sequence(prompt=3200, completion=1000))
    first = run(joined, until=20.0)[0][0]
    assert first > run(alone)[0][0] + 3200 * 1e-4


def test_the_last_admitted_is_preempted_first_and_the_head_waits_alone() -> None:
    replica = FluidReplica(RATES, Capacity(kv_tokens=640))
    old, young, late = sequence(completion=400), sequence(completion=400), sequence(completion=10)
    replica.submit(0.0, old)
    replica.submit(0.0, young)
    while replica.preemptions == 0:
        assert replica.fire(replica.next_at) == []
    assert list(replica.waiting) == [young]
    assert young.generated > 0
    replica.submit(replica.next_at, late)
    # The short one would fit, but it is not at the head.
    assert [one for _, one in run(replica)][:1] == [old]
    assert late.generated == 10


def test_preempted_blocks_come_back_from_the_cache_while_nobody_has_overwritten_them() -> None:
    replica = FluidReplica(RATES, ROOMY)
    first = sequence(completion=500)
    replica.submit(0.0, first)
    replica.advance(2.0)
    replica._put_back(first)
    computed = replica.prefill_tokens
    replica.pause(2.0, clear_cache=False)
    replica.resume(2.0)
    assert replica.prefill_tokens - computed <= 16


def test_a_pause_stops_the_clock_and_keeps_everything() -> None:
    through, paused = FluidReplica(RATES, ROOMY), FluidReplica(RATES, ROOMY)
    for replica in (through, paused):
        replica.submit(0.0, sequence())
    paused.pause(0.4, clear_cache=False)
    assert paused.next_at == math.inf
    paused.resume(5.4)
    assert run(paused)[0][0] == pytest.approx(run(through)[0][0] + 5.0)
    assert paused.preemptions == 0


def test_clearing_the_cache_preempts_everybody_in_their_order() -> None:
    replica = FluidReplica(RATES, ROOMY)
    sequences = [sequence() for _ in range(5)]
    for one in sequences:
        replica.submit(0.0, one)
    replica.pause(0.5, clear_cache=True)
    assert (replica.preemptions, replica.running, replica.usage) == (5, 0, 0.0)
    assert list(replica.waiting) == sequences
    computed = replica.prefill_tokens
    replica.resume(0.6)
    recomputed = replica.prefill_tokens - computed
    assert recomputed == pytest.approx(sum(32 + one.generated for one in sequences))


def test_rollouts_of_one_prompt_share_its_blocks() -> None:
    apart, together = FluidReplica(RATES, ROOMY), FluidReplica(RATES, ROOMY)
    for number in range(8):
        apart.submit(0.0, sequence(prompt=160, name=number + 10_000))
        together.submit(0.0, sequence(prompt=160, name=20_000))
    assert together.usage < apart.usage
    assert together.cached_tokens == pytest.approx(7 * 159, rel=0.01)


def test_no_more_run_than_the_server_allows() -> None:
    replica = FluidReplica(RATES, Capacity(kv_tokens=1e6, max_num_seqs=3))
    for _ in range(5):
        replica.submit(0.0, sequence())
    assert (replica.running, len(replica.waiting)) == (3, 2)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 300), st.floats(0, 2)), min_size=1, max_size=30),
    st.sampled_from([600, 1200, 5000]),
    st.booleans(),
)
def test_every_sequence_ends_and_every_block_comes_back(
    requests: list[tuple[int, int, float]], kv_tokens: int, clears: bool
) -> None:
    replica = FluidReplica(RATES, Capacity(kv_tokens=float(kv_tokens)))
    now, submitted, ended = 0.0, [], []
    for number, (prompt, completion, gap) in enumerate(requests):
        now += gap
        ended += [one for _, one in run(replica, until=now)]
        submitted.append(sequence(prompt, completion))
        replica.submit(now, submitted[-1])
        assert replica.running == 1 or replica._used <= replica._blocks + 1e-6
        if number % 5 == 4:
            replica.pause(now, clears)
            now += 0.1
            replica.resume(now)
    ended += [one for _, one in run(replica)]
    assert sorted(map(id, ended)) == sorted(map(id, submitted))
    assert replica.running == 0
    assert not replica.waiting
    assert 0.0 <= replica.usage < 1e-6
    assert replica.finished == len(submitted)
