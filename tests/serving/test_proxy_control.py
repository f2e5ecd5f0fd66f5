from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from proxy_bench import PATIENCE_S, POLICY, PROMPT, ProxyBench, eventually, proxied

from rlkit.recipe import TransportSection
from rlkit.serving.adapter_answers import Answer
from rlkit.serving.emulated_engine import EmulatedEngine
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.upstream import Upstreams

Write = Callable[..., str]
Replicas = list[EmulatedReplica]


def received(replica: EmulatedReplica, path: str) -> list[str]:
    """Paths with queries that a replica got, those that begin with `path`."""
    return [got for _, got, _ in replica.requests if got.startswith(path)]


async def test_a_load_reaches_every_replica(replicas: Replicas, adapter: Write) -> None:
    async with proxied(replicas) as bench:
        assert await bench.load(adapter(POLICY)) == (200, f"Success: LoRA adapter '{POLICY}' added successfully.")
        assert [list(replica.engine.adapters) for replica in replicas] == [[POLICY]] * 2
        (load,) = bench.proxy.stats()["adapters"]
        assert (load["name"], load["ok"], load["accepted_by"], load["attempts"]) == (POLICY, True, 2, [1, 1])
        assert load["seconds"] > 0
        assert all(0 < seconds <= load["seconds"] for seconds in load["seconds_per_replica"])


async def test_files_that_come_late_are_asked_for_again_where_they_lag(replicas: Replicas, adapter: Write) -> None:
    lag = json.dumps({"error": {"message": f"Loading lora {POLICY} failed: No adapter found for <path>", "code": 404}})
    replicas[1].faults.loads.extend([(404, lag), (500, '{"error": {"message": "<path> doesn\'t contain tensors"}}')])
    async with proxied(replicas) as bench:
        status, _ = await bench.load(adapter(POLICY))
        assert status == 200
        (load,) = bench.proxy.stats()["adapters"]
        assert load["attempts"] == [1, 3]
        assert load["refusals"] == [None, "<path> doesn't contain tensors"]


async def test_files_that_appear_during_the_load(replicas: Replicas, adapter: Write, tmp_path: Path) -> None:
    path = adapter("elsewhere")
    late = tmp_path / "late"
    async with proxied(replicas) as bench:
        loading = asyncio.create_task(bench.load(str(late)))
        await eventually(lambda: all(len(received(replica, "/v1/load_lora")) >= 2 for replica in replicas))
        shutil.copytree(path, late)
        assert (await loading)[0] == 200


async def test_a_load_that_fails_is_taken_back_told_and_generation_resumed(replicas: Replicas, adapter: Write) -> None:
    path = adapter(POLICY)
    replicas[1].faults.loads.extend([(503, "not yet")] * 1000)
    async with proxied(replicas, deadline_s=0.5) as bench:
        await bench.post("/pause?mode=keep")
        status, answer = await bench.load(path)
        assert status == 504
        message = answer["error"]["message"]
        assert "replica 1 did not accept it within 0.5 s" in message
        assert "generation was resumed" in message
        assert answer["error"]["resumed"] is True
        assert answer["error"]["replicas"][1]["reason"] == "not yet"
        assert answer["error"]["replicas"][1]["attempts"] > 1
        assert [dict(replica.engine.adapters) for replica in replicas] == [{}, {}]
        assert [replica.is_paused for replica in replicas] == [False, False]
        replicas[1].faults.loads.clear()
        assert (await bench.load(path))[0] == 200


async def test_a_load_is_never_answered_with_404(adapter: Write, tmp_path: Path) -> None:
    """TRL takes 404 for a server without the endpoint."""
    async with EmulatedReplica() as replica, proxied([replica], deadline_s=0.3) as bench:
        status, answer = await bench.load(str(tmp_path / "nowhere"))
        assert status == 504
        assert "No adapter found" in answer["error"]["replicas"][0]["reason"]
    async with EmulatedReplica(runtime_loras=False) as replica, proxied([replica]) as bench:
        status, answer = await bench.load(adapter(POLICY))
        assert status == 502
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in answer["error"]["message"]


async def test_a_rank_too_high_is_refused_at_once_with_vllms_words(replicas: Replicas, adapter: Write) -> None:
    async with proxied(replicas, deadline_s=1000) as bench:
        status, answer = await bench.load(adapter(POLICY, rank=16))
        assert status == 502
        assert "LoRA rank 16 is greater than max_lora_rank 8." in answer["error"]["message"]


async def test_what_is_not_a_load_is_not_sent(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        bad: list[dict[str, object]] = [{}, {"lora_name": POLICY}, {"lora_name": "", "lora_path": "/x"}]
        for body in [*bad, {"lora_name": 3, "lora_path": 4}]:
            status, answer = await bench.post("/v1/load_lora_adapter", body)
            assert status == 400
            assert answer["error"]["message"] == "Both 'lora_name' and 'lora_path' must be provided."
        in_place = {"lora_name": POLICY, "lora_path": "/x", "load_inplace": True}
        status, answer = await bench.post("/v1/load_lora_adapter", in_place)
        assert status == 400
        assert "new name" in answer["error"]["message"]
        assert received(replicas[0], "/v1/load_lora") == []


async def test_an_adapter_from_outside_the_root_is_not_loaded(
    replicas: Replicas, adapter: Write, tmp_path: Path
) -> None:
    async with proxied(replicas, adapter_root=tmp_path / "root") as bench:
        assert (await bench.load(adapter("root/inside")))[0] == 200
        await bench.post("/pause?mode=keep")
        status, answer = await bench.load(adapter("outside"))
        assert (status, answer["error"]["resumed"]) == (403, True)
        assert [replica.is_paused for replica in replicas] == [False, False]
        assert answer["error"]["message"].startswith(f"lora_path: '{tmp_path}/outside' is not inside")
        assert received(replicas[0], "/v1/load_lora") == ["/v1/load_lora_adapter"]


async def test_a_replica_that_is_silent_for_long_is_not_waited_for(
    replicas: Replicas, adapter: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.serving.proxy.READ_TIMEOUT_S", 0.2)
    monkeypatch.setattr("rlkit.serving.proxy.SILENT_S", 0.6)
    async with proxied(replicas, deadline_s=1000) as bench:
        replicas[1].freeze()
        assert (await bench.load(adapter(POLICY)))[0] == 200
        assert not bench.proxy.registry.serves(1)
        assert (await bench.complete(POLICY))[0] == 200
        replicas[1].freeze(False)
        await bench.in_service()
        assert list(replicas[1].engine.adapters) == [POLICY]


async def test_a_request_to_the_only_replica_just_restarted_is_to_be_sent_again(adapter: Write) -> None:
    async with EmulatedReplica() as replica, proxied([replica]) as bench:
        await bench.load(adapter(POLICY))
        await replica.restart()
        # Not 404: the adapter is live, and back in a moment.
        statuses = {(await bench.complete(POLICY))[0] for _ in range(3)}
        assert statuses <= {200, 503}
        await bench.in_service()
        assert (await bench.complete(POLICY))[0] == 200


async def test_all_requests_that_a_restarted_replica_had_are_sent_elsewhere(replicas: Replicas, adapter: Write) -> None:
    """Nobody saw the restart; the first answer tells of it, while the others are under way."""
    async with proxied(replicas) as bench:
        await bench.load(adapter(POLICY))
        await replicas[1].restart()
        answers = await asyncio.gather(*(bench.complete(POLICY, [number] * 48) for number in range(16)))
        assert {status for status, _ in answers} == {200}
        await bench.in_service()


async def test_what_a_silent_replica_that_is_out_was_asked_for_another_one_answers(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever took it out, here three unloads without an answer, left it the requests it had."""
    monkeypatch.setattr("rlkit.serving.proxy.PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("rlkit.serving.proxy.SILENT_S", 0.2)
    async with proxied(replicas) as bench:
        replicas[0].faults.completions.append("hang")
        asking = asyncio.create_task(bench.complete())
        await eventually(lambda: replicas[0].in_flight == 1)
        replicas[0].freeze()
        bench.proxy._driver.replica_left(0)
        async with asyncio.timeout(PATIENCE_S):
            assert (await asking)[0] == 200
        assert bench.proxy.router.in_flight == [0, 0]
        replicas[0].freeze(False)
        await bench.in_service()


async def test_the_counters_do_not_wait_for_a_replica_that_is_out(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(replicas) as bench:
        bench.proxy._driver.replica_left(1)
        replicas[1].freeze()
        monkeypatch.setattr("rlkit.serving.proxy.READ_TIMEOUT_S", 1000.0)
        async with asyncio.timeout(PATIENCE_S):
            status, page = await bench.get("/metrics")
            assert (await bench.get("/proxy/stats"))[0] == 200
        assert status == 200
        running = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        assert [line.count('replica="0"') for line in running] == [1]
        replicas[1].freeze(False)


async def test_a_replica_in_whose_place_a_gateway_answers_is_out(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        replicas[1].faults.gateway = 503
        await eventually(lambda: not bench.proxy.registry.serves(1))
        replicas[1].faults.gateway = None
        await bench.in_service()


async def test_a_mistake_in_the_proxy_is_told_and_holds_up_no_replica(
    replicas: Replicas, adapter: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied(replicas) as bench:
        ask = Upstreams.ask
        mistakes = iter([RuntimeError("a mistake")])

        async def sometimes(self: Upstreams, replica: int, method: str, path: str, *more: Any) -> Answer:
            if path == "/v1/load_lora_adapter" and (mistake := next(mistakes, None)):
                raise mistake
            return await ask(self, replica, method, path, *more)

        monkeypatch.setattr(Upstreams, "ask", sometimes)
        assert (await bench.load(adapter(POLICY)))[0] == 200
        assert "RuntimeError: a mistake" in caplog.text
        assert "a mistake in the proxy" in str(bench.proxy.stats()["adapters"][0]["refusals"])


async def test_unload(replicas: Replicas, adapter: Write) -> None:
    async with proxied(replicas) as bench:
        await bench.load(adapter(POLICY))
        unload = {"lora_name": POLICY}
        status, text = await bench.post("/v1/unload_lora_adapter", unload)
        assert (status, text) == (200, f"Success: LoRA adapter '{POLICY}' removed successfully.")
        assert [dict(replica.engine.adapters) for replica in replicas] == [{}, {}]
        status, answer = await bench.post("/v1/unload_lora_adapter", unload)
        assert (status, answer["error"]["message"]) == (404, f"The lora adapter '{POLICY}' cannot be found.")
        assert (await bench.post("/v1/unload_lora_adapter", {}))[0] == 400


async def answers_of(bench: ProxyBench, replica: int) -> list[float]:
    """Log-probabilities of one replica, asked directly."""
    body = {"model": POLICY, "prompt": PROMPT, "max_tokens": 4, "seed": 1, "logprobs": 0}
    async with bench.session.post(f"{bench.replicas[replica].url}/v1/completions", json=body) as response:
        return list((await response.json())["choices"][0]["logprobs"]["token_logprobs"])


async def test_a_run_that_starts_over_never_reads_blocks_of_the_old_weights(replicas: Replicas, adapter: Write) -> None:
    """Once with a proxy that outlived the trainer, once with a new proxy before replicas that outlived both."""
    path = adapter(POLICY, weights=1.0)
    async with EmulatedReplica() as fresh, proxied([fresh]) as bench:
        await bench.load(adapter("new-weights", weights=2.0))
        expected = await answers_of(bench, 0)
    async with proxied(replicas) as bench:
        await bench.load(path)
        old = [await answers_of(bench, replica) for replica in (0, 1)]
        adapter(POLICY, weights=2.0)  # the same path, other weights
        assert (await bench.load(path))[0] == 200
        assert [await answers_of(bench, replica) for replica in (0, 1)] == [expected, expected]
        assert expected not in old
    adapter(POLICY, weights=1.0)
    async with proxied(replicas) as bench:
        assert [dict(replica.engine.adapters) for replica in replicas] == [{}, {}]
        await bench.load(path)
        assert [await answers_of(bench, replica) for replica in (0, 1)] == old


async def test_a_replica_that_comes_back_does_not_get_the_files_of_a_run_that_starts_over(
    replicas: Replicas, adapter: Write
) -> None:
    """The new run has written its first policy, and not yet asked to load it."""
    path = adapter(POLICY, weights=1.0)
    async with proxied(replicas) as bench:
        await bench.load(path)
        old = await answers_of(bench, 0)
        await replicas[1].stop()
        await eventually(lambda: not bench.proxy.registry.serves(1))
        adapter(POLICY, weights=2.0)
        await replicas[1].restart()
        await eventually(lambda: "not what it was when the adapter was loaded" in str(bench.proxy.registry.trouble(1)))
        assert replicas[1].engine.adapters == {}
        adapter(POLICY, weights=1.0)
        await bench.in_service()
        assert await answers_of(bench, 1) == old
        await replicas[1].stop()
        await eventually(lambda: not bench.proxy.registry.serves(1))
        adapter(POLICY, weights=2.0)
        await replicas[1].restart()
        assert (await bench.load(path))[0] == 200
        await bench.in_service()
        new = [await answers_of(bench, replica) for replica in (0, 1)]
        assert new[0] == new[1] != old


async def test_a_pause_keeps_the_cache_and_reaches_all(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        assert await bench.post("/pause?mode=keep") == (200, {"status": "paused"})
        for replica in replicas:
            assert received(replica, "/pause") == ["/pause?mode=keep&clear_cache=false"]
        status, paused = await bench.get("/is_paused")
        assert (status, paused) == (200, {"is_paused": True, "replicas": {"0": True, "1": True}})
        assert await bench.post("/resume") == (200, {"status": "resumed"})
        assert [replica.is_paused for replica in replicas] == [False, False]


async def test_a_pause_passes_as_it_is_when_weights_are_merged_or_the_cache_is_not_kept(replicas: Replicas) -> None:
    for transport in (TransportSection(kind="merged"), TransportSection(keep_cache=False)):
        async with proxied(replicas, transport=transport) as bench:
            await bench.post("/pause?mode=keep")
            assert received(replicas[0], "/pause")[-1] == "/pause?mode=keep"
            await bench.post("/resume")


async def test_a_pause_that_a_replica_refuses_leaves_none_paused() -> None:
    async with EmulatedReplica() as one, EmulatedReplica(dev_mode=False) as other, proxied([one, other]) as bench:
        status, answer = await bench.post("/pause?mode=keep")
        assert status == 502
        assert answer["error"]["replicas"] == {"1": "Not Found"}
        assert not one.is_paused


async def test_a_kept_connection_that_was_just_closed_takes_no_replica_out(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        replicas[1].faults.dropped_controls = 1
        assert await bench.post("/pause?mode=keep") == (200, {"status": "paused"})
        replicas[0].faults.dropped_controls = 1
        assert await bench.post("/resume") == (200, {"status": "resumed"})
        assert [(bench.proxy.registry.serves(n), replicas[n].is_paused) for n in (0, 1)] == [(True, False)] * 2
        assert [replica.faults.dropped_controls for replica in replicas] == [0, 0]


async def test_a_replica_that_drops_every_control_request_is_out(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        replicas[1].faults.dropped_controls = 1000
        assert (await bench.post("/pause?mode=keep"))[0] == 200
        assert not bench.proxy.registry.serves(1)
        await bench.post("/resume")


async def test_a_replica_that_joins_during_a_pause_is_paused(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        await replicas[1].stop()
        await eventually(lambda: not bench.proxy.registry.serves(1))
        await bench.post("/pause?mode=keep")
        await replicas[1].restart()
        await bench.in_service()
        assert replicas[1].is_paused
        await bench.post("/resume")
        assert not replicas[1].is_paused


async def test_reset_prefix_cache(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        await bench.complete()
        assert await bench.post("/reset_prefix_cache?reset_external=true") == (200, {"success": True})
        assert [replica.engine.prefix_cache for replica in replicas] == [{}, {}]
        assert received(replicas[0], "/reset_prefix_cache")[-1] == "/reset_prefix_cache?reset_external=true"


async def test_health_is_that_of_all(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        assert (await bench.get("/health"))[0] == 200
        replicas[1].faults.unhealthy = True
        status, answer = await bench.get("/health")
        assert (status, answer["error"]["replicas"]) == (503, {"1": "HTTP 503"})


async def test_models_are_those_that_all_serve(adapter: Write) -> None:
    async with (
        EmulatedReplica(engine=lambda: EmulatedEngine(max_model_len=512)) as first,
        EmulatedReplica(engine=lambda: EmulatedEngine(max_model_len=256)) as second,
        proxied([first, second]) as bench,
    ):
        await bench.load(adapter(POLICY))
        first.engine.load("only-here", adapter("only-here"))
        status, answer = await bench.get("/v1/models")
        assert status == 200
        assert [card["id"] for card in answer["data"]] == ["emulated", POLICY]
        assert answer["data"][0]["max_model_len"] == 256
        assert answer["data"][1]["max_model_len"] is None


async def test_models_that_are_none_are_told(replicas: Replicas) -> None:
    class NoVllm(EmulatedReplica):
        async def _models(self, request: web.Request) -> web.Response:
            return web.json_response({"data": [{"name": "x"}, 1]})

    async with NoVllm() as other, proxied([replicas[0], other]) as bench:
        status, answer = await bench.get("/v1/models")
        assert status == 502
        assert answer["error"]["message"].startswith("/v1/models: replica 1: ")


async def test_server_info_has_the_limits_that_all_keep() -> None:
    async with (
        EmulatedReplica(engine=lambda: EmulatedEngine(max_loras=8, max_lora_rank=8)) as first,
        EmulatedReplica(engine=lambda: EmulatedEngine(max_loras=6, max_lora_rank=16)) as second,
        proxied([first, second]) as bench,
    ):
        status, answer = await bench.get("/server_info?config_format=json")
        config = answer["vllm_config"]
        assert status == 200
        assert config["lora_config"] == {"max_loras": 6, "max_lora_rank": 8}
        assert config["parallel_config"]["data_parallel_size"] == 1
        assert config["model_config"]["dtype"] == "torch.float32"
        assert isinstance((await bench.get("/server_info"))[1]["vllm_config"], str)


async def test_replicas_of_different_models_are_told_apart() -> None:
    async with (
        EmulatedReplica(engine=lambda: EmulatedEngine(model="a")) as first,
        EmulatedReplica(engine=lambda: EmulatedEngine(model="b")) as second,
        proxied([first, second]) as bench,
    ):
        status, answer = await bench.get("/server_info?config_format=json")
        assert status == 502
        assert answer["error"]["message"] == "the replicas do not serve the same model: model is a and b"


async def test_metrics_of_all_replicas_and_of_the_proxy(replicas: Replicas, adapter: Write) -> None:
    async with proxied(replicas) as bench:
        await bench.load(adapter(POLICY))
        for _ in range(3):
            await bench.complete(POLICY)
        _, page = await bench.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(page)}
        running = families["vllm:num_requests_running"].samples
        assert [sample.labels["replica"] for sample in running] == ["0", "1"]
        success = sum(sample.value for sample in families["vllm:request_success"].samples)
        routed = {
            (sample.labels["replica"], sample.labels["decision"]): sample.value
            for sample in families["rlkit_proxy_routed"].samples
        }
        assert success == sum(routed.values()) == 3
        assert routed["0", "affinity"] == 2
        attempts = families["rlkit_proxy_load_attempts"].samples
        assert [sample.value for sample in attempts] == [1, 1]
        assert families["rlkit_proxy_adapter_sync_seconds"].type == "summary"
        counts = [s.value for s in families["rlkit_proxy_load_seconds"].samples if s.name.endswith("_count")]
        assert counts == [1, 1]
        assert [sample.value for sample in families["rlkit_proxy_in_service"].samples] == [1, 1]
        assert families["rlkit_proxy_indexed_blocks"].samples[0].value == len(PROMPT) // 16
        assert families["rlkit_proxy_moved"].samples[0].value == 0
        assert page.count("# TYPE vllm:num_requests_running gauge") == 1


async def test_counters_of_loads_never_go_back(
    replicas: Replicas, adapter: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not those of the loads that are remembered."""
    monkeypatch.setattr("rlkit.serving.adapter_driver.KEPT_REPORTS", 1)
    replicas[1].faults.loads.append((503, "not yet"))
    async with proxied(replicas) as bench:
        for version in (1, 2):
            assert (await bench.load(adapter(f"v{version}"), f"v{version}"))[0] == 200
        assert (await bench.load(adapter("v3", rank=16), "v3"))[0] == 502
        assert len(bench.proxy.stats()["adapters"]) == 1
        _, page = await bench.get("/metrics")
        families = {family.name: family.samples for family in text_string_to_metric_families(page)}
        values = {name: [sample.value for sample in samples] for name, samples in families.items()}
        assert values["rlkit_proxy_load_attempts"] == [3, 4]
        assert values["rlkit_proxy_load_retries"] == [0, 1]
        assert values["rlkit_proxy_adapter_sync_seconds"][0] == 2
        assert values["rlkit_proxy_load_failed"] == [1]


async def test_unknown_paths_are_told_and_not_sent(replicas: Replicas) -> None:
    async with proxied(replicas) as bench:
        status, answer = await bench.post("/init_weight_transfer_engine", {})
        assert status == 404
        assert answer["error"]["message"].startswith("the proxy has no /init_weight_transfer_engine")
        assert (await bench.get("/pause"))[0] == 405
        assert received(replicas[0], "/init") == []
