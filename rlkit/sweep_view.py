"""A sweep read back from its folder, as a notebook shows it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlkit.errors import BadInput
from rlkit.recipe import Recipe, parse_recipe
from rlkit.sweep_figures import varied


@dataclass(frozen=True)
class PastSweep:
    """What a sweep left behind; `table` as `rlkit.sweep_table.results_table` makes it."""

    name: str
    folder: Path
    base: Recipe
    fields: list[str]
    table: pd.DataFrame

    @property
    def axes(self) -> list[str]:
        """The fields that vary, those with the most values first: what a heat map is drawn over."""
        return sorted(varied(self.table, self.fields), key=lambda name: -self.table[name].nunique())

    def links(self, page: str = "") -> list[str]:
        """Where each point's own page is, as seen from a page in the folder `page` (empty: the current one)."""
        beside = os.path.relpath(self.folder, page or Path.cwd())
        return [Path(beside, "points", name, "report.html").as_posix() for name in self.table["name"]]


def open_sweep(folder: str | Path) -> PastSweep:
    """A sweep by its folder. Raises BadInput for one that holds none, or none that has come to a table."""
    place = Path(folder)
    plan, results = place / "sweep.json", place / "results.parquet"
    if not plan.is_file():
        raise BadInput(f"{place}: holds no sweep; rlkit sweep GRID.yaml --out {place} makes one")
    try:
        asked: dict[str, Any] = json.loads(plan.read_text(encoding="utf-8"))
        table = pd.read_parquet(results)
        return PastSweep(asked["name"], place, parse_recipe(asked["recipe"], str(plan)), list(asked["fields"]), table)
    except FileNotFoundError:
        raise BadInput(f"{place}: the sweep has no table yet; the same rlkit sweep again goes on with it") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise BadInput(f"{place}: cannot read the sweep: {str(error).splitlines()[0]}") from None
