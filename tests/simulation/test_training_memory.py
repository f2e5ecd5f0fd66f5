from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlkit.recipe import Recipe, load_recipe
from rlkit.simulation.training_memory import KEPT_IN_FOUR, KEPT_IN_TWO, row_tokens, training_memory

RUNS = Path(__file__).parents[2] / "runs"


def chase(*overrides: str) -> Recipe:
    return load_recipe(RUNS / "published" / "r1-dp2-tb16k-nockpt.yaml", list(overrides))


def test_what_was_trained_on_fits() -> None:
    for name in ("r1-dp2", "r1-dp2-tb16k", "r1-dp2-tb16k-nockpt", "r1-dp3-inflight384"):
        memory = training_memory(load_recipe(RUNS / "published" / f"{name}.yaml"))
        assert memory is not None
        assert memory.fits, name


def test_more_is_kept_of_longer_rows_and_without_checkpointing() -> None:
    as_it_is, longer = training_memory(chase()), training_memory(chase("train.token_budget=65536"))
    checkpointed = training_memory(chase("train.gradient_checkpointing=true"))
    assert as_it_is is not None
    assert longer is not None
    assert checkpointed is not None
    assert checkpointed.needed < as_it_is.needed / 2
    assert longer.needed > 3 * as_it_is.needed
    assert not longer.fits
    assert "GB" in str(longer)


def test_a_smaller_gpu_refuses_what_a_large_one_takes() -> None:
    small = training_memory(chase("hardware.trainer=l4x2"))
    assert small is not None
    assert not small.fits


def test_training_every_weight_needs_more() -> None:
    with_adapter, whole = training_memory(chase()), training_memory(chase("lora=null", "transport.kind=merged"))
    assert with_adapter is not None
    assert whole is not None
    assert whole.needed > with_adapter.needed


def test_nothing_is_said_without_a_gpu_or_of_an_unknown_one() -> None:
    assert training_memory(load_recipe(RUNS / "local.yaml")) is None
    assert training_memory(chase("hardware.trainer=moonx2")) is None


def test_a_row_is_as_long_as_its_budget_or_its_samples() -> None:
    assert row_tokens(chase()) == 16384
    assert row_tokens(chase("train.token_budget=null")) == 4096
    assert row_tokens(chase("train.token_budget=0", "train.per_device_train_batch_size=3")) == 3 * 4096


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("autocast", "kept"), [(True, KEPT_IN_TWO), (False, KEPT_IN_FOUR)])
def test_the_formula_is_what_torch_keeps(autocast: bool, kept: tuple[float, float, float]) -> None:
    for hidden, intermediate, heads, kv_heads in ((128, 512, 4, 1), (256, 1024, 4, 4), (256, 2048, 8, 2)):
        counts = [
            _saved(hidden, intermediate, heads, kv_heads, layers, tokens, autocast)
            for layers in (2, 3)
            for tokens in (256, 768)
        ]
        measured = ((counts[3] - counts[1]) - (counts[2] - counts[0])) / 512
        kv = hidden // heads * kv_heads
        assert measured == pytest.approx(kept[0] * hidden + kept[1] * kv + kept[2] * intermediate, rel=0.03)


def _saved(hidden: int, intermediate: int, heads: int, kv_heads: int, layers: int, tokens: int, autocast: bool) -> int:
    """Bytes that autograd keeps for the backward pass, without the weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    model: Any = get_peft_model(Qwen2Model(config), LoraConfig(r=1, lora_alpha=2, target_modules="all-linear"))
    model.train()
    model.enable_input_require_grads()
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saving, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=False):
        output = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    assert output.last_hidden_state.shape[1] == tokens
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
