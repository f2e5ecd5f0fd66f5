"""What an emulated replica computes: adapters, completions, the prefix cache and the counters vLLM would show.

No sockets and no clock. Texts and rules are vLLM 0.31's. Completions are made up, but not arbitrary: a token's
log-probability depends on the weights that computed it and on those that computed the cached blocks it attends to, so a
prefix cache that serves blocks of other weights shows in the answer, as it does in the real one.
"""

from __future__ import annotations

import json
import math
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy  # noqa: F401  safetensors would import it at the first load, which then takes as long as a lagging mount
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from safetensors import SafetensorError, safe_open

from rlkit.serving.prefix_index import chained_hashes
from rlkit.serving.prompt_blocks import token_blocks

# Log-deviation of the lengths of completions: both published experiments were fitted with 0.53 between prompts and 0.40
# within one.
LENGTH_DEVIATION = 0.66

# The emulated vocabulary; an id is also its own text.
VOCABULARY = 256


class LoadRefused(Exception):
    """An answer other than 200 to a load or unload: status, vLLM's error type, message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter; `weights` tells its contents apart from any other's."""

    name: str
    path: str
    weights: int


@dataclass(frozen=True)
class Sampled:
    """One finished sequence."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass
class EmulatedEngine:
    """The state of one emulated vLLM server. Sizes as the flags of the same names."""

    model: str = "emulated"
    max_loras: int = 6
    max_lora_rank: int = 8
    block_size: int = 16
    num_gpu_blocks: int = 1000
    max_model_len: int = 4096
    mean_tokens: float | None = None  # of a completion, lognormal; None: anything up to max_tokens
    adapters: dict[str, Adapter] = field(default_factory=dict)
    prefix_cache: dict[bytes, int] = field(default_factory=dict)  # block -> the weights that computed it

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name", "engine"]
        self.running = self._gauge("num_requests_running", labels)
        self.waiting = self._gauge("num_requests_waiting", labels)
        by_reason = Gauge("vllm:num_requests_waiting_by_reason", "", [*labels, "reason"], registry=self.registry)
        self.waiting_for_capacity = by_reason.labels(self.model, "0", "capacity")
        by_reason.labels(self.model, "0", "deferred")
        self.usage = self._gauge("kv_cache_usage_perc", labels)
        self.preemptions = self._counter("num_preemptions", labels)
        self.prompt_tokens = self._counter("prompt_tokens", labels)
        self.generation_tokens = self._counter("generation_tokens", labels)
        self.queries = self._counter("prefix_cache_queries", labels)
        self.hits = self._counter("prefix_cache_hits", labels)
        self.success = Counter("vllm:request_success", "", [*labels, "finished_reason"], registry=self.registry)
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self.success.labels(self.model, "0", reason)
        config = Gauge(
            "vllm:cache_config_info",
            "",
            ["block_size", "engine", "num_gpu_blocks", "kv_cache_size_tokens"],
            registry=self.registry,
        )
        # One block is the null block; it holds nothing.
        capacity = (self.num_gpu_blocks - 1) * self.block_size
        config.labels(str(self.block_size), "0", str(self.num_gpu_blocks), str(capacity)).set(1)

    def metrics_page(self) -> bytes:
        """The `/metrics` page."""
        return generate_latest(self.registry)

    def load(self, name: str, path: str, *, in_place: bool = False, sees: Callable[[Path], bool] = Path.is_file) -> str:
        """Load an adapter folder in peft's layout; vLLM's text on success, `LoadRefused` otherwise.

        `sees` says whether a file is there (yet).
        """
        if not name or not path:
            raise LoadRefused(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name == self.model:
            message = f"The lora adapter '{name}' conflicts with a served base model."
            raise LoadRefused(400, "InvalidUserInput", _sanitized(message))
        if name in self.adapters and not in_place:
            raise LoadRefused(
                400,
                "InvalidUserInput",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            )
        try:
            weights = self._read(Path(path), sees)
        except FileNotFoundError:
            message = f"Loading lora {name} failed: No adapter found for {path}"
            raise LoadRefused(404, "NotFoundError", _sanitized(message)) from None
        except (ValueError, SafetensorError) as error:
            message = (
                f"Call to add_lora method failed: Worker failed with error '{error}', please check the stack trace "
                "above for the root cause"
            )
            raise LoadRefused(500, "InternalServerError", _sanitized(message)) from None
        self.adapters[name] = Adapter(name, path, weights)
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        """Unload an adapter. The blocks it computed stay in the prefix cache, under its name."""
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise LoadRefused(400, "InvalidUserInput", message)
        if name not in self.adapters:
            raise LoadRefused(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def bound(self, model: str) -> Adapter | None:
        """What a request for this model runs with until its end, whatever is loaded or unloaded meanwhile.

        None: there is no such model.
        """
        return Adapter(model, "", 0) if model == self.model else self.adapters.get(model)

    def sample(self, model: str | Adapter, prompt: Sequence[int], max_tokens: int, seed: int | None) -> Sampled:
        """A made-up completion of a served model (base or adapter)."""
        adapter = self.bound(model) if isinstance(model, str) else model
        assert adapter is not None
        self.prompt_tokens.inc(len(prompt))
        self.queries.inc(len(prompt))
        attended, cached = self.prefill(adapter, prompt)
        self.hits.inc(cached * self.block_size)
        dice = random.Random(f"{seed}")
        length = max(1, min(max_tokens, self._length(dice, max_tokens)))
        ids = dice.choices(range(VOCABULARY), k=length)
        state = zlib.crc32(repr((attended, list(prompt))).encode(), adapter.weights)
        logprobs = []
        for token in ids:
            state = zlib.crc32(str(token).encode(), state)
            logprobs.append(-(state % 10_000) / 10_000)
        self.generation_tokens.inc(length)
        reason = "length" if length == max_tokens else "stop"
        self.success.labels(self.model, "0", reason).inc()
        return Sampled(ids, logprobs, reason)

    def clear_cache(self) -> None:
        """Forget every block."""
        self.prefix_cache.clear()

    def _length(self, dice: random.Random, most: int) -> int:
        if self.mean_tokens is None:
            return dice.randint(1, most)
        return round(dice.lognormvariate(math.log(self.mean_tokens) - LENGTH_DEVIATION**2 / 2, LENGTH_DEVIATION))

    def prefill(self, adapter: Adapter, prompt: Sequence[int]) -> tuple[list[int], int]:
        """A prompt's blocks, computed or from the cache: the weights that computed each, and how many were cached.

        A request that a reset threw back does it again: its blocks are then once more in the cache, under its adapter's
        name.
        """
        hashes = chained_hashes(adapter.path + adapter.name, token_blocks(prompt, self.block_size))
        cached = 0
        while cached < len(hashes) and hashes[cached] in self.prefix_cache:
            cached += 1
        attended = []
        for digest in hashes:
            weights = self.prefix_cache.pop(digest, adapter.weights)
            self.prefix_cache[digest] = weights  # the last used is the last to go
            attended.append(weights)
        # One block is the null block; it holds nothing.
        while len(self.prefix_cache) > self.num_gpu_blocks - 1:
            del self.prefix_cache[next(iter(self.prefix_cache))]
        return attended, cached

    def _read(self, folder: Path, sees: Callable[[Path], bool]) -> int:
        if not sees(folder / "adapter_config.json"):
            raise FileNotFoundError
        config = json.loads((folder / "adapter_config.json").read_text())
        missing = {"r", "lora_alpha", "target_modules"} - set(config)
        if missing:
            raise ValueError(f"Missing required configuration fields: {missing}")
        if config["r"] > self.max_lora_rank:
            raise ValueError(f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_lora_rank}.")
        path = folder / "adapter_model.safetensors"
        if not sees(path):
            raise ValueError(f"{folder} doesn't contain tensors")
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                file.get_tensor(key)
        return zlib.crc32(path.read_bytes())

    def _gauge(self, name: str, labels: list[str]) -> Gauge:
        return Gauge(f"vllm:{name}", "", labels, registry=self.registry).labels(self.model, "0")

    def _counter(self, name: str, labels: list[str]) -> Counter:
        return Counter(f"vllm:{name}", "", labels, registry=self.registry).labels(self.model, "0")


def _sanitized(message: str) -> str:
    """vLLM hides paths in its error texts, but not all of them: those under some roots, and those with a suffix."""
    message = re.sub(r"/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+", "<path>", message)
    return re.sub(r"(?:/[\w\-]+)+/[\w\-]+\.\w+", "<path>", message).strip()
