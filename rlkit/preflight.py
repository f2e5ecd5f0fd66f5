"""What would go wrong with a recipe on this machine, found before anything starts.

`check` is pure: a recipe and the facts of a machine in, all findings out, each with what to change. `gather_facts`
looks. An error would end the run, or make it another run than the recipe says; a warning wastes work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlkit import engines, inputs, machine
from rlkit.recipe import Recipe
from rlkit.recipe_bounds import MAX_IN_FLIGHT, MAX_REPLICAS
from rlkit.settling import MIN_STEPS, steps_for_a_verdict, warmup_steps
from rlkit.training.toy_task import MODEL_NAMES

# What max_lora_rank may be (vLLM builds its adapter buffers for these; TRL's VLLM_LORA_RANKS).
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Head sizes that vLLM 0.31's CPU attention takes (CPUAttentionBackend.get_supported_head_sizes); it refuses others at
# the first request, when /health is already 200.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_BLOCK_MULTIPLE = 32  # tokens; CPUAttentionBackend.get_supported_kernel_block_sizes
# vLLM 0.31's defaults for a server on a CPU (EngineArgs, UsageContext.OPENAI_API_SERVER).
CPU_MAX_NUM_SEQS = 128
CPU_MAX_NUM_BATCHED_TOKENS = 2048
CPU_BLOCK_SIZE = 128
GPU_BLOCK_SIZE = 16
# Room for logs, trackio's database and two checkpoints of an adapter. A full disk at a checkpoint loses the run.
MIN_FREE_DISK_GIB = 1.0

PACKAGES = ("trl", "transformers", "vllm", "torch", *machine.TORCH_COMPANIONS)
COMPUTE_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Finding:
    """One thing to change: the recipe's field (or the package), what is wrong, what to do."""

    severity: Literal["error", "warning"]
    field: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}; {self.fix}"


@dataclass(frozen=True)
class MachineFacts:
    """What `check` knows of the machine and of what the recipe names; None: not known, and nothing is concluded."""

    cuda_devices: int = 0
    memory_gib: float | None = None  # available
    free_disk_gib: float | None = None
    free_ports: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    engine_problem: str | None = None
    folder_problem: str | None = None
    trackio_problem: str | None = None
    cache_problem: str | None = None
    model_problem: str | None = None
    data_problem: str | None = None
    reward_problem: str | None = None
    simulation_problem: str | None = None
    head_size: int | None = None
    max_positions: int | None = None
    chat_template_known: bool | None = None
    longest_prompt_tokens: int | None = None


def gather_facts(recipe: Recipe, folder: Path | None = None) -> MachineFacts:
    """Look at this machine and at the model, prompts and reward of `recipe`.

    `folder` is where the run will be, None while that is open: then only the space here is looked at. A simulated run
    loads no model and no prompts; only whether it can be simulated is looked at.
    """
    if recipe.engine == "sim":
        return MachineFacts(
            free_disk_gib=machine.free_disk_gib(folder or Path.cwd()),
            folder_problem=None if folder is None else inputs.inspect_folder(folder),
            trackio_problem=machine.unwritable(machine.trackio_folder()),
            simulation_problem=inputs.inspect_simulation(recipe),
        )
    versions = machine.versions(PACKAGES)
    model = inputs.inspect_model(recipe.model)
    data_problem = inputs.inspect_data(recipe.data)
    return MachineFacts(
        cuda_devices=machine.cuda_devices(versions["torch"]),
        memory_gib=machine.available_memory_gib(),
        free_disk_gib=machine.free_disk_gib(folder or Path.cwd()),
        free_ports=machine.free_ports(ports_needed(recipe)),
        versions=versions,
        engine_problem=engines.engine_problem(recipe.engine),
        folder_problem=None if folder is None else inputs.inspect_folder(folder),
        trackio_problem=machine.unwritable(machine.trackio_folder()),
        cache_problem=machine.unwritable(machine.cache_folder()) if recipe.model.name in MODEL_NAMES else None,
        model_problem=model.problem,
        data_problem=data_problem,
        reward_problem=inputs.inspect_reward(recipe),
        head_size=model.head_size,
        max_positions=model.max_positions,
        chat_template_known=model.chat_template_known,
        longest_prompt_tokens=None if data_problem else inputs.longest_prompt_tokens(recipe, model.folder),
    )


def check(recipe: Recipe, facts: MachineFacts) -> list[Finding]:
    """Every finding at once, errors first."""
    findings = [*_place(recipe, facts), *_inputs(recipe, facts), *_adapter(recipe), *_lengths(recipe, facts)]
    findings += [*_pipeline(recipe), *_steps(recipe), *_precision(recipe)]
    if recipe.engine == "local":
        findings += _machine(recipe, facts)
        findings += _without_gpu(recipe, facts) if facts.cuda_devices == 0 else _gpus(recipe, facts)
    if recipe.engine == "hf":
        from rlkit.preflight_hf import hf_findings  # which knows what a Finding is

        findings += hf_findings(recipe)
    return sorted(findings, key=lambda finding: finding.severity != "error")


def ports_needed(recipe: Recipe) -> int:
    """Ports of a local run: one for the proxy, one for each replica, one for each receiver of pushed adapters."""
    return 1 + recipe.serve.replicas * (2 if recipe.transport.kind == "push" else 1)


def memory_needed_gib(recipe: Recipe) -> float:
    """Memory of a small model's local run on a CPU, from measured runs (see `rlkit.machine`)."""
    cache = math.ceil(recipe.serve.kv_cache_gib or 1)
    return recipe.serve.replicas * (machine.REPLICA_GIB + cache) + machine.TRAINER_GIB


def _place(recipe: Recipe, facts: MachineFacts) -> Iterator[Finding]:
    if facts.engine_problem:
        yield _error("engine", facts.engine_problem, f"use --engine {' or '.join(engines.LAUNCHERS)}")
    if facts.folder_problem:
        yield _error("folder", facts.folder_problem, "choose another place with --folder")
    if facts.trackio_problem and recipe.engine in ("local", "sim"):
        yield _error("TRACKIO_DIR", facts.trackio_problem, "set it to a folder that can be written")


def _inputs(recipe: Recipe, facts: MachineFacts) -> Iterator[Finding]:
    if recipe.engine == "sim":
        if facts.simulation_problem:
            name, _, problem = facts.simulation_problem.partition(": ")
            yield _error(name, problem, "name what the simulator knows, or take another engine")
        return
    if facts.model_problem:
        yield _error("model.name", facts.model_problem, "name a folder that transformers can load, or a Hub id")
    if facts.data_problem:
        yield _error("data.name", facts.data_problem, "correct data.name, data.prompt_column and data.answer_column")
    if facts.reward_problem:
        fix = "name a function at the top level of a module that Python finds from here, as module:function"
        yield _error("reward", facts.reward_problem, fix)
    if facts.chat_template_known is False and recipe.model.chat_template == "auto":
        fix = "set model.chat_template to chatml if its turns are <|im_start|>..<|im_end|>, or take a model TRL knows"
        yield _error("model.chat_template", "TRL does not recognise the chat template of this model", fix)


def _adapter(recipe: Recipe) -> Iterator[Finding]:
    lora, serve, kind = recipe.lora, recipe.serve, recipe.transport.kind
    if lora is None:
        if kind != "merged":
            fix = "set transport.kind to merged, or add a lora section"
            yield _error("transport.kind", f"{kind} sends adapters, and lora is null", fix)
        elif recipe.transport.keep_cache and recipe.engine != "sim":
            message = (
                "true, but merged weights keep their name and a kept cache would be of the old ones: it is cleared"
            )
            yield _warning("transport.keep_cache", message, "set it to false")
        return
    if kind == "merged":
        fix = "set transport.kind to bucket or push, or lora to null"
        yield _error("transport.kind", "merged sends full weights, and lora asks for an adapter", fix)
    needed = recipe.adapter_slots_needed
    if serve.max_loras < needed:
        message = f"{serve.max_loras} slots, and max_staleness {recipe.rollout.max_staleness} needs {needed}"
        yield _error("serve.max_loras", message, f"set serve.max_loras to {needed} or lower rollout.max_staleness")
    yield from _ranks(lora.r, serve.max_lora_rank)
    if serve.data_parallel_size > 1:
        message = f"{serve.data_parallel_size}: a loaded adapter reaches only one rank of a data-parallel server"
        yield _error("serve.data_parallel_size", message, "set it to 1 and serve.replicas to what it was")
    # From here on: what vLLM cannot serve as an adapter, so that TRL would merge full weights at every sync.
    if lora.use_dora:
        yield _error("lora.use_dora", "vLLM's adapters have no place for DoRA's magnitudes", "set it to false")
    if lora.modules_to_save:
        message = f"{lora.modules_to_save} are trained in full and do not travel in an adapter"
        yield _error("lora.modules_to_save", message, "empty the list")
    if lora.bias != "none":
        yield _error("lora.bias", f"{lora.bias}: trained biases do not travel in an adapter", "set it to none")
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    for layer in ("lm_head", "embed_tokens"):
        if any(layer in target for target in targets):
            message = f"{layer} is targeted, which the trainer and vLLM would compute differently"
            yield _error("lora.target_modules", message, f"leave {layer} out, or use all-linear (which does)")


def _ranks(rank: int, served: int) -> Iterator[Finding]:
    fitting = next((allowed for allowed in LORA_RANKS if allowed >= rank), None)
    if fitting is None:
        yield _error("lora.r", f"{rank} is more than vLLM can serve", f"set lora.r to at most {LORA_RANKS[-1]}")
    elif served not in LORA_RANKS:
        message = f"{served} is not among the ranks vLLM allows {list(LORA_RANKS)}"
        yield _error("serve.max_lora_rank", message, f"set serve.max_lora_rank to {fitting}")
    elif rank > served:
        fix = f"set serve.max_lora_rank to {fitting} or lora.r to at most {served}"
        yield _error("lora.r", f"{rank} is above serve.max_lora_rank {served}", fix)


def _lengths(recipe: Recipe, facts: MachineFacts) -> Iterator[Finding]:
    serve, completion, prompt = recipe.serve, recipe.sampling.max_completion_length, facts.longest_prompt_tokens
    if (prompt or 1) + completion > serve.max_model_len:
        of = f"a prompt of {prompt} tokens" if prompt else "any prompt"
        message = f"{of} with max_completion_length {completion} does not fit into {serve.max_model_len}"
        fix = f"set serve.max_model_len to at least {(prompt or 1) + completion} or shorten the completions"
        yield _error("serve.max_model_len", message, fix)
    longest = min(serve.max_model_len, prompt + completion) if prompt else serve.max_model_len
    budget = recipe.train.token_budget
    if budget is not None and 0 < budget < longest:
        message = f"{budget}: a sample of up to {longest} tokens that is longer fits in no row and is dropped"
        yield _warning("train.token_budget", message, f"set it to at least {longest}, or to 0 for a fixed count")
    if facts.max_positions is not None and serve.max_model_len > facts.max_positions:
        message = f"{serve.max_model_len} is more than the model's {facts.max_positions} positions"
        yield _error("serve.max_model_len", message, f"set it to at most {facts.max_positions}")
    if serve.num_gpu_blocks is not None:
        on_cpu = recipe.engine == "local" and facts.cuda_devices == 0
        block = serve.block_size or (CPU_BLOCK_SIZE if on_cpu else GPU_BLOCK_SIZE)
        held = (serve.num_gpu_blocks - 1) * block  # one is vLLM's null block
        everywhere = held * serve.engines
        if held < serve.max_model_len:
            message = f"{serve.num_gpu_blocks} blocks of {block} hold {held} tokens, one sequence may take {longest}"
            fix = f"set it to at least {-(-serve.max_model_len // block) + 1} or lower serve.max_model_len"
            yield _error("serve.num_gpu_blocks", message, fix)
        elif recipe.cap.policy == "none" and recipe.inflight_limit * longest > everywhere:
            in_flight = recipe.inflight_limit
            message = f"none, and {in_flight} in flight may need {in_flight * longest:,} tokens of cache"
            fix = f"set it to rlkit, or rollout.max_inflight_tasks to at most {everywhere // longest}"
            yield _warning("cap.policy", f"{message} where there are {everywhere:,}: requests are preempted", fix)


def _pipeline(recipe: Recipe) -> Iterator[Finding]:
    rollout, serve, samples = recipe.rollout, recipe.serve, recipe.samples_per_step
    generations = recipe.sampling.num_generations
    if rollout.max_inflight_tasks == 0:
        yield _error("rollout.max_inflight_tasks", "0 starts no rollout", "set it to -1 for TRL's own formula")
    if recipe.inflight_limit > MAX_IN_FLIGHT:  # each factor of TRL's formula is within its bound
        message = (
            f"TRL's formula makes {recipe.inflight_limit} of it, more than {MAX_IN_FLIGHT} connections are not had"
        )
        yield _error("rollout.max_inflight_tasks", message, "set it to what the replicas run at once")
    if serve.engines > MAX_REPLICAS:
        message = f"{serve.replicas} replicas of {serve.data_parallel_size} engines are {serve.engines}"
        yield _error("serve.replicas", message, f"ask for at most {MAX_REPLICAS} engines")
    if samples is not None and samples % generations:
        message = f"{samples} samples a step is not a multiple of num_generations {generations}: groups are split"
        fix = f"make per-device size x accumulation x processes a multiple of {generations}"
        yield _warning("train.gradient_accumulation_steps", message, fix)
    if samples is not None:
        fresh = round(recipe.fresh_samples(samples))
        if rollout.queue_maxsize > fresh:
            message = f"{rollout.queue_maxsize}: beyond {fresh} it only fills with samples that will be dropped"
            yield _warning("rollout.queue_maxsize", message, f"set it to {fresh}")
    if serve.max_num_seqs is not None:
        running = serve.engines * serve.max_num_seqs
        if running < recipe.inflight_limit <= MAX_IN_FLIGHT:
            message = f"{recipe.inflight_limit} in flight, and the replicas run {running} at once: the rest waits there"
            yield _warning("rollout.max_inflight_tasks", message, f"set it to {running} or raise serve.max_num_seqs")
    routed = recipe.routing.block_size
    if routed is not None and serve.block_size is not None and routed != serve.block_size:
        message = f"{routed}, and the replicas cache blocks of {serve.block_size}: matches would be misjudged"
        yield _warning("routing.block_size", message, "set it to null, it is then read from the replicas")


def _steps(recipe: Recipe) -> Iterator[Finding]:
    steps, interval, needed = recipe.train.steps, recipe.rollout.weight_sync_steps, steps_for_a_verdict(recipe)
    if interval > steps:
        message = f"{interval} is more than train.steps {steps}: every rollout comes from the first weights"
        yield _warning("rollout.weight_sync_steps", message, f"set it to at most {steps}, or raise train.steps")
    if steps < needed:
        message = f"{steps} is too few for a verdict: {MIN_STEPS} are read after {warmup_steps(recipe)} of warm-up"
        yield _warning("train.steps", message, f"set it to at least {needed}")


def _precision(recipe: Recipe) -> Iterator[Finding]:
    served, compute = recipe.serve.dtype, COMPUTE_DTYPES.get(recipe.train.precision, recipe.model.dtype)
    if served == "auto":
        message = "auto lets vLLM choose (it halves a float32 model's), so ratio may leave 1"
        fix = "name a dtype here and in model.dtype" if compute == "auto" else f"set serve.dtype to {compute}"
        yield _warning("serve.dtype", message, fix)
    elif compute == "auto":
        message = "auto takes the checkpoint's, which may not be what is served"
        yield _warning("model.dtype", message, f"set it to {served}")
    elif served != compute:
        fix = f"set serve.dtype to {compute}, or train.precision to match"
        message = f"{served}, and the trainer computes in {compute}: their probabilities differ and ratio leaves 1"
        yield _warning("serve.dtype", message, fix)


def _machine(recipe: Recipe, facts: MachineFacts) -> Iterator[Finding]:
    for package, message, fix in machine.version_problems(facts.versions):
        yield _error(package, message, fix)
    if facts.cache_problem:
        yield _error("RLKIT_CACHE", facts.cache_problem, "set it to a folder that can be written")
    needed = ports_needed(recipe)
    if facts.free_ports is not None and facts.free_ports < needed:
        message = f"{needed} ports are needed on 127.0.0.1 and {facts.free_ports} could be had"
        yield _error("serve.replicas", message, "close what holds them, or ask for fewer replicas")
    if facts.free_disk_gib is not None and facts.free_disk_gib < MIN_FREE_DISK_GIB:
        message = f"{facts.free_disk_gib:.1f} GiB are free for the run's folder, {MIN_FREE_DISK_GIB:g} are needed"
        yield _error("disk", message, "free some, or choose another place with --folder")


def _without_gpu(recipe: Recipe, facts: MachineFacts) -> Iterator[Finding]:
    serve, train = recipe.serve, recipe.train
    if serve.block_size is not None and serve.block_size % CPU_BLOCK_MULTIPLE:
        fix = f"set it to a multiple of {CPU_BLOCK_MULTIPLE}, or to null"
        yield _error("serve.block_size", f"{serve.block_size} does not work without a GPU", fix)
    if facts.head_size is not None and facts.head_size not in CPU_HEAD_SIZES:
        message = f"its attention heads of {facts.head_size} are not among those vLLM serves without a GPU"
        yield _error("model.name", message, f"take a model with heads of {', '.join(map(str, CPU_HEAD_SIZES))}")
    whole = (serve.max_num_seqs or CPU_MAX_NUM_SEQS) * serve.max_model_len
    batched = serve.max_num_batched_tokens or CPU_MAX_NUM_BATCHED_TOKENS
    if batched < whole:
        message = f"{batched} can split the prefill of a seeded request, which kills vLLM's CPU engine"
        fix = f"set it to max_num_seqs x max_model_len = {whole}, or lower those"
        yield _error("serve.max_num_batched_tokens", message, fix)
    if train.processes > 1:
        yield _error("train.processes", f"{train.processes} ranks need GPUs, there is none", "set it to 1")
    if train.precision != "no":
        message = f"{train.precision} is mixed precision on a GPU, there is none"
        yield _error("train.precision", message, 'set train.precision to "no" and serve.dtype to model.dtype')
    if recipe.transport.kind == "merged":
        yield _error("transport.kind", "merged weights travel over NCCL, which needs GPUs", "train an adapter instead")
    if serve.kv_cache_gib is not None and not serve.kv_cache_gib.is_integer():
        message = f"{serve.kv_cache_gib:g} becomes {math.ceil(serve.kv_cache_gib)}: vLLM takes whole GiB without a GPU"
        yield _warning("serve.kv_cache_gib", message, "set it to that, and serve.num_gpu_blocks for a smaller cache")
    needed = memory_needed_gib(recipe)
    if facts.memory_gib is not None and facts.memory_gib < needed:
        message = f"about {needed:.1f} GiB of memory are needed and {facts.memory_gib:.1f} are available"
        yield _warning("serve.replicas", message, "ask for fewer replicas or a smaller serve.kv_cache_gib")


def _gpus(recipe: Recipe, facts: MachineFacts) -> Iterator[Finding]:
    serve, devices = recipe.serve, facts.cuda_devices
    needed = serve.engines * serve.tensor_parallel_size + recipe.train.processes
    if needed > devices:
        message = f"replicas and trainer want {needed} GPUs and there are {devices}: some will share one"
        fix = "ask for fewer, or give each its part of the memory with serve.gpu_memory_utilization"
        yield _warning("serve.replicas", message, fix)


def _error(field: str, message: str, fix: str) -> Finding:
    return Finding("error", field, message, fix)


def _warning(field: str, message: str, fix: str) -> Finding:
    return Finding("warning", field, message, fix)
