from __future__ import annotations

import pytest
from small_setup import RATES, ROOMY, small_setup

from rlkit.simulation.cores import SharedCores, Work
from rlkit.simulation.replica import FluidReplica, Sequence
from rlkit.simulation.simulate import Simulation, simulate

TWO = SharedCores(cores=2, trainer=1.5)


def mean(run: Simulation, metric: str) -> float:
    values = [step.metrics[metric] for step in run.steps[4:]]
    return sum(values) / len(values)


def test_everybody_slows_down_as_much_as_the_cores_are_short() -> None:
    assert SharedCores().speed(8, True) == 1.0
    assert TWO.speed(2, False) == TWO.speed(0, True) == 1.0
    assert TWO.speed(2, True) == pytest.approx(2 / 3.5)


def test_work_takes_longer_while_it_is_slow() -> None:
    work = Work(10.0, 4.0, 1.0)
    work.change(12.0, 0.5)
    assert work.seconds_left == 4.0
    work.change(14.0, 1.0)
    assert work.seconds_left == 1.0
    assert work.slowed


def test_an_engine_at_half_its_speed_takes_twice_the_time() -> None:
    ends = []
    for speed in (1.0, 0.5):
        engine = FluidReplica(RATES, ROOMY)
        engine.submit(0.0, Sequence((0, 0), 10, 100))
        engine.set_speed(0.0, speed)
        ends.append(engine.next_at)
    assert ends[1] == pytest.approx(2 * ends[0])


def test_an_engine_that_slows_down_on_the_way_ends_when_it_should() -> None:
    whole = FluidReplica(RATES, ROOMY)
    slowed = FluidReplica(RATES, ROOMY)
    for engine in (whole, slowed):
        engine.submit(0.0, Sequence((0, 0), 10, 100))
    end = whole.next_at
    slowed.set_speed(end / 2, 0.5)
    assert slowed.next_at == pytest.approx(1.5 * end)
    assert [sequence.completion_tokens for sequence in slowed.fire(slowed.next_at)] == [100]


def test_trainer_and_engines_on_shared_cores_slow_each_other_down() -> None:
    alone, shared = simulate(small_setup()), simulate(small_setup(cores=TWO))
    assert mean(shared, "perf/fwd_bwd_s") > 1.2 * mean(alone, "perf/fwd_bwd_s")
    assert mean(shared, "rollout/duration_s") > 1.2 * mean(alone, "rollout/duration_s")
    for step in shared.steps[1:]:
        phases = ("perf/fwd_bwd_s", "perf/optimizer_s", "perf/rollout_wait_s", "perf/weight_sync_s")
        assert sum(step.metrics[name] for name in phases) == pytest.approx(step.metrics["perf/step_s"], abs=1e-6)


def test_enough_cores_change_nothing() -> None:
    alone, many = simulate(small_setup()), simulate(small_setup(cores=SharedCores(cores=4)))
    assert [step.metrics for step in many.steps] == [step.metrics for step in alone.steps]
