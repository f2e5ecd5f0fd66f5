"""A replica without a model: the part of vLLM's HTTP API that TRL and the proxy use, with faults on demand.

For tests and dry runs. Statuses, texts and JSON shapes are those of vLLM 0.31's OpenAI server; what it answers is made
up by `rlkit.serving.emulated_engine`. `python -m rlkit.serving.emulated --port 8000` runs one by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from rlkit.errors import BadInput
from rlkit.serving.emulated_answers import CompletionAnswer, json_answer, model_card, token_ids
from rlkit.serving.emulated_engine import Adapter, EmulatedEngine, LoadRefused, Sampled
from rlkit.serving.emulated_faults import Faults
from rlkit.serving.emulated_sending import cut_off, incomplete, refused, send_stream, send_whole, too_long
from rlkit.serving.emulated_timing import EmulatedTiming, rates_of
from rlkit.simulation.replica import Capacity

# What is under way is dropped first; aiohttp would take 0 for no limit.
SHUTDOWN_S = 0.01

# The last requests a replica remembers, for tests to look at.
KEPT_REQUESTS = 10_000


class EmulatedReplica:
    """One emulated vLLM server on `http://127.0.0.1:<port>`; an async context manager.

    `api_key` is asked for on `/v1` paths as vLLM does. `runtime_loras` and `dev_mode` stand for the two environment
    variables without which vLLM has no adapter endpoints and no `/pause`. With `timing` completions take as long as on
    a GPU and fill its KV cache; without it they take `faults.token_delay_s` a token and no cache.
    """

    def __init__(
        self,
        *,
        engine: Callable[[], EmulatedEngine] = EmulatedEngine,
        api_key: str | None = None,
        runtime_loras: bool = True,
        dev_mode: bool = True,
        keep_alive_s: float = 75.0,
        timing: Callable[[], EmulatedTiming] | None = None,
    ) -> None:
        self.faults = Faults()
        self.requests: list[tuple[str, str, Mapping[str, str]]] = []  # method, path with query, headers
        self.aborted = 0  # completions whose client went away
        self.port = 0
        self._make_engine = engine
        self._api_key = api_key
        self._runtime_loras = runtime_loras
        self._dev_mode = dev_mode
        self._keep_alive_s = keep_alive_s
        self._make_timing = timing
        self._timing: EmulatedTiming | None = None
        self._runner: web.AppRunner | None = None
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._boot()

    def _boot(self) -> None:
        self.engine = self._make_engine()
        self.in_flight = 0
        self._preemptions = 0  # of the timing's, those that are on the page
        self.arrived = asyncio.Event()  # set by every completion that arrives
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_paused(self) -> bool:
        """Whether generation is frozen."""
        return not self._resumed.is_set()

    def freeze(self, frozen: bool = True) -> None:
        """Accept connections and requests but answer none, as a stopped process does; or go on."""
        if frozen:
            self._thawed.clear()
        else:
            self._thawed.set()

    async def start(self, port: int = 0) -> None:
        """Listen on a port (0: any)."""
        self._timing = self._make_timing() if self._make_timing is not None else None
        app = web.Application(client_max_size=0, middlewares=[self._authenticate])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        if self._runtime_loras:
            app.add_routes(
                [web.post("/v1/load_lora_adapter", self._load), web.post("/v1/unload_lora_adapter", self._unload)]
            )
        if self._dev_mode:
            app.add_routes(
                [
                    web.post("/pause", self._pause),
                    web.post("/resume", self._resume),
                    web.get("/is_paused", self._is_paused),
                    web.get("/server_info", self._server_info),
                    web.post("/reset_prefix_cache", self._reset),
                ]
            )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self._keep_alive_s,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening and drop every connection, as a killed server does."""
        if self._timing is not None:
            self._timing.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            assert runner.server is not None
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def restart(self) -> None:
        """Come back on the same port with nothing loaded and all counters at zero."""
        await self.stop()
        self._boot()
        await self.start(self.port)

    async def __aenter__(self) -> EmulatedReplica:
        await self.start(self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    @web.middleware
    async def _authenticate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs, request.headers))
        del self.requests[:-KEPT_REQUESTS]
        await self._thawed.wait()
        if self.faults.gateway is not None:
            return web.Response(status=self.faults.gateway, text="the job is starting")
        wanted = f"Bearer {self._api_key}"
        if self._api_key and request.path.startswith("/v1") and request.headers.get("Authorization") != wanted:
            return json_answer({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return json_answer({"detail": "Not Found"}, status=404)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        engine = self.engine
        running, waiting = (0, self.in_flight) if self.is_paused else (self.in_flight, 0)
        if self._timing is not None:
            replica = self._timing.bring_up_to_date()
            running, waiting = replica.running, len(replica.waiting)
            engine.waiting_for_capacity.set(waiting)
            engine.usage.set(replica.usage)
            engine.preemptions.inc(replica.preemptions - self._preemptions)
            self._preemptions = replica.preemptions
        engine.running.set(running)
        engine.waiting.set(waiting)
        return web.Response(body=engine.metrics_page(), content_type="text/plain", charset="utf-8")

    async def _models(self, request: web.Request) -> web.Response:
        engine = self.engine
        cards = [model_card(engine.model, engine.model, None, engine.max_model_len)]
        cards += [model_card(adapter.name, adapter.path, engine.model, None) for adapter in engine.adapters.values()]
        return json_answer({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.faults.loads:
            match self.faults.loads.popleft():
                case "die":
                    return cut_off(request, web.Response(status=500))
                case "hang":
                    await asyncio.Event().wait()
                case (int(status), str(text)):
                    return web.Response(status=status, text=text, content_type="application/json")
        if refusal := incomplete(body, "lora_name", "lora_path"):
            return refusal
        return self._text_or_error(
            lambda: self.engine.load(
                body["lora_name"],
                body["lora_path"],
                in_place=bool(body.get("load_inplace", False)),
                sees=self.faults.sees,
            )
        )

    async def _unload(self, request: web.Request) -> web.Response:
        body = await request.json()
        if refusal := incomplete(body, "lora_name"):
            return refusal
        return self._text_or_error(lambda: self.engine.unload(body["lora_name"]))

    def _text_or_error(self, action: Callable[[], str]) -> web.Response:
        try:
            return web.Response(text=action())
        except LoadRefused as problem:
            return refused(problem.status, problem.kind, problem.message)

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        if self._drops_control():
            return cut_off(request, web.Response(status=500))
        if request.query.get("mode", "abort") not in ("abort", "wait", "keep"):
            return refused(400, "Bad Request", "1 validation error")
        self._resumed.clear()
        clears = request.query.get("clear_cache", "true").lower() in ("true", "1")
        if clears:
            self._clear_cache()
        if self._timing is not None:
            self._timing.pause(clear_cache=clears)
        return json_answer({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        if self._drops_control():
            return cut_off(request, web.Response(status=500))
        self._resumed.set()
        if self._timing is not None:
            self._timing.resume()
        return json_answer({"status": "resumed"})

    def _drops_control(self) -> bool:
        drops = self.faults.dropped_controls > 0
        self.faults.dropped_controls -= drops
        return drops

    async def _is_paused(self, request: web.Request) -> web.Response:
        return json_answer({"is_paused": self.is_paused})

    async def _reset(self, request: web.Request) -> web.Response:
        if self.in_flight and request.query.get("reset_running_requests", "false").lower() != "true":
            return json_answer({"success": False})
        self._clear_cache()
        if self._timing is not None and not self.is_paused:
            self._timing.pause(clear_cache=True)
            self._timing.resume()
        return json_answer({"success": True})

    def _clear_cache(self) -> None:
        self.engine.clear_cache()
        if self._timing is None:
            self.engine.preemptions.inc(self.in_flight)  # else it counts them itself

    async def _server_info(self, request: web.Request) -> web.Response:
        engine = self.engine
        config: dict[str, Any] = {
            "model_config": {"model": engine.model, "max_model_len": engine.max_model_len, "dtype": "torch.float32"},
            "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1},
            "lora_config": {"max_loras": engine.max_loras, "max_lora_rank": engine.max_lora_rank},
        }
        is_json = request.query.get("config_format", "text") == "json"
        return json_answer({"vllm_config": config if is_json else str(config), "vllm_env": {}, "system_env": {}})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt")
        prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str) else [prompt]
        return await self._generate(request, body, [token_ids(one) for one in prompts], "text_completion")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._generate(request, body, [token_ids(json.dumps(body["messages"]))], "chat.completion")

    async def _generate(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompts: list[list[int]],
        kind: Literal["text_completion", "chat.completion"],
    ) -> web.StreamResponse:
        model = str(body.get("model"))
        fault = self.faults.completions.popleft() if self.faults.completions else None
        adapter = self.engine.bound(model)
        if adapter is None:
            return refused(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
        limit = self.engine.max_model_len
        asked = body.get("max_tokens") or 16
        for one in prompts:
            if not one:
                message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
                return refused(400, "BadRequestError", message, "prompt")
            if len(one) + asked > limit:
                return too_long(limit, asked, len(one))
        self.in_flight += 1
        self.arrived.set()
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
            await self._resumed.wait()
            sampled = [
                self.engine.sample(adapter, one, int(body.get("max_tokens") or 16), body.get("seed"))
                for one in prompts
                for _ in range(body.get("n") or 1)
            ]
            if self._timing is not None:
                await self._take_time(adapter, prompts, sampled)
            wants_ids, wants_logprobs = bool(body.get("return_token_ids")), body.get("logprobs") is not None
            answer = CompletionAnswer(kind, model, prompts, sampled, wants_ids, wants_logprobs)
            send = send_stream if body.get("stream") else send_whole
            response = await send(request, answer, self.faults.token_delay_s, dies=fault == "die-mid-response")
            for one in prompts:
                self.engine.prefill(adapter, one)
            return response
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        except ConnectionResetError:  # the client left while it was answered: nobody is there for an error
            self.aborted += 1
            return web.Response()
        finally:
            self.in_flight -= 1

    async def _take_time(self, adapter: Adapter, prompts: list[list[int]], sampled: list[Sampled]) -> None:
        assert self._timing is not None
        each = len(sampled) // len(prompts)
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(sampled):
                group.create_task(self._timing.generate(adapter, prompts[number // each], len(one.token_ids)))


async def _serve(replica: EmulatedReplica, port: int) -> None:
    await replica.start(port)
    print(replica.url, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run one emulated replica until it is interrupted; prints its address."""
    parser = argparse.ArgumentParser(description="A replica without a model, for tests and dry runs.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--token-delay-s", type=float, default=0.0, help="seconds per generated token")
    parser.add_argument("--gpu", help="take as long as a 1.5 B model on this GPU (h200, h100, ...), KV cache and all")
    parser.add_argument("--kv-tokens", type=int, default=300_000, help="tokens the KV cache holds, with --gpu")
    parser.add_argument("--speed", type=float, default=1.0, help="emulated seconds in a real one, with --gpu")
    parser.add_argument("--mean-tokens", type=float, help="mean length of a completion; default: anything allowed")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--mount", type=Path, help="files in this folder show late")
    parser.add_argument("--mount-lag-s", type=float, default=0.0, help="by so many seconds")
    options = parser.parse_args()

    def engine() -> EmulatedEngine:
        blocks = options.kv_tokens // EmulatedEngine.block_size + 1
        sizes = {"num_gpu_blocks": blocks, "max_model_len": options.max_model_len}
        return EmulatedEngine(**sizes, mean_tokens=options.mean_tokens)

    async def run() -> None:
        timing = None
        if options.gpu is not None:
            rates, capacity = rates_of(options.gpu), Capacity(options.kv_tokens, block_size=EmulatedEngine.block_size)
            timing = partial(EmulatedTiming, rates, capacity, options.speed)
        replica = EmulatedReplica(engine=engine, timing=timing)
        replica.faults.token_delay_s = options.token_delay_s
        replica.faults.mount, replica.faults.mount_lag_s = options.mount, options.mount_lag_s
        await _serve(replica, options.port)

    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(run())
        except BadInput as problem:
            sys.exit(f"emulated: {problem}")


if __name__ == "__main__":
    main()
