from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import uvloop
from safetensors.numpy import save_file

from rlkit.serving.emulated_replica import EmulatedReplica

# Protocols that run without uvloop, too, where there is none.
ON_BOTH_LOOPS = {"test_server.py", "test_failover.py", "test_upstream.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The proxy's own event loop, and asyncio's where the two may differ."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    return loops | ({"asyncio": asyncio.new_event_loop} if item.path.name in ON_BOTH_LOOPS else {})


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
