"""What of a request decides where it goes: its model, the blocks of its prompt, and how many sequences it asks for.

Pure: the decoded JSON body of a completion request in, a `RoutingKey` out. Nothing here refuses a request; what cannot
be cut into blocks has none, and vLLM says what is wrong with it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# English text and source code come to about four characters a token with the usual vocabularies. It only decides how
# coarse a text prompt is cut, so that a block of text is about a block of vLLM's cache.
CHARACTERS_PER_TOKEN = 4

# vLLM refuses a higher `n` (VLLM_MAX_N_SEQUENCES).
MAX_REPEATS = 16384

TOKEN_BYTES = array("I").itemsize


@dataclass(frozen=True)
class RoutingKey:
    """Model (adapter) name, the prompt's whole blocks in order, and the sequences asked for."""

    model: str
    blocks: tuple[bytes, ...]
    sequences: int = 1


def routing_key(body: object, block_size: int) -> RoutingKey:
    """The routing key of a `/v1/completions` or `/v1/chat/completions` body.

    `block_size` is in tokens. A batch of prompts goes to one replica as a whole: its first prompt decides which, and it
    counts as one sequence per prompt and per `n`.
    """
    if not isinstance(body, dict):
        return RoutingKey("", ())
    model = body.get("model")
    prompt, prompts = _first_prompt(body)
    return RoutingKey(model if isinstance(model, str) else "", _blocks(prompt, block_size), prompts * repeats(body))


def repeats(body: dict[str, Any]) -> int:
    """How many sequences a request asks for of each prompt: its `n`, where vLLM would give as many."""
    n = body.get("n")
    return n if isinstance(n, int) and not isinstance(n, bool) and 0 < n <= MAX_REPEATS else 1


def token_blocks(tokens: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """Whole blocks of `block_size` token ids as bytes; the rest is left out. Not token ids at all: no blocks."""
    try:
        data = array("I", tokens[: len(tokens) - len(tokens) % block_size]).tobytes()
    except (OverflowError, TypeError):
        return ()
    size = block_size * TOKEN_BYTES
    return tuple(data[start : start + size] for start in range(0, len(data), size))


def text_blocks(text: str, block_size: int) -> tuple[bytes, ...]:
    """Whole blocks of about `block_size` tokens of text; the rest is left out."""
    data = text.encode("utf-8", "surrogatepass")
    size = block_size * CHARACTERS_PER_TOKEN
    return tuple(data[start : start + size] for start in range(0, len(data) - size + 1, size))


def _first_prompt(body: dict[str, Any]) -> tuple[object, int]:
    if "messages" in body:
        # Tools are rendered in front of the conversation by the chat templates that know them.
        conversation = [body.get("tools"), body["messages"]]
        try:
            return json.dumps(conversation, ensure_ascii=False), 1
        except RecursionError:  # nested deeper than Python writes, though not deeper than it was read
            return None, 1
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        return prompt[0], len(prompt)
    return prompt, 1


def _blocks(prompt: object, block_size: int) -> tuple[bytes, ...]:
    if isinstance(prompt, str):
        return text_blocks(prompt, block_size)
    if isinstance(prompt, list):
        return token_blocks(prompt, block_size)
    return ()
