"""What the proxy needs to know: where the replicas are, how to route, how adapters get there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlkit.errors import BadInput
from rlkit.recipe import POLICY_NAME, NonNegative, Positive, RoutingSection, TransportSection


class ProxyConfig(BaseModel):
    """The proxy's configuration; a JSON file with these fields, or built in code. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    replicas: Annotated[list[str], Field(min_length=1)]  # base URLs
    host: str = "127.0.0.1"
    port: Annotated[NonNegative, Field(lt=65536)] = 0  # 0: any free one, see port_file
    routing: RoutingSection = RoutingSection()
    transport: TransportSection = TransportSection()
    max_loras: Positive = 6  # the replicas' --max-loras
    policy_prefix: str = f"{POLICY_NAME}-v"  # adapters of this name are swept from a replica that is first met
    token_env: str | None = None  # environment variable with the bearer token that the replicas want
    port_file: Path | None = None  # the chosen port is written here once the proxy listens
    stats_file: Path | None = None  # `/stats` is written here every few seconds and at the end
    exit_with_parent: bool = True  # stop when the process that started the proxy is gone

    @field_validator("replicas")
    @classmethod
    def _are_urls(cls, replicas: list[str]) -> list[str]:
        for url in replicas:
            if not url.startswith(("http://", "https://")):
                raise ValueError("expected base URLs such as http://127.0.0.1:8000")
        if len(set(replicas)) < len(replicas):
            raise ValueError("a replica is listed twice")
        return [url.rstrip("/") for url in replicas]

    @field_validator("transport")
    @classmethod
    def _loads_from_a_path(cls, transport: TransportSection) -> TransportSection:
        if transport.kind == "push":
            raise ValueError(
                "kind push needs a receiver beside each replica; the proxy loads from a path (kind bucket)"
            )
        return transport

    @property
    def keeps_cache(self) -> bool:
        """Whether `/pause` may leave the KV cache alone: only while every policy version has a name of its own.

        With merged weights the same model name means other weights after a sync, and kept blocks would be stale.
        """
        return self.transport.keep_cache and self.transport.kind != "merged"

    def token(self) -> str | None:
        """The upstream bearer token. Raises BadInput when it is named but not set."""
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env)
        if not token:
            raise BadInput(f"token_env: the environment variable {self.token_env} is not set")
        return token


def parse_proxy_config(data: dict[str, Any], source: str) -> ProxyConfig:
    """A configuration from plain data. Raises BadInput naming `source` and the field."""
    try:
        return ProxyConfig.model_validate(data)
    except ValidationError as error:
        raise BadInput(f"{source}: {_in_one_line(error)}") from None


def load_proxy_config(path: Path) -> ProxyConfig:
    """Read a configuration file. Raises BadInput in one line."""
    try:
        return ProxyConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: cannot read the proxy's configuration: {error.strerror}") from None
    except ValidationError as error:
        raise BadInput(f"{path}: {_in_one_line(error)}") from None


def _in_one_line(error: ValidationError) -> str:
    problems = [f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}" for item in error.errors()]
    return "; ".join(problems)
