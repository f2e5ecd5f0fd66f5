"""One engine per run folder, and a note of how its run ended."""

from __future__ import annotations

import fcntl
import json
import os
import time
from types import TracebackType
from typing import Any

from rlkit.engines.state import Status, read_state
from rlkit.errors import BadInput
from rlkit.run_folder import RunFolder


class RunLock:
    """Holds a run folder while a run executes in it. Raises BadInput when another engine does.

    The lock is the kernel's (flock), so it is free again however its holder ended; `state.json` says who and how.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._started = time.time()

    def __enter__(self) -> RunLock:
        try:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder.path / ".lock").open("w")
        except OSError as error:
            raise BadInput(f"{self._folder.path}: cannot make the run folder: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            holder = read_state(self._folder).get("pid", "unknown")
            raise BadInput(
                f"{self._folder.path}: a run is going on here (process {holder}); choose another --name"
            ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def note(self, status: Status, **details: Any) -> None:
        """Write `state.json`, whole or not at all."""
        state = {"status": status, "pid": os.getpid(), "started": self._started, "updated": time.time(), **details}
        staging = self._folder.state.with_suffix(".tmp")
        staging.write_text(json.dumps(state, indent=2) + "\n")
        staging.replace(self._folder.state)
