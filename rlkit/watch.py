"""A run that goes on, looked at again and again: what there is to say since the last look, and when to stop it.

Pure: looks come in, news goes out. The command line polls trackio and prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlkit.diagnosis import Verdict

# A verdict that holds for this many looks in a row is one: the first after a change may rest on steps of both kinds.
STEADY_LOOKS = 2


@dataclass(frozen=True)
class News:
    """What changed: a sentence, and how loudly to say it. `stop`: the answer is clear, the run has said all it can."""

    title: str  # a few words: `generation-bound`
    text: str
    level: Literal["info", "warn", "error"]
    stop: bool = False


class Watch:
    """Follows one run's verdicts. `stop_when_clear`: say so once the verdict is sure and steady."""

    def __init__(self, stop_when_clear: bool = False) -> None:
        self._stop_when_clear = stop_when_clear
        self._said: tuple[str, str | None] | None = None
        self._pending: tuple[str, str | None] | None = None
        self._looks = 0
        self._stopped = False

    def look(self, verdict: Verdict) -> News | None:
        """What this look tells that was not said before; None when nothing does."""
        seen = (verdict.bound, verdict.causes[0].name if verdict.causes else None)
        if seen == self._pending:
            self._looks += 1
        else:
            self._pending, self._looks = seen, 1
        if verdict.bound == "stalled" and (self._said is None or self._said[0] != "stalled"):
            self._said = seen
            return News("stalled", verdict.headline, "error")
        steady = self._looks >= STEADY_LOOKS
        clear = steady and verdict.confidence == "high" and verdict.bound not in ("stalled", "undetermined")
        if self._stop_when_clear and clear and not self._stopped:
            self._stopped, self._said = True, seen
            return News(_title(verdict), f"{verdict.headline} Next: {verdict.next_action}", "info", stop=True)
        if self._said is None and verdict.bound != "undetermined":
            self._said = seen
            return News(_title(verdict), verdict.headline, "info")
        if steady and self._said is not None and seen != self._said and verdict.bound != "undetermined":
            before, self._said = self._said[0], seen
            changed = "" if before == verdict.bound else f" It was {before} before."
            return News(_title(verdict), f"{verdict.headline}{changed}", "warn")
        return None


def _title(verdict: Verdict) -> str:
    """The first words of the headline."""
    return verdict.headline.partition(":")[0]
