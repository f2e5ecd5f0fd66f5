"""What the proxy has counted: as JSON (`/stats`, proxy.json) and as Prometheus metrics, from the same numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from rlkit.serving.adapter_commands import OperationReport
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


def stats_json(
    router: Router, replicas: Sequence[ReplicaStatus], loads: Iterable[OperationReport], block_size: int, unrouted: int
) -> dict[str, Any]:
    """All counters. affinity + spilled + unmatched + round_robin = routed; adapters in the order they were loaded."""
    counts = router.counts
    return {
        "routed": counts.routed,
        **{decision.replace("-", "_"): counts.of(decision) for decision in DECISIONS},
        "unrouted": unrouted,
        "max_inflight": router.max_in_flight,
        "block_size": block_size,
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
                "reason": load.reason,
                "refusals": [replica.reason for replica in load.replicas],
            }
            for load in loads
        ],
    }


def own_metrics(router: Router, replicas: Sequence[ReplicaStatus], loads: Sequence[OperationReport]) -> list[Metric]:
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
    for number, replica in enumerate(replicas):
        label = str(number)
        for decision in DECISIONS:
            routed.add_metric([label, decision], router.counts.cells[decision][number])
        for outcome, count in asdict(replica.outcomes).items():
            ended.add_metric([label, outcome], count)
        in_flight.add_metric([label], router.in_flight[number])
        serves.add_metric([label], replica.serves)
        resent.add_metric([label], replica.resent)
        tries = [load.replicas[number].attempts for load in loads]
        attempts.add_metric([label], sum(tries))
        retries.add_metric([label], sum(max(0, count - 1) for count in tries))
    done = [load for load in loads if load.ok]
    syncs = SummaryMetricFamily(
        "rlkit_proxy_adapter_sync_seconds",
        "Adapter loads that every replica accepted.",
        count_value=len(done),
        sum_value=sum(load.seconds for load in done),
    )
    failed = CounterMetricFamily("rlkit_proxy_load_failed", "Adapter loads rolled back.", value=len(loads) - len(done))
    return [routed, ended, in_flight, serves, resent, attempts, retries, syncs, failed]


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
