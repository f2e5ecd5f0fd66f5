"""A copy of a model whose output head is a tensor of its own.

FSDP2 cannot put one tensor into two groups, so a model with tied embeddings does not shard. Nothing is lost by
untying it here: LoRA's all-linear touches neither embedding nor head, so both stay what they were.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def is_tied(model: str, **options: Any) -> bool:
    """Whether the model's config shares embedding and head; `options` go to from_pretrained."""
    return bool(AutoConfig.from_pretrained(model, **options).get_text_config().tie_word_embeddings)


def untied_copy(model: str, out: Path, **options: Any) -> Path:
    """Write `model` to the folder `out` with its head cloned, whole or not at all, and return `out`."""
    if out.exists():
        return out
    staging = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    tied = AutoModelForCausalLM.from_pretrained(model, dtype="auto", **options)
    tied.config.get_text_config().tie_word_embeddings = False
    tied.lm_head.weight = torch.nn.Parameter(tied.get_input_embeddings().weight.detach().clone())
    tied.save_pretrained(staging)
    AutoTokenizer.from_pretrained(model, **options).save_pretrained(staging)
    staging.rename(out)
    return out
