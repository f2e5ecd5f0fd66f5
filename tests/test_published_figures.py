"""The nine published runs by their published figures alone: side, cause, and what else is named."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rlkit.diagnosis import Verdict, diagnose
from rlkit.recipe import load_recipe
from rlkit.simulation.published import published_runs

RUNS = Path(__file__).parents[1] / "runs" / "adaptive-cap"
CAP: dict[str, dict[str, Any]] = {
    run["name"]: run["published"]
    for run in json.loads(resources.files("rlkit.simulation").joinpath("published.json").read_text("utf-8"))[
        "adaptive_cap_2x2"
    ]["runs"]
}
STEPS, SAMPLES = 300, 128


def cap_verdict(name: str) -> Verdict:
    """Totals spread over the steps; `inflight` is what was admitted, its two ends in turn."""
    figures = CAP[name]
    rows = {
        "perf/step_s": figures["wall_clock_min"] * 60 / STEPS,
        "batch/samples_per_step": SAMPLES,
        "rollout/duration_s": figures["latency_s"],
        "rollout/generated_tok_s": figures["generated_tok_s"],
        "rollout/inflight": 512.0,
        "rollout/vllm_preemptions_total": figures["preemptions"] / STEPS,
        "sample/staleness_mean": figures["staleness_mean"],
        "sample/dropped_stale_total": figures["stale_dropped_over_trained"] * SAMPLES,
    }
    frame = pd.DataFrame([rows] * STEPS, index=pd.RangeIndex(1, STEPS + 1, name="global_step"), dtype="float64")
    frame["rollout/inflight_admitted"] = [float(figures["inflight"][step % 2]) for step in range(STEPS)]
    return diagnose(frame, load_recipe(RUNS / f"{name}.yaml"))


@pytest.mark.parametrize("name", ["kv8g-main", "kv8g-pausefix"])
def test_the_runs_without_a_cap_admit_more_than_their_cache_holds(name: str) -> None:
    verdict = cap_verdict(name)

    assert verdict.bound == "generation"
    assert verdict.causes[0].name == "over-admission"
    assert "preemptions for each sample" in verdict.causes[0].text
    assert "thrown away as stale" in verdict.causes[0].text
    assert "cap.policy=rlkit" in verdict.next_action


@pytest.mark.parametrize("name", ["kv8g-caponly", "kv8g-cap"])
def test_the_runs_with_a_cap_do_not(name: str) -> None:
    assert "over-admission" not in {cause.name for cause in cap_verdict(name).causes}


def test_every_published_run_is_among_the_figures() -> None:
    assert {run.name for run in published_runs() if run.experiment == "adaptive_cap_2x2"} == set(CAP)
