from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from reference_router import ReferenceRouter

from rlkit.serving.prefix_index import DIGEST_BYTES, PrefixIndex, chained_hashes, prefix_chain
from rlkit.serving.router import Routed, Router

RANDOM_REQUESTS = 100_000


@dataclass
class Both:
    """The router and the reference, asked the same and compared after every request."""

    router: Router
    reference: ReferenceRouter

    @classmethod
    def of(cls, replicas: int, threshold: int, capacity: int) -> Both:
        both = cls(Router(replicas, threshold, capacity=capacity), ReferenceRouter(replicas, threshold, capacity))
        for replica in range(replicas):
            both.set_routable(replica, True)
        return both

    def set_routable(self, replica: int, routable: bool) -> None:
        self.router.set_routable(replica, routable)
        self.reference.set_routable(replica, routable)

    def forget(self, adapter: str) -> None:
        self.router.forget_adapter(adapter)
        self.reference.forget_adapter(adapter)

    def route(self, adapter: str, blocks: list[bytes], sequences: int = 1, avoid: int | None = None) -> Routed | None:
        routed = self.router.route(adapter, blocks, sequences, avoid)
        expected = self.reference.route(adapter, blocks, sequences, avoid)
        assert (None if routed is None else (routed.replica, routed.decision)) == expected
        assert self.router.indexed_blocks == len(self.reference.index)
        return routed

    def release(self, routed: Routed) -> None:
        self.router.release(routed)
        self.reference.in_flight[routed.replica] -= routed.sequences

    def check_everything(self) -> None:
        assert self.router.in_flight == self.reference.in_flight
        assert _least_recent_first(self.router.index) == list(self.reference.index)


def _least_recent_first(index: PrefixIndex) -> list[bytes]:
    starts = [(run.digests, at) for run in index._recent for at in range(len(run.digests) - DIGEST_BYTES, -1, -16)]
    return [digests[at : at + DIGEST_BYTES] for digests, at in starts]


def prompt(dice: random.Random) -> list[bytes]:
    """Templates, problems, conversations that go on, prompts that part in the middle: all lengths from none."""
    template = [b"template"] if dice.random() < 0.9 else [b"other", b"template"]
    problem = dice.randrange(60)
    return template + [b"%d-%d-%d" % (problem, i, dice.random() < 0.05) for i in range(dice.randrange(9))]


def test_the_decisions_are_those_of_the_published_rule() -> None:
    """100,000 random requests in ten settings, with evictions, unloads, replicas that come and go, second choices."""
    evicted = 0
    decisions = set()
    for seed in range(10):
        dice = random.Random(seed)
        both = Both.of(dice.choice([1, 2, 4, 5]), dice.choice([0, 2, 8, 12]), dice.choice([3, 40, 200, 600]))
        replicas = len(both.router.in_flight)
        opened: list[Routed] = []
        for _ in range(RANDOM_REQUESTS // 10):
            while opened and dice.random() < 0.5:
                both.release(opened.pop(dice.randrange(len(opened))))
            if dice.random() < 0.01:
                both.set_routable(dice.randrange(replicas), dice.random() < 0.7)
            if dice.random() < 0.003:
                both.forget(dice.choice("abc"))
            avoid = dice.randrange(replicas) if dice.random() < 0.05 else None
            blocks = prompt(dice)
            before = both.router.indexed_blocks
            routed = both.route(dice.choice("abc"), blocks, dice.choice([1, 1, 1, 2]), avoid)
            if routed is not None:
                opened.append(routed)
                decisions.add(routed.decision)
            evicted += before + len(blocks) > both.router.indexed_blocks == both.router.index._capacity
        both.check_everything()
    assert decisions == {"affinity", "spilled", "unmatched"}
    assert evicted > RANDOM_REQUESTS / 100


steps = st.one_of(
    st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from([b"0", b"1", b"2"]), max_size=6), st.integers(1, 2)),
    st.integers(0, 40),  # release the n-th open request
    st.tuples(st.just("routable"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("forget"), st.sampled_from("ab")),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=60), st.integers(1, 12), st.integers(0, 4))
def test_any_sequence_is_decided_as_the_reference_decides_it(
    sequence: list[tuple[object, ...] | int], capacity: int, threshold: int
) -> None:
    both = Both.of(3, threshold, capacity)
    opened: list[Routed] = []
    for step in sequence:
        match step:
            case int() if opened:
                both.release(opened.pop(step % len(opened)))
            case ("routable", int(replica), bool(routable)):
                both.set_routable(replica, routable)
            case ("forget", str(adapter)):
                both.forget(adapter)
            case (str(adapter), list(blocks), int(sequences)):
                routed = both.route(adapter, blocks, sequences)
                if routed is not None:
                    opened.append(routed)
        both.check_everything()


def test_hashes_name_a_prefix_under_one_adapter() -> None:
    blocks = [b"%d" % i for i in range(8)]
    hashes = chained_hashes("a", blocks)
    assert len(hashes) == len(set(hashes)) == 8
    assert chained_hashes("a", blocks[:3]) == hashes[:3]
    assert not set(hashes) & set(chained_hashes("b", blocks))
    swapped = chained_hashes("a", [blocks[0], blocks[2], blocks[1]])
    assert swapped[0] == hashes[0]
    assert not set(swapped[1:]) & set(hashes)
    assert prefix_chain("a", blocks) == b"".join(hashes)


def test_a_prompt_seen_before_is_found_in_two_steps_however_long_it_is() -> None:
    index = PrefixIndex(100_000)
    chains = [prefix_chain("a", [b"template", *(b"%d-%d" % (n, i) for i in range(1000))]) for n in range(3)]
    for chain in chains:
        index.record(index.find("a", chain), 0)
    path = index.find("a", chains[1])
    assert (len(path.runs), path.known_blocks) == (2, 1001)


def test_an_index_of_one_prompt_takes_little_more_than_its_hashes() -> None:
    index = PrefixIndex(100_000)
    index.record(index.find("a", prefix_chain("a", [b"%d" % i for i in range(5000)])), 0)
    assert index.blocks == 5000
    assert len(index._recent) == 1


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    index = PrefixIndex(100)
    for adapter in "ab":
        for n in range(5):
            index.record(index.find(adapter, prefix_chain(adapter, [b"template", b"%d" % n])), 0)
    index.forget_adapter("a")
    index.forget_adapter("never seen")
    assert (index.blocks, len(index._recent), list(index._roots)) == (6, 6, ["b"])
    index.forget_adapter("b")
    assert (index.blocks, len(index._recent), list(index._roots)) == (0, 0, [])


def test_an_evicted_adapter_leaves_nothing_behind() -> None:
    index = PrefixIndex(3)
    index.record(index.find("a", prefix_chain("a", [b"0", b"1"])), 0)
    index.record(index.find("b", prefix_chain("b", [b"0", b"1", b"2"])), 0)
    assert list(index._roots) == ["b"]
    index.record(index.find("c", prefix_chain("c", [b"%d" % i for i in range(10)])), 0)
    assert (index.blocks, list(index._roots)) == (3, ["c"])
