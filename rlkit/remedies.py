"""Changes of a recipe, each with the cause it answers, the fields it sets, and what else it does. Pure.

Every rule looks at the recipe as it is and proposes nothing, or one change, of the size that `rlkit.sizing` gives it.
Whether one pays is not decided here: `rlkit.advice` simulates them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rlkit.price import usd_per_hour
from rlkit.recipe import Recipe
from rlkit.simulation.hardware import CPU_FLAVOR
from rlkit.sizing import (
    GPU_SLOTS,
    Situation,
    fewer_in_flight,
    generation,
    longer_rows,
    more_in_flight,
    queue_in_time,
    rarer_sync,
    shorter_retry,
)

Side = Literal["trainer", "generation", "sync", "cost"]

# The Hub's flavors have up to eight GPUs.
MOST_RANKS = 8


@dataclass(frozen=True)
class Change:
    """One change of a recipe: `overrides` as --set takes them, and what it does besides, a sentence each."""

    slug: str  # names the recipe and the run that come of it
    causes: tuple[str, ...]  # of rlkit.causes
    side: Side
    overrides: tuple[str, ...]
    side_effects: tuple[str, ...] = ()
    learning: bool = False  # changes what is learned, not only how fast


Rule = Callable[[Situation], Iterator[Change]]


def remedies(situation: Situation, learning: bool = False, cost: bool = False) -> list[Change]:
    """Every change that the recipe allows; with `cost` also what saves money alone, with `learning` what is learned."""
    rules = [*RULES, *(COST_RULES if cost else ()), *(LEARNING_RULES if learning else ())]
    return [change for rule in rules for change in rule(situation)]


def _pack(now: Situation) -> Iterator[Change]:
    """Several samples in a row, or longer rows."""
    rows = longer_rows(now)
    if rows is None:
        return
    yield Change(
        slug=f"rows-{rows[0].partition('=')[2]}",
        causes=("tiny-rows", "compute"),
        side="trainer",
        overrides=tuple(rows),
        side_effects=("Samples of a step vary with their lengths.",) if now.recipe.train.token_budget == 0 else (),
    )


def _keep_activations(now: Situation) -> Iterator[Change]:
    train = now.recipe.train
    if not train.gradient_checkpointing:
        return
    said = ("The activations of a whole row stay in memory until its backward pass.",)
    off = "train.gradient_checkpointing=false"
    yield Change("keep-activations", ("recompute",), "trainer", (off,), said)
    if train.token_budget and train.token_budget // 2 >= now.recipe.serve.max_model_len:
        halved = f"train.token_budget={train.token_budget // 2}"
        twice = f"train.gradient_accumulation_steps={2 * train.gradient_accumulation_steps}"
        yield Change("keep-activations-half-rows", ("recompute",), "trainer", (off, halved, twice), said)


def _more_ranks(now: Situation) -> Iterator[Change]:
    train = now.recipe.train
    flavor = _flavor(now.recipe.hardware.trainer, 2 * train.processes)
    if flavor is None or 2 * train.processes > MOST_RANKS or train.gradient_accumulation_steps < 2:
        return
    yield Change(
        "more-ranks",
        ("compute",),
        "trainer",
        (
            f"train.processes={2 * train.processes}",
            f"train.gradient_accumulation_steps={math.ceil(train.gradient_accumulation_steps / 2)}",
            f"hardware.trainer={flavor}",
        ),
        ("Twice as many GPUs train and are paid for.",),
    )


def _more_in_flight(now: Situation) -> Iterator[Change]:
    size = more_in_flight(now)
    if size is not None:
        yield Change(
            slug=f"inflight-{size}",
            causes=("client-limit", "replicas"),
            side="generation",
            overrides=tuple(generation(now, size)),
            side_effects=(
                "More rollouts at once take longer each, so that samples are older when they are trained on.",
            ),
        )


def _more_replicas(now: Situation) -> Iterator[Change]:
    """One more, with as much in flight as now, and with more."""
    replicas = now.recipe.serve.replicas + 1
    if now.shares_cores:
        return
    one, said = f"serve.replicas={replicas}", ("One more replica is paid for.",)
    causes = ("replicas", "over-admission")
    yield Change(f"replicas-{replicas}-same-inflight", causes, "generation", (one,), said)
    size = more_in_flight(now)
    if size is not None:
        yield Change(f"replicas-{replicas}", causes, "generation", (one, *generation(now, size)), said)


def _cap(now: Situation) -> Iterator[Change]:
    if now.recipe.cap.policy == "rlkit":
        return
    said = ("Rollouts wait in the worker, without an adapter's name, instead of in the servers: samples are fresher.",)
    yield Change("cap", ("over-admission", "stale", "queue"), "generation", ("cap.policy=rlkit",), said)


def _more_cache(now: Situation) -> Iterator[Change]:
    serve = now.recipe.serve
    if now.shares_cores:
        if serve.num_gpu_blocks is not None:
            more = f"serve.num_gpu_blocks={2 * serve.num_gpu_blocks}"
            yield Change(
                "more-cache", ("over-admission",), "generation", (more,), ("It takes memory of this machine.",)
            )
        return
    fields = [name for name in ("kv_cache_gib", "num_gpu_blocks") if getattr(serve, name) is not None]
    if fields:
        share = f"{serve.gpu_memory_utilization:.0%}"
        yield Change(
            "more-cache",
            ("over-admission",),
            "generation",
            tuple(f"serve.{name}=null" for name in fields),
            (f"vLLM takes {share} of the replica's memory, as serve.gpu_memory_utilization says.",),
        )


def _smaller_queue(now: Situation) -> Iterator[Change]:
    size = queue_in_time(now)
    if size is not None:
        change = f"rollout.queue_maxsize={size}"
        yield Change("queue", ("queue", "stale"), "generation", (change,), ("Samples are fresher.",))


def _fewer_in_flight(now: Situation) -> Iterator[Change]:
    size = fewer_in_flight(now.recipe)
    if size is not None:
        change = f"rollout.max_inflight_tasks={size}"
        said = ("Samples are fresher.",)
        yield Change(f"inflight-{size}", ("stale", "over-admission"), "generation", (change,), said)


def _faster_sync(now: Situation) -> Iterator[Change]:
    transport = now.recipe.transport
    if transport.kind != "bucket" or now.recipe.lora is None:
        return
    said = (
        "A receiver runs beside each replica, and the adapter's files go to it over the network; what that takes is "
        "measured on one machine, not between rented ones."
    )
    yield Change("push", ("sync",), "sync", ("transport.kind=push",), (said,))
    retry_s = shorter_retry(now.recipe)
    if retry_s is not None:
        retry = f"transport.retry_s={retry_s}"
        yield Change("retry", ("sync",), "sync", (retry,), ("The proxy asks a replica for an adapter more often.",))


def _kept_cache(now: Situation) -> Iterator[Change]:
    if not now.recipe.transport.keep_cache and now.recipe.lora is not None:
        said = "The KV cache outlives a sync; each version of the adapter has its own name there, so none is mixed up."
        yield Change("keep-cache", ("sync", "over-admission"), "generation", ("transport.keep_cache=true",), (said,))


def _fewer_replicas(now: Situation) -> Iterator[Change]:
    recipe, replicas = now.recipe, now.recipe.serve.replicas
    if now.shares_cores:
        return
    for fewer in sorted({replicas - 1, replicas // 2} - {0}, reverse=True):
        said = (f"{fewer} of {replicas} replicas are paid for, and each runs more at once.",)
        change = f"serve.replicas={fewer}"
        yield Change(f"replicas-{fewer}", ("idle-replicas",), "cost", (change,), said)
        # What several replicas ran one of them runs with as many in flight for itself.
        more = max(recipe.inflight_limit, GPU_SLOTS * fewer * recipe.serve.data_parallel_size)
        if more > recipe.inflight_limit:
            more_at_once = (change, *generation(now, more))
            yield Change(f"replicas-{fewer}-inflight-{more}", ("idle-replicas",), "cost", more_at_once, said)


def _fewer_ranks(now: Situation) -> Iterator[Change]:
    train = now.recipe.train
    flavor = _flavor(now.recipe.hardware.trainer, train.processes // 2)
    if train.processes % 2 or flavor is None:
        return
    yield Change(
        "fewer-ranks",
        ("idle-trainer",),
        "cost",
        (
            f"train.processes={train.processes // 2}",
            f"train.gradient_accumulation_steps={2 * train.gradient_accumulation_steps}",
            f"hardware.trainer={flavor}",
        ),
        ("Half as many GPUs train and are paid for.",),
    )


def _rarer_sync(now: Situation) -> Iterator[Change]:
    steps = rarer_sync(now.recipe)
    said = (f"Rollouts come from a policy that is up to {steps} steps old before staleness is even counted.",)
    change = f"rollout.weight_sync_steps={steps}"
    yield Change(f"sync-{steps}", ("sync",), "sync", (change,), said, learning=True)


def _more_staleness(now: Situation) -> Iterator[Change]:
    recipe = now.recipe
    allowed = 2 * max(1, recipe.rollout.max_staleness)
    slots = max(recipe.serve.max_loras, allowed + 2)
    yield Change(
        f"staleness-{allowed}",
        ("long-tail", "stale"),
        "generation",
        (f"rollout.max_staleness={allowed}", f"serve.max_loras={slots}"),
        ("Samples of older policies are trained on, and each replica holds more adapters.",),
        learning=True,
    )


RULES: tuple[Rule, ...] = (
    _pack,
    _keep_activations,
    _more_ranks,
    _more_in_flight,
    _more_replicas,
    _cap,
    _more_cache,
    _smaller_queue,
    _fewer_in_flight,
    _faster_sync,
    _kept_cache,
)
COST_RULES: tuple[Rule, ...] = (_fewer_replicas, _fewer_ranks)
LEARNING_RULES: tuple[Rule, ...] = (_rarer_sync, _more_staleness)


def changed(recipe: Recipe, change: Change) -> Recipe:
    """The recipe with the change, and the price of an hour that follows from its GPUs. Raises BadInput."""
    new = recipe.with_overrides(list(change.overrides))
    rate = usd_per_hour(recipe, new)
    if rate is None or rate == recipe.hardware.usd_per_hour:
        return new
    return new.with_overrides([f"hardware.usd_per_hour={rate:g}"])


def together(first: Change, second: Change) -> Change:
    """Both changes at once; the second has the last word on a field."""
    names = {override.partition("=")[0] for override in second.overrides}
    kept = tuple(override for override in first.overrides if override.partition("=")[0] not in names)
    return Change(
        slug=f"{first.slug}-{second.slug}",
        causes=tuple(dict.fromkeys((*first.causes, *second.causes))),
        side=first.side,
        overrides=(*kept, *second.overrides),
        side_effects=tuple(dict.fromkeys((*first.side_effects, *second.side_effects))),
        learning=first.learning or second.learning,
    )


def _flavor(flavor: str, gpus: int) -> str | None:
    """The flavor with so many of the same GPUs; None without any."""
    if flavor.lower() == CPU_FLAVOR or gpus < 1:
        return None
    one = re.sub(r"x\d+$", "", flavor)
    return one if gpus == 1 else f"{one}x{gpus}"
