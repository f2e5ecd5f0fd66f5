from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proxy_bench import PATIENCE_S, PROMPT

from rlkit.errors import BadInput
from rlkit.serving.emulated_replica import EmulatedReplica
from rlkit.serving.proxy import Proxy, main, run_until_stopped, serve
from rlkit.serving.proxy_config import ProxyConfig, load_proxy_config


def write_config(folder: Path, **fields: Any) -> Path:
    path = folder / "proxy-config.json"
    path.write_text(json.dumps({"replicas": ["http://127.0.0.1:9"]} | fields))
    return path


@pytest.fixture
def started() -> Iterator[Any]:
    """Starts commands as processes that do not outlive the test."""
    with ExitStack() as stack:

        def start(*command: str, **options: Any) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen([sys.executable, *command], text=True, stdout=subprocess.PIPE, **options)
            )
            stack.callback(process.kill)
            return process

        yield start


async def written(path: Path) -> str:
    """Wait for a file with something in it."""
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.02)
    return path.read_text()


async def test_a_process_serves_writes_its_port_and_counts_until_sigterm(
    replicas: list[EmulatedReplica], http: aiohttp.ClientSession, tmp_path: Path, started: Any
) -> None:
    port_file, stats_file = tmp_path / "port", tmp_path / "run" / "proxy.json"
    config = write_config(
        tmp_path,
        replicas=[replica.url for replica in replicas],
        routing={"policy": "prefix", "spill_threshold": 8, "block_size": None},
        transport={"kind": "bucket", "retry_s": 0.5, "deadline_s": 60.0, "keep_cache": True},
        max_loras=6,
        port_file=str(port_file),
        stats_file=str(stats_file),
    )
    process = started("-m", "rlkit.serving.proxy", "--config", str(config))
    url = f"http://127.0.0.1:{int(await written(port_file))}"
    async with asyncio.timeout(PATIENCE_S):
        while (await http.get(f"{url}/health")).status != 200:
            await asyncio.sleep(0.02)
    for _ in range(3):
        async with http.post(f"{url}/v1/completions", json={"model": "emulated", "prompt": PROMPT}) as response:
            assert response.status == 200
    process.send_signal(signal.SIGTERM)
    out, _ = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert process.returncode == 0
    assert out == f"proxy: {url} -> {replicas[0].url}, {replicas[1].url}\n"
    stats = json.loads(stats_file.read_text())
    assert stats["routed"] == stats["affinity"] + stats["unmatched"] == 3
    assert sum(replica["vllm"]["request_success_total"] for replica in stats["per_replica"]) == 3
    assert list(stats_file.parent.iterdir()) == [stats_file]


async def test_the_counters_are_written_while_it_runs(replicas: list[EmulatedReplica], tmp_path: Path) -> None:
    path = tmp_path / "proxy.json"
    async with serve(ProxyConfig(replicas=[replica.url for replica in replicas], stats_file=path)):
        assert json.loads(await written(path))["routed"] == 0


async def test_a_proxy_ends_with_the_process_that_started_it(tmp_path: Path, started: Any) -> None:
    port_file, stats_file = tmp_path / "port", tmp_path / "proxy.json"
    config = write_config(tmp_path, port_file=str(port_file), stats_file=str(stats_file))
    starter = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-m', 'rlkit.serving.proxy', '--config', {str(config)!r}]); time.sleep(600)"
    )
    parent = started("-c", starter)
    await written(port_file)
    await written(stats_file)
    stats_file.unlink()
    os.kill(parent.pid, signal.SIGKILL)
    # The proxy holds the other end of the pipe: this returns when it has ended, too.
    await asyncio.to_thread(parent.communicate, timeout=PATIENCE_S)
    assert json.loads(stats_file.read_text())["routed"] == 0  # it had the time to write


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": []}, "replicas: expected a list of at least 1, each item text, got []"),
        ({"replicas": ["localhost:8000"]}, "replicas: expected base URLs such as http://127.0.0.1:8000"),
        ({"replicas": ["http://a", "http://a"]}, "replicas: one is listed twice"),
        ({"replicas": ["http://a", "http://a/"]}, "replicas: one is listed twice"),
        ({"replicas": ["http://a:99999"]}, "replicas: Port out of range 0-65535"),
        ({"replicas": ["http://a:b"]}, "replicas: Port could not be cast to integer value as 'b'"),
        ({"replicas": ["http://\u00e4:80"]}, "replicas: expected base URLs such as http://127.0.0.1:8000"),
        ({"replicas": ["http://a b"]}, "replicas: expected base URLs such as http://127.0.0.1:8000"),
        ({"replicas": ["http://me:pw@a"]}, "replicas: a base URL has no user, password"),
        ({"replicas": ["http://a?token=x"]}, "replicas: a base URL has no user, password"),
        ({"port": "8000"}, "port: expected a whole number of at least 0 and below 65536, got '8000'"),
        ({"ports": 1}, "ports: unknown field, did you mean port?"),
        ({"routing": {"policy": "fastest"}}, "routing.policy: expected prefix or round-robin, got 'fastest'"),
        (
            {"transport": {"kind": "push"}},
            "receivers: transport push needs one beside each of the 1 replicas, 0 are given",
        ),
        (
            {"transport": {"kind": "push"}, "receivers": ["http://r"]},
            "receiver_token_env: transport push needs the receivers' token",
        ),
        ({"receivers": ["http://r"]}, "receivers: they take pushed adapters, and transport.kind is bucket"),
        ({"host": "0.0.0.0"}, "incoming_token_env: needed when the proxy listens beyond this machine (host 0.0.0.0)"),
        (
            {"host": "::", "incoming_token_env": "PATH"},
            "adapter_root: needed when the proxy listens beyond this machine (host ::)",
        ),
        ({"token_env": "NO_SUCH_VARIABLE"}, "token_env: the environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_bad_configurations_are_one_line(
    fields: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, exit_with_parent=False, **fields)
    assert main(["--config", str(path)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("proxy: ")
    assert message in line


def test_configuration_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere.json: cannot read the proxy's configuration: No such file"):
        load_proxy_config(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(BadInput, match=r"broken.json: broken JSON: "):
        load_proxy_config(tmp_path / "broken.json")


async def test_a_port_that_is_taken(replicas: list[EmulatedReplica]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"port: cannot listen on 127.0.0.1:{port}"):
            async with serve(ProxyConfig(replicas=[replicas[0].url], port=port)):
                pass


async def test_the_command_says_what_happens_to_the_replicas(replicas: list[EmulatedReplica], started: Any) -> None:
    command = ("-m", "rlkit", "proxy", "--replica", replicas[0].url, "--port", "0")
    process = started(*command, stderr=subprocess.PIPE)
    lines = [(await asyncio.to_thread(process.stderr.readline)).strip() for _ in range(2)]
    assert any(line.endswith("INFO replica 0 is in service") for line in lines), lines


async def test_a_host_that_is_none(replicas: list[EmulatedReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "t")
    label = "a" * 64  # longer than a label of a name may be
    config = ProxyConfig(
        replicas=[replicas[0].url], host=label, port=1, incoming_token_env="TOKEN", adapter_root=Path("/")
    )
    with pytest.raises(BadInput, match=f"port: cannot listen on {label}:1: not a host's name"):
        async with serve(config):
            pass


async def test_the_url_of_an_ipv6_address(replicas: list[EmulatedReplica], http: aiohttp.ClientSession) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    async with serve(ProxyConfig(replicas=[replicas[0].url], host="::1")) as proxy:
        assert proxy.url.startswith("http://[::1]:")
        async with http.get(f"{proxy.url}/is_paused") as response:
            assert response.status in (200, 503)


async def test_the_emulated_replica_runs_by_itself(http: aiohttp.ClientSession, started: Any) -> None:
    process = started("-m", "rlkit.serving.emulated", "--port", "0")
    url = (await asyncio.to_thread(process.stdout.readline)).strip()
    async with http.get(f"{url}/health") as response:
        assert response.status == 200


async def test_a_proxy_that_stops_watching_ends_with_its_error(
    replicas: list[EmulatedReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_down(self: Proxy, replica: int) -> None:
        raise RuntimeError("a mistake in the watch")

    monkeypatch.setattr(Proxy, "_watch", break_down)
    with pytest.raises(ExceptionGroup) as caught:
        await run_until_stopped(ProxyConfig(replicas=[replicas[0].url]))
    assert caught.group_contains(RuntimeError, match="a mistake in the watch")
