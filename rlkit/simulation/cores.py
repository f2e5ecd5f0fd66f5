"""Cores that the trainer and the engines share on a machine without a GPU.

Everybody who computes gets the same part of the cores it asks for, and what it does takes as much longer: a trainer at
work slows generation down, and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SharedCores:
    """How many there are (0: nothing is shared), and how many the trainer and one engine keep busy."""

    cores: float = 0.0
    trainer: float = 1.0
    engine: float = 1.0

    def speed(self, engines: int, computing: bool) -> float:
        """Of everybody, 1 where there are cores enough: `engines` at work, and the trainer where it is `computing`."""
        asked = engines * self.engine + self.trainer * computing
        return 1.0 if not self.cores or asked <= self.cores else self.cores / asked


ALONE = SharedCores()


class Work:
    """Something that takes `seconds` at full speed, begun at `now`; the speed changes on the way."""

    def __init__(self, now: float, seconds: float, speed: float) -> None:
        self.began_at = now
        self.slowed = speed < 1
        self._left = seconds
        self._since = now
        self._speed = speed

    def change(self, now: float, speed: float) -> None:
        """From `now` on it goes at another speed."""
        self._left = max(0.0, self._left - (now - self._since) * self._speed)
        self._since = now
        self._speed = speed
        self.slowed = self.slowed or speed < 1

    @property
    def seconds_left(self) -> float:
        """Until it is done, if the speed stays."""
        return self._left / self._speed
