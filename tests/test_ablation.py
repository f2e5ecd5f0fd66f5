"""The four runs' figures, from frames as trackio gives them, and what must hold of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rlkit import ablation, run_once
from rlkit.ablation import (
    CELLS,
    Cell,
    as_markdown,
    claims,
    claims_table,
    measure,
    published,
    read_cells,
    table,
    to_json,
)
from rlkit.engines.base import Confirm, OnEvent
from rlkit.engines.lock import RunLock
from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe, recipe_diff
from rlkit.run_folder import RunFolder
from rlkit.tracking import Run, save_frame

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "runs" / "ablation-cap"


def frame(**metrics: list[float]) -> pd.DataFrame:
    """Steps 1, 2, ...; `perf__step_s` is perf/step_s."""
    columns = {name.replace("__", "/"): values for name, values in metrics.items()}
    return pd.DataFrame(columns, index=pd.RangeIndex(1, 1 + len(next(iter(metrics.values()))), name="global_step"))


def cell(name: str, **figures: float) -> Cell:
    """A cell for which every claim holds."""
    cap = name.startswith("cap")
    good = Cell(
        name=name,
        policy="rlkit" if cap else "none",
        keep_cache=name.endswith("kept"),
        steps=24,
        completions=768,
        preemptions=10.0 if cap else 500.0,
        latency_s=3.0 if cap else 6.0,
        latency_p95_s=5.0 if cap else 10.0,
        whole_s=9.0,
        whole_p95_s=12.0,
        waiting=1.0 if cap else 15.0,
        usage=0.6,
        cap_low=10.0,
        cap_high=20.0 if cap else 10.0,
        staleness_mean=1.0 if cap else 2.0,
        staleness_max=2.0,
        dropped=0,
        reward=0.5,
        wall_clock_s=150.0 if cap else 100.0,
        useful_tok_s=1500.0,
    )
    return replace(good, **figures)  # type: ignore[arg-type]  # by name


def cells(**changed: dict[str, float]) -> dict[str, Cell]:
    return {name: cell(name, **changed.get(name.replace("-", "_"), {})) for name in CELLS}


def test_figures_are_weighted_by_what_they_are_means_of() -> None:
    nan = float("nan")
    measured = measure(
        "cap-kept",
        frame(
            perf__step_s=[nan, 10.0, 30.0, 10.0],
            rollout__completed_total=[10.0, 20.0, 30.0, 40.0],
            rollout__vllm_preemptions_total=[nan, 1.0, 2.0, 2.0],
            rollout__duration_s=[1.0, 2.0, 3.0, 4.0],
            rollout__duration_p95_s=[nan, 4.0, 5.0, 6.0],
            rollout__duration_with_gate_s=[2.0, 4.0, 6.0, 8.0],
            rollout__vllm_queued_requests=[99.0, 0.0, 1.0, nan],  # the first step's length is not known
            rollout__kv_cache_usage=[0.9, 0.4, 0.8, nan],
            rollout__inflight_cap=[10.0, 20.0, nan, 15.0],
            sample__staleness_mean=[0.0, 1.0, 2.0, 1.0],
            sample__staleness_max=[0.0, 3.0, 2.0, 1.0],
            sample__dropped_stale_total=[nan, nan, 2.0, nan],
            reward=[0.1, 0.2, 0.3, 0.7],
            batch__trained_tokens_per_step=[1000.0, 1000.0, 2000.0, 2000.0],
        ),
        load_recipe(RECIPES / "cap-kept.yaml"),
    )
    assert measured == Cell(
        name="cap-kept",
        policy="rlkit",
        keep_cache=True,
        steps=4,
        completions=100,
        preemptions=15.0,
        latency_s=3.0,
        latency_p95_s=5.0,
        whole_s=6.0,
        whole_p95_s=None,
        waiting=0.75,
        usage=0.7,
        cap_low=10.0,
        cap_high=20.0,
        staleness_mean=1.0,
        staleness_max=3.0,
        dropped=2,
        reward=0.7,
        wall_clock_s=50.0,
        useful_tok_s=100.0,
    )


def test_rollouts_that_nobody_counted_are_the_samples() -> None:
    told = frame(batch__samples_per_step=[32.0, 32.0], rollout__vllm_preemptions_total=[8.0, 24.0])
    measured = measure("cap-kept", told, load_recipe(RECIPES / "cap-kept.yaml"))
    assert (measured.completions, measured.preemptions) == (64, 150.0)


def test_what_was_not_logged_is_unknown_and_not_zero() -> None:
    measured = measure("fixed-kept", frame(reward=[0.5]), load_recipe(RECIPES / "fixed-kept.yaml"))
    assert measured.preemptions is measured.latency_s is measured.waiting is measured.wall_clock_s is None
    row = table({"fixed-kept": measured}).iloc[0]
    assert row["Preemptions per 300"] == row["Waiting"] == "unknown"
    everything = cells() | {"fixed-kept": measured}
    assert [claim.holds for claim in claims(everything)].count(None) == 6


def test_everything_holds_of_the_wanted_figures() -> None:
    found = claims(cells())
    assert len(found) == 20
    assert all(claim.holds for claim in found)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"fixed_kept": {"preemptions": 499.0}}, ["fixed-kept: at least 500 preemptions per 300"]),
        ({"fixed_cleared": {"waiting": 14.9}}, ["fixed-cleared: at least 15 requests wait"]),
        ({"cap_kept": {"waiting": 1.1}}, ["cap-kept: at most 1 request waits"]),
        ({"cap_kept": {"latency_s": 3.1}}, ["cap-kept: mean latency at most half"]),
        ({"cap_cleared": {"latency_p95_s": 5.1}}, ["cap-cleared: p95 latency at most half"]),
        ({"cap_kept": {"staleness_mean": 2.0}}, ["cap-kept: samples are fresher"]),
        ({"cap_cleared": {"dropped": 1}}, ["cap-cleared: nothing is dropped as stale"]),
        ({"cap_kept": {"reward": 0.4}}, ["cap-kept: reward no worse"]),
        ({"cap_kept": {"wall_clock_s": 151.0}}, ["cap-kept: wall-clock at most 1.5 times"]),
        ({"cap_kept": {"preemptions": 10.5}}, ["cap-kept: at most 10 preemptions per 300"]),
        ({"cap_cleared": {"preemptions": 126.0}}, ["cap-cleared: a quarter of fixed-cleared's preemptions"]),
    ],
)
def test_each_claim_can_break(changed: dict[str, dict[str, float]], broken: list[str]) -> None:
    assert [claim.text for claim in claims(cells(**changed)) if not claim.holds] == broken


def test_three_cells_claim_nothing() -> None:
    assert claims({name: cell(name) for name in CELLS[:3]}) == []


def test_the_recipes_are_two_by_two() -> None:
    recipes = [load_recipe(RECIPES / f"{name}.yaml") for name in CELLS]
    assert [(recipe.name, recipe.cap.policy, recipe.transport.keep_cache) for recipe in recipes] == [
        ("fixed-cleared", "none", False),
        ("fixed-kept", "none", True),
        ("cap-cleared", "rlkit", False),
        ("cap-kept", "rlkit", True),
    ]
    changed = {name for recipe in recipes for name, _, _ in recipe_diff(recipes[0], recipe)}
    assert changed == {"cap.policy", "transport.keep_cache"}


def test_the_published_table_is_the_published_figures() -> None:
    told = published()
    assert list(told["Run"]) == ["kv8g-main", "kv8g-pausefix", "kv8g-caponly", "kv8g-cap"]
    assert list(told["Preemptions"]) == ["501,678", "436,774", "35,638", "21"]
    assert list(told["In flight"]) == ["512", "512", "74 to 163", "70 to 162"]


def test_a_table_in_markdown() -> None:
    text = as_markdown(pd.DataFrame({"Run": ["a", "bcd"], "Waiting": ["1", "22"]}))
    assert text.splitlines() == ["| Run | Waiting |", "|-----|---------|", "| a   | 1       |", "| bcd | 22      |"]


def fake_launch(started: list[str]) -> object:
    """An engine whose runs log one step."""

    def launch(recipe: Recipe, folder: RunFolder, on_event: OnEvent, confirm: Confirm) -> None:
        started.append(f"{recipe.name} on {recipe.engine}")
        with RunLock(folder) as lock:
            folder.recipe.write_text(recipe.to_yaml())
            lock.note("finished", steps=1)

    return launch


def fake_results(recipe: Recipe, folder: RunFolder, report: bool) -> None:
    logged = frame(
        reward=[0.5, 0.5],
        perf__step_s=[np.nan, 5.0],
        rollout__completed_total=[300.0, 300.0],
        rollout__vllm_preemptions_total=[0.0, 2000.0 if folder.name.startswith("fixed") else 8.0],
    ).assign(timestamp=pd.Timestamp("2026-01-05", tz="UTC"))
    save_frame(Run("ablation-cap", folder.name, "id", {}, recipe, logged), folder.metrics)
    folder.verdict.touch()


def test_one_command_runs_what_is_missing_and_prints_the_table_with_its_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    monkeypatch.setattr(run_once, "launch", fake_launch(started))
    monkeypatch.setattr(run_once, "write_results", fake_results)
    arguments = ["--recipes", str(RECIPES), "--out", str(tmp_path), "--engine", "sim"]
    assert ablation.main(arguments) == 1  # little was logged, so not everything holds
    assert started == [f"{name} on sim" for name in CELLS]
    shown = capsys.readouterr().out
    assert shown.startswith("| Run ")
    assert "cap-kept: at most 10 preemptions per 300" in shown
    assert "| cap-kept: at most 10 preemptions per 300              | 4 " in shown
    twin = json.loads((tmp_path / "ablation-cap.json").read_text())
    assert [one["name"] for one in twin["cells"]] == list(CELLS)
    read, frames = read_cells(tmp_path)
    assert twin == to_json(read)
    assert list(frames) == list(CELLS)
    assert len(claims_table(claims(read))) == len(twin["claims"])
    ablation.main(arguments)
    assert len(started) == 4


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablation.main(["--recipes", str(tmp_path), "--out", str(tmp_path)]) == BadInput.exit_code
    assert "fixed-cleared.yaml: cannot read the recipe" in capsys.readouterr().err
    with pytest.raises(BadInput, match="none of the runs fixed-cleared"):
        read_cells(tmp_path)
