from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.serving.prefix_index import DIGEST_BYTES, prefix_chain
from rlkit.serving.prompt_blocks import token_blocks
from rlkit.serving.router import DECISIONS, INDEX_CAPACITY, Decision, Routed, Router

BLOCK = 16
TEMPLATE = list(range(23))  # one whole block and a rest, as the published chat template


def prompt(problem: int, tokens: int) -> tuple[bytes, ...]:
    body = [1000 * (problem + 1) + i for i in range(tokens - len(TEMPLATE))]
    return token_blocks(TEMPLATE + body, BLOCK)


def router(replicas: int = 2, spill_threshold: int = 8, capacity: int = INDEX_CAPACITY) -> Router:
    made = Router(replicas, spill_threshold, capacity=capacity)
    for replica in range(replicas):
        made.set_routable(replica, True)
    return made


def send(to: Router, blocks: tuple[bytes, ...], adapter: str = "trl-policy-v1") -> Routed:
    routed = to.route(adapter, blocks)
    assert routed is not None
    return routed


def occupy(to: Router, replica: int, requests: int) -> Routed:
    """Put unrelated load on one replica; the others must not be less loaded."""
    for _ in range(len(to.in_flight)):
        routed = to.route("other", (), requests)
        assert routed is not None
        if routed.replica == replica:
            return routed
        to.release(routed)
    raise AssertionError(f"replica {replica} is not among the least loaded: {to.in_flight}")


def serve_everywhere(to: Router, blocks: tuple[bytes, ...]) -> None:
    """Let every replica serve a prompt once and end with nothing in flight."""
    opened = [send(to, blocks)]
    while len({routed.replica for routed in opened}) < len(to.in_flight):
        opened.append(send(to, blocks))  # until the first replica is too far ahead and the rest spills
    for routed in opened:
        to.release(routed)


def test_the_published_worked_example() -> None:
    two = router()
    serve_everywhere(two, token_blocks(TEMPLATE, BLOCK))
    occupy(two, 0, 3)
    occupy(two, 1, 3)
    occupy(two, 1, 0)  # the next tie is A's again

    first = send(two, prompt(0, 135))
    assert (first.replica, first.decision) == (0, "unmatched")
    assert two.in_flight == [4, 3]

    second = send(two, prompt(0, 135))
    assert (second.replica, second.decision) == (0, "affinity")
    assert two.in_flight == [5, 3]

    other = send(two, prompt(1, 103))
    assert (other.replica, other.decision) == (1, "unmatched")

    two.release(other)
    while two.in_flight[0] < 12:
        assert send(two, prompt(0, 135)).decision == "affinity"
    assert two.in_flight == [12, 3]

    spilled = send(two, prompt(0, 135))
    assert (spilled.replica, spilled.decision) == (1, "spilled")
    # From here on every block of problem 0 is known to both, so none is specific.
    assert send(two, prompt(0, 135)).decision == "unmatched"


@pytest.mark.parametrize(("ahead", "expected"), [(8, "affinity"), (9, "spilled")])
def test_affinity_holds_up_to_the_threshold(ahead: int, expected: Decision) -> None:
    two = router(spill_threshold=8)
    for _ in range(ahead):
        last = send(two, prompt(0, 135))
        assert last.replica == 0
    assert two.in_flight == [ahead, 0]
    assert send(two, prompt(0, 135)).decision == expected


def test_two_followers_make_a_block_common() -> None:
    two = router()
    assert send(two, prompt(0, 135)).replica == 0
    # Only A has served the template's block, and it has one follower: it still looks specific to A.
    assert send(two, prompt(1, 103)).decision == "affinity"
    # Now it has two followers: a third problem has nothing specific any more.
    assert send(two, prompt(2, 103)).decision == "unmatched"


def test_a_prompt_is_not_its_own_second_follower() -> None:
    two = router()
    send(two, prompt(0, 135))
    for _ in range(3):
        assert send(two, prompt(0, 135)).decision == "affinity"


def test_most_specific_wins_over_fewer_in_flight() -> None:
    three = router(3, spill_threshold=1)
    assert [send(three, prompt(0, 135)).replica for _ in range(2)] == [0, 0]
    half = send(three, prompt(0, 135)[:4])
    assert (half.replica, half.decision) == (1, "spilled")
    occupy(three, 2, 1)
    assert three.in_flight == [2, 1, 1]
    # A has served 8 of the blocks, B 4 and is less loaded.
    again = send(three, prompt(0, 135))
    assert (again.replica, again.decision) == (0, "affinity")


def test_equally_specific_goes_to_fewer_in_flight() -> None:
    three = router(3, spill_threshold=0)
    assert [send(three, prompt(0, 135)).replica for _ in range(2)] == [0, 1]
    occupy(three, 2, 1)
    occupy(three, 0, 2)
    assert three.in_flight == [3, 1, 1]
    again = send(three, prompt(0, 135))
    assert (again.replica, again.decision) == (1, "affinity")


def test_ties_of_least_loaded_go_round_robin() -> None:
    three = router(3)
    assert [send(three, ()).replica for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_round_robin_policy_ignores_prefixes_and_counts_apart() -> None:
    two = Router(2, 8, "round-robin")
    two.set_routable(0, True)
    two.set_routable(1, True)
    routed = [send(two, prompt(0, 135)) for _ in range(4)]
    assert [r.replica for r in routed] == [0, 1, 0, 1]
    assert {r.decision for r in routed} == {"round-robin"}
    assert two.counts.routed == two.counts.of("round-robin") == 4
    assert two.indexed_blocks == 0


def test_only_routable_replicas_are_considered() -> None:
    two = Router(2, 8)
    assert two.route("a", prompt(0, 135)) is None
    two.set_routable(1, True)
    assert [send(two, prompt(0, 135)).replica for _ in range(20)] == [1] * 20
    two.set_routable(1, False)
    assert two.route("a", prompt(0, 135)) is None
    assert two.in_flight == [0, 20]
    assert two.counts.routed == 20


def test_a_replica_to_avoid_is_not_chosen_however_much_it_has() -> None:
    two = router()
    assert send(two, prompt(0, 135)).replica == 0
    second = two.route("trl-policy-v1", prompt(0, 135), avoid=0)
    assert second is not None
    assert (second.replica, second.decision) == (1, "unmatched")
    two.set_routable(1, False)
    assert two.route("trl-policy-v1", prompt(0, 135), avoid=0) is None
    assert two.counts.routed == 2


def test_a_replica_that_comes_back_has_lost_its_cache() -> None:
    two = router()
    assert send(two, prompt(0, 135)).replica == 0
    two.set_routable(0, False)
    two.set_routable(0, True)
    assert send(two, prompt(0, 135)).decision == "unmatched"


def test_a_second_release_changes_nothing() -> None:
    one = router(1)
    routed = send(one, ())
    one.release(routed)
    one.release(routed)
    assert one.in_flight == [0]


def test_sequences_weigh_in_flight() -> None:
    two = router()
    batch = two.route("a", (), sequences=8)
    assert batch is not None
    assert two.in_flight == [8, 0]
    assert two.max_in_flight == 8
    assert two.counts.routed == 1
    two.release(batch)
    assert two.in_flight == [0, 0]
    assert two.max_in_flight == 8


def test_an_unloaded_adapter_leaves_the_index() -> None:
    two = router()
    send(two, prompt(0, 135), "a")
    send(two, prompt(0, 135), "b")
    two.forget_adapter("a")
    two.forget_adapter("never-seen")
    assert two.indexed_blocks == 8
    assert send(two, prompt(0, 135), "a").decision == "unmatched"


def test_the_index_drops_the_ends_of_the_oldest_prompts_first() -> None:
    one = router(1, capacity=10)
    send(one, prompt(0, 135))  # 8 blocks, the first shared with problem 1
    send(one, prompt(1, 103))  # 6 blocks: 13 in all
    assert one.indexed_blocks == 10
    assert one.index.find("trl-policy-v1", prefix_chain("trl-policy-v1", prompt(0, 135))).known_blocks == 5


requests = st.tuples(
    st.sampled_from(["a", "b"]),
    st.lists(st.sampled_from([b"0", b"1", b"2"]), max_size=6).map(tuple),
    st.integers(1, 3),
)
actions = st.one_of(
    requests,
    st.integers(0, 40),  # release the n-th open request
    st.tuples(st.just("routable"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("forget"), st.sampled_from(["a", "b"])),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(actions, max_size=80), st.integers(1, 12), st.integers(0, 4), st.sampled_from(["prefix", "round-robin"])
)
def test_counters_and_index_hold_under_any_sequence(
    steps: list[tuple[object, ...] | int], capacity: int, threshold: int, policy: str
) -> None:
    made = Router(3, threshold, "prefix" if policy == "prefix" else "round-robin", capacity)
    opened: list[Routed] = []
    asked = 0
    for step in steps:
        match step:
            case int():
                if opened:
                    made.release(opened.pop(step % len(opened)))
            case ("routable", int(replica), bool(routable)):
                made.set_routable(replica, routable)
            case ("forget", str(adapter)):
                made.forget_adapter(adapter)
            case (str(adapter), tuple(blocks), int(sequences)):
                before = list(made.in_flight)
                routed = made.route(adapter, blocks, sequences)
                if routed is None:
                    assert not any(made.is_routable(replica) for replica in range(3))
                    continue
                assert made.is_routable(routed.replica)
                if routed.decision in ("spilled", "unmatched"):
                    assert before[routed.replica] == min(before[r] for r in range(3) if made.is_routable(r))
                if routed.decision == "affinity":
                    ahead = before[routed.replica] - min(before[r] for r in range(3) if made.is_routable(r))
                    assert ahead <= threshold
                opened.append(routed)
                asked += 1
        counts = made.counts
        assert counts.routed == sum(counts.of(d) for d in DECISIONS) == sum(counts.on(r) for r in range(3)) == asked
        assert (counts.of("round-robin") if policy == "prefix" else counts.routed - counts.of("round-robin")) == 0
        expected = [sum(r.sequences for r in opened if r.replica == replica) for replica in range(3)]
        assert made.in_flight == expected
        assert made.indexed_blocks <= capacity
        assert sum(len(run.digests) for run in made.index._recent) == made.indexed_blocks * DIGEST_BYTES


def test_round_robin_spreads_evenly() -> None:
    four = router(4)
    spread = [send(four, ()).replica for _ in range(400)]
    assert all((b - a) % 4 == 1 for a, b in pairwise(spread))


def test_the_default_threshold_keeps_groups_together_and_replicas_level() -> None:
    """On the GRPO trace at least 87.2 % of the rollouts find their prompt, and p99 imbalance is at most 14."""
    bench = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "routing.py"))
    assert bench["main"](["--seeds", "1", "--thresholds", "12"]) == 0
