"""A kernel that is killed: what it started ends by itself, and the next kernel takes over what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hub.hub_server import HARDWARE, EmulatedHub
from huggingface_hub import HfApi

from rlkit.engines.base import Event
from rlkit.engines.hf import HfOptions, launch_hf
from rlkit.engines.state import read_state
from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.training.model_cache import cached_model

pytestmark = [pytest.mark.hub, pytest.mark.slow]

LOCAL = Path(__file__).parents[2] / "runs" / "local.yaml"
CHANGES = ["engine=hf", "train.steps=1", "hardware.trainer=h200x2", "hardware.replica=h200", "serve.replicas=1"]
SERVE = ["python3", "-m", "rlkit.serving.emulated", "--port", "8000"]
TRAIN = """
import json, os
with open(os.environ["RLKIT_RUN_FOLDER"] + "/steps.jsonl", "a") as lines:
    lines.write(json.dumps({"global_step": 1, "reward": 1.0}) + chr(10))
"""
KERNEL = """
import sys
from pathlib import Path
from rlkit.engines.hf import HfOptions, launch_hf
from rlkit.recipe import load_recipe
from rlkit.run_folder import RunFolder
programs = dict(serve={serve!r}, train=["python3", "-c", {train!r}])
options = HfOptions(**programs, poll_s=0.05, lease_s={lease_s}, first_wait_s=0.01)
say = lambda event: print(event.text, flush=True)
launch_hf(load_recipe({local!r}, {changes!r}), RunFolder(Path({folder!r})), say, options=options)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "my-run")


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    cached_model(tmp_path / "cache", seed=0).mkdir(parents=True)  # nothing here reads what is in it


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(LOCAL, CHANGES)


def killed_between_replicas_and_trainer(hub: EmulatedHub, folder: RunFolder, lease_s: float) -> None:
    """Launch in a process of its own, and kill it when its replica runs but the trainer was not asked for."""
    hub.faults.stage_of = {}
    code = KERNEL.format(
        serve=SERVE, train=TRAIN, lease_s=lease_s, local=str(LOCAL), changes=CHANGES, folder=str(folder.path)
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout is not None
    for line in kernel.stdout:
        if "replica-0 is running" in line:
            break
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    kernel.stdout.close()
    assert not hub.of_role("trainer")


def options(api: HfApi) -> HfOptions:
    train = ["python3", "-c", TRAIN]
    return HfOptions(api=api, serve=SERVE, train=train, poll_s=0.05, lease_s=600, first_wait_s=0.01)


def usd_of(hub: EmulatedHub) -> float:
    """What all Jobs were billed."""
    prices = {item["name"]: item["unitCostUSD"] / 60 for item in HARDWARE}
    jobs = [job.describe() for job in hub.jobs.values()]
    usd: float = sum(prices[job["flavor"]] * job["durations"]["runningSecs"] for job in jobs)
    return usd


def test_replica_nobody_needs_ends_itself(hub: EmulatedHub, api: HfApi, folder: RunFolder, recipe: Recipe) -> None:
    killed_between_replicas_and_trainer(hub, folder, lease_s=2)
    (replica,) = hub.of_role("replica")
    hub.until(lambda: replica.is_over, timeout_s=300)
    assert any("nobody renewed the lease" in line for line in replica.lines)
    # What it cost meanwhile is the run's, whose next kernel knows of it.
    launch_hf(recipe, folder, lambda event: None, options=options(api))
    assert len(hub.of_role("replica")) == 2
    assert read_state(folder)["usd"] == pytest.approx(usd_of(hub), abs=1e-3)


def test_next_kernel_takes_over_what_is_left(
    hub: EmulatedHub, api: HfApi, folder: RunFolder, recipe: Recipe, tmp_path: Path
) -> None:
    killed_between_replicas_and_trainer(hub, folder, lease_s=600)
    elsewhere = RunFolder(tmp_path / "elsewhere" / "my-run")
    with pytest.raises(BadInput, match=r"Jobs of this run are going on \(replica .*rlkit jobs cancel my-run"):
        launch_hf(recipe, elsewhere, lambda event: None, options=options(api))
    events: list[Event] = []
    assert launch_hf(recipe, folder, events.append, options=options(api)).steps == 1
    assert len(hub.of_role("replica")) == 1
    assert any("replica-0: taken over" in event.text for event in events)
    assert not hub.running()
    assert read_state(folder)["usd"] == pytest.approx(usd_of(hub), abs=1e-3)
