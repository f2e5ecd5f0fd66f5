"""What every test runs in: an environment of its own, no network, trackio writing to a temporary folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_FOREIGN = ("HF_", "HUGGING", "TRACKIO_", "GRADIO_", "SPACE_", "VLLM_", "WANDB_")
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}


def _is_foreign(name: str) -> bool:
    return name.startswith(_FOREIGN) or name.lower() in _PROXIES


# huggingface_hub reads these once, when it is first imported, which is before any fixture runs.
for _name in [name for name in os.environ if _is_foreign(name)]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


# How long an example takes is the machine's business, not the code's.
settings.register_profile("rlkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlkit")


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if _is_foreign(name)]:
        monkeypatch.delenv(name)
    folder = tmp_path / "trackio"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    # trackio reads TRACKIO_DIR at import and each of its modules keeps a copy; one imported by an earlier test would
    # go on writing to that test's folder.
    for name, module in list(sys.modules.items()):
        if name == "trackio" or name.startswith("trackio."):
            for constant, value in (
                ("TRACKIO_DIR", folder),
                ("MEDIA_DIR", folder / "media"),
                ("ARTIFACTS_DIR", folder / "artifacts"),
            ):
                if hasattr(module, constant):
                    monkeypatch.setattr(module, constant, value)
