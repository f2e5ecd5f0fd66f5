"""An emulated Hub for each test, and the real client that talks to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub.hub_server import EmulatedHub
from hub.stand_ins import SERVE, TRAINS, assert_nothing_is_lost, leaks
from huggingface_hub import HfApi

from rlkit.engines.base import Confirm, Event, Outcome, agree
from rlkit.engines.hf import HfOptions, launch_hf
from rlkit.recipe import Recipe, load_recipe
from rlkit.run_folder import RunFolder
from rlkit.training.model_cache import cached_model

LOCAL = Path(__file__).parents[2] / "runs" / "local.yaml"
JOBS = [
    *("engine=hf", "train.steps=3", "hardware.trainer=h200x2", "hardware.replica=h200"),
    *("serve.replicas=2", "hardware.deadline_hours=1"),
]
Launch = Callable[..., Outcome]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedHub]:
    # The suite runs offline; this Hub is on loopback. Both are settings that the client reads once, at its import.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with EmulatedHub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub
    # No secret in any file, log, label, environment, notebook or tracked config of any of these tests.
    try:
        assert_no_secret_shows(hub, tmp_path, hub.temporary)
    finally:
        shutil.rmtree(hub.temporary)


def assert_no_secret_shows(hub: EmulatedHub, *folders: Path) -> None:
    """The token was sent as a secret and is nowhere else."""
    shown = [
        (job.id, what)
        for job in hub.jobs.values()
        for what in (job.lines, {name: value for name, value in job.spec.items() if name != "secrets"}, job.labels)
        if hub.token in str(what)
    ]
    assert not shown
    assert not leaks(hub.token, *folders)


@pytest.fixture
def api(hub: EmulatedHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The main job's recipe on Jobs; its model is a folder that nothing reads."""
    monkeypatch.setenv("RLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    model = cached_model(tmp_path / "cache", seed=0)
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    return load_recipe(LOCAL, JOBS)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "my-run")


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def launch(hub: EmulatedHub, api: HfApi, recipe: Recipe, folder: RunFolder, events: list[Event]) -> Iterator[Launch]:
    """Launches stand-ins; whatever becomes of the run, nothing is left running and nothing it kept is lost."""

    def start(
        train: str = TRAINS,
        serve: tuple[str, ...] = SERVE,
        changes: list[str] | None = None,
        on_event: Callable[[Event], object] = events.append,
        confirm: Confirm = agree,
    ) -> Outcome:
        options = HfOptions(
            api=api, serve=serve, train=("python3", "-c", train), poll_s=0.05, lease_s=600, first_wait_s=0.01
        )
        changed = recipe.with_overrides(changes or [])
        return launch_hf(changed, folder, lambda event: (on_event(event), None)[1], confirm, options)

    yield start
    assert_nothing_is_lost(hub, folder)
