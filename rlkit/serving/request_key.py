"""What of a completion request's bytes decides where it goes, without reading a prompt twice. Pure.

The rollouts of a group have the same prompt and differ in a few bytes around it (each has its own seed). Reading a
prompt of 500 tokens and hashing it takes longer than all the rest of a proxy's work, so prompts that were read are kept
by their JSON text.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from rlkit.serving.prefix_index import prefix_chain
from rlkit.serving.prompt_blocks import repeats, routing_key

# The prompts of 1,024 rollouts in flight, in groups of eight and with 4 KB each, are half a megabyte. 16 MB are as many
# prompts of 32 k tokens.
KEPT_BYTES = 16 * 1024**2

# What an entry takes beside its text and its hashes: the key, two bytes objects, a place in the dictionary.
ENTRY_BYTES = 300


@dataclass(slots=True)
class RequestKey:
    """Model (adapter) name, the prompt's chained hashes (`prefix_chain`), and the sequences asked for."""

    model: str
    chain: bytes
    sequences: int


class RequestKeys:
    """Reads the keys of requests; `block_size` is in tokens and may change."""

    def __init__(self, block_size: int, kept_bytes: int = KEPT_BYTES) -> None:
        self._block_size = block_size
        self._limit = kept_bytes
        self._bytes = 0
        self._chains: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        # Stands in for a prompt's JSON text. It cannot be guessed, so whatever has it as its prompt was given it here.
        self._mark = secrets.token_hex(16)
        self._mark_text = f'"{self._mark}"'.encode()

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @block_size.setter
    def block_size(self, size: int) -> None:
        if size != self._block_size:
            self._block_size = size
            self._chains.clear()
            self._bytes = 0

    def read(self, body: bytes) -> RequestKey:
        """The key of a body; what is not a completion request has an empty one, and vLLM says what is wrong with it."""
        return self._read_kept(body) or self._key(_decoded(body))

    def _read_kept(self, body: bytes) -> RequestKey | None:
        # A prompt of token ids ends at the first bracket behind the one that opens it. Where that guess is wrong (a
        # prompt of texts, a batch, a field of this name somewhere else), one of the two parts is not JSON, or the
        # prompt is not the mark; JSON's grammar leaves no third way.
        name = body.find(b'"prompt"')
        start = body.find(b"[", name) if name >= 0 else -1
        end = body.find(b"]", start) + 1 if start >= 0 else 0
        if not end:
            return None
        text = body[start:end]
        try:
            fields = orjson.loads(body[:start] + self._mark_text + body[end:])
        except orjson.JSONDecodeError:
            return None
        if not isinstance(fields, dict) or fields.get("prompt") != self._mark or "messages" in fields:
            return None
        model = fields.get("model")
        if not isinstance(model, str):
            return None
        kept = self._chains.get((model, text))
        if kept is not None:
            return RequestKey(model, kept, repeats(fields))
        prompt = _decoded(text)
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
            return None
        fields["prompt"] = prompt
        key = self._key(fields)
        self._keep(model, text, key.chain)
        return key

    def _key(self, fields: Any) -> RequestKey:
        key = routing_key(fields, self._block_size)
        return RequestKey(key.model, prefix_chain(key.model, key.blocks), key.sequences)

    def _keep(self, model: str, text: bytes, chain: bytes) -> None:
        size = len(text) + len(chain) + ENTRY_BYTES
        if size > self._limit:
            return
        self._chains[model, text] = chain
        self._bytes += size
        while self._bytes > self._limit:
            (_, oldest), hashes = self._chains.popitem(last=False)
            self._bytes -= len(oldest) + len(hashes) + ENTRY_BYTES


def _decoded(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    # What Python's own parser takes beyond JSON (NaN, other encodings), vLLM takes, too.
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
