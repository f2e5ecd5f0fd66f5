"""A vLLM `/metrics` page as numbers. Pure: text in, `ReplicaReading` out.

Unknown is not zero: whatever the page does not say, says as "None" or says as NaN is None. A page that is not a
complete metrics page (an HTML error, one cut off on the way) says nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# Newest name first; the gpu_ names are those of older vLLM versions.
RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"  # reason: capacity or deferred; not in older versions
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS = ("vllm:num_preemptions_total",)
PROMPT_TOKENS = ("vllm:prompt_tokens_total",)
GENERATION_TOKENS = ("vllm:generation_tokens_total",)
PREFIX_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
PREFIX_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
REQUEST_SUCCESS = ("vllm:request_success_total",)
CACHE_CONFIG = "vllm:cache_config_info"


@dataclass(frozen=True)
class ReplicaReading:
    """What one replica says about itself; sums over its engines where it has several.

    Counters (`*_total`, tokens, prefix queries and hits in tokens, `request_success_total` in finished sequences) start
    at 0 with the server. `kv_usage` is a fraction of the cache (mean over the engines, which have caches of one size),
    `worst_kv_usage` that of the fullest engine. `waiting_for_capacity` of the `waiting` are not waiting for something
    else, such as a grammar or a transfer. `engines` counts those that told their usage. `block_size` is in tokens.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    prefix_queries_total: int | None = None
    prefix_hits_total: int | None = None
    request_success_total: int | None = None
    block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    num_gpu_blocks: int | None = None
    waiting_for_capacity: int | None = None
    worst_kv_usage: float | None = None
    engines: int | None = None

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens the KV caches of this server hold: vLLM's own figure, else blocks times block size.

        `kv_cache_size_tokens` is per engine and summed here; `num_gpu_blocks` is a sum over the engines already. The
        block size of hybrid models can be off, so it is only the fallback.
        """
        if self.kv_cache_size_tokens is not None:
            return self.kv_cache_size_tokens
        if self.num_gpu_blocks is None or self.block_size is None:
            return None
        return self.num_gpu_blocks * self.block_size

    def is_of_newer_server(self, earlier: ReplicaReading) -> bool:
        """Whether the server was restarted since `earlier`: what it counts has become less."""
        counted = ("request_success_total", "generation_tokens_total", "prompt_tokens_total")
        pairs = [(getattr(earlier, name), getattr(self, name)) for name in counted]
        return any(before is not None and now is not None and now < before for before, now in pairs)

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is known."""
        return all(getattr(self, field.name) is None for field in fields(self))

    def to_dict(self) -> dict[str, int | float | None]:
        """The reading as plain JSON types."""
        return asdict(self)


def read_page(page: str) -> ReplicaReading:
    """Read a `/metrics` page; raises nothing."""
    return read_samples([sample for family in parse_families(page) for sample in family.samples])


def read_samples(samples: Sequence[Sample]) -> ReplicaReading:
    """Read the samples of one server."""
    # One row per engine: a second one of the same engine would be its cache counted twice.
    rows = {sample.labels.get("engine"): sample.labels for sample in samples if sample.name == CACHE_CONFIG}
    config = list(rows.values())
    sizes = [_integer(labels.get("kv_cache_size_tokens")) for labels in config]
    known_sizes = [size for size in sizes if size is not None]
    usage = _values(samples, KV_USAGE)
    return ReplicaReading(
        running=_total(samples, RUNNING),
        waiting=_total(samples, WAITING),
        kv_usage=sum(usage) / len(usage) if usage else None,
        preemptions_total=_total(samples, PREEMPTIONS),
        prompt_tokens_total=_total(samples, PROMPT_TOKENS),
        generation_tokens_total=_total(samples, GENERATION_TOKENS),
        prefix_queries_total=_total(samples, PREFIX_QUERIES),
        prefix_hits_total=_total(samples, PREFIX_HITS),
        request_success_total=_total(samples, REQUEST_SUCCESS),
        block_size=_integer(config[0].get("block_size")) if config else None,
        # Some engines' sizes without the others' would be a smaller cache than there is.
        kv_cache_size_tokens=sum(known_sizes) if known_sizes and len(known_sizes) == len(sizes) else None,
        num_gpu_blocks=_integer(config[0].get("num_gpu_blocks")) if config else None,
        waiting_for_capacity=_total(
            [sample for sample in samples if sample.labels.get("reason") == "capacity"], (WAITING_BY_REASON,)
        ),
        worst_kv_usage=max(usage) if usage else None,
        engines=len(usage) or None,
    )


def parse_families(page: str) -> list[Metric]:
    """The metric families of a page; empty when it is not a complete page."""
    # The last line of a complete page ends in a newline. One cut inside a number would still parse, as another number.
    if not page.endswith("\n"):
        return []
    try:
        return list(text_string_to_metric_families(page))
    except (ValueError, KeyError, IndexError, TypeError):
        # The parser raises what it runs into; anything it cannot read is not a metrics page.
        return []


def _values(samples: Sequence[Sample], names: tuple[str, ...]) -> list[float]:
    for name in names:
        values = [sample.value for sample in samples if sample.name == name]
        if values:
            return values if all(math.isfinite(value) for value in values) else []
    return []


def _total(samples: Sequence[Sample], names: tuple[str, ...]) -> int | None:
    values = _values(samples, names)
    return round(sum(values)) if values else None


def _integer(label: str | None) -> int | None:
    try:
        return int(label) if label is not None else None
    except ValueError:
        return None
