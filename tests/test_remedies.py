from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.recipe import Recipe, load_recipe
from rlkit.remedies import Change, changed, remedies, together
from rlkit.sizing import Situation

RUNS = Path(__file__).parents[1] / "runs"
LEARNING = {"rollout.weight_sync_steps", "rollout.max_staleness", "sampling.num_generations"}


def recipe(name: str = "published/r1-dp2", *overrides: str) -> Recipe:
    return load_recipe(RUNS / f"{name}.yaml", list(overrides))


def now(of: Recipe, samples: float = 128, tokens: float = 1200) -> Situation:
    return Situation(of, samples, tokens)


def named(slug: str, of: Recipe, cost: bool = False, learning: bool = False) -> Change:
    return next(change for change in remedies(now(of), learning, cost) if change.slug == slug)


ALL = [
    "published/r1-dp2",
    "published/r1-dp2-tb16k",
    "published/r1-dp3-inflight384",
    "adaptive-cap/kv8g-main",
    "adaptive-cap/kv8g-cap",
    "ablation-cap/fixed-cleared",
    "local",
    "local-trainer-bound",
    "local-generation-bound",
]


@pytest.mark.parametrize("name", ALL)
def test_every_change_is_a_recipe_of_its_own(name: str) -> None:
    before = recipe(name)
    found = remedies(now(before), learning=True, cost=True)
    assert found
    assert len({change.slug for change in found}) == len(found)
    for change in found:
        assert changed(before, change) != before, change
        assert all(effect.endswith(".") for effect in change.side_effects)


@pytest.mark.parametrize("name", ALL)
def test_what_is_learned_stays_unless_it_may_change(name: str) -> None:
    for change in remedies(now(recipe(name)), cost=True):
        assert not change.learning
        assert not LEARNING & {override.partition("=")[0] for override in change.overrides}
    assert any(change.learning for change in remedies(now(recipe(name)), learning=True))


def test_samples_are_packed_as_in_the_published_chase() -> None:
    packed = named("rows-16384", recipe())
    assert packed.overrides == ("train.token_budget=16384", "train.gradient_accumulation_steps=5")
    new = changed(recipe(), packed)
    room = new.train.token_budget or 0
    assert room * 0.95 * new.train.gradient_accumulation_steps * new.train.processes >= 128 * 1200


def test_packed_rows_are_only_made_longer() -> None:
    slugs = [change.slug for change in remedies(now(recipe("published/r1-dp2-tb16k")))]
    assert "rows-32768" in slugs
    assert "rows-8192" not in slugs


def test_more_replicas_come_with_more_rollouts_in_flight_and_their_price() -> None:
    new = changed(recipe(), named("replicas-3", recipe()))
    assert (new.serve.replicas, new.rollout.max_inflight_tasks, new.hardware.usd_per_hour) == (3, 256, 25)


def test_a_queue_is_never_made_smaller_by_more_rollouts_in_flight() -> None:
    for change in remedies(now(recipe())):
        if change.slug.startswith(("inflight", "replicas")):
            assert changed(recipe(), change).rollout.queue_maxsize >= recipe().rollout.queue_maxsize


def test_more_in_flight_stay_within_slots_and_staleness() -> None:
    few_slots = recipe("published/r1-dp2", "serve.max_num_seqs=80")
    sizes = [
        changed(few_slots, change).inflight_limit
        for change in remedies(now(few_slots))
        if "client-limit" in change.causes
    ]
    assert sizes == [160]
    fresh = recipe("published/r1-dp2", "rollout.weight_sync_steps=1", "rollout.max_staleness=2")
    sizes = [
        changed(fresh, change).inflight_limit for change in remedies(now(fresh)) if "client-limit" in change.causes
    ]
    assert sizes == [256]


def test_the_second_replica_costs_a_quarter_of_four_gpus() -> None:
    new = changed(recipe(), named("replicas-1", recipe(), cost=True))
    assert (new.serve.replicas, new.hardware.usd_per_hour) == (1, 15)


def test_twice_the_ranks_train_on_as_many_samples() -> None:
    new = changed(recipe(), named("more-ranks", recipe()))
    assert (new.train.processes, new.hardware.trainer, new.hardware.usd_per_hour) == (4, "h200x4", 30)
    assert new.samples_per_step == recipe().samples_per_step


def test_one_machine_is_not_divided_among_more() -> None:
    for change in remedies(now(recipe("local")), learning=True, cost=True):
        fields = {override.partition("=")[0] for override in change.overrides}
        assert not fields & {"serve.replicas", "train.processes"}


def test_two_changes_at_once_have_the_fields_of_both() -> None:
    both = together(
        named("keep-activations-half-rows", recipe("published/r1-dp2-tb16k")),
        named("rows-32768", recipe("published/r1-dp2-tb16k")),
    )
    new = changed(recipe("published/r1-dp2-tb16k"), both)
    assert (new.train.gradient_checkpointing, new.train.token_budget) == (False, 32768)
