"""What the control path hears and says: a request with its whole body, an answer in one piece. Pure."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"

# Seconds a client should wait; replicas out of service are asked once a second whether they are back.
RETRY_AFTER = {"Retry-After": "1"}


@dataclass(frozen=True)
class ControlRequest:
    """A request that is not for one replica; of a query name that comes twice, the last value."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def fields(self) -> dict[str, Any]:
        """The body as a JSON object; empty when it is not one."""
        try:
            data = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return data if isinstance(data, dict) else {}


@dataclass(frozen=True)
class ControlAnswer:
    """An answer in one piece."""

    status: int = HTTPStatus.OK
    body: bytes = b""
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[ControlRequest], Awaitable[ControlAnswer]]
Routes = dict[tuple[str, str], Handler]  # by method and path


def json_answer(data: Any, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> ControlAnswer:
    """`data` as JSON."""
    return ControlAnswer(status, json.dumps(data).encode(), JSON, headers or {})


def text_answer(text: str) -> ControlAnswer:
    """200 with a line of text, as vLLM answers to an adapter that was loaded."""
    return ControlAnswer(body=text.encode())


def error(status: HTTPStatus, message: str, headers: Mapping[str, str] | None = None, **more: Any) -> ControlAnswer:
    """An error in the JSON that vLLM's clients read, with further fields beside the message."""
    kind = status.phrase.replace(" ", "") + "Error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": int(status)} | more}
    return json_answer(body, status, headers)


def no_replica() -> ControlAnswer:
    """503 to whatever needs a replica while none is in service."""
    return error(HTTPStatus.SERVICE_UNAVAILABLE, "no replica is in service; see /health", RETRY_AFTER)
