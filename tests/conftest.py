"""What every test runs in: an environment of its own, no network, trackio writing to a temporary folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from isolation import is_foreign, isolate

# huggingface_hub reads these once, when it is first imported, which is before any fixture runs.
for _name in [name for name in os.environ if is_foreign(name)]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


# How long an example takes is the machine's business, not the code's.
settings.register_profile("rlkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlkit")


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path / "trackio", monkeypatch)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A loop of uvloop that has served leaves its handlers behind, and they swallow what a later test sends."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
