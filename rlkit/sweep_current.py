"""Whether a sweep's table and index are those of what is asked for and how it ended: then they need not be made anew.

Beside them lies what they were made from, as one digest, and what they were then: whoever changes, removes or half
writes one of them, or anything that went into them, gets all of them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from rlkit.sweep import Sweep
from rlkit.sweep_folder import Ended, SweepFolder, asked_for, claimed, read_ended, write_json

PACKAGE = Path(__file__).parent
INDEX = PACKAGE.parent / "notebooks" / "06_sweep.ipynb"

# What else the table and the page are made with.
MADE_WITH = ("nbconvert", "pandas", "papermill", "plotly", "pyarrow")


def code_digest() -> str:
    """What table and index are made by: rlkit, the page's notebook, and packages.

    To be taken before they are made: code that is edited meanwhile is not what made them.
    """
    # All of rlkit rather than what a page imports today: it takes 20 ms to read.
    files = (file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    made_by = [*(_digest(file) for file in [*sorted(files), INDEX]), *map(metadata.version, MADE_WITH)]
    return hashlib.sha256(" ".join(made_by).encode()).hexdigest()


def finished(sweep: Sweep, folder: SweepFolder, code: str) -> dict[str, Ended] | None:
    """How every point ended, by its key, where all have and table and index say so; None where there is work to do.

    `code` is the `code_digest` of now. Nothing is written. Raises BadInput as a sweep does for a folder that another
    sweep is running in.
    """
    if not folder.written.is_file():
        return None
    with claimed(folder):
        known = {point.key: read_ended(folder, point) for point in sweep.points}
        ended = {key: one for key, one in known.items() if one is not None}
        # The plan by its content: a sweep of something else that was killed here has left its own.
        is_ours = _read(folder.plan) == json.loads(json.dumps(asked_for(sweep)))
        if not is_ours or len(ended) < len(known) or _read(folder.written) != _mark(sweep, folder, ended, code):
            return None
        return ended


def note_written(sweep: Sweep, folder: SweepFolder, ended: Mapping[str, Ended], code: str) -> None:
    """Remember that table and index have just been made from how these points ended, by this code."""
    write_json(folder.written, _mark(sweep, folder, ended, code))


def _mark(sweep: Sweep, folder: SweepFolder, ended: Mapping[str, Ended], code: str) -> dict[str, str]:
    made_from = {
        "title": folder.path.resolve().name,
        "asked": asked_for(sweep),
        "ended": {key: one.to_dict() for key, one in ended.items()},
        "code": code,
    }
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    made = (folder.table, folder.table.with_suffix(".json"), folder.index)
    return {"made_from": digest} | {file.name: _digest(file) for file in made}


def _digest(file: Path) -> str:
    """Of a file's content; empty where it is not there."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
