"""What a chase leaves behind in `runs/out/chase-NAME/`: its recipes, each a change of an earlier one, and a scoreboard.

chase.json            the scoreboard: every run with its change, verdict, figures, and the advice after it
1-start.yaml          the recipe it began with, complete
2-rows-16384.yaml     `extends:` the recipe it was made from, with what was predicted and what the run showed
chase-NAME-1/         the folder of each run, as `rlkit run` leaves it
"""

from __future__ import annotations

import io
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from rlkit.chase import Probe, Scoreboard
from rlkit.counsel import Advice, Figures
from rlkit.errors import BadInput
from rlkit.recipe import MAX_NAME, Recipe
from rlkit.run_folder import RunFolder

COMMENT_WIDTH = 118  # of a line of 120, after "# "


class ChaseFolder:
    """Reads and writes the files of one chase."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def scoreboard(self) -> Path:
        """The JSON file."""
        return self.path / "chase.json"

    def run(self, number: int) -> RunFolder:
        """The folder of one of its runs."""
        return RunFolder(self.path / f"{self.path.name}-{number}")

    def recipe(self, probe: Probe) -> Path:
        """The recipe of one of its runs."""
        return self.path / probe.recipe

    def load(self) -> Scoreboard | None:
        """The chase that is here, None where there is none. Raises BadInput for a file that is something else."""
        if not self.scoreboard.is_file():
            return None
        try:
            return Scoreboard.from_dict(json.loads(self.scoreboard.read_text(encoding="utf-8")))
        except (ValueError, ValidationError, AttributeError):
            raise BadInput(f"{self.scoreboard}: not the scoreboard of a chase; choose another --name") from None

    def save(self, board: Scoreboard) -> None:
        """Write the scoreboard, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        staging = self.scoreboard.with_suffix(".tmp")
        staging.write_text(json.dumps(board.to_dict(), indent=2) + "\n", encoding="utf-8")
        staging.replace(self.scoreboard)

    def write_start(self, recipe: Recipe) -> Probe:
        """The recipe a chase begins with, as its first run."""
        self.path.mkdir(parents=True, exist_ok=True)
        probe = Probe(1, "1-start.yaml", self.run(1).name)
        self.recipe(probe).write_text(recipe.to_yaml(), encoding="utf-8")
        return probe

    def write_change(self, number: int, parent: Probe, advice: Advice, start: Recipe) -> Probe:
        """The recipe of a run that changes its parent's."""
        probe = Probe(
            number,
            f"{number}-{advice.slug}.yaml",
            self.run(number).name,
            parent=parent.number,
            changes=advice.changes,
            overrides=advice.overrides,
            predicted=advice.predicted,
            side_effects=advice.side_effects,
        )
        tail = f"-{number}-{advice.slug}"
        data: dict[str, Any] = {"extends": parent.recipe, "name": f"{start.name[: MAX_NAME - len(tail)]}{tail}"}
        for name, _, value in advice.fields:
            place = data
            *sections, field = name.split(".")
            for section in sections:
                place = place.setdefault(section, {})
            place[field] = value
        paragraphs = [
            f"Run {number} of a chase from {start.name}: {advice.changes}.",
            f"After run {parent.number}: {parent.headline} Predicted: {_words(advice.predicted)}. "
            + " ".join(advice.side_effects),
        ]
        self.recipe(probe).write_text(_commented(paragraphs) + _yaml(data), encoding="utf-8")
        return probe

    def write_outcome(self, probe: Probe) -> None:
        """Add to a changed recipe's comment what its run showed."""
        file = self.recipe(probe)
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        body = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
        if probe.parent is None or any(line.startswith("# What it showed") for line in lines[:body]):
            return
        told = f"it failed: {probe.failure}"
        if probe.figures is not None:
            told = f"{_words(probe.figures)}, measured over {probe.steps} steps. {probe.headline}"
        comment = "#\n" + _commented([f"What it showed: {told}"])
        file.write_text("".join([*lines[:body], comment, *lines[body:]]), encoding="utf-8")


def _words(figures: Figures) -> str:
    price = "" if figures.usd is None else f", {figures.usd:.2f} USD"
    return f"{figures.step_s:.2f} s a step, {figures.wall_clock_min:.1f} minutes{price}"


def _commented(paragraphs: list[str]) -> str:
    wrapped = ["\n".join(f"# {line}" for line in textwrap.wrap(text, COMMENT_WIDTH)) for text in paragraphs]
    return "\n#\n".join(wrapped) + "\n"


def _yaml(data: dict[str, Any]) -> str:
    stream = io.StringIO()
    writer = YAML()
    writer.default_flow_style = False
    writer.dump(data, stream)
    return stream.getvalue()


def with_run(board: Scoreboard, probe: Probe) -> Scoreboard:
    """The scoreboard with one more run."""
    return replace(board, probes=(*board.probes, probe))
