"""The local engine: the three jobs as processes on this machine, a shared folder in the place of the bucket.

Order: the model, all replicas, their first completion, receivers beside them when adapters are pushed, the proxy, the
trainer. Whatever ends before its time ends the run: the error names the job, how it ended, and its last log lines, and
everything else is stopped. If this process itself is killed, the guard stops the jobs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import httpx

from rlkit import machine
from rlkit.engines.base import Confirm, Event, OnEvent, Outcome, agree
from rlkit.engines.checkpoint import claim_folder
from rlkit.engines.guard import POLL_S, Guard
from rlkit.engines.jobs import Job
from rlkit.engines.lock import RunLock
from rlkit.engines.memory import PeakMemory
from rlkit.engines.receivers import Receivers
from rlkit.engines.step_lines import StepLines
from rlkit.engines.waiting import Waiting
from rlkit.errors import RunFailed
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.serving.replica import DIRECT, healthy, vllm_command, vllm_environment, wait_until_ready
from rlkit.sigterm import sigterm_as_exit
from rlkit.training.launch import trainer_command, trainer_environment
from rlkit.training.model_cache import build_command, cached_model
from rlkit.training.toy_task import DATA_NAME, MODEL_NAME, MODEL_NAMES

# vLLM on an idle two-core machine needs about a minute; with a large model on a slow disk it is many.
READY_TIMEOUT_S = 900.0
# Rare enough for a log, and soon enough that nobody takes the run for stuck.
NOT_READY_EVERY_S = 30.0
# The proxy imports little; a minute covers a machine whose cores are all taken by starting replicas.
PROXY_TIMEOUT_S = 60.0
# An engine that died behind a living server shows only in /health. Three in a row, so that one slow answer is not an
# end.
HEALTH_EVERY_S = 2.0
UNHEALTHY_AFTER = 3
# A look reads a kernel file for each of about ten processes, a few milliseconds.
MEMORY_EVERY_S = 2.0
# More lines than the toy model's log will have.
TAIL_WHOLE = 1000
# The trainer's checkpoint, and the proxy's last look at the replicas, take a few seconds.
STOP_GRACE_S = 10.0


def launch_local(recipe: Recipe, folder: RunFolder, on_event: OnEvent, confirm: Confirm = agree) -> Outcome:
    """Run `recipe` in `folder` to its last step; see `rlkit.engines.launch`. Nothing is rented, so nothing is asked."""
    with RunLock(folder) as lock, sigterm_as_exit():
        checkpoint = claim_folder(recipe, folder)
        lock.note("running")
        run = _LocalRun(recipe, folder, on_event)
        try:
            steps = run.execute(checkpoint)
        except BaseException as error:
            # A disk that is full must not hide why the run ended.
            with contextlib.suppress(OSError):
                if not isinstance(error, KeyboardInterrupt | SystemExit):
                    lock.note("failed", error=str(error))
                elif run.is_complete:  # only the jobs' end was interrupted, and the guard sees to that
                    lock.note("finished", **run.figures())
                else:
                    lock.note("stopped")
            raise
        lock.note("finished", **run.figures())
    return Outcome(folder, steps, run.seconds, run.memory.gib)


class _LocalRun:
    def __init__(self, recipe: Recipe, folder: RunFolder, on_event: OnEvent) -> None:
        self._recipe, self._folder, self._on_event = recipe, folder, on_event
        self._on_cpu = machine.cuda_devices(machine.versions(("torch",))["torch"]) == 0
        self._pushed = folder.path / ".pushed"
        self._jobs: list[Job] = []
        self._replicas: list[tuple[Job, str]] = []
        self._last_step = 0
        self._unhealthy: Job | None = None
        self._stopping = threading.Event()
        self._began = time.monotonic()
        self.memory = PeakMemory()
        self.is_complete = False  # the trainer took its last step

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def figures(self) -> dict[str, float | None]:
        """What the run took, for its state."""
        return {"steps": self._last_step, "seconds": round(self.seconds, 1), "peak_memory_gib": self.memory.gib}

    def execute(self, checkpoint: Path | None) -> int:
        with Guard() as guard:
            self._guard = guard
            threading.Thread(target=self._watch_memory, daemon=True).start()
            try:
                model = self._model()
                self._start_replicas(model)
                receivers = self._start_receivers()
                server_url = self._start_proxy(receivers)
                self._train(model, server_url, checkpoint)
                self.is_complete = True
                self._phase("stopping the jobs")
            except BaseException:
                # Not a phase: the one that broke was not completed.
                self._on_event(Event("log", text="stopping the jobs"))
                raise
            finally:
                self._stop_all()
        return self._last_step

    def _model(self) -> str:
        name = self._recipe.model.name
        if name not in MODEL_NAMES:
            return str(Path(name).expanduser()) if name.startswith("~") else name
        seed = self._recipe.train.seed
        out = cached_model(machine.cache_folder(), seed, name)
        if not out.exists():
            duration = "about two minutes" if name == MODEL_NAME else "seconds"
            self._phase(f"building the toy model ({duration}, once)")
            job = self._start("model", build_command(out, seed, name), {})
            told = 0

            def ended() -> bool:
                nonlocal told
                lines = job.tail(TAIL_WHOLE).splitlines()
                for line in lines[told:]:
                    self._on_event(Event("log", text=line))
                told = len(lines)
                return job.exit_code is not None

            self._until(ended, READY_TIMEOUT_S, "building the toy model", expected_end=job)
            if job.exit_code != 0:
                self._fail(job)
            self._jobs.remove(job)
            job.stop(0)
        return str(out)

    def _start_replicas(self, model: str) -> None:
        count = self._recipe.serve.replicas
        self._phase(f"starting {count} vLLM replica{'s' * (count > 1)}")
        environment = vllm_environment(self._recipe, self._on_cpu) | _offline(self._recipe)
        for index, port in enumerate(_free_ports(count)):
            command = vllm_command(self._recipe, model, port, on_cpu=self._on_cpu)
            job = self._start(f"replica-{index}", command, environment)
            self._replicas.append((job, f"http://127.0.0.1:{port}"))
        pool = ThreadPoolExecutor(count)
        began, waiting = time.monotonic(), Waiting(NOT_READY_EVERY_S)

        def ready() -> bool:
            missing = self._not_ready(waits)
            line = waiting.look(time.monotonic() - began, [f"{job.name} ({job.log})" for job in missing])
            if line is not None:
                self._on_event(Event("log", text=line))
            return not missing

        try:
            waits = [pool.submit(wait_until_ready, url, self._stopping) for _, url in self._replicas]
            self._until(ready, READY_TIMEOUT_S, "replicas' first completion")
        finally:
            pool.shutdown(wait=False)

    def _not_ready(self, waits: list[Future[bool]]) -> list[Job]:
        for wait, (job, _) in zip(waits, self._replicas, strict=True):
            error = wait.exception() if wait.done() else None
            if error is not None:
                raise RunFailed(f"{job.name}: {error}\n{job.tail()}") from error
        return [job for wait, (job, _) in zip(waits, self._replicas, strict=True) if not wait.done()]

    def _start_receivers(self) -> Receivers:
        pushes = self._recipe.transport.kind == "push"
        receivers = Receivers(self._pushed, _free_ports(len(self._replicas)) if pushes else [])
        shutil.rmtree(self._pushed, ignore_errors=True)
        for name, command in receivers.commands.items():
            self._start(name, command, receivers.environment)
        for url in receivers.urls:
            with httpx.Client(base_url=url, mounts=DIRECT) as client:
                self._until(functools.partial(healthy, client), PROXY_TIMEOUT_S, "the receivers' /health")
        return receivers

    def _start_proxy(self, receivers: Receivers) -> str:
        self._phase("starting the proxy")
        port_file = self._folder.path / ".proxy-port"
        port_file.unlink(missing_ok=True)
        config = {
            "replicas": [url for _, url in self._replicas],
            "routing": self._recipe.routing.model_dump(),
            "transport": self._recipe.transport.model_dump(),
            "max_loras": self._recipe.serve.max_loras,
            "adapter_root": str(self._folder.shared.resolve()),
            "port_file": str(port_file),
            "stats_file": str(self._folder.proxy),
            **receivers.proxy_config,
        }
        config_file = self._folder.path / ".proxy-config.json"
        config_file.write_text(json.dumps(config, indent=2))
        self._start(
            "proxy", [sys.executable, "-m", "rlkit.serving.proxy", "--config", str(config_file)], receivers.environment
        )
        self._until(
            lambda: port_file.exists() and port_file.read_text().strip() != "", PROXY_TIMEOUT_S, "the proxy's port"
        )
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        with httpx.Client(base_url=url, mounts=DIRECT) as client:
            self._until(lambda: healthy(client), PROXY_TIMEOUT_S, "the proxy's /health")
        return url

    def _train(self, model: str, server_url: str, checkpoint: Path | None) -> None:
        self._phase("training" if checkpoint is None else f"training, resumed from {checkpoint.name}")
        steps = StepLines(self._folder.steps)
        command = trainer_command(self._recipe, self._folder, model, server_url, checkpoint)
        trainer = self._start("trainer", command, trainer_environment(self._on_cpu) | _offline(self._recipe))
        threading.Thread(target=self._watch_health, daemon=True).start()

        def ended() -> bool:
            for line in map(json.loads, steps.new()):
                self._last_step = int(line.pop("global_step"))
                self._on_event(Event("step", step=self._last_step, total=self._recipe.train.steps, metrics=line))
            return trainer.exit_code is not None

        self._until(ended, None, "training", expected_end=trainer)
        ended()
        if trainer.exit_code != 0:
            self._fail(trainer)

    def _watch_health(self) -> None:
        failures = dict.fromkeys([job.name for job, _ in self._replicas], 0)
        with contextlib.ExitStack() as stack:
            clients = {
                job: stack.enter_context(httpx.Client(base_url=url, mounts=DIRECT)) for job, url in self._replicas
            }
            while not self._stopping.wait(HEALTH_EVERY_S):
                for job, client in clients.items():
                    failures[job.name] = 0 if healthy(client) else failures[job.name] + 1
                    if failures[job.name] >= UNHEALTHY_AFTER:
                        self._unhealthy = job
                        return

    def _watch_memory(self) -> None:
        while not self._stopping.wait(MEMORY_EVERY_S):
            self.memory.look([job.pid for job in self._jobs])

    def _until(
        self, done: Callable[[], bool], timeout_s: float | None, what: str, expected_end: Job | None = None
    ) -> None:
        """Poll `done` while watching every job; raise RunFailed when one ends, turns unhealthy, or time is up."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            for job in self._jobs:
                if job is not expected_end and job.exit_code is not None:
                    self._fail(job)
            if self._unhealthy is not None:
                job = self._unhealthy
                raise RunFailed(f"{job.name} no longer answers /health; its last log lines ({job.log}):\n{job.tail()}")
            if deadline is not None and time.monotonic() > deadline:
                logs = ", ".join(str(job.log) for job in self._jobs)
                raise RunFailed(f"gave up waiting for {what} after {timeout_s:.0f} s; logs: {logs}")
            time.sleep(POLL_S)

    def _fail(self, job: Job) -> NoReturn:
        raise RunFailed(f"{job.name} {job.how_it_ended()}; its last log lines ({job.log}):\n{job.tail()}")

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> Job:
        job = Job(name, command, _direct() | environment, self._folder.logs / f"{name}.log", self._guard)
        self._jobs.append(job)
        return job

    def _stop_all(self) -> None:
        self._stopping.set()
        # Last started, first stopped: the proxy takes its last reading of the replicas while they live.
        # All replicas at once after that: each may need its whole grace.
        while len(self._jobs) > len(self._replicas):
            self._jobs.pop().stop(STOP_GRACE_S)
        for job in self._jobs:
            job.ask_to_stop()
        while self._jobs:
            self._jobs.pop().stop(STOP_GRACE_S)
        shutil.rmtree(self._pushed, ignore_errors=True)

    def _phase(self, text: str) -> None:
        self._on_event(Event("phase", text=text))


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different: held open together, then released."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def _direct() -> dict[str, str]:
    """Keep a proxy that the environment names out of the talk between the jobs; TRL's client would ask it."""
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = excepted if excepted.strip() == "*" else ",".join(filter(None, [excepted, "127.0.0.1"]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _offline(recipe: Recipe) -> dict[str, str]:
    """Keep the Hub out of a run that has everything here: without a network, each look-up costs retries."""
    model_here = recipe.model.name in MODEL_NAMES or Path(recipe.model.name).expanduser().is_dir()
    data_here = recipe.data.name == DATA_NAME or Path(recipe.data.name).expanduser().is_file()
    return {"HF_HUB_OFFLINE": "1"} if model_here and data_here and recipe.tracking.space_id is None else {}
