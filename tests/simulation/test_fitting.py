from __future__ import annotations

import math

import pytest

from rlkit.simulation.fitting import FARTHEST, Fit, fit


def power_laws(points: list[list[float]]) -> list[list[float]]:
    """Two figures of two constants, met at factors of 2 and 1/3."""
    return [[math.log(a * b / (2 / 3)), math.log(a / b / 6)] for a, b in points]


def test_factors_are_found_in_few_simulations() -> None:
    found = fit(2, power_laws)
    assert found.factors == pytest.approx((2.0, 1 / 3), rel=0.01)
    assert found.cost < 1e-4 < found.cost_before
    assert found.evaluations <= 10


def test_noise_of_a_percent_does_not_lead_astray() -> None:
    def noisy(points: list[list[float]]) -> list[list[float]]:
        return [[value + 0.01 * math.sin(1e6 * value) for value in row] for row in power_laws(points)]

    assert fit(2, noisy).factors == pytest.approx((2.0, 1 / 3), rel=0.1)


def test_what_nothing_is_known_of_stays_where_it_was() -> None:
    found = fit(2, lambda points: [[math.log(a / 2)] for a, _ in points], stiffness=[0.0, 1.0])
    assert found.factors == pytest.approx((2.0, 1.0), rel=0.01)


def test_a_factor_has_an_end_and_the_same_input_gives_the_same_fit() -> None:
    def far(points: list[list[float]]) -> list[list[float]]:
        return [[math.log(a / 1e6)] for (a,) in points]

    found = fit(1, far, rounds=20)
    assert found.factors[0] <= FARTHEST * 1.001
    assert isinstance(found, Fit)
    assert fit(1, far, rounds=20) == found
