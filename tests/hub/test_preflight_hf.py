"""Findings about a recipe that is to run on Hugging Face Jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.preflight_hf import gpus_of, hf_findings
from rlkit.recipe import Recipe, load_recipe

pytestmark = pytest.mark.hub

PUBLISHED = sorted((Path(__file__).parents[2] / "runs" / "published").glob("*.yaml"))


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(PUBLISHED[0])


@pytest.mark.parametrize(("flavor", "gpus"), [("cpu-basic", 0), ("h200", 1), ("h200x2", 2), ("a10g-largex4", 4)])
def test_gpus_of_a_flavor(flavor: str, gpus: int) -> None:
    assert gpus_of(flavor) == gpus


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_recipes_have_nothing_to_change(path: Path) -> None:
    assert not list(hf_findings(load_recipe(path)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("hardware.trainer=cpu", "hardware.trainer"),
        ("hardware.trainer=h200x8", "train.processes"),
        ("hardware.replica=h200x4", "serve.tensor_parallel_size"),
        ("data.name=./rows.jsonl", "data.name"),
        ("reward=mine:score", "reward"),
        ("hardware.image=vllm/vllm-openai", "hardware.image"),
        ("hardware.image=vllm/vllm-openai:latest", "hardware.image"),
    ],
)
def test_each_finding(recipe: Recipe, change: str, field: str) -> None:
    assert [finding.field for finding in hf_findings(recipe.with_overrides([change]))] == [field]
