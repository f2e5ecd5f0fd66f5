"""How long from a trackio run to its verdict: python tests/bench/diagnose.py [--rounds N] [--server] [--json]

Writes one run (500 steps, 100 metrics) to a temporary trackio folder, then times load_run and diagnose, imports not
included. `--server` reads it through a trackio server of this machine instead of from the folder. Then it times the
diagnosis alone, of a frame of ten thousand steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from rlkit.diagnosis import diagnose
from rlkit.recipe import Recipe, load_recipe
from rlkit.tracking import load_run, write_run

LIMIT_S = 2.0  # what a person at a prompt is asked to wait, imports not counted
LONG_STEPS, LONG_LIMIT_S = 10_000, 1.0  # a verdict of the longest run may not keep a notebook waiting
RECIPE = Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml"

# The metrics a verdict reads, near the values of the published run 1; the rest of the hundred only has to be carried.
MEASURED = {
    "perf/step_s": 22.9,
    "perf/fwd_bwd_s": 21.9,
    "perf/fwd_s": 5.2,
    "perf/optimizer_s": 0.1,
    "perf/rollout_wait_s": 0.02,
    "perf/mfu_fwd_bwd": 3.9,
    "perf/mfu_wall_clock": 3.7,
    "sample/rollout_queue_size": 476.0,
    "sample/staleness_mean": 1.5,
    "batch/samples_per_step": 128.0,
    "batch/samples_per_row": 1.0,
    "rollout/inflight": 128.0,
    "rollout/backpressure_s": 15.0,
    "rollout/generated_tok_s": 4600.0,
}


def rows(steps: int, metrics: int) -> list[dict[str, float]]:
    """A run's rows: all metrics in every step but the weight sync, which is there every fourth."""
    noise = np.random.default_rng(0).normal(1, 0.02, (steps, metrics))
    names = [*MEASURED, *(f"completions/m{i}" for i in range(metrics - len(MEASURED) - 1))]
    levels = [*MEASURED.values(), *[1.0] * (metrics - len(MEASURED) - 1)]
    logged = []
    for step in range(steps):
        row = {name: level * noise[step, i] for i, (name, level) in enumerate(zip(names, levels, strict=True))}
        sync = {"perf/weight_sync_s": 8.5} if step % 4 == 3 else {}
        logged.append({"global_step": step + 1, **row, **sync})
    return logged


def seconds_of_a_long_run(rounds: int, metrics: int, recipe: Recipe) -> list[float]:
    """Seconds that `diagnose` takes for LONG_STEPS steps."""
    frame = pd.DataFrame(rows(LONG_STEPS, metrics)).set_index("global_step")
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        diagnose(frame, recipe)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when a median is over its limit."""
    parser = argparse.ArgumentParser(description="Seconds from a trackio run to its verdict")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--metrics", type=int, default=100)
    parser.add_argument("--server", action="store_true", help="read through a trackio server")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    recipe = load_recipe(RECIPE)
    seconds = []
    with ExitStack() as stack:
        os.environ["TRACKIO_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        start = datetime(2026, 1, 1, tzinfo=UTC)
        times = [start + timedelta(seconds=23 * i) for i in range(options.steps)]
        write_run("bench", "run", rows(options.steps, options.metrics), times, {"recipe": recipe.to_dict()})
        source = None
        if options.server:
            import trackio

            with redirect_stdout(sys.stderr):
                app, source, _, _ = trackio.show(open_browser=False, block_thread=False)
            stack.callback(app.close)
        for _ in range(options.rounds):
            begin = time.perf_counter()
            run = load_run("bench", source=source)
            verdict = diagnose(run.frame, run.recipe)
            seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    long_run = statistics.median(seconds_of_a_long_run(options.rounds, options.metrics, recipe))
    if options.json:
        result = {"median_s": median, "rounds_s": seconds, "limit_s": LIMIT_S, "steps": len(run.frame),
                  "metrics": run.frame.shape[1] - 1, "bound": verdict.bound, "long_steps": LONG_STEPS,
                  "long_median_s": long_run, "long_limit_s": LONG_LIMIT_S}  # fmt: skip
        print(json.dumps(result))
    else:
        print(f"{len(run.frame)} steps x {run.frame.shape[1] - 1} metrics to a verdict ({verdict.bound}-bound):")
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"median {median:.3f} s of {len(seconds)} rounds ({spread}), limit {LIMIT_S} s")
        print(f"{LONG_STEPS:,} steps diagnosed: median {long_run:.3f} s, limit {LONG_LIMIT_S} s")
    return 0 if median <= LIMIT_S and long_run <= LONG_LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
