"""How long prompts and completions are. Every draw ends as a whole number of tokens.

That makes a simulation the same everywhere: the last digit of a logarithm differs between machines, and rounding it
away here leaves only arithmetic that does not.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache

from rlkit.simulation.constants import Workload

# The prompts are the experiment's data, the same for every seed of a simulation.
PROMPT_SEED = 1234

# The shortest prompt and completion, in tokens: below, a lognormal's tail means nothing.
SHORTEST_PROMPT = 40
SHORTEST_COMPLETION = 4

# Means are met to this many tokens, so that few of them have to be solved for; those of few tokens to one.
MEAN_STEP = 10
FEW_TOKENS = 100

# Halvings of an interval of twelve e-folds: far below a token.
BISECTIONS = 50


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and by how many deviations (of log length) its completions are long."""

    tokens: int
    length_score: float


@dataclass
class Lengths:
    """Draws lengths; `progress` is the fraction of the run's steps that are done.

    The mean completion goes in a straight line from `mean_start` to `mean_end` tokens, with the cut at `longest`
    counted in. Prompts are `prompt_tokens` on average, and none longer than twice that.
    """

    mean_start: float
    mean_end: float
    longest: int
    between_prompts: float
    within_prompt: float
    prompts: int = 1460
    prompt_tokens: int = 135
    template_tokens: int = 23
    prompt_deviation: float = 40.0
    seed: int = PROMPT_SEED
    _prompts: tuple[Prompt, ...] = field(init=False, repr=False)
    _centres: dict[int, float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._prompts = _prompts(self.seed, self.prompts, self.prompt_tokens, self.prompt_deviation)

    def prompt(self, group: int) -> Prompt:
        """The prompt of the group with this number; the data set is read again and again."""
        return self._prompts[group % self.prompts]

    def completion(self, prompt: Prompt, progress: float, dice: random.Random) -> int:
        """Tokens of one completion."""
        mean = self.mean_start + (self.mean_end - self.mean_start) * min(1.0, progress)
        deviation = self.between_prompts * prompt.length_score + self.within_prompt * dice.gauss(0, 1)
        drawn = math.exp(min(self._centre(mean) + deviation, 20.0))
        return int(min(self.longest, max(min(SHORTEST_COMPLETION, self.longest), drawn)))

    def _centre(self, mean: float) -> float:
        """The lognormal's mu whose mean, cut at `longest`, is `mean`."""
        step = MEAN_STEP if mean >= FEW_TOKENS else 1
        key = max(1, round(mean / step)) * step
        if key not in self._centres:
            wanted = min(key, 0.98 * self.longest)
            low, high = 0.0, 14.0
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                if self._mean(middle) < wanted:
                    low = middle
                else:
                    high = middle
            self._centres[key] = round(low, 9)
        return self._centres[key]

    def _mean(self, centre: float) -> float:
        deviation = math.hypot(self.between_prompts, self.within_prompt)
        if not deviation:
            return min(math.exp(centre), self.longest)
        cut = (math.log(self.longest) - centre) / deviation
        below = math.exp(centre + deviation * deviation / 2) * _normal(cut - deviation)
        return below + self.longest * (1 - _normal(cut))


# A set-up is made anew for every verdict and every run, of the same few data sets.
@lru_cache(maxsize=16)
def _prompts(seed: int, count: int, tokens: int, deviation: float) -> tuple[Prompt, ...]:
    dice = random.Random(seed)
    low, high = min(SHORTEST_PROMPT, tokens), 2 * tokens
    return tuple(
        Prompt(min(high, max(low, round(dice.gauss(tokens, deviation)))), round(dice.gauss(0, 1), 6))
        for _ in range(count)
    )


def lengths_of(workload: Workload, longest: int) -> Lengths:
    """The lengths of an experiment, completions cut at `longest` tokens."""
    return Lengths(
        mean_start=workload.mean_start,
        mean_end=workload.mean_end,
        longest=longest,
        between_prompts=workload.between_prompts,
        within_prompt=workload.within_prompt,
        prompts=workload.prompts,
        prompt_tokens=workload.prompt_tokens,
        template_tokens=workload.template_tokens,
        prompt_deviation=workload.prompt_deviation,
    )


def _normal(x: float) -> float:
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2)))
