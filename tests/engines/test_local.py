"""The local engine's handling of processes: emulated replicas, the real proxy, and trainers of a few lines.

What the real trainer and real vLLM do in it is tests/test_end_to_end.py's business.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlkit import preflight
from rlkit.engines import LAUNCHERS, Event, engine_problem, launch, local
from rlkit.engines.lock import RunLock
from rlkit.engines.state import Status, read_state
from rlkit.errors import BadInput, RunFailed
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.tracking import write_run
from rlkit.training.model_cache import cached_model

LOCAL = Path(__file__).parents[2] / "runs" / "local.yaml"

FINISHES = """
import json, pathlib
for step in (1, 2, 3):
    with open({steps!r}, "a") as lines:
        lines.write(json.dumps({{"global_step": step, "reward": step / 4}}) + chr(10))
"""
CRASHES = "print('about to fail'); raise SystemExit('no more memory')"
WAITS = FINISHES + "import time; time.sleep(600)"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    recipe = load_recipe(LOCAL, ["train.steps=3"])
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    cached_model(tmp_path / "cache", recipe.train.seed).mkdir(parents=True)  # nothing here reads what is in it
    return recipe


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, folder: RunFolder) -> Callable[[str], None]:
    """Sets what the trainer job executes; replicas are emulated ones."""
    monkeypatch.setattr(
        local,
        "vllm_command",
        lambda recipe, model, port, on_cpu: [sys.executable, "-m", "rlkit.serving.emulated", "--port", str(port)],
    )

    def set_script(script: str) -> None:
        code = script.replace("{steps!r}", repr(str(folder.steps))).replace("{{", "{").replace("}}", "}")
        monkeypatch.setattr(local, "trainer_command", lambda *_: [sys.executable, "-c", code])

    return set_script


class Recorder:
    """Collects events, and runs an action at the first step."""

    def __init__(self, at_first_step: Callable[[], None] = lambda: None) -> None:
        self.events: list[Event] = []
        self._action = at_first_step

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "step" and event.step == 1:
            self._action()


def living_jobs() -> list[psutil.Process]:
    """What this process started and is still there."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_a_run_to_its_end(recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None]) -> None:
    trainer(FINISHES)
    recorder = Recorder()
    outcome = launch(recipe, folder, recorder)
    assert outcome.steps == 3
    assert [(e.step, e.total, e.metrics["reward"]) for e in recorder.events if e.kind == "step"] == [
        (1, 3, 0.25), (2, 3, 0.5), (3, 3, 0.75),
    ]  # fmt: skip
    phases = [e.text for e in recorder.events if e.kind == "phase"]
    assert phases == ["starting 2 vLLM replicas", "starting the proxy", "training", "stopping the jobs"]
    assert read_state(folder)["status"] == "finished"
    assert load_recipe(folder.recipe) == recipe
    assert sorted(log.name for log in folder.logs.iterdir()) == [
        "proxy.log", "replica-0.log", "replica-1.log", "trainer.log",
    ]  # fmt: skip
    assert [replica["routed"] for replica in json.loads(folder.proxy.read_text())["per_replica"]] == [0, 0]
    assert living_jobs() == []
    with pytest.raises(BadInput, match="finished run"):
        launch(recipe, folder)


PUBLISHES = """
import json, pathlib, subprocess, sys, urllib.request
import numpy as np
from safetensors.numpy import save_file
folder = pathlib.Path({shared!r}) / ".vllm_lora" / "trl-policy-v1"
folder.mkdir(parents=True)
(folder / "adapter_config.json").write_text(json.dumps({{"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}}))
save_file({{"lora_A": np.ones(4, dtype=np.float32)}}, folder / "adapter_model.safetensors")
body = json.dumps({{"lora_name": "trl-policy-v1", "lora_path": str(folder)}}).encode()
request = urllib.request.Request({url!r} + "/v1/load_lora_adapter", body)
print(urllib.request.urlopen(request).read().decode())
"""


def test_adapters_are_pushed_to_receivers_beside_the_replicas(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(FINISHES)

    def publish_then_finish(recipe: Recipe, folder: RunFolder, model: str, url: str, checkpoint: object) -> list[str]:
        script = PUBLISHES.replace("{shared!r}", repr(str(folder.shared.resolve()))).replace("{url!r}", repr(url))
        code = script.replace("{{", "{").replace("}}", "}")
        return [sys.executable, "-c", code + FINISHES.format(steps=str(folder.steps))]

    monkeypatch.setattr(local, "trainer_command", publish_then_finish)
    commands: list[str] = []

    def remember() -> None:
        commands.extend(" ".join(process.cmdline()) for process in living_jobs())

    launch(recipe.with_overrides(["transport.kind=push"]), folder, Recorder(remember))
    assert len([command for command in commands if "rlkit.serving.receiver" in command]) == 2
    (load,) = json.loads(folder.proxy.read_text())["adapters"]
    assert (load["name"], load["ok"], load["accepted_by"]) == ("trl-policy-v1", True, 2)
    assert "received trl-policy-v1" in (folder.logs / "receiver-1.log").read_text()
    assert living_jobs() == []
    assert not (folder.path / ".pushed").exists()


def test_a_proxy_in_the_environment_is_not_asked_for_this_machines_ports(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "intranet")
    trainer("import os; print(os.environ['no_proxy'], os.environ['NO_PROXY'])" + FINISHES)
    launch(recipe, folder)
    assert (folder.logs / "trainer.log").read_text() == "intranet,127.0.0.1 intranet,127.0.0.1\n"


def test_a_trainer_that_crashes(recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None]) -> None:
    trainer(CRASHES)
    recorder = Recorder()
    with pytest.raises(RunFailed, match="trainer exited with code 1") as error:
        launch(recipe, folder, recorder)
    assert "about to fail\nno more memory" in str(error.value)
    # The phase that broke is not over when the jobs are stopped: a bar would be shown as full.
    assert [event.text for event in recorder.events if event.kind == "phase"][-1] == "training"
    assert recorder.events[-1] == Event("log", text="stopping the jobs")
    assert read_state(folder)["status"] == "failed"
    assert living_jobs() == []


def test_a_full_disk_does_not_hide_why_a_run_ended(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(CRASHES)
    note = RunLock.note

    def full(lock: RunLock, status: Status, **details: Any) -> None:
        if status == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        note(lock, status, **details)

    monkeypatch.setattr(RunLock, "note", full)
    with pytest.raises(RunFailed, match="trainer exited with code 1"):
        launch(recipe, folder)


@pytest.mark.parametrize("victim", ["emulated", "rlkit.serving.proxy", "time.sleep"])
def test_a_killed_job_ends_the_run(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], victim: str
) -> None:
    trainer(WAITS)

    def kill_one() -> None:
        next(p for p in living_jobs() if any(victim in part for part in p.cmdline())).kill()

    name = {"emulated": "replica-0", "rlkit.serving.proxy": "proxy", "time.sleep": "trainer"}[victim]
    with pytest.raises(RunFailed, match=f"{name} was killed by SIGKILL"):
        launch(recipe, folder, Recorder(kill_one))
    assert living_jobs() == []


def test_a_replica_that_turns_unhealthy_ends_the_run(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(WAITS)
    training = threading.Event()
    monkeypatch.setattr(local, "HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(local, "healthy", lambda client: not training.is_set())
    with pytest.raises(RunFailed, match="no longer answers /health"):
        launch(recipe, folder, Recorder(training.set))
    assert living_jobs() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], number: signal.Signals
) -> None:
    trainer(WAITS)
    # A shell starts what it runs in the background with SIGINT ignored, and Python then leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            launch(recipe, folder, Recorder(lambda: os.kill(os.getpid(), number)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert read_state(folder)["status"] == "stopped"
    assert living_jobs() == []


def test_a_signal_while_the_jobs_are_stopped_leaves_a_finished_run(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None]
) -> None:
    trainer(FINISHES)

    def interrupt(event: Event) -> None:
        if event.text == "stopping the jobs" and event.kind == "phase":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(recipe, folder, interrupt)
    assert read_state(folder)["status"] == "finished"
    assert read_state(folder)["steps"] == 3
    assert living_jobs() == []


def test_a_replica_that_cannot_start_is_told_at_once(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(WAITS)
    monkeypatch.setattr(local, "vllm_command", lambda *_, **__: [sys.executable, "-c", "raise SystemExit('no GPU')"])
    with pytest.raises(RunFailed, match=r"replica-\d exited with code 1.*\nno GPU"):
        launch(recipe, folder)
    assert living_jobs() == []


def test_replicas_that_take_long_to_start_are_named(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(FINISHES)
    monkeypatch.setattr(local, "NOT_READY_EVERY_S", 0.0)
    recorder = Recorder()
    launch(recipe, folder, recorder)
    first = next(event for event in recorder.events if event.kind == "log")
    logs = [folder.logs / f"replica-{index}.log" for index in (0, 1)]
    assert first.text == f"not ready after 0 s: replica-0 ({logs[0]}), replica-1 ({logs[1]})"


def test_a_name_that_trackio_knows_is_refused_for_a_fresh_run(recipe: Recipe, folder: RunFolder) -> None:
    write_run(recipe.tracking.project, folder.name, [{"global_step": 1.0, "reward": 0.5}])
    with pytest.raises(BadInput, match="already has a run 'run'; choose another --name"):
        launch(recipe, folder)
    assert not folder.recipe.exists()


def test_another_recipe_in_the_same_folder_is_refused(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None]
) -> None:
    trainer(CRASHES)
    with pytest.raises(RunFailed):
        launch(recipe, folder)
    with pytest.raises(BadInput, match=r"another recipe \(train\.learning_rate: [\d.]+ -> 0\.5\)"):
        launch(recipe.with_overrides(["train.learning_rate=0.5"]), folder)


def test_the_same_folder_resumes_from_its_checkpoint(
    recipe: Recipe, folder: RunFolder, trainer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(CRASHES)
    with pytest.raises(RunFailed):
        launch(recipe, folder)
    checkpoint = folder.shared / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    trainer(FINISHES)
    seen: list[object] = []
    command: Callable[..., list[str]] = vars(local)["trainer_command"]

    def remember(*arguments: object) -> list[str]:
        seen.append(arguments[-1])
        return command(*arguments)

    monkeypatch.setattr(local, "trainer_command", remember)
    recorder = Recorder()
    launch(recipe, folder, recorder)
    assert seen == [checkpoint]
    assert "training, resumed from checkpoint-2" in [event.text for event in recorder.events]


def test_an_engine_that_cannot_run_says_so(recipe: Recipe, folder: RunFolder) -> None:
    with pytest.raises(BadInput, match="engine: nowhere cannot run yet"):
        launch(recipe.model_copy(update={"engine": "nowhere"}), folder)
    assert not folder.path.exists()


@pytest.mark.parametrize("engine", LAUNCHERS)
def test_engines_that_can_run_are_there(engine: str) -> None:
    module, _, name = LAUNCHERS[engine].partition(":")
    assert callable(getattr(import_module(module), name))
    assert engine_problem(engine) is None


def test_what_preflight_found_before_is_not_looked_for_again(
    recipe: Recipe, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gather_facts", lambda *_: pytest.fail("looked again"))
    with pytest.raises(BadInput, match="serve: too big; make it small"):
        launch(recipe, folder, findings=[preflight.Finding("error", "serve", "too big", "make it small")])
    assert not folder.path.exists()


def test_a_model_in_the_home_folder_is_named_in_full(
    recipe: Recipe, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = recipe.with_overrides(["model.name=~/model"])
    assert local._LocalRun(at_home, folder, print)._model() == str(tmp_path / "model")
