"""What the exchanges of the data path share: the router, the replicas, who may be asked for what, and what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rlkit.serving.http_head import RequestHead
from rlkit.serving.replica_health import Outcomes, ReplicaHealth
from rlkit.serving.request_key import RequestKeys
from rlkit.serving.router import Router
from rlkit.serving.upstream import Upstreams
from rlkit.serving.upstream_pool import outgoing_head, with_length

# vLLM's default on a GPU; only until a replica has said what it uses.
DEFAULT_BLOCK_SIZE = 16


class Admission(Protocol):
    """Who decides whether a model may be asked for, and may end a request early."""

    def admit(self, model: str, abort: Callable[[], object]) -> Any:
        """Admit a request; None when there is no such model. `abort` ends it early."""

    def ended(self, use: Any) -> None:
        """A request that was admitted, by what `admit` returned for it, is over."""


class Everything:
    """Admits every model."""

    def admit(self, model: str, abort: Callable[[], object]) -> Any:
        """Admit a request."""
        return self

    def ended(self, use: Any) -> None:
        """It is over."""


class Forwarder:
    """Where completion requests go (`rlkit.serving.exchange` takes them there), and how they ended.

    `on_lost` is told about a replica that has to go, `on_forgotten` about one that does not know a model it was asked
    for; it says whether the replica should have known it.
    """

    def __init__(
        self,
        router: Router,
        upstreams: Upstreams,
        health: ReplicaHealth,
        *,
        on_lost: Callable[[int], None],
        on_forgotten: Callable[[int, str], bool],
        admission: Admission | None = None,
    ) -> None:
        self.router = router
        self.upstreams = upstreams
        self.health = health
        self.on_lost = on_lost
        self.on_forgotten = on_forgotten
        self.admission: Admission = admission or Everything()
        self.keys = RequestKeys(DEFAULT_BLOCK_SIZE)
        self.outcomes = [Outcomes() for _ in upstreams.urls]
        self.unrouted = 0  # requests that came while no replica was in service
        self.moved = 0  # requests that were sent to a second replica
        self.authorization = upstreams.authorization  # what replicas get to see; None: the client's own

    @property
    def block_size(self) -> int:
        """Tokens per block of the replicas' KV cache."""
        return self.keys.block_size

    @block_size.setter
    def block_size(self, size: int) -> None:
        self.keys.block_size = size

    def head_for(self, head: RequestHead, replica: int, length: int) -> bytes:
        """A request's head as it goes to a replica, with a body of this many bytes."""
        url = self.upstreams.urls[replica]
        written = head.outgoing.get(url)
        if written is None:
            address = self.upstreams.pools[replica].address
            written = head.outgoing[url] = outgoing_head(head, address, self.authorization)
        return with_length(written, length)

    def blame(self, replica: int, status: int | None = None) -> None:
        """A replica did not answer (None), or with this status; it goes when that was too often."""
        has_to_go = self.health.failed(replica) if status is None else self.health.answered(replica, status)
        # The last replica is not sent away for errors it answers with: they tell the client more than none at all.
        is_spared = status is not None and len(self.router.routable) == 1
        if has_to_go and not is_spared and self.router.is_routable(replica):
            self.on_lost(replica)
