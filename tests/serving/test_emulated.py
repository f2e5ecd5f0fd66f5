from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlkit.serving.emulated_engine import EmulatedEngine, LoadRefused
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.vllm_metrics import read_page

Write = Callable[..., str]

PROMPT = list(range(40))


def refusal(engine: EmulatedEngine, name: str, path: str) -> tuple[int, str, str]:
    with pytest.raises(LoadRefused) as refused:
        engine.load(name, path)
    return refused.value.status, refused.value.kind, refused.value.message


def failed_in_worker(reason: str) -> str:
    return (
        f"Call to add_lora method failed: Worker failed with error '{reason}', please check the stack trace above "
        "for the root cause"
    )


def test_the_texts_of_a_load(adapter: Write, tmp_path: Path) -> None:
    engine = EmulatedEngine()
    path = adapter("a")
    assert engine.load("a", path) == "Success: LoRA adapter 'a' added successfully."
    assert refusal(engine, "a", path)[:2] == (400, "InvalidUserInput")
    assert "has already been loaded" in refusal(engine, "a", path)[2]
    assert refusal(engine, "", path)[2] == "Both 'lora_name' and 'lora_path' must be provided."
    assert "conflicts with a served base model" in refusal(engine, engine.model, path)[2]
    assert refusal(engine, "b", "/nowhere") == (
        404,
        "NotFoundError",
        "Loading lora b failed: No adapter found for /nowhere",
    )
    assert refusal(engine, "b", str(tmp_path / "b"))[2] == "Loading lora b failed: No adapter found for <path>"
    status, _, message = refusal(engine, "c", adapter("c", rank=16))
    assert (status, message) == (
        500,
        failed_in_worker("LoRA rank 16 is greater than max_lora_rank 8."),
    )


def test_half_written_adapters(adapter: Write) -> None:
    engine = EmulatedEngine()
    folder = Path(adapter("a"))
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    assert "incomplete metadata" in refusal(engine, "a", str(folder))[2]
    weights.unlink()
    assert refusal(engine, "a", str(folder))[::2] == (
        500,
        failed_in_worker("<path> doesn't contain tensors"),
    )
    text = config.read_text()
    config.write_text(text[:5])
    assert refusal(engine, "a", str(folder))[0] == 500
    config.unlink()
    assert refusal(engine, "a", str(folder))[0] == 404
    config.write_text(text)
    weights.write_bytes(whole)
    engine.load("a", str(folder))


def test_a_name_used_again_reuses_the_old_weights_blocks_until_the_cache_is_cleared(adapter: Write) -> None:
    """What was measured on vLLM 0.31, and why the registry resets before it loads a name again."""
    fresh = EmulatedEngine()
    fresh.load("v1", adapter("v1", weights=2.0))
    expected = fresh.sample("v1", PROMPT, 4, seed=1)

    engine = EmulatedEngine()
    engine.load("v1", adapter("v1", weights=1.0))
    engine.sample("v1", PROMPT, 4, seed=1)
    engine.unload("v1")
    engine.load("v1", adapter("v1", weights=2.0))
    stale = engine.sample("v1", PROMPT, 4, seed=1)
    assert stale.token_ids == expected.token_ids
    assert stale.logprobs != expected.logprobs
    engine.clear_cache()
    assert engine.sample("v1", PROMPT, 4, seed=1) == expected


def test_a_request_keeps_the_weights_it_began_with_and_fills_the_cache_with_them(adapter: Write) -> None:
    """Why the registry ends the requests of a name before the name gets other weights."""
    engine = EmulatedEngine()
    engine.load("v1", adapter("v1", weights=1.0))
    running = engine.bound("v1")
    assert running is not None
    before = engine.sample(running, PROMPT, 4, seed=1)
    engine.unload("v1")
    engine.load("v1", adapter("v1", weights=2.0))
    assert engine.sample(running, PROMPT, 4, seed=1) == before
    engine.clear_cache()
    engine.prefill(running, PROMPT)  # it is computed again
    after = engine.sample("v1", PROMPT, 4, seed=1)
    engine.clear_cache()
    assert engine.sample("v1", PROMPT, 4, seed=1) != after
    assert engine.bound("nobody") is None


def test_the_prefix_cache_is_as_large_as_the_kv_cache() -> None:
    engine = EmulatedEngine(num_gpu_blocks=5)
    for first in range(4):
        engine.sample(engine.model, [first, *range(33)], 1, seed=1)
    assert len(engine.prefix_cache) == 4
    before = engine.hits._value.get()
    engine.sample(engine.model, [3, *range(33)], 1, seed=1)
    assert engine.hits._value.get() - before == 32


def test_every_server_with_the_same_weights_answers_the_same(adapter: Write) -> None:
    path = adapter("v1")
    answers = []
    for _ in range(2):
        engine = EmulatedEngine()
        engine.load("v1", path)
        answers.append(engine.sample("v1", PROMPT, 8, seed=5))
    assert answers[0] == answers[1]
    assert engine.sample("emulated", PROMPT, 8, seed=5).logprobs != answers[0].logprobs


async def test_completions_have_the_fields_that_trl_reads(
    replicas: list[EmulatedReplica], http: aiohttp.ClientSession
) -> None:
    body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, "logprobs": 0, "seed": 3}
    async with http.post(f"{replicas[0].url}/v1/completions", json=body) as response:
        answer = await response.json()
    choice = answer["choices"][0]
    assert choice["token_ids"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) <= 5
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    async with http.get(f"{replicas[0].url}/metrics") as response:
        reading = read_page(await response.text())
    assert reading.request_success_total == 1
    assert reading.prompt_tokens_total == len(PROMPT)
    assert reading.generation_tokens_total == len(choice["token_ids"])
    assert reading.block_size == 16
    assert reading.capacity_tokens == 999 * 16


async def test_a_stream_says_the_same_as_the_whole(
    replicas: list[EmulatedReplica], http: aiohttp.ClientSession
) -> None:
    body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 9, "return_token_ids": True, "seed": 3}
    async with http.post(f"{replicas[0].url}/v1/completions", json=body) as response:
        whole = (await response.json())["choices"][0]
    async with http.post(f"{replicas[0].url}/v1/completions", json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        events = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n") if event]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


async def test_the_control_endpoints(replicas: list[EmulatedReplica], http: aiohttp.ClientSession) -> None:
    url = replicas[0].url

    async def ask(method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with http.request(method, url + path, **options) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    assert await ask("POST", "/pause?mode=keep") == (200, {"status": "paused"})
    assert await ask("GET", "/is_paused") == (200, {"is_paused": True})
    assert await ask("POST", "/resume") == (200, {"status": "resumed"})
    assert await ask("POST", "/reset_prefix_cache") == (200, {"success": True})
    assert await ask("GET", "/health") == (200, "")
    status, models = await ask("GET", "/v1/models")
    assert models["data"][0]["max_model_len"] == 4096
    status, info = await ask("GET", "/server_info?config_format=json")
    assert info["vllm_config"]["lora_config"]["max_loras"] == 6
    assert isinstance((await ask("GET", "/server_info"))[1]["vllm_config"], str)
    status, answer = await ask("POST", "/v1/completions", json={"model": "nobody", "prompt": "x"})
    assert (status, answer["error"]["message"]) == (404, "The model `nobody` does not exist.")
    status, answer = await ask("POST", "/v1/unload_lora_adapter", json={"lora_name": "x"})
    assert (status, answer["error"]["message"]) == (404, "The lora adapter 'x' cannot be found.")


async def test_what_a_server_without_its_flags_answers(http: aiohttp.ClientSession) -> None:
    async with EmulatedReplica(runtime_loras=False, dev_mode=False, api_key="secret") as replica:
        for path in ("/v1/load_lora_adapter", "/pause"):
            headers = {"Authorization": "Bearer secret"}
            async with http.post(replica.url + path, json={}, headers=headers) as response:
                assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
        async with http.get(f"{replica.url}/v1/models") as response:
            assert (response.status, await response.json()) == (401, {"error": "Unauthorized"})


async def test_completions_that_go_wrong(replicas: list[EmulatedReplica], http: aiohttp.ClientSession) -> None:
    replica = replicas[0]
    replica.faults.completions.extend([(503, "not now"), "garbage", "die", "die-mid-response"])
    body = {"model": "emulated", "prompt": PROMPT}
    async with http.post(f"{replica.url}/v1/completions", json=body) as response:
        assert (response.status, await response.text()) == (503, "not now")
    for error in (aiohttp.ClientResponseError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError):
        with pytest.raises(error):
            async with http.post(f"{replica.url}/v1/completions", json=body) as response:
                await response.read()
    async with http.post(f"{replica.url}/v1/completions", json=body) as response:
        assert response.status == 200


async def test_a_frozen_replica_answers_when_it_is_thawed(
    replicas: list[EmulatedReplica], http: aiohttp.ClientSession
) -> None:
    replicas[0].freeze()
    asking = asyncio.create_task(http.get(f"{replicas[0].url}/health"))
    while not replicas[0].requests:
        await asyncio.sleep(0)
    assert not asking.done()
    replicas[0].freeze(False)
    async with await asking as response:
        assert response.status == 200


async def test_a_killed_replica_drops_what_hangs(replicas: list[EmulatedReplica], http: aiohttp.ClientSession) -> None:
    async def complete() -> None:
        body = {"model": "emulated", "prompt": PROMPT}
        async with http.post(f"{replicas[0].url}/v1/completions", json=body) as response:
            await response.read()

    async with http.post(f"{replicas[0].url}/pause?mode=keep") as response:
        assert response.status == 200
    hanging = asyncio.create_task(complete())
    await replicas[0].arrived.wait()
    await replicas[0].stop()
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await hanging
    await replicas[0].restart()
    assert not replicas[0].is_paused


async def test_files_on_a_mount_show_late(
    replicas: list[EmulatedReplica], http: aiohttp.ClientSession, adapter: Write, tmp_path: Path
) -> None:
    replica = replicas[0]
    replica.faults.mount, replica.faults.mount_lag_s = tmp_path / "mount", 100.0
    path = adapter("mount/a")

    async def load(name: str, path: str) -> tuple[int, str]:
        body = {"lora_name": name, "lora_path": path}
        async with http.post(f"{replica.url}/v1/load_lora_adapter", json=body) as response:
            return response.status, await response.text()

    assert (await load("a", path))[0] == 404
    config, weights = Path(path) / "adapter_config.json", Path(path) / "adapter_model.safetensors"
    os.utime(config, (0, 0))
    status, text = await load("a", path)
    assert (status, "doesn't contain tensors" in text) == (500, True)
    os.utime(weights, (0, 0))
    assert (await load("a", path))[0] == 200
    assert (await load("b", adapter("elsewhere/b")))[0] == 200


def vllm_sources() -> str:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    root = Path(spec.origin).parent
    files = [
        "entrypoints/openai/models/serving.py",
        "entrypoints/serve/dev/rlhf/api_router.py",
        "entrypoints/serve/dev/cache/api_router.py",
        "entrypoints/serve/middleware/authenticate.py",
        "exceptions.py",
        "lora/peft_helper.py",
        "lora/lora_model.py",
        "v1/metrics/loggers.py",
        "v1/worker/lora_model_runner_mixin.py",
        "v1/engine/core.py",
        "v1/engine/exceptions.py",
        "v1/executor/multiproc_executor.py",
    ]
    # Long texts are written as adjacent literals over several lines: join them.
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join((root / file).read_text() for file in files))


@pytest.mark.parametrize(
    "text",
    [
        "Success: LoRA adapter '{lora_name}' added successfully.",
        "Success: LoRA adapter '{lora_name}' removed successfully.",
        "Both 'lora_name' and 'lora_path' must be provided.",
        "The lora adapter '{request.lora_name}' conflicts with a served base model.",
        "has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True.",
        "The lora adapter '{request.lora_name}' cannot be found.",
        "'lora_name' needs to be provided to unload a LoRA adapter.",
        "The model `{model_name}` does not exist.",
        "Loading lora {lora_name} failed: No adapter found for {lora_path}",
        "LoRA rank {self.r} is greater than max_lora_rank {lora_config.max_lora_rank}.",
        "{lora_dir} doesn't contain tensors",
        "Missing required configuration fields: {missing_fields}",
        "EngineCore encountered an issue",
        "Call to {name} method failed: {str(e)}",
        "Worker failed with error '{result}', please check the stack trace above for the root cause",
        '{"status": "paused"}',
        '{"status": "resumed"}',
        '{"is_paused": paused}',
        '{"success": bool(success)}',
        '{"error": "Unauthorized"}',
        'name="vllm:num_requests_running"',
        'name="vllm:num_requests_waiting"',
        'name="vllm:kv_cache_usage_perc"',
        'name="vllm:num_preemptions"',
        'name="vllm:prompt_tokens"',
        'name="vllm:generation_tokens"',
        'name="vllm:prefix_cache_queries"',
        'name="vllm:prefix_cache_hits"',
        'name="vllm:request_success"',
        '"vllm:cache_config_info"',
    ],
)
def test_the_installed_vllm_still_says_so(text: str) -> None:
    assert text in vllm_sources()
