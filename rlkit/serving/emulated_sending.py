"""How an emulated replica sends its answers: whole, token by token, cut off in the middle, or refused as vLLM does."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from rlkit.serving.emulated_answers import CompletionAnswer, compact, error_body, json_answer, missing_fields


async def send_whole(
    request: web.Request, answer: CompletionAnswer, token_delay_s: float, *, dies: bool
) -> web.StreamResponse:
    """One JSON body, after `token_delay_s` for each token of the longest; with `dies` half of it."""
    await asyncio.sleep(token_delay_s * max(len(one.token_ids) for one in answer.sampled))
    data = compact(answer.whole()).encode()
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(data)
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    if dies:
        return cut_off(request, response)
    await response.write(data[len(data) // 2 :])
    return response


async def send_stream(
    request: web.Request, answer: CompletionAnswer, token_delay_s: float, *, dies: bool
) -> web.StreamResponse:
    """Server-sent events, `token_delay_s` before each; with `dies` only the first."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in answer.chunks():
        await asyncio.sleep(token_delay_s)
        await response.write(f"data: {compact(chunk)}\n\n".encode())
        if dies:
            return cut_off(request, response)
    await response.write(b"data: [DONE]\n\n")
    return response


def cut_off(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """`response`, over a connection that is dropped at once, as by a process that was killed."""
    if request.transport is not None:
        request.transport.abort()
    return response


def refused(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    """An error with vLLM's body."""
    return json_answer(error_body(status, kind, message, param), status=status)


def incomplete(body: dict[str, Any], *names: str) -> web.Response | None:
    """The refusal of a body without one of these fields, None where all are there."""
    message = missing_fields(body, *names)
    if message is None:
        return None
    first = next(name for name in names if name not in body)
    return refused(400, "Bad Request", message, f"body.{first}")


def too_long(limit: int, asked: int, given: int) -> web.Response:
    """The refusal of a prompt that leaves no room, all counts in tokens."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {asked} output tokens and your "
        f"prompt contains {given} input tokens, for a total of {given + asked} tokens. Please reduce the length of the "
        f"input prompt or the number of requested output tokens. (parameter=input_tokens, value={given})"
    )
    return refused(400, "BadRequestError", message, "input_tokens")
