"""The routing rule written down as plainly as it is published, block by block: what the router is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlkit.serving.prefix_index import chained_hashes


@dataclass
class Block:
    """One prefix."""

    adapter: str
    owners: set[int] = field(default_factory=set)
    followers: set[bytes] = field(default_factory=set)


class ReferenceRouter:
    """Every block of every prompt is an entry of its own, and every decision walks all of them."""

    def __init__(self, replicas: int, spill_threshold: int, capacity: int) -> None:
        self.replicas = replicas
        self.spill_threshold = spill_threshold
        self.capacity = capacity
        self.in_flight = [0] * replicas
        self.routable: set[int] = set()
        self.next = 0
        self.index: OrderedDict[bytes, Block] = OrderedDict()  # least recent first

    def set_routable(self, replica: int, routable: bool) -> None:
        if routable:
            self.routable.add(replica)
        else:
            self.routable.discard(replica)
            for block in self.index.values():
                block.owners.discard(replica)

    def forget_adapter(self, adapter: str) -> None:
        for digest in [digest for digest, block in self.index.items() if block.adapter == adapter]:
            del self.index[digest]

    def route(
        self, adapter: str, blocks: Sequence[bytes], sequences: int, avoid: int | None = None
    ) -> tuple[int, str] | None:
        candidates = sorted(self.routable - {avoid})
        if not candidates:
            return None
        hashes = chained_hashes(adapter, blocks)
        matched = dict.fromkeys(candidates, 0)
        common = 0
        for position, digest in enumerate(hashes, 1):
            block = self.index.get(digest)
            if block is None:
                break
            for replica in candidates:
                if matched[replica] == position - 1 and replica in block.owners:
                    matched[replica] = position
            if block.owners.issuperset(candidates) or len(block.followers) == 2:
                common = position
        specific = {replica: max(0, matched[replica] - common) for replica in candidates}
        lowest = min(self.in_flight[replica] for replica in candidates)
        best = min(candidates, key=lambda replica: (-specific[replica], self.in_flight[replica]))
        if specific[best] > 0 and self.in_flight[best] - lowest <= self.spill_threshold:
            chosen, decision = best, "affinity"
        else:
            least = [replica for replica in candidates if self.in_flight[replica] == lowest]
            chosen = min(least, key=lambda replica: (replica - self.next) % self.replicas)
            self.next = (chosen + 1) % self.replicas
            decision = "spilled" if specific[best] > 0 else "unmatched"
        self._record(adapter, hashes, chosen)
        self.in_flight[chosen] += sequences
        return chosen, decision

    def _record(self, adapter: str, hashes: list[bytes], replica: int) -> None:
        for position in range(len(hashes) - 1, -1, -1):  # the ends of prompts are older than their beginnings
            block = self.index.setdefault(hashes[position], Block(adapter))
            self.index.move_to_end(hashes[position])
            block.owners.add(replica)
            if position + 1 < len(hashes) and len(block.followers) < 2:
                block.followers.add(hashes[position + 1])
        while len(self.index) > self.capacity:
            self.index.popitem(last=False)
