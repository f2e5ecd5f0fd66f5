"""The receivers of a local run: one beside each replica, when adapters are pushed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlkit.serving.receiver import receiver_command

# The token goes from here to the receivers and the proxy through the environment, and is written nowhere.
TOKEN_VARIABLE = "RLKIT_RECEIVER_TOKEN"


@dataclass(frozen=True)
class Receivers:
    """Receivers on these ports of this machine, which keep adapters in `root`; a token of their own."""

    root: Path
    ports: list[int]
    _token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def urls(self) -> list[str]:
        """Where they listen, in the order of the replicas."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def commands(self) -> dict[str, list[str]]:
        """How each is started, by the name of its job."""
        return {
            f"receiver-{index}": receiver_command(self.root / f"replica-{index}", TOKEN_VARIABLE, port)
            for index, port in enumerate(self.ports)
        }

    @property
    def environment(self) -> dict[str, str]:
        """What they and the proxy must find in the environment."""
        return {TOKEN_VARIABLE: self._token} if self.ports else {}

    @property
    def proxy_config(self) -> dict[str, Any]:
        """Their part of the proxy's configuration."""
        return {"receivers": self.urls, "receiver_token_env": TOKEN_VARIABLE} if self.ports else {}
