"""One replica: the vLLM command line a recipe asks for, and when a started server may be used.

The same server module is started on a CPU and on a GPU; what differs is said in `_cpu_environment` and `_memory_flags`.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping

import httpx

from rlkit.errors import RunFailed
from rlkit.recipe import Recipe

# vLLM answers /health with 200 while its engine cannot decode (a head size its attention refuses shows at the first
# request), so readiness is one real completion. Its timeout covers a first request that compiles kernels.
FIRST_COMPLETION_TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 5.0
# httpx's `mounts` for a client of these servers: a proxy that the environment names (HTTP_PROXY) does not lead to this
# machine's own ports.
DIRECT: Mapping[str, None] = {"all://127.0.0.1": None}


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


def wait_until_ready(url: str, cancelled: threading.Event, poll_s: float = 0.5) -> bool:
    """True once `url` has answered /health and one real completion; False when `cancelled` was set first.

    Waits without end otherwise: the caller bounds it and watches the process. Raises RunFailed with the server's own
    words when it is healthy but cannot complete.
    """
    with httpx.Client(base_url=url, timeout=FIRST_COMPLETION_TIMEOUT_S, mounts=DIRECT) as client:
        while not healthy(client):
            if cancelled.wait(poll_s):
                return False
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": [0], "max_tokens": 1, "seed": 0}
        response = client.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise RunFailed(f"{url} is healthy, but its first completion failed: {response.text[:500]}")
    return True


def healthy(client: httpx.Client) -> bool:
    """Whether the server answers /health with 200 within a few seconds."""
    try:
        return client.get("/health", timeout=HEALTH_TIMEOUT_S).status_code == 200
    except httpx.HTTPError:
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
