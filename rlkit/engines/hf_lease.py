"""A replica has no natural end, so it holds a lease: a file whose content changes as long as someone needs it.

The launching kernel renews it until the trainer runs, then the trainer does. A replica that sees no change for the
lease's length ends itself: whatever became of kernel and trainer, nothing is left running for longer. It is the content
and the reader's own clock that count, so that clocks may differ and a mount may show a change late.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass
class Lease:
    """A lease as a replica sees it; `length_s` seconds without a change end it."""

    length_s: float
    started_at: float
    _content: bytes | None = None

    def __post_init__(self) -> None:
        self._changed_at = self.started_at

    def observe(self, now: float, content: bytes | None) -> bool:
        """Whether it is still held; `content` is None when the file could not be read, which is no renewal."""
        if content is not None and content != self._content:
            self._content, self._changed_at = content, now
        return now - self._changed_at <= self.length_s


def renewal() -> bytes:
    """A content the file has not had before."""
    return secrets.token_hex(8).encode()
