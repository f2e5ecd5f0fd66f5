"""What an emulated replica answers to a completion: refusals in vLLM's words, faults on demand, or made-up tokens."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from aiohttp import web

from rlkit.serving.emulated_answers import CompletionAnswer
from rlkit.serving.emulated_faults import Faults
from rlkit.serving.emulated_sending import cut_off, refused, send_stream, send_whole, too_long
from rlkit.serving.emulated_state import ReplicaState

# What vLLM generates where nobody says.
DEFAULT_TOKENS = 16


async def complete(
    request: web.Request,
    body: dict[str, Any],
    prompts: list[list[int]],
    kind: Literal["text_completion", "chat.completion"],
    state: ReplicaState,
    faults: Faults,
) -> web.StreamResponse:
    """Answer a request for completions of `prompts` (token ids); it counts as in flight until then."""
    model = str(body.get("model"))
    fault = faults.completions.popleft() if faults.completions else None
    adapter = state.engine.bound(model)
    if adapter is None:
        return refused(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    limit, asked = state.engine.max_model_len, int(body.get("max_tokens") or DEFAULT_TOKENS)
    for one in prompts:
        if not one:
            message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            return refused(400, "BadRequestError", message, "prompt")
        if len(one) + asked > limit:
            return too_long(limit, asked, len(one))
    state.in_flight += 1
    state.arrived.set()
    try:
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "die":
            return cut_off(request, web.Response(status=500))
        if fault == "garbage":
            if request.transport is not None:
                request.transport.write(b"\x00\x01 no HTTP at all\r\n\r\n")
            return cut_off(request, web.Response(status=500))
        if isinstance(fault, tuple):
            return web.Response(status=fault[0], text=fault[1])
        await state.resumed.wait()
        sampled = [
            state.engine.sample(adapter, one, asked, body.get("seed"))
            for one in prompts
            for _ in range(body.get("n") or 1)
        ]
        await state.take_time(adapter, prompts, sampled)
        wants_ids, wants_logprobs = bool(body.get("return_token_ids")), body.get("logprobs") is not None
        answer = CompletionAnswer(kind, model, prompts, sampled, wants_ids, wants_logprobs)
        send = send_stream if body.get("stream") else send_whole
        response = await send(request, answer, faults.token_delay_s, dies=fault == "die-mid-response")
        for one in prompts:
            state.engine.prefill(adapter, one)
        return response
    finally:
        state.in_flight -= 1
