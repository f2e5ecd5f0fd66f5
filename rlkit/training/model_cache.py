"""Built models are kept, and each is built by one process, however many runs want it at once.

`python -m rlkit.training.model_cache --out FOLDER --seed 0` returns when the toy model is in FOLDER: it builds it, or
waits for the process that does. Progress lines go to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rlkit.training import toy_model, toy_task


def cached_model(cache: Path, seed: int, name: str = toy_task.MODEL_NAME) -> Path:
    """Where the model `name` for `seed` lives under `cache`; the folder's name changes with the code that builds it."""
    source = Path(toy_model.__file__).read_bytes() + Path(toy_task.__file__).read_bytes()
    return cache / f"{name}-{seed}-{hashlib.sha256(source).hexdigest()[:12]}"


def build_command(out: Path, seed: int, name: str) -> list[str]:
    """The command line that leaves the model `name` in `out`."""
    command = [sys.executable, "-m", "rlkit.training.model_cache", "--out", str(out), "--seed", str(seed)]
    return [*command, "--untrained"] if name == toy_task.UNTRAINED_NAME else command


def ensure_built(out: Path, seed: int, tell: Callable[[str], None], *, untrained: bool = False) -> None:
    """Return when the toy model is in `out`, whoever built it."""
    with _alone(out, lambda: tell("another run is building this model: waiting for it")):
        if not out.exists():

            def on_progress(step: int, steps: int, loss: float) -> None:
                tell(f"pretraining {step}/{steps} loss {loss:.3f}")

            toy_model.build(out, seed, on_progress, untrained=untrained)


@contextlib.contextmanager
def _alone(out: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a cache entry. It is the kernel's (flock): it does not outlive a builder that is killed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    # The file stays: one that is removed while another process waits for it would be locked twice.
    with out.with_name(f".{out.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Build one model, or wait for it."""
    parser = argparse.ArgumentParser(description="Build the toy model unless it is there.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--untrained", action="store_true")
    arguments = parser.parse_args()
    tell = partial(print, flush=True)
    ensure_built(arguments.out, arguments.seed, tell, untrained=arguments.untrained)


if __name__ == "__main__":
    main()
