"""Least squares for simulations: few parameters, each a factor, and a Jacobian with steps that a simulation can feel.

A simulated figure is no smooth function of a constant: one more group falls into a step or does not. Differences over a
millionth, as an optimizer takes them by itself, would read that noise, so they are taken over some percent here. They
are taken once and corrected by what each round shows: a simulation costs seconds, and factors act on logarithms of
figures almost in straight lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Of a factor's logarithm: five percent move a simulated mean by more than its noise.
STEP = 0.05
# A fitted constant stays within this factor of where it began: beyond it, the model is wrong and not the constant.
FARTHEST = 20.0
# Rounds of the optimizer, a simulation each; it is within a percent after four.
ROUNDS = 6
# Relative; less than the noise of a simulated mean.
ENOUGH = 1e-3

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
# Factors of the parameters, one list a call that is wanted, to residuals, one list each. Many at once: they may be
# simulated side by side.
Residuals = Callable[[list[list[float]]], list[list[float]]]


@dataclass(frozen=True)
class Fit:
    """The factors found, half the sum of squared residuals before and after, and how many points were simulated."""

    factors: tuple[float, ...]
    cost_before: float
    cost: float
    evaluations: int


def fit(parameters: int, residuals: Residuals, stiffness: Sequence[float] | None = None, rounds: int = ROUNDS) -> Fit:
    """The factors, beginning at 1, that make the residuals smallest.

    `stiffness` holds a parameter at 1: its residual is stiffness x log(factor). The same input gives the same result.
    """
    from scipy.optimize import least_squares

    held = np.asarray(stiffness if stiffness is not None else [0.0] * parameters, dtype=float)
    known: dict[tuple[float, ...], Floats] = {}
    asked = 0

    def evaluate(points: Sequence[Floats]) -> list[Floats]:
        nonlocal asked
        keys = [tuple(float(x) for x in point) for point in points]
        new = [key for key in dict.fromkeys(keys) if key not in known]
        asked += len(new)
        for key, found in zip(new, residuals([[math.exp(x) for x in key] for key in new]) if new else [], strict=True):
            known[key] = np.concatenate([np.asarray(found, dtype=float), held * np.asarray(key)])
        return [known[key] for key in keys]

    last: list[tuple[Floats, Floats, Floats]] = []

    def jacobian(point: Floats) -> Floats:
        if not last:
            here, *there = evaluate([point, *(point + STEP * unit for unit in np.eye(parameters))])
            slopes = np.stack([(one - here) / STEP for one in there], axis=1)
        else:
            before, there_before, slopes = last[-1]
            here, moved = evaluate([point])[0], point - before
            # Broyden: as little changed as explains what the last step did.
            slopes = slopes + np.outer(here - there_before - slopes @ moved, moved) / (moved @ moved)
        last.append((point.copy(), here, slopes))
        return slopes

    farthest = math.log(FARTHEST)
    start = np.zeros(parameters)
    before = 0.5 * float(np.sum(evaluate([start])[0] ** 2))
    found = least_squares(
        lambda point: evaluate([point])[0],
        start,
        jac=jacobian,
        bounds=(-farthest, farthest),
        max_nfev=rounds,
        xtol=ENOUGH,
        ftol=ENOUGH,
        gtol=None,
    )
    return Fit(tuple(math.exp(x) for x in found.x), before, float(found.cost), asked)
