"""The control path: what goes to every replica, and one answer made of theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rlkit.errors import BadInput
from rlkit.serving.adapter_answers import Answer, message_of
from rlkit.serving.adapter_commands import OperationReport
from rlkit.serving.adapter_driver import AdapterDriver
from rlkit.serving.adapter_files import confine
from rlkit.serving.control import (
    JSON,
    ControlAnswer,
    ControlRequest,
    Routes,
    error,
    json_answer,
    no_replica,
    text_answer,
)
from rlkit.serving.upstream import Upstreams

# TRL gives /health 5 s.
HEALTH_TIMEOUT_S = 4.0

# A pause waits for the step under way, a reset preempts what runs; on a CPU a step of a full batch takes seconds.
CONTROL_TIMEOUT_S = 60.0

# The first /server_info collects the machine's package list, which takes half a minute on two busy cores.
INFO_TIMEOUT_S = 120.0


class Broadcaster:
    """Handlers of everything that concerns all replicas: pause, resume, adapters, information."""

    def __init__(
        self, upstreams: Upstreams, driver: AdapterDriver, *, keeps_cache: bool, adapter_root: Path | None = None
    ) -> None:
        self._upstreams = upstreams
        self._driver = driver
        self._keeps_cache = keeps_cache
        self._adapter_root = adapter_root
        self._count = len(upstreams.urls)

    def routes(self) -> Routes:
        """All handlers by method and path, which are vLLM's."""
        return {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/load_lora_adapter"): self._load,
            ("POST", "/v1/unload_lora_adapter"): self._unload,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("GET", "/server_info"): self._server_info,
        }

    async def _ask_all(
        self,
        method: str,
        path: str,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
        *,
        everyone: bool = False,
    ) -> dict[int, Answer]:
        """Answers by replica: of those in service, or of every one."""

        async def ask(number: int) -> Answer:
            answer = await self._upstreams.ask(number, method, path, timeout_s, params=params)
            if answer.status is None and not answer.timed_out:
                # A kept connection that the replica closed just then. All that is asked here may be asked twice.
                answer = await self._upstreams.ask(number, method, path, timeout_s, params=params)
            return answer

        replicas = [number for number in range(self._count) if everyone or self._driver.registry.serves(number)]
        answers = await asyncio.gather(*map(ask, replicas))
        return dict(zip(replicas, answers, strict=True))

    async def _health(self, request: ControlRequest) -> ControlAnswer:
        """200 when every replica is in service and healthy."""
        answers = await self._ask_all("GET", "/health", HEALTH_TIMEOUT_S, everyone=True)
        problems = {}
        for number, answer in answers.items():
            if answer.status != HTTPStatus.OK:
                problems[str(number)] = message_of(answer)
            elif not self._driver.registry.serves(number):
                problems[str(number)] = (
                    self._driver.registry.trouble(number) or "its adapters are being brought up to date"
                )
        if problems:
            return error(HTTPStatus.SERVICE_UNAVAILABLE, "not every replica is in service", replicas=problems)
        return ControlAnswer()

    async def _pause(self, request: ControlRequest) -> ControlAnswer:
        params = dict(request.query)
        if self._keeps_cache:
            # vLLM clears the cache by default in every mode, which preempts whatever runs at every sync. Versioned
            # adapter names keep old blocks from being reused without that.
            params["clear_cache"] = "false"
        return await self._switch("/pause", params, paused=True)

    async def _resume(self, request: ControlRequest) -> ControlAnswer:
        return await self._switch("/resume", dict(request.query), paused=False)

    async def _switch(self, path: str, params: dict[str, str], *, paused: bool) -> ControlAnswer:
        answers = await self._ask_all("POST", path, CONTROL_TIMEOUT_S, params)
        unreachable = [number for number, answer in answers.items() if answer.status is None]
        for number in unreachable:
            # It cannot be kept in step; when it joins again it is paused or resumed as the others are by then.
            self._driver.replica_left(number)
            del answers[number]
        refused = _refused(answers)
        if not answers or refused:
            if paused:
                await self._ask_all("POST", "/resume", CONTROL_TIMEOUT_S)
            return _refusal(path, refused)
        self._driver.set_paused(paused, answers)
        return _as_is(next(iter(answers.values())))

    async def _is_paused(self, request: ControlRequest) -> ControlAnswer:
        answers = await self._ask_all("GET", "/is_paused", CONTROL_TIMEOUT_S)
        states = {str(number): (_json(answer) or {}).get("is_paused") for number, answer in answers.items()}
        refused = _refused(answers)
        if not answers or refused:
            return _refusal("/is_paused", refused)
        return json_answer({"is_paused": any(states.values()), "replicas": states})

    async def _reset(self, request: ControlRequest) -> ControlAnswer:
        answers = await self._ask_all("POST", "/reset_prefix_cache", CONTROL_TIMEOUT_S, dict(request.query))
        refused = _refused(answers)
        if not answers or refused:
            return _refusal("/reset_prefix_cache", refused)
        return json_answer({"success": all((_json(answer) or {}).get("success") for answer in answers.values())})

    async def _load(self, request: ControlRequest) -> ControlAnswer:
        """Load on all or none. Never 404: TRL takes that for a server without the endpoint."""
        body = request.fields()
        name, path = body.get("lora_name"), body.get("lora_path")
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            return error(HTTPStatus.BAD_REQUEST, "Both 'lora_name' and 'lora_path' must be provided.")
        if body.get("load_inplace"):
            reason = (
                "load_inplace makes vLLM read the adapter anew for every request: load a new version under a new name"
            )
            return error(HTTPStatus.BAD_REQUEST, reason)
        try:
            await asyncio.to_thread(confine, path, self._adapter_root)
        except BadInput as problem:
            was_resumed, note = await self._resume_after_failure()
            return error(HTTPStatus.FORBIDDEN, f"{problem}; {note}", resumed=was_resumed)
        report = await self._driver.load(name, path)
        if report.ok:
            return text_answer(f"Success: LoRA adapter '{name}' added successfully.")
        return await self._load_failed(report)

    async def _load_failed(self, report: OperationReport) -> ControlAnswer:
        was_resumed, note = await self._resume_after_failure()
        message = f"Loading lora {report.name} failed: {report.reason}; it was taken back from all replicas and {note}"
        replicas = [
            {"replica": number, "attempts": replica.attempts, "reason": replica.reason}
            for number, replica in enumerate(report.replicas)
        ]
        status = HTTPStatus.BAD_GATEWAY
        if report.timed_out:
            status = HTTPStatus.GATEWAY_TIMEOUT
        elif report.refused:
            status = HTTPStatus.CONFLICT
        return error(status, message, replicas=replicas, seconds=report.seconds, resumed=was_resumed)

    async def _resume_after_failure(self) -> tuple[bool, str]:
        """Whether every replica generates again, and what to say of it.

        TRL pauses before a load and does not resume after one that failed: nothing would generate any more.
        """
        resumed = await self._switch("/resume", {}, paused=False)
        was_resumed = resumed.status == HTTPStatus.OK
        return was_resumed, "generation was resumed" if was_resumed else "generation could not be resumed"

    async def _unload(self, request: ControlRequest) -> ControlAnswer:
        name = request.fields().get("lora_name")
        if not isinstance(name, str) or not name:
            return error(HTTPStatus.BAD_REQUEST, "'lora_name' needs to be provided to unload a LoRA adapter.")
        report = await self._driver.unload(name)
        if report.ok:
            return text_answer(f"Success: LoRA adapter '{name}' removed successfully.")
        return error(HTTPStatus.NOT_FOUND, report.reason or "")

    async def _models(self, request: ControlRequest) -> ControlAnswer:
        """The base models with the shortest `max_model_len` of all replicas, and the adapters that all of them hold."""
        answers = await self._ask_all("GET", "/v1/models", CONTROL_TIMEOUT_S)
        lists = {number: _cards(answer) for number, answer in answers.items()}
        cards = [data for data in lists.values() if data is not None]
        if not cards or len(cards) < len(lists):
            return _refusal("/v1/models", {n: a for n, a in answers.items() if lists[n] is None})
        names = set.intersection(*({card["id"] for card in data} for data in cards))
        lengths = [card["max_model_len"] for data in cards for card in data if card.get("max_model_len")]
        merged = [card for card in cards[0] if card["id"] in names]
        for card in merged:
            if card.get("max_model_len"):
                card["max_model_len"] = min(lengths)
        return json_answer({"object": "list", "data": merged})

    async def _server_info(self, request: ControlRequest) -> ControlAnswer:
        """The first replica's, with the limits that all replicas keep; 502 when they serve different models."""
        answers = await self._ask_all("GET", "/server_info", INFO_TIMEOUT_S, dict(request.query))
        refused = _refused(answers)
        if not answers or refused:
            return _refusal("/server_info", refused)
        infos = [_json(answer) or {} for answer in answers.values()]
        configs = [info.get("vllm_config") for info in infos]
        if all(isinstance(config, dict) for config in configs):
            different = _differences(configs)
            if different:
                return error(HTTPStatus.BAD_GATEWAY, f"the replicas do not serve the same model: {different}")
            infos[0]["vllm_config"] |= _common_limits(configs)
        return json_answer(infos[0])


def _differences(configs: list[Any]) -> str | None:
    for name in ("model", "dtype"):
        values = {str((config.get("model_config") or {}).get(name)) for config in configs}
        if len(values) > 1:
            return f"{name} is {' and '.join(sorted(values))}"
    return None


def _common_limits(configs: list[Any]) -> dict[str, Any]:
    loras = [config.get("lora_config") for config in configs]
    lora = None
    if all(loras):
        lora = loras[0] | {name: min(one[name] for one in loras) for name in ("max_loras", "max_lora_rank")}
    parallel = [config.get("parallel_config") or {} for config in configs]
    size = max(one.get("data_parallel_size", 1) for one in parallel)
    return {"lora_config": lora, "parallel_config": parallel[0] | {"data_parallel_size": size}}


def _cards(answer: Answer) -> list[dict[str, Any]] | None:
    """The models in an answer to `/v1/models`; None when it is not such an answer."""
    cards = (_json(answer) or {}).get("data")
    if answer.status != HTTPStatus.OK or not isinstance(cards, list):
        return None
    return cards if all(isinstance(card, dict) and isinstance(card.get("id"), str) for card in cards) else None


def _refused(answers: Mapping[int, Answer]) -> dict[int, Answer]:
    return {number: answer for number, answer in answers.items() if answer.status != HTTPStatus.OK}


def _refusal(path: str, refused: Mapping[int, Answer]) -> ControlAnswer:
    if not refused:
        return no_replica()
    reasons = {str(number): message_of(answer) for number, answer in refused.items()}
    listed = "; ".join(f"replica {number}: {reason}" for number, reason in reasons.items())
    return error(HTTPStatus.BAD_GATEWAY, f"{path}: {listed}", replicas=reasons)


def _as_is(answer: Answer) -> ControlAnswer:
    return ControlAnswer(answer.status or HTTPStatus.OK, answer.text.encode(), JSON)


def _json(answer: Answer) -> dict[str, Any] | None:
    try:
        data = json.loads(answer.text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None
