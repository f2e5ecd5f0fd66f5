"""The toy model's pretraining: a shared prefix changes the work, not the loss."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlkit.training import toy_model
from rlkit.training.toy_model import build_tokenizer, completion_loss, prompt_ids
from rlkit.training.toy_task import Problem


def test_the_shared_prefix_is_computed_once_and_learnt_from_as_if_in_every_row() -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=288, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True,
        )
    )  # fmt: skip
    prefix = toy_model._shared_prefix(tokenizer)
    assert len(prefix) > len(prompt_ids(tokenizer, Problem(10, 10))) / 2
    batch = next(toy_model._batches(tokenizer, 0, prefix))
    rows = len(batch["input_ids"])
    whole = {
        "input_ids": torch.cat([torch.tensor([prefix] * rows), batch["input_ids"]], dim=1),
        "attention_mask": torch.cat([torch.ones(rows, len(prefix), dtype=torch.long), batch["attention_mask"]], dim=1),
        "labels": torch.cat([torch.full((rows, len(prefix)), -100), batch["labels"]], dim=1),
    }
    gradients = []
    for loss in (completion_loss(model, prefix, batch), model(**whole).loss):
        model.zero_grad()
        torch.autograd.backward(loss)
        gradients.append((loss.detach(), model.model.embed_tokens.weight.grad.clone()))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_the_untrained_model_is_nearly_indifferent_and_does_not_repeat_itself() -> None:
    tokenizer = build_tokenizer()
    model = toy_model.untrained_model(tokenizer, seed=3)
    ids = torch.tensor([prompt_ids(tokenizer, Problem(12, 34))])
    with torch.no_grad():
        chances = model(ids).logits.softmax(-1)[0]
    entropy = -(chances * chances.log()).sum(-1).mean()
    assert entropy > 0.85 * torch.log(torch.tensor(float(toy_model.VOCABULARY)))
    again = chances.gather(-1, ids[0][:, None]).mean()
    assert again < 5 / toy_model.VOCABULARY
    same = toy_model.untrained_model(tokenizer, seed=3)
    torch.testing.assert_close(same.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)
