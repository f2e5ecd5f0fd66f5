"""A run's records between a Job's own disk and the bucket: steps, logs, the proxy's counters, trackio's database.

Checkpoints are not among them, the trainer writes those into the bucket itself. In the bucket they lie in `records/`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

from rlkit.run_folder import RunFolder

RECORDS = "records"


def keep_records(local: RunFolder, bucket_folder: Path) -> None:
    """Copy everything to the bucket; a file that cannot be read this time is left for the next."""
    target = bucket_folder / RECORDS
    for path in sorted(local.path.rglob("*")):
        name = path.relative_to(local.path)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not hidden and not _is_sidecar(path) and name.parts[0] != "shared":
            with contextlib.suppress(OSError, sqlite3.Error):
                _copy(path, target / name)


def restore_records(bucket_folder: Path, local: RunFolder) -> None:
    """Bring back what an earlier Job of this run kept, and the recipe."""
    kept = bucket_folder / RECORDS
    for path in sorted(kept.rglob("*")) if kept.is_dir() else []:
        if path.is_file() and not path.name.startswith("."):
            _copy(path, local.path / path.relative_to(kept))
    shutil.copyfile(bucket_folder / "recipe.yaml", local.recipe)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    if source.suffix == ".db":
        # SQLite's own copy: consistent while trackio writes, and with what its write-ahead log still holds.
        with (
            contextlib.closing(sqlite3.connect(source)) as database,
            contextlib.closing(sqlite3.connect(staging)) as copy,
        ):
            database.backup(copy)
    else:
        shutil.copyfile(source, staging)
    staging.replace(target)


def _is_sidecar(path: Path) -> bool:
    return path.name.endswith(("-wal", "-shm", "-journal", ".lock"))
