"""The Hugging Face engine from launch to results, against the emulated Hub: the real client, real processes, the real
proxy; replicas are emulated ones, and the trainer is a few lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import HfApi

from rlkit.engines.base import Event, Outcome
from rlkit.engines.hf import HfOptions, launch_hf
from rlkit.engines.state import read_state
from rlkit.errors import BadInput, RunFailed
from rlkit.recipe import Recipe, load_recipe
from rlkit.results import read_run
from rlkit.run_folder import RunFolder
from rlkit.training.model_cache import cached_model

pytestmark = [pytest.mark.hub, pytest.mark.slow]

LOCAL = Path(__file__).parents[2] / "runs" / "local.yaml"
SERVE = ("python3", "-m", "rlkit.serving.emulated", "--port", "8000")
# Publishes a policy through the proxy as TRL does, then logs three steps.
TRAINS = """
import json, os, pathlib, httpx, numpy
from safetensors.numpy import save_file
url, folder, shared = (os.environ["RLKIT_" + name] for name in ("SERVER_URL", "RUN_FOLDER", "SHARED"))
policy = pathlib.Path(shared, ".vllm_lora", "trl-policy-v1")
policy.mkdir(parents=True, exist_ok=True)
config = {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
(policy / "adapter_config.json").write_text(json.dumps(config))
save_file({"lora_A": numpy.ones(4, numpy.float32)}, policy / "adapter_model.safetensors")
body = {"lora_name": policy.name, "lora_path": str(policy)}
answer = httpx.post(url + "/v1/load_lora_adapter", json=body, timeout=60)
print("load", answer.status_code, answer.text, flush=True)
answer.raise_for_status()
for step in (1, 2, 3):
    with open(folder + "/steps.jsonl", "a") as lines:
        lines.write(json.dumps({"global_step": step, "reward": step / 4}) + chr(10))
"""
CRASHES = "print('about to fail', flush=True); raise SystemExit('no more memory')"
WAITS = "import time; time.sleep(600)"
# Two steps and a checkpoint, then nothing more; started again, it goes on from the checkpoint.
RESUMES = """
import json, os, pathlib, time
from rlkit.recipe import load_recipe
from rlkit.tracking import write_run
folder, shared, checkpoint = (os.environ["RLKIT_" + name] for name in ("RUN_FOLDER", "SHARED", "CHECKPOINT"))
project = load_recipe(folder + "/recipe.yaml").tracking.project
def log(*steps):
    rows = [{"global_step": step, "reward": step / 4} for step in steps]
    write_run(project, "my-run", rows, run_id="1")
    with open(folder + "/steps.jsonl", "a") as lines:
        lines.writelines(json.dumps(row) + chr(10) for row in rows)
if not checkpoint:
    log(1, 2)
    kept = pathlib.Path(shared, "checkpoint-2")
    kept.mkdir()
    (kept / "trainer_state.json").write_text("{}")
    time.sleep(600)
print("from", pathlib.Path(checkpoint).name, flush=True)
log(3)
"""

# Goes on until the proxy says that a replica is gone.
SURVIVES = """
import json, os, time, httpx
url, folder = (os.environ["RLKIT_" + name] for name in ("SERVER_URL", "RUN_FOLDER"))
def log(step):
    with open(folder + "/steps.jsonl", "a") as lines:
        lines.write(json.dumps({"global_step": step, "reward": step / 4}) + chr(10))
log(1)
while httpx.get(url + "/health", timeout=60).status_code == 200:
    time.sleep(0.1)
log(2)
log(3)
"""

Launch = Callable[..., Outcome]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    model = cached_model(tmp_path / "cache", seed=0)
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")  # nothing here reads what is in it
    hardware = ["hardware.trainer=h200x2", "hardware.replica=h200", "serve.replicas=2", "hardware.deadline_hours=1"]
    return load_recipe(LOCAL, ["engine=hf", "train.steps=3", *hardware])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "my-run")


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def launch(api: HfApi, recipe: Recipe, folder: RunFolder, events: list[Event]) -> Launch:
    def start(
        train: str = TRAINS,
        serve: tuple[str, ...] = SERVE,
        changes: list[str] | None = None,
        on_event: Callable[[Event], object] = events.append,
        confirm: Callable[[object], bool] = lambda price: True,
    ) -> Outcome:
        options = HfOptions(
            api=api,
            serve=serve,
            train=("python3", "-c", train),
            poll_s=0.05,
            lease_s=600,
            first_wait_s=0.01,
        )
        return launch_hf(
            recipe.with_overrides(changes or []), folder, lambda event: (on_event(event), None)[1], confirm, options
        )

    return start


def test_run_from_launch_to_results(launch: Launch, hub: EmulatedHub, folder: RunFolder, events: list[Event]) -> None:
    outcome = launch()
    assert outcome.steps == 3
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3]
    assert [job.stage for job in hub.of_role("replica")] == ["CANCELED", "CANCELED"]
    assert [job.stage for job in hub.of_role("trainer")] == ["COMPLETED"]
    assert read_state(folder)["status"] == "finished"
    assert folder.steps.read_text().count("\n") == 3
    assert "load 200" in (folder.logs / "trainer.log").read_text()
    assert not hub.running()


def test_failed_trainer_tells_its_last_lines(launch: Launch, hub: EmulatedHub, folder: RunFolder) -> None:
    with pytest.raises(RunFailed, match=r"(?s)trainer ended in stage ERROR.*about to fail.*no more memory"):
        launch(CRASHES, changes=["serve.replicas=1"])
    assert not hub.running()
    assert read_state(folder)["status"] == "failed"


def test_replica_that_ends_before_serving(launch: Launch, hub: EmulatedHub) -> None:
    with pytest.raises(RunFailed, match=r"(?s)replica-\d ended in stage ERROR.*CUDA out of memory"):
        launch(serve=("sh", "-c", "echo CUDA out of memory; exit 1"))
    assert not hub.of_role("trainer")
    assert not hub.running()


def test_every_job_has_labels_a_timeout_and_no_token_outside_its_secrets(
    launch: Launch, hub: EmulatedHub, folder: RunFolder
) -> None:
    launch()
    jobs = list(hub.jobs.values())
    assert len(jobs) == 3
    for job in jobs:
        assert job.spec["timeoutSeconds"] == 3600
        assert {"tool", "project", "run", "role", "version", "launch", "name"} <= set(job.labels)
        assert hub.token not in str({name: value for name, value in job.spec.items() if name != "secrets"})
    assert {job.labels["replica"] for job in hub.of_role("replica")} == {"0", "1"}
    written = [path for root in (hub.root, folder.path) for path in root.rglob("*") if path.is_file()]
    assert not [path for path in written if hub.token.encode() in path.read_bytes()]


def when(text: str, act: Callable[[], object], events: list[Event]) -> Callable[[Event], None]:
    """An event handler that acts once, at the first event whose text has this in it."""
    pending = [act]

    def handle(event: Event) -> None:
        events.append(event)
        if pending and (text in event.text or text == f"step {event.step}"):
            pending.pop()()

    return handle


def test_hardware_that_never_comes_is_named(launch: Launch, hub: EmulatedHub) -> None:
    hub.faults.stuck_flavors.add("h200")
    with pytest.raises(RunFailed, match=r"replica-0 still waits for h200 .*hardware.scheduling_minutes"):
        launch(changes=["hardware.scheduling_minutes=0.001"])
    assert not hub.of_role("trainer")
    assert not hub.running()


def test_last_replica_lost_while_serving(launch: Launch, hub: EmulatedHub, events: list[Event]) -> None:
    kill = when("training", lambda: hub.kill(hub.of_role("replica")[0]), events)
    with pytest.raises(RunFailed, match="replica-0 ended in stage ERROR"):
        launch(WAITS, changes=["serve.replicas=1"], on_event=kill)
    assert not hub.running()


def test_budget_ends_everything(launch: Launch, hub: EmulatedHub, folder: RunFolder) -> None:
    with pytest.raises(RunFailed, match=r"hardware.budget_usd: \$0.\d+ of \$0.00 are spent"):
        launch(WAITS, changes=["serve.replicas=1", "hardware.budget_usd=0.0001"])
    assert not hub.running()
    assert read_state(folder)["usd"] > 0


def test_refused_price_starts_nothing(launch: Launch, hub: EmulatedHub) -> None:
    with pytest.raises(BadInput, match=r"not started \(\$20.00 an hour"):
        launch(confirm=lambda price: False)
    assert not hub.jobs


def test_merged_weights_are_refused(launch: Launch, hub: EmulatedHub) -> None:
    with pytest.raises(BadInput, match=r"transport.kind: merged"):
        launch(changes=["lora=null", "transport.kind=merged"])
    assert not hub.jobs


def test_run_goes_on_through_what_passes(launch: Launch, hub: EmulatedHub, events: list[Event]) -> None:
    """A stage nobody knows, a Hub that fails for a while, a log stream that drops, one of two replicas lost."""

    def trouble() -> None:
        hub.faults.answers += [("GET", "/api/jobs/tester/", 500, 3)]
        hub.faults.drop_log_after = 1

    def strange() -> None:
        hub.faults.stage_of[hub.of_role("replica")[0].id] = "WARMING_UP"

    handlers = [
        when("replica-0: http", strange, events),
        when("'WARMING_UP'", hub.faults.stage_of.clear, []),
        when("training", trouble, []),
        when("step 1", lambda: hub.kill(hub.of_role("replica")[1]), []),
    ]
    outcome = launch(SURVIVES, on_event=lambda event: [handle(event) for handle in handlers])
    assert outcome.steps == 3
    told = " ".join(event.text for event in events)
    assert "a stage 'WARMING_UP' that this version does not know" in told
    assert "replica-1 ended in stage ERROR" in told
    assert not hub.running()


def test_preempted_trainer_goes_on_from_its_checkpoint(
    launch: Launch, hub: EmulatedHub, folder: RunFolder, events: list[Event]
) -> None:
    kept = hub.buckets.folder("tester/rlkit") / "runs" / "my-run" / "records" / "trackio"

    def preempt_once_kept() -> None:
        hub.until(lambda: any(kept.glob("*.db")))
        hub.kill(hub.of_role("trainer")[0])

    preempt = when("step 2", preempt_once_kept, events)
    outcome = launch(RESUMES, changes=["serve.replicas=1"], on_event=preempt)
    assert outcome.steps == 3
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3]
    assert [job.stage for job in hub.of_role("trainer")] == ["ERROR", "COMPLETED"]
    assert "from checkpoint-2" in (folder.logs / "trainer.log").read_text()
    assert not hub.running()
    logged, _ = read_run(folder)
    assert logged.run_id == "1"
    assert list(logged.frame.index) == [1, 2, 3]


def test_adapters_are_pushed_through_an_exposed_port(launch: Launch, hub: EmulatedHub, folder: RunFolder) -> None:
    assert launch(changes=["transport.kind=push", "serve.replicas=1"]).steps == 3
    (replica,) = hub.of_role("replica")
    assert any("received" in line and "trl-policy-v1" in line for line in replica.lines)
    assert "load 200" in (folder.logs / "trainer.log").read_text()
    assert not hub.running()


def test_mount_that_shows_an_adapter_late_is_asked_again(launch: Launch, hub: EmulatedHub, folder: RunFolder) -> None:
    late = (*SERVE, "--mount", "/rlkit-bucket", "--mount-lag-s", "3")
    assert launch(serve=late, changes=["serve.replicas=1"]).steps == 3
    log = (folder.logs / "trainer.log").read_text()
    assert "load 200" in log
    assert not hub.running()
