"""Which checkpoint a run resumes from."""

from __future__ import annotations

import json
import re
from pathlib import Path

# The Trainer writes this file after model, optimizer and random state, so a checkpoint that has it whole is whole.
LAST_WRITTEN = "trainer_state.json"


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The complete `checkpoint-<step>` of the highest step, or None; a half-written one is passed over."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return next((path for path in sorted(found, key=checkpoint_step, reverse=True) if _complete(path)), None)


def checkpoint_step(checkpoint: Path) -> int:
    """The optimizer step a checkpoint was taken after."""
    return int(checkpoint.name.rpartition("-")[2])


def _complete(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / LAST_WRITTEN).read_text()), dict)
    except (OSError, ValueError):
        return False
