"""Predictions of real runs here: python tests/bench/closed_loop.py [--out FOLDER] [--set FIELD=VALUE] [--json]

Calibrates on one real run of runs/local.yaml, then predicts two recipes of another shape, each before it is run: one
sample in a row instead of a packed row, and eight rollouts in flight instead of 64. Runs that the folder holds already
are not made again. `--set` changes all three.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rlkit import terminal
from rlkit.diagnosis import diagnose
from rlkit.results import read_run
from rlkit.run_folder import RunFolder
from rlkit.signals import column, settled_steps

RUNS = Path(__file__).parents[2] / "runs"
SEEN = ("local", 20)  # a recipe and its steps, few: a run takes a minute to start
HELD_OUT = (("local-trainer-bound", 10), ("local-generation-bound", 14))
# How near a step has to come. Two runs of one recipe on two cores that others use, too, are a tenth apart.
WITHIN = 0.25


@dataclass(frozen=True)
class Prediction:
    """A held-out recipe: its step as predicted and as it was, seconds, and what bounds it."""

    recipe: str
    predicted_step_s: float
    real_step_s: float
    predicted_bound: str
    real_bound: str

    @property
    def error(self) -> float:
        """Relative to the real step."""
        return self.predicted_step_s / self.real_step_s - 1

    @property
    def right(self) -> bool:
        """Near enough, and the same bound."""
        return abs(self.error) <= WITHIN and self.predicted_bound == self.real_bound


def close_the_loop(out: Path, overrides: Sequence[str] = ()) -> list[Prediction]:
    """Calibrate, predict, run, compare; what is made goes to `out`. Raises CalledProcessError when a command fails."""
    out.mkdir(parents=True, exist_ok=True)
    name, steps = SEEN
    _run(out, name, steps, overrides)
    constants = out / "constants.json"
    _rlkit(out, "calibrate", str(out / name), "--out", str(constants), "--json")
    found = []
    for name, steps in HELD_OUT:
        subject = [str(out / name)] if _is_there(out / name) else _recipe(name, steps, overrides)
        predicted = json.loads(_rlkit(out, "predict", *subject, "--constants", str(constants), "--json"))
        _run(out, name, steps, overrides)
        logged, recipe = read_run(RunFolder(out / name))
        real = float(column(settled_steps(logged.frame, recipe), "perf/step_s").mean())
        bound = diagnose(logged.frame, recipe).bound
        found.append(Prediction(name, predicted["step_s"]["mean"], real, predicted["verdict"]["bound"], bound))
    return found


def _run(out: Path, name: str, steps: int, overrides: Sequence[str]) -> None:
    if not _is_there(out / name):
        terminal.say(f"running {name}, {steps} steps", terminal.err)
        _rlkit(out, "run", *_recipe(name, steps, overrides), "--folder", str(out / name), "--no-report", "--json")


def _is_there(folder: Path) -> bool:
    return RunFolder(folder).metrics.exists()


def _recipe(name: str, steps: int, overrides: Sequence[str]) -> list[str]:
    settings = [f"train.steps={steps}", f"train.save_steps={steps}", *overrides]
    return [str(RUNS / f"{name}.yaml"), *(part for setting in settings for part in ("--set", setting))]


def _rlkit(out: Path, *arguments: str) -> str:
    """Stdout of a command, which logs to a trackio of its own: the names are taken in the user's."""
    command = [sys.executable, "-m", "rlkit", *arguments]
    environment = {**os.environ, "TRACKIO_DIR": str(out.absolute() / "trackio")}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True).stdout


def main() -> None:
    """Print a row a held-out recipe; exit code 1 where one is not near enough."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RUNS / "out" / "closed-loop")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = close_the_loop(arguments.out, arguments.overrides)
    if arguments.json:
        shown: dict[str, Any] = {"calibrated_on": SEEN[0], "within": WITHIN}
        terminal.print_json(
            shown | {"held_out": [asdict(one) | {"error": one.error, "right": one.right} for one in found]}
        )
    else:
        table = Table("held out", "step predicted, s", "step, s", "error", "bound predicted", "bound", box=None)
        for one in found:
            steps = (f"{one.predicted_step_s:.2f}", f"{one.real_step_s:.2f}", f"{one.error:+.0%}")
            table.add_row(one.recipe, *steps, one.predicted_bound, one.real_bound)
        terminal.print_table(table)
    raise SystemExit(not all(one.right for one in found))


if __name__ == "__main__":
    main()
