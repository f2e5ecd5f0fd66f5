"""Which replica a request goes to: the published prefix rule, and round robin to compare with.

Pure: no sockets, clocks or tasks. The proxy, the simulator and the tests share this one implementation. The rule keeps
the rollouts of one problem on one replica, where their prompt is already in vLLM's prefix cache, and does not let what
every prompt has in common (chat template, shared few-shot text) pull all of them to the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlkit.serving.prefix_index import PrefixIndex, prefix_chain

Policy = Literal["prefix", "round-robin"]
Decision = Literal["affinity", "spilled", "unmatched", "round-robin"]
DECISIONS: tuple[Decision, ...] = ("affinity", "spilled", "unmatched", "round-robin")

# 1,460 prompts of 10 blocks under 6 adapter versions are 88 k blocks; twice that is room for any of the published
# recipes.
INDEX_CAPACITY = 200_000


@dataclass(slots=True)
class Routed:
    """One routed request; it holds its place in the replica's in-flight count until it is released."""

    replica: int
    decision: Decision
    sequences: int
    open: bool = True


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


class Router:
    """Routes requests over `replicas` replicas, of which only the routable ones are considered.

    `spill_threshold` is the number of requests a replica may be ahead of the least loaded one and still get a request
    for the sake of its cache. No replica is routable at first.
    """

    def __init__(
        self,
        replicas: int,
        spill_threshold: int,
        policy: Policy = "prefix",
        capacity: int = INDEX_CAPACITY,
    ) -> None:
        self.counts = RoutingCounts(replicas)
        self.index = PrefixIndex(capacity)
        self.in_flight = [0] * replicas
        self.max_in_flight = 0
        self._in_flight_everywhere = 0
        self.spill_threshold = spill_threshold
        self._policy = policy
        self._routable: tuple[int, ...] = ()
        self._next = 0

    @property
    def indexed_blocks(self) -> int:
        """Prefixes the index knows; never more than its capacity."""
        return self.index.blocks

    @property
    def routable(self) -> tuple[int, ...]:
        """The replicas that requests may go to."""
        return self._routable

    def is_routable(self, replica: int) -> bool:
        """Whether requests may go to this replica."""
        return replica in self._routable

    def set_routable(self, replica: int, routable: bool) -> None:
        """Take a replica in or out. One that comes back may have been restarted, so what it had cached is forgotten."""
        if not routable:
            self.index.forget_replica(replica)
        others = [other for other in self._routable if other != replica]
        self._routable = tuple(sorted([*others, replica] if routable else others))

    def route(
        self, adapter: str, blocks: Sequence[bytes], sequences: int = 1, avoid: int | None = None
    ) -> Routed | None:
        """Choose a replica and take a place in its in-flight count; None when no replica is routable.

        `blocks` are the prompt's whole blocks in order; `sequences` is how many sequences the request runs at once;
        `avoid` is a replica that must not get it. The place is freed by `release`, once per routed request; nothing
        else changes the in-flight counts.
        """
        return self.route_chain(adapter, prefix_chain(adapter, blocks), sequences, avoid)

    def route_chain(self, adapter: str, chain: bytes, sequences: int = 1, avoid: int | None = None) -> Routed | None:
        """`route` for a prompt whose blocks were hashed before."""
        candidates = self._routable
        if avoid is not None:
            candidates = tuple(replica for replica in candidates if replica != avoid)
        if not candidates:
            return None
        if self._policy == "round-robin":
            routed = Routed(self._round_robin(candidates), "round-robin", sequences)
        else:
            path = self.index.find(adapter, chain)
            routed = Routed(*self._decide(self.index.specific(path, _bits(candidates)), candidates), sequences)
            self.index.record(path, routed.replica)
        self.in_flight[routed.replica] += sequences
        self._in_flight_everywhere += sequences
        self.max_in_flight = max(self.max_in_flight, self._in_flight_everywhere)
        self.counts.cells[routed.decision][routed.replica] += 1
        return routed

    def release(self, routed: Routed) -> None:
        """Free the place `route` took. A second release of the same request changes nothing."""
        if routed.open:
            routed.open = False
            self.in_flight[routed.replica] -= routed.sequences
            self._in_flight_everywhere -= routed.sequences

    def forget_adapter(self, adapter: str) -> None:
        """Drop every prefix indexed under this adapter: nobody will ask for it again."""
        self.index.forget_adapter(adapter)

    def _decide(self, specific: int, candidates: Sequence[int]) -> tuple[int, Decision]:
        """`specific`: the candidates (bits) with the most specific blocks, 0 when no candidate has any."""
        in_flight = self.in_flight
        lowest = min([in_flight[replica] for replica in candidates])
        if specific:
            best = -1
            for replica in candidates:
                if specific >> replica & 1 and (best < 0 or in_flight[replica] < in_flight[best]):
                    best = replica
            if in_flight[best] - lowest <= self.spill_threshold:
                return best, "affinity"
        least = self._round_robin([replica for replica in candidates if in_flight[replica] == lowest])
        return least, "spilled" if specific else "unmatched"

    def _round_robin(self, candidates: Sequence[int]) -> int:
        # The first at or after the one whose turn it is, else the first of all; candidates are in order.
        chosen = next((replica for replica in candidates if replica >= self._next), candidates[0])
        self._next = (chosen + 1) % len(self.in_flight)
        return chosen


def _bits(replicas: Sequence[int]) -> int:
    bits = 0
    for replica in replicas:
        bits |= 1 << replica
    return bits
