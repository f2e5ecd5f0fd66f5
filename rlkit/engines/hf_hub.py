"""The Hub, as the engine uses it: huggingface_hub's client, with retries and errors in one line. A thin shell."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
from huggingface_hub import BucketFile, HfApi, JobHardwareInfo, JobInfo, get_token
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, HfHubHTTPError
from huggingface_hub.utils.tqdm import disable_progress_bars

from rlkit.engines.hf_jobs import JobRequest
from rlkit.engines.hf_watch import phase_of
from rlkit.errors import BadInput, RlkitError

Result = TypeVar("Result")

# The Hub's own limits are per five minutes; a minute of patience covers a restart, and what lasts longer is told.
ATTEMPTS = 6
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
# Refusals that pass: too many requests, and a server or its gateway failing.
PASSING = frozenset({429, 500, 502, 503, 504})


class Hub:
    """One namespace of the Hub. Raises RlkitError in one line for everything that does not pass with patience."""

    def __init__(self, api: HfApi, namespace: str, token: str, first_wait_s: float = FIRST_WAIT_S) -> None:
        self.api, self.namespace, self.token = api, namespace, token
        self._first_wait_s = first_wait_s

    @classmethod
    def connect(cls, namespace: str | None, first_wait_s: float = FIRST_WAIT_S, api: HfApi | None = None) -> Hub:
        """With the token that `hf auth login` stored, or HF_TOKEN. Raises BadInput without one."""
        token = str(api.token) if api is not None and isinstance(api.token, str) else get_token()
        if not token:
            raise BadInput("HF_TOKEN: there is no token for the Hub; run `hf auth login`, or set it")
        disable_progress_bars()  # several files of a few bytes each: the run's own progress says what is going on
        hub = cls(api or HfApi(token=token), namespace or "", token, first_wait_s)
        if not hub.namespace:
            hub.namespace = str(hub._ask("whoami", lambda: hub.api.whoami())["name"])
        return hub

    def prices(self) -> list[JobHardwareInfo]:
        """Every flavor with its price."""
        return self._ask("the list of hardware", lambda: self.api.list_jobs_hardware())

    def start(self, request: JobRequest) -> JobInfo:
        """Ask for a Job. A request whose answer was lost is looked up by its labels before it is sent again."""
        arguments = request.arguments({name: self.token for name in request.secrets})

        def ask() -> JobInfo:
            return self.api.run_job(**arguments, namespace=self.namespace)

        def after_error() -> JobInfo | None:
            found = [job for job in self.find(request.labels) if phase_of(job.status.stage) != "ended"]
            return found[0] if found else None

        return self._ask(f"starting {request.name} on {request.flavor}", ask, after_error)

    def find(self, labels: Mapping[str, str]) -> list[JobInfo]:
        """Jobs with all these labels, whatever their stage, oldest first."""
        jobs = self._ask(
            "the list of Jobs", lambda: list(self.api.list_jobs(labels=dict(labels), namespace=self.namespace))
        )
        # Asked again here: a Hub that overlooks the filter must not make this program cancel someone's Job.
        mine = [job for job in jobs if all((job.labels or {}).get(key) == value for key, value in labels.items())]
        return sorted(mine, key=lambda job: (job.created_at is None, job.created_at))

    def look(self, job_id: str) -> JobInfo | None:
        """A Job as it is now, None when the Hub does not say."""
        with contextlib.suppress(httpx.HTTPError, OSError):
            return self.api.inspect_job(job_id=job_id, namespace=self.namespace)
        return None

    def cancel(self, job_id: str) -> None:
        """End a Job; one that has ended is fine."""

        def ended() -> bool | None:
            job = self.look(job_id)
            return True if job is not None and phase_of(job.status.stage) == "ended" else None

        def ask() -> bool:
            self.api.cancel_job(job_id=job_id, namespace=self.namespace)
            return True

        try:
            self._ask(f"cancelling {job_id}", ask, ended)
        except RlkitError:
            if not ended():
                raise

    def last_lines(self, job_id: str, count: int) -> list[str]:
        """The end of a Job's log, as far as it can be had."""
        lines: list[str] = []
        with contextlib.suppress(httpx.HTTPError, OSError):
            for line in self.api.fetch_job_logs(job_id=job_id, tail=count, namespace=self.namespace):
                lines.append(line)
        return [line for line in lines if line.strip()][-count:]

    def follow(self, job_id: str) -> Iterator[str]:
        """A Job's log until it ends, each line once; gives up when the Hub refuses it again and again.

        The client takes up a stream that dropped, but not one that was refused, and it ends one of a Job that does not
        run yet. A log is told from its start each time, so what was seen is counted and passed over.
        """
        seen = failures = 0
        while failures < ATTEMPTS:
            count, whole = 0, True
            try:
                for line in self.api.fetch_job_logs(job_id=job_id, follow=True, namespace=self.namespace):
                    count += 1
                    if count > seen:
                        seen, failures = count, 0
                        yield line
            except (httpx.HTTPError, OSError):
                failures, whole = failures + 1, False
            job = self.look(job_id)
            if whole and job is not None and phase_of(job.status.stage) == "ended":
                return
            time.sleep(self._first_wait_s)

    def make_bucket(self, bucket_id: str) -> None:
        """Create a private bucket if there is none."""
        self._ask(
            f"creating the bucket {bucket_id}",
            lambda: self.api.create_bucket(bucket_id, private=True, exist_ok=True),
        )

    def put(self, bucket_id: str, files: Iterable[tuple[bytes | Path, str]]) -> None:
        """Write files into a bucket."""
        adds: list[tuple[str | Path | bytes, str]] = list(files)
        self._ask(f"writing to the bucket {bucket_id}", lambda: self.api.batch_bucket_files(bucket_id, add=adds))

    def remove(self, bucket_id: str, folder: str) -> None:
        """Delete what lies under a folder of a bucket."""
        paths = [file.path for file in self.listing(bucket_id, folder)]
        if paths:
            self._ask(f"deleting {folder}", lambda: self.api.batch_bucket_files(bucket_id, delete=paths))

    def listing(self, bucket_id: str, folder: str, new_bucket: bool = False) -> list[BucketFile]:
        """Files under a folder of a bucket, none when there is no such folder, nor the bucket if it may be new."""
        below = f"{folder.rstrip('/')}/"  # the Hub goes by the first letters: `runs/one` has `runs/one-2/...`, too

        def ask() -> list[BucketFile]:
            try:
                found = self.api.list_bucket_tree(bucket_id, prefix=folder, recursive=True)
                return [item for item in found if isinstance(item, BucketFile) and item.path.startswith(below)]
            except BucketNotFoundError:
                if new_bucket:
                    return []
                raise

        return self._ask(f"listing {bucket_id}/{folder}", ask)

    def get(self, bucket_id: str, files: list[tuple[BucketFile, Path]]) -> None:
        """Download files; raises RlkitError for one that arrives with another size."""
        for _, target in files:
            target.parent.mkdir(parents=True, exist_ok=True)
        wanted: list[tuple[str | BucketFile, str | Path]] = [*files]
        self._ask(
            f"reading from the bucket {bucket_id}",
            lambda: self.api.download_bucket_files(bucket_id, wanted, raise_on_missing_files=True),
        )
        for file, target in files:
            size = target.stat().st_size if target.exists() else None
            if size != file.size:
                raise RlkitError(f"{bucket_id}/{file.path}: {size} bytes arrived of {file.size}; fetch it again")

    def _ask(
        self,
        what: str,
        ask: Callable[[], Result],
        after_error: Callable[[], Result | None] = lambda: None,
    ) -> Result:
        wait_s = self._first_wait_s
        for attempt in range(ATTEMPTS):
            if attempt:
                found = after_error()
                if found is not None:
                    return found
            try:
                return ask()
            except BucketBatchError as error:
                raise RlkitError(f"{what}: {_first_line(error.failures)}") from None
            except BucketNotFoundError:
                raise RlkitError(f"{what}: there is no such bucket, or the token may not see it") from None
            except HfHubHTTPError as error:
                status = error.response.status_code if error.response is not None else 0
                if status not in PASSING or attempt == ATTEMPTS - 1:
                    raise RlkitError(f"{what}: {_refusal(status, error)}") from None
            except (httpx.HTTPError, OSError) as error:
                if attempt == ATTEMPTS - 1:
                    raise RlkitError(f"{what}: the Hub does not answer: {error}") from None
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)
        raise AssertionError("unreachable")


def _refusal(status: int, error: HfHubHTTPError) -> str:
    said = (error.server_message or str(error).splitlines()[0]).strip()
    if status in (401, 403):
        return f"the token may not do that ({status}: {said}); it needs write access to Jobs and buckets"
    return f"the Hub refuses it ({status}: {said})"


def _first_line(failures: list[dict[str, str]]) -> str:
    first = failures[0] if failures else {}
    return f"{first.get('path', '')}: {first.get('error', 'refused')}"
