from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save_file

from rlkit.serving.emulated import EmulatedReplica


@pytest.fixture
async def replicas() -> AsyncIterator[list[EmulatedReplica]]:
    """Two emulated replicas that listen."""
    async with EmulatedReplica() as first, EmulatedReplica() as second:
        yield [first, second]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client without limits."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., str]:
    """Writes adapter folders in peft's layout; `weights` is what makes two adapters different."""

    def write(name: str, weights: float = 1.0, rank: int = 1) -> str:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        config = {"r": rank, "lora_alpha": 2, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file({"lora_A": np.full(4, weights, dtype=np.float32)}, folder / "adapter_model.safetensors")
        return str(folder)

    return write


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a probe here."""
    monkeypatch.setattr("rlkit.serving.proxy.PROBE_EVERY_S", 0.01)
    monkeypatch.setattr("rlkit.serving.proxy.READ_EVERY_S", 0.05)
