from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable

import aiohttp
import pytest
from proxy_bench import POLICY, PROMPT, ProxyBench, eventually, proxied

from rlkit.recipe import RoutingSection
from rlkit.serving.emulated_engine import EmulatedEngine
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.forward import DEFAULT_BLOCK_SIZE
from rlkit.serving.replica_health import MAX_FAILURES, Outcomes

Write = Callable[..., str]
Replicas = list[EmulatedReplica]


def outcomes(bench: ProxyBench, replica: int) -> Outcomes:
    return bench.proxy._forwarder.outcomes[replica]


async def test_an_answer_passes_through_unchanged(replicas: Replicas, http: aiohttp.ClientSession) -> None:
    body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 4, "seed": 1, "return_token_ids": True, "logprobs": 0}
    async with http.post(f"{replicas[1].url}/v1/completions", json=body) as response:
        direct = await response.json()
    async with proxied(replicas) as bench:
        async with bench.session.post(f"{bench.proxy.url}/v1/completions", json=body) as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            answer = await response.json()
        volatile = {"id", "created"}
        assert {k: v for k, v in answer.items() if k not in volatile} == {
            k: v for k, v in direct.items() if k not in volatile
        }


async def test_the_request_passes_through_but_for_its_connection(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        headers = {
            "X-Request-Id": "7",
            "Authorization": "Bearer mine",
            "Connection": "keep-alive, X-Drop",
            "X-Drop": "1",
        }
        await bench.post("/v1/completions?a=b", {"model": "emulated", "prompt": PROMPT}, headers=headers)
        method, path, received = replicas[0].requests[-1]
        assert (method, path) == ("POST", "/v1/completions?a=b")
        assert received["X-Request-Id"] == "7"
        assert received["Authorization"] == "Bearer mine"
        assert received["Host"] == replicas[0].url.removeprefix("http://")
        assert "X-Drop" not in received


async def test_the_upstream_token_replaces_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICA_TOKEN", "secret")
    async with EmulatedReplica(api_key="secret") as replica:
        async with proxied([replica], token_env="REPLICA_TOKEN") as bench:
            headers = {"Authorization": "Bearer something-else"}
            status, _ = await bench.post("/v1/completions", {"model": "emulated", "prompt": PROMPT}, headers=headers)
            assert status == 200
            assert replica.requests[-1][2]["Authorization"] == "Bearer secret"
        async with proxied([replica], token_env="REPLICA_TOKEN") as bench:
            status, _ = await bench.get("/v1/models")
            assert status == 200


async def test_a_group_stays_together_and_everything_is_counted(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        for problem in range(4):
            prompt = [*PROMPT[:16], *(1000 * problem + i for i in range(100))]
            await asyncio.gather(*(bench.complete(prompt=prompt, seed=seed) for seed in range(8)))
        _, stats = await bench.get("/proxy/stats")
        assert stats["routed"] == stats["affinity"] + stats["spilled"] + stats["unmatched"] == 32
        assert stats["affinity"] >= 4 * 7 - 1
        for replica in stats["per_replica"]:
            assert replica["routed"] == replica["completed"] == replica["vllm"]["request_success_total"] > 0
            assert replica["in_flight"] == 0
        assert 8 <= stats["max_inflight"] <= 9 * 8


async def test_round_robin(replicas: Replicas) -> None:
    async with proxied(replicas, routing=RoutingSection(policy="round-robin")) as bench:
        for _ in range(6):
            await bench.complete()
        _, stats = await bench.get("/proxy/stats")
        assert [replica["routed"] for replica in stats["per_replica"]] == [3, 3]
        assert stats["round_robin"] == stats["routed"] == 6


async def test_the_block_size_is_the_replicas_own_unless_given() -> None:
    async with EmulatedReplica(engine=lambda: EmulatedEngine(block_size=32)) as replica:
        async with proxied([replica]) as bench:
            assert bench.proxy.stats()["block_size"] == 32
        async with proxied([replica], routing=RoutingSection(block_size=128)) as bench:
            assert bench.proxy.stats()["block_size"] == 128


async def test_the_block_size_is_read_later_when_the_first_reading_fails() -> None:
    class Late(EmulatedEngine):
        is_late = True

        def metrics_page(self) -> bytes:
            return b"not yet" if self.is_late else super().metrics_page()

    async with EmulatedReplica(engine=lambda: Late(block_size=32)) as replica, proxied([replica]) as bench:
        assert bench.proxy.stats()["block_size"] == DEFAULT_BLOCK_SIZE
        Late.is_late = False
        await eventually(lambda: bench.proxy.stats()["block_size"] == 32)


async def test_text_chat_and_batches(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        for _ in range(2):
            assert (await bench.complete(prompt="word " * 100))[0] == 200
        status, answer = await bench.complete(prompt=[PROMPT, PROMPT[::-1]], n=2)
        assert (status, len(answer["choices"])) == (200, 4)
        messages = [{"role": "user", "content": "word " * 100}]
        for _ in range(2):
            status, answer = await bench.post("/v1/chat/completions", {"model": "emulated", "messages": messages})
            assert (status, answer["choices"][0]["message"]["role"]) == (200, "assistant")
        stats = bench.proxy.stats()
        assert stats["affinity"] == 2  # the second text and the second conversation
        assert bench.proxy.router.in_flight == [0, 0]


async def test_a_stream_arrives_while_it_is_generated(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        replicas[0].faults.token_delay_s = 0.02
        body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 20, "seed": 3, "stream": True}
        async with bench.session.post(f"{bench.proxy.url}/v1/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            first = await response.content.readuntil(b"\n\n")
            assert json.loads(first.removeprefix(b"data: "))["object"] == "text_completion"
            assert replicas[0].in_flight == 1
            assert bench.proxy.router.in_flight == [1]
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        await eventually(lambda: outcomes(bench, 0) == Outcomes(completed=1))
        assert bench.proxy.router.in_flight == [0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_stops_its_generation(replicas: Replicas, stream: bool) -> None:
    replica = replicas[0]
    async with proxied([replica]) as bench:
        if stream:
            replica.faults.token_delay_s = 0.05
        else:
            replica.faults.completions.append("hang")
        body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 1000, "seed": 1, "stream": stream}
        asking = asyncio.create_task(bench.session.post(f"{bench.proxy.url}/v1/completions", json=body))
        await replica.arrived.wait()
        if stream:
            response = await asking
            await response.content.readuntil(b"\n\n")
            response.close()
        else:
            asking.cancel()
        await eventually(lambda: replica.aborted == 1)
        await eventually(lambda: outcomes(bench, 0) == Outcomes(cancelled=1))
        assert bench.proxy.router.in_flight == [0]
        assert bench.proxy.registry.serves(0)


async def test_hundreds_of_requests_run_at_once(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        await bench.post("/pause?mode=keep")
        asking = [asyncio.create_task(bench.complete(prompt=[i] * 64)) for i in range(300)]
        await eventually(lambda: sum(replica.in_flight for replica in replicas) == 300)
        await bench.post("/resume")
        assert {status for status, _ in await asyncio.gather(*asking)} == {200}
        assert bench.proxy.stats()["max_inflight"] == 300


async def test_a_prompt_of_megabytes_passes(replicas: Replicas) -> None:
    for replica in replicas:
        replica.engine.max_model_len = 10_000_000
    async with proxied(replicas) as bench:
        body = io.BytesIO(json.dumps({"model": "emulated", "prompt": [7] * 2_000_000, "max_tokens": 1}).encode())
        headers = {"Content-Type": "application/json"}
        async with bench.session.post(f"{bench.proxy.url}/v1/completions", data=body, headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["usage"]["prompt_tokens"] == 2_000_000


async def test_a_client_error_passes_and_never_counts_against_the_replica(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        for _ in range(MAX_FAILURES * 2):
            status, answer = await bench.complete(model="nobody")
            assert status == 404
            assert answer["error"]["message"] == "The model `nobody` does not exist."
        assert outcomes(bench, 0) == Outcomes(refused=MAX_FAILURES * 2)
        assert bench.proxy.registry.serves(0)


async def test_a_body_that_is_not_json_is_the_replicas_to_refuse(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        async with bench.session.post(f"{bench.proxy.url}/v1/completions", data=b"{nonsense") as response:
            assert response.status == 500  # what the emulated replica makes of it
        assert replicas[0].requests[-1][1] == "/v1/completions"


async def test_a_replica_that_breaks_connections_costs_no_answer_is_taken_out_and_comes_back(
    replicas: Replicas, adapter: Write
) -> None:
    path = adapter(POLICY)
    async with proxied(replicas) as bench:
        await bench.load(path)
        replicas[0].faults.completions.extend(["die"] * MAX_FAILURES)
        replicas[0].faults.unhealthy = True
        # Nothing is known of these prompts, so every other one goes to the replica that breaks.
        asked = [await bench.complete(POLICY, prompt=[problem] * 40) for problem in range(2 * MAX_FAILURES)]
        assert {status for status, _ in asked} == {200}
        assert not bench.proxy.registry.serves(0)
        assert (await bench.complete(POLICY))[0] == 200
        assert outcomes(bench, 0) == Outcomes(failed=MAX_FAILURES)
        assert outcomes(bench, 1) == Outcomes(completed=2 * MAX_FAILURES + 1)
        assert bench.proxy.router.in_flight == [0, 0]
        assert (await bench.get("/health"))[0] == 503
        replicas[0].faults.unhealthy = False
        await bench.in_service()
        assert (await bench.get("/health"))[0] == 200


async def test_a_failure_names_the_replica(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        replicas[0].faults.completions.extend(["die"] * 2)
        status, answer = await bench.complete()
        assert status == 502
        assert replicas[0].url in answer["error"]["message"]
        assert bench.proxy.router.in_flight == [0]


async def test_half_an_answer_is_no_answer(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        replicas[0].faults.completions.append("die-mid-response")
        assert (await bench.complete())[0] == 502


async def test_a_stream_that_breaks_off_breaks_off_for_the_client_too(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        replicas[0].faults.completions.append("die-mid-response")
        body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 50, "seed": 1, "stream": True}
        async with bench.session.post(f"{bench.proxy.url}/v1/completions", json=body) as response:
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await eventually(lambda: outcomes(bench, 0) == Outcomes(failed=1))


async def test_without_replicas_there_is_an_answer_too(replicas: Replicas) -> None:
    async with proxied(replicas[:1]) as bench:
        await replicas[0].stop()
        await eventually(lambda: not bench.proxy.registry.serves(0))
        status, answer = await bench.complete()
        assert (status, answer["error"]["message"]) == (503, "no replica is in service; see /health")
        assert bench.proxy.stats()["unrouted"] == 1
        for path in ("/v1/completions", "/pause", "/resume"):
            async with bench.session.post(f"{bench.proxy.url}{path}", json={"prompt": PROMPT}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
        await replicas[0].restart()
        await bench.in_service()
        assert (await bench.complete())[0] == 200


async def test_a_restarted_replica_gets_its_adapters_back_before_it_gets_requests(
    replicas: Replicas, adapter: Write
) -> None:
    path = adapter(POLICY)
    for _ in range(3):  # somebody else's, before the proxy
        replicas[0].engine.sample("emulated", PROMPT, 4, 1)
    async with proxied(replicas[:1]) as bench:
        await bench.load(path)
        expected = (await bench.complete(POLICY))[1]["choices"]
        assert (await bench.get("/proxy/stats"))[1]["per_replica"][0]["vllm"]["request_success_total"] == 4
        await replicas[0].stop()
        await eventually(lambda: not bench.proxy.registry.serves(0))
        await replicas[0].restart()
        await bench.in_service()
        assert list(replicas[0].engine.adapters) == [POLICY]
        status, answer = await bench.complete(POLICY)
        assert (status, answer["choices"]) == (200, expected)
        (counted,) = (await bench.get("/proxy/stats"))[1]["per_replica"]
        assert (counted["vllm"]["request_success_total"], counted["vllm_before"]["request_success_total"]) == (1, 0)


async def test_a_restart_nobody_saw_shows_in_the_counters(replicas: Replicas, adapter: Write) -> None:
    async with proxied(replicas[:1]) as bench:
        await bench.load(adapter(POLICY))
        await bench.complete()
        await bench.get("/proxy/stats")
        replicas[0].state.engine = EmulatedEngine()  # as after a restart between two readings
        await bench.get("/proxy/stats")
        assert not bench.proxy.registry.serves(0)
        await bench.in_service()
        assert list(replicas[0].engine.adapters) == [POLICY]


async def test_a_restart_nobody_saw_shows_at_the_first_request(replicas: Replicas, adapter: Write) -> None:
    path = adapter(POLICY)
    async with proxied(replicas[:1]) as bench:
        await bench.load(path)
        replicas[0].state.engine = EmulatedEngine()  # as after a restart between two readings
        # The model exists: a 404 would say that asking again is of no use.
        assert (await bench.complete(POLICY))[0] == 503
        await bench.in_service()
        assert (await bench.complete(POLICY))[0] == 200
