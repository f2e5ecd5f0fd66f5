"""`rlkit check --measure`: two cheap Jobs that say how this bucket's mount and the Jobs proxy behave. A thin shell."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from huggingface_hub import JobInfo

from rlkit.engines import hf_probe
from rlkit.engines.base import Event, OnEvent
from rlkit.engines.hf_figures import Figures, figures_from
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import MOUNT, SERVER_PORT, TOOL_LABEL, JobRequest
from rlkit.engines.hf_watch import phase_of
from rlkit.errors import RunFailed
from rlkit.recipe import Recipe

Found = TypeVar("Found")

IMAGE = "python:3.12-slim"  # the probe needs the standard library alone
FLAVOR = "cpu-basic"
TIMEOUT_S = 900  # of each Job; both end after two or three minutes
# A rollout of a reasoning model takes minutes: what cuts a response off sooner would cut rollouts off.
HOLDS_S = (10.0, 60.0, 120.0)
POLL_S = 2.0
# The log of both is a dozen lines.
LINES = 50


@dataclass(frozen=True)
class MeasureOptions:
    """How long to hold responses, and how long to wait for the Jobs."""

    holds_s: tuple[float, ...] = HOLDS_S
    poll_s: float = POLL_S
    patience_s: float = hf_probe.PATIENCE_S


def measure(hub: Hub, recipe: Recipe, on_event: OnEvent, options: MeasureOptions | None = None) -> Figures:
    """Run both Jobs, ask the exposed port, end them. Raises RlkitError; whatever happens, both are cancelled."""
    return _Measurement(hub, recipe, on_event, options or MeasureOptions()).run()


class _Measurement:
    def __init__(self, hub: Hub, recipe: Recipe, on_event: OnEvent, options: MeasureOptions) -> None:
        self._hub, self._recipe, self._on_event, self._options = hub, recipe, on_event, options
        self._name = f"check-{secrets.token_hex(3)}"
        self._bucket = f"{hub.namespace}/{recipe.hardware.bucket}"
        self._started: list[JobInfo] = []

    def run(self) -> Figures:
        hub, folder = self._hub, f"checks/{self._name}"
        hub.make_bucket(self._bucket)
        probe = f"{folder}/hf_probe.py"
        hub.put(self._bucket, [(Path(hf_probe.__file__), probe)])
        command = ("python3", f"{MOUNT}/{probe}")
        data = ("--folder", f"{MOUNT}/{folder}/data", "--patience-s", f"{self._options.patience_s:g}")
        try:
            looker = self._start("look", (*command, "look", *data, "--port", str(SERVER_PORT)), read_only=True)
            url = self._until(looker, lambda job: self._listening(job), "to listen")
            refused = self._status(url)
            reaches = self._token_reaches(url)
            writer = self._start("write", (*command, "write", *data), read_only=False)
            self._until(writer, lambda job: phase_of(job.status.stage) == "ended" or None, "to write", may_end=True)
            self._until(looker, lambda job: self._has_looked(job), "to see the files")
            held = self._longest_hold(url)
            written, looked = (hub.last_lines(job.id, LINES) for job in (writer, looker))
            return figures_from(written, looked, refused, reaches, held)
        finally:
            for job in self._started:
                hub.cancel(job.id)
            hub.remove(self._bucket, folder)

    def _start(self, role: str, command: tuple[str, ...], read_only: bool) -> JobInfo:
        request = JobRequest(
            role="replica",
            replica=None,
            image=IMAGE,
            command=command,
            env={},
            flavor=FLAVOR,
            timeout_s=TIMEOUT_S,
            labels={**TOOL_LABEL, "run": self._name, "role": role, "name": f"{self._name}-{role}"},
            volumes=((self._bucket, MOUNT, read_only),),
            expose=(SERVER_PORT,) if role == "look" else (),
        )
        job = self._hub.start(request)
        self._started.append(job)
        self._on_event(Event("log", text=f"{role}: {job.url}"))
        return job

    def _until(self, job: JobInfo, found: Callable[[JobInfo], Found | None], what: str, may_end: bool = False) -> Found:
        minutes = self._recipe.hardware.scheduling_minutes
        deadline = time.monotonic() + minutes * 60
        while time.monotonic() < deadline:
            seen = self._hub.look(job.id)
            if seen is not None:
                result = found(seen)
                if result is not None:
                    return result
                if phase_of(seen.status.stage) == "ended" and not may_end:
                    lines = "\n".join(self._hub.last_lines(job.id, LINES))
                    raise RunFailed(f"{job.url} ended in stage {seen.status.stage}; its last log lines:\n{lines}")
            time.sleep(self._options.poll_s)
        raise RunFailed(f"gave up waiting for {job.url} {what} after {minutes:g} minutes")

    def _listening(self, job: JobInfo) -> str | None:
        urls = job.status.expose_urls or []
        if phase_of(job.status.stage) != "running" or not urls:
            return None
        return urls[0] if self._get(urls[0], 0, token=True) is not None else None

    def _has_looked(self, job: JobInfo) -> bool | None:
        lines = self._hub.last_lines(job.id, LINES)
        return True if any('"event": "looked"' in line for line in lines) else None

    def _status(self, url: str) -> int | None:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/hold", timeout=30).status_code
        return None

    def _token_reaches(self, url: str) -> bool | None:
        answer = self._get(url, 0, token=True)
        return None if answer is None else bool(answer.json().get("authorization"))

    def _longest_hold(self, url: str) -> float | None:
        longest = None
        for seconds in self._options.holds_s:
            self._on_event(Event("log", text=f"holding a response for {seconds:g} s"))
            if self._get(url, seconds, token=True) is None:
                break
            longest = seconds
        return longest

    def _get(self, url: str, hold_s: float, token: bool) -> httpx.Response | None:
        headers = {"Authorization": f"Bearer {self._hub.token}"} if token else {}
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{url}/hold", params={"s": hold_s}, headers=headers, timeout=hold_s + 30)
            return answer if answer.status_code == 200 else None
        return None
