"""What goes wrong at an emulated replica."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# garbage: bytes that are no HTTP. A pair: an answer with this status and text.
CompletionFault = Literal["die", "die-mid-response", "hang", "garbage"] | tuple[int, str]


@dataclass
class Faults:
    """What goes wrong. The entries of a queue are used once, in order, by the next request they concern.

    Of the files under `mount`, each shows `mount_lag_s` seconds after it was written, as on another machine's mount.
    """

    loads: deque[tuple[int, str] | Literal["die", "hang"]] = field(default_factory=deque)  # status and text
    completions: deque[CompletionFault] = field(default_factory=deque)
    dropped_controls: int = 0  # so many of the next /pause and /resume find their connection closed
    unhealthy: bool = False
    gateway: int | None = None  # what stands in front of it answers every request with this status in its place
    token_delay_s: float = 0.0  # per token of every completion
    mount: Path | None = None
    mount_lag_s: float = 0.0

    def sees(self, file: Path) -> bool:
        """Whether a file is there for the replica."""
        if not file.is_file():
            return False
        lags = self.mount is not None and file.resolve().is_relative_to(self.mount.resolve())
        return not lags or time.time() - file.stat().st_mtime >= self.mount_lag_s
