"""An emulated Hub for each test, and the real client that talks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import HfApi


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


@pytest.fixture
def api(hub: EmulatedHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=hub.token)
