"""An untied copy computes what the tied model computed, with two tensors where there was one."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlkit.training.toy_model import build_tokenizer
from rlkit.training.untie import is_tied, untied_copy


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    config = Qwen2Config(
        vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def test_same_logits_from_two_tensors(tied: Path, tmp_path: Path) -> None:
    assert is_tied(str(tied))
    out = untied_copy(str(tied), tmp_path / "untied")
    assert not is_tied(str(out))
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tied, out))
    assert after.lm_head.weight.data_ptr() != after.get_input_embeddings().weight.data_ptr()
    ids = torch.arange(12)[None]
    torch.testing.assert_close(after(ids).logits, before(ids).logits)
    assert untied_copy(str(tied), out) == out
