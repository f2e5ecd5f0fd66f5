"""An emulated Hub: the Jobs, bucket and whoami endpoints that huggingface_hub calls, on loopback.

The client is the real one, unpatched, with this server's address as its endpoint. `EmulatedHub` runs in a thread of its
own; every request is kept in `requests`, and `faults` says what goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from aiohttp import web
from hub.hub_buckets import Buckets
from hub.hub_jobs import EmulatedJob, Group

TOKEN = "hf_emulatedEMULATEDemulatedEMULATED12"
USER = "tester"


def _hardware(name: str, hourly_usd: float, gpu: str | None = None, quantity: int = 1) -> dict[str, Any]:
    per_minute = hourly_usd / 60
    accelerator = {
        "type": "gpu", "model": gpu, "quantity": str(quantity), "vram": f"{141 * quantity} GB",
        "manufacturer": "Nvidia",
    }  # fmt: skip
    return {
        "name": name, "prettyName": name, "cpu": "2 vCPU", "ram": "16 GB", "ephemeralStorage": "50 GB",
        "accelerator": accelerator if gpu else None, "unitCostMicroUSD": round(per_minute * 1e6),
        "unitCostUSD": per_minute, "unitLabel": "minute",
    }  # fmt: skip


# The published set-up's prices: two H200 training and two serving were $20 an hour.
HARDWARE = [_hardware("cpu-basic", 0.01), _hardware("h200", 5.0, "H200"), _hardware("h200x2", 10.0, "H200", 2)]


@dataclass
class Request:
    """One request as it came in."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: Any


@dataclass
class Faults:
    """What goes wrong; everything works by default."""

    stuck_flavors: set[str] = field(default_factory=set)  # Jobs of these never leave SCHEDULING
    stage_of: dict[str, str] = field(default_factory=dict)  # Job id -> the stage that is shown instead
    answers: list[tuple[str, str, int, int]] = field(default_factory=list)  # method, part of the path, status, times
    drop_log_after: int | None = None  # cut the next log stream after so many lines, once
    read_only_token: bool = False  # every request that changes something is 403

    def answer_for(self, method: str, path: str) -> int | None:
        """The status a request is refused with, if any."""
        for number, (wanted, part, status, times) in enumerate(self.answers):
            if method == wanted and part in path and times > 0:
                self.answers[number] = (wanted, part, status, times - 1)
                return status
        return 403 if self.read_only_token and method in ("POST", "PUT", "DELETE") else None


class EmulatedHub:
    """A context manager around the server; `url` and `token` are for the client."""

    def __init__(self, root: Path) -> None:
        self.root, self.token, self.user = root, TOKEN, USER
        self.faults, self.requests = Faults(), list[Request]()
        self.jobs: dict[str, EmulatedJob] = {}
        self.image: dict[str, str] = {}  # what the Jobs' image has beside what is installed here
        self.groups: dict[str, Group] = {}
        self.buckets = Buckets(root)
        # Of all Jobs; vLLM makes sockets there, whose paths have little room.
        self.temporary = Path(tempfile.mkdtemp(prefix="hub-"))
        self.url = ""
        self._ids = itertools.count(0x687FB701029421AE5549D000)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> EmulatedHub:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="emulated-hub", daemon=True)
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def running(self) -> list[EmulatedJob]:
        """Jobs that are not over."""
        return [job for job in self.jobs.values() if not job.is_over]

    def of_role(self, role: str) -> list[EmulatedJob]:
        """Jobs whose label says so, oldest first."""
        return [job for job in self.jobs.values() if job.labels.get("role") == role]

    def until(self, true: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Wait for a condition on the Jobs, looked at whenever one of them changes or a moment passes."""
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, "gave up waiting"
            time.sleep(0.02)

    def kill(self, job: EmulatedJob) -> None:
        """Let the machine under a Job fail."""
        self._loop.call_soon_threadsafe(job.kill)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=2**30)
        job, bucket = "/api/jobs/{namespace}/{id}", "/api/buckets/{namespace}/{name}"
        app.add_routes(
            [
                web.get("/api/whoami-v2", self._whoami),
                web.get("/api/jobs/hardware", self._hardware),
                web.get("/api/jobs/{namespace}", self._list),
                web.post("/api/jobs/{namespace}", self._create),
                web.get(job, self._inspect),
                web.get(f"{job}/logs", self._logs),
                web.post(f"{job}/cancel", self._cancel),
                web.put(f"{job}/labels", self._labels),
                web.get(bucket, self._bucket),
                web.post(bucket, self._create_bucket),
                web.get(f"{bucket}/tree", self._tree),
                web.get(f"{bucket}/tree/{{prefix:.*}}", self._tree),
                web.post(f"{bucket}/paths-info", self._paths),
                web.post(f"{bucket}/batch", self._batch),
                web.get(f"{bucket}/xet-{{purpose:read|write}}-token", self._xet_token),
                web.get("/buckets/{namespace}/{name}/resolve/{path:.*}", self._resolve),
                web.get("/xet-store/{token}", self._store),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.buckets.token_url = f"{self.url}/xet-store"

    async def _stop(self) -> None:
        await asyncio.gather(*(job.cancel() for job in self.jobs.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/xet-store/"):
            return await handler(request)
        text = await request.text()
        try:
            body = json.loads(text) if text else None
        except ValueError:
            body = text
        query = {name: request.query.getall(name) for name in request.query}
        self.requests.append(Request(request.method, request.path, query, body))
        if request.path != "/api/jobs/hardware" and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Invalid username or password."}, status=401)
        status = self.faults.answer_for(request.method, request.path)
        if status is not None:
            return web.json_response({"error": f"made up by the test: {status}"}, status=status)
        return await handler(request)

    async def _whoami(self, request: web.Request) -> web.Response:
        access = {"accessToken": {"displayName": "rlkit", "role": "write"}, "type": "access_token"}
        return web.json_response({"type": "user", "id": "0", "name": self.user, "orgs": [], "auth": access})

    async def _hardware(self, request: web.Request) -> web.Response:
        return web.json_response(HARDWARE)

    async def _list(self, request: web.Request) -> web.Response:
        wanted = dict(label.split("=", 1) for label in request.query.getall("label", []))
        stages = request.query.getall("stage", [])
        found = [job for job in self.jobs.values() if all(job.labels.get(k) == v for k, v in wanted.items())]
        return web.json_response([self._shown(job) for job in found if not stages or job.stage in stages])

    async def _create(self, request: web.Request) -> web.Response:
        spec = await request.json()
        if spec["flavor"] not in [hardware["name"] for hardware in HARDWARE]:
            return web.json_response({"error": f"unknown flavor {spec['flavor']}"}, status=400)
        number = f"{next(self._ids):024x}"
        namespace = request.match_info["namespace"]
        folders = (self.root / "jobs" / number, self.root / "buckets", self.temporary / number[-4:])
        group = self._group(spec)
        job = EmulatedJob(number, spec, namespace, *folders, self.token, self.url, group, self.image)
        self.jobs[number] = job
        if spec["flavor"] not in self.faults.stuck_flavors:
            task = asyncio.create_task(job.run())
            self._tasks.add(task)
        return web.json_response(self._shown(job))

    def _group(self, spec: dict[str, Any]) -> Group | None:
        name = (spec.get("network") or {}).get("group")
        if name is None:
            return None
        # Of its own on this machine, whose loopback network other tests share.
        prefix = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}."
        return self.groups.setdefault(name, Group(prefix))

    async def _inspect(self, request: web.Request) -> web.Response:
        return web.json_response(self._shown(self._job(request)))

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self._job(request)
        await job.cancel()
        return web.json_response(self._shown(job))

    async def _labels(self, request: web.Request) -> web.Response:
        job = self._job(request)
        job.labels = (await request.json())["labels"]
        return web.json_response(self._shown(job))

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        job = self._job(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = max(len(job.lines) - int(request.query["tail"]), 0) if "tail" in request.query else 0
        written = 0
        while True:
            changed = job.changed
            for line in job.lines[sent:]:
                event = json.dumps({"data": line, "timestamp": "2026-01-01T00:00:00.000Z"})
                await response.write(f"data: {event}\n\n".encode())
                sent, written = sent + 1, written + 1
                if self.faults.drop_log_after is not None and written >= self.faults.drop_log_after:
                    self.faults.drop_log_after = None
                    assert request.transport is not None
                    request.transport.abort()
                    return response
            if job.is_over and sent >= len(job.lines):
                return response
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), 1.0)

    async def _bucket(self, request: web.Request) -> web.Response:
        return web.json_response(self.buckets.info(self._existing(request)))

    async def _create_bucket(self, request: web.Request) -> web.Response:
        bucket = _bucket_id(request)
        new = self.buckets.create(bucket)
        answer = {"url": f"{self.url}/buckets/{bucket}", "name": bucket}
        return web.json_response(answer if new else {**answer, "error": "exists already"}, status=200 if new else 409)

    async def _tree(self, request: web.Request) -> web.Response:
        prefix = unquote(request.match_info.get("prefix", ""))
        recursive = request.query.get("recursive", "").lower() == "true"
        return web.json_response(await asyncio.to_thread(self.buckets.tree, self._existing(request), prefix, recursive))

    async def _paths(self, request: web.Request) -> web.Response:
        bucket, paths = self._existing(request), (await request.json())["paths"]
        found = [await asyncio.to_thread(self.buckets.describe, bucket, path) for path in paths]
        return web.json_response([entry for entry in found if entry])

    async def _batch(self, request: web.Request) -> web.Response:
        bucket, failed = self._existing(request), []
        operations = [json.loads(line) for line in (await request.text()).splitlines() if line]
        for operation in operations:
            path = operation["path"]
            if operation["type"] == "addFile":
                error = await asyncio.to_thread(self.buckets.add, bucket, path, operation["xetHash"])
                if error:
                    failed.append({"path": path, "error": error})
            elif operation["type"] == "deleteFile":
                (self.buckets.folder(bucket) / path).unlink(missing_ok=True)
            else:
                failed.append({"path": path, "error": f"{operation['type']} is not emulated"})
        answer = {"success": not failed, "processed": len(operations), "succeeded": len(operations) - len(failed)}
        status = 422 if operations and len(failed) == len(operations) else 200
        return web.json_response({**answer, "failed": failed}, status=status)

    async def _xet_token(self, request: web.Request) -> web.Response:
        bucket, purpose = self._existing(request), request.match_info["purpose"]
        token, folder = self.buckets.new_store(purpose)
        if purpose == "read":
            await asyncio.to_thread(self.buckets.fill, folder, bucket)
        return _xet_answer(token, folder)

    async def _store(self, request: web.Request) -> web.Response:
        token = request.match_info["token"]
        return _xet_answer(token, self.buckets.stores[token])

    async def _resolve(self, request: web.Request) -> web.Response:
        bucket = self._existing(request)
        entry = await asyncio.to_thread(self.buckets.describe, bucket, unquote(request.match_info["path"]))
        if entry is None:
            return web.json_response(
                {"error": "Entry not found"}, status=404, headers={"X-Error-Code": "EntryNotFound"}
            )
        refresh = f"{self.url}/api/buckets/{bucket}/xet-read-token"
        headers = {"X-Xet-Hash": entry["xetHash"], "X-Xet-Refresh-Route": refresh, "X-Linked-Size": str(entry["size"])}
        return web.Response(headers=headers)

    def _shown(self, job: EmulatedJob) -> dict[str, Any]:
        shown = job.describe()
        if job.id in self.faults.stage_of:
            shown["status"]["stage"] = self.faults.stage_of[job.id]
        return shown

    def _job(self, request: web.Request) -> EmulatedJob:
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            raise web.HTTPNotFound(text=json.dumps({"error": "Job not found"}), content_type="application/json")
        return job

    def _existing(self, request: web.Request) -> str:
        bucket = _bucket_id(request)
        if not self.buckets.folder(bucket).exists():
            problem = {"error": "Repository not found"}
            raise web.HTTPNotFound(
                text=json.dumps(problem), content_type="application/json", headers={"X-Error-Code": "RepoNotFound"}
            )
        return bucket


def _bucket_id(request: web.Request) -> str:
    return f"{request.match_info['namespace']}/{request.match_info['name']}"


def _xet_answer(token: str, folder: Path) -> web.Response:
    url, expires = f"local://{folder}", int(time.time()) + 3600
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
    return web.json_response({"casUrl": url, "accessToken": token, "exp": expires}, headers=headers)
