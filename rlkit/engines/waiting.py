"""What is said of a long wait while it lasts."""

from __future__ import annotations

from collections.abc import Sequence


class Waiting:
    """One sentence each `every_s` seconds about what is not ready yet; the clock is the caller's."""

    def __init__(self, every_s: float) -> None:
        self._every_s = self._next_s = every_s

    def look(self, waited_s: float, missing: Sequence[str]) -> str | None:
        """The sentence, `waited_s` seconds after the beginning; None when it is too early, or nothing is missing."""
        if waited_s < self._next_s or not missing:
            return None
        self._next_s = waited_s + self._every_s
        return f"not ready after {waited_s:.0f} s: {', '.join(missing)}"
