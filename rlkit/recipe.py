"""The recipe: everything one run needs, as data.

A recipe is a YAML file under `runs/`. `load_recipe` reads it (with `extends:` and `--set` overrides applied) into a
`Recipe`, whose fields are checked one by one here; what can only be seen by looking at several fields, at the model
or at the machine is `rlkit.preflight`'s business. Field names are TRL's and vLLM's where those have one.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML

from rlkit import recipe_bounds as bounds
from rlkit.errors import BadInput
from rlkit.recipe_layers import Layer, assign, merge_layers, read_layers, require_mapping, source_of
from rlkit.refusals import refusals

# TRL's name for the adapter it publishes as `<name>-v<N>` (AsyncGRPOTrainer._lora_name); it cannot be configured there.
POLICY_NAME = "trl-policy"

# An empty name would be taken for the current folder, or be refused far from here.
Name = Annotated[str, Field(min_length=1)]


MAX_NAME = 100  # characters; a run's folder and its trackio run are named after it, and most filesystems allow 255
_NAME = f"up to {MAX_NAME} letters, digits, dots, dashes and underscores that begin with a letter or digit"


class _Section(BaseModel):
    # Strict: a recipe that says steps: "50" or steps: true has a typing mistake, and guessing hides it.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """The base model: `toy-arithmetic` or `toy-untrained` (see `rlkit.training.toy_model`), a folder, or a Hub id."""

    name: Name
    revision: Name | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"  # the trainer's master weights
    chat_template: Literal["auto", "chatml"] = "auto"  # chatml: set the response template by hand (Qwen2.5-Math)
    trust_remote_code: bool = False


class DataSection(_Section):
    """The prompts: `toy-addition` (generated), a JSON-lines file, or a Hub dataset."""

    name: Name
    split: Name = "train"
    prompt_column: Name = "problem"
    answer_column: Name = "answer"
    system_prompt: str | None = None
    limit: bounds.OrNever | None = None  # first rows only


class LoraSection(_Section):
    """The adapter (peft's LoraConfig). Only what vLLM can serve is synced as an adapter; preflight says what is not."""

    r: bounds.Rank = 1
    alpha: bounds.Rank = 2
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: Name | list[Name] = "all-linear"
    bias: Literal["none", "all", "lora_only"] = "none"
    use_dora: bool = False
    modules_to_save: list[str] = []


class SamplingSection(_Section):
    """How rollouts are sampled; a group is `num_generations` rollouts of one prompt."""

    num_generations: bounds.Group = 8
    max_completion_length: bounds.Tokens = 2048
    temperature: bounds.Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: bounds.TopK = 0


class TrainSection(_Section):
    """The trainer: length, optimiser and batch shape."""

    steps: bounds.Steps
    learning_rate: bounds.LearningRate = 1e-6
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    token_budget: bounds.Budget | None = None  # tokens a row; 0 = fixed sample count; None = serve.max_model_len
    per_device_train_batch_size: bounds.Batch = 1
    gradient_accumulation_steps: bounds.Batch = 1
    gradient_checkpointing: bool = True
    processes: bounds.Processes = 1  # data-parallel ranks
    precision: Literal["no", "bf16", "fp16"] = "no"  # compute precision; the master weights are model.dtype
    save_steps: bounds.OrNever = 50
    seed: bounds.Seed = 0


class RolloutSection(_Section):
    """The asynchronous pipeline between generation and training."""

    max_staleness: bounds.Staleness = 4  # policy versions
    weight_sync_steps: bounds.Steps = 1
    max_inflight_tasks: bounds.InFlight = -1  # -1: TRL's own formula, see Recipe.inflight_limit
    queue_maxsize: bounds.QueueSize = 1024  # samples
    request_timeout: bounds.WholeSeconds = 600  # seconds


class ServeSection(_Section):
    """The replicas: how many vLLM servers, and their flags."""

    replicas: bounds.Replicas = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: bounds.Tokens
    max_loras: bounds.Slots = 6
    max_lora_rank: bounds.Rank = 8
    data_parallel_size: bounds.Parallel = 1
    tensor_parallel_size: bounds.Parallel = 1
    max_num_seqs: bounds.Sequences | None = None
    max_num_batched_tokens: bounds.Tokens | None = None
    block_size: bounds.Block | None = None  # tokens per KV block; None = vLLM's own (16 on a GPU, 128 on a CPU)
    num_gpu_blocks: bounds.Blocks | None = None  # --num-gpu-blocks-override: a small cache on purpose
    kv_cache_gib: bounds.CacheGib | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    flags: list[str] = []  # passed to vLLM as they are
    env: dict[str, str] = {}

    @property
    def engines(self) -> int:
        """vLLM engines of all replicas, each with a KV cache of its own."""
        return self.replicas * self.data_parallel_size


class TransportSection(_Section):
    """How a new policy reaches the replicas.

    `bucket`: every Job mounts one path and vLLM loads from it. `push`: the proxy sends the files to a receiver beside
    each replica. `merged`: full weights over NCCL, which is all there is without LoRA or with data-parallel servers.
    """

    kind: Literal["bucket", "push", "merged"] = "bucket"
    retry_s: bounds.Seconds = 0.5  # between attempts on a replica whose mount lags
    deadline_s: bounds.Seconds = 60.0  # for one adapter on all replicas, else it is rolled back
    keep_cache: bool = True  # pause with clear_cache=false: safe because every adapter version has its own name


class RoutingSection(_Section):
    """Where a rollout goes: the published prefix rule, or plain round robin to compare with."""

    policy: Literal["prefix", "round-robin"] = "prefix"
    # Requests a replica may be ahead of the least loaded one and still get a rollout for its cache. The published 8 is
    # the size of a group and spills part of it (tests/bench/routing.py): 12 takes 1 % more rollouts to their prompt.
    spill_threshold: bounds.Ahead = 12
    block_size: bounds.Block | None = None  # None: read from the replicas


class CapSection(_Section):
    """How many rollouts the worker admits at once; rollout.max_inflight_tasks is the ceiling.

    `rlkit` follows the servers' KV caches and queues, `published` does so by the rule it is compared with, and `none`
    admits up to the ceiling, as TRL does.
    """

    policy: Literal["none", "published", "rlkit"] = "rlkit"


class TrackingSection(_Section):
    """Where the metrics go in trackio."""

    project: Name = "rlkit"
    space_id: Name | None = None


class HardwareSection(_Section):
    """What the jobs run on; only the `hf` and `sim` engines read it.

    `trainer` and `replica` are flavors of Hugging Face Jobs (`hf jobs hardware` lists them with their prices).
    """

    trainer: str = "cpu"
    replica: str = "cpu"
    usd_per_hour: bounds.UsdOrNothing | None = None  # of the whole set-up, when known beforehand
    image: str = "vllm/vllm-openai:v0.31.0"  # of every Job; the release that trl 1.16 supports
    namespace: str | None = None  # the user or organisation that pays; None: the token's own
    bucket: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "rlkit"
    budget_usd: bounds.Usd | None = None  # everything is cancelled once it is spent
    deadline_hours: bounds.Hours = 24.0  # likewise after so long; also every Job's timeout
    scheduling_minutes: bounds.Minutes = 30.0  # how long a Job may wait for its hardware
    network_group: bool = True  # the Jobs of a run reach each other directly; else through the Jobs proxy


class Recipe(_Section):
    """Everything one run needs. Immutable: a change is a new recipe (`recipe.with_overrides`)."""

    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME, description=_NAME),
    ]
    engine: Literal["local", "hf", "sim"] = "local"
    model: ModelSection
    data: DataSection
    reward: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function")]
    lora: LoraSection | None = LoraSection()
    sampling: SamplingSection = SamplingSection()
    train: TrainSection
    rollout: RolloutSection = RolloutSection()
    serve: ServeSection
    transport: TransportSection = TransportSection()
    routing: RoutingSection = RoutingSection()
    cap: CapSection = CapSection()
    tracking: TrackingSection = TrackingSection()
    hardware: HardwareSection = HardwareSection()

    @property
    def samples_per_step(self) -> int | None:
        """Samples in one optimizer step, or None when a token budget makes it depend on their lengths."""
        if self.train.token_budget == 0:
            return self._fixed_samples_per_step
        return None

    @property
    def inflight_limit(self) -> int:
        """The most rollouts in flight at once: `max_inflight_tasks`, or TRL 1.16's formula when that is -1."""
        if self.rollout.max_inflight_tasks >= 0:
            return self.rollout.max_inflight_tasks
        return max(self.rollout.max_staleness, 1) * self._fixed_samples_per_step

    def fresh_samples(self, per_step: float) -> float:
        """Samples consumed before the oldest expires, at `per_step` samples in an optimizer step.

        A version lives for weight_sync_steps steps, and max_staleness 0 still trains on the one that is current.
        """
        return max(self.rollout.max_staleness, 1) * self.rollout.weight_sync_steps * per_step

    @property
    def adapter_slots_needed(self) -> int:
        """Adapter versions a replica must hold: every servable staleness, plus the one being loaded (TRL's rule)."""
        return self.rollout.max_staleness + 2

    @property
    def _fixed_samples_per_step(self) -> int:
        train = self.train
        return train.per_device_train_batch_size * train.gradient_accumulation_steps * train.processes

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain JSON types."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The recipe as a complete YAML document that `load_recipe` reads back unchanged."""
        stream = io.StringIO()
        writer = YAML()
        writer.default_flow_style = False
        writer.dump(self.to_dict(), stream)
        return stream.getvalue()

    def with_overrides(self, overrides: list[str]) -> Recipe:
        """A copy with `a.b=value` assignments applied; the value is read as YAML. Raises BadInput.

        >>> load_recipe("runs/local.yaml").with_overrides(["serve.replicas=4"]).serve.replicas
        4
        """
        return _with_overrides([("recipe", self.to_dict())], overrides)


def parse_recipe(data: object, source: str) -> Recipe:
    """A validated recipe from plain data. Raises BadInput naming `source`, the field, the value."""
    return _with_overrides([(source, require_mapping(data, source))], [])


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file, follow its `extends:`, apply `--set` overrides. Raises BadInput in one line."""
    return _with_overrides(read_layers(Path(path)), overrides or [])


def recipe_diff(old: Recipe, new: Recipe) -> list[tuple[str, object, object]]:
    """The fields that differ, as (dotted name, old value, new value), without the name of the recipe.

    >>> local = load_recipe("runs/local.yaml")
    >>> recipe_diff(local, local.with_overrides(["serve.replicas=4", "name=more"]))
    [('serve.replicas', 2, 4)]
    """
    before, after = _flatten(old.to_dict()), _flatten(new.to_dict())
    names = [*before, *(name for name in after if name not in before)]
    return [(n, before.get(n), after.get(n)) for n in names if n != "name" and before.get(n) != after.get(n)]


def spelled(value: object) -> str:
    """A field's value as YAML spells it.

    >>> spelled(None), spelled(True), spelled(0.5)
    ('null', 'true', '0.5')
    """
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _with_overrides(layers: list[Layer], overrides: list[str]) -> Recipe:
    """The recipe that the layers make, with assignments applied. Raises BadInput, told of the layer that is wrong."""
    data = merge_layers(layers)
    sets = [assign(data, assignment) for assignment in overrides]
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems: dict[str, list[str]] = {}
        for field, what in refusals(error, Recipe):
            source = source_of(field, [*layers, *sets], otherwise=layers[-1][0])
            problems.setdefault(source, []).append(f"{field}: {what}" if field else what)
        told = [f"{source}: {'; '.join(found)}" for source, found in problems.items()]
        raise BadInput("; ".join(told)) from None


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
