"""The toy model: a Qwen2 of 0.2 M parameters and its tokenizer, pretrained on this machine in about two minutes.

`python -m rlkit.training.toy_model --out FOLDER --seed 0` writes a folder that transformers, TRL and vLLM all load;
`--untrained` leaves the pretraining out, for completions that are long and a policy that has everything to learn.
Sizes and schedule are a recipe that was tried on two cores; the constants say why where it is not obvious.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.training import toy_task
from rlkit.training.toy_task import Problem, demonstrations

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

HIDDEN = 96
HEADS = 3  # of 32: vLLM's CPU attention refuses smaller heads, and only at the first request
LAYERS = 2
VOCABULARY = 288  # 256 bytes, 3 special tokens, and merges enough for the words of the task
POSITIONS = 512

# Five times the usual: the final norm fixes the length of what meets the head, and with 0.02 even the best adapter
# could not make a token ten times as likely.
UNTRAINED_HEAD_STD = 0.1

PRETRAIN_STEPS = 1800
BATCH = 32
LEARNING_RATE = 5e-3
WARM_UP_STEPS = 30
# One: more threads gain little on so small a model, and lose everything while another program has their core.
THREADS = 1
# A decay that stays high for most of the way: the digit carries are learnt late.
DECAY_POWER = 0.7
PROGRESS_EVERY = 200  # steps; a line every ten seconds or so


def cached_model(cache: Path, seed: int, name: str = toy_task.MODEL_NAME) -> Path:
    """Where the model for `seed` lives under `cache`; the name changes with the code that builds it."""
    source = Path(__file__).read_bytes() + Path(toy_task.__file__).read_bytes()
    return cache / f"{name}-{seed}-{hashlib.sha256(source).hexdigest()[:12]}"


def build(out: Path, seed: int, on_progress: Callable[[int, int, float], None], *, untrained: bool = False) -> None:
    """Pretrain (unless `untrained`) and write the model to `out`; `on_progress(step, steps, loss)` as it goes.

    The folder appears whole or not at all: it is written beside `out` and renamed.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = build_tokenizer()
    model = untrained_model(tokenizer, seed) if untrained else pretrain(tokenizer, seed, on_progress)
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        if not out.exists():
            staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE whose digits are single tokens, with the chat template of Qwen2.5 (one that TRL knows)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    # Without the system prompt: it stays nearly one token a byte, and the merges go to what the policy writes.
    corpus = [
        f"system\nuser\n{problem.prompt()[-1]['content']}\nassistant\n{text}"
        for problem, text in itertools.islice(demonstrations(seed=0), 2000)
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = qwen2_5_chat_template
    return fast


def initial_model(tokenizer: PreTrainedTokenizerBase, seed: int, *, tied: bool = True) -> Qwen2ForCausalLM:
    """The model with its first weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=1,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def untrained_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """A model that rambles: any token may follow any other, so about one in 288 ends the turn.

    Its head is its own, because one that is tied to the embeddings repeats the last token.
    """
    import torch

    model = initial_model(tokenizer, seed, tied=False)
    torch.nn.init.normal_(model.lm_head.weight, std=UNTRAINED_HEAD_STD)
    return model


def pretrain(
    tokenizer: PreTrainedTokenizerBase, seed: int, on_progress: Callable[[int, int, float], None]
) -> Qwen2ForCausalLM:
    """Supervised training on both teachers; the loss is taken over the completion alone."""
    import torch

    torch.set_num_threads(THREADS)
    model = initial_model(tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_at)
    prefix = _shared_prefix(tokenizer)
    batches = _batches(tokenizer, seed, prefix)
    model.train()
    for step in range(1, PRETRAIN_STEPS + 1):
        loss = completion_loss(model, prefix, next(batches))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % PROGRESS_EVERY == 0 or step == PRETRAIN_STEPS:
            on_progress(step, PRETRAIN_STEPS, float(loss.detach()))
    return model.eval()


def _learning_rate_at(step: int) -> float:
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return float((1 - step / PRETRAIN_STEPS) ** DECAY_POWER)


def completion_loss(model: Qwen2ForCausalLM, prefix: list[int], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss over a batch of (B, T) rows that all continue `prefix`, which is computed once for all of them.

    All prompts of the task begin alike, and that beginning is more than half of their tokens.
    """
    import torch

    cache = model(input_ids=torch.tensor([prefix]), use_cache=True).past_key_values
    rows = len(batch["input_ids"])
    cache.batch_repeat_interleave(rows)
    seen = torch.cat([torch.ones(rows, len(prefix), dtype=torch.long), batch["attention_mask"]], dim=1)
    loss: torch.Tensor = model(**{**batch, "attention_mask": seen}, past_key_values=cache).loss
    return loss


def _shared_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids with which all prompts begin."""
    pairs = zip(prompt_ids(tokenizer, Problem(10, 10)), prompt_ids(tokenizer, Problem(99, 99)), strict=True)
    return [first for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _batches(tokenizer: PreTrainedTokenizerBase, seed: int, prefix: list[int]) -> Iterator[dict[str, torch.Tensor]]:
    import torch

    source = demonstrations(seed)
    while True:
        rows = [_encode(tokenizer, *next(source)) for _ in range(BATCH)]
        rows = [(ids[len(prefix) :], labels[len(prefix) :]) for ids, labels in rows]
        longest = max(len(ids) for ids, _ in rows)
        pad = tokenizer.pad_token_id
        yield {
            "input_ids": torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
        }


def _encode(tokenizer: PreTrainedTokenizerBase, problem: Problem, completion: str) -> tuple[list[int], list[int]]:
    prompt = prompt_ids(tokenizer, problem)
    answer = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
    return prompt + answer, [-100] * len(prompt) + answer


def prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    """The token ids of a problem's prompt, as the rollout worker makes them."""
    ids = tokenizer.apply_chat_template(problem.prompt(), add_generation_prompt=True, return_dict=False)
    return list(ids)


def main() -> None:
    """Build one model from the command line; progress lines go to standard output."""
    parser = argparse.ArgumentParser(description="Build the toy model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untrained", action="store_true")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def report(step: int, steps: int, loss: float) -> None:
        print(f"pretraining {step}/{steps} loss {loss:.3f}", flush=True)

    build(arguments.out, arguments.seed, report, untrained=arguments.untrained)


if __name__ == "__main__":
    main()
