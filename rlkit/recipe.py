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
from ruamel.yaml.error import YAMLError

from rlkit.errors import BadInput

# TRL's name for the adapter it publishes as `<name>-v<N>` (AsyncGRPOTrainer._lora_name); it cannot be configured there.
POLICY_NAME = "trl-policy"

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    # Strict: a recipe that says steps: "50" or steps: true has a typing mistake, and guessing hides it.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """The base model: `toy-arithmetic` or `toy-untrained` (see `rlkit.training.toy_model`), a folder, or a Hub id."""

    name: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"  # the trainer's master weights
    chat_template: Literal["auto", "chatml"] = "auto"  # chatml: set the response template by hand (Qwen2.5-Math)
    trust_remote_code: bool = False


class DataSection(_Section):
    """The prompts: `toy-addition` (generated), a JSON-lines file, or a Hub dataset."""

    name: str
    split: str = "train"
    prompt_column: str = "problem"
    answer_column: str = "answer"
    system_prompt: str | None = None
    limit: Positive | None = None  # first rows only


class LoraSection(_Section):
    """The adapter (peft's LoraConfig). Only what vLLM can serve is synced as an adapter; preflight says what is not."""

    r: Positive = 1
    alpha: Positive = 2
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    target_modules: str | list[str] = "all-linear"
    bias: Literal["none", "all", "lora_only"] = "none"
    use_dora: bool = False
    modules_to_save: list[str] = []


class SamplingSection(_Section):
    """How rollouts are sampled; a group is `num_generations` rollouts of one prompt."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    max_completion_length: Positive = 2048
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0


class TrainSection(_Section):
    """The trainer: length, optimiser and batch shape."""

    steps: Positive
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    token_budget: NonNegative | None = None  # tokens per row; 0 = fixed sample count; None = the server's max_model_len
    per_device_train_batch_size: Positive = 1
    gradient_accumulation_steps: Positive = 1
    gradient_checkpointing: bool = True
    processes: Positive = 1  # data-parallel ranks
    precision: Literal["no", "bf16", "fp16"] = "no"  # compute precision; the master weights are model.dtype
    save_steps: Positive = 50
    seed: NonNegative = 0


class RolloutSection(_Section):
    """The asynchronous pipeline between generation and training."""

    max_staleness: NonNegative = 4  # policy versions
    weight_sync_steps: Positive = 1
    max_inflight_tasks: Annotated[int, Field(ge=-1)] = -1  # -1: TRL's own formula, see Recipe.inflight_limit
    queue_maxsize: Positive = 1024  # samples
    request_timeout: Positive = 600  # seconds


class ServeSection(_Section):
    """The replicas: how many vLLM servers, and their flags."""

    replicas: Positive = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Positive
    max_loras: Positive = 6
    max_lora_rank: Positive = 8
    data_parallel_size: Positive = 1
    tensor_parallel_size: Positive = 1
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    block_size: Positive | None = None  # tokens per KV block; None = vLLM's own (16 on a GPU, 128 on a CPU)
    num_gpu_blocks: Positive | None = None  # --num-gpu-blocks-override: a small cache on purpose
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    flags: list[str] = []  # passed to vLLM as they are
    env: dict[str, str] = {}


class TransportSection(_Section):
    """How a new policy reaches the replicas.

    `bucket`: every Job mounts one path and vLLM loads from it. `push`: the proxy sends the files to a receiver beside
    each replica. `merged`: full weights over NCCL, which is all there is without LoRA or with data-parallel servers.
    """

    kind: Literal["bucket", "push", "merged"] = "bucket"
    retry_s: Annotated[float, Field(gt=0)] = 0.5  # between attempts on a replica whose mount lags
    deadline_s: Annotated[float, Field(gt=0)] = 60.0  # for one adapter on all replicas, else it is rolled back
    keep_cache: bool = True  # pause with clear_cache=false: safe because every adapter version has its own name


class RoutingSection(_Section):
    """Where a rollout goes: the published prefix rule, or plain round robin to compare with."""

    policy: Literal["prefix", "round-robin"] = "prefix"
    # Requests a replica may be ahead of the least loaded one and still get a rollout for its cache. The published 8 is
    # the size of a group and spills part of it (tests/bench/routing.py): 12 takes 1 % more rollouts to their prompt.
    spill_threshold: NonNegative = 12
    block_size: Positive | None = None  # None: read from the replicas


class CapSection(_Section):
    """How many rollouts the worker admits at once; rollout.max_inflight_tasks is the ceiling.

    `rlkit` follows the servers' KV caches and queues, `published` does so by the rule it is compared with, and `none`
    admits up to the ceiling, as TRL does.
    """

    policy: Literal["none", "published", "rlkit"] = "rlkit"


class TrackingSection(_Section):
    """Where the metrics go in trackio."""

    project: Annotated[str, Field(min_length=1)] = "rlkit"
    space_id: str | None = None


class HardwareSection(_Section):
    """What the jobs run on; only the `hf` and `sim` engines read it."""

    trainer: str = "cpu"
    replica: str = "cpu"
    usd_per_hour: Annotated[float, Field(ge=0)] | None = None  # of the whole set-up, when known beforehand


class Recipe(_Section):
    """Everything one run needs. Immutable: a change is a new recipe (`recipe.with_overrides`)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    engine: Literal["local", "hf", "sim"] = "local"
    model: ModelSection
    data: DataSection
    reward: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]  # module:function
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
        """A copy with `a.b=value` assignments applied; the value is read as YAML. Raises BadInput."""
        data = self.to_dict()
        for assignment in overrides:
            _assign(data, assignment)
        return parse_recipe(data, "--set")


def parse_recipe(data: object, source: str) -> Recipe:
    """A validated recipe from plain data. Raises BadInput naming `source`, the field, the value."""
    if not isinstance(data, dict):
        raise BadInput(f"{source}: a recipe is a mapping of sections, this is {_describe(data)}")
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{source}: " + "; ".join(_one_line(item) for item in error.errors())) from None


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe file, follow its `extends:`, apply `--set` overrides. Raises BadInput in one line."""
    data = _read_extended(Path(path), [])
    for assignment in overrides or []:
        _assign(data, assignment)
    return parse_recipe(data, str(path))


def recipe_diff(old: Recipe, new: Recipe) -> list[tuple[str, object, object]]:
    """The fields that differ, as (dotted name, old value, new value), without the name of the recipe."""
    before, after = _flatten(old.to_dict()), _flatten(new.to_dict())
    names = [*before, *(name for name in after if name not in before)]
    return [(n, before.get(n), after.get(n)) for n in names if n != "name" and before.get(n) != after.get(n)]


def _read_extended(path: Path, seen: list[Path]) -> dict[str, Any]:
    data = _read_yaml(path)
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise BadInput(f"{path}: extends: expected a file name, got {base!r}")
    if path.resolve() in seen:
        raise BadInput(f"{path}: extends: the chain of recipes comes back to this file")
    return _merge(_read_extended(path.parent / base, [*seen, path.resolve()]), data)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise BadInput(f"{_shown(path)}: cannot read the recipe: {reason}") from None
    try:
        data = YAML(typ="safe", pure=True).load(text)
    except RecursionError:
        raise BadInput(f"{path}: broken YAML: nested too deeply") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise BadInput(f"{path}: broken YAML{where}: {problem}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: a recipe is a mapping of sections, this is {_describe(data)}")
    return data


def _assign(data: dict[str, Any], assignment: str) -> None:
    assignment = _shown(assignment)
    name, separator, text = assignment.partition("=")
    parts = name.strip().split(".")
    if not separator or not all(parts):
        raise BadInput(f"--set {assignment}: expected field=value, for example train.steps=100")
    try:
        value = YAML(typ="safe", pure=True).load(text) if text else ""
    except YAMLError:
        raise BadInput(f"--set {assignment}: {text!r} is not a YAML value") from None
    for part in parts[:-1]:
        if data.get(part) is None:
            data[part] = {}
        if not isinstance(data[part], dict):
            raise BadInput(f"--set {assignment}: {part} is a value, not a section")
        data = data[part]
    data[parts[-1]] = value


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _one_line(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"]) or "recipe"
    if item["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    if item["type"] == "missing":
        return f"{field}: missing"
    return f"{field}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _shown(text: object) -> str:
    """`text` on one line, whatever is in it."""
    return str(text).encode("unicode_escape").decode() if not str(text).isprintable() else str(text)


def _describe(data: object) -> str:
    return "empty" if data is None else f"a {type(data).__name__}"
