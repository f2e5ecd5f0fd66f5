from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from small_setup import RATES, ROOMY, TIGHT, engines, small_setup

from rlkit.admission.gauges import GAUGES, percentiles
from rlkit.admission.law import Decision, FixedCap, Reading, decide
from rlkit.simulation.replica import Capacity, slower
from rlkit.simulation.setup import Engine, Pauses
from rlkit.simulation.simulate import Simulation, simulate

ROOMY_ENGINE = engines(ROOMY)[0]
DATA = Path(__file__).parents[1] / "data"


def fingerprint(run: Simulation) -> str:
    text = json.dumps([[step.number, step.ended_at, step.metrics] for step in run.steps], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def steady(run: Simulation, metric: str) -> list[float]:
    return [step.metrics[metric] for step in run.steps[4:] if metric in step.metrics]


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    assert fingerprint(simulate(small_setup(), 1)) == fingerprint(simulate(small_setup(), 1))
    assert fingerprint(simulate(small_setup(), 1)) != fingerprint(simulate(small_setup(), 2))


def test_a_run_is_whole() -> None:
    run = simulate(small_setup())
    assert [step.number for step in run.steps] == list(range(1, 13))
    assert run.trained_samples == 12 * 16
    assert run.requests == run.finished + 32 - _uncollected(run)
    assert run.requests == run.routing.routed
    assert len(run.syncs) == 13  # the cold one, and one a step
    assert run.preemptions == run.dropped == 0


def _uncollected(run: Simulation) -> int:
    """At most a pool of rollouts has ended and not been collected when the run stops."""
    left = 32 - (run.requests - run.finished)
    assert 0 <= left <= 32
    return left


def test_phases_add_up_to_the_step() -> None:
    for step in simulate(small_setup()).steps[1:]:
        metrics = step.metrics
        phases = ("perf/fwd_bwd_s", "perf/optimizer_s", "perf/rollout_wait_s", "perf/weight_sync_s")
        assert sum(metrics[name] for name in phases) == pytest.approx(metrics["perf/step_s"], abs=1e-6)


def test_a_slow_trainer_fills_the_queue_and_a_fast_one_waits() -> None:
    slow = simulate(small_setup())
    fast = simulate(small_setup(trainer=replace(small_setup().trainer, row_s=0.001)))
    assert min(steady(slow, "sample/rollout_queue_size")) > 15
    assert max(steady(slow, "perf/rollout_wait_s")) < 0.01
    assert max(steady(slow, "rollout/backpressure_s")) > 0
    assert min(steady(fast, "perf/rollout_wait_s")) > 0.1
    assert not steady(fast, "rollout/backpressure_s")


def test_metric_names_are_those_of_real_runs() -> None:
    real = set(json.loads((DATA / "trl-metric-names.json").read_text())["names"])
    budget = replace(small_setup().trainer, token_budget=1024, gradient_accumulation_steps=2)
    run = simulate(small_setup(trainer=budget, engines=engines(TIGHT, TIGHT), max_inflight=64))
    simulated = {name for step in run.steps for name in step.metrics}
    # Logged on an event that these runs did not have, or with a token budget and no prefix shared between samples.
    sparse = {"rollout/score_block_s", "sample/dropped_stale_total", "batch/row_fill_frac"}
    added = {*GAUGES, *percentiles([(1.0, 2.0)]), "rollout/gate_wait_s", "rollout/duration_with_gate_s",
             "rollout/completed_total"}  # fmt: skip
    assert simulated - real - added <= sparse
    assert added <= simulated
    assert {"reward", "ratio", "loss"}.isdisjoint(simulated)


def test_small_caches_preempt_and_a_law_prevents_it() -> None:
    tight = small_setup(engines=engines(TIGHT, TIGHT), steps=40)
    fixed, capped = simulate(tight), simulate(replace(tight, cap="published"))
    assert fixed.preemptions > 50
    assert capped.preemptions < fixed.preemptions / 5
    assert min(decision.cap for decision in capped.decisions) < 32
    assert steady(capped, "rollout/inflight_cap")
    assert max(steady(capped, "rollout/inflight")) == 32  # TRL's own gauge goes on reading the slots
    assert set(steady(fixed, "rollout/inflight_cap")) == {32}
    assert sum(steady(fixed, "rollout/completed_total")) > 36 * 16


def test_a_slow_replica_gives_its_requests_fewer_tokens_and_has_as_many() -> None:
    slow = replace(ROOMY_ENGINE, server=1, rates=slower(RATES, 2.0))
    even = simulate(small_setup(engines=engines(ROOMY, ROOMY), steps=40))
    uneven = simulate(small_setup(engines=(ROOMY_ENGINE, slow), steps=40))

    assert mean(steady(uneven, "rollout/replica_speed_spread")) == pytest.approx(0.5, abs=0.1)
    assert mean(steady(even, "rollout/replica_speed_spread")) < 0.15
    assert mean(steady(uneven, "rollout/replica_load_spread")) < 0.5


def test_a_law_sees_what_is_there() -> None:
    seen: list[Reading] = []

    class Watching(FixedCap):
        poll_s = 0.5

        def observe(self, reading: Reading) -> Decision:
            seen.append(reading)
            return decide(reading, 8, "fixed", "")

    run = simulate(small_setup(law=lambda: Watching(8)))
    assert seen[0].time < seen[1].time
    assert {name: state.preemptions for name, state in seen[0].readable.items()} == {"0": None, "1": None}
    assert all(reading.in_flight <= 8 for reading in seen)
    assert all(reading.in_flight + reading.held <= 32 for reading in seen)
    assert sum(reading.completed for reading in seen) <= run.finished
    assert all(state.capacity_tokens == 100_000 for state in seen[3].readable.values())


def test_a_clearing_sync_preempts_what_runs_and_a_keeping_one_does_not() -> None:
    fast = small_setup(trainer=replace(small_setup().trainer, row_s=0.001))
    clearing = simulate(replace(fast, sync=replace(fast.sync, clear_cache=True)))
    assert simulate(fast).preemptions == 0
    # One for each running request and sync.
    assert clearing.preemptions > 12 * 10


def test_pauses_cost_their_time() -> None:
    fast = small_setup(trainer=replace(small_setup().trainer, row_s=0.001), steps=30)
    paused = replace(fast, pauses=Pauses(every_s=3.0, seconds=1.0))
    assert simulate(paused).seconds == pytest.approx(simulate(fast).seconds * 1.5, rel=0.15)


def test_unequal_caches_and_engines_of_one_server() -> None:
    unequal = simulate(small_setup(engines=engines(ROOMY, TIGHT), max_inflight=64))
    assert unequal.per_engine[0]["preemptions"] == 0 < unequal.per_engine[1]["preemptions"]
    together = simulate(small_setup(engines=tuple(Engine(0, ROOMY, RATES) for _ in range(2))))
    assert together.routing.replicas == 1
    finished = [engine["finished"] for engine in together.per_engine]
    assert finished[0] == pytest.approx(finished[1], rel=0.1)


def test_stale_samples_are_dropped_and_never_trained_on() -> None:
    # A queue of eight steps, and one version of staleness allowed.
    late = simulate(small_setup(queue_maxsize=128, max_staleness=1, max_inflight=128, steps=20))
    assert late.dropped > 0
    assert max(steady(late, "sample/staleness_max")) <= 1
    assert sum(step.metrics.get("sample/dropped_stale_total", 0) for step in late.steps) == late.dropped


def test_a_run_may_be_stopped_early_and_its_lengths_do_not_know() -> None:
    whole, part = simulate(small_setup()), simulate(small_setup(stop_after=5))
    assert len(part.steps) == 5
    assert [step.metrics for step in part.steps] == [step.metrics for step in whole.steps[:5]]


def test_nothing_logged_is_nan() -> None:
    rows: list[Mapping[str, float]] = [step.metrics for step in simulate(small_setup()).steps]
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_a_cache_that_holds_one_sequence_still_makes_progress() -> None:
    one = simulate(small_setup(engines=engines(Capacity(kv_tokens=600)), steps=3))
    assert len(one.steps) == 3


def test_the_result_is_the_same_on_every_machine() -> None:
    # The digest of every number of a run that preempts, clears caches and waits for a lagging mount. Python 3.11, 3.12
    # and 3.13 give it alike; it changes with the model, and only with it.
    sync = replace(small_setup().sync, kind="bucket", lag_s=0.5, load_s=0.1, retry_s=0.2, clear_cache=True)
    run = simulate(small_setup(engines=engines(TIGHT, ROOMY), sync=sync), 3)
    assert fingerprint(run) == "b6c039acc9327dc9e86b1c2bb9099273142991212a021e038687d021bdeffebf"
