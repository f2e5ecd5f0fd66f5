"""An environment of its own for a test, or for what several tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_FOREIGN = ("HF_", "HUGGING", "TRACKIO_", "GRADIO_", "SPACE_", "VLLM_", "WANDB_")
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}


def is_foreign(name: str) -> bool:
    """Whether a variable of the environment could change what a test sees."""
    return name.startswith(_FOREIGN) or name.lower() in _PROXIES


def isolate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what the environment says, and let trackio write to `folder`; for what several tests share, too."""
    for name in [name for name in os.environ if is_foreign(name)]:
        monkeypatch.delenv(name)
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
