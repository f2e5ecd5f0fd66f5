"""The admission cap against a fixed limit, each with the cache cleared and kept at every sync: four runs, one table.

`python -m rlkit.ablation` (make ablation-cap) runs the four recipes one after the other, reads each run back from its
own metrics, prints the table and what must hold of it, and leaves both as JSON. `notebooks/04_adaptive_cap.ipynb` is
the same experiment on a page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlkit.chart import column, logged
from rlkit.engines import OnEvent
from rlkit.errors import BadInput, RlkitError
from rlkit.learned import last_reward
from rlkit.progress import LineProgress
from rlkit.recipe import Recipe, load_recipe
from rlkit.results import read_run
from rlkit.run_folder import RunFolder
from rlkit.run_once import run_once
from rlkit.wording import number, percent

CELLS = ("fixed-cleared", "fixed-kept", "cap-cleared", "cap-kept")
RECIPES = Path("runs/ablation-cap")
OUT = Path("runs/out/ablation-cap")

# Preemptions are told per so many completions: runs of the same steps end with different numbers of rollouts under way.
PER_COMPLETIONS = 300


@dataclass(frozen=True)
class Cell:
    """One run's figures, from its metrics alone; None where it did not log them.

    `latency_s` is TRL's rollout/duration_s, from the moment a rollout is admitted; `whole_s` includes the wait at the
    gate. The 95th percentiles are the run's mean of those of its last 256 rollouts. `waiting` (requests in the servers'
    queues) and `usage` (of the KV cache) are means over time, `cap_low` and `cap_high` the extremes of the steps'
    means. `reward` is the mean of the last quarter of the steps. `wall_clock_s` and `useful_tok_s` (trained tokens) are
    of the steps after the first, which also starts everything up.
    """

    name: str
    policy: str
    keep_cache: bool
    steps: int
    completions: int
    preemptions: float | None  # per 300 completions
    latency_s: float | None
    latency_p95_s: float | None
    whole_s: float | None
    whole_p95_s: float | None
    waiting: float | None
    usage: float | None
    cap_low: float | None
    cap_high: float | None
    staleness_mean: float | None
    staleness_max: float | None
    dropped: int
    reward: float | None
    wall_clock_s: float | None
    useful_tok_s: float | None


@dataclass(frozen=True)
class Claim:
    """Something that must hold of the four runs: what, the figure, and whether it does (None: not logged)."""

    text: str
    figure: str
    holds: bool | None


def measure(name: str, frame: pd.DataFrame, recipe: Recipe) -> Cell:
    """The figures of one run; `frame` as `rlkit.tracking.Run` has it."""
    # A run whose worker did not count them (a simulated one): the samples trained on are nearly as many.
    counted = "rollout/completed_total" if logged(frame, "rollout/completed_total") else "batch/samples_per_step"
    done = column(frame, counted).fillna(0.0)
    seconds = column(frame, "perf/step_s")
    preemptions = _sum(column(frame, "rollout/vllm_preemptions_total"))
    tokens = column(frame, "batch/trained_tokens_per_step")[seconds.notna()]
    cap = column(frame, "rollout/inflight_cap")
    wall_clock, completions = _sum(seconds), float(done.sum())
    useful = _sum(tokens)
    return Cell(
        name=name,
        policy=recipe.cap.policy,
        keep_cache=recipe.transport.keep_cache,
        steps=len(frame),
        completions=round(completions),
        preemptions=PER_COMPLETIONS * preemptions / completions if preemptions is not None and completions else None,
        latency_s=_weighted(column(frame, "rollout/duration_s"), done),
        latency_p95_s=_mean(column(frame, "rollout/duration_p95_s")),
        whole_s=_weighted(column(frame, "rollout/duration_with_gate_s"), done),
        whole_p95_s=_mean(column(frame, "rollout/duration_with_gate_p95_s")),
        waiting=_weighted(column(frame, "rollout/vllm_queued_requests"), seconds),
        usage=_weighted(column(frame, "rollout/kv_cache_usage"), seconds),
        cap_low=_known(cap.min()),
        cap_high=_known(cap.max()),
        staleness_mean=_mean(column(frame, "sample/staleness_mean")),
        staleness_max=_known(column(frame, "sample/staleness_max").max()),
        dropped=int(column(frame, "sample/dropped_stale_total").fillna(0.0).sum()),
        reward=last_reward(frame),
        wall_clock_s=wall_clock,
        useful_tok_s=useful / wall_clock if useful is not None and wall_clock else None,
    )


def table(cells: Mapping[str, Cell]) -> pd.DataFrame:
    """The cells as a table to read, a row each."""
    rows = [
        {
            "Run": cell.name,
            "Preemptions per 300": _text(cell.preemptions),
            "Latency s, mean / p95": f"{_text(cell.latency_s)} / {_text(cell.latency_p95_s)}",
            "With the gate": f"{_text(cell.whole_s)} / {_text(cell.whole_p95_s)}",
            "Waiting": _text(cell.waiting),
            "KV usage": _text(cell.usage),
            "Cap": _range(cell.cap_low, cell.cap_high),
            "Staleness, mean / max": f"{_text(cell.staleness_mean)} / {_text(cell.staleness_max)}",
            "Stale drops": str(cell.dropped),
            "Reward": _text(cell.reward),
            "Wall-clock s": _text(cell.wall_clock_s),
            "Useful tok/s": _text(cell.useful_tok_s),
        }
        for cell in cells.values()
    ]
    return pd.DataFrame(rows)


def published() -> pd.DataFrame:
    """The published experiment's table, a row a run (`rlkit/simulation/published.json`)."""
    text = resources.files("rlkit.simulation").joinpath("published.json").read_text(encoding="utf-8")
    experiment = json.loads(text)["adaptive_cap_2x2"]
    completions = experiment["recipe"]["steps"] * experiment["recipe"]["completions_per_step"]
    rows = []
    for run in experiment["runs"]:
        told = run["published"]
        rows.append(
            {
                "Run": run["name"],
                "Preemptions": f"{told['preemptions']:,}",
                "Preemptions per 300": number(PER_COMPLETIONS * told["preemptions"] / completions),
                "Latency s": number(told["latency_s"]),
                "In flight": _range(*told["inflight"]),
                "Staleness": number(told["staleness_mean"]),
                "Stale drops per trained": percent(told["stale_dropped_over_trained"]),
                "Reward": f"{told['reward_251_300']:.3f}",
                "Wall-clock min": number(told["wall_clock_min"]),
                "Generated tok/s": f"{told['generated_tok_s']:,}",
            }
        )
    return pd.DataFrame(rows)


def claims(cells: Mapping[str, Cell]) -> list[Claim]:
    """What the experiment is to show, each with its figure; empty unless all four cells are there."""
    if not set(CELLS) <= cells.keys():
        return []
    found = []
    for cache in ("cleared", "kept"):
        fixed, cap = cells[f"fixed-{cache}"], cells[f"cap-{cache}"]
        found += [
            _claim(f"{fixed.name}: at least 500 preemptions per 300", lambda p: p >= 500, fixed.preemptions),
            _claim(f"{fixed.name}: at least 15 requests wait", lambda w: w >= 15, fixed.waiting),
            _claim(f"{cap.name}: at most 1 request waits", lambda w: w <= 1, cap.waiting),
            _halved(f"{cap.name}: mean latency at most half", cap.latency_s, fixed.latency_s),
            _halved(f"{cap.name}: p95 latency at most half", cap.latency_p95_s, fixed.latency_p95_s),
            _compared(f"{cap.name}: samples are fresher", lambda a, b: a < b, cap.staleness_mean, fixed.staleness_mean),
            _claim(f"{cap.name}: nothing is dropped as stale", lambda d: d == 0, cap.dropped),
            _compared(f"{cap.name}: reward no worse", lambda a, b: a >= b, cap.reward, fixed.reward),
            _compared(
                f"{cap.name}: wall-clock at most 1.5 times",
                lambda a, b: a <= 1.5 * b,
                cap.wall_clock_s,
                fixed.wall_clock_s,
            ),
        ]
    kept, cleared = cells["cap-kept"].preemptions, cells["cap-cleared"].preemptions
    return [
        *found,
        _claim("cap-kept: at most 10 preemptions per 300", lambda p: p <= 10, kept),
        _compared(
            "cap-cleared: a quarter of fixed-cleared's preemptions",
            lambda a, b: a <= b / 4,
            cleared,
            cells["fixed-cleared"].preemptions,
        ),
    ]


def headline(cells: Mapping[str, Cell]) -> str:
    """What the runs showed, in a sentence."""
    found = claims(cells)
    if not found:
        missing = [name for name in CELLS if name not in cells]
        return f"Not all four runs are here: {', '.join(missing)} to go."
    fixed, cap = cells["fixed-cleared"], cells["cap-kept"]
    return (
        f"With the cap and a kept cache {_text(cap.preemptions)} preemptions per {PER_COMPLETIONS} completions instead "
        f"of {_text(fixed.preemptions)}, and {_text(cap.latency_s)} s for a rollout instead of "
        f"{_text(fixed.latency_s)} s; {sum(claim.holds is True for claim in found)} of {len(found)} claims hold."
    )


def run_cells(recipes: Path, out: Path, engine: str = "", on_event: OnEvent = lambda event: None) -> None:
    """Run the four recipes of a folder one after the other, each into `out`; a cell that is finished is not run again.

    Raises BadInput, or RunFailed for the first that breaks; called again, it goes on there.
    """
    for name in CELLS:
        recipe = load_recipe(recipes / f"{name}.yaml", [f"engine={engine}"] if engine else [])
        run_once(recipe, RunFolder(out / name), on_event)


def read_cells(out: Path) -> tuple[dict[str, Cell], dict[str, pd.DataFrame]]:
    """The cells that `out` has, and their frames. Raises BadInput when there is none."""
    cells, frames = {}, {}
    for name in CELLS:
        folder = RunFolder(out / name)
        if folder.recipe.is_file():
            run, recipe = read_run(folder)
            cells[name], frames[name] = measure(name, run.frame, recipe), run.frame
    if not cells:
        raise BadInput(f"{out}: none of the runs {', '.join(CELLS)} is here; run them with make ablation-cap")
    return cells, frames


def to_json(cells: Mapping[str, Cell]) -> dict[str, Any]:
    """The table and its claims as plain JSON types."""
    return {"cells": [asdict(cell) for cell in cells.values()], "claims": [asdict(claim) for claim in claims(cells)]}


def as_markdown(frame: pd.DataFrame) -> str:
    """A frame of texts as a Markdown table, its columns lined up."""
    rows = [list(map(str, frame.columns)), *frame.astype(str).to_numpy().tolist()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def claims_table(found: list[Claim]) -> pd.DataFrame:
    """The claims as a table to read."""
    words = {True: "yes", False: "no", None: "not logged"}
    rows = [(claim.text, claim.figure, words[claim.holds]) for claim in found]
    return pd.DataFrame(rows, columns=["What must hold", "Figure", "Holds"])


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, print the table; 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(description="The admission cap against a fixed limit: four runs, one table.")
    parser.add_argument("--recipes", type=Path, default=RECIPES)
    parser.add_argument(
        "--out", type=Path, default=OUT, help="where the runs go; those that are there are not run again"
    )
    parser.add_argument("--engine", default="", help="local, hf or sim, else the recipes'")
    options = parser.parse_args(arguments)
    try:
        with LineProgress(lambda line: print(line, file=sys.stderr, flush=True)) as progress:
            run_cells(options.recipes, options.out, options.engine, progress)
        cells, _ = read_cells(options.out)
    except RlkitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    found = claims(cells)
    twin = options.out / "ablation-cap.json"
    twin.write_text(json.dumps(to_json(cells), indent=2) + "\n", encoding="utf-8")
    print(as_markdown(table(cells)), as_markdown(claims_table(found)), f"as JSON: {twin}", sep="\n\n")
    return 0 if all(claim.holds for claim in found) else 1


def _claim(text: str, holds: Callable[[float], bool], figure: float | None) -> Claim:
    return Claim(text, _text(figure), None if figure is None else holds(figure))


def _compared(text: str, holds: Callable[[float, float], bool], cap: float | None, fixed: float | None) -> Claim:
    known = None if cap is None or fixed is None else holds(cap, fixed)
    return Claim(text, f"{_text(cap)} against {_text(fixed)}", known)


def _halved(text: str, cap: float | None, fixed: float | None) -> Claim:
    return _compared(text, lambda a, b: a <= b / 2, cap, fixed)


def _weighted(values: pd.Series[float], weights: pd.Series[float]) -> float | None:
    known = values.notna() & weights.notna() & (weights > 0)
    return float(np.average(values[known], weights=weights[known])) if known.any() else None


def _mean(values: pd.Series[float]) -> float | None:
    return _known(values.mean())


def _sum(values: pd.Series[float]) -> float | None:
    return float(values.sum()) if values.notna().any() else None


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _text(value: float | None) -> str:
    return "unknown" if value is None else number(value)


def _range(low: float | None, high: float | None) -> str:
    return _text(low) if low == high else f"{_text(low)} to {_text(high)}"


if __name__ == "__main__":
    sys.exit(main())
