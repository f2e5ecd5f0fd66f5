"""The JSON an emulated replica answers with, in the shapes of vLLM 0.31's OpenAI server."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from rlkit.serving.emulated_engine import Sampled

# Names the version and the settings of the server that answered.
FINGERPRINT = "vllm-0.31.0-emulated"


def json_answer(data: Any, status: int = 200) -> web.Response:
    """JSON without spaces, as vLLM's server writes it: who looks for a part of the text finds it in both."""
    return web.json_response(data, status=status, dumps=compact)


def compact(data: Any) -> str:
    """One line of JSON without spaces."""
    return json.dumps(data, separators=(",", ":"))


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
        "permission": [_PERMISSION | {"id": f"modelperm-{uuid.uuid4().hex[:16]}", "created": int(time.time())}],
    }


_PERMISSION = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


def missing_fields(body: dict[str, Any], *names: str) -> str | None:
    """What vLLM says of a body without required fields, or None; all of them are listed."""
    missing = [name for name in names if name not in body]
    if not missing:
        return None
    given = f"<dict of {len(body)} items>"
    lines = [
        f"  {{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required', 'input': '{given}'}}"
        for name in missing
    ]
    count = f"{len(missing)} validation error{'s' if len(missing) > 1 else ''}"
    return "\n".join([f"{count}:", *lines])


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
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex[:16]}"

    @property
    def _is_chat(self) -> bool:
        return self.kind == "chat.completion"

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        read, written = sum(map(len, self.prompts)), sum(len(one.token_ids) for one in self.sampled)
        answer: dict[str, Any] = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(index, one) for index, one in enumerate(self.sampled)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                "prompt_tokens": read,
                "total_tokens": read + written,
                "completion_tokens": written,
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        if self._is_chat:
            answer |= {"prompt_logprobs": None, "prompt_token_ids": self._prompt_of(0), "prompt_text": None}
        return answer

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The answer as stream events, one token each (the first sequence only); a chat begins with its role."""
        one = self.sampled[0]
        head = {
            "id": self.id,
            "object": "chat.completion.chunk" if self._is_chat else self.kind,
            "created": self.created,
            "model": self.model,
        }
        prompt = self._prompt_of(0)
        if self._is_chat:
            delta = {"role": "assistant", "content": ""}
            first = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield head | {"choices": [first], "prompt_token_ids": prompt, "prompt_text": None}
        offset = 0
        for position, token in enumerate(one.token_ids):
            is_last = position == len(one.token_ids) - 1
            single = Sampled([token], [one.logprobs[position]], one.finish_reason)
            choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs(single, offset)}
            choice["finish_reason"] = one.finish_reason if is_last else None
            choice["token_ids"] = [token] if self.wants_token_ids else None
            if self._is_chat:
                choice["delta"] = {"content": _text(token)}
                if is_last:
                    choice["stop_reason"] = None
            else:
                choice |= {"text": _text(token), "stop_reason": None}
                choice["prompt_token_ids"] = prompt if position == 0 else None
            offset += len(_text(token))
            yield head | {"choices": [choice]} | ({"system_fingerprint": FINGERPRINT} if is_last else {})

    def _choice(self, index: int, one: Sampled) -> dict[str, Any]:
        text = "".join(map(_text, one.token_ids))
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(one),
            "finish_reason": one.finish_reason,
            "stop_reason": None,
            "token_ids": list(one.token_ids) if self.wants_token_ids else None,
            "routed_experts": None,
        }
        if self._is_chat:
            nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            return choice | {"message": {"role": "assistant", "content": text, **nothing}}
        prompt = self._prompt_of(index * len(self.prompts) // len(self.sampled))
        return choice | {"text": text, "prompt_logprobs": None, "prompt_token_ids": prompt}

    def _prompt_of(self, number: int) -> list[int] | None:
        return self.prompts[number] if self.wants_token_ids else None

    def _logprobs(self, one: Sampled, offset: int = 0) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        tokens = [_text(token) for token in one.token_ids]
        if self._is_chat:
            return {
                "content": [
                    {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, value in zip(tokens, one.logprobs, strict=True)
                ]
            }
        return {
            "text_offset": [offset + sum(map(len, tokens[:position])) for position in range(len(tokens))],
            "token_logprobs": list(one.logprobs),
            "tokens": tokens,
            "top_logprobs": [{text: value} for text, value in zip(tokens, one.logprobs, strict=True)],
        }


def _text(token: int) -> str:
    return f" {token}"
