"""What a launch puts into the bucket before the Jobs start, and takes from it when they are over."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rlkit import machine
from rlkit.engines.base import Event, OnEvent
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import Place
from rlkit.engines.hf_lease import renewal
from rlkit.engines.hf_records import RECORDS
from rlkit.engines.hf_replica import delivered_name
from rlkit.errors import RunFailed
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.training.toy_task import MODEL_NAMES


def deliver(hub: Hub, recipe: Recipe, place: Place, wheel: bytes, on_event: OnEvent) -> None:
    """Make the bucket if there is none; write recipe and lease, and what it lacks of wheel and model."""
    hub.make_bucket(place.bucket_id)
    files: list[tuple[bytes | Path, str]] = [
        (recipe.to_yaml().encode(), f"{place.folder}/recipe.yaml"),
        (renewal(), f"{place.folder}/lease"),
    ]
    if not hub.listing(place.bucket_id, str(Path(place.wheel).parent)):
        files.append((wheel, place.wheel))
    here = _model_here(recipe, on_event)
    there = f"models/{delivered_name(recipe)}"
    if here is not None and not hub.listing(place.bucket_id, there):
        files += [(path, f"{there}/{path.relative_to(here)}") for path in sorted(here.rglob("*")) if path.is_file()]
    hub.put(place.bucket_id, files)


def fetch(hub: Hub, place: Place, folder: RunFolder) -> None:
    """Bring a run's records into its folder. Raises RlkitError for a file that arrives with another size.

    Not the recipe: the folder has it as it was written, the Jobs with a transport as measured.
    """
    prefix = f"{place.folder}/{RECORDS}"
    files = [file for file in hub.listing(place.bucket_id, prefix) if file.path != f"{prefix}/{folder.recipe.name}"]
    hub.get(place.bucket_id, [(file, folder.path / Path(file.path).relative_to(prefix)) for file in files])


def _model_here(recipe: Recipe, on_event: OnEvent) -> Path | None:
    """The model's folder on this machine, or None for one that the Jobs take from the Hub."""
    if recipe.model.name not in MODEL_NAMES:
        local = Path(recipe.model.name).expanduser()
        return local if local.is_dir() else None
    # Imported here: it reads the model's source to name the cache.
    from rlkit.training.model_cache import build_command, cached_model

    out = cached_model(machine.cache_folder(), recipe.train.seed, recipe.model.name)
    if not out.exists():
        on_event(Event("phase", text="building the toy model (about two minutes, once)"))
        command = build_command(out, recipe.train.seed, recipe.model.name)
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise RunFailed(f"building the toy model failed:\n{built.stderr.strip()[-2000:]}")
    return out
