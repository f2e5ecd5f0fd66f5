"""What a replica is started with, and when it counts as ready."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rlkit.errors import RunFailed
from rlkit.recipe import Recipe, load_recipe
from rlkit.serving.emulated_engine import Adapter, EmulatedEngine, Sampled
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.replica import vllm_command, vllm_environment, wait_until_ready

RUNS = Path(__file__).parents[2] / "runs"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(RUNS / "local.yaml")


def options(command: list[str]) -> dict[str, str]:
    """Values by flag, empty for a flag without one."""
    pairs = zip(command, [*command[1:], "--"], strict=True)
    return {word: "" if following.startswith("--") else following for word, following in pairs if word.startswith("--")}


def test_the_recipes_sizes_are_flags(recipe: Recipe) -> None:
    changed = recipe.with_overrides(
        ["serve.max_model_len=256", "serve.max_num_seqs=7", "serve.max_num_batched_tokens=1792", "serve.block_size=64",
         "serve.num_gpu_blocks=9", "serve.max_loras=8", "serve.max_lora_rank=16", "serve.dtype=bfloat16",
         "serve.tensor_parallel_size=2", "serve.data_parallel_size=3", "serve.flags=[--seed, '5']",
         "model.revision=abc", "model.trust_remote_code=true"]
    )  # fmt: skip
    said = options(vllm_command(changed, "folder", 8123))
    expected = {
        "--model": "folder", "--port": "8123", "--host": "127.0.0.1", "--max-model-len": "256", "--max-num-seqs": "7",
        "--max-num-batched-tokens": "1792", "--block-size": "64", "--num-gpu-blocks-override": "9", "--max-loras": "8",
        "--max-cpu-loras": "8", "--max-lora-rank": "16", "--dtype": "bfloat16", "--tensor-parallel-size": "2",
        "--data-parallel-size": "3", "--seed": "5", "--revision": "abc", "--trust-remote-code": "", "--enable-lora": "",
        "--generation-config": "vllm", "--logprobs-mode": "processed_logprobs",
    }  # fmt: skip
    assert {flag: said.get(flag) for flag in expected} == expected


def test_what_the_recipe_leaves_open_is_vllms(recipe: Recipe) -> None:
    fields = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks", "kv_cache_gib")
    said = options(vllm_command(recipe.with_overrides([f"serve.{name}=null" for name in fields]), "folder", 1))
    assert not {f"--{name.replace('_', '-')}" for name in fields} & said.keys()
    assert (
        not {"--num-gpu-blocks-override", "--kv-cache-memory-bytes", "--revision", "--trust-remote-code"} & said.keys()
    )


def test_full_weights_travel_without_adapters(recipe: Recipe) -> None:
    said = options(vllm_command(recipe.with_overrides(["lora=null"]), "folder", 1))
    assert said["--weight-transfer-config"] == '{"backend":"nccl"}'
    assert "--enable-lora" not in said


def test_the_cache_is_sized_by_flag_on_a_gpu_and_by_environment_without(recipe: Recipe) -> None:
    half = recipe.with_overrides(["serve.kv_cache_gib=0.5", "serve.env={COLOUR: blue, OMP_NUM_THREADS: '2'}"])
    on_gpu, on_cpu = (options(vllm_command(half, "folder", 1, on_cpu=cpu)) for cpu in (False, True))
    assert on_gpu["--kv-cache-memory-bytes"] == str(2**29)
    assert "--enforce-eager" in on_cpu
    assert not {"--kv-cache-memory-bytes", "--gpu-memory-utilization"} & on_cpu.keys()
    environment = vllm_environment(half, on_cpu=True)
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["COLOUR"]) == ("1", "blue")
    assert environment["OMP_NUM_THREADS"] == "2"  # the recipe has the last word
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_environment(half)


class CannotDecode(EmulatedEngine):
    """As vLLM with heads of a size that its attention refuses: healthy, until the first request."""

    def sample(self, model: str | Adapter, prompt: object, max_tokens: int, seed: int | None) -> Sampled:
        raise ValueError("Head size 24 is not supported")


async def test_healthy_is_not_ready() -> None:
    async with EmulatedReplica(engine=CannotDecode) as replica:
        with pytest.raises(RunFailed, match="is healthy, but its first completion failed: 500 "):
            await asyncio.to_thread(wait_until_ready, replica.url, threading.Event())


async def test_ready_is_one_completion() -> None:
    async with EmulatedReplica() as replica:
        assert await asyncio.to_thread(wait_until_ready, replica.url, threading.Event())
        assert [path for _, path, _ in replica.requests] == ["/health", "/v1/models", "/v1/completions"]


async def test_waiting_ends_when_it_is_cancelled() -> None:
    async with EmulatedReplica() as replica:
        replica.faults.unhealthy = True
        cancelled = threading.Event()
        waiting = asyncio.create_task(asyncio.to_thread(wait_until_ready, replica.url, cancelled, 0.01))
        while len(replica.requests) < 2:
            await asyncio.sleep(0)
        cancelled.set()
        assert await waiting is False
