"""The lines that the trainer adds to steps.jsonl, as they come."""

from __future__ import annotations

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
