from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.simulation.constants import ADAPTIVE_CAP, CHASE
from rlkit.simulation.lengths import Lengths, lengths_of


@pytest.mark.parametrize(("workload", "longest"), [(CHASE, 3000), (ADAPTIVE_CAP, 8192)])
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_the_mean_is_met_with_the_cut_counted_in(workload: object, longest: int, progress: float) -> None:
    assert isinstance(workload, type(CHASE))
    lengths, dice = lengths_of(workload, longest), random.Random(1)
    drawn = [lengths.completion(lengths.prompt(number), progress, dice) for number in range(14_600)]
    wanted = workload.mean_start if progress == 0 else workload.mean_end
    # The prompts are one draw of 1,460; their own mean is off by up to two standard errors.
    assert statistics.fmean(drawn) == pytest.approx(wanted, rel=0.05)
    assert max(drawn) == longest


def test_a_prompt_keeps_its_length_and_its_difficulty() -> None:
    lengths = lengths_of(CHASE, 3000)
    assert lengths.prompt(3) == lengths.prompt(3 + 1460) == lengths_of(CHASE, 3000).prompt(3)


def test_rollouts_of_one_prompt_are_alike() -> None:
    lengths, dice = lengths_of(CHASE, 3000), random.Random(2)
    groups = [[lengths.completion(lengths.prompt(n), 0.0, dice) for _ in range(8)] for n in range(200)]
    within = statistics.fmean(statistics.pvariance(group) for group in groups)
    assert within < statistics.pvariance([length for group in groups for length in group]) * 0.7


@given(st.floats(1, 5000), st.floats(1, 5000), st.integers(1, 4000), st.floats(0, 2), st.floats(0, 2), st.floats(0, 2))
def test_any_lengths_are_whole_and_within_bounds(
    start: float, end: float, longest: int, between: float, within: float, progress: float
) -> None:
    lengths = Lengths(start, end, longest, between, within, prompts=3)
    drawn = lengths.completion(lengths.prompt(0), progress, random.Random(0))
    assert isinstance(drawn, int)
    assert 1 <= drawn <= longest


def test_lengths_may_double_during_a_run() -> None:
    lengths = replace(lengths_of(CHASE, 8000), mean_start=500.0, mean_end=1000.0)
    dice = random.Random(3)
    early, late = (
        statistics.fmean(lengths.completion(lengths.prompt(n), progress, dice) for n in range(3000))
        for progress in (0.0, 1.0)
    )
    assert late / early == pytest.approx(2.0, rel=0.1)
