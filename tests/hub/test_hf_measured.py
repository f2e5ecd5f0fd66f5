"""What was measured of a bucket sets the transport of the runs that follow on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlkit.engines.hf_figures import Figures, measured_transport
from rlkit.engines.hf_measured import as_measured, keep_figures
from rlkit.recipe import Recipe, load_recipe

pytestmark = pytest.mark.hub

FIGURES = Figures(30.0, 3.0, True, 12.0, True, 401, True, 120.0)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path))
    return load_recipe(Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml")


def test_slow_mount_is_asked_less_often_and_waited_for(recipe: Recipe) -> None:
    short = recipe.with_overrides(["transport.deadline_s=60"])
    assert measured_transport(short, FIGURES) == {"transport.retry_s": 5.0, "transport.deadline_s": 120.0}


def test_deadline_that_is_long_enough_stays(recipe: Recipe) -> None:
    assert measured_transport(recipe, replace(FIGURES, early_s=1.2, late_s=1.0, renamed_s=1.0)) == {
        "transport.retry_s": 0.2
    }


def test_what_no_figure_concerns_stays(recipe: Recipe) -> None:
    assert measured_transport(recipe.with_overrides(["transport.kind=push"]), FIGURES) == {}
    assert measured_transport(recipe, replace(FIGURES, early_s=None, late_s=None, renamed_s=None)) == {}


def test_next_run_on_the_same_bucket_takes_it(recipe: Recipe) -> None:
    assert as_measured(recipe, "me") == (recipe, "")
    keep_figures(replace(FIGURES, early_s=6.0, late_s=3.0, renamed_s=3.0), "me", recipe.hardware.bucket)
    adapted, words = as_measured(recipe, "me")
    assert adapted.transport.retry_s == 1.0
    assert "transport.retry_s 1: as measured on 20" in words
    assert as_measured(adapted, "me") == (adapted, "")
    assert as_measured(recipe, "you")[0] == recipe
    elsewhere = recipe.with_overrides(["hardware.bucket=other"])
    assert as_measured(elsewhere, "me")[0] == elsewhere


def test_file_of_another_version_is_passed_over(recipe: Recipe) -> None:
    file = keep_figures(FIGURES, "me", "rlkit")
    for text in ("", "[]", '{"measured_at": "x"}', '{"measured_at": "x", "figures": {"late_s": 3}}'):
        file.write_text(text)
        assert as_measured(recipe, "me") == (recipe, "")
