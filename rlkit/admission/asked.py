"""The limit that a person sets while a run goes on: one small file in the run's folder.

`{"max_inflight": 16}` holds for as long as it stands there, `{"max_inflight": null}` lifts it. The rollout worker reads
it at each reading of the servers; it can only lower what the law of the admission cap allows (`law.at_most`).
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from rlkit.errors import BadInput
from rlkit.recipe import Recipe

log = logging.getLogger(__name__)

FIELD = "max_inflight"


class AskedLimit:
    """The limit in a file, read again and again; what cannot be read changes nothing, and is a warning once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._most: int | None = None
        self._warned = False

    def read(self) -> int | None:
        """The most that may be in flight, None when nobody set a limit; raises nothing."""
        try:
            self._most, self._warned = parse_limit(self._path.read_text(encoding="utf-8")), False
        except FileNotFoundError:
            self._most = None
        except (OSError, ValueError) as error:
            if not self._warned:
                log.warning("%s: %s; the limit stays what it was", self._path, error)
            self._warned = True
        return self._most


def parse_limit(text: str) -> int | None:
    """What the file says; ValueError for what is no limit.

    >>> parse_limit('{"max_inflight": 16}'), parse_limit('{"max_inflight": null}')
    (16, None)
    """
    content = json.loads(text)
    most = content.get(FIELD, False) if isinstance(content, dict) else False
    if most is None or (isinstance(most, int) and not isinstance(most, bool) and most >= 1):
        return most
    raise ValueError(f'expected {{"{FIELD}": a whole number from 1 on, or null}}')


def ask(path: Path, most: int | None, recipe: Recipe) -> None:
    """Set or lift (None) the limit of a run that goes on; BadInput: see `why_not`, and outside 1 to the ceiling."""
    problem = why_not(recipe)
    if problem is not None:
        raise BadInput(problem)
    ceiling = recipe.inflight_limit
    if most is not None and not 1 <= most <= ceiling:
        raise BadInput(f"{FIELD}: {most} is outside 1 to {ceiling}, the recipe's rollout.max_inflight_tasks")
    staging = path.with_suffix(".tmp")
    try:
        staging.write_text(json.dumps({FIELD: most}) + "\n", encoding="utf-8")
        os.replace(staging, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot write the limit: {error.strerror}") from None


def why_not(recipe: Recipe) -> str | None:
    """Why nobody can change how many rollouts a run of `recipe` admits, None if one can."""
    if recipe.cap.policy == "none":
        return "cap.policy: none admits what TRL admits; only a run with a cap (rlkit, published) can be held to less"
    if recipe.engine != "local":
        where = "is over before anybody can" if recipe.engine == "sim" else "has its folder on other machines"
        return f"engine {recipe.engine}: the run {where}; only a local run's cap can be changed while it goes on"
    return None
