"""The lines that the trainer adds to steps.jsonl, as they come; and a copy of them where another machine trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path


class StepLines:
    """The lines a growing file has gained since the last look; those that are there at the beginning are old."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new(self) -> Iterator[str]:
        """The complete ones; what has no end yet comes another time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line.decode().strip()


class StepCopy:
    """A steps.jsonl of the lines that another machine's trainer says, until it is closed for the trainer's own file."""

    def __init__(self, path: Path) -> None:
        self._path, self._closed = path, False
        self._lock = threading.Lock()  # who hears the trainer is not who fetches the file

    def add(self, line: str) -> None:
        """One more line; nothing once the copy is closed."""
        with self._lock:
            if not self._closed:
                with self._path.open("a", encoding="utf-8") as lines:
                    lines.write(f"{line}\n")

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            self._closed = True
