"""The proxies that are compared, and the processes around them."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import trustme

HERE = Path(__file__).parent

# Every process here imports little and says so when it listens.
START_S = 60.0


class Missing(Exception):
    """A proxy that cannot be measured here, and why."""


@dataclass(frozen=True)
class Subject:
    """A proxy, and whether its replicas are behind TLS."""

    name: str
    kind: str
    is_tls: bool


SUBJECTS = [
    Subject(f"{name}{', TLS' if is_tls else ''}", name, is_tls)
    for is_tls in (False, True)
    for name in ("rlkit", "vllm-router", "plain aiohttp")
]


@dataclass
class Running:
    """A proxy that runs."""

    url: str
    pid: int

    def cpu_s(self) -> tuple[float, float]:
        """Time of the process and its children so far, and the kernel's part of it, in seconds."""
        process = psutil.Process(self.pid)
        times = [one.cpu_times() for one in [process, *process.children(recursive=True)]]
        kernel = float(sum(one.system for one in times))
        return kernel + float(sum(one.user for one in times)), kernel

    def peak_mb(self) -> float:
        """The most memory the process has had so far (VmHWM), in MB."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) / 1000 if found else 0.0


class Machine:
    """Two replicas, with and without TLS, and what starts proxies before them; a context manager."""

    def __init__(self, folder: Path, vllm_router: str | None) -> None:
        self._folder = folder
        self._vllm_router = vllm_router
        self._stack = ExitStack()

    def __enter__(self) -> Machine:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self._folder / "ca.pem"))
        certificate = authority.issue_cert("localhost")
        certificate.cert_chain_pems[0].write_to_path(str(self._folder / "cert.pem"))
        certificate.private_key_pem.write_to_path(str(self._folder / "key.pem"))
        self._environment = {**os.environ, "SSL_CERT_FILE": str(self._folder / "ca.pem")}
        tls = ["--tls", str(self._folder / "cert.pem"), str(self._folder / "key.pem")]
        self._replicas = {False: self._start_replicas([]), True: self._start_replicas(tls)}
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def plain_url(self) -> str:
        """One of the replicas, without TLS."""
        return self._replicas[False][0]

    def answer_with(self, size: int, gate: int) -> None:
        """Completions have bodies of this many bytes and are answered once `gate` of them wait."""
        for urls in self._replicas.values():
            _get(f"{urls[0]}/set?bytes={size}&gate={gate}", self._folder / "ca.pem")

    @contextmanager
    def running(self, subject: Subject) -> Iterator[Running]:
        """Start a proxy, wait until it answers, stop it at the end. Raises Missing."""
        replicas = self._replicas[subject.is_tls]
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        with ExitStack() as stack:
            process = self._process(stack, self._command(subject.kind, replicas, port))
            deadline = time.monotonic() + START_S
            while not self._answers(url):
                if process.poll() is not None:
                    raise Missing(f"it ended with code {process.returncode}")
                if time.monotonic() > deadline:
                    raise Missing("it does not answer")
                time.sleep(0.05)
            yield Running(url, process.pid)

    def _command(self, kind: str, replicas: list[str], port: int) -> list[str]:
        if kind == "rlkit":
            config = self._folder / "proxy.json"
            config.write_text(json.dumps({"replicas": replicas, "port": port}))
            return [sys.executable, "-m", "rlkit.serving.proxy", "--config", str(config)]
        if kind == "vllm-router":
            if self._vllm_router is None:
                raise Missing("its command is not there: --vllm-router PATH")
            options = ["--policy", "round_robin", "--max-concurrent-requests", "16384", "--log-level", "error"]
            options += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())]
            return [self._vllm_router, "--worker-urls", *replicas, *options]
        options = [option for replica in replicas for option in ("--replica", replica)]
        return [sys.executable, str(HERE / "plain_proxy.py"), "--port", str(port), *options]

    def _answers(self, url: str) -> bool:
        body = b'{"model": "stub", "prompt": [1]}'
        request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _process(self, stack: ExitStack, command: list[str]) -> subprocess.Popen[str]:
        process = stack.enter_context(
            subprocess.Popen(
                command,
                text=True,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        stack.callback(process.kill)
        return process

    def _start_replicas(self, options: list[str]) -> list[str]:
        process = self._process(self._stack, [sys.executable, str(HERE / "stub_replicas.py"), *options])
        assert process.stdout is not None
        return [process.stdout.readline().strip() for _ in range(2)]


def load(url: str, connections: int, requests: int, proxy: Running | None = None) -> dict[str, Any]:
    """Run the load generator; its result, with requests per second and the CPU seconds `proxy` took for 1,000 requests.

    Two requests a connection go before and are not counted: they open the connections to the replicas.
    """
    numbers = {"--connections": connections, "--requests": requests, "--warm-up": 2 * connections}
    options = [option for name, value in numbers.items() for option in (name, str(value))]
    command = [sys.executable, str(HERE / "load.py"), "--url", url, *options]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        before = proxy.cpu_s() if proxy is not None else (0.0, 0.0)
        process.stdin.write("go\n")
        process.stdin.flush()
        result: dict[str, Any] = json.loads(process.stdout.readline())
        after = proxy.cpu_s() if proxy is not None else (0.0, 0.0)
    cpu_s, kernel_s = (1000 * (now - then) / requests for now, then in zip(after, before, strict=True))
    return {**result, "requests_per_s": requests / result["seconds"], "cpu_s": cpu_s, "kernel_s": kernel_s}


def _get(url: str, authority: Path) -> None:
    context = ssl.create_default_context(cafile=str(authority)) if url.startswith("https") else None
    with urllib.request.urlopen(url, timeout=START_S, context=context) as answer:
        answer.read()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
