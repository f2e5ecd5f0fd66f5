"""A Job of the emulated Hub: a process on this machine.

A process has neither mounts nor a network of its own, so what a container would give it is written into its command
and environment: a volume's mount path becomes the bucket's folder, an exposed port a free one, an alias of its network
group the last number of a loopback address. Its image is a `python3`
whose `pip install` unpacks the wheels it is given and takes everything else as installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hub.hub_front import Front, free_port

TERMINAL = {"COMPLETED", "CANCELED", "ERROR", "DELETED"}
GRACE_S = 5.0  # between SIGTERM and SIGKILL, as a container's runtime leaves
PYTHON = """#!/bin/sh
if [ "$1" = -m ] && [ "$2" = pip ]; then
    for wheel; do case "$wheel" in *.whl) "{python}" -m zipfile -e "$wheel" "$JOB_SITE" ;; esac; done
    exit 0
fi
exec "{python}" "$@"
"""


@dataclass
class Group:
    """A network group: `prefix` and an alias' number make a loopback address."""

    prefix: str
    aliases: dict[str, int] = field(default_factory=dict)

    def host(self, alias: str) -> str:
        """Where the Job with this alias is."""
        return f"{self.prefix}{self.aliases.setdefault(alias, len(self.aliases) + 1)}"


@dataclass
class EmulatedJob:
    """One Job: what was asked for, how far it is, and what it wrote."""

    id: str
    spec: dict[str, Any]
    namespace: str
    folder: Path
    buckets: Path
    temporary: Path
    token: str
    hub_url: str
    group: Group | None = None
    image: Mapping[str, str] = field(default_factory=dict)  # modules that this image has, by path
    stage: str = "SCHEDULING"
    message: str | None = None
    created: float = field(default_factory=time.time)
    started: float | None = None
    finished: float | None = None
    lines: list[str] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)
    network: list[Front] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changed = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.labels: dict[str, str] = self.spec.get("labels") or {}

    @property
    def is_over(self) -> bool:
        """Whether it is in a terminal stage."""
        return self.stage in TERMINAL

    def describe(self) -> dict[str, Any]:
        """The Job as the Hub's API shows it."""
        end = self.finished or time.time()
        running = None if self.started is None else int(end - self.started)
        return {
            "id": self.id,
            "createdAt": _iso(self.created),
            "startedAt": _iso(self.started),
            "finishedAt": _iso(self.finished),
            "dockerImage": self.spec.get("dockerImage"),
            "command": self.spec.get("command"),
            "arguments": self.spec.get("arguments"),
            "environment": self.spec.get("environment"),
            "secrets": dict.fromkeys(self.spec.get("secrets") or {}, None),  # names only: the Hub keeps the values
            "flavor": self.spec.get("flavor"),
            "labels": self.labels,
            "volumes": self.spec.get("volumes"),
            "network": self.spec.get("network"),
            "status": {
                "stage": self.stage,
                "message": self.message,
                "exposeUrls": [front.url for front in self.fronts] or None,
            },
            "durations": {
                "schedulingSecs": None if self.started is None else int(self.started - self.created),
                "runningSecs": running,
                "totalSecs": int(end - self.created),
            },
            "owner": {"id": "0", "name": self.namespace, "type": "user"},
            "initiator": {"type": "user", "id": "0", "name": self.namespace},
        }

    async def run(self) -> None:
        """Start the process and follow it to its end."""
        self.folder.mkdir(parents=True)
        ports = (self.spec.get("expose") or {}).get("ports") or []
        mapped = {port: free_port() for port in ports}
        for port in ports:
            front = Front(mapped[port], self.token)
            await front.start()
            self.fronts.append(front)
        for alias in (self.spec.get("network") or {}).get("aliases") or []:
            assert self.group is not None
            for port in ports:
                await self._join(self.group.host(alias), port, mapped[port])
        inside = self._translation(mapped)
        self.process = await asyncio.create_subprocess_exec(
            *[inside(part) for part in self.spec["command"]],
            cwd=self.folder,
            env=self._environment(inside),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            limit=2**24,
        )
        if self.is_over:  # cancelled before it ran
            await self._end_process()
            await self._close_fronts()
            return
        self.started = time.time()
        self.add_line(f"===== Job started at {_iso(self.started)} =====")
        self.move_to("RUNNING")
        assert self.process.stdout is not None
        reading = asyncio.create_task(self._read(self.process.stdout))
        try:
            await asyncio.wait_for(self.process.wait(), self.spec.get("timeoutSeconds"))
        except TimeoutError:
            await self._end_process()
            self.finish("ERROR", "Job timeout")
        # The leader's children may hold the pipe: the container would be gone.
        self._signal(signal.SIGKILL)
        await reading
        code = self.process.returncode
        if not self.is_over:
            if code == 0:
                self.finish("COMPLETED", None)
            else:
                self.finish("ERROR", f"Job failed with exit code: {code}. Reason: Error")
        await self._close_fronts()

    async def _join(self, host: str, port: int, actual: int) -> None:
        front = Front(actual, None)
        for _ in range(100):  # the Job that had the alias before may not be gone yet
            with contextlib.suppress(OSError):
                await front.start(host, port)
                self.network.append(front)
                return
            await asyncio.sleep(0.05)
        raise OSError(f"{host}:{port} stays in use")

    async def _close_fronts(self) -> None:
        for front in [*self.fronts, *self.network]:
            await front.stop()

    async def cancel(self) -> None:
        """End it as the Hub does: the stage first, then the process."""
        if not self.is_over:
            self.finish("CANCELED", None)
            await self._end_process()

    def kill(self) -> None:
        """The machine under it fails."""
        self._signal(signal.SIGKILL)

    def finish(self, stage: str, message: str | None) -> None:
        """Enter a terminal stage."""
        self.finished, self.message = time.time(), message
        self.move_to(stage)

    def move_to(self, stage: str) -> None:
        """Change the stage and tell who waits."""
        self.stage = stage
        self._notify()

    def add_line(self, line: str) -> None:
        """One more line of log."""
        self.lines.append(line)
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.add_line(line.decode("utf-8", "replace").rstrip("\n"))

    async def _end_process(self) -> None:
        if self.process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), GRACE_S)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def _translation(self, ports: dict[int, int]) -> Any:
        mounts = {
            volume["mountPath"]: str(self.buckets / volume["source"] / (volume.get("path") or ""))
            for volume in self.spec.get("volumes") or []
        }

        def inside(text: str) -> str:
            for mount, folder in mounts.items():
                text = re.sub(rf"(?<![\w/.-]){re.escape(mount)}(?![\w.-])", folder.rstrip("/"), text)
            for port, actual in ports.items():
                text = re.sub(rf"\b{port}\b", str(actual), text)
            for alias, number in (self.group.aliases if self.group else {}).items():
                text = text.replace(f"${{HF_NETWORK_GROUP_PREFIX}}{alias}:", f"${{HF_NETWORK_GROUP_PREFIX}}{number}:")
            return text

        return inside

    def _environment(self, inside: Any) -> dict[str, str]:
        site, binaries = self.folder / "site", self.folder / "bin"
        for folder in (site, binaries, self.temporary):
            folder.mkdir()
        for name, text in self.image.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
        (binaries / "python3").write_text(PYTHON.format(python=sys.executable))
        (binaries / "python3").chmod(0o755)
        given = {name: inside(str(value)) for name, value in self.spec["environment"].items()}
        return {
            "PATH": f"{binaries}:/usr/bin:/bin",
            "PYTHONPATH": str(site),
            "JOB_SITE": str(site),
            "PYTHONUNBUFFERED": "1",
            "HOME": str(self.folder),
            "TMPDIR": str(self.temporary),
            "HF_ENDPOINT": self.hub_url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "JOB_ID": self.id,
            "OMP_NUM_THREADS": "1",
            "no_proxy": "127.0.0.1",
            **({} if self.group is None else {"HF_NETWORK_GROUP_PREFIX": self.group.prefix}),
            **given,
            **{name: str(value) for name, value in (self.spec.get("secrets") or {}).items()},
        }


def _iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
