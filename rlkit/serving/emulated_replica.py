"""A replica without a model: the part of vLLM's HTTP API that TRL and the proxy use, with faults on demand.

For tests and dry runs. Statuses, texts and JSON shapes are those of vLLM 0.31's OpenAI server; what it answers is made
up by `rlkit.serving.emulated_engine`. `rlkit.serving.emulated` runs one by itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from aiohttp import web

from rlkit.serving.emulated_answers import json_answer, model_card, token_ids
from rlkit.serving.emulated_completions import complete
from rlkit.serving.emulated_engine import EmulatedEngine, LoadRefused
from rlkit.serving.emulated_faults import Faults
from rlkit.serving.emulated_sending import cut_off, incomplete, refused
from rlkit.serving.emulated_state import ReplicaState
from rlkit.serving.emulated_timing import EmulatedTiming

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
        self._runner: web.AppRunner | None = None
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.state = ReplicaState(engine())

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> EmulatedEngine:
        """What answers, since the last start."""
        return self.state.engine

    @property
    def in_flight(self) -> int:
        """Completions under way."""
        return self.state.in_flight

    @property
    def arrived(self) -> asyncio.Event:
        """Set by every completion that arrives."""
        return self.state.arrived

    @property
    def is_paused(self) -> bool:
        """Whether generation is frozen."""
        return self.state.is_paused

    def freeze(self, frozen: bool = True) -> None:
        """Accept connections and requests but answer none, as a stopped process does; or go on."""
        if frozen:
            self._thawed.clear()
        else:
            self._thawed.set()

    async def start(self, port: int = 0) -> None:
        """Listen on a port (0: any)."""
        self.state.timing = self._make_timing() if self._make_timing is not None else None
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
        if self.state.timing is not None:
            self.state.timing.close()
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
        self.state = ReplicaState(self._make_engine())
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
        return web.Response(body=self.state.metrics_page(), content_type="text/plain", charset="utf-8")

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
        self.state.pause(clear_cache=request.query.get("clear_cache", "true").lower() in ("true", "1"))
        return json_answer({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        if self._drops_control():
            return cut_off(request, web.Response(status=500))
        self.state.resume()
        return json_answer({"status": "resumed"})

    def _drops_control(self) -> bool:
        drops = self.faults.dropped_controls > 0
        self.faults.dropped_controls -= drops
        return drops

    async def _is_paused(self, request: web.Request) -> web.Response:
        return json_answer({"is_paused": self.is_paused})

    async def _reset(self, request: web.Request) -> web.Response:
        running_too = request.query.get("reset_running_requests", "false").lower() == "true"
        return json_answer({"success": self.state.reset(running_too)})

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
        try:
            return await complete(request, body, prompts, kind, self.state, self.faults)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        except ConnectionResetError:  # the client left while it was answered: nobody is there for an error
            self.aborted += 1
            return web.Response()
