"""What vLLM's answers about adapters mean: done, try again, or never.

Pure. Texts as vLLM 0.31 gives them (vllm/entrypoints/openai/models/serving.py, vllm/lora/worker_manager.py,
peft_helper.py and lora_model.py); errors from inside the engine have "Call to add_lora method failed: " in front.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

# Enough for vLLM's longest one-line reason, short enough for a log line.
REASON_LENGTH = 300


@dataclass(frozen=True)
class Answer:
    """A replica's answer: its HTTP status and text, or no status and the reason why none came."""

    status: int | None
    text: str = ""
    timed_out: bool = False


class Meaning(enum.Enum):
    """What to do about an answer."""

    DONE = "done"
    RETRY = "retry"  # the same request may succeed later
    REPLACE = "replace"  # the name is taken, by weights nobody here vouches for
    FINAL = "final"  # the same request fails every time
    UNAVAILABLE = "unavailable"  # the endpoint does not exist on this server


# How a 500 tells of files that are not all there yet: a mount may show a folder before its files and the beginning of a
# file before its end. Python's JSON decoder and text decoder and the safetensors header reader say so at every possible
# cut of the two files (tests/serving/test_adapter_answers.py cuts them everywhere). Any other 500 stays what it is.
UNFINISHED_FILES = re.compile(
    r"doesn't contain tensors"
    r"|line \d+ column \d+ \(char \d+\)"
    r"|codec can't decode bytes? .*: unexpected end of data"
    r"|Error while deserializing header: "
)

# A server whose engine has just died still answers. It is about to leave, and a load does not fail for one that left.
ENGINE_GONE = "EngineCore encountered an issue"

ROUTE_OFF = "no /v1/load_lora_adapter: start the replica with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"

# vLLM answers a load with none of these. They come from what stands before it, or while it starts and stops.
TRANSIENT_STATUSES = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_EARLY,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)


def load_meaning(answer: Answer, name: str) -> Meaning:
    """What an answer to `/v1/load_lora_adapter` for `name` means."""
    if answer.status == HTTPStatus.OK:
        return Meaning.DONE
    if is_transient(answer):
        return Meaning.RETRY
    if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        passes = UNFINISHED_FILES.search(answer.text) or ENGINE_GONE in answer.text
        return Meaning.RETRY if passes else Meaning.FINAL
    reason = message_of(answer)
    # vLLM may replace the path by "<path>" in the text: the words and the name are what can be relied on.
    if answer.status == HTTPStatus.NOT_FOUND and f"Loading lora {name} failed: No adapter found" in reason:
        return Meaning.RETRY
    if answer.status == HTTPStatus.BAD_REQUEST and f"'{name}' has already been loaded" in reason:
        return Meaning.REPLACE
    return Meaning.FINAL


def done_or_gone_meaning(answer: Answer) -> Meaning:
    """What an answer to `/v1/unload_lora_adapter`, `/pause` or `/resume` means.

    A name that is not there any more is unloaded, and a server without the endpoint cannot be paused.
    """
    return Meaning.DONE if answer.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND) else Meaning.RETRY


def reset_meaning(answer: Answer) -> Meaning:
    """What an answer to `/reset_prefix_cache` means; 200 alone is not enough, its `success` may be false."""
    if answer.status == HTTPStatus.NOT_FOUND:
        return Meaning.UNAVAILABLE
    done = answer.status == HTTPStatus.OK and _json(answer.text) == {"success": True}
    return Meaning.DONE if done else Meaning.RETRY


def push_meaning(answer: Answer) -> Meaning:
    """What a receiver's answer to a push means (`rlkit.serving.receiver`)."""
    if pushed_path(answer) is not None:
        return Meaning.DONE
    return Meaning.RETRY if is_transient(answer) else Meaning.FINAL


def pushed_path(answer: Answer) -> str | None:
    """Where a receiver keeps the adapter, or None when the answer is not that of a push that went well."""
    data = _json(answer.text)
    path = data.get("path") if answer.status == HTTPStatus.OK and isinstance(data, dict) else None
    return path if isinstance(path, str) and path else None


def load_reason(answer: Answer) -> str:
    """The reason of a refused load in one line, with what to do where vLLM's own words do not say it."""
    reason = message_of(answer)
    is_route_off = answer.status == HTTPStatus.NOT_FOUND and reason == HTTPStatus.NOT_FOUND.phrase
    return ROUTE_OFF if is_route_off else reason


def message_of(answer: Answer) -> str:
    """The message inside an answer (vLLM's error JSON, FastAPI's `detail`, or plain text), in one short line."""
    data = _json(answer.text)
    message: object = None
    if isinstance(data, dict):
        error = data.get("error", data.get("detail"))
        message = error.get("message") if isinstance(error, dict) else error
    text = " ".join((message if isinstance(message, str) else answer.text).split())
    if not text:
        text = "no answer" if answer.status is None else f"HTTP {answer.status}"
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 1] + "…"


def adapter_paths(answer: Answer) -> dict[str, str] | None:
    """Names and paths of the adapters in an answer to `/v1/models`, or None when it is not such an answer.

    Adapters are the cards with a parent, the base model has none.
    """
    data = _json(answer.text)
    cards = data.get("data") if isinstance(data, dict) else None
    if answer.status != HTTPStatus.OK or not isinstance(cards, list):
        return None
    adapters = [card for card in cards if isinstance(card, dict) and card.get("parent") is not None]
    return {str(card.get("id")): str(card.get("root")) for card in adapters}


def is_transient(answer: Answer) -> bool:
    """Whether the answer says nothing about the request: none came, or it is not the server's own."""
    return answer.status is None or answer.status in TRANSIENT_STATUSES


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
