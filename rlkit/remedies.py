"""Changes of a recipe, each with the cause it answers, the fields it sets, and what else it does. Pure.

Every rule looks at the recipe as it is and proposes nothing, one change, or a few sizes of the same. Whether one pays
is not decided here: `rlkit.advice` simulates them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rlkit.recipe import Recipe
from rlkit.simulation.hardware import CPU_FLAVOR
from rlkit.simulation.planning import PACKED_FILL, SHORT_RETRY_S, packed_tokens, usd_per_hour

Side = Literal["trainer", "generation", "sync", "cost"]

# Longest sequences that a packed row holds: four as published, and its neighbours for other memories.
ROWS_OF_CONTEXTS = (8, 4, 2, 1)

# Rollouts in flight for each engine: what one had in the published chase (64, then 128), and once more.
IN_FLIGHT_LADDER = (16, 32, 64, 128, 256)

# The in-flight limit comes with a queue of twice its size, so that finished groups find room (published: 384 and 768).
QUEUE_PER_INFLIGHT = 2

# The Hub's flavors have up to eight GPUs.
MOST_RANKS = 8

# What vLLM takes at once where the recipe leaves it open: 128 on a CPU, the smallest default there is.
DEFAULT_SLOTS = 128


@dataclass(frozen=True)
class Change:
    """One change of a recipe: `overrides` as --set takes them, and what it does besides, a sentence each."""

    slug: str  # names the recipe and the run that come of it
    causes: tuple[str, ...]  # of rlkit.causes
    side: Side
    overrides: tuple[str, ...]
    side_effects: tuple[str, ...] = ()
    learning: bool = False  # changes what is learned, not only how fast


@dataclass(frozen=True)
class Situation:
    """A recipe, and what its run says of the samples of a step (their number, and tokens of each, prompt included)."""

    recipe: Recipe
    samples_per_step: float
    sample_tokens: float

    @property
    def engines(self) -> int:
        """vLLM engines of all replicas."""
        return self.recipe.serve.replicas * self.recipe.serve.data_parallel_size

    @property
    def shares_cores(self) -> bool:
        """Trainer and replicas run on one machine without GPUs: more of them only divide it."""
        return self.recipe.hardware.replica.lower() == CPU_FLAVOR

    def queue_for(self, in_flight: int) -> int:
        """Samples the queue may hold: as many as now, or more for what is in flight and still trained on in time."""
        fresh = math.floor(self.recipe.fresh_samples(self.samples_per_step))
        return max(self.recipe.rollout.queue_maxsize, min(QUEUE_PER_INFLIGHT * in_flight, fresh - in_flight))


Rule = Callable[[Situation], Iterator[Change]]


def remedies(situation: Situation, learning: bool = False, cost: bool = False) -> list[Change]:
    """Every change that the recipe allows; with `cost` also what saves money alone, with `learning` what is learned."""
    rules = [*RULES, *(COST_RULES if cost else ()), *(LEARNING_RULES if learning else ())]
    return [change for rule in rules for change in rule(situation)]


def _pack(now: Situation) -> Iterator[Change]:
    """Several samples in a row, or longer rows."""
    train, longest = now.recipe.train, now.recipe.serve.max_model_len
    budget_now = longest if train.token_budget is None else train.token_budget
    rows_now = 1 if budget_now else train.per_device_train_batch_size * now.sample_tokens / PACKED_FILL
    for contexts in ROWS_OF_CONTEXTS:
        budget = contexts * longest
        if budget <= max(budget_now, rows_now):
            continue
        if budget_now and train.gradient_accumulation_steps < 2:
            return
        yield Change(
            slug=f"rows-{budget}",
            causes=("tiny-rows", "compute"),
            side="trainer",
            overrides=tuple(packed_tokens(now.recipe, now.samples_per_step * now.sample_tokens, budget)),
            side_effects=("Samples of a step vary with their lengths.",) if not budget_now else (),
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
    """The next sizes for each engine."""
    recipe, limit = now.recipe, now.recipe.inflight_limit
    slots = (recipe.serve.max_num_seqs or (DEFAULT_SLOTS if now.shares_cores else IN_FLIGHT_LADDER[-1])) * now.engines
    # Beyond the staleness window what is in flight is thrown away when it is done.
    most = min(slots, math.floor(recipe.fresh_samples(now.samples_per_step)))
    sizes = sorted({min(each * now.engines, most) for each in IN_FLIGHT_LADDER if each * now.engines > limit})
    for size in [size for size in sizes if size > limit][:3]:
        yield Change(
            f"inflight-{size}",
            ("client-limit", "replicas"),
            "generation",
            _generation(now, size),
            ("More rollouts at once take longer each, so that samples are older when they are trained on.",),
        )


def _more_replicas(now: Situation) -> Iterator[Change]:
    replicas = now.recipe.serve.replicas
    if now.shares_cores:
        return
    one, said = f"serve.replicas={replicas + 1}", ("One more replica is paid for.",)
    yield Change(f"replicas-{replicas + 1}-same-inflight", ("replicas", "over-admission"), "generation", (one,), said)
    size = math.ceil(now.recipe.inflight_limit * (replicas + 1) / replicas)
    yield Change(
        f"replicas-{replicas + 1}",
        ("replicas", "over-admission"),
        "generation",
        (one, *_generation(now, size)),
        said,
    )


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
    window = math.floor(now.recipe.fresh_samples(now.samples_per_step))
    if now.recipe.rollout.queue_maxsize > window:
        change = f"rollout.queue_maxsize={max(1, window)}"
        yield Change("queue", ("queue", "stale"), "generation", (change,), ("Samples are fresher.",))


def _fewer_in_flight(now: Situation) -> Iterator[Change]:
    limit = now.recipe.inflight_limit
    if limit // 2 >= now.recipe.sampling.num_generations:
        change = f"rollout.max_inflight_tasks={limit // 2}"
        said = ("Samples are fresher.",)
        yield Change(f"inflight-{limit // 2}", ("stale", "over-admission"), "generation", (change,), said)


def _faster_sync(now: Situation) -> Iterator[Change]:
    transport = now.recipe.transport
    if transport.kind != "bucket" or now.recipe.lora is None:
        return
    said = (
        "A receiver runs beside each replica, and the adapter's files go to it over the network; what that takes is "
        "measured on one machine, not between rented ones."
    )
    yield Change("push", ("sync",), "sync", ("transport.kind=push",), (said,))
    if transport.retry_s > SHORT_RETRY_S:
        retry = f"transport.retry_s={SHORT_RETRY_S}"
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
        more = max(recipe.inflight_limit, IN_FLIGHT_LADDER[-1] * fewer * recipe.serve.data_parallel_size)
        if more > recipe.inflight_limit:
            more_at_once = (change, *_generation(now, more))
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
    steps = 2 * now.recipe.rollout.weight_sync_steps
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


def _generation(now: Situation, in_flight: int) -> tuple[str, ...]:
    found = (f"rollout.max_inflight_tasks={in_flight}",)
    queue = now.queue_for(in_flight)
    return found if queue == now.recipe.rollout.queue_maxsize else (*found, f"rollout.queue_maxsize={queue}")


def _flavor(flavor: str, gpus: int) -> str | None:
    """The flavor with so many of the same GPUs; None without any."""
    if flavor.lower() == CPU_FLAVOR or gpus < 1:
        return None
    one = re.sub(r"x\d+$", "", flavor)
    return one if gpus == 1 else f"{one}x{gpus}"
