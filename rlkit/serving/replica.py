"""One replica: the vLLM command line a recipe asks for, and when a started server may be used.

The same server module is started on a CPU and on a GPU; what differs is said in `_cpu_environment` and `_memory_flags`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import aiohttp

from rlkit.recipe import Recipe

# vLLM answers /health with 200 while its engine cannot decode (a head size its attention refuses shows at the first
# request), so readiness is one real completion. Its timeout covers a first request that compiles kernels.
FIRST_COMPLETION_TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 5.0


def vllm_command(recipe: Recipe, model: str, port: int, host: str = "127.0.0.1", on_cpu: bool = False) -> list[str]:
    """The argument list that serves `model` (a folder or Hub id) with the recipe's flags.

    The module is started rather than the `vllm` command: the CPU build is distributed under another name, and the
    command fails looking up its own version.
    """
    serve = recipe.serve
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--host", host, "--port", str(port)),
        *("--dtype", serve.dtype, "--max-model-len", str(serve.max_model_len)),
        # The log-probabilities TRL trains against are those of the distribution that was sampled.
        *("--logprobs-mode", "processed_logprobs"),
        # Otherwise the model card's sampling defaults apply to every rollout.
        *("--generation-config", "vllm"),
        *("--tensor-parallel-size", str(serve.tensor_parallel_size)),
        "--disable-uvicorn-access-log",
    ]
    if recipe.model.revision is not None:
        command += ["--revision", recipe.model.revision]
    if recipe.model.trust_remote_code:
        command += ["--trust-remote-code"]
    if serve.data_parallel_size > 1:
        command += ["--data-parallel-size", str(serve.data_parallel_size)]
    if recipe.lora is not None:
        command += ["--enable-lora", "--max-lora-rank", str(serve.max_lora_rank), "--max-loras", str(serve.max_loras)]
        command += ["--max-cpu-loras", str(max(serve.max_loras, recipe.adapter_slots_needed))]
    else:
        command += ["--weight-transfer-config", '{"backend":"nccl"}']
    for flag, value in [
        ("--max-num-seqs", serve.max_num_seqs),
        ("--max-num-batched-tokens", serve.max_num_batched_tokens),
        ("--block-size", serve.block_size),
        ("--num-gpu-blocks-override", serve.num_gpu_blocks),
    ]:
        if value is not None:
            command += [flag, str(value)]
    return [*command, *_memory_flags(recipe, on_cpu), *serve.flags]


def vllm_environment(recipe: Recipe, on_cpu: bool = False) -> dict[str, str]:
    """What a replica's environment must hold beside what it inherits."""
    environment = {
        # /pause, /resume, /server_info and /reset_prefix_cache exist only in this mode; TRL needs all but the last.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **(_cpu_environment(recipe) if on_cpu else {}),
    }
    return {**environment, **recipe.serve.env}


async def wait_until_ready(url: str, on_state: Callable[[str], None], poll_s: float = 1.0) -> None:
    """Return once `url` has answered /health and one real completion.

    Waits without end; the caller bounds it and watches the process. Raises RuntimeError with the server's own words when
    it is healthy but cannot complete.
    """
    import asyncio

    async with aiohttp.ClientSession() as session:
        while not await _healthy(session, url):
            await asyncio.sleep(poll_s)
        on_state("healthy, first completion")
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as response:
            model = (await response.json())["data"][0]["id"]
        body = {"model": model, "prompt": [0], "max_tokens": 1, "seed": 0}
        timeout = aiohttp.ClientTimeout(total=FIRST_COMPLETION_TIMEOUT_S)
        async with session.post(f"{url}/v1/completions", json=body, timeout=timeout) as response:
            if response.status != 200:
                raise RuntimeError(f"{url} is healthy but its first completion failed: {(await response.text())[:500]}")
    on_state("ready")


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _memory_flags(recipe: Recipe, on_cpu: bool) -> list[str]:
    if on_cpu:
        return ["--enforce-eager"]  # nothing to capture without a GPU, and compiling costs minutes
    flags = ["--gpu-memory-utilization", str(recipe.serve.gpu_memory_utilization)]
    if recipe.serve.kv_cache_gib is not None:
        flags += ["--kv-cache-memory-bytes", str(int(recipe.serve.kv_cache_gib * 2**30))]
    return flags


def _cpu_environment(recipe: Recipe) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(recipe.serve.kv_cache_gib or 1)),  # GiB, whole ones only
        # Trainer and replicas share the cores; bound threads would pin every replica to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
