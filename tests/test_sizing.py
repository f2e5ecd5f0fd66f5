"""One value for each setting, whoever names it: the verdict's next action, the advice, the chase."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from rlkit import advice
from rlkit.advice import advise
from rlkit.chase import Probe, Rules, Try, decide
from rlkit.counsel import Counsel, measured_figures
from rlkit.diagnosis import Verdict, diagnose
from rlkit.recipe import Recipe, load_recipe, spelled
from rlkit.signals import Signals
from rlkit.simulation.frame import frame_of
from rlkit.simulation.recipes import setup_of
from rlkit.simulation.simulate import simulate
from rlkit.sizing import (
    Situation,
    longer_rows,
    more_in_flight,
    queue_for,
    queue_in_time,
    samples_per_step,
    situation,
    slots,
    tokens_in_row,
    tokens_per_sample,
)

RUNS = Path(__file__).parents[1] / "runs"
NAMES = [
    *(f"published/{path.stem}" for path in sorted((RUNS / "published").glob("*.yaml"))),
    *(path.stem for path in sorted(RUNS.glob("local*.yaml"))),
    "adaptive-cap/kv8g-main",
    "ablation-cap/fixed-cleared",
]

# Values in a sentence: `rollout.queue_maxsize from 192 to 256`, `train.token_budget=16384`.
NAMED = re.compile(r"\b([a-z]+\.[a-z_]+)(?:=| from [\d.]+ to )([a-z]+|\d+(?:\.\d+)?)")


@cache
def judged(name: str) -> tuple[Recipe, Verdict, Counsel, Probe]:
    """The recipe, and what is said after a simulated run of it."""
    recipe = load_recipe(RUNS / f"{name}.yaml", ["train.steps=20", "engine=sim"])
    frame = frame_of(simulate(setup_of(recipe)))
    verdict = diagnose(frame, recipe)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(advice, "ADVISED_STEPS", 12)
        found = advise(frame, recipe, learning=True, steps=500, verdict=verdict, processes=1)
    figures = measured_figures(frame, recipe, 500)
    return recipe, verdict, found, Probe(1, "1.yaml", "run-1", figures=figures, advice=found.advice)


def values(text: str) -> dict[str, str]:
    return {field: value.removesuffix(".") for field, value in NAMED.findall(text)}


def test_values_are_found_in_a_sentence() -> None:
    text = "Raise rollout.max_inflight_tasks from 8 to 62, train.token_budget=512; transport.retry_s from 2 to 0.5."
    assert values(text) == {
        "rollout.max_inflight_tasks": "62",
        "train.token_budget": "512",
        "transport.retry_s": "0.5",
    }


@pytest.mark.parametrize("name", NAMES)
def test_verdict_and_advice_name_one_value_for_a_field(name: str) -> None:
    _, verdict, found, _ = judged(name)
    answers: dict[str, set[str]] = {}
    for overrides in [one.overrides for one in found.advice] + [one.overrides for one in found.refused]:
        for override in overrides:
            field, _, value = override.partition("=")
            answers.setdefault(field, set()).add(value)
    said = [(None, verdict.next_action), *((cause.name, cause.next_action) for cause in verdict.causes)]
    for cause, text in said:
        answering = [one for one in found.advice if cause in one.causes]
        for field, value in values(text).items():
            own = {after for one in answering for named, _, after in one.fields if named == field}
            assert {spelled(one) for one in own} <= {value}, (cause, text)
            # A change that is meant for another cause may halve what this one doubles; the value itself is the same.
            assert value in answers.get(field, {value}), (text, answers[field])


@pytest.mark.parametrize("name", ["published/r1-dp2", "local-trainer-bound"])
def test_the_next_action_of_a_lopsided_run_is_the_best_advice(name: str) -> None:
    _, verdict, found, _ = judged(name)
    best = {field: spelled(after) for field, _, after in found.advice[0].fields}
    assert values(verdict.next_action)
    assert values(verdict.next_action).items() <= best.items()


@pytest.mark.parametrize("name", NAMES)
def test_the_chase_tries_what_is_advised(name: str) -> None:
    _, _, found, probe = judged(name)
    next_step = decide([probe], Rules(learning=True))
    if isinstance(next_step, Try):
        assert next_step.advice in found.advice
        assert next_step.advice.gain >= max(one.gain for one in found.advice) - advice.AS_GOOD
    else:
        assert all(one.gain < advice.WORTHWHILE for one in found.advice)


def test_the_next_actions_of_the_lopsided_recipes_have_values() -> None:
    """The test above would pass if nobody named any."""
    fields = {field for name in NAMES for field in values(judged(name)[1].next_action)}
    assert fields >= {
        "train.token_budget",
        "train.gradient_accumulation_steps",
        "rollout.max_inflight_tasks",
    }


CHASE = load_recipe(RUNS / "published" / "r1-dp2.yaml")


def now(recipe: Recipe = CHASE, samples: float = 128.0, tokens: float = 1200.0, wait: float = 0.0) -> Situation:
    return Situation(recipe, samples, tokens, wait)


def test_a_step_has_the_fixed_count_or_what_its_rows_hold() -> None:
    assert samples_per_step(CHASE) == 128
    rows = CHASE.with_overrides(["train.token_budget=16384", "train.gradient_accumulation_steps=6"])
    assert samples_per_step(rows, 1245.0) == pytest.approx(150, rel=0.01)  # as published
    assert samples_per_step(rows) == pytest.approx(6 * 2 * 16384 * 0.95 / tokens_per_sample(rows))
    longest = rows.with_overrides(["train.token_budget=null"])
    assert samples_per_step(longest, 1000.0) == pytest.approx(6 * 2 * 4096 * 0.95 / 1000)


def test_what_was_logged_goes_before_what_is_likely() -> None:
    logged = situation(CHASE, Signals(samples_per_step=100.0, sample_tokens=900.0, wait_share=0.3))
    assert logged == Situation(CHASE, 100.0, 900.0, 0.3)
    by_row = situation(CHASE, Signals(row_tokens=12000.0, samples_per_row=10.0))
    assert by_row == Situation(CHASE, 128.0, 1200.0, 0.0)
    unknown = CHASE.with_overrides(["hardware.trainer=abacus"])
    assert situation(unknown, Signals()) is None
    assert situation(unknown, Signals(samples_per_step=100.0)) is not None


@pytest.mark.parametrize(
    ("overrides", "wait", "expected"),
    [
        ([], 0.0, 256),  # twice as many
        (["serve.replicas=3"], 0.0, 384),  # as many each as there were for all: published
        ([], 0.8, 512),  # what the waiting says is 640, and there are 512 slots
        (["serve.max_num_seqs=80"], 0.0, 160),
        (["serve.max_num_seqs=64"], 0.9, None),  # no slot for one more
        (["rollout.weight_sync_steps=1", "rollout.max_staleness=1"], 0.0, 141),  # the window is 128: a tenth beyond it
    ],
)
def test_rollouts_in_flight(overrides: list[str], wait: float, expected: int | None) -> None:
    recipe = CHASE.with_overrides(overrides)
    assert more_in_flight(now(recipe, wait=wait)) == expected
    assert expected is None or expected <= slots(recipe)


def test_the_queue_has_room_for_what_is_in_flight_and_no_more_than_is_trained_on_in_time() -> None:
    assert queue_for(now(), 384) == 768  # published
    assert queue_for(now(), 128) == 512  # never smaller than it is
    short = CHASE.with_overrides(["rollout.weight_sync_steps=1", "rollout.queue_maxsize=128"])
    assert queue_for(now(short), 200) == 4 * 128 - 200
    assert queue_in_time(now(short)) is None
    assert queue_in_time(now(short.with_overrides(["rollout.queue_maxsize=1024"]))) == 512
    assert queue_in_time(now(short.with_overrides(["rollout.max_staleness=0", "rollout.queue_maxsize=200"]))) == 128


def test_rows_are_packed_into_four_contexts_or_what_fits_and_once_more() -> None:
    assert longer_rows(now()) == ["train.token_budget=16384", "train.gradient_accumulation_steps=5"]
    packed = CHASE.with_overrides(["train.token_budget=16384", "train.gradient_accumulation_steps=6"])
    assert longer_rows(now(packed)) == ["train.token_budget=32768", "train.gradient_accumulation_steps=3"]
    assert longer_rows(now(packed.with_overrides(["train.token_budget=32768"]))) is None
    assert longer_rows(now(packed.with_overrides(["train.gradient_accumulation_steps=1"]))) is None
    small = CHASE.with_overrides(["hardware.trainer=l4x2", "train.gradient_checkpointing=false"])
    rows = longer_rows(now(small))
    assert rows is not None
    assert int(rows[0].partition("=")[2]) < 16384


def test_samples_of_a_group_take_their_prompt_once() -> None:
    """A real run: 64 samples of 79 tokens, 13.7 of them the completion; rows of 512 tokens held 37 (TRL 1.16)."""
    toy = load_recipe(RUNS / "local-trainer-bound.yaml")
    assert 512 / tokens_in_row(toy, 78.65) == pytest.approx(37.5, abs=1)
    rows = longer_rows(Situation(toy, 64.0, 78.65))
    assert rows == ["train.token_budget=512", "train.gradient_accumulation_steps=2"]
    assert tokens_in_row(CHASE, 1200.0) == 1200.0  # TRL 1.14 forwards every sample whole
