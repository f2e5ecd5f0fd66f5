"""What a recipe would take with other settings, and the sliders around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from html_page import Page

from rlkit import what_if
from rlkit.errors import BadInput
from rlkit.recipe import Recipe, load_recipe
from rlkit.what_if import WORDS, Choice, Predicted, WhatIf, cost, front
from rlkit.what_if_view import WhatIfView, front_svg

RUNS = Path(__file__).parents[1] / "runs"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(RUNS / "local.yaml")


@pytest.fixture
def model(recipe: Recipe) -> WhatIf:
    return WhatIf(recipe, steps=12)


def test_the_recipe_is_among_the_values_of_every_setting_and_unchanged_by_itself(model: WhatIf, recipe: Recipe) -> None:
    assert set(model.options) == set(WORDS) == set(vars(model.start))
    for name, values in model.options.items():
        assert getattr(model.start, name) in values
        assert sorted(set(values)) == list(values)
    assert model.recipe_of(model.start) == recipe.with_overrides(["engine=sim"])


def test_each_setting_changes_the_fields_it_means(model: WhatIf) -> None:
    choice = Choice(replicas=3, in_flight=32, queue=96, token_budget=1024, sync_steps=2, kv_gib=0.5)
    changed = model.recipe_of(choice)
    assert (changed.serve.replicas, changed.rollout.max_inflight_tasks) == (3, 32)
    assert (changed.rollout.queue_maxsize, changed.rollout.weight_sync_steps) == (96, 2)
    assert (changed.train.token_budget, changed.serve.kv_cache_gib) == (1024, 0.5)
    # Rows of twice the tokens: half as many hold the same samples.
    assert changed.train.gradient_accumulation_steps == 3
    unpacked = model.recipe_of(replace(choice, token_budget=0))
    assert unpacked.train.token_budget == 0
    # Six rows of 512 tokens, 95 % full of completions of 18: a group's prompt is in a row once. A run has about 150.
    assert unpacked.samples_per_step == 165


def test_a_prediction_is_made_once_and_fewer_rollouts_in_flight_are_slower(
    model: WhatIf, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = model.predict(model.start)
    assert start.minutes == pytest.approx(start.step_s * 48 / 60)
    assert start.usd is None
    assert cost(start) == 2
    few = model.predict(replace(model.start, in_flight=8))
    assert few.step_s > start.step_s
    assert few.verdict.bound == "generation"
    monkeypatch.setattr(what_if, "predict", Mock(side_effect=AssertionError("simulated again")))
    assert model.predict(model.start) is start


def test_what_cannot_be_simulated_is_told_each_time(model: WhatIf) -> None:
    for _ in range(2):
        with pytest.raises(BadInput, match="the KV cache holds"):
            model.predict(replace(model.start, kv_gib=1e-6))


def test_the_front_is_fastest_first_and_everything_on_it_is_cheaper_than_what_is_faster(model: WhatIf) -> None:
    start = model.predict(model.start)
    points = [replace(start, minutes=m, usd=u) for m, u in ((5, 1), (1, 9), (2, 4), (3, 4), (4, 8), (2, 5))]
    assert [(one.minutes, one.usd) for one in front(points)] == [(1, 9), (2, 4), (5, 1)]


def test_neighbours_are_one_value_away(model: WhatIf) -> None:
    for other in model.neighbours(model.start):
        assert sum(value != getattr(other, name) for name, value in vars(model.start).items()) == 1


def test_a_grid_has_all_values_of_two_settings(model: WhatIf, monkeypatch: pytest.MonkeyPatch) -> None:
    start = model.predict(model.start)
    monkeypatch.setattr(model, "_simulated", lambda choice: replace(start, choice=choice))
    table = model.grid("sync_steps", "replicas")
    assert len(table) == len(model.options["sync_steps"]) * len(model.options["replicas"])
    assert set(table["in_flight"]) == {model.start.in_flight}
    with pytest.raises(BadInput, match="engine: expected two of replicas, "):
        model.grid("engine", "replicas")
    with pytest.raises(BadInput, match="replicas: expected two of"):
        model.grid("replicas", "replicas")


def test_a_slider_that_rests_changes_what_is_shown_and_the_front_moves(model: WhatIf) -> None:
    view = WhatIfView(model, rest_s=0.0)
    assert {slider.description for slider in view.sliders.values()} == set(WORDS.values())
    before = view.verdict.value, view.figures.value, view.front.value
    view.sliders["in_flight"].value = 16
    view.sliders["replicas"].value = 1
    view.wait()
    after = view.verdict.value, view.figures.value, view.front.value
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert Page(after[0]).first_bold != Page(before[0]).first_bold
    assert "--set rollout.max_inflight_tasks=16 --set serve.replicas=1" in Page(after[1]).text
    # The neighbours were filled in once the choice was shown.
    assert len(model.known) > 8
    view._reset.click()
    view.wait()
    assert view.choice == model.start


def test_a_choice_that_cannot_be_simulated_is_said_and_leaves_the_last_one(model: WhatIf) -> None:
    view = WhatIfView(model, rest_s=0.0)
    before = view.figures.value
    view.show(replace(model.start, kv_gib=1e-6))
    assert "This cannot be simulated: " in view.said.value
    assert view.figures.value == before


def test_the_front_says_in_words_where_the_choice_stands(model: WhatIf) -> None:
    start = model.predict(model.start)
    better = replace(start, choice=replace(model.start, replicas=1), minutes=start.minutes / 2)
    [said] = Page(front_svg([start, better], start, start)).images
    assert "behind the front of 1 among 2 predictions" in said
    [said] = Page(front_svg([start, better], better, start)).images
    assert ": on the front of 1 among 2" in said


def test_a_headless_page_has_the_state_as_plain_html(model: WhatIf, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("rlkit.what_if_view.display", lambda bundle, raw: shown.append(bundle))
    WhatIfView(model)._ipython_display_()
    page, script = shown
    assert Page(page["text/html"]).first_bold
    assert "application/vnd.jupyter.widget-view+json" in page
    assert set(script) == {"application/javascript"}


def test_predictions_keep_what_the_verdict_needs(model: WhatIf) -> None:
    found = model.predict(model.start)
    assert isinstance(found, Predicted)
    assert found.verdict.shares
