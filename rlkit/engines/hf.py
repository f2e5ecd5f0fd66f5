"""The Hugging Face engine: a recipe as one trainer Job, its replica Jobs, and a folder of a bucket.

Order: the bucket (wheel, model, recipe, lease), all replicas, their first answer, what they say they serve, the
trainer. Whatever ends before its time ends the run: the error names the Job and its last log lines, and every other
Job is cancelled. If this process is killed, the trainer's Job cancels the replicas at its end, and a replica whose
lease nobody renews ends itself.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httpx
from huggingface_hub import HfApi, JobInfo

from rlkit.engines.base import Event, OnEvent, Outcome
from rlkit.engines.checkpoint import claim_folder
from rlkit.engines.hf_delivery import deliver, fetch
from rlkit.engines.hf_hub import FIRST_WAIT_S, Hub
from rlkit.engines.hf_jobs import (
    RECEIVER_PORT,
    SERVER_PORT,
    JobRequest,
    Place,
    replica_request,
    run_labels,
    trainer_request,
)
from rlkit.engines.hf_lease import renewal
from rlkit.engines.hf_money import Price, hourly_prices, job_cost, price_of, stop_reason
from rlkit.engines.hf_predict import predicted_step_s
from rlkit.engines.hf_recovery import Restarts, goes_on_without
from rlkit.engines.hf_trainer import LEASE_MARK, STEP_MARK
from rlkit.engines.hf_watch import JobWatch, Limits, Reading, observe_all, phase_of, server_problem
from rlkit.engines.hf_wheel import pack_wheel, wheel_path
from rlkit.engines.lock import RunLock
from rlkit.engines.stopping import sigterm_as_exit
from rlkit.errors import BadInput, RlkitError, RunFailed
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.serving.replica import HEALTH_TIMEOUT_S

# vLLM loads, compiles and captures for minutes on a GPU; TRL's own wait is shorter than that.
READY_TIMEOUT_S = 900.0
# A look is one request per Job; the Hub's limit of 1,000 API requests in five minutes is far.
POLL_S = 5.0
# Fifteen looks of a minute each: longer than a Hub outage that anyone waits out, short enough in money.
LEASE_S = 900.0
RENEW_EVERY_S = 60.0
# The first /server_info collects the machine's package list, which takes half a minute on a busy machine.
INFO_TIMEOUT_S = 120.0
TAIL_LINES = 15


@dataclass(frozen=True)
class HfOptions:
    """What a launch may do otherwise: another client, other programs in the Jobs, other patience."""

    api: HfApi | None = None
    serve: Sequence[str] = ()  # in the place of vLLM
    train: Sequence[str] = ()  # in the place of the trainer
    poll_s: float = POLL_S
    ready_s: float = READY_TIMEOUT_S
    lease_s: float = LEASE_S
    renew_every_s: float = RENEW_EVERY_S
    first_wait_s: float = FIRST_WAIT_S
    confirm: Callable[[Price], bool] = lambda price: True  # asked before anything is started


def launch_hf(recipe: Recipe, folder: RunFolder, on_event: OnEvent, options: HfOptions | None = None) -> Outcome:
    """Run `recipe` on Hugging Face Jobs to its last step; see `rlkit.engines.launch`."""
    options = options or HfOptions()
    started = time.monotonic()
    with RunLock(folder) as lock, sigterm_as_exit():
        hub = Hub.connect(recipe.hardware.namespace, options.first_wait_s, options.api)
        run = _HfRun(recipe, folder, on_event, hub, options)
        run.agree()
        claim_folder(recipe, folder)
        lock.note("running")
        try:
            steps = run.execute()
        except (KeyboardInterrupt, SystemExit):
            lock.note("stopped", usd=run.usd)
            raise
        except BaseException as error:
            lock.note("failed", error=str(error), usd=run.usd)
            raise
        seconds = time.monotonic() - started
        lock.note("finished", steps=steps, seconds=round(seconds, 1), usd=run.usd)
    return Outcome(folder, steps, seconds)


@dataclass
class _Started:
    request: JobRequest
    info: JobInfo
    watch: JobWatch
    url: str | None = None
    receiver: str | None = None
    over: bool = field(default=False)


class _HfRun:
    def __init__(self, recipe: Recipe, folder: RunFolder, on_event: OnEvent, hub: Hub, options: HfOptions) -> None:
        self._recipe, self._folder, self._on_event, self._hub, self._options = recipe, folder, on_event, hub, options
        self._jobs: dict[str, _Started] = {}
        self._last_step = 0
        self._began = time.monotonic()
        self._renewed = 0.0
        self._lease_taken = self._training = False
        self._past: list[_Started] = []  # Jobs that were replaced
        self._left: list[JobInfo] = []  # Jobs that an earlier kernel started from this folder
        self._prices: dict[str, float] = {}
        self._client = httpx.Client(headers={"Authorization": f"Bearer {hub.token}"}, timeout=HEALTH_TIMEOUT_S)
        hardware = recipe.hardware
        self._limits = Limits(hardware.scheduling_minutes * 60, options.ready_s)

    @property
    def usd(self) -> float:
        """What the Jobs have cost so far, in dollars, as far as they were looked at."""
        return round(sum(job_cost(job.info, self._prices) or 0.0 for job in [*self._past, *self._jobs.values()]), 4)

    def agree(self) -> None:
        """Raise BadInput when the run cannot be on Jobs, is going on from elsewhere, or costs what is not agreed to."""
        if self._recipe.transport.kind == "merged":
            raise BadInput("transport.kind: merged weights travel over NCCL, which no port of a Job carries; use lora")
        self._prices = hourly_prices(self._hub.prices())
        self._price = price_of(self._recipe, self._prices, predicted_step_s(self._recipe))
        self._left = self._alive()
        # A folder that has been started in before may take over the Jobs it left.
        if self._left and not self._folder.recipe.exists():
            roles = ", ".join(f"{(job.labels or {}).get('role')} {job.id}" for job in self._left)
            raise BadInput(
                f"{self._folder.name}: Jobs of this run are going on ({roles}), and not from this folder; "
                f"end them with `rlkit jobs cancel {self._folder.name}`, or choose another --name"
            )
        if not self._left and not self._options.confirm(self._price):
            raise BadInput(f"{self._recipe.name}: not started ({self._price})")

    def execute(self) -> int:
        """Everything from the bucket to the results; returns the last step."""
        place: Place | None = None
        try:
            self._phase(f"preparing the bucket ({self._price})")
            place = self._prepare(self._left)
            self._adopt(self._left, place)
            if "trainer" not in self._jobs:
                self._start_replicas(place)
            self._train(place)
            self._phase("cancelling the replicas")
        except BaseException:
            self._on_event(Event("log", text="cancelling all Jobs of this run"))
            self._cancel_all()
            if place is not None:
                with contextlib.suppress(RlkitError):
                    fetch(self._hub, place, self._folder)  # what there is: the run can be continued, and read
            raise
        finally:
            self._client.close()
        self._cancel_all()
        self._phase("fetching the results")
        fetch(self._hub, place, self._folder)
        return self._last_step

    def _alive(self) -> list[JobInfo]:
        found = self._hub.find(run_labels(self._recipe, self._folder.name))
        return [job for job in found if phase_of(job.status.stage) != "ended"]

    def _adopt(self, alive: list[JobInfo], place: Place) -> None:
        """Take over the Jobs that an earlier kernel started for this run and could not end."""
        for info in alive:
            labels = info.labels or {}
            if labels.get("role") == "trainer":
                request = trainer_request(self._recipe, place, [], [], self._options.train)
            else:
                index = int(labels.get("replica", 0))
                request = replica_request(self._recipe, place, index, self._options.lease_s, self._options.serve)
            if request.name not in self._jobs:
                self._watch(request, info)
                self._on_event(Event("log", text=f"{request.name}: taken over, {info.url}"))

    def _prepare(self, alive: list[JobInfo]) -> Place:
        launches = [(job.labels or {}).get("launch") for job in alive]
        launch = next((launch for launch in launches if launch), secrets.token_hex(4))
        name, wheel = pack_wheel()
        path = wheel_path(name, wheel)
        place = Place(self._hub.namespace, self._recipe.hardware.bucket, path, self._folder.name, launch)
        deliver(self._hub, self._recipe, place, wheel, self._on_event)
        self._renewed = time.monotonic()
        return place

    def _start_replicas(self, place: Place) -> None:
        recipe, options = self._recipe, self._options
        count = recipe.serve.replicas
        self._phase(f"starting {count} replica{'s' * (count > 1)} on {recipe.hardware.replica}")
        for index in range(count):
            request = replica_request(recipe, place, index, options.lease_s, options.serve)
            if request.name not in self._jobs:
                self._start(request)
        self._until(place, lambda: all(job.watch.ready for job in self._jobs.values()))
        self._phase("asking the replicas what they serve")
        for job in self._jobs.values():
            assert job.url is not None
            answer = self._client.get(
                f"{job.url}/server_info", params={"config_format": "json"}, timeout=INFO_TIMEOUT_S
            )
            info = answer.json() if answer.status_code == 200 else {}
            rank = None if recipe.lora is None else recipe.lora.r
            problem = server_problem(info, rank, recipe.adapter_slots_needed)
            if problem:
                raise RunFailed(f"{job.request.name} does not serve what the recipe needs: {problem}")

    def _train(self, place: Place) -> None:
        restarts = Restarts()
        while True:
            trainer = self._jobs.get("trainer") or self._start_trainer(place)
            self._until(place, partial(_has_run, trainer), expected=trainer)
            self._phase("training" if not restarts.count else f"training, resumed ({restarts.count})")
            self._training = True
            reader = threading.Thread(target=self._follow, args=(trainer,), name="trainer-log", daemon=True)
            reader.start()
            self._until(place, partial(_is_over, trainer), expected=trainer)
            reader.join(self._options.poll_s + HEALTH_TIMEOUT_S)
            if trainer.watch.stage == "COMPLETED":
                return
            words = f" ({trainer.info.status.message})" if trainer.info.status.message else ""
            failure = self._failure(trainer, f"trainer ended in stage {trainer.watch.stage}{words}")
            if trainer.watch.stage == "CANCELED" or not restarts.again(self._last_step):
                raise failure
            first = str(failure).splitlines()[0]
            self._on_event(Event("log", text=f"{first}; it got to step {self._last_step} and is started again"))
            self._past.append(self._jobs.pop("trainer"))
            self._training = self._lease_taken = False
            self._restore_replicas(place)

    def _restore_replicas(self, place: Place) -> None:
        """Replicas for a trainer that is started again: the last one cancelled those it had."""
        for name in [name for name, job in self._jobs.items() if self._look(job).stage is not None]:
            if phase_of(self._jobs[name].info.status.stage) == "ended":
                self._past.append(self._jobs.pop(name))
        self._start_replicas(place)

    def _start_trainer(self, place: Place) -> _Started:
        replicas = [job for job in self._jobs.values() if job.watch.serves]
        urls = [cast(str, job.url) for job in replicas]
        receivers = [job.receiver for job in replicas if job.receiver is not None]
        self._phase(f"starting the trainer on {self._recipe.hardware.trainer}")
        return self._start(trainer_request(self._recipe, place, urls, receivers, self._options.train))

    def _follow(self, trainer: _Started) -> None:
        log = self._folder.logs / "trainer.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            for line in self._hub.follow(trainer.info.id):
                if line.startswith(STEP_MARK):
                    with contextlib.suppress(ValueError):
                        self._step(json.loads(line.removeprefix(STEP_MARK)))
                elif line == LEASE_MARK:
                    self._lease_taken = True
                else:
                    file.write(line + "\n")
                    file.flush()

    def _step(self, metrics: dict[str, Any]) -> None:
        step = int(metrics.pop("global_step", 0))
        if step > self._last_step:  # a log that was taken up again says its steps again
            self._last_step = step
            self._on_event(Event("step", step=step, total=self._recipe.train.steps, metrics=metrics))

    def _until(self, place: Place, done: Callable[[], bool], expected: _Started | None = None) -> None:
        """Look at every Job until `done`; raise RunFailed when one fails, or the run's money or time is over."""
        while True:
            readings = {job.request.name: self._look(job) for job in self._jobs.values() if not job.over}
            watches = {name: job.watch for name, job in self._jobs.items()}
            failures, told = observe_all(watches, time.monotonic(), readings)
            for text in told:
                self._on_event(Event("log", text=text))
            for failure in failures:
                job = self._jobs[failure.job]
                job.over = job.watch.phase == "ended"
                if job is expected and job.over:
                    continue
                left = sum(other.watch.serves and not other.over for other in self._jobs.values())
                # A trainer that ends cancels its replicas, which may be seen before its own end.
                if self._training and job.watch.stage == "CANCELED" and job is not expected:
                    continue
                if not job.over or not goes_on_without(failure.job, left, self._training):
                    raise self._failure(job, failure.text)
                self._on_event(Event("log", text=f"{failure.text}; the run goes on with {left} replicas"))
            if done():
                return
            reason = stop_reason(self._recipe, self.usd, (time.monotonic() - self._began) / 3600)
            if reason:
                raise RunFailed(f"{reason}; everything is cancelled")
            self._renew(place)
            time.sleep(self._options.poll_s)

    def _look(self, job: _Started) -> Reading:
        info = self._hub.look(job.info.id)
        if info is None:
            return Reading(None)
        job.info = info
        urls = info.status.expose_urls or []
        if urls and job.url is None:
            job.url = url_of(urls, job.request.expose, SERVER_PORT)
            if RECEIVER_PORT in job.request.expose:
                job.receiver = url_of(urls, job.request.expose, RECEIVER_PORT)
        serves = job.watch.serves and phase_of(info.status.stage) == "running"
        return Reading(info.status.stage, info.status.message, self._healthy(job.url) if serves else None)

    def _healthy(self, url: str | None) -> bool:
        if url is None:
            return False
        with contextlib.suppress(httpx.HTTPError):
            return self._client.get(f"{url}/health").status_code == 200
        return False

    def _renew(self, place: Place) -> None:
        if not self._lease_taken and time.monotonic() - self._renewed >= self._options.renew_every_s:
            self._hub.put(place.bucket_id, [(renewal(), f"{place.folder}/lease")])
            self._renewed = time.monotonic()

    def _start(self, request: JobRequest) -> _Started:
        info = self._hub.start(request)
        self._on_event(Event("log", text=f"{request.name}: {info.url}"))
        return self._watch(request, info)

    def _watch(self, request: JobRequest, info: JobInfo) -> _Started:
        watch = JobWatch(request.name, request.flavor, request.role == "replica", self._limits, time.monotonic())
        job = self._jobs[request.name] = _Started(request, info, watch)
        return job

    def _failure(self, job: _Started, text: str) -> RunFailed:
        lines = self._hub.last_lines(job.info.id, TAIL_LINES)
        return RunFailed(f"{text}; its last log lines ({job.info.url}):\n" + "\n".join(lines))

    def _cancel_all(self) -> None:
        """Every Job of the run, also one whose start was not confirmed; errors are told and do not stop the others."""
        alive = {job.info.id for job in self._jobs.values() if not job.over}
        with contextlib.suppress(Exception):
            alive |= {job.id for job in self._alive()}
        for job_id in sorted(alive):
            try:
                self._hub.cancel(job_id)
            except Exception as error:
                self._on_event(Event("log", text=f"{job_id} could not be cancelled, its lease will end it: {error}"))
        for job in self._jobs.values():
            job.info = self._hub.look(job.info.id) or job.info

    def _phase(self, text: str) -> None:
        self._on_event(Event("phase", text=text))


def _has_run(job: _Started) -> bool:
    return job.watch.phase in ("running", "ended")


def _is_over(job: _Started) -> bool:
    return job.over


def url_of(urls: Sequence[str], ports: Sequence[int], port: int) -> str:
    """The address of an exposed port: the one that names it (`https://<id>--8000.hf.jobs`), else by its place."""
    named = [url for url in urls if f"--{port}." in url]
    return (named[0] if named else urls[list(ports).index(port)]).rstrip("/")
