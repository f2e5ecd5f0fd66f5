"""Every number the simulator is built on: its unit, where it comes from, whether it is known or fitted, and to what.

`Physics` holds for both published experiments, `CHASE` and `ADAPTIVE_CAP` describe what each of them generated. A
fitted constant names the published cells (`<run>:<metric>` of rlkit/simulation/published.json) that it was fitted to.
What is not named there was never looked at while fitting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Origin:
    """Where one constant comes from."""

    name: str
    value: float
    unit: str
    kind: Literal["known", "fitted"]
    source: str
    cells: tuple[str, ...]


def _known(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "kind": "known", "source": source, "cells": ()})


def _fitted(value: float, unit: str, source: str, *cells: str) -> Any:
    return field(default=value, metadata={"unit": unit, "kind": "fitted", "source": source, "cells": cells})


@dataclass(frozen=True)
class Physics:
    """Of the machines and programs, not of an experiment."""

    # A replica's decode iteration and prefill.
    iteration_s: float = _fitted(
        1.44e-3,
        "s/iteration",
        "scheduler, sampler and kernel launches; reading the weights comes on top",
        "kv8g-main:generated_tok_s",
        "kv8g-cap:wall_clock_min",
    )
    lora_iteration_s: float = _fitted(
        1.50e-3,
        "s/iteration",
        "what adapters add to an iteration",
        "r1-dp2-tb16k-nockpt:sample/rollout_queue_size",
        "r1-dp2-tb16k-nockpt:perf/rollout_wait_s",
    )
    sequence_s: float = _fitted(
        2.8e-6,
        "s/sequence/iteration",
        "sampling, log-probabilities, detokenising",
        "r1-dp3-tb16k-nockpt:rollout/generated_tok_s",
        "kv8g-main:latency_s",
    )
    cache_read_fraction: float = _fitted(
        0.866,
        "1",
        "part of the memory's bandwidth that attention reaches when it reads the KV cache",
        "kv8g-pausefix:wall_clock_min",
        "kv8g-main:preemptions",
    )
    prefill_mfu: float = _fitted(
        0.54,
        "1",
        "part of the peak that prefill reaches at two FLOPs a parameter and token",
        "kv8g-main:wall_clock_min",
        "kv8g-pausefix:wall_clock_min",
    )
    # The trainer.
    row_s: float = _fitted(
        0.2945,
        "s/row",
        "forward and backward of a row whatever its length, checkpointing on",
        "r1-dp2:perf/fwd_bwd_s",
    )
    row_mfu: float = _fitted(
        0.3097,
        "1",
        "part of the peak that a row's tokens reach at eight FLOPs a parameter and token (the forward pass twice)",
        "r1-dp2-tb16k:perf/fwd_bwd_s",
    )
    recompute_share: float = _fitted(
        0.178,
        "1",
        "of forward and backward, what gradient checkpointing costs",
        "r1-dp2-tb16k-nockpt:perf/fwd_bwd_s",
    )
    optimizer_s: float = _fitted(
        0.12,
        "s/step",
        "clipping, optimizer step and what surrounds them",
        "r1-dp3-inflight384:perf/step_s",
    )
    forward_share: float = _known(
        0.25, "1", "a forward pass costs 1, its recomputation 1 and the backward pass 2: one of four"
    )
    microbatch_s: float = _known(
        0.010,
        "s/microbatch",
        "measured: 4.5 ms in steps of 64 microbatches, 16 ms in steps of 4 (TRL 1.16 on two cores)",
    )
    sample_s: float = _known(
        0.0, "s/sample", "packing a sample, beside the microbatch it is in; microbatch_s was measured with it"
    )
    fetch_s: float = _known(0.33e-3, "s/sample", "measured: a full queue's wait per sample, TRL 1.16 on two cores")
    # The rollout worker.
    score_s: float = _known(
        0.08, "s/group", "measured: eight boxed answers take 0.05 s when the gold is a number, and more when it is not"
    )
    score_variation: float = _known(
        0.5, "1", "standard deviation over mean of score_s; nothing published depends on it"
    )
    poll_s: float = _known(0.1, "s", "how often TRL looks again at a full queue")
    score_queue_groups: int = _known(16, "groups", "TRL's _groups_to_score")
    # The weight sync.
    pause_s: float = _known(0.3, "s", "published: pausing the replicas")
    save_s: float = _known(1.1, "s", "published: saving the adapter to the bucket")
    lag_s: float = _known(3.0, "s", "a file in a bucket shows on another mount about three seconds after the write")
    lag_deviation_s: float = _fitted(
        0.1, "s", "between replicas and syncs", "r1-dp2:loads_second_attempt", "r1-dp2:loads_third_attempt"
    )
    load_s: float = _fitted(
        0.80,
        "s/attempt",
        "one attempt to load an adapter from a mounted bucket, whether it is there or not",
        "r1-dp2:perf/weight_sync_s",
        "r1-dp2-tb16k:perf/weight_sync_s",
    )
    push_s: float = _known(0.05, "s", "measured: an adapter pushed to a receiver beside the replica")
    merged_sync_s: float = _fitted(
        1.25,
        "s",
        "pause, full weights over NCCL, resume; no figure of it is published",
        "kv8g-cap:wall_clock_min",
    )
    # A machine whose trainer and replicas share their cores.
    shared_cores: float = _known(0.0, "cores", "none is shared: trainer and replicas have GPUs of their own")
    trainer_cores: float = _known(
        1.0, "cores", "what the trainer keeps busy while it computes; of no effect unless shared"
    )
    engine_cores: float = _known(1.0, "cores", "what one engine keeps busy; of no effect unless shared")


@dataclass(frozen=True)
class Workload:
    """What an experiment generated, and how it was packed.

    Means are over completions, at the first step and after `over_steps` (None: at the last step of the recipe).
    `folds_prompts`: rows are trees, as TRL packs them from 1.16 on (the published runs had 1.14), and
    `shared_completion` is the part of a completion that it has in common with those of its group.
    """

    mean_start: float
    mean_end: float
    between_prompts: float
    within_prompt: float
    prompts: int
    prompt_tokens: int
    template_tokens: int
    prompt_deviation: float
    trainer_factor: float = 1.0
    over_steps: int | None = None
    folds_prompts: bool = False
    shared_completion: float = 0.0


# Lengths are lognormal, cut off at max_completion_length: log-deviations between prompts and within the rollouts of
# one.
BETWEEN_PROMPTS = 0.53
WITHIN_PROMPT = 0.40

CHASE = Workload(
    mean_start=1130.0,
    mean_end=830.0,
    between_prompts=BETWEEN_PROMPTS,
    within_prompt=WITHIN_PROMPT,
    prompts=1460,
    prompt_tokens=135,
    template_tokens=23,
    prompt_deviation=40.0,
)
ADAPTIVE_CAP = Workload(
    mean_start=6240.0,
    mean_end=4740.0,
    between_prompts=BETWEEN_PROMPTS,
    within_prompt=WITHIN_PROMPT,
    prompts=1460,
    prompt_tokens=150,
    template_tokens=23,
    prompt_deviation=40.0,
    trainer_factor=0.43,
)

# A machine without a GPU, for the toy models: `rlkit calibrate` on the logs of four real runs of TRL 1.16 and vLLM 0.31
# on two cores, two of runs/local.yaml and its lopsided ones; it makes better ones of a user's own runs. The trainer's
# 1.5 cores: a row of the trainer-bound run, whose servers hardly work, takes 1/1.75 of what it takes beside them.
TWO_CORES = Physics(
    iteration_s=0.0090,
    lora_iteration_s=0.0,
    sequence_s=0.31e-3,
    cache_read_fraction=1.0,
    prefill_mfu=0.1,
    row_s=0.0110,
    row_mfu=0.100,
    recompute_share=0.31,
    optimizer_s=0.0009,
    forward_share=0.35,
    microbatch_s=0.00126,
    sample_s=0.31e-3,
    score_s=0.0037,
    pause_s=0.044,
    save_s=0.016,
    lag_s=0.0,
    lag_deviation_s=0.0,
    load_s=0.025,
    push_s=0.05,
    shared_cores=2.0,
    trainer_cores=1.5,
)
TOY = Workload(
    mean_start=12.5,
    mean_end=22.8,
    between_prompts=0.1,
    within_prompt=0.25,
    prompts=7290,
    prompt_tokens=65,
    template_tokens=60,
    prompt_deviation=0.5,
    over_steps=48,
    folds_prompts=True,
    shared_completion=0.69,
)
TOY_UNTRAINED = Workload(
    mean_start=200.0,
    mean_end=300.0,
    between_prompts=0.1,
    within_prompt=0.6,
    prompts=7290,
    prompt_tokens=65,
    template_tokens=60,
    prompt_deviation=0.5,
    folds_prompts=True,
)

_PACKED = ("r1-dp2-tb16k:batch/samples_per_step", "r1-dp3-inflight384:batch/samples_per_step")
_CAP_TOKENS = tuple(f"kv8g-{run}:wall_clock_min" for run in ("main", "pausefix", "caponly", "cap"))

WORKLOAD_ORIGINS: tuple[Origin, ...] = (
    Origin("CHASE.mean_start", CHASE.mean_start, "tokens", "fitted", "completions at the first step", _PACKED),
    Origin("CHASE.mean_end", CHASE.mean_end, "tokens", "fitted", "completions at the last step", _PACKED),
    Origin(
        "ADAPTIVE_CAP.mean_start",
        ADAPTIVE_CAP.mean_start,
        "tokens",
        "fitted",
        "start and end in the ratio of the chase's; their mean from tok/s x wall / completions in all four runs",
        _CAP_TOKENS,
    ),
    Origin(
        "WITHIN_PROMPT",
        WITHIN_PROMPT,
        "1",
        "fitted",
        "log-deviation within a group",
        ("kv8g-main:stale_dropped_over_trained", "kv8g-pausefix:stale_dropped_over_trained"),
    ),
    Origin(
        "BETWEEN_PROMPTS",
        BETWEEN_PROMPTS,
        "1",
        "fitted",
        "log-deviation between prompts",
        ("kv8g-main:preemptions", "kv8g-pausefix:preemptions", "kv8g-caponly:inflight"),
    ),
    Origin(
        "ADAPTIVE_CAP.trainer_factor",
        ADAPTIVE_CAP.trainer_factor,
        "1",
        "fitted",
        "that experiment trained in another, unpublished way: seconds of a row over those of the chase",
        ("kv8g-caponly:wall_clock_min", "kv8g-cap:wall_clock_min"),
    ),
    Origin(
        "prompt_tokens",
        CHASE.prompt_tokens,
        "tokens",
        "known",
        "published example prompts have 135 and 103 tokens, 23 of them the template's; the cap experiment's template is"
        " longer",
        (),
    ),
)


def physics_origins(physics: Physics) -> Iterator[Origin]:
    """Each constant of `physics` with its origin; the value is the one in use."""
    for item in fields(physics):
        yield Origin(item.name, float(getattr(physics, item.name)), **item.metadata)
