"""A recipe in the simulator's terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlkit.errors import BadInput
from rlkit.recipe import Recipe
from rlkit.simulation.batches import Sharing
from rlkit.simulation.constants import (
    ADAPTIVE_CAP,
    BETWEEN_PROMPTS,
    CHASE,
    TOY,
    TOY_UNTRAINED,
    TWO_CORES,
    WITHIN_PROMPT,
    Physics,
    Workload,
)
from rlkit.simulation.cores import SharedCores
from rlkit.simulation.hardware import CPU_FLAVOR, FITTED_GPU, MODELS, Machine, gpu, model_shape
from rlkit.simulation.lengths import lengths_of
from rlkit.simulation.replica import Capacity
from rlkit.simulation.setup import Engine, RoutingSetup, Setup, SyncSetup, TrainerSetup

# The experiments whose lengths are known, by the model that wrote them.
WORKLOADS = {
    "Qwen/Qwen2.5-Math-1.5B": CHASE,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ADAPTIVE_CAP,
    "toy-arithmetic": TOY,
    "toy-untrained": TOY_UNTRAINED,
}

# What is assumed of a model nobody has measured: completions of a third of the most they may have, as in the chase.
ASSUMED_MEAN = 1 / 3

# vLLM's default for an API server on a GPU of this size (EngineArgs, UsageContext.OPENAI_API_SERVER).
MAX_NUM_SEQS = 1024

# vLLM's block without a GPU, in tokens.
CPU_BLOCK_SIZE = 128

GIB = 2**30


@dataclass(frozen=True)
class Translation:
    """A set-up, and what in it is not from a measurement: one sentence each."""

    setup: Setup
    extrapolated: tuple[str, ...]


def setup_of(recipe: Recipe, physics: Physics | None = None, workload: Workload | None = None) -> Setup:
    """The recipe in numbers. Raises BadInput for hardware or a model that nothing is known of."""
    return translate(recipe, physics, workload).setup


def translate(recipe: Recipe, physics: Physics | None = None, workload: Workload | None = None) -> Translation:
    """The same, with what is extrapolated: nothing where constants and lengths are given. Raises BadInput."""
    machine = machine_of(recipe)
    notes = [*_hardware_notes(recipe)] if physics is None else []
    if workload is None and recipe.model.name not in WORKLOADS:
        mean = ASSUMED_MEAN * recipe.sampling.max_completion_length
        notes.append(f"lengths: nothing is known of this model's completions, {mean:.0f} tokens a piece are assumed.")
    setup = _setup(recipe, physics or physics_of(recipe), machine, workload or workload_of(recipe))
    return Translation(setup, tuple(notes))


def machine_of(recipe: Recipe) -> Machine:
    """What a recipe runs on. Raises BadInput for hardware or a model that nothing is known of."""
    hardware = recipe.hardware
    return Machine(
        model_shape(recipe.model.name),
        gpu(hardware.trainer, "hardware.trainer"),
        gpu(hardware.replica, "hardware.replica"),
    )


def physics_of(recipe: Recipe) -> Physics:
    """The constants for a recipe's hardware."""
    return TWO_CORES if _on_cpu(recipe) else Physics()


def workload_of(recipe: Recipe) -> Workload:
    """The lengths of a recipe's model, assumed ones when nobody has measured it."""
    mean = ASSUMED_MEAN * recipe.sampling.max_completion_length
    unknown = Workload(mean, mean, BETWEEN_PROMPTS, WITHIN_PROMPT, 1460, 135, 23, 40.0)
    return WORKLOADS.get(recipe.model.name, unknown)


def _on_cpu(recipe: Recipe) -> bool:
    return {recipe.hardware.trainer.lower(), recipe.hardware.replica.lower()} == {CPU_FLAVOR}


def _hardware_notes(recipe: Recipe) -> Iterator[str]:
    if _on_cpu(recipe):
        yield "hardware cpu: two cores that trainer and replicas share, from the logs of four real runs."
    else:
        for field, flavor in (("trainer", recipe.hardware.trainer), ("replica", recipe.hardware.replica)):
            if not flavor.lower().startswith(FITTED_GPU):
                constants = "extrapolated from its data sheet, the constants are of an H200"
                yield f"hardware.{field} {flavor}: {constants}."
    if recipe.model.name not in MODELS:
        yield f"model.name {recipe.model.name}: extrapolated from its shape, the constants are of a 1.5B model."


def _setup(recipe: Recipe, physics: Physics, machine: Machine, workload: Workload) -> Setup:
    rollout, serve, sampling = recipe.rollout, recipe.serve, recipe.sampling
    adapters = recipe.lora is not None
    rates = machine.rates(physics, adapters)
    block_size = serve.block_size or (CPU_BLOCK_SIZE if recipe.hardware.replica.lower() == CPU_FLAVOR else 16)
    capacity = Capacity(_kv_tokens(recipe, machine, block_size), serve.max_num_seqs or MAX_NUM_SEQS, block_size)
    if capacity.kv_tokens < serve.max_model_len:
        tokens = f"{capacity.kv_tokens:,.0f} tokens"
        raise BadInput(f"serve: the KV cache holds {tokens}, one sequence may take max_model_len {serve.max_model_len}")
    return Setup(
        steps=recipe.train.steps,
        engines=tuple(
            Engine(server, capacity, rates) for server in range(serve.replicas) for _ in range(serve.data_parallel_size)
        ),
        lengths=lengths_of(workload, sampling.max_completion_length),
        trainer=_trainer(recipe, physics, machine, workload),
        sync=_sync(recipe, physics),
        routing=RoutingSetup(
            recipe.routing.policy, recipe.routing.spill_threshold, recipe.routing.block_size or block_size, adapters
        ),
        num_generations=sampling.num_generations,
        max_inflight=recipe.inflight_limit,
        cap=recipe.cap.policy,
        max_model_len=serve.max_model_len,
        queue_maxsize=rollout.queue_maxsize,
        max_staleness=rollout.max_staleness,
        score_s=physics.score_s,
        score_variation=physics.score_variation,
        poll_s=physics.poll_s,
        score_queue_groups=physics.score_queue_groups,
        lengths_over=workload.over_steps,
        cores=SharedCores(physics.shared_cores, physics.trainer_cores, physics.engine_cores),
    )


def _kv_tokens(recipe: Recipe, machine: Machine, block_size: int) -> float:
    serve = recipe.serve
    if serve.num_gpu_blocks is not None:
        return float((serve.num_gpu_blocks - 1) * block_size)  # one is vLLM's null block
    if serve.kv_cache_gib is not None:
        return serve.kv_cache_gib * GIB / machine.model.kv_bytes
    return machine.kv_tokens(serve.gpu_memory_utilization)


def _trainer(recipe: Recipe, physics: Physics, machine: Machine, workload: Workload) -> TrainerSetup:
    train, factor = recipe.train, workload.trainer_factor
    sharing = Sharing(workload.template_tokens, workload.shared_completion) if workload.folds_prompts else None
    return TrainerSetup(
        processes=train.processes,
        token_budget=recipe.serve.max_model_len if train.token_budget is None else train.token_budget,
        per_device_train_batch_size=train.per_device_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        gradient_checkpointing=train.gradient_checkpointing,
        row_s=physics.row_s * factor,
        row_token_s=machine.row_token_s(physics) * factor,
        recompute_share=physics.recompute_share,
        forward_share=physics.forward_share,
        microbatch_s=physics.microbatch_s,
        sample_s=physics.sample_s,
        fetch_s=physics.fetch_s,
        optimizer_s=physics.optimizer_s,
        flops_per_token=machine.model.flops_per_token,
        peak_flops=machine.trainer.peak_flops,
        sharing=sharing,
    )


def _sync(recipe: Recipe, physics: Physics) -> SyncSetup:
    transport = recipe.transport
    return SyncSetup(
        kind=transport.kind,
        interval=recipe.rollout.weight_sync_steps,
        clear_cache=not transport.keep_cache,
        retry_s=transport.retry_s,
        deadline_s=transport.deadline_s,
        max_loras=recipe.serve.max_loras,
        pause_s=physics.pause_s,
        save_s=physics.save_s,
        load_s=physics.load_s,
        push_s=physics.push_s,
        lag_s=physics.lag_s,
        lag_deviation_s=physics.lag_deviation_s,
        merged_s=physics.merged_sync_s,
    )
