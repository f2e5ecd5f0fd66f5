"""What TRL's asynchronous GRPO needs to run on a CPU: two things it takes from a GPU, and nothing else.

`teach_trl_the_cpu` is called by the trainer entry, and only where there is no CUDA device. It replaces two names in
TRL's modules: the flash-attention kernel that is fetched from a hub, and the peak-FLOPs table that is looked up
through torch.cuda. Everything else of TRL runs as it is.
"""

from __future__ import annotations

import time
import types
from typing import Any

import torch
import torch.nn.functional as F

# Large enough that the matmul is compute-bound on any core, small enough for a fraction of a second.
PEAK_MATRIX = 1024
PEAK_ROUNDS = 5


def teach_trl_the_cpu() -> float:
    """Install both replacements and return the measured peak, FLOP/s of this process's threads."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    packing._flash_attn = lambda: kernel
    peak = measure_peak_flops()
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: peak
    return peak


def measure_peak_flops(dtype: torch.dtype = torch.float32) -> float:
    """The best of a few square matmuls, FLOP/s with torch's current thread count."""
    a = torch.randn(PEAK_MATRIX, PEAK_MATRIX).to(dtype)
    b = torch.randn(PEAK_MATRIX, PEAK_MATRIX).to(dtype)
    torch.mm(a, b)
    best = float("inf")
    for _ in range(PEAK_ROUNDS):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * PEAK_MATRIX**3 / best


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **_: Any,
) -> torch.Tensor:
    """Attention of S segments laid end to end, as flash-attention's function of that name, by torch's own attention.

    Shapes: query (Nq, Hq, D), key and value (Nk, Hk, D) with Hq a multiple of Hk; cu_seqlens (S + 1,) the segments'
    boundaries. The causal mask is aligned at the bottom right: the last query of a segment sees its last key.
    `window_size` is (left, right) in tokens, -1 for no bound. Returns (Nq, Hq, D). Segments are padded to the longest
    and computed in one call, since most are a few tokens long. Raises ValueError for a soft cap, which torch has not.
    """
    if softcap:
        raise ValueError("attention with a soft cap (Gemma 2) is not supported on a CPU; train this model on a GPU")
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    slot_q, slot_k = torch.arange(int(max_seqlen_q)), torch.arange(int(max_seqlen_k))
    valid_q, valid_k = slot_q < lengths_q[:, None], slot_k < lengths_k[:, None]

    def padded(rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        out = rows.new_zeros(*valid.shape, *rows.shape[1:])
        out[valid] = rows
        return out.transpose(1, 2)  # (S, H, length, D)

    # Position of each query among its segment's keys, counted from the left.
    position_q = slot_q + (lengths_k - lengths_q)[:, None]
    distance = position_q[:, :, None] - slot_k
    mask = valid_k[:, None, :].expand(-1, slot_q.numel(), -1)
    left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if right >= 0:
        mask = mask & (distance >= -right)
    if left >= 0:
        mask = mask & (distance <= left)
    # A padding query attends to the first key: a row that attends to nothing is NaN, and so is its gradient.
    mask = mask | (~valid_q[:, :, None] & (slot_k == 0))

    out = F.scaled_dot_product_attention(
        padded(query, valid_q),
        padded(key, valid_k),
        padded(value, valid_k),
        attn_mask=mask[:, None],
        scale=softmax_scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)[valid_q]
