"""/metrics pages to the states a law reads: one page in, every replica's state out. Pure; keeps the page before.

The page is a vLLM server's own (one replica) or the proxy's, which merges those of all replicas under the label
`replica`. A replica is known from when a page first names it, and whatever the pages say later it stays in the answer:
as None where the page has nothing of its vLLM, so that silence is told apart from absence of load.

Counters become counts since the replica's previous reading, however long ago that was. One that runs backwards says
that the server began anew, not that it counted less than nothing: its count is unknown this time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from prometheus_client.samples import Sample

from rlkit.admission.law import ReplicaState
from rlkit.admission.spread import SpeedMeter
from rlkit.serving.vllm_metrics import ReplicaReading, parse_families, read_samples

# The label under which the proxy merges its replicas' pages.
REPLICA_LABEL = "replica"

# What a server without the proxy's label is called: the only replica, numbered as the proxy would.
ONLY_REPLICA = "0"

# Counters that only a restart turns back. Preemptions alone would miss a restart of a server that had none.
COUNTERS = ("preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total")


class PageReader:
    """The replicas behind one `/metrics` address."""

    def __init__(self) -> None:
        self._previous: dict[str, ReplicaReading | None] = {}
        self._speeds = SpeedMeter()
        self._told: set[str] = set()  # the replicas that the page before told of

    def read(self, page: str | None) -> dict[str, ReplicaState | None]:
        """The states a page tells of; None: there was no page. Raises nothing.

        Every replica named so far is in the answer, None where this page does not tell its state.
        """
        states: dict[str, ReplicaState | None] = dict.fromkeys(self._previous)
        for name, reading in _replicas(page or "").items():
            self._previous.setdefault(name, None)
            if reading.is_empty:
                states[name] = None
                continue
            before = self._previous[name]
            state = _state(before, reading)
            generated = None
            # Over the same time for all replicas, or they cannot be compared.
            if before is not None and name in self._told and not state.restarted:
                generated = _difference(before, reading, "generation_tokens_total")
            ran = None if before is None else before.running
            states[name] = replace(state, tokens_each=self._speeds.note(name, generated, ran, reading.running))
            self._previous[name] = reading
        self._told = {name for name, state in states.items() if state is not None}
        return states


def _replicas(page: str) -> dict[str, ReplicaReading]:
    samples = [sample for family in parse_families(page) for sample in family.samples]
    by_label: dict[str | None, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_label[sample.labels.get(REPLICA_LABEL)].append(sample)
    labels = [label for label in by_label if label is not None]
    if labels:
        return {label: read_samples(by_label[label]) for label in labels}
    only = read_samples(samples)
    return {} if only.is_empty else {ONLY_REPLICA: only}


def _state(before: ReplicaReading | None, now: ReplicaReading) -> ReplicaState:
    restarted = before is not None and any(_ran_backwards(before, now, counter) for counter in COUNTERS)
    return ReplicaState(
        usage=now.worst_kv_usage,
        running=now.running,
        waiting=now.waiting,
        waiting_for_capacity=now.waiting_for_capacity,
        preemptions=None if before is None or restarted else _difference(before, now, "preemptions_total"),
        capacity_tokens=now.capacity_tokens,
        restarted=restarted,
        engines=now.engines or 1,
    )


def _difference(before: ReplicaReading, now: ReplicaReading, counter: str) -> int | None:
    earlier, later = getattr(before, counter), getattr(now, counter)
    return None if earlier is None or later is None else later - earlier


def _ran_backwards(before: ReplicaReading, now: ReplicaReading, counter: str) -> bool:
    difference = _difference(before, now, counter)
    return difference is not None and difference < 0
