"""How long a new policy takes to all replicas: python tests/bench/transport.py [--rounds N] [--lag-s S] [--json]

Emulated replicas see the files of a mount some seconds after they were written, as other machines do. A trainer writes
an adapter of 5 MB to the mount and asks the proxy to load it; measured is the time from its request to the answer,
which comes when every replica has accepted. Once over the mount (`bucket`), once through the receivers beside the
replicas (`push`). Proxy, replicas and receivers are processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from rlkit.serving.receiver import receiver_command

# The fields of a recipe: what it waits between two attempts on a replica whose mount lags.
RETRY_S = 0.5

# What is wanted: over the mount, its lag and one more attempt; pushed, a second.
PUSH_LIMIT_S = 1.0

TOKEN_VARIABLE = "RLKIT_BENCH_TOKEN"
START_S = 60.0


def write_adapter(folder: Path, megabytes: float, seed: int) -> None:
    """An adapter in peft's layout with this many bytes of weights, renamed into place as TRL does."""
    hidden = folder.with_name(f".{folder.name}")
    hidden.mkdir(parents=True)
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (hidden / "adapter_config.json").write_text(json.dumps(config))
    weights = np.random.default_rng(seed).normal(size=int(megabytes * 1e6 / 8)).astype(np.float32)
    save_file({"lora_A": weights, "lora_B": weights[::-1].copy()}, hidden / "adapter_model.safetensors")
    hidden.rename(folder)


@contextmanager
def started(command: list[str], environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    environment = os.environ | (environment or {})
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def said(process: subprocess.Popen[str]) -> str:
    """The last word of the first line a process prints: its address."""
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def proxy(kind: str, replicas: int, lag_s: float, folder: Path) -> Iterator[httpx.Client]:
    """A proxy over replicas that see `folder / "mount"` late; a client of it."""
    environment = {TOKEN_VARIABLE: secrets.token_urlsafe()}
    lags = ["--mount", str(folder / "mount"), "--mount-lag-s", str(lag_s)]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(started([sys.executable, "-m", "rlkit.serving.emulated", *lags]))
            for _ in range(replicas)
        ]
        config: dict[str, Any] = {
            "replicas": [said(server) for server in servers],
            "transport": {"kind": kind, "retry_s": RETRY_S},
            "adapter_root": str(folder),
            "port_file": str(folder / "port"),
        }
        if kind == "push":
            receivers = [
                stack.enter_context(
                    started(receiver_command(folder / f"disk-{port}", TOKEN_VARIABLE, port), environment)
                )
                for port in free_ports(replicas)
            ]
            config["receivers"] = [said(receiver) for receiver in receivers]
            config["receiver_token_env"] = TOKEN_VARIABLE
        (folder / "proxy.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "rlkit.serving.proxy", "--config", str(folder / "proxy.json")]
        process = stack.enter_context(started(command, environment))
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        client = stack.enter_context(httpx.Client(base_url=url, timeout=lag_s + 60))
        deadline = time.monotonic() + START_S
        while client.get("/health").status_code != 200:
            if time.monotonic() > deadline:
                raise SystemExit(f"the proxy does not get ready: {client.get('/health').text}")
            time.sleep(0.05)
        yield client


def measure(kind: str, options: argparse.Namespace) -> list[float]:
    """Seconds from the request to the acceptance everywhere, one a round."""
    seconds = []
    with (
        tempfile.TemporaryDirectory(prefix="rlkit-bench-") as temporary,
        proxy(kind, options.replicas, options.lag_s, Path(temporary)) as client,
    ):
        for version in range(1, options.rounds + 1):
            name = f"trl-policy-v{version}"
            path = Path(temporary) / "mount" / name
            write_adapter(path, options.megabytes, version)
            begin = time.perf_counter()
            answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
            seconds.append(time.perf_counter() - begin)
            if answer.status_code != 200:
                raise SystemExit(f"{kind}: {answer.text}")
            client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when a transport takes longer than is wanted of it."""
    parser = argparse.ArgumentParser(description="Seconds from the trainer's request to a policy on all replicas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--lag-s", type=float, default=3.0, help="how late the mount shows files")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    limits = {"bucket": options.lag_s + RETRY_S, "push": PUSH_LIMIT_S}
    rows = []
    for kind, limit in limits.items():
        seconds = measure(kind, options)
        rows.append(
            {
                "transport": kind,
                "median_s": statistics.median(seconds),
                "longest_s": max(seconds),
                "limit_s": limit,
                "rounds_s": seconds,
            }
        )
    if options.json:
        print(json.dumps({key: getattr(options, key) for key in ("replicas", "megabytes", "lag_s")} | {"rows": rows}))
    else:
        print(f"{options.megabytes:g} MB to {options.replicas} replicas; a mount {options.lag_s:g} s late")
        print(f"{'transport':<10}{'median s':>10}{'longest s':>11}{'limit s':>9}")
        for row in rows:
            print(f"{row['transport']:<10}{row['median_s']:>10.3f}{row['longest_s']:>11.3f}{row['limit_s']:>9.1f}")
    return 0 if all(row["longest_s"] <= row["limit_s"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
