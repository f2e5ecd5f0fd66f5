"""Whether a row of the trainer fits into its GPU: an estimate, by the model's shape, of what autograd keeps.

    kept for each token and layer = 24 h + 4 kv + 8 f bytes under autocast in two bytes, 24 h + 8 kv + 16 f in four
    (h hidden, kv = heads of keys x their size, f intermediate)

Measured: bytes of the tensors that torch 2.13 saves for the backward pass of a Qwen2 decoder with a rank-1 adapter on
every linear layer, seven shapes, least squares (tests/simulation/test_training_memory.py measures it again). With
gradient checkpointing each layer keeps its input alone, and one layer at a time all of it. The logits are not counted:
TRL 1.16 computes them in tiles. What the allocator wastes and the backward pass holds for a moment is a margin, which
no GPU has measured: an estimate near the limit may be wrong either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.errors import RlkitError
from rlkit.recipe import Recipe
from rlkit.simulation.hardware import CPU_FLAVOR, Machine
from rlkit.simulation.recipes import machine_of

# Bytes a token and layer for each unit of h, kv and f: see above.
KEPT_IN_TWO = (24.0, 4.0, 8.0)
KEPT_IN_FOUR = (24.0, 8.0, 16.0)

# A checkpointed layer keeps its input, in the four bytes of the residual stream beside float32 master weights.
CHECKPOINT_BYTES = 4.0

# Over what is kept: gradients of a layer while it is passed back through, fragments, kernels' workspaces.
MARGIN = 1.25

# The CUDA context, libraries and the tiles of the logits.
FIXED_BYTES = 4e9

# Of a GPU's memory, what one process can have.
USABLE = 0.95

# AdamW's two moments and the gradient, in float32, for each weight that is trained.
TRAINED_BYTES = 12.0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank of the trainer at its fullest row, and what its GPU has."""

    needed: float
    available: float

    @property
    def fits(self) -> bool:
        """Whether the estimate leaves the row room."""
        return self.needed <= USABLE * self.available

    def __str__(self) -> str:
        return f"about {self.needed / 1e9:.0f} of {self.available / 1e9:.0f} GB of the trainer's GPU (estimated)"


def training_memory(recipe: Recipe) -> MemoryEstimate | None:
    """The estimate; None without a GPU, or where nothing is known of it or of the model."""
    if recipe.hardware.trainer.lower() == CPU_FLAVOR:
        return None
    try:
        machine = machine_of(recipe)
    except RlkitError:
        return None
    needed = _weights(recipe, machine) + MARGIN * row_tokens(recipe) * _kept(recipe, machine) + FIXED_BYTES
    return MemoryEstimate(needed, machine.trainer.memory)


def row_tokens(recipe: Recipe) -> int:
    """Tokens of the fullest row that a rank may get: the budget, or every sample as long as the server allows."""
    train, longest = recipe.train, recipe.serve.max_model_len
    if train.token_budget is None or train.token_budget > 0:
        return max(train.token_budget or longest, longest)
    return train.per_device_train_batch_size * longest


def _weights(recipe: Recipe, machine: Machine) -> float:
    """Master weights shared among the ranks, a whole copy in the compute precision, AdamW's where all are trained."""
    model, ranks = machine.model, recipe.train.processes
    weights = model.parameters + model.vocabulary * model.hidden
    master = weights * (4.0 if recipe.model.dtype == "float32" else 2.0) / ranks
    copy = weights * 2.0 if recipe.train.precision != "no" else 0.0
    trained = weights * TRAINED_BYTES / ranks if recipe.lora is None else 0.0
    return master + copy + trained


def _kept(recipe: Recipe, machine: Machine) -> float:
    """Bytes for each token of a row."""
    model = machine.model
    in_two = recipe.train.precision != "no" or recipe.model.dtype in ("bfloat16", "float16")
    of_h, of_kv, of_f = KEPT_IN_TWO if in_two else KEPT_IN_FOUR
    layer = of_h * model.hidden + of_kv * model.kv_heads * model.head + of_f * model.intermediate
    if recipe.train.gradient_checkpointing:
        return model.layers * CHECKPOINT_BYTES * model.hidden + layer
    return model.layers * layer
