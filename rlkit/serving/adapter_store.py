"""Where a receiver keeps adapters: one folder each, named by its digest, whole or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlkit.errors import BadInput
from rlkit.serving.adapter_files import DIGEST_PATTERN, check_name, has_digest

# The proxy deletes what no replica needs any more. This bounds what is left of runs that did not come to that.
MAX_ADAPTERS = 64

_INCOMING = ".incoming-"


class AdapterStore:
    """Adapters under `root`, as `<name>/<digest>/<files>`; at most `max_adapters`, of which the oldest go first."""

    def __init__(self, root: Path, max_adapters: int = MAX_ADAPTERS) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self._max_adapters = max_adapters
        for leftover in self.root.glob(f"{_INCOMING}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def folder(self, name: str, digest: str) -> Path:
        """Where an adapter is, or would be. Raises BadInput for what cannot be a folder."""
        check_name(name)
        if re.fullmatch(DIGEST_PATTERN, digest) is None:
            raise BadInput("the digest is a SHA-256 in hexadecimal digits")
        return self.root / name / digest

    def free_bytes(self) -> int:
        """Room on the disk."""
        return shutil.disk_usage(self.root).free

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """An empty folder to write files to; what is not placed is gone afterwards."""
        folder = self.root / f"{_INCOMING}{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def place(self, incoming: Path, folder: Path) -> None:
        """Move complete files to their path; what is there already may only be the same."""
        folder.parent.mkdir(exist_ok=True)
        if folder.exists() and not has_digest(folder, folder.name):
            shutil.rmtree(folder)
        try:
            if not folder.exists():
                incoming.rename(folder)
        except OSError as problem:
            # Another upload of the same adapter was faster.
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        os.utime(folder)
        self._delete_the_oldest(keep=folder)

    def has(self, folder: Path) -> bool:
        """Whether an adapter is there, read again to the last byte; it counts as new then."""
        if not has_digest(folder, folder.name):
            return False
        os.utime(folder)
        return True

    def delete(self, folder: Path) -> None:
        """Delete an adapter, if it is there."""
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other versions are under that name, or nothing ever was
            folder.parent.rmdir()

    def _delete_the_oldest(self, keep: Path) -> None:
        # Only what an adapter's path can be: the root may be a folder that holds somebody's other things.
        folders = [
            folder
            for folder in self.root.glob("[!.]*/*")
            if folder != keep and re.fullmatch(DIGEST_PATTERN[1:-1], folder.name) is not None
        ]
        folders.sort(key=lambda folder: folder.stat().st_mtime)
        for folder in folders[: max(0, len(folders) + 1 - self._max_adapters)]:
            self.delete(folder)
