"""Labelled runs on disk, so that an evaluation goes on where it was interrupted and a new diagnosis judges old runs.

A run's key is a digest of everything that its simulation depends on: recipe, constants, lengths, seed, steps, and the
code of the modules that simulate. A change of any of them finds nothing; a change of the diagnosis finds everything.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pandas as pd

from rlkit.evaluation.interventions import FIRST_STEPS, Labelled
from rlkit.evaluation.scenarios import Scenario

# What a simulated run and its label follow from, as files or folders of the package: all that interventions.py imports
# but the parsing of recipes, whose result is in the key.
SIMULATES = (
    "admission",
    "serving/router.py",
    "serving/prefix_index.py",
    "serving/registry.py",
    "serving/adapter_answers.py",
    "serving/adapter_commands.py",
    "serving/adapter_operation.py",
    "serving/adapter_replica.py",
    "simulation/batches.py",
    "simulation/constants.py",
    "simulation/cores.py",
    "simulation/events.py",
    "simulation/fleet.py",
    "simulation/frame.py",
    "simulation/hardware.py",
    "simulation/lengths.py",
    "simulation/prompt_cache.py",
    "simulation/recipes.py",
    "simulation/replica.py",
    "simulation/rollout.py",
    "simulation/setup.py",
    "simulation/simulate.py",
    "simulation/sync.py",
    "simulation/trainer.py",
    "simulation/window.py",
    "simulation/worker.py",
    "evaluation/interventions.py",
    "evaluation/paired.py",
)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class LabelStore:
    """Labelled runs in a folder, two files each; whoever writes one writes all of it or nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, scenario: Scenario, seed: int, steps: int = FIRST_STEPS) -> Labelled | None:
        """The labelled run, None when it is not there or cannot be read."""
        key = run_key(scenario, seed, steps)
        try:
            gains = json.loads((self.folder / f"{key}.json").read_text())
            frame = pd.read_parquet(self.folder / f"{key}.parquet")
        except (OSError, ValueError):
            return None
        return Labelled(scenario, seed, frame, gains["sides"], gains["causes"])

    def put(self, labelled: Labelled, steps: int = FIRST_STEPS) -> None:
        """Keep a labelled run. One that cannot be written (a full disk) is missing."""
        key = run_key(labelled.scenario, labelled.seed, steps)
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f"{key}.{os.getpid()}"
            labelled.frame.to_parquet(draft)
            draft.replace(self.folder / f"{key}.parquet")
            draft.write_text(json.dumps({"sides": labelled.sides, "causes": labelled.causes}))
            draft.replace(self.folder / f"{key}.json")  # last: its presence says that the run is whole


def run_key(scenario: Scenario, seed: int, steps: int = FIRST_STEPS) -> str:
    """A name for everything that the run follows from."""
    about = asdict(scenario) | {"recipe": scenario.recipe.to_dict(), "seed": seed, "steps": steps}
    text = json.dumps(about, sort_keys=True, default=str)
    return hashlib.blake2b(f"{simulator_version()}\n{text}".encode(), digest_size=16).hexdigest()


@cache
def simulator_version() -> str:
    """A digest of the code that simulates; comments and docstrings are not in it."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=16)
    for name in SIMULATES:
        path = package / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(_code(file.read_text()).encode())
    return digest.hexdigest()


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
