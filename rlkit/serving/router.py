"""Which replica a request goes to: the published prefix rule, and round robin to compare with.

Pure: no sockets, clocks or tasks. The proxy, the simulator and the tests share this one implementation. The rule keeps
the rollouts of one problem on one replica, where their prompt is already in vLLM's prefix cache, and does not let what
every prompt has in common (chat template, shared few-shot text) pull all of them to the same place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

Policy = Literal["prefix", "round-robin"]
Decision = Literal["affinity", "spilled", "unmatched", "round-robin"]
DECISIONS: tuple[Decision, ...] = ("affinity", "spilled", "unmatched", "round-robin")

# 16 bytes: two of 2^32 different prefixes collide with a probability below 1e-19, and a collision costs one cache miss.
DIGEST_BYTES = 16

# Two different continuations prove that a block is shared by more than one prompt; a third would add nothing.
MAX_FOLLOWERS = 2

# 1,460 prompts of 10 blocks under 6 adapter versions are 88 k entries; twice that is room for any of the published
# recipes, at about 300 bytes an entry.
INDEX_CAPACITY = 200_000


@dataclass
class Routed:
    """One routed request; it holds its place in the replica's in-flight count until it is released."""

    replica: int
    decision: Decision
    sequences: int
    open: bool = True


@dataclass
class _Block:
    adapter: str
    owners: int = 0  # bit r: replica r has served this prefix
    followers: tuple[bytes, ...] = ()


@dataclass
class RoutingCounts:
    """How requests were decided, per replica; every request is counted in exactly one cell."""

    replicas: int
    cells: dict[Decision, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = {decision: [0] * self.replicas for decision in DECISIONS}

    def of(self, decision: Decision) -> int:
        """Requests decided this way, over all replicas."""
        return sum(self.cells[decision])

    def on(self, replica: int) -> int:
        """Requests routed to this replica."""
        return sum(self.cells[decision][replica] for decision in DECISIONS)

    @property
    def routed(self) -> int:
        """Requests routed in all."""
        return sum(self.of(decision) for decision in DECISIONS)


def chained_hashes(adapter: str, blocks: Iterable[bytes]) -> list[bytes]:
    """One hash per block, each naming the whole prefix up to it under one adapter, as vLLM's prefix cache does."""
    digest = blake2b(adapter.encode(), digest_size=DIGEST_BYTES).digest()
    hashes = []
    for block in blocks:
        digest = blake2b(digest + block, digest_size=DIGEST_BYTES).digest()
        hashes.append(digest)
    return hashes


class Router:
    """Routes requests over `replicas` replicas, of which only the routable ones are considered.

    `spill_threshold` is the number of requests a replica may be ahead of the least loaded one and still get a request
    for the sake of its cache (8 in the published set-up). No replica is routable at first.
    """

    def __init__(
        self,
        replicas: int,
        spill_threshold: int = 8,
        policy: Policy = "prefix",
        capacity: int = INDEX_CAPACITY,
    ) -> None:
        self.counts = RoutingCounts(replicas)
        self.in_flight = [0] * replicas
        self.max_in_flight = 0
        self._spill_threshold = spill_threshold
        self._policy = policy
        self._capacity = capacity
        self._routable = [False] * replicas
        self._next = 0
        self._index: OrderedDict[bytes, _Block] = OrderedDict()
        self._by_adapter: dict[str, set[bytes]] = {}

    @property
    def indexed_blocks(self) -> int:
        """Prefixes the index knows; never more than its capacity."""
        return len(self._index)

    def is_routable(self, replica: int) -> bool:
        """Whether requests may go to this replica."""
        return self._routable[replica]

    def set_routable(self, replica: int, routable: bool) -> None:
        """Take a replica in or out. One that comes back may have been restarted, so what it had cached is forgotten."""
        if not routable:
            keep = ~(1 << replica)
            for block in self._index.values():
                block.owners &= keep
        self._routable[replica] = routable

    def route(self, adapter: str, blocks: Sequence[bytes], sequences: int = 1) -> Routed | None:
        """Choose a replica and take a place in its in-flight count; None when no replica is routable.

        `blocks` are the prompt's whole blocks in order; `sequences` is how many sequences the request runs at once. The
        place is freed by `release`, once per routed request; nothing else changes the in-flight counts.
        """
        candidates = [replica for replica, routable in enumerate(self._routable) if routable]
        if not candidates:
            return None
        if self._policy == "round-robin":
            routed = Routed(self._round_robin(candidates), "round-robin", sequences)
        else:
            hashes = chained_hashes(adapter, blocks)
            routed = Routed(*self._decide(hashes, candidates), sequences)
            # After the decision: a prompt must not see itself as a second follower of its own template.
            self._record(adapter, hashes, routed.replica)
        self.in_flight[routed.replica] += sequences
        self.max_in_flight = max(self.max_in_flight, sum(self.in_flight))
        self.counts.cells[routed.decision][routed.replica] += 1
        return routed

    def release(self, routed: Routed) -> None:
        """Free the place `route` took. A second release of the same request changes nothing."""
        if routed.open:
            routed.open = False
            self.in_flight[routed.replica] -= routed.sequences

    def forget_adapter(self, adapter: str) -> None:
        """Drop every prefix indexed under this adapter: nobody will ask for it again."""
        for digest in self._by_adapter.pop(adapter, ()):
            del self._index[digest]

    def _decide(self, hashes: Sequence[bytes], candidates: Sequence[int]) -> tuple[int, Decision]:
        specific = self._specific(hashes, candidates)
        lowest = min(self.in_flight[replica] for replica in candidates)
        best = min(candidates, key=lambda replica: (-specific[replica], self.in_flight[replica]))
        if specific[best] > 0 and self.in_flight[best] - lowest <= self._spill_threshold:
            return best, "affinity"
        least = self._round_robin([replica for replica in candidates if self.in_flight[replica] == lowest])
        return least, "spilled" if specific[best] > 0 else "unmatched"

    def _specific(self, hashes: Sequence[bytes], candidates: Sequence[int]) -> dict[int, int]:
        everyone = sum(1 << replica for replica in candidates)
        matched = dict.fromkeys(candidates, 0)
        common = 0
        for position, digest in enumerate(hashes):
            block = self._index.get(digest)
            if block is None:
                break
            for replica in candidates:
                if matched[replica] == position and block.owners >> replica & 1:
                    matched[replica] = position + 1
            if block.owners & everyone == everyone or len(block.followers) == MAX_FOLLOWERS:
                common = position + 1
        return {replica: max(0, blocks - common) for replica, blocks in matched.items()}

    def _round_robin(self, candidates: Sequence[int]) -> int:
        chosen = min(candidates, key=lambda replica: (replica - self._next) % len(self._routable))
        self._next = (chosen + 1) % len(self._routable)
        return chosen

    def _record(self, adapter: str, hashes: Sequence[bytes], replica: int) -> None:
        names = self._by_adapter.setdefault(adapter, set()) if hashes else set()
        follower: bytes | None = None
        # Last block first: the ends of prompts are then older than their beginnings and are dropped before them.
        for digest in reversed(hashes):
            block = self._index.get(digest)
            if block is None:
                block = self._index[digest] = _Block(adapter)
                names.add(digest)
            else:
                self._index.move_to_end(digest)
            block.owners |= 1 << replica
            if follower is not None and len(block.followers) < MAX_FOLLOWERS and follower not in block.followers:
                block.followers += (follower,)
            follower = digest
        while len(self._index) > self._capacity:
            digest, block = self._index.popitem(last=False)
            names = self._by_adapter[block.adapter]
            names.discard(digest)
            if not names:
                del self._by_adapter[block.adapter]
