"""The emulated replica beside a real vLLM server, and a trainer that starts over, on two real replicas.

Minutes of work: three vLLM servers of a toy model are started once for the whole module.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxy_bench import PATIENCE_S, ProxyBench, eventually, proxied

from rlkit.engines.guard import Guard
from rlkit.engines.jobs import Job
from rlkit.engines.local import _free_ports
from rlkit.recipe import Recipe, TransportSection, load_recipe
from rlkit.serving.adapter_store import AdapterStore
from rlkit.serving.bearer import Bearer
from rlkit.serving.emulated_engine import EmulatedEngine
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.receiver import Receiver, serve_receiver
from rlkit.serving.replica import vllm_command, vllm_environment, wait_until_ready

pytestmark = pytest.mark.slow

LOCAL = Path(__file__).parents[2] / "runs" / "local.yaml"
POLICY = "trl-policy-v1"

# Three servers that import vLLM at the same time on two busy cores.
START_S = 600.0

# Log-probabilities of one request computed with and without a cached prefix differ in the last bits of a float32.
TOLERANCE = 1e-4

# Three whole blocks of 32 tokens under a limit of 128.
PROMPT = [20 + (7 * position) % 200 for position in range(100)]


@dataclass(frozen=True)
class Servers:
    """Two servers as the local engine starts them, and one without its flags that was given an adapter at its start.

    `old` and `new` are adapters of other weights; the third server serves `new` as the policy's name.
    """

    urls: list[str]
    plain_url: str
    old: Path
    new: Path
    model: str
    recipe: Recipe


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    from rlkit.training import toy_model

    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_model, "PRETRAIN_STEPS", 2)  # nobody here asks what it has learnt
        toy_model.build(model, 0, lambda step, steps, loss: None)
    old, new = write_adapter(model, folder / "old", 1), write_adapter(model, folder / "new", 2)
    recipe = load_recipe(LOCAL)
    ports = _free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with Guard() as guard, ExitStack() as stack:
        for number, port in enumerate(ports):
            command = vllm_command(recipe, str(model), port, on_cpu=True)
            environment = vllm_environment(recipe, on_cpu=True) | {"HF_HUB_OFFLINE": "1"}
            if number == 2:
                command += ["--lora-modules", f"{POLICY}={new}"]
                environment |= {"VLLM_SERVER_DEV_MODE": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
            job = Job(f"vllm-{number}", command, environment, folder / f"{number}.log", guard)
            stack.callback(job.stop, 3.0)
        cancelled = threading.Event()
        timer = threading.Timer(START_S, cancelled.set)
        timer.start()
        stack.callback(timer.cancel)
        for number, url in enumerate(urls):
            assert wait_until_ready(url, cancelled), (folder / f"{number}.log").read_text()[-3000:]
        yield Servers(urls[:2], urls[2], old, new, str(model), recipe)


def write_adapter(model: Path, folder: Path, seed: int, rank: int = 1) -> Path:
    """A random adapter on every linear layer, as peft saves one."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    peft_model.save_pretrained(folder)
    return folder


# What the two kinds of servers are asked, and how much of their answers must agree.


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except ValueError:
            return None


class Side:
    """One server under comparison; `{model}`, `{folder}` and the like stand for its own names."""

    def __init__(self, url: str, model: str, folder: Path) -> None:
        self._client = httpx.Client(base_url=url, timeout=PATIENCE_S * 6)
        self._names = {"model": model, "folder": str(folder)}

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        filled = json.loads(self._fill(json.dumps(body))) if body is not None else None
        response = self._client.request(method, path, json=filled)
        return Answer(response.status_code, response.text)

    def _fill(self, text: str) -> str:
        for name, value in self._names.items():
            text = text.replace("{" + name + "}", value)
        return text

    def says(self, answer: Answer) -> str:
        """The text of an answer, its names and paths replaced by placeholders."""
        text = answer.text.replace(self._names["folder"], "{folder}").replace(self._names["model"], "{model}")
        # vLLM hides some paths, by where they are.
        return re.sub(r"<path>|\{folder\}[\w./-]*", "{path}", text)

    def close(self) -> None:
        self._client.close()


@pytest.fixture
async def sides(servers: Servers, tmp_path: Path) -> Any:
    """The emulated server and the real one, with the same adapters on disk."""
    folder = tmp_path / "adapters"
    shutil.copytree(servers.old, folder / "good")
    write_adapter(Path(servers.model), folder / "rank-16", 3, rank=16)
    for name in ("no-weights", "half-config", "half-weights"):
        shutil.copytree(folder / "good", folder / name)
    (folder / "no-weights" / "adapter_model.safetensors").unlink()
    for name, file in (("half-config", "adapter_config.json"), ("half-weights", "adapter_model.safetensors")):
        whole = (folder / name / file).read_bytes()
        (folder / name / file).write_bytes(whole[: len(whole) // 2])
    (folder / "empty").mkdir()
    async with EmulatedReplica(
        engine=lambda: EmulatedEngine(servers.model, max_model_len=128, block_size=32)
    ) as replica:
        both = [Side(url, servers.model, folder) for url in (replica.url, servers.urls[0])]

        async def ask(method: str, path: str, body: Any = None) -> list[tuple[Side, Answer]]:
            answers = await asyncio.gather(*(asyncio.to_thread(side.ask, method, path, body) for side in both))
            return list(zip(both, answers, strict=True))

        yield ask
        for side in both:
            side.close()


def load(name: str, path: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | more


def unload(name: str) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/v1/unload_lora_adapter", {"lora_name": name}


async def test_loads_and_unloads_are_answered_alike(sides: Any) -> None:
    questions = [
        load("a", "{folder}/good"),
        load("a", "{folder}/good"),
        load("", "{folder}/good"),
        load("b", ""),
        load("{model}", "{folder}/good"),
        load("b", "{folder}/nowhere"),
        load("b", "{folder}/empty"),
        load("b", "{folder}/no-weights"),
        load("b", "{folder}/half-config"),
        load("b", "{folder}/half-weights"),
        load("b", "{folder}/rank-16"),
        load("b", "{folder}/good"),
        unload("a"),
        unload("a"),
        unload(""),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "c"}),
        ("POST", "/v1/load_lora_adapter", {}),
        ("POST", "/v1/unload_lora_adapter", {}),
        unload("b"),
    ]
    for question in questions:
        (emulated, its), (real, theirs) = await sides(*question)
        assert (its.status, emulated.says(its)) == (theirs.status, real.says(theirs)), question


async def test_models_are_listed_alike(sides: Any) -> None:
    await sides(*load("a", "{folder}/good"))
    (_, its), (_, theirs) = await sides("GET", "/v1/models")
    found, wanted = its.json["data"], theirs.json["data"]
    for mine, other in zip(found, wanted, strict=True):
        assert shape(mine) == shape(other)
        assert {key: mine[key] for key in ("id", "root", "parent", "max_model_len")} == {
            key: other[key] for key in ("id", "root", "parent", "max_model_len")
        }
    await sides(*unload("a"))


def shape(value: Any) -> Any:
    """What an answer consists of: names and kinds, without the values."""
    if isinstance(value, dict):
        # A candidate is named by its text, which is the model's.
        return {key: len(one) if key == "top_logprobs" else shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


COMPLETION = {"model": "{model}", "prompt": PROMPT, "max_tokens": 4, "seed": 1, "temperature": 1.0}
TRL = COMPLETION | {"return_token_ids": True, "logprobs": 0}
CHAT = {"model": "{model}", "messages": [{"role": "user", "content": "1"}], "max_tokens": 3, "seed": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", TRL),
        ("/v1/completions", TRL | {"n": 2}),
        ("/v1/completions", TRL | {"prompt": [PROMPT, PROMPT[:40]]}),
        ("/v1/completions", TRL | {"prompt": "1+1="}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"return_token_ids": True, "logprobs": True}),
    ],
    ids=["plain", "as TRL asks", "two samples", "two prompts", "text", "chat", "chat with logprobs"],
)
async def test_completions_have_the_same_shape(sides: Any, path: str, body: dict[str, Any]) -> None:
    (_, its), (_, theirs) = await sides("POST", path, body)
    assert (its.status, theirs.status) == (200, 200)
    mine, other = its.json, theirs.json
    assert len(mine["choices"]) == len(other["choices"])
    assert shape(mine) == shape(other)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", TRL), ("/v1/chat/completions", CHAT)], ids=["TRL", "chat"]
)
async def test_streams_have_the_same_shape(sides: Any, path: str, body: dict[str, Any]) -> None:
    (_, its), (_, theirs) = await sides("POST", path, body | {"stream": True, "max_tokens": 20})
    mine, other = ([event for event in answer.text.split("\n\n") if event] for answer in (its, theirs))
    assert mine[-1] == other[-1] == "data: [DONE]"
    for events in (mine[:-1], other[:-1]):
        assert len(events) > 2
        assert all(event.startswith("data: ") for event in events)
    parsed = [[json.loads(event.removeprefix("data: ")) for event in events[:-1]] for events in (mine, other)]
    for place in (0, 1, -1):
        assert shape(parsed[0][place]) == shape(parsed[1][place])


@pytest.mark.parametrize(
    "body",
    [COMPLETION | {"model": "nobody"}, COMPLETION | {"prompt": PROMPT * 2}, {"model": "{model}"}],
    ids=["unknown model", "too long", "no prompt"],
)
async def test_refusals_are_alike(sides: Any, body: dict[str, Any]) -> None:
    (emulated, its), (real, theirs) = await sides("POST", "/v1/completions", body)
    assert (its.status, emulated.says(its)) == (theirs.status, real.says(theirs))


async def test_the_control_endpoints_are_answered_alike(sides: Any) -> None:
    for question in (
        ("GET", "/is_paused"),
        ("POST", "/pause?mode=keep"),
        ("GET", "/is_paused"),
        ("POST", "/pause?mode=keep&clear_cache=false"),
        ("POST", "/resume"),
        ("GET", "/is_paused"),
        ("POST", "/resume"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/reset_prefix_cache?reset_running_requests=true"),
        ("GET", "/health"),
        ("GET", "/nowhere"),
    ):
        (_, its), (_, theirs) = await sides(*question)
        assert (its.status, its.json, its.json or its.text) == (
            theirs.status, theirs.json, theirs.json or theirs.text,
        ), question  # fmt: skip
    (_, its), (_, theirs) = await sides("POST", "/pause?mode=nonsense")
    assert its.status == theirs.status == 400


async def test_the_server_says_of_itself_what_trl_and_the_proxy_read(sides: Any) -> None:
    (_, its), (_, theirs) = await sides("GET", "/server_info?config_format=json")
    mine, other = its.json["vllm_config"], theirs.json["vllm_config"]
    for section, fields in mine.items():
        for name, value in fields.items():
            assert other[section][name] == value, (section, name)
    (_, its), (_, theirs) = await sides("GET", "/server_info")
    assert type(its.json["vllm_config"]) is type(theirs.json["vllm_config"]) is str


async def test_metrics_have_the_same_names_kinds_and_labels(sides: Any) -> None:
    await sides("POST", "/v1/completions", COMPLETION)
    (_, its), (_, theirs) = await sides("GET", "/metrics")
    mine, other = (
        {family.name: family for family in text_string_to_metric_families(answer.text)} for answer in (its, theirs)
    )
    for name, family in mine.items():
        assert name in other
        assert family.type == other[name].type, name
        if name == "vllm:cache_config_info":  # every field of a configuration is a label there
            assert set(family.samples[0].labels) <= set(other[name].samples[0].labels)
        else:
            assert set(family.samples[0].labels) == set(other[name].samples[0].labels), name
    reasons = [
        {s.labels["finished_reason"] for s in page["vllm:request_success"].samples if s.name.endswith("_total")}
        for page in (mine, other)
    ]
    assert reasons[0] == reasons[1]


async def test_a_server_without_its_flags_is_answered_alike(servers: Servers, http: aiohttp.ClientSession) -> None:
    async with EmulatedReplica(runtime_loras=False, dev_mode=False) as replica:
        for method, path in (
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/unload_lora_adapter"),
            ("POST", "/pause?mode=keep"),
            ("POST", "/resume"),
            ("GET", "/is_paused"),
            ("POST", "/reset_prefix_cache"),
            ("GET", "/server_info"),
        ):
            answers = []
            for url in (replica.url, servers.plain_url):
                body = {"lora_name": "a", "lora_path": "/a"} if "lora" in path else None
                async with http.request(method, url + path, json=body) as response:
                    answers.append((response.status, await response.json()))
            assert answers[0] == answers[1] == (404, {"detail": "Not Found"}), path


# A trainer that starts over, on the two real replicas behind the proxy.


async def logprobs(http: aiohttp.ClientSession, url: str, model: str = POLICY) -> tuple[list[int], list[float]]:
    """The greedy tokens of a long prompt and their log-probabilities, from one server."""
    body = TRL | {"model": model, "temperature": 0, "max_tokens": 8}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        choice = (await response.json())["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def same(one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> bool:
    return one[0] == other[0] and all(
        math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(one[1], other[1], strict=True)
    )


async def test_reusing_a_name_without_the_registry_serves_blocks_of_the_old_weights(
    servers: Servers, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """What the next test would miss if it could not fail: the same steps, sent to one server by hand."""
    url, path = servers.urls[0], tmp_path / POLICY
    fresh = await logprobs(http, servers.plain_url)

    async def ask(what: str) -> None:
        body = {"lora_name": POLICY, "lora_path": str(path)}
        async with http.post(f"{url}/v1/{what}_lora_adapter", json=body) as response:
            assert response.status == 200, await response.text()

    shutil.copytree(servers.old, path)
    await ask("load")
    assert not same(await logprobs(http, url), fresh)
    await ask("unload")
    shutil.copytree(servers.new, path, dirs_exist_ok=True)
    await ask("load")
    assert not same(await logprobs(http, url), fresh)
    await ask("unload")


@pytest.mark.parametrize("kind", ["bucket", "push"])
async def test_a_trainer_that_starts_over_is_served_its_own_weights(
    servers: Servers, http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Old names, old paths, new weights: the answers are those of a fresh server with the new adapter."""
    monkeypatch.setenv("RECEIVERS", "token")
    fresh = await logprobs(http, servers.plain_url)
    path = tmp_path / "trainer" / POLICY
    async with AsyncExitStack() as stack:
        more: dict[str, Any] = {}
        if kind == "push":
            receivers = [
                await stack.enter_async_context(
                    serve_receiver(Receiver(AdapterStore(tmp_path / f"disk-{number}"), Bearer("token")))
                )
                for number in range(2)
            ]
            more = {"receivers": [receiver.url for receiver in receivers], "receiver_token_env": "RECEIVERS"}
        transport = TransportSection(kind=kind)  # type: ignore[arg-type]
        bench = await stack.enter_async_context(
            proxied([Real(url) for url in servers.urls], transport=transport, **more)  # type: ignore[misc]
        )
        shutil.copytree(servers.old, path)
        await sync(bench, path)
        old = [await logprobs(http, url) for url in servers.urls]
        assert not same(old[0], fresh)
        for name in ("trl-policy-v2", "trl-policy-v3"):
            shutil.copytree(path, path.with_name(name))
            await sync(bench, path.with_name(name))

        # The trainer dies in the middle of a sync, with requests on their way; its successor begins again at v1.
        await bench.post("/pause?mode=keep")
        body = TRL | {"model": POLICY, "max_tokens": 20}
        hanging = asyncio.create_task(bench.session.post(f"{bench.proxy.url}/v1/completions", json=body))
        await eventually(lambda: sum(bench.proxy.router.in_flight) == 1)
        shutil.copytree(servers.new, path, dirs_exist_ok=True)
        await sync(bench, path)
        response = await hanging
        assert (response.status, "being replaced" in await response.text()) == (503, True)
        response.release()

        new = [await logprobs(http, url) for url in servers.urls]
        assert all(same(one, fresh) for one in new), (new, fresh)
        assert (await bench.complete(POLICY, prompt=PROMPT))[0] == 200
        assert (await bench.complete("trl-policy-v2", prompt=PROMPT))[0] == 404
        await bench.post("/v1/unload_lora_adapter", {"lora_name": POLICY})


@dataclass(frozen=True)
class Real:
    """A real server where the tests' proxy takes emulated ones: all it asks of one is its address."""

    url: str


async def sync(bench: ProxyBench, path: Path) -> None:
    """One weight sync as TRL does it."""
    assert (await bench.post("/pause?mode=keep"))[0] == 200
    assert (await bench.load(str(path), path.name))[0] == 200
    assert (await bench.post("/resume"))[0] == 200
