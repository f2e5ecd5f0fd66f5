"""A rollout, its group, and the sample it becomes."""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.simulation.lengths import Prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """A scored rollout on its way to the trainer. `version` is the group's policy version, `queued_at` in seconds."""

    group: int
    version: int
    prompt_tokens: int
    completion_tokens: int
    queued_at: float

    @property
    def tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class Group:
    """The rollouts of one prompt. `version` is that of the first one admitted; None before."""

    number: int
    prompt_number: int
    prompt: Prompt
    version: int | None = None
    completions: list[int] | None = None
    queued_at: float = 0.0


@dataclass(slots=True, eq=False)
class Rollout:
    """One request; what is 0 here is known once it is admitted."""

    group: Group
    version: int = 0
    completion_tokens: int = 0
    admitted_at: float = 0.0
    made_at: float = 0.0
