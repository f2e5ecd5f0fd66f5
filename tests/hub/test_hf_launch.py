"""The Hugging Face engine from launch to results, against the emulated Hub: the real client, real processes, the real
proxy; replicas are emulated ones, and the trainer is a few lines."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable

import pytest
from hub.hub_server import EmulatedHub
from hub.stand_ins import LATE, SERVE, when

from rlkit.engines.base import Event, Outcome
from rlkit.engines.hf_figures import Figures
from rlkit.engines.hf_measured import keep_figures
from rlkit.engines.state import read_state
from rlkit.errors import BadInput
from rlkit.live import Look
from rlkit.live_source import FolderSource
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder

pytestmark = [pytest.mark.hub, pytest.mark.slow]

Launch = Callable[..., Outcome]


def test_run_from_launch_to_results(
    launch: Launch, hub: EmulatedHub, recipe: Recipe, folder: RunFolder, events: list[Event]
) -> None:
    keep_figures(Figures(12.0, 3.0, True, 3.0, True, 401, True, 120.0), "tester", "rlkit")
    outcome = launch()
    assert outcome.steps == 3
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3]
    assert [job.stage for job in hub.of_role("replica")] == ["CANCELED", "CANCELED"]
    assert [job.stage for job in hub.of_role("trainer")] == ["COMPLETED"]
    assert read_state(folder)["status"] == "finished"
    assert folder.steps.read_text().count("\n") == 3
    assert "load trl-policy-v1 200" in (folder.logs / "trainer.log").read_text()
    # Trainer and replicas talk within their group: the ports are exposed for the launching side alone.
    assert all(front.passed for job in hub.of_role("replica") for front in job.network)
    jobs = list(hub.jobs.values())
    assert len(jobs) == 3
    for job in jobs:
        assert job.spec["timeoutSeconds"] == 3600
        assert {"tool", "project", "run", "role", "version", "launch", "name"} <= set(job.labels)
    assert {job.labels["replica"] for job in hub.of_role("replica")} == {"0", "1"}
    # What was measured of the bucket is what the Jobs run with, and is said; the recipe is as it was written.
    delivered = load_recipe(hub.buckets.folder("tester/rlkit") / "runs" / "my-run" / "recipe.yaml")
    assert delivered == recipe.with_overrides(["transport.retry_s=2"])
    assert any("transport.retry_s 2: as measured on 20" in event.text for event in events)
    assert load_recipe(folder.recipe) == recipe


def test_steps_are_seen_in_the_folder_while_the_run_goes_on(
    launch: Launch, hub: EmulatedHub, folder: RunFolder, events: list[Event]
) -> None:
    """They are on the trainer's machine, and said on its log; at the end its own file takes their place."""
    source, seen = FolderSource(folder), list[Look]()
    launch(changes=["serve.replicas=1"], on_event=when("step 2", lambda: seen.append(source.look()), events))
    assert (len(seen[0].frame), seen[0].going_on) == (2, True)
    assert (len(source.look().frame), source.look().over) == (3, True)


@pytest.mark.parametrize("phase", ["cancelling the replicas", "fetching the results"])
def test_run_that_is_stopped_after_its_last_step_has_finished(
    launch: Launch, hub: EmulatedHub, folder: RunFolder, events: list[Event], phase: str
) -> None:
    """Its results are here, and nothing runs (the fixture), when the signal is raised at last."""
    stop = when(phase, lambda: signal.raise_signal(signal.SIGTERM), events)
    with pytest.raises(SystemExit):
        launch(changes=["serve.replicas=1"], on_event=stop)
    assert read_state(folder)["status"] == "finished"
    assert folder.steps.read_text().count("\n") == 3


def test_refused_price_starts_nothing(launch: Launch, hub: EmulatedHub) -> None:
    with pytest.raises(BadInput, match=r"not started \(\$20.00 an hour"):
        launch(confirm=lambda price: False)
    assert not hub.jobs


def test_name_that_the_bucket_has_from_elsewhere_is_refused(
    launch: Launch, hub: EmulatedHub, folder: RunFolder, events: list[Event]
) -> None:
    """Another checkout's run, or one whose folder was deleted: new Jobs would go on from its checkpoint."""
    launch(changes=["serve.replicas=1"])
    jobs, elsewhere = len(hub.jobs), folder.path.with_name("elsewhere")
    folder.path.rename(elsewhere)
    told = r"my-run: the bucket tester/rlkit holds .*; choose another --name, or .*`hf buckets rm tester/rlkit/runs/my"
    with pytest.raises(BadInput, match=told):
        launch(changes=["serve.replicas=1"])
    assert len(hub.jobs) == jobs
    shutil.rmtree(folder.path)
    elsewhere.rename(folder.path)


def test_merged_weights_are_refused(launch: Launch, hub: EmulatedHub) -> None:
    with pytest.raises(BadInput, match=r"transport.kind: merged"):
        launch(changes=["lora=null", "transport.kind=merged"])
    assert not hub.jobs


@pytest.mark.parametrize("group", ["true", "false"])
def test_adapters_are_pushed(launch: Launch, hub: EmulatedHub, folder: RunFolder, group: str) -> None:
    """Within a network group with a token of their own, else through an exposed port with the Hub's."""
    changes = ["transport.kind=push", "serve.replicas=1", f"hardware.network_group={group}"]
    assert launch(changes=changes).steps == 3
    (replica,) = hub.of_role("replica")
    assert any("received" in line and "trl-policy-v1" in line for line in replica.lines)
    assert "load trl-policy-v1 200" in (folder.logs / "trainer.log").read_text()
    assert [bool(front.passed) for front in replica.network] == ([True, True] if group == "true" else [])


@pytest.mark.parametrize("lag_s", [3, 30])
def test_mount_that_shows_an_adapter_late_is_asked_again(
    launch: Launch, hub: EmulatedHub, folder: RunFolder, lag_s: int
) -> None:
    """Within transport.deadline_s it is only a matter of asking again; every policy arrives, in order, on all."""
    late = (*SERVE, "--mount", "/rlkit-bucket", "--mount-lag-s", str(lag_s))
    assert launch(LATE, serve=late).steps == 3
    log = (folder.logs / "trainer.log").read_text()
    assert [f"load trl-policy-v{version} 200" in log for version in (1, 2)] == [True, True]
    adapters = json.loads(folder.proxy.read_text())["adapters"]
    assert [(one["name"], one["ok"], one["accepted_by"]) for one in adapters] == [
        ("trl-policy-v1", True, 2),
        ("trl-policy-v2", True, 2),
    ]
    assert all(max(one["attempts"]) > 1 for one in adapters)
    assert [job.stage for job in hub.of_role("replica")] == ["CANCELED", "CANCELED"]
