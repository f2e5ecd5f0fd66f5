"""What the proxy needs to know: where the replicas are, how to route, how adapters get there."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rlkit.errors import BadInput
from rlkit.recipe import POLICY_NAME, RoutingSection, TransportSection
from rlkit.recipe_bounds import NonNegative, Positive
from rlkit.refusals import refusals
from rlkit.serving.bearer import Bearer, bearer_from


def base_url_in(url: str) -> str:
    """A base URL without its last slash. Raises ValueError."""
    parts = urlsplit(url)
    is_written_plainly = url.isascii() and not any(character.isspace() for character in url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_written_plainly:
        raise ValueError("expected base URLs such as http://127.0.0.1:8000")
    # They are shown in logs and counters.
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a base URL has no user, password, query or fragment; tokens come from the environment")
    _ = parts.port  # raises ValueError when it is none
    return url.rstrip("/")


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
    incoming_token_env: str | None = None  # likewise, the one the proxy asks its clients for
    receivers: list[str] = []  # base URLs of the receivers beside the replicas, in their order (transport push)
    receiver_token_env: str | None = None  # likewise, the one the receivers want
    adapter_root: Path | None = None  # adapters are loaded from inside this folder only; None: from anywhere
    port_file: Path | None = None  # the chosen port is written here once the proxy listens
    stats_file: Path | None = None  # `/proxy/stats` is written here every few seconds and at the end
    exit_with_parent: bool = True  # stop when the process that started the proxy is gone

    @field_validator("replicas", "receivers")
    @classmethod
    def _are_urls(cls, urls: list[str]) -> list[str]:
        urls = [base_url_in(url) for url in urls]
        if len(set(urls)) < len(urls):
            raise ValueError("one is listed twice")
        return urls

    @model_validator(mode="after")
    def _fits_together(self) -> ProxyConfig:
        if self.transport.kind == "push":
            if len(self.receivers) != len(self.replicas):
                raise ValueError(
                    f"receivers: transport push needs one beside each of the {len(self.replicas)} replicas, "
                    f"{len(self.receivers)} are given"
                )
            if self.receiver_token_env is None:
                raise ValueError("receiver_token_env: transport push needs the receivers' token")
        elif self.receivers:
            raise ValueError(f"receivers: they take pushed adapters, and transport.kind is {self.transport.kind}")
        if not self.is_local:
            for field in ("incoming_token_env", "adapter_root"):
                if getattr(self, field) is None:
                    raise ValueError(f"{field}: needed when the proxy listens beyond this machine (host {self.host})")
        return self

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the proxy."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name, or every interface

    @property
    def keeps_cache(self) -> bool:
        """Whether `/pause` may leave the KV cache alone: only while every policy version has a name of its own.

        With merged weights the same model name means other weights after a sync, and kept blocks would be stale.
        """
        return self.transport.keep_cache and self.transport.kind != "merged"

    def token(self) -> str | None:
        """The token the replicas want. Raises BadInput when it is named but not set, as do the next two."""
        bearer = bearer_from(self.token_env, "token_env")
        return None if bearer is None else bearer.token

    def incoming_token(self) -> Bearer | None:
        """The token clients must send."""
        return bearer_from(self.incoming_token_env, "incoming_token_env")

    def receiver_token(self) -> Bearer | None:
        """The token the receivers want."""
        return bearer_from(self.receiver_token_env, "receiver_token_env")


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
    return "; ".join(f"{field}: {what}" if field else what for field, what in refusals(error, ProxyConfig))
