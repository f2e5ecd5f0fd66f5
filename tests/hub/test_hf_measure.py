"""The two Jobs of `rlkit check --measure`, for real against the emulated Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import HfApi

from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_measure import MeasureOptions, measure
from rlkit.errors import RunFailed
from rlkit.recipe import Recipe, load_recipe

pytestmark = pytest.mark.hub

OPTIONS = MeasureOptions(holds_s=(0.0, 0.2), poll_s=0.05, patience_s=120)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(Path(__file__).parents[2] / "runs" / "published" / "r1-dp2.yaml")


@pytest.fixture
def client(api: HfApi) -> Hub:
    return Hub.connect(None, first_wait_s=0.001, api=api)


def test_figures_of_a_mount_without_a_delay(client: Hub, hub: EmulatedHub, recipe: Recipe) -> None:
    figures = measure(client, recipe, lambda event: None, OPTIONS)
    assert figures.hashes_match is True
    assert figures.early_s is not None
    assert figures.late_s is not None
    assert figures.renamed_s is not None
    assert (figures.status_without_token, figures.token_reaches_the_job, figures.held_s) == (401, True, 0.2)
    assert not hub.running()
    assert {job.spec["flavor"] for job in hub.jobs.values()} == {"cpu-basic"}
    assert not list(client.listing("tester/rlkit", "checks"))


def test_probe_that_cannot_start_leaves_nothing(client: Hub, hub: EmulatedHub, recipe: Recipe) -> None:
    hub.faults.stuck_flavors.add("cpu-basic")
    with pytest.raises(RunFailed, match="gave up waiting"):
        measure(client, recipe.with_overrides(["hardware.scheduling_minutes=0.001"]), lambda event: None, OPTIONS)
    assert not hub.running()
