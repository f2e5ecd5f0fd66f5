"""What is simulated, in numbers: engines, worker, trainer, sync. `rlkit.simulation.recipes` makes one of a recipe.

A test bed changes one with `dataclasses.replace`: caches of unequal size (`engines`), lengths that grow (`lengths`),
servers that stop every now and then (`pauses`), a fixed limit (`max_inflight`) or a law (`cap`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlkit.admission.law import Law, Policy, make_law
from rlkit.serving.router import Policy as RoutingPolicy
from rlkit.simulation.batches import Sharing
from rlkit.simulation.cores import ALONE, SharedCores
from rlkit.simulation.lengths import Lengths
from rlkit.simulation.replica import Capacity, Rates


@dataclass(frozen=True)
class Engine:
    """One engine: the server it belongs to (data-parallel engines share one), what it can hold, how fast it is."""

    server: int
    capacity: Capacity
    rates: Rates


@dataclass(frozen=True)
class Pauses:
    """All servers stop for `seconds` every `every_s` seconds, their cache kept."""

    every_s: float
    seconds: float


@dataclass(frozen=True)
class RoutingSetup:
    """How rollouts find a server, as in the recipe; `adapters`: each policy version has its own name and cache."""

    policy: RoutingPolicy = "prefix"
    spill_threshold: int = 12
    block_size: int = 16
    adapters: bool = True


@dataclass(frozen=True)
class TrainerSetup:
    """The trainer's batch shape and the seconds of its parts; see `rlkit.simulation.trainer`."""

    processes: int = 1
    token_budget: int = 0  # 0: a fixed count
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = True
    row_s: float = 0.0
    row_token_s: float = 0.0
    recompute_share: float = 0.0
    forward_share: float = 0.25
    microbatch_s: float = 0.0
    sample_s: float = 0.0
    fetch_s: float = 0.0
    optimizer_s: float = 0.0
    flops_per_token: Callable[[int], float] | None = None  # None: no MFU is logged
    peak_flops: float | None = None
    sharing: Sharing | None = None  # None: every sample is forwarded whole


@dataclass(frozen=True)
class SyncSetup:
    """How a new policy reaches the servers; see `rlkit.simulation.sync`."""

    kind: Literal["bucket", "push", "merged"] = "bucket"
    interval: int = 1  # steps
    clear_cache: bool = False
    retry_s: float = 0.5
    deadline_s: float = 60.0
    max_loras: int = 6
    pause_s: float = 0.3
    save_s: float = 1.1
    load_s: float = 0.8
    push_s: float = 0.05
    lag_s: float = 3.0
    lag_deviation_s: float = 0.1
    merged_s: float = 1.25


@dataclass(frozen=True)
class Setup:
    """Everything a simulation needs."""

    steps: int
    engines: tuple[Engine, ...]
    lengths: Lengths
    trainer: TrainerSetup
    sync: SyncSetup
    routing: RoutingSetup = RoutingSetup()
    num_generations: int = 8
    max_inflight: int = 128
    cap: Policy = "none"
    law: Callable[[], Law] | None = None  # instead of the policy's
    max_model_len: int = 4096
    queue_maxsize: int = 1024
    max_staleness: int = 4
    score_s: float = 0.08
    score_variation: float = 0.5
    poll_s: float = 0.1
    score_queue_groups: int = 16
    pauses: Pauses | None = None
    stop_after: int | None = None  # steps; the lengths still change over all of `steps`
    lengths_over: int | None = None  # steps over which the lengths change, else `steps`
    cores: SharedCores = ALONE

    @property
    def servers(self) -> int:
        """How many servers the engines belong to."""
        return 1 + max(engine.server for engine in self.engines)

    def make_law(self) -> Law:
        """A fresh law of the admission cap."""
        if self.law is not None:
            return self.law()
        return make_law(self.cap, ceiling=self.max_inflight, max_model_len=self.max_model_len)
