"""GPUs and models by their data sheets, and what they make of the physics: seconds a row, a token, an iteration.

The constants were fitted to one model on one kind of GPU; for any other the same fractions of its own bandwidth and
peak are assumed, which is an extrapolation and is said to be one.

Why not aiconfigurator (0.12.0, kernels of vLLM 0.24 measured on each GPU) as a source of decode and prefill times: with
one overhead constant on its iterations, the tokens/s of the published runs that wait for generation come out within
15 % in the cap experiment and not in the chase. With 0.3 ms, the best for the former, +1.6 to +2.9 % there and +20 %
(two replicas) and +14 % (three) in the chase; with 0.6 ms -6.5 to -2.6 %, +16 % and +15 %. It knows no adapters, which
cost 1.5 ms of an iteration here. With a constant for them as well it is the equation below, whose own constants are
within 7.5 % in all six. Where the two overlap they agree: for this model on an H200 1.7 ms a bare iteration (2.1 here,
with the server's own), 6.6 ns a token that attention reads (6.9), 4.3 us a token of prefill (5.8).

What it is good for is to see how far off the extrapolation is: this module's decoding over its, 32 to 256 sequences of
800 and 1,600 tokens, the 1.5B model and Llama 3.1 8B. H200 and H100 -13 to +18 %, A100 -27 to -16 %, L40S -21 to -3 %,
B200 +23 to +45 % (1.5B) and -6 to 0 % (8B); a token's prefill +1 to +53 %.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.errors import BadInput
from rlkit.simulation.constants import Physics
from rlkit.simulation.replica import Rates


@dataclass(frozen=True)
class Gpu:
    """Of one device: bytes/s of its memory, FLOP/s in bfloat16 without sparsity, bytes of memory."""

    bandwidth: float
    peak_flops: float
    memory: float


# The vendor's data sheets (SXM parts).
GPUS: Mapping[str, Gpu] = {
    "h200": Gpu(4.8e12, 989.5e12, 141e9),
    "h100": Gpu(3.35e12, 989.5e12, 80e9),
    "a100": Gpu(2.039e12, 312e12, 80e9),
    "b200": Gpu(8.0e12, 2250e12, 192e9),
    "l40s": Gpu(0.864e12, 362e12, 48e9),
    "a10g": Gpu(0.6e12, 70e12, 24e9),
    "l4": Gpu(0.3e12, 121e12, 24e9),
    # Two cores without a GPU: FLOP/s by a measured matmul, the rest of a common machine.
    "cpu": Gpu(20e9, 100e9, 16e9),
}
FITTED_GPU = "h200"
CPU_FLAVOR = "cpu"

# TRL 1.14 took this peak for every device.
TRL_PEAK_FLOPS = 989.5e12

# Weights and KV cache are served in two bytes a number.
SERVED_BYTES = 2

# What a server keeps beside weights and KV cache (activations, CUDA graphs, runtime), for want of a published figure.
SERVER_OVERHEAD_BYTES = 3e9


@dataclass(frozen=True)
class Model:
    """The shape of a dense decoder, as its config.json has it. `vocabulary` counts rows of the embedding."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int

    @property
    def parameters(self) -> float:
        """Weights that a token meets, the output layer's among them, not the embedding's."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache a token takes."""
        return 2 * self.layers * self.kv_heads * self.head * SERVED_BYTES

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training on one token of a sequence of `length`, by the formula of TRL 1.14.

        That one counts the embedding like an output layer, and every token as attending to the whole sequence.
        """
        attention = (
            2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head + 2 * self.heads * self.head * self.hidden
        )
        attention += 4 * self.heads * self.head * length
        forward = self.layers * (attention + 6 * self.hidden * self.intermediate) + 4 * self.vocabulary * self.hidden
        return 3.0 * forward


QWEN2_1_5B = Model(hidden=1536, layers=28, vocabulary=151936, heads=12, kv_heads=2, head=128, intermediate=8960)
# The model of rlkit.training.toy_model.
TOY_MODEL = Model(hidden=96, layers=2, vocabulary=288, heads=3, kv_heads=1, head=32, intermediate=192)
MODELS: Mapping[str, Model] = {
    "Qwen/Qwen2.5-Math-1.5B": QWEN2_1_5B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": QWEN2_1_5B,
    "toy-arithmetic": TOY_MODEL,
    "toy-untrained": TOY_MODEL,
}


@dataclass(frozen=True)
class Machine:
    """What a recipe runs on: the model, the GPU of the trainer, the GPU of the replicas."""

    model: Model
    trainer: Gpu
    replica: Gpu

    def rates(self, physics: Physics, adapters: bool) -> Rates:
        """Of a replica's engine."""
        weights = self.model.parameters * SERVED_BYTES / self.replica.bandwidth
        return Rates(
            base_s=physics.iteration_s + weights + (physics.lora_iteration_s if adapters else 0.0),
            sequence_s=physics.sequence_s,
            token_s=self.model.kv_bytes / (self.replica.bandwidth * physics.cache_read_fraction),
            prefill_token_s=2 * self.model.parameters / (self.replica.peak_flops * physics.prefill_mfu),
        )

    def row_token_s(self, physics: Physics) -> float:
        """Seconds of forward and backward a token of a row costs, checkpointing on."""
        return 8 * self.model.parameters / (self.trainer.peak_flops * physics.row_mfu)

    def kv_tokens(self, memory_utilization: float) -> float:
        """Tokens of KV cache on one GPU that serves the whole model."""
        room = self.replica.memory * memory_utilization - self.model.parameters * SERVED_BYTES - SERVER_OVERHEAD_BYTES
        if room <= 0:
            raise BadInput("hardware.replica: the model's weights do not fit into this GPU's memory")
        return room / self.model.kv_bytes


def gpu(flavor: str, field: str) -> Gpu:
    """The GPU of a flavor like `h200x2`. Raises BadInput naming the recipe's field."""
    name = re.sub(r"x\d+$", "", flavor.lower())
    if name not in GPUS:
        raise BadInput(f"{field}: {flavor!r} has no data sheet here; there are: {', '.join(GPUS)}")
    return GPUS[name]


def model_shape(name: str) -> Model:
    """The shape of a model by its published name or its folder. Raises BadInput."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name).expanduser() / "config.json"
    if not path.is_file():
        known = ", ".join(MODELS)
        raise BadInput(f"model.name: {name!r} is no folder with a config.json, nor one of those known here: {known}")
    try:
        return _shape(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not the config of a dense decoder ({error})") from None


def _shape(config: dict[str, Any]) -> Model:
    heads = int(config["num_attention_heads"])
    return Model(
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        vocabulary=int(config["vocab_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate=int(config["intermediate_size"]),
    )
