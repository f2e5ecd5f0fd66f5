"""What is known of the published law on the published set-up, and of the default one, on simulated replicas."""

from __future__ import annotations

import statistics

import pytest
from cap_beds import CEILING, cache_that_never_fills, published, simulated

# Polls of five seconds in a step of the published experiment, which takes 23.
POLLS_PER_STEP = 4


def test_the_published_law_settles_where_it_was_published_to() -> None:
    run = simulated(published, "published", CEILING, seed=0, steps=50)
    settled = run.decisions[len(run.decisions) // 4 :]
    caps = [decision.cap for decision in settled]
    assert 60 <= min(caps) <= max(caps) <= 170
    usages = [decision.usage or 0.0 for decision in settled]
    steps = [statistics.fmean(usages[first:][:POLLS_PER_STEP]) for first in range(0, len(usages), POLLS_PER_STEP)]
    assert 0.35 <= min(steps) <= max(steps) <= 0.85
    assert run.preemptions < 0.01 * run.requests
    assert run.dropped == 0


def test_the_default_law_trains_on_more_than_the_published_one_with_as_few_preemptions() -> None:
    ours, theirs = (simulated(published, law, CEILING, seed=0, steps=50) for law in ("rlkit", "published"))
    assert ours.useful_tok_s > 1.03 * theirs.useful_tok_s
    assert ours.preemptions < 0.01 * ours.requests
    assert ours.dropped == 0


def test_with_a_cache_that_never_fills_the_cap_is_the_ceiling_and_costs_nothing() -> None:
    capped, free = (simulated(cache_that_never_fills, law, CEILING, seed=0, steps=30) for law in ("rlkit", "none"))
    assert {decision.cap for decision in capped.decisions} == {CEILING}
    assert capped.useful_tok_s == pytest.approx(free.useful_tok_s, rel=1e-9)
    assert max(decision.usage or 0.0 for decision in capped.decisions) < 0.3
