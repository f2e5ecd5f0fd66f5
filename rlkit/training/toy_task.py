"""The toy task: two-digit addition, which a small model is taught to guess and reinforcement teaches it to do.

A policy only improves under GRPO where its own rollouts differ in reward. So the base model is brought up by two
teachers (`careful` writes the sum out digit by digit and is right, `quick` answers at once and is wrong), and learns
to do either. GRPO then finds that working it out pays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

MODEL_NAME = "toy-arithmetic"
# The same model before it was taught anything: it rambles until it happens to draw the end of its turn.
UNTRAINED_NAME = "toy-untrained"
MODEL_NAMES = (MODEL_NAME, UNTRAINED_NAME)
# What the task is about; with another reward, the accuracy on prompts never trained on would say nothing.
REWARD = "rlkit.training.rewards:toy_sum"
DATA_NAME = "toy-addition"

# As long as it takes for two whole KV blocks of 32 tokens to hold the problem: routing by prefix and vLLM's prefix
# cache work in whole blocks, and in a shorter prompt they would find nothing.
SYSTEM_PROMPT = "Add these two numbers, and put their sum into \\boxed{}."
# Share of careful demonstrations: low enough that the base policy is mostly wrong, high enough that a group of eight
# rollouts nearly always holds both kinds.
CAREFUL_SHARE = 0.35
# One problem in ten is never trained on, neither by the teachers nor by GRPO.
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Problem:
    """a + b, with 10 <= a, b <= 99."""

    a: int
    b: int

    @property
    def answer(self) -> str:
        """The right sum, in digits."""
        return str(self.a + self.b)

    def prompt(self) -> list[dict[str, str]]:
        """The conversation up to the model's turn."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": f"{self.a}+{self.b}"}]

    def careful(self) -> str:
        """The sum worked out digit by digit: ones, carry, tens."""
        ones = self.a % 10 + self.b % 10
        tens = self.a // 10 + self.b // 10 + ones // 10
        carried = f"{self.a // 10}+{self.b // 10}+{ones // 10}={tens}"
        return f"ones {self.a % 10}+{self.b % 10}={ones} tens {carried} \\boxed{{{self.answer}}}"

    def quick(self, rng: random.Random) -> str:
        """An answer at once, always off by one to twenty."""
        offset = rng.choice([-1, 1]) * rng.randint(1, 20)
        return f"\\boxed{{{max(self.a + self.b + offset, 0)}}}"


def split_problems() -> tuple[list[Problem], list[Problem]]:
    """All 8,100 problems as (trained on, held out); the same split for every seed, so that runs can be compared."""
    problems = [Problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(problems)
    held_out = len(problems) // HELD_OUT_ONE_IN
    return problems[held_out:], problems[:held_out]


def demonstrations(seed: int) -> Iterator[tuple[Problem, str]]:
    """An endless stream of (problem, completion) from the two teachers."""
    rng = random.Random(seed)
    problems, _ = split_problems()
    while True:
        problem = rng.choice(problems)
        yield problem, problem.careful() if rng.random() < CAREFUL_SHARE else problem.quick(rng)
