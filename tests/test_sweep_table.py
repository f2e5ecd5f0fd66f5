"""The table of a sweep, the figures over it, and how it is read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from run_folders import run_folder

from rlkit.display import table as html_table
from rlkit.errors import BadInput
from rlkit.pace import logged_minutes
from rlkit.recipe import load_recipe
from rlkit.results import read_run, write_results
from rlkit.sweep import Sweep, plan_sweep
from rlkit.sweep_figures import heat_map, parallel_coordinates, pareto, pareto_front, varied
from rlkit.sweep_folder import Ended, Summary, column_of
from rlkit.sweep_table import cost, failures, headline, results_table, rounded, summarise, to_read
from rlkit.sweep_view import open_sweep

ROOT = Path(__file__).parents[1]


def planned(**data: Any) -> Sweep:
    return plan_sweep({"recipe": str(ROOT / "runs" / "local.yaml")} | data, ROOT)


def summary(step_s: float, verdict: str = "trainer", usd: float | None = 1.0, **metrics: float) -> Summary:
    means = {"perf/step_s": step_s, **metrics}
    return Summary(verdict, "high", "It is.", "Change it.", 20, step_s, step_s / 3, usd, means)


def table() -> pd.DataFrame:
    """Two replicas counts by three limits; one failed, one waits."""
    sweep = planned(grid={"serve.replicas": [1, 2], "rollout.max_inflight_tasks": [64, 128, 256]})
    ended = {}
    for number, point in enumerate(sweep.points[:4]):
        verdict = "generation" if number % 2 else "trainer"
        ended[point.key] = Ended(point.key, "done", summary=summary(10.0 - number, verdict, usd=1.0 + number))
    failed = sweep.points[4]
    ended[failed.key] = Ended(failed.key, "failed", "the engine\nfell over", attempts=2)
    return results_table(sweep, ended)


def test_a_row_a_point_with_its_fields_outcome_and_metrics() -> None:
    rows = table()
    assert rows["point"].tolist() == [1, 2, 3, 4, 5, 6]
    assert rows["status"].tolist() == ["done"] * 4 + ["failed", "waiting"]
    assert rows["serve.replicas"].tolist() == [1, 1, 1, 2, 2, 2]
    assert rows["perf/step_s"].tolist()[:4] == rows["step_s"].tolist()[:4] == [10, 9, 8, 7]
    assert rows["attempts"].tolist() == [1, 1, 1, 1, 2, 0]
    assert headline(rows) == (
        "4 of 6 points ran, 1 failed, 1 waiting; the fastest is point 4 with 7 s a step (generation)."
        " Verdicts: 2 trainer, 2 generation."
    )
    assert failures(rows)["reason"].tolist() == ["the engine", ""]
    assert "perf/step_s" not in to_read(rows, varied(rows, ["serve.replicas"]))
    assert rounded(pd.DataFrame({"x": [1.23456], "y": ["a"]})).to_dict("list") == {"x": [1.23], "y": ["a"]}


def test_a_field_and_a_metric_of_one_name_have_columns_of_their_own() -> None:
    sweep = planned(grid={"reward": ["rlkit.training.rewards:toy_sum", "rlkit.training.rewards:boxed_math"]})
    ended = {point.key: Ended(point.key, "done", summary=summary(1.0, reward=0.5)) for point in sweep.points}
    rows = results_table(sweep, ended)
    assert rows["reward"].tolist() == [0.5, 0.5]
    assert rows[column_of("reward")].nunique() == 2


def test_the_reward_in_the_end_is_shown_where_there_is_one(tmp_path: Path) -> None:
    sweep = planned(grid={"train.seed": [0, 1, 2]})
    learned = [replace(summary(1.0), last_reward=reward) for reward in (0.5, 0.9, None)]
    ended = {point.key: Ended(point.key, "done", summary=one) for point, one in zip(sweep.points, learned, strict=True)}
    rows = results_table(sweep, ended)
    rows.to_parquet(tmp_path / "t.parquet")
    assert pd.read_parquet(tmp_path / "t.parquet")["last_reward"].tolist()[:2] == [0.5, 0.9]
    assert to_read(rows, [])["last_reward"].tolist()[:2] == [0.5, 0.9]
    drawn = parallel_coordinates(rows, ["train.seed"], ["step_s", "last_reward"])
    assert list(drawn.layout.xaxis.ticktext) == ["seed", "last_reward"]


def test_a_simulated_sweep_has_no_reward_and_makes_no_fuss(tmp_path: Path) -> None:
    rows = table()
    rows.to_parquet(tmp_path / "t.parquet")
    rows = pd.read_parquet(tmp_path / "t.parquet")
    assert rows["last_reward"].isna().all()
    assert "last_reward" not in to_read(rows, [])
    drawn = parallel_coordinates(rows, ["serve.replicas"], ["step_s", "last_reward"])
    assert list(drawn.layout.xaxis.ticktext) == ["replicas", "step_s"]


def test_mixed_values_and_lists_become_text_and_parquet_takes_them(tmp_path: Path) -> None:
    sweep = planned(grid={"lora.target_modules": ["all-linear", ["q_proj", "v_proj"]], "model.revision": [None, "007"]})
    rows = results_table(sweep, {})
    assert rows["lora.target_modules"].tolist()[::2] == ['"all-linear"', '["q_proj", "v_proj"]']
    assert rows["model.revision"].isna().tolist() == [True, False, True, False]
    assert rows["model.revision"][1] == "007"
    rows.to_parquet(tmp_path / "t.parquet")
    assert (
        pd.read_parquet(tmp_path / "t.parquet")["lora.target_modules"].tolist() == rows["lora.target_modules"].tolist()
    )


def test_a_listed_point_has_the_recipes_own_values_where_it_names_none() -> None:
    sweep = planned(points=[{"serve.replicas": 3}, {"rollout.queue_maxsize": 600}])
    rows = results_table(sweep, {})
    assert rows["serve.replicas"].tolist() == [3, sweep.base.serve.replicas]
    assert rows["rollout.queue_maxsize"].tolist() == [sweep.base.rollout.queue_maxsize, 600]


def test_a_run_is_summed_up_by_its_own_clock(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    logged, recipe = read_run(folder)
    with pytest.raises(BadInput, match="no verdict was written"):
        summarise(folder, recipe, logged.frame, recipe)
    verdict = write_results(recipe, folder, report=False)
    found = summarise(folder, recipe, logged.frame, recipe)
    assert (found.verdict, found.headline, found.steps) == (verdict.bound, verdict.headline, len(logged.frame))
    assert found.step_s == pytest.approx(verdict.signals["step_s"])
    assert found.wall_clock_min == pytest.approx(logged_minutes(logged.frame, recipe))
    span = (logged.frame["timestamp"].max() - logged.frame["timestamp"].min()).total_seconds() / 60
    assert found.wall_clock_min == pytest.approx(span, rel=0.2)  # the first step, whose end it begins with, is extra
    assert found.usd is None
    assert found.last_reward == pytest.approx(logged.frame["reward"].iloc[-3:].mean())  # of 14 steps
    folder.state.write_text(json.dumps({"status": "finished", "usd": 1.5}))
    assert summarise(folder, recipe, logged.frame, recipe).usd == 1.5


def test_more_replicas_cost_more_and_a_price_of_its_own_goes_before() -> None:
    base = load_recipe(ROOT / "runs" / "published" / "r1-dp2.yaml")  # four GPUs, $20 an hour
    assert cost(base, base, 30) == 10
    assert cost(base, base.with_overrides(["serve.replicas=3"]), 60) == 25
    assert cost(base, base.with_overrides(["serve.replicas=3", "hardware.usd_per_hour=2"]), 60) == 2
    assert cost(base, base, None) is None


def test_the_front_is_what_no_other_point_beats_in_both() -> None:
    rows = table()
    assert pareto_front(rows, "usd", "step_s")["point"].tolist() == [1, 2, 3, 4]
    assert pareto_front(rows.assign(usd=[4, 3, 2, 1, 0, 0]), "usd", "step_s")["point"].tolist() == [4]
    drawn = pareto(rows, "usd", "step_s")
    assert [trace.name for trace in drawn.data] == ["trainer (2)", "generation (2)", "front"]
    assert "4 of 4 points are on the front" in drawn.layout.meta["alt"]
    assert "no point has both" in pareto(rows, "usd", "reward").layout.meta["alt"]


def test_a_map_has_a_cell_a_pair_and_leaves_out_what_did_not_run() -> None:
    drawn = heat_map(table(), ["rollout.max_inflight_tasks", "serve.replicas"], "step_s")
    assert list(drawn.data[0].x) == ["64", "128", "256"]
    assert drawn.data[0].z[0].tolist() == [10, 9, 8]
    assert list(drawn.data[0].text[1]) == ["7", "", ""]
    assert "lowest 7 at rollout.max_inflight_tasks 64 and serve.replicas 2" in drawn.layout.meta["alt"]
    assert "two fields that vary" in heat_map(table(), ["serve.replicas"], "step_s").layout.meta["alt"]
    assert "no point has it" in heat_map(table(), ["serve.replicas"], "nothing").layout.meta["alt"]


def test_parallel_coordinates_have_a_line_a_point_and_a_colour_a_verdict() -> None:
    drawn = parallel_coordinates(table(), ["serve.replicas", "rollout.max_inflight_tasks"], ["step_s"])
    assert [trace.name for trace in drawn.data] == ["trainer (2)", "generation (2)"]
    assert list(drawn.layout.xaxis.ticktext) == ["replicas", "max_inflight_tasks", "step_s"]
    assert len(drawn.data[0].y) == 8  # two lines of three values, each with a gap behind it
    assert list(drawn.data[0].y[:3]) == [0.0, 0.0, 1.0]
    assert "Lowest step_s: point 4 with 7" in drawn.layout.meta["alt"]
    empty = parallel_coordinates(table().iloc[4:], ["serve.replicas"], ["step_s"])
    assert "fewer than two points" in empty.layout.meta["alt"]


def test_a_sweep_is_read_back_with_links_that_lead_from_the_page(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no sweep"):
        open_sweep(tmp_path)
    base = load_recipe(ROOT / "runs" / "local.yaml").to_dict()
    plan = {"name": "grid", "fields": ["serve.replicas", "rollout.max_inflight_tasks"], "recipe": base}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    with pytest.raises(BadInput, match="has no table yet"):
        open_sweep(tmp_path)
    rows = table()
    rows.to_parquet(tmp_path / "results.parquet")
    past = open_sweep(tmp_path)
    assert past.axes == ["rollout.max_inflight_tasks", "serve.replicas"]
    assert past.links(str(tmp_path))[0] == f"points/{rows['name'][0]}/report.html"
    assert past.links(str(tmp_path / "below"))[0] == f"../points/{rows['name'][0]}/report.html"
    shown = html_table(to_read(past.table, past.fields), links=past.links(str(tmp_path))).data
    assert f'<a href="points/{rows["name"][0]}/report.html">1</a>' in shown
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot read the sweep"):
        open_sweep(tmp_path)
