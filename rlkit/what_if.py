"""What if a recipe had other settings: its predicted step, time, cost and verdict, and the front they stand on. Pure.

A prediction is a short simulation, `STEPS` steps of `SEEDS` seeds, over which lengths change as over the whole run; it
takes about half a second. What was predicted once is known by its values and not simulated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import product

import pandas as pd

from rlkit.diagnosis import Verdict
from rlkit.errors import BadInput
from rlkit.price import usd_per_hour
from rlkit.recipe import Recipe
from rlkit.simulation.planning import unbeaten
from rlkit.simulation.prediction import predict
from rlkit.simulation.recipes import translate
from rlkit.sizing import packed, row_tokens, samples_per_step, tokens_per_sample

# Enough for a verdict after the ten steps of the start, few enough for half a second.
STEPS = 40
SEEDS = 1
# Values of a slider: around the recipe's own, each twice the one before.
DOUBLINGS = 2
MORE_REPLICAS = 2
# Rows that hold so many of the longest sequences.
ROWS_OF_SEQUENCES = (1, 4, 8)


@dataclass(frozen=True)
class Choice:
    """The settings that are played with."""

    replicas: int
    in_flight: int
    queue: int  # samples
    token_budget: int  # tokens of a packed row; 0: every sample is its own
    sync_steps: int
    kv_gib: float  # of KV cache per replica


# How a person calls each, with its unit.
WORDS = {
    "replicas": "Replicas",
    "in_flight": "Rollouts in flight",
    "queue": "Queue, samples",
    "token_budget": "Packed row, tokens",
    "sync_steps": "Steps between syncs",
    "kv_gib": "KV cache, GiB a replica",
}


@dataclass(frozen=True)
class Predicted:
    """What a choice would lead to. Minutes and USD are of the recipe's whole run; None without a price."""

    choice: Choice
    step_s: float
    minutes: float
    usd: float | None
    staleness: float
    dropped_over_trained: float
    preemptions_per_request: float
    verdict: Verdict


class WhatIf:
    """A recipe to play with. Raises BadInput for one that cannot be simulated."""

    def __init__(self, recipe: Recipe, steps: int = STEPS) -> None:
        self.recipe = recipe.with_overrides(["engine=sim"])
        self._steps = min(steps, recipe.train.steps)
        self.known: dict[Choice, Predicted | str] = {}
        self._samples = samples_per_step(self.recipe)
        capacity = translate(self.recipe).setup.engines[0].capacity
        self._kv_gib = round(_gib(self.recipe, capacity.kv_tokens), 2)
        self.start = Choice(
            replicas=recipe.serve.replicas,
            in_flight=recipe.inflight_limit,
            queue=recipe.rollout.queue_maxsize,
            token_budget=row_tokens(recipe),
            sync_steps=recipe.rollout.weight_sync_steps,
            kv_gib=self._kv_gib,
        )

    @property
    def options(self) -> Mapping[str, tuple[float, ...]]:
        """The values of each setting, the recipe's own among them, in order."""
        start, longest = self.start, self.recipe.serve.max_model_len
        return {
            "replicas": tuple(range(1, start.replicas + MORE_REPLICAS + 1)),
            "in_flight": _around(start.in_flight),
            "queue": _around(start.queue),
            "token_budget": tuple(sorted({0, start.token_budget, *(longest * rows for rows in ROWS_OF_SEQUENCES)})),
            "sync_steps": tuple(sorted({1, 2, 4, 8, 16, start.sync_steps})),
            "kv_gib": tuple(sorted({round(start.kv_gib * 2.0**power, 2) for power in range(-3, 2)})),
        }

    def recipe_of(self, choice: Choice) -> Recipe:
        """The recipe with these settings; whatever was not touched is as it was. Samples a step stay about the same."""
        changes = [
            f"serve.replicas={choice.replicas}",
            f"rollout.max_inflight_tasks={choice.in_flight}",
            f"rollout.queue_maxsize={choice.queue}",
            f"rollout.weight_sync_steps={choice.sync_steps}",
        ]
        if choice.kv_gib != self._kv_gib:
            changes += ["serve.num_gpu_blocks=null", f"serve.kv_cache_gib={choice.kv_gib}"]
        if choice.token_budget != self.start.token_budget:
            changes += self._batch(choice.token_budget)
        return self.recipe.with_overrides(changes)

    def predict(self, choice: Choice) -> Predicted:
        """What a choice leads to, simulated unless it is known. Raises BadInput for what cannot be simulated."""
        if choice not in self.known:
            try:
                self.known[choice] = self._simulated(choice)
            except BadInput as error:
                self.known[choice] = str(error)
        found = self.known[choice]
        if isinstance(found, str):
            raise BadInput(found)
        return found

    @staticmethod
    def changed(choice: Choice, settings: Mapping[str, float]) -> Choice:
        """A choice with some settings changed, by their names."""
        return Choice(**(asdict(choice) | dict(settings)))

    def neighbours(self, choice: Choice) -> list[Choice]:
        """Each setting one value up and down: what a front is drawn through, besides all that was tried."""
        found = []
        for name, values in self.options.items():
            at = values.index(getattr(choice, name))
            beside = [values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)]
            found += [self.changed(choice, {name: value}) for value in beside]
        return found

    def grid(self, across: str, up: str) -> pd.DataFrame:
        """Predictions over all values of two settings, the others as in the recipe; what cannot be simulated left out.

        A row each, with columns as a results table has them (`rlkit.sweep_table`), so that the same figures draw it.
        Raises BadInput for a setting that is not there.
        """
        options = self.options
        unknown = next((name for name in (across, up) if name not in options), None)
        if unknown is not None or across == up:
            raise BadInput(f"{unknown or across}: expected two of {', '.join(options)}")
        rows = []
        for number, values in enumerate(product(options[across], options[up]), 1):
            try:
                found = self.predict(self.changed(self.start, dict(zip((across, up), values, strict=True))))
            except BadInput:
                continue
            rows.append({"point": number, "status": "done", "verdict": found.verdict.bound} | as_row(found))
        return pd.DataFrame(rows)

    def _simulated(self, choice: Choice) -> Predicted:
        recipe = self.recipe_of(choice)
        short = recipe.with_overrides([f"train.steps={self._steps}"])
        run = predict(short, SEEDS, processes=1)
        minutes = run.step_s.mean * recipe.train.steps / 60
        rate = usd_per_hour(self.recipe, recipe)
        return Predicted(
            choice=choice,
            step_s=run.step_s.mean,
            minutes=minutes,
            usd=None if rate is None else minutes / 60 * rate,
            staleness=run.staleness.mean,
            dropped_over_trained=run.dropped_over_trained.mean,
            preemptions_per_request=run.preemptions_per_request.mean,
            verdict=run.verdict,
        )

    def _batch(self, budget: int) -> list[str]:
        if budget:
            return packed(self.recipe, self._samples, tokens_per_sample(self.recipe), budget)
        train = self.recipe.train
        rows = max(1, round(self._samples / (train.per_device_train_batch_size * train.processes)))
        return ["train.token_budget=0", f"train.gradient_accumulation_steps={rows}"]


def cost(found: Predicted) -> float:
    """What is weighed against time: USD, or the replicas where nobody said what they cost."""
    return found.usd if found.usd is not None else float(found.choice.replicas)


def front(found: Iterable[Predicted]) -> list[Predicted]:
    """Those that no other one beats in time and cost, fastest first; of equals in both, the first."""
    return unbeaten(found, lambda one: (one.minutes, cost(one)))


def as_row(found: Predicted) -> dict[str, float | None]:
    """The choice and its figures, flat."""
    figures = {"step_s": found.step_s, "minutes": found.minutes, "usd": found.usd, "staleness": found.staleness}
    return asdict(found.choice) | figures


def _around(value: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(value * 2.0**power)) for power in range(-DOUBLINGS, DOUBLINGS + 1)}))


def _gib(recipe: Recipe, kv_tokens: float) -> float:
    """GiB that so many tokens take, by the simulator's own sizes."""
    from rlkit.simulation.hardware import model_shape

    return kv_tokens * model_shape(recipe.model.name).kv_bytes / 2**30
