"""What a launch puts into the bucket before the Jobs start, and takes from it when they are over.

A run's folder there goes by its name alone, so a name is one run's.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import JobInfo

from rlkit import machine
from rlkit.engines.base import Event, OnEvent
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import Place, bucket_folder
from rlkit.engines.hf_lease import renewal
from rlkit.engines.hf_records import RECORDS
from rlkit.engines.hf_replica import delivered_name
from rlkit.errors import BadInput, RunFailed
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


def refuse_a_taken_name(hub: Hub, bucket: str, run: str, alive: Iterable[JobInfo]) -> None:
    """Raise BadInput for a fresh run whose name another one has: it would take over its Jobs, or what they kept.

    `alive` are the Jobs of that name. What a run keeps are its records and checkpoints, which new Jobs go on from.
    """
    roles = ", ".join(f"{(job.labels or {}).get('role')} {job.id}" for job in alive)
    if roles:
        raise BadInput(
            f"{run}: Jobs of this run are going on ({roles}), and not from this folder; "
            f"end them with `rlkit jobs cancel {run}`, or choose another --name"
        )
    bucket_id, prefix = f"{hub.namespace}/{bucket}", bucket_folder(run)
    kept = hub.listing(bucket_id, prefix, new_bucket=True)
    if any("/" in file.path.removeprefix(f"{prefix}/") for file in kept):
        raise BadInput(
            f"{run}: the bucket {bucket_id} holds a run of this name, and not from this folder; choose another "
            f"--name, or delete it with `hf buckets rm {bucket_id}/{prefix} --recursive`"
        )


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
