"""The Jobs of one run as the launching side holds them: started, looked at, replaced, ended. A thin shell."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from huggingface_hub import JobInfo

from rlkit.engines.base import Event, OnEvent
from rlkit.engines.hf_addresses import Address
from rlkit.engines.hf_hub import Hub
from rlkit.engines.hf_jobs import RECEIVER_PORT, SERVER_PORT, JobRequest, direct_url
from rlkit.engines.hf_money import job_cost
from rlkit.engines.hf_watch import Failure, JobWatch, Limits, Reading, observe_all, phase_of
from rlkit.errors import RunFailed
from rlkit.serving.replica import HEALTH_TIMEOUT_S

# The first /server_info collects the machine's package list, which takes half a minute on a busy machine.
INFO_TIMEOUT_S = 120.0
TAIL_LINES = 15


@dataclass
class Started:
    """One Job: what it was asked for, what the Hub last said of it, and where it answers."""

    request: JobRequest
    info: JobInfo
    watch: JobWatch
    url: str | None = None  # through the Jobs proxy, for the launching side
    receiver: str | None = None
    over: bool = field(default=False)
    introduced: bool = field(default=False)  # it said what it serves, and that is what the recipe needs

    @property
    def address(self) -> Address:
        """Where the trainer's Job reaches it."""
        number, pushed = self.request.replica, RECEIVER_PORT in self.request.expose
        assert number is not None
        if self.request.group is not None:
            return Address(direct_url(number, SERVER_PORT), direct_url(number, RECEIVER_PORT) if pushed else None)
        assert self.url is not None
        return Address(self.url, self.receiver)


class Fleet:
    """The Jobs of one run by name; a context manager for the connection to their ports."""

    def __init__(self, hub: Hub, limits: Limits, prices: Mapping[str, float], on_event: OnEvent) -> None:
        self.jobs: dict[str, Started] = {}
        self._past: list[Started] = []  # Jobs that were replaced
        self._hub, self._limits, self._prices, self._on_event = hub, limits, prices, on_event
        self._client = httpx.Client(headers={"Authorization": f"Bearer {hub.token}"}, timeout=HEALTH_TIMEOUT_S)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    @property
    def usd(self) -> float:
        """What the Jobs have cost so far, in dollars, as far as they were looked at."""
        return round(sum(job_cost(job.info, self._prices) or 0.0 for job in [*self._past, *self.jobs.values()]), 4)

    @property
    def replicas(self) -> list[Started]:
        """All but the trainer, by number."""
        found = [job for job in self.jobs.values() if job.request.replica is not None]
        return sorted(found, key=lambda job: job.request.replica or 0)

    def start(self, request: JobRequest) -> Started:
        """Ask for a Job. Raises RlkitError."""
        info = self._hub.start(request)
        self._on_event(Event("log", text=f"{request.name}: {info.url}"))
        return self.hold(request, info)

    def hold(self, request: JobRequest, info: JobInfo) -> Started:
        """Watch a Job from now on, whoever started it."""
        watch = JobWatch(request.name, request.flavor, request.role == "replica", self._limits, time.monotonic())
        job = self.jobs[request.name] = Started(request, info, watch)
        return job

    def look(self) -> list[Failure]:
        """One look at every Job that is not over: what failed since the last; the rest is told."""
        readings = {name: self._read(job) for name, job in self.jobs.items() if not job.over}
        watches = {name: job.watch for name, job in self.jobs.items()}
        failures, told = observe_all(watches, time.monotonic(), readings)
        for text in told:
            self._on_event(Event("log", text=text))
        for failure in failures:
            self.jobs[failure.job].over = watches[failure.job].phase == "ended"
        return failures

    def serving(self, without: Started) -> int:
        """Other replicas that have answered and are not over."""
        return sum(job.watch.ready and not job.over for job in self.replicas if job is not without)

    def server_info(self, job: Started) -> Mapping[str, object] | None:
        """What a replica says it serves; None when it does not answer."""
        assert job.url is not None
        with contextlib.suppress(httpx.HTTPError, ValueError):
            asked = {"config_format": "json"}
            answer = self._client.get(f"{job.url}/server_info", params=asked, timeout=INFO_TIMEOUT_S)
            if answer.status_code == 429 or answer.status_code >= 500:
                return None  # the Jobs proxy's own trouble, and a replica that is still starting
            info = answer.json() if answer.status_code == 200 else {}
            return info if isinstance(info, dict) else {}
        return None

    def alive(self) -> int:
        """Replicas that are not over."""
        return sum(not job.over for job in self.replicas)

    def answering(self) -> int:
        """Those that answered at the last look."""
        return sum(job.watch.answers and not job.over for job in self.replicas)

    def drop(self, job: Started) -> None:
        """Give a Job up: end it if it has not, and keep its cost."""
        if not job.over:
            self._cancel(job.info.id)
        job.info = self._hub.look(job.info.id) or job.info
        job.over = True
        self._past.append(self.jobs.pop(job.request.name))

    def drop_ended(self) -> None:
        """Drop every Job that the Hub shows as ended."""
        for job in list(self.jobs.values()):
            info = self._hub.look(job.info.id)
            job.over |= info is not None and phase_of(info.status.stage) == "ended"
            if job.over:
                self.drop(job)

    def cancel_all(self, others: Sequence[str] = ()) -> None:
        """End every Job, and those with these ids; an error is told and does not stop the others."""
        for job_id in sorted({job.info.id for job in self.jobs.values() if not job.over} | set(others)):
            self._cancel(job_id)
        for job in self.jobs.values():
            job.info = self._hub.look(job.info.id) or job.info

    def failure(self, job: Started, text: str) -> RunFailed:
        """`text` with the Job's last log lines."""
        lines = self._hub.last_lines(job.info.id, TAIL_LINES)
        return RunFailed(f"{text}; its last log lines ({job.info.url}):\n" + "\n".join(lines))

    def _cancel(self, job_id: str) -> None:
        try:
            self._hub.cancel(job_id)
        except Exception as error:
            self._on_event(Event("log", text=f"{job_id} could not be cancelled, its lease will end it: {error}"))

    def _read(self, job: Started) -> Reading:
        info = self._hub.look(job.info.id)
        if info is None:
            return Reading(None)
        job.info = info
        urls = info.status.expose_urls or []
        # The ports are exposed one after the other.
        if urls and len(urls) >= len(job.request.expose) and job.url is None:
            job.url = url_of(urls, job.request.expose, SERVER_PORT)
            if RECEIVER_PORT in job.request.expose:
                job.receiver = url_of(urls, job.request.expose, RECEIVER_PORT)
        serves = job.watch.serves and phase_of(info.status.stage) == "running"
        return Reading(info.status.stage, info.status.message, self._healthy(job.url) if serves else None)

    def _healthy(self, url: str | None) -> bool:
        if url is None:
            return False
        with contextlib.suppress(httpx.HTTPError):
            return self._client.get(f"{url}/health").status_code == 200
        return False


def url_of(urls: Sequence[str], ports: Sequence[int], port: int) -> str:
    """The address of an exposed port: the one that names it (`https://<id>--8000.hf.jobs`), else by its place."""
    named = [url for url in urls if f"--{port}." in url]
    return (named[0] if named else urls[list(ports).index(port)]).rstrip("/")
