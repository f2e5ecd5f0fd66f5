"""What each loaded adapter consisted of, so that other files under its path are not taken for it later.

A trainer that starts over writes other weights to the same paths, before it asks to load them. A replica that comes
back at that moment must not get them under the old name.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlkit.errors import BadInput
from rlkit.serving.adapter_files import Manifest, describe


class AdapterManifests:
    """Manifests by the serial of the load; each folder is read once, by whoever asks first."""

    def __init__(self) -> None:
        self._readings: dict[int, asyncio.Task[Manifest]] = {}
        self._serials: dict[str, int] = {}

    async def of(self, name: str, serial: int, path: str) -> Manifest:
        """The manifest of a load. Raises BadInput when its folder cannot be read; the next call tries again."""
        self.begin(name, serial, path)
        return await asyncio.shield(self._readings[serial])

    def begin(self, name: str, serial: int, path: str) -> None:
        """Start to read a load's folder, unless that is done or under way."""
        reading = self._readings.get(serial)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            self.forget(name)
            self._readings[serial] = asyncio.create_task(asyncio.to_thread(describe, Path(path)))
            self._readings[serial].add_done_callback(_note)
            self._serials[name] = serial

    async def has_changed(self, serial: int, path: str) -> bool:
        """Whether the folder holds something else than at its load; False where the one or the other is not known."""
        reading = self._readings.get(serial)
        if reading is None:
            return False
        try:
            before = await asyncio.shield(reading)
            return await asyncio.to_thread(describe, Path(path)) != before
        except BadInput:
            return False

    def forget(self, name: str) -> None:
        """Nobody will ask for this adapter again."""
        serial = self._serials.pop(name, None)
        if serial is not None:
            self._readings.pop(serial, None)


def _note(reading: asyncio.Task[Manifest]) -> None:
    if not reading.cancelled():
        reading.exception()  # a folder that cannot be read is told to those who ask for it
