"""Which replica has served which prompt, block by block: a tree with one node per run of blocks that have one history.

Pure. Hashes are chained, so a hash names a whole prefix and comparing two runs of hashes compares two prompts. A run is
cut where prompts part or end, and nowhere else: a prompt seen before is found in as many steps as there are such places
on its way, usually two (what every prompt begins with, and the rest), however long it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

# 16 bytes: two of 2^32 different prefixes collide with a probability below 1e-19, and a collision costs one cache miss.
DIGEST_BYTES = 16

# Two different continuations prove that a block is shared by more than one prompt; a third would add nothing.
MAX_FOLLOWERS = 2


def chained_hashes(adapter: str, blocks: Iterable[bytes]) -> list[bytes]:
    """One hash per block, each naming the whole prefix up to it under one adapter, as vLLM's prefix cache does."""
    # JSON can hold half a surrogate pair, which vLLM takes in a name as well.
    digest = blake2b(adapter.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()
    hashes = []
    for block in blocks:
        digest = blake2b(digest + block, digest_size=DIGEST_BYTES).digest()
        hashes.append(digest)
    return hashes


def prefix_chain(adapter: str, blocks: Iterable[bytes]) -> bytes:
    """The chained hashes of a prompt, one after the other: how the index names it."""
    return b"".join(chained_hashes(adapter, blocks))


class _Run:
    """Blocks that follow each other and were served by the same replicas, last by the same request."""

    __slots__ = ("children", "digests", "followers", "owners", "parent")

    def __init__(self, digests: bytes, parent: _Run | None) -> None:
        self.digests = digests
        self.parent = parent
        self.owners = 0  # bit r: replica r has served this prefix
        self.followers: tuple[bytes, ...] = ()  # of the last block; kept when the follower itself was dropped
        self.children: dict[bytes, _Run] = {}

    def follow(self, digest: bytes) -> None:
        if len(self.followers) < MAX_FOLLOWERS and digest not in self.followers:
            self.followers += (digest,)


class _Root(_Run):
    """The empty prefix of one adapter."""

    __slots__ = ("adapter",)

    def __init__(self, adapter: str) -> None:
        super().__init__(b"", None)
        self.adapter = adapter


@dataclass(slots=True)
class Path:
    """Where a prompt runs through the index: the runs on its way and how many bytes of their hashes are its own."""

    adapter: str
    chain: bytes
    runs: list[_Run]
    known: int

    @property
    def known_blocks(self) -> int:
        """Leading blocks of the prompt that the index knows."""
        return self.known // DIGEST_BYTES


class PrefixIndex:
    """Prefixes and the replicas that have served them; holds at most `capacity` blocks and drops the least recent."""

    def __init__(self, capacity: int) -> None:
        self.blocks = 0
        self._capacity = capacity
        self._roots: dict[str, _Root] = {}
        # Least recent first. The ends of prompts are older than their beginnings and go before them, so what is dropped
        # has nothing behind it.
        self._recent: OrderedDict[_Run, None] = OrderedDict()

    def find(self, adapter: str, chain: bytes) -> Path:
        """Where a prompt runs through the index; valid until the next change."""
        runs: list[_Run] = []
        known = 0
        run: _Run | None = self._roots.get(adapter)
        while run is not None:
            run = run.children.get(chain[known : known + DIGEST_BYTES])
            if run is None:
                break
            runs.append(run)
            if not chain.startswith(run.digests, known):
                known += _common(run.digests, chain, known)
                break
            known += len(run.digests)
        return Path(adapter, chain, runs, known)

    def specific(self, path: Path, candidates: int) -> int:
        """The candidates (bits) that have served the most of a prompt beyond what is common; 0 when none has.

        Common is everything up to the last block that all candidates have served or that has two followers.
        """
        owners = depth = common = end = 0
        for run in path.runs:
            end += len(run.digests)
            serving = run.owners & candidates
            if serving:
                # Whoever has served a block has served all before it: the last owners have served the most.
                owners, depth = serving, min(end, path.known)
            if serving == candidates or (len(run.followers) == MAX_FOLLOWERS and end <= path.known):
                common = min(end, path.known)
        return owners if depth > common else 0

    def record(self, path: Path, replica: int) -> None:
        """Note that a replica serves this prompt, after the decision: a prompt must not be its own second follower."""
        if not path.chain:
            return
        runs, chain, known = path.runs, path.chain, path.known
        parent: _Run
        if runs:
            parent = runs[-1]
            end = sum([len(run.digests) for run in runs])
            if end > known:
                parent = runs[-1] = self._cut(parent, len(parent.digests) - (end - known))
        else:
            parent = self._roots.setdefault(path.adapter, _Root(path.adapter))
        if known < len(chain):
            rest = chain[known:]
            parent.follow(rest[:DIGEST_BYTES])
            leaf = parent.children[rest[:DIGEST_BYTES]] = _Run(rest, parent)
            runs.append(leaf)
            self._recent[leaf] = None
            self.blocks += len(rest) // DIGEST_BYTES
        bit = 1 << replica
        for run in reversed(runs):
            run.owners |= bit
            self._recent.move_to_end(run)
        while self.blocks > self._capacity:
            self._drop_oldest()

    def forget_adapter(self, adapter: str) -> None:
        """Drop every prefix under this adapter."""
        root = self._roots.pop(adapter, None)
        below: list[_Run] = list(root.children.values()) if root is not None else []
        while below:
            run = below.pop()
            below += run.children.values()
            run.children = {}  # no cycle is left for the collector
            del self._recent[run]
            self.blocks -= len(run.digests) // DIGEST_BYTES

    def forget_replica(self, replica: int) -> None:
        """No prefix is on this replica any more."""
        for run in self._recent:
            run.owners &= ~(1 << replica)

    def _cut(self, run: _Run, at: int) -> _Run:
        """Cut a run in two at a byte of its hashes; the run itself becomes the lower part and keeps its age."""
        assert run.parent is not None
        upper = _Run(run.digests[:at], run.parent)
        upper.owners = run.owners
        run.parent.children[upper.digests[:DIGEST_BYTES]] = upper
        run.digests, run.parent = run.digests[at:], upper
        first = run.digests[:DIGEST_BYTES]
        upper.children[first] = run
        upper.followers = (first,)
        self._recent[upper] = None
        return upper

    def _drop_oldest(self) -> None:
        run = next(iter(self._recent))
        excess = (self.blocks - self._capacity) * DIGEST_BYTES
        kept = max(0, len(run.digests) - excess)
        self.blocks -= (len(run.digests) - kept) // DIGEST_BYTES
        if kept:
            run.followers = (run.digests[kept : kept + DIGEST_BYTES],)
            run.digests = run.digests[:kept]
            return
        del self._recent[run]
        assert run.parent is not None
        del run.parent.children[run.digests[:DIGEST_BYTES]]
        if isinstance(run.parent, _Root) and not run.parent.children:
            del self._roots[run.parent.adapter]


def _common(digests: bytes, chain: bytes, start: int) -> int:
    """Bytes of the longest prefix, in whole hashes, that a run and the chain from `start` on have in common."""
    low, high = 0, min(len(digests), len(chain) - start) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = (middle - 1) * DIGEST_BYTES
        # One hash decides: it names everything before it, too.
        if digests[at : at + DIGEST_BYTES] == chain[start + at : start + at + DIGEST_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * DIGEST_BYTES
