"""The Hugging Face engine: a recipe as one trainer Job, its replica Jobs, and a folder of a bucket.

Order: the bucket (wheel, model, recipe, lease), all replicas, their first answer, what they say they serve, the
trainer. A replica that served and is lost is replaced; a trainer that got further is started again from its checkpoint.
Whatever else ends before its time ends the run: the error names the Job and its last log lines, and every other Job is
cancelled. If this process is killed, the trainer's Job cancels the replicas at its end, and a replica whose lease
nobody renews ends itself.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from huggingface_hub import HfApi, JobInfo

from rlkit.engines import hf_addresses
from rlkit.engines.base import Confirm, Event, OnEvent, Outcome, agree
from rlkit.engines.checkpoint import claim_folder
from rlkit.engines.hf_delivery import deliver, fetch, refuse_a_taken_name
from rlkit.engines.hf_fleet import Fleet, Started
from rlkit.engines.hf_hub import FIRST_WAIT_S, Hub
from rlkit.engines.hf_jobs import JobRequest, Place, network_group_of, replica_request, run_labels, trainer_request
from rlkit.engines.hf_lease import renewal
from rlkit.engines.hf_measured import as_measured
from rlkit.engines.hf_money import hourly_prices, price_of, spent_before, stop_reason
from rlkit.engines.hf_predict import predicted_step_s
from rlkit.engines.hf_recovery import Replacements, Restarts, goes_on_without, is_way_broken
from rlkit.engines.hf_trainer import LEASE_MARK, STEP_MARK
from rlkit.engines.hf_watch import Failure, Limits, phase_of, server_problem
from rlkit.engines.hf_wheel import pack_wheel, wheel_path
from rlkit.engines.lock import RunLock
from rlkit.engines.state import read_state
from rlkit.engines.step_lines import StepCopy
from rlkit.engines.stopping import first_stop_held_back
from rlkit.errors import BadInput, RlkitError, RunFailed
from rlkit.price import usd_paid
from rlkit.recipe import Recipe
from rlkit.run_folder import RunFolder
from rlkit.serving.replica import HEALTH_TIMEOUT_S
from rlkit.sigterm import sigterm_as_exit

# vLLM loads, compiles and captures for minutes on a GPU; TRL's own wait is shorter than that.
READY_TIMEOUT_S = 900.0
# A look is one request per Job; the Hub's limit of 1,000 API requests in five minutes is far.
POLL_S = 5.0
# Fifteen looks of a minute each: longer than a Hub outage that anyone waits out, short enough in money.
LEASE_S = 900.0
RENEW_EVERY_S = 60.0


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


def launch_hf(
    recipe: Recipe, folder: RunFolder, on_event: OnEvent, confirm: Confirm = agree, options: HfOptions | None = None
) -> Outcome:
    """Run `recipe` on Hugging Face Jobs to its last step; see `rlkit.engines.launch`."""
    options = options or HfOptions()
    started = time.monotonic()
    with RunLock(folder) as lock, sigterm_as_exit():
        hub = Hub.connect(recipe.hardware.namespace, options.first_wait_s, options.api)
        with _HfRun(recipe, folder, on_event, hub, options) as run:
            run.agree(confirm)
            claim_folder(recipe, folder)
            lock.note("running", usd=run.noted_usd, launch=run.launch)
            with _noting_an_early_end(lock, run):
                steps = run.execute()
            # The training is over: a run that is stopped from here on is complete, and is noted as such.
            with first_stop_held_back():
                with _noting_an_early_end(lock, run):
                    run.collect()
                seconds = time.monotonic() - started
                lock.note("finished", steps=steps, seconds=round(seconds, 1), usd=run.usd)
    return Outcome(folder, steps, seconds)


@contextlib.contextmanager
def _noting_an_early_end(lock: RunLock, run: _HfRun) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        lock.note("stopped", usd=run.usd)
        raise
    except BaseException as error:
        lock.note("failed", error=str(error), usd=run.usd)
        raise


class _HfRun:
    def __init__(self, recipe: Recipe, folder: RunFolder, on_event: OnEvent, hub: Hub, options: HfOptions) -> None:
        self._recipe, self._folder, self._on_event, self._hub, self._options = recipe, folder, on_event, hub, options
        self._last_step = 0
        self._began = time.monotonic()
        self._renewed = 0.0
        self._lease_taken = self._training = False
        self._restarts, self._replacements = Restarts(), Replacements()
        self._told: set[str] = set()
        self._steps = StepCopy(folder.steps)
        self._prices = hourly_prices(hub.prices())
        jobs, state = hub.find(run_labels(recipe, folder.name)), read_state(folder)
        self._left = _alive(jobs)  # that an earlier kernel started from this folder
        launches = [(job.labels or {}).get("launch") for job in self._left]
        self.launch = next((launch for launch in launches if launch), secrets.token_hex(4))
        # The budget is the run's, however often it is started.
        self._spent_before = spent_before(state, jobs, self._prices)
        # What a next kernel adds this launch's Jobs to, should this one be killed.
        self.noted_usd = (usd_paid(state) or 0.0) if self._left else self._spent_before
        limits = Limits(recipe.hardware.scheduling_minutes * 60, options.ready_s)
        self._fleet = Fleet(hub, limits, self._prices, on_event)
        self._jobs = self._fleet.jobs

    def __enter__(self) -> _HfRun:
        self._fleet.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._fleet.__exit__(*error)

    @property
    def usd(self) -> float:
        """What the Jobs have cost so far, in dollars."""
        return self._spent_before + self._fleet.usd

    def agree(self, confirm: Confirm) -> None:
        """Raise BadInput when the run cannot be on Jobs, is going on from elsewhere, or costs what is not agreed to."""
        if self._recipe.transport.kind == "merged":
            raise BadInput("transport.kind: merged weights travel over NCCL, which no port of a Job carries; use lora")
        self._price = price_of(self._recipe, self._prices, predicted_step_s(self._recipe))
        # A folder that has been started in before may take over the Jobs it left, and go on with what they kept.
        if not self._folder.recipe.exists():
            refuse_a_taken_name(self._hub, self._recipe.hardware.bucket, self._folder.name, self._left)
        if not self._left and not confirm(self._price):
            raise BadInput(f"{self._recipe.name}: not started ({self._price})")

    def execute(self) -> int:
        """Everything from the bucket to the end of the training; returns the last step."""
        place: Place | None = None
        try:
            self._phase(f"preparing the bucket ({self._price})")
            place = self._place = self._prepare(self._left)
            self._adopt(self._left)
            if "trainer" not in self._jobs:
                self._start_replicas()
            else:
                self._start_missing()
            self._train()
        except BaseException:
            self._on_event(Event("log", text="cancelling all Jobs of this run"))
            self._cancel_all()
            if place is not None:
                with contextlib.suppress(RlkitError):
                    self._fetch()  # what there is: the run can be continued, and read
            raise
        return self._last_step

    def collect(self) -> None:
        """Cancel what is left of a run whose training is over, and bring its results home."""
        self._phase("cancelling the replicas")
        self._cancel_all()
        self._phase("fetching the results")
        self._fetch()

    def _fetch(self) -> None:
        self._steps.close()
        fetch(self._hub, self._place, self._folder)

    def _prepare(self, alive: list[JobInfo]) -> Place:
        recipe = self._recipe
        group = network_group_of(recipe, self.launch)
        if alive:  # as they were started
            group = next((network.group for job in alive if (network := getattr(job, "network", None))), None)
        name, wheel = pack_wheel()
        path = wheel_path(name, wheel)
        place = Place(self._hub.namespace, recipe.hardware.bucket, path, self._folder.name, self.launch, group)
        measured, words = as_measured(recipe, self._hub.namespace)
        if words:
            self._on_event(Event("log", text=words))
        deliver(self._hub, measured, place, wheel, self._on_event)
        self._renewed = time.monotonic()
        return place

    def _adopt(self, alive: list[JobInfo]) -> None:
        """Take over the Jobs that an earlier kernel started for this run and could not end."""
        for info in alive:
            labels = info.labels or {}
            if labels.get("role") == "trainer":
                request = trainer_request(self._recipe, self._place, [], self._options.train)
            else:
                request = self._replica_request(int(labels.get("replica", 0)))
            if request.name not in self._jobs:
                self._fleet.hold(request, info)
                self._on_event(Event("log", text=f"{request.name}: taken over, {info.url}"))

    def _replica_request(self, index: int) -> JobRequest:
        return replica_request(self._recipe, self._place, index, self._options.lease_s, self._options.serve)

    def _start_replicas(self) -> None:
        recipe = self._recipe
        count = recipe.serve.replicas
        self._phase(f"starting {count} replica{'s' * (count > 1)} on {recipe.hardware.replica}")
        self._start_missing()
        self._until(lambda: all(job.introduced for job in self._fleet.replicas))

    def _start_missing(self) -> None:
        for index in range(self._recipe.serve.replicas):
            request = self._replica_request(index)
            if request.name not in self._jobs:
                self._fleet.start(request)

    def _train(self) -> None:
        while True:
            trainer = self._jobs.get("trainer") or self._start_trainer()
            self._until(partial(_has_run, trainer), expected=trainer)
            self._phase("training" if not self._restarts.count else f"training, resumed ({self._restarts.count})")
            self._training = True
            reader = threading.Thread(target=self._follow, args=(trainer,), name="trainer-log", daemon=True)
            reader.start()
            self._until(partial(_is_over, trainer), expected=trainer)
            reader.join(self._options.poll_s + HEALTH_TIMEOUT_S)
            if trainer.watch.stage == "COMPLETED":
                return
            words = f" ({trainer.info.status.message})" if trainer.info.status.message else ""
            failure = self._fleet.failure(trainer, f"trainer ended in stage {trainer.watch.stage}{words}")
            if trainer.watch.stage == "CANCELED" or not self._restarts.again(self._last_step):
                raise failure
            first = str(failure).splitlines()[0]
            self._on_event(Event("log", text=f"{first}; it got to step {self._last_step} and is started again"))
            self._training = self._lease_taken = False
            self._fleet.drop(trainer)
            # The trainer's Job cancels its replicas at its end, unless its machine was lost.
            self._fleet.drop_ended()
            self._start_replicas()

    def _start_trainer(self) -> Started:
        self._write_addresses()
        self._phase(f"starting the trainer on {self._recipe.hardware.trainer}")
        addresses = [job.address for job in self._fleet.replicas]
        return self._fleet.start(trainer_request(self._recipe, self._place, addresses, self._options.train))

    def _write_addresses(self) -> None:
        """Where the trainer's Job looks for replicas that were replaced after it was asked for."""
        if self._place.group is not None:
            return  # an alias names the new one, too
        known = {job.request.replica: job.address for job in self._fleet.replicas if job.introduced}
        found = {number: address for number, address in known.items() if number is not None}
        name = f"{self._place.folder}/{hf_addresses.FILE}"
        self._hub.put(self._place.bucket_id, [(hf_addresses.to_json(found), name)])

    def _follow(self, trainer: Started) -> None:
        log = self._folder.logs / "trainer.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            for line in self._hub.follow(trainer.info.id):
                if line.startswith(STEP_MARK):
                    self._step(line.removeprefix(STEP_MARK))
                elif line == LEASE_MARK:
                    self._lease_taken = True
                else:
                    file.write(line + "\n")
                    file.flush()

    def _step(self, line: str) -> None:
        try:
            metrics: dict[str, Any] = json.loads(line)
        except ValueError:
            return
        step = int(metrics.pop("global_step", 0))
        if step > self._last_step:  # a log that was taken up again says its steps again
            self._last_step = step
            self._steps.add(line)  # whoever watches the run's folder sees it go on
            self._on_event(Event("step", step=step, total=self._recipe.train.steps, metrics=metrics))

    def _until(self, done: Callable[[], bool], expected: Started | None = None) -> None:
        """Look at every Job until `done`; raise RunFailed when one fails, or the run's money or time is over."""
        while True:
            failures = self._fleet.look()
            silent = [failure.job for failure in failures if self._is_silent(failure)]
            if silent and self._training and is_way_broken(self._fleet.answering(), self._fleet.alive()):
                self._tell_once(
                    "no replica answers here, and their Jobs run: it may be the way to them; the trainer goes on"
                )
                failures = [failure for failure in failures if failure.job not in silent]
            for failure in failures:
                self._lost(failure, expected)
            for job in self._fleet.replicas:
                if job.watch.ready and not job.introduced and not job.over:
                    self._introduce(job)
            if done():
                return
            reason = stop_reason(self._recipe, self.usd, (time.monotonic() - self._began) / 3600)
            if reason:
                raise RunFailed(f"{reason}; everything is cancelled")
            self._renew()
            time.sleep(self._options.poll_s)

    def _is_silent(self, failure: Failure) -> bool:
        job = self._jobs[failure.job]
        return job.watch.ready and not job.over

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._on_event(Event("log", text=text))

    def _lost(self, failure: Failure, expected: Started | None) -> None:
        """A Job ended, or does not do what it is there for: replace it, go on without it, or raise RunFailed."""
        job = self._jobs[failure.job]
        if job is expected and job.over:
            return
        # A trainer that ends cancels its replicas, which may be seen before its own end.
        if self._training and job.watch.stage == "CANCELED" and job is not expected:
            return
        number = job.request.replica
        if number is not None and self._replacements.again(failure.job, job.watch.ready, self._last_step):
            self._on_event(Event("log", text=f"{failure.text}; it is replaced"))
            self._fleet.drop(job)
            self._fleet.start(self._replica_request(number))
            return
        left = self._fleet.serving(without=job)
        if number is None or not goes_on_without(left, self._last_step):
            raise self._fleet.failure(job, failure.text)
        self._fleet.drop(job)
        self._on_event(Event("log", text=f"{failure.text}; the run goes on with {left} of its replicas"))

    def _introduce(self, job: Started) -> None:
        """A replica answers: ask it what it serves, and tell the trainer's Job where it is."""
        info = self._fleet.server_info(job)
        if info is None:
            return  # it is asked again at the next look, which also sees whether it is still well
        rank = None if self._recipe.lora is None else self._recipe.lora.r
        problem = server_problem(info, rank, self._recipe.adapter_slots_needed)
        if problem:
            raise RunFailed(f"{job.request.name} does not serve what the recipe needs: {problem}")
        job.introduced = True
        self._on_event(Event("log", text=f"{job.request.name} serves what the recipe needs"))
        if "trainer" in self._jobs:
            self._write_addresses()

    def _renew(self) -> None:
        if not self._lease_taken and time.monotonic() - self._renewed >= self._options.renew_every_s:
            self._hub.put(self._place.bucket_id, [(renewal(), f"{self._place.folder}/lease")])
            self._renewed = time.monotonic()

    def _cancel_all(self) -> None:
        """Every Job of the run, also one whose start was not confirmed."""
        unknown: list[str] = []
        with contextlib.suppress(Exception):
            unknown = [job.id for job in _alive(self._hub.find(run_labels(self._recipe, self._folder.name)))]
        self._fleet.cancel_all(unknown)

    def _phase(self, text: str) -> None:
        self._on_event(Event("phase", text=text))


def _alive(jobs: Iterable[JobInfo]) -> list[JobInfo]:
    return [job for job in jobs if phase_of(job.status.stage) != "ended"]


def _has_run(job: Started) -> bool:
    return job.watch.phase in ("running", "ended")


def _is_over(job: Started) -> bool:
    return job.over
