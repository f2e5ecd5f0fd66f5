"""The attention that stands in for flash-attention's kernel, against the definition."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.training.cpu import flash_attn_varlen_func, measure_peak_flops

segments = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4)


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, left: int
) -> torch.Tensor:
    """One segment: softmax over the keys each query may see, query i at key position i + len(k) - len(q)."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if left >= 0:
        scores = scores.masked_fill(distance > left, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@settings(deadline=None, max_examples=40)
@given(segments, st.booleans(), st.sampled_from([-1, 0, 2]), st.sampled_from([(4, 2), (3, 1), (2, 2)]))
def test_matches_the_definition(shape: list[tuple[int, int]], causal: bool, left: int, heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths_q, lengths_k = [q for q, _ in shape], [q + earlier for q, earlier in shape]
    query = torch.randn(sum(lengths_q), heads[0], 8, requires_grad=True)
    key, value = torch.randn(2, sum(lengths_k), heads[1], 8)
    out = flash_attn_varlen_func(
        query, key, value, boundaries(lengths_q), boundaries(lengths_k), max(lengths_q), max(lengths_k),
        softmax_scale=0.3, causal=causal, window_size=(left, 0 if causal else -1),
    )  # fmt: skip
    expected = [
        by_definition(q, k, v, 0.3, causal, left)
        for q, k, v in zip(
            *[torch.split(x, n) for x, n in ((query, lengths_q), (key, lengths_k), (value, lengths_k))], strict=True
        )
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.autograd.backward(out.sum())
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_a_soft_cap_is_refused() -> None:
    x = torch.zeros(1, 1, 8)
    one = boundaries([1])
    with pytest.raises(ValueError, match="soft cap"):
        flash_attn_varlen_func(x, x, x, one, one, 1, 1, softcap=30.0)


def test_peak_is_a_plausible_rate() -> None:
    assert 1e8 < measure_peak_flops() < 1e15


def test_the_names_that_are_replaced_exist_in_trl() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    assert isinstance(async_grpo_trainer.get_peak_flops_per_device, types.FunctionType)
    assert callable(packing._flash_attn)
