"""What the form of notebook 01 makes of its fields, and what it starts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from html_page import Page

from rlkit.engines.background import start_in_background
from rlkit.errors import BadInput
from rlkit.launch_form import LaunchForm
from rlkit.launch_plan import (
    FIELDS,
    assignments,
    consider,
    field_text,
    foresee,
    plan_html,
    prediction_html,
    recipes_under,
)
from rlkit.live_source import FolderSource
from rlkit.recipe import load_recipe
from rlkit.run_folder import RunFolder

RUNS = Path(__file__).parents[1] / "runs"
LOCAL = RUNS / "local.yaml"


@pytest.mark.parametrize("path", recipes_under(RUNS), ids=lambda path: path.stem)
def test_an_untouched_form_changes_nothing(path: Path) -> None:
    base = load_recipe(path)
    assert assignments(base, {name: field_text(base, name) for name in FIELDS}, " \n") == []


def test_what_is_changed_is_what_differs() -> None:
    base = load_recipe(LOCAL)
    changes = assignments(base, {"serve.replicas": " 1 ", "train.token_budget": "null"}, "name=mine\n\ntrain.seed=4")
    assert changes == ["serve.replicas=1", "train.token_budget=null", "name=mine", "train.seed=4"]
    assert base.with_overrides(changes).train.token_budget is None


def test_a_plan_says_what_is_wrong_and_is_not_ready(tmp_path: Path) -> None:
    plan = consider(LOCAL, ["train.steps=0"], tmp_path / "run")
    assert not plan.ready
    assert "train.steps" in Page(plan_html(plan)).first_bold
    slots = consider(LOCAL, ["engine=local", "serve.max_loras=2"], tmp_path / "run")
    assert not slots.ready
    assert "serve.max_loras" in Page(plan_html(slots)).lines


def test_time_cost_and_bound_stand_beside_it() -> None:
    text = Page(prediction_html(foresee(load_recipe(RUNS / "published" / "r1-dp2.yaml", ["train.steps=10"])))).text
    for expected in ("for 10 steps", "Step", "Would be bound by", "$"):
        assert expected in text
    unknown = prediction_html("nothing is known of the hardware")
    assert "cannot be predicted: nothing is known of the hardware" in unknown


def test_the_form_follows_its_fields_and_saves_plain_html(tmp_path: Path) -> None:
    form = LaunchForm(str(LOCAL), ["engine=sim", "name=mine"], str(tmp_path / "run"), predicting=False)
    assert form.plan.recipe is not None
    assert (form.plan.recipe.engine, form.plan.recipe.name) == ("sim", "mine")
    form._fields["train.steps"].value = "-1"
    assert form._start.disabled
    assert "train.steps" in Page(form._repr_mimebundle_()["text/html"]).first_bold
    form._fields["train.steps"].value = "3"
    assert not form._start.disabled
    form._recipe.value = next(path for path in form._recipe.options.values() if path.stem == "r1-dp2")
    assert form._fields["train.steps"].value == "500"
    assert not form.started


def test_another_run_can_be_started_from_the_form_when_one_is_over(tmp_path: Path) -> None:
    changes = ["engine=sim", "train.steps=8", "name=mine"]
    form = LaunchForm(str(LOCAL), changes, str(tmp_path / "run"), predicting=False)
    form._start.click()
    assert form.view is not None, form._said.value
    assert form._start.disabled
    assert form.view.wait(120)
    assert form.view.last is not None
    assert form.view.last.status == "it finished"
    assert not form._start.disabled


def test_parameters_that_are_no_recipe_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"train\.steps"):
        LaunchForm(str(LOCAL), ["train.steps=none"], str(tmp_path))


def test_a_run_started_in_the_background_is_watched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a Jupyter kernel
    folder = RunFolder(tmp_path / "run")
    child = start_in_background(load_recipe(LOCAL, ["engine=sim", "train.steps=8", "name=mine"]), folder, report=False)
    source = FolderSource(folder, child)
    assert not source.look().over
    child.send_signal(signal.SIGINT)  # a cell of the notebook is interrupted, and with it the kernel's process group
    assert child.wait(120) == 0
    assert (source.look().over, source.look().status, len(source.look().frame)) == (True, "it finished", 8)
    assert any("8 steps in" in line for line in folder.engine_log.read_text().splitlines())
    assert "\x1b" not in folder.engine_log.read_text()


def test_a_rented_run_is_not_started_where_nobody_is_asked(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(BadInput, match="rented hardware costs money, and nobody has agreed"):
        start_in_background(load_recipe(RUNS / "published" / "r1-dp2.yaml"), folder)
    assert not folder.path.exists()


def test_a_run_that_is_refused_says_why_in_the_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    child = start_in_background(load_recipe(LOCAL, ["serve.max_loras=2"]), folder)
    assert child.wait(120) == 2
    seen = FolderSource(folder, child).look()
    assert seen.over
    assert any("serve.max_loras" in line for line in seen.log)
