"""Lengths that two runs share which differ in something else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rlkit.simulation.lengths import Lengths


@dataclass
class PairedLengths(Lengths):
    """Draws of its own: the n-th rollout is as long whatever else changes in the run, so that two runs compare."""

    draws: int = 0
    _draws: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._draws = random.Random(self.draws)

    def completion(self, prompt: object, progress: float, dice: random.Random) -> int:
        """Tokens of one completion."""
        return super().completion(prompt, progress, self._draws)  # type: ignore[arg-type]


def paired(lengths: Lengths, draws: int) -> PairedLengths:
    """The same lengths, drawn apart from everything else."""
    return PairedLengths(
        mean_start=lengths.mean_start,
        mean_end=lengths.mean_end,
        longest=lengths.longest,
        between_prompts=lengths.between_prompts,
        within_prompt=lengths.within_prompt,
        prompts=lengths.prompts,
        prompt_tokens=lengths.prompt_tokens,
        template_tokens=lengths.template_tokens,
        prompt_deviation=lengths.prompt_deviation,
        draws=draws,
    )
