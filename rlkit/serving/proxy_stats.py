"""What the proxy has counted: as JSON (`/proxy/stats`, proxy.json) and as Prometheus metrics, from one source. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from rlkit.serving.adapter_commands import LoadCounts, OperationReport
from rlkit.serving.replica_health import Outcomes
from rlkit.serving.router import DECISIONS, Router
from rlkit.serving.vllm_metrics import ReplicaReading, parse_families


@dataclass
class ReplicaStatus:
    """One replica as the proxy sees it."""

    url: str
    serves: bool
    trouble: str | None
    outcomes: Outcomes
    resent: int
    reading: ReplicaReading
    first_reading: ReplicaReading | None  # when it came into service: what vLLM had counted before the proxy


@dataclass(frozen=True)
class ProxyCounts:
    """What is counted once for all replicas.

    Tokens per KV block; requests that came while no replica was in service; requests that were sent to a second one.
    """

    block_size: int
    unrouted: int
    moved: int


def stats_json(
    router: Router, replicas: Sequence[ReplicaStatus], loads: Iterable[OperationReport], proxy: ProxyCounts
) -> dict[str, Any]:
    """All counters. affinity + spilled + unmatched + round_robin = routed; adapters in the order they were loaded."""
    counts = router.counts
    return {
        "routed": counts.routed,
        **{decision.replace("-", "_"): counts.of(decision) for decision in DECISIONS},
        "unrouted": proxy.unrouted,
        "moved": proxy.moved,
        "max_inflight": router.max_in_flight,
        "block_size": proxy.block_size,
        "indexed_blocks": router.indexed_blocks,
        "per_replica": [
            {
                "url": replica.url,
                "in_service": replica.serves,
                "trouble": replica.trouble,
                "routed": counts.on(number),
                **{decision.replace("-", "_"): counts.cells[decision][number] for decision in DECISIONS},
                "in_flight": router.in_flight[number],
                **asdict(replica.outcomes),
                "resent": replica.resent,
                "vllm": replica.reading.to_dict(),
                "vllm_before": replica.first_reading.to_dict() if replica.first_reading is not None else None,
            }
            for number, replica in enumerate(replicas)
        ],
        "adapters": [
            {
                "name": load.name,
                "ok": load.ok,
                "accepted_by": load.accepted_by,
                "attempts": [replica.attempts for replica in load.replicas],
                "seconds": round(load.seconds, 4),
                "seconds_per_replica": [
                    None if replica.seconds is None else round(replica.seconds, 4) for replica in load.replicas
                ],
                "reason": load.reason,
                "refusals": [replica.reason for replica in load.replicas],
            }
            for load in loads
        ],
    }


def own_metrics(
    router: Router, replicas: Sequence[ReplicaStatus], loads: LoadCounts, proxy: ProxyCounts
) -> list[Metric]:
    """The proxy's own metric families."""
    routed = CounterMetricFamily(
        "rlkit_proxy_routed", "Requests by replica and decision.", labels=["replica", "decision"]
    )
    ended = CounterMetricFamily("rlkit_proxy_ended", "Requests by replica and outcome.", labels=["replica", "outcome"])
    in_flight = GaugeMetricFamily("rlkit_proxy_in_flight", "Sequences in flight.", labels=["replica"])
    serves = GaugeMetricFamily("rlkit_proxy_in_service", "1 while requests go to the replica.", labels=["replica"])
    resent = CounterMetricFamily("rlkit_proxy_resent", "Sent twice: a kept connection was closed.", labels=["replica"])
    attempts = CounterMetricFamily("rlkit_proxy_load_attempts", "Adapter loads sent.", labels=["replica"])
    retries = CounterMetricFamily("rlkit_proxy_load_retries", "Adapter loads sent again.", labels=["replica"])
    taken = SummaryMetricFamily(
        "rlkit_proxy_load_seconds", "From the trainer's request to each replica's acceptance.", labels=["replica"]
    )
    for number, replica in enumerate(replicas):
        label = str(number)
        for decision in DECISIONS:
            routed.add_metric([label, decision], router.counts.cells[decision][number])
        for outcome, count in asdict(replica.outcomes).items():
            ended.add_metric([label, outcome], count)
        in_flight.add_metric([label], router.in_flight[number])
        serves.add_metric([label], replica.serves)
        resent.add_metric([label], replica.resent)
        attempts.add_metric([label], loads.attempts[number])
        retries.add_metric([label], loads.retries[number])
        taken.add_metric([label], count_value=loads.accepted[number], sum_value=loads.seconds_until_accepted[number])
    syncs = SummaryMetricFamily(
        "rlkit_proxy_adapter_sync_seconds",
        "Adapter loads that every replica accepted.",
        count_value=loads.done,
        sum_value=loads.seconds,
    )
    failed = CounterMetricFamily("rlkit_proxy_load_failed", "Adapter loads that failed.", value=loads.failed)
    unrouted = CounterMetricFamily(
        "rlkit_proxy_unrouted", "Requests that came while no replica was in service.", value=proxy.unrouted
    )
    moved = CounterMetricFamily("rlkit_proxy_moved", "Requests sent to a second replica.", value=proxy.moved)
    indexed = GaugeMetricFamily(
        "rlkit_proxy_indexed_blocks", "KV blocks the prefix index knows.", value=router.indexed_blocks
    )
    return [
        *(routed, ended, in_flight, serves, resent, unrouted, moved, indexed),
        *(attempts, retries, taken, syncs, failed),
    ]


def merged_page(own: Iterable[Metric], pages: Sequence[str | None]) -> bytes:
    """One `/metrics` page: the proxy's families, then the replicas' with a `replica` label. None: no page."""
    families: dict[str, Metric] = {}
    for number, page in enumerate(pages):
        for family in parse_families(page or ""):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples.extend(
                sample._replace(labels={**sample.labels, "replica": str(number)}) for sample in family.samples
            )
    return generate_latest(_Families([*own, *families.values()]))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
