"""TRL's trainer: fetch the microbatches of a step, compute, step the optimizer, sync every so often, log.

* All microbatches of a step are fetched at its beginning, and accelerate's dispatcher holds one more.
* A row takes row_s + row_token_s * (tokens of the longest rank) with gradient checkpointing, less by `recompute_share`
  without. A step is the sum of its microbatches and their waits, the optimizer, and the sync on steps that sync.
* On shared cores a step takes longer while engines are at work, and they while the trainer is.
* A sample older than `max_staleness` versions when it is fetched is dropped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from rlkit.simulation.batches import FixedCount, Planner, Row, TokenBudget
from rlkit.simulation.cores import Work
from rlkit.simulation.events import EventLoop
from rlkit.simulation.setup import Setup
from rlkit.simulation.sync import Publisher, Sync
from rlkit.simulation.window import Window
from rlkit.simulation.worker import Worker

LogStep = Callable[[int, dict[str, float]], None]


class Trainer:
    """Trains on a worker's samples until the run's last step; `log` gets each step's number and metrics."""

    def __init__(
        self, loop: EventLoop, setup: Setup, worker: Worker, window: Window, dice: random.Random, log: LogStep
    ) -> None:
        self.step = 0
        self.trained_tokens = 0
        self.trained_samples = 0
        self.dropped = 0
        self.syncs: list[Sync] = []
        self._loop = loop
        self._setup = setup
        self._worker = worker
        self._window = window
        self._log = log
        self._publisher = Publisher(setup.sync, setup.servers, setup.max_staleness, dice)
        self._planner = _planner(setup)
        self._last_step = min(setup.steps, setup.stop_after or setup.steps)
        self._microbatches: list[list[Row]] = []
        self._fetched = 0  # samples since the last microbatch
        self._waiting_since: float | None = None
        self._wait_s = 0.0
        self._ended_at: float | None = None
        self._fwd_bwd_s = 0.0
        self._fwd_s = 0.0
        self._work: Work | None = None
        self._turn = 0
        self._groups: set[int] = set()

    def start(self) -> None:
        """The cold sync; the worker begins when the servers have the first version."""
        self._sync(self._begin)

    def progress(self) -> float:
        """The part of the run's steps that is done, or of those over which the lengths change."""
        return self.step / (self._setup.lengths_over or self._setup.steps)

    def _begin(self) -> None:
        self._worker.start()
        self._worker.fleet.when_speed_changes(self._speed_changed)
        self._fetch()

    def _fetch(self) -> None:
        """Take samples until the step's microbatches are there, and one more."""
        window, buffer, loop = self._window, self._worker.buffer, self._loop
        if self._waiting_since is not None:
            self._wait_s += loop.now - self._waiting_since
            self._waiting_since = None
        while True:
            if not buffer:
                self._waiting_since = loop.now
                self._worker.when_filled(self._fetch)
                return
            sample = buffer.popleft()
            staleness = self._worker.version - sample.version
            if staleness > self._setup.max_staleness:
                window.add("sample/dropped_stale_total", 1.0)
                self.dropped += 1
                continue
            window.add("sample/rollout_queue_size", float(len(buffer)))
            window.add("sample/time_in_queue_s", loop.now - sample.queued_at)
            window.add("sample/staleness_mean", float(staleness))
            window.add("sample/staleness_max", float(staleness))
            self._fetched += 1
            if not self._planner.takes(sample):
                window.add("batch/dropped_oversize_total", 1.0)
                continue
            microbatch = self._planner.add(sample)
            if microbatch is not None:
                self._close(microbatch)
                return

    def _close(self, microbatch: list[Row]) -> None:
        trainer = self._setup.trainer
        self._microbatches.append(microbatch)
        fetch_s = trainer.fetch_s * self._fetched
        packing_s = trainer.microbatch_s + trainer.sample_s * sum(len(row.samples) for row in microbatch)
        self._fetched = 0
        self._wait_s += fetch_s
        enough = len(self._microbatches) > trainer.gradient_accumulation_steps
        self._loop.after(packing_s + fetch_s, self._compute if enough else self._fetch)

    def _compute(self) -> None:
        trainer = self._setup.trainer
        seconds = [
            trainer.row_s + trainer.row_token_s * max(row.tokens for row in rows) for rows in self._of_this_step()
        ]
        checkpointed = math.fsum(seconds)
        self._fwd_bwd_s = checkpointed * (1.0 if trainer.gradient_checkpointing else 1 - trainer.recompute_share)
        self._fwd_s = checkpointed * trainer.forward_share
        self._worker.fleet.trainer_computes(True)
        self._work = Work(self._loop.now, self._fwd_bwd_s + trainer.optimizer_s, self._worker.fleet.speed)
        self._plan_work()

    def _speed_changed(self) -> None:
        if self._work is not None:
            self._work.change(self._loop.now, self._worker.fleet.speed)
            self._plan_work()

    def _plan_work(self) -> None:
        assert self._work is not None
        self._turn += 1
        self._loop.after(self._work.seconds_left, self._computed, self._turn)

    def _computed(self, turn: int) -> None:
        if turn != self._turn or self._work is None:
            return  # the speed has changed in between
        if self._work.slowed:
            took = self._loop.now - self._work.began_at - self._setup.trainer.optimizer_s
            self._fwd_s *= took / self._fwd_bwd_s
            self._fwd_bwd_s = took
        self._work = None
        self._window.add("perf/fwd_s", self._fwd_s)
        self._worker.fleet.trainer_computes(False)
        self._stepped()

    def _stepped(self) -> None:
        self.step += 1
        if self.step % self._setup.sync.interval == 0:
            self._sync(self._end)
        else:
            self._end()

    def _sync(self, then: Callable[[], None]) -> None:
        sync = self._publisher.publish(len(self.syncs) + 1)
        self.syncs.append(sync)
        for name, seconds in (
            ("s", sync.seconds),
            ("pause_s", sync.pause_s),
            ("barrier_s", 0.0),
            ("transfer_s", sync.transfer_s),
        ):
            self._window.add(f"perf/weight_sync_{name}", seconds)
        # The servers have stopped when the pause is answered: on average half of it earlier.
        self._loop.after(sync.pause_s / 2, self._worker.fleet.pause, self._setup.sync.clear_cache)
        self._loop.after(sync.seconds, self._synced, then)

    def _synced(self, then: Callable[[], None]) -> None:
        self._worker.fleet.resume()
        self._worker.version += 1
        self._worker.fleet.forget_version(self._worker.version - self._setup.max_staleness - 1)
        then()

    def _of_this_step(self) -> list[list[Row]]:
        return self._microbatches[: self._setup.trainer.gradient_accumulation_steps]

    def _end(self) -> None:
        microbatches = self._of_this_step()
        self._microbatches = self._microbatches[len(microbatches) :]
        self._measure(microbatches)
        self._ended_at = self._loop.now
        self._log(self.step, self._window.reduce())
        if self.step >= self._last_step:
            self._loop.stop()
        else:
            self._fetch()

    def _measure(self, microbatches: list[list[Row]]) -> None:
        """What TRL logs at the end of a step of what was in it."""
        window, trainer, fwd_bwd_s = self._window, self._setup.trainer, self._fwd_bwd_s
        samples = [sample for rows in microbatches for row in rows for sample in row.samples]
        whole = sum(sample.tokens for sample in samples)
        forwarded = sum(row.tokens for rows in microbatches for row in rows)
        trained = sum(sample.completion_tokens for sample in samples)
        self.trained_samples += len(samples)
        self.trained_tokens += trained
        window.add("perf/fwd_bwd_s", fwd_bwd_s)
        window.add("perf/optimizer_s", trainer.optimizer_s)
        window.add("perf/rollout_wait_s", self._wait_s)
        window.add("batch/microbatches_per_step", float(len(microbatches)))
        window.add("batch/samples_per_step", float(len(samples)))
        window.add("batch/forwarded_tokens_per_step", float(forwarded))
        window.add("batch/trained_tokens_per_step", float(trained))
        groups = {sample.group for sample in samples}
        window.add("batch/groups_per_step", float(len(groups - self._groups)))
        # A group lies in the queue as a whole: only the last step's can go on in this one.
        self._groups = groups
        window.add_ratio("batch/masked_token_frac", whole - trained, whole)
        window.add_ratio("perf/forwarded_tok_s_fwd_bwd", forwarded, fwd_bwd_s)
        weighted = 0.0
        for rows in microbatches:
            weighted += self._measure_rows(rows)
        step_s = None if self._ended_at is None else self._loop.now - self._ended_at
        if step_s is not None:
            window.add("perf/step_s", step_s)
            window.add_ratio("perf/forwarded_tok_s_wall_clock", forwarded, step_s)
            window.add_ratio("perf/trained_tok_s_wall_clock", trained, step_s)
        if trainer.flops_per_token is not None and trainer.peak_flops is not None:
            flops = 100 * trainer.flops_per_token(int(weighted / forwarded)) * forwarded
            peak = trainer.processes * trainer.peak_flops
            window.add("perf/mfu_fwd_bwd", flops / (fwd_bwd_s * peak))
            if step_s is not None:
                window.add("perf/mfu_wall_clock", flops / (step_s * peak))
        self._wait_s = 0.0

    def _measure_rows(self, rows: list[Row]) -> float:
        """One microbatch's metrics; its tokens times its mean length, for the MFU."""
        window = self._window
        samples = [sample for row in rows for sample in row.samples]
        lengths, tokens = [sample.tokens for sample in samples], [row.tokens for row in rows]
        loads = [row.load for row in rows]
        whole, forwarded = sum(lengths), sum(tokens)
        window.add("sample/forwarded_tokens_mean", whole / len(samples))
        window.add("sample/forwarded_tokens_max", float(max(lengths)))
        window.add("sample/trained_tokens_mean", sum(sample.completion_tokens for sample in samples) / len(samples))
        window.add("batch/samples_per_row", len(samples) / len(rows))
        window.add("batch/row_tokens_mean", forwarded / len(rows))
        window.add("batch/row_tokens_max", float(max(tokens)))
        window.add("batch/row_imbalance", max(loads) * len(rows) / sum(loads))
        window.add_ratio("batch/pad_frac", max(tokens) * len(rows) - forwarded, max(tokens) * len(rows))
        if self._setup.trainer.token_budget:
            window.add_ratio("batch/row_fill_frac", forwarded, self._setup.trainer.token_budget * len(rows))
        if self._setup.trainer.sharing is not None:
            window.add_ratio("batch/packing_ratio", whole, forwarded)
        return forwarded * forwarded / len(samples)


def _planner(setup: Setup) -> Planner:
    trainer = setup.trainer
    if trainer.token_budget:
        return TokenBudget(trainer.processes, trainer.token_budget, trainer.sharing)
    return FixedCount(trainer.processes, trainer.per_device_train_batch_size, trainer.sharing)
