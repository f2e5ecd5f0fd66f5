"""What goes wrong on the way: each run ends with nothing running, and with all that it kept in the bucket brought home
(both are asserted by the fixture `launch`)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hub.hub_server import EmulatedHub
from hub.stand_ins import CRASHES, PREEMPTED, SURVIVES, WAITS, when

from rlkit.engines.base import Event, Outcome
from rlkit.engines.hf_recovery import MAX_REPLACEMENTS
from rlkit.engines.state import read_state
from rlkit.errors import RlkitError, RunFailed
from rlkit.results import read_run
from rlkit.run_folder import RunFolder

pytestmark = [pytest.mark.hub, pytest.mark.slow]

Launch = Callable[..., Outcome]


def test_failed_trainer_tells_its_last_lines(launch: Launch, folder: RunFolder) -> None:
    with pytest.raises(RunFailed, match=r"(?s)trainer ended in stage ERROR.*about to fail.*no more memory"):
        launch(CRASHES, changes=["serve.replicas=1"])
    assert read_state(folder)["status"] == "failed"


def test_replica_that_ends_before_serving(launch: Launch, hub: EmulatedHub) -> None:
    with pytest.raises(RunFailed, match=r"(?s)replica-\d ended in stage ERROR.*CUDA out of memory"):
        launch(serve=("sh", "-c", "echo CUDA out of memory; exit 1"))
    assert not hub.of_role("trainer")


def test_hardware_that_never_comes_is_named(launch: Launch, hub: EmulatedHub) -> None:
    hub.faults.stuck_flavors.add("h200")
    with pytest.raises(RunFailed, match=r"replica-0 still waits for h200 .*hardware.scheduling_minutes"):
        launch(changes=["hardware.scheduling_minutes=0.001"])
    assert not hub.of_role("trainer")


def test_token_without_rights_starts_nothing(launch: Launch, hub: EmulatedHub) -> None:
    hub.faults.read_only_token = True
    with pytest.raises(RlkitError, match="the token may not do that"):
        launch()
    assert not hub.jobs


def test_full_bucket_starts_nothing(launch: Launch, hub: EmulatedHub) -> None:
    hub.buckets.full = True
    with pytest.raises(RlkitError, match="Storage limit reached"):
        launch()
    assert not hub.jobs


def test_bucket_that_is_full_later_ends_the_run(launch: Launch, hub: EmulatedHub, events: list[Event]) -> None:
    """A replica that was replaced cannot be announced any more; what the run kept is brought home."""
    handlers = [
        when("step 1", lambda: setattr(hub.buckets, "full", True), events),
        when("step 1", lambda: hub.kill(hub.of_role("replica")[0]), []),
    ]
    with pytest.raises(RlkitError, match="Storage limit reached"):
        launch(
            SURVIVES,
            changes=["hardware.network_group=false"],
            on_event=lambda event: [handle(event) for handle in handlers],
        )


def test_budget_ends_everything(launch: Launch, folder: RunFolder) -> None:
    with pytest.raises(RunFailed, match=r"hardware.budget_usd: \$0.\d+ of \$0.00 are spent"):
        launch(WAITS, changes=["serve.replicas=1", "hardware.budget_usd=0.0001"])
    assert read_state(folder)["usd"] > 0


@pytest.mark.parametrize("group", ["true", "false"])
def test_lost_replica_is_replaced(
    launch: Launch, hub: EmulatedHub, folder: RunFolder, events: list[Event], group: str
) -> None:
    """The trainer goes on with the other one; the new one has the live adapter before it gets requests."""
    kill = when("step 1", lambda: hub.kill(hub.of_role("replica")[1]), events)
    assert launch(SURVIVES, changes=[f"hardware.network_group={group}"], on_event=kill).steps == 3
    assert [job.stage for job in hub.of_role("replica")] == ["CANCELED", "ERROR", "CANCELED"]
    assert [job.labels["replica"] for job in hub.of_role("replica")] == ["0", "1", "1"]
    log = (folder.logs / "trainer.log").read_text()
    assert "load trl-policy-v2 200" in log
    proxy = json.loads(folder.proxy.read_text())
    assert proxy["adapters"][-1]["accepted_by"] == 2
    assert proxy["per_replica"][1]["completed"] > 0
    assert ("replica 1 is at http://127.0.0.1" in log) == (group == "false")


def test_jobs_proxy_that_is_down_costs_no_replica(launch: Launch, hub: EmulatedHub, events: list[Event]) -> None:
    """The trainer's way leads through the network group: only the launching side sees nobody answer."""

    def down(is_down: bool) -> None:
        for front in [front for job in hub.of_role("replica") for front in job.fronts]:
            front.is_down = is_down

    def up_again_and_one_lost() -> None:
        down(False)
        hub.kill(hub.of_role("replica")[1])

    handlers = [
        when("step 1", lambda: down(True), events),
        when("no replica answers here", up_again_and_one_lost, []),
    ]
    assert launch(SURVIVES, on_event=lambda event: [handle(event) for handle in handlers]).steps == 3
    # The one that was killed is replaced; the other one was never touched.
    assert [job.labels["replica"] for job in hub.of_role("replica")] == ["0", "1", "1"]


def test_replica_lost_before_the_proxy_is_up_is_replaced(launch: Launch, hub: EmulatedHub, events: list[Event]) -> None:
    kill = when("starting the trainer", lambda: hub.kill(hub.of_role("replica")[0]), events)
    assert launch(changes=["serve.replicas=1", "hardware.network_group=false"], on_event=kill).steps == 3
    assert [job.stage for job in hub.of_role("replica")] == ["ERROR", "CANCELED"]


def test_replica_that_is_lost_again_and_again_ends_the_run(
    launch: Launch, hub: EmulatedHub, events: list[Event]
) -> None:
    kill = when("replica-0 serves", lambda: hub.kill(hub.of_role("replica")[-1]), events, times=MAX_REPLACEMENTS + 1)
    with pytest.raises(RunFailed, match="replica-0 ended in stage ERROR"):
        launch(WAITS, changes=["serve.replicas=1"], on_event=kill)
    assert len(hub.of_role("replica")) == MAX_REPLACEMENTS + 1


def test_run_goes_on_through_what_passes(launch: Launch, hub: EmulatedHub, events: list[Event]) -> None:
    """A stage nobody knows, a Hub that refuses and fails for a while, a log stream that drops."""
    hub.faults.answers += [("POST", "/api/jobs/tester", 429, 2), ("POST", "/batch", 500, 1)]

    def trouble() -> None:
        hub.faults.answers += [("GET", "/api/jobs/tester/", 500, 3)]
        hub.faults.drop_log_after = 1

    def strange() -> None:
        hub.faults.stage_of[hub.of_role("replica")[0].id] = "WARMING_UP"

    handlers = [
        when("replica-0: http", strange, events),
        when("'WARMING_UP'", hub.faults.stage_of.clear, []),
        when("training", trouble, []),
    ]
    outcome = launch(on_event=lambda event: [handle(event) for handle in handlers])
    assert outcome.steps == 3
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3]
    assert any("a stage 'WARMING_UP' that this version does not know" in event.text for event in events)
    assert len(hub.jobs) == 3


def test_trainer_preempted_at_step_15_goes_on_from_its_checkpoint(
    launch: Launch, hub: EmulatedHub, folder: RunFolder, events: list[Event]
) -> None:
    """One run in trackio, and no adapter name that the replica would know from before."""
    kept = hub.buckets.folder("tester/rlkit") / "runs" / "my-run" / "records" / "trackio"

    def preempt_once_kept() -> None:
        hub.until(lambda: any(kept.glob("*.db")))
        hub.kill(hub.of_role("trainer")[0])

    preempt = when("step 15", preempt_once_kept, events)
    outcome = launch(PREEMPTED, changes=["serve.replicas=1", "train.steps=20"], on_event=preempt)
    assert outcome.steps == 20
    assert [event.step for event in events if event.kind == "step"] == list(range(1, 21))
    assert [job.stage for job in hub.of_role("trainer")] == ["ERROR", "COMPLETED"]
    # Its machine was lost, so nobody cancelled the replica, which still holds the policies of before.
    assert len(hub.of_role("replica")) == 1
    log = (folder.logs / "trainer.log").read_text()
    assert "from step 11" in log
    assert log.count("load trl-policy-v1 200") == 2
    assert "already been loaded" not in log
    logged, _ = read_run(folder)
    assert logged.run_id == "1"
    assert list(logged.frame.index) == list(range(1, 21))
