"""What `rlkit check --measure` measured of a bucket, kept on this machine for the next runs. A thin shell."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rlkit import machine
from rlkit.engines.hf_figures import Figures, measured_transport
from rlkit.recipe import Recipe


def keep_figures(figures: Figures, namespace: str, bucket: str) -> Path:
    """Write the figures with today's date; returns the file."""
    file = _file(namespace, bucket)
    file.parent.mkdir(parents=True, exist_ok=True)
    measured_at = datetime.now(UTC).date().isoformat()
    file.write_text(json.dumps({"measured_at": measured_at, "figures": figures.to_dict()}, indent=2) + "\n")
    return file


def as_measured(recipe: Recipe, namespace: str) -> tuple[Recipe, str]:
    """The recipe with its transport as the kept figures of its bucket want it, and what to say of that.

    The recipe itself and no words when nothing was measured, or nothing is to be changed.
    """
    file = _file(namespace, recipe.hardware.bucket)
    with suppress(OSError, ValueError, TypeError, KeyError):  # never measured, or by another version
        kept = json.loads(file.read_text())
        changes = measured_transport(recipe, Figures(**kept["figures"]))
        if changes:
            adapted = recipe.with_overrides([f"{field}={value:g}" for field, value in changes.items()])
            listed = ", ".join(f"{field} {value:g}" for field, value in changes.items())
            return adapted, f"{listed}: as measured on {kept['measured_at']} (rlkit check --measure)"
    return recipe, ""


def _file(namespace: str, bucket: str) -> Path:
    return machine.cache_folder() / "measured" / f"{namespace}--{bucket}.json"
