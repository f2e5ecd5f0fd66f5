"""The JSON an emulated replica answers with, in the shapes of vLLM 0.31's OpenAI server."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlkit.serving.emulated_engine import Sampled


def error_body(status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    """vLLM's error JSON."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def model_card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    """One entry of `/v1/models`: the base model has a length, an adapter a parent."""
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def token_ids(prompt: object) -> list[int]:
    """A prompt as token ids; text is one token a byte."""
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt) if isinstance(prompt, list) else []


@dataclass
class CompletionAnswer:
    """The answer to one completion request: `prompts` times `repeats` sequences."""

    kind: Literal["text_completion", "chat.completion"]
    model: str
    prompts: Sequence[list[int]]
    sampled: Sequence[Sampled]
    wants_token_ids: bool
    wants_logprobs: bool
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        read, written = sum(map(len, self.prompts)), sum(len(one.token_ids) for one in self.sampled)
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(index, one) for index, one in enumerate(self.sampled)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {
                "prompt_tokens": read,
                "total_tokens": read + written,
                "completion_tokens": written,
                "prompt_tokens_details": None,
            },
            "kv_transfer_params": None,
        }

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The answer as stream events, one token each (the first sequence only)."""
        one = self.sampled[0]
        for position, token in enumerate(one.token_ids):
            is_last = position == len(one.token_ids) - 1
            single = Sampled([token], [one.logprobs[position]], one.finish_reason)
            choice = self._choice(0, single) | {"finish_reason": one.finish_reason if is_last else None}
            if self.kind == "chat.completion":
                choice["delta"] = choice.pop("message")
            yield {
                "id": self.id,
                "object": f"{self.kind}.chunk" if self.kind == "chat.completion" else self.kind,
                "created": self.created,
                "model": self.model,
                "choices": [choice],
            }

    def _choice(self, index: int, one: Sampled) -> dict[str, Any]:
        tokens = [f" {token}" for token in one.token_ids]
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": None,
            "token_ids": list(one.token_ids) if self.wants_token_ids else None,
        }
        if self.kind == "chat.completion":
            return choice | {"message": {"role": "assistant", "content": "".join(tokens)}}
        if self.wants_logprobs:
            choice["logprobs"] = {
                "text_offset": [sum(map(len, tokens[:position])) for position in range(len(tokens))],
                "token_logprobs": list(one.logprobs),
                "tokens": tokens,
                "top_logprobs": [{text: value} for text, value in zip(tokens, one.logprobs, strict=True)],
            }
        prompt = self.prompts[index * len(self.prompts) // len(self.sampled)] if self.wants_token_ids else None
        return choice | {"text": "".join(tokens), "prompt_logprobs": None, "prompt_token_ids": prompt}
