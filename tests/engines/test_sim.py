from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.diagnosis import diagnose
from rlkit.engines import Event, launch
from rlkit.engines.sim import launch_sim
from rlkit.engines.state import read_state
from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe
from rlkit.results import read_run
from rlkit.run_folder import RunFolder
from rlkit.tracking import load_run

RUNS = Path(__file__).parents[2] / "runs"


def toy(*overrides: str) -> Recipe:
    return load_recipe(RUNS / "local.yaml", ["engine=sim", "train.steps=12", *overrides])


def test_a_simulated_run_leaves_behind_what_a_real_one_does(tmp_path: Path) -> None:
    recipe, folder, events = toy(), RunFolder(tmp_path / "mine"), list[Event]()
    outcome = launch(recipe, folder, events.append)
    assert outcome.steps == 12
    assert [event.step for event in events if event.kind == "step"] == list(range(1, 13))
    assert read_state(folder)["status"] == "finished"
    logged, kept = read_run(folder)
    assert kept == logged.recipe == recipe
    assert list(logged.frame.index) == list(range(1, 13))
    assert logged.config["limits"]["max_inflight_tasks"] == 64
    assert logged.config["simulated"]["reward"] == "not simulated"
    assert "reward" not in logged.frame
    assert diagnose(logged.frame, recipe).bound != "undetermined"


def test_its_clock_is_that_of_the_simulation(tmp_path: Path) -> None:
    outcome = launch(toy(), RunFolder(tmp_path / "mine"))
    frame = load_run("local", "mine").frame
    apart = frame["timestamp"].diff().dt.total_seconds()
    assert apart.iloc[1:].tolist() == pytest.approx(frame["perf/step_s"].iloc[1:].tolist(), abs=1e-3)
    assert outcome.steps == len(frame)


def test_counters_and_decisions_lie_in_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "mine")
    launch(toy("cap.policy=published"), folder)
    proxy = json.loads(folder.proxy.read_text())
    assert proxy["routed"] == proxy["affinity"] + proxy["spilled"] + proxy["unmatched"]
    assert sum(replica["routed"] for replica in proxy["per_replica"]) == proxy["routed"]
    assert [adapter["name"] for adapter in proxy["adapters"]][:2] == ["trl-policy-v1", "trl-policy-v2"]
    decisions = [json.loads(line) for line in folder.cap.read_text().splitlines()]
    assert decisions[0]["reason"] == "sized"
    assert len(folder.steps.read_text().splitlines()) == 12


def test_a_run_that_is_left_early_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    whole, part = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "part")
    events: list[Event] = []
    assert launch_sim(toy(), whole, events.append).steps == 12
    assert launch_sim(toy(), part, events.append, stop_after=8).steps == 8
    assert [event.total for event in events if event.kind == "step"] == [12] * 12 + [8] * 8
    beginning = read_run(part)[0].frame
    assert beginning.drop(columns="timestamp").equals(read_run(whole)[0].frame.drop(columns="timestamp").head(8))
    assert read_state(part)["steps"] == 8


def test_the_same_recipe_twice_is_the_same_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        launch(toy(), RunFolder(tmp_path / name))
    one, two = (load_run("local", name).frame.drop(columns="timestamp") for name in ("one", "two"))
    assert one.equals(two)
    with pytest.raises(BadInput, match="finished run"):
        launch(toy(), RunFolder(tmp_path / "one"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware.trainer=abacus", "hardware.trainer: 'abacus' has no data sheet here"),
        ("model.name=nobody/nothing", "model.name: 'nobody/nothing' is no folder with a config.json"),
        ("serve.num_gpu_blocks=3", "serve.num_gpu_blocks"),
    ],
)
def test_what_cannot_be_simulated_is_told_before_anything_starts(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        launch(toy(override), RunFolder(tmp_path / "mine"))
    assert not (tmp_path / "mine").exists()


def test_a_sync_that_would_fail_ends_the_run_and_is_noted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "mine")
    recipe = load_recipe(
        RUNS / "published" / "r1-dp2.yaml", ["engine=sim", "train.steps=5", "transport.deadline_s=1.5"]
    )
    with pytest.raises(Exception, match="the sync of version 1 failed"):
        launch(recipe, folder)
    assert read_state(folder)["status"] == "failed"
