"""Which prompts' blocks an engine holds: those of running sequences, and those of ended ones until overwritten."""

from __future__ import annotations

import math

# Prompts remembered after their last sequence ended. Blocks of more recent ones are overwritten long before.
REMEMBERED = 4096


class PromptCache:
    """Prompts by name; their age is counted in blocks that the engine has allocated since."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, int], int] = {}
        self._ended: dict[tuple[int, int], float] = {}

    def is_running(self, prompt: tuple[int, int]) -> bool:
        """Whether a running sequence has this prompt, so that another one shares its blocks."""
        return prompt in self._running

    def age(self, prompt: tuple[int, int], allocated: float) -> float:
        """Blocks allocated since the prompt's last sequence stopped; infinite for one never seen."""
        return allocated - self._ended.get(prompt, -math.inf)

    def start(self, prompt: tuple[int, int]) -> None:
        """A sequence of this prompt runs."""
        self._running[prompt] = self._running.get(prompt, 0) + 1

    def stop(self, prompt: tuple[int, int], allocated: float) -> bool:
        """A sequence of this prompt stopped; whether it was the last, whose blocks are free then."""
        left = self._running[prompt] - 1
        if left:
            self._running[prompt] = left
            return False
        del self._running[prompt]
        self._ended.pop(prompt, None)
        self._ended[prompt] = allocated
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return True

    def clear(self) -> None:
        """Nothing is cached any more, and nothing runs."""
        self._running.clear()
        self._ended.clear()
