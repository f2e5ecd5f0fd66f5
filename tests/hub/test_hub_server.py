"""The emulated Hub against the real client: what the other tests here stand on."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import BucketFile, HfApi, Volume
from huggingface_hub.errors import BucketBatchError, HfHubHTTPError

pytestmark = pytest.mark.hub

BUCKET = "tester/runs"
SERVES = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()"  # noqa: E501


def test_bucket_gives_back_what_was_uploaded(api: HfApi, tmp_path: Path) -> None:
    api.create_bucket(BUCKET, exist_ok=True)
    api.create_bucket(BUCKET, exist_ok=True)
    api.batch_bucket_files(BUCKET, add=[(b"one" * 100, "a/one.bin"), (b"", "a/none")])
    (tmp_path / "two").write_bytes(b"two" * 50_000)
    api.batch_bucket_files(BUCKET, add=[(tmp_path / "two", "two.bin")])
    assert {
        file.path: file.size for file in api.list_bucket_tree(BUCKET, recursive=True) if isinstance(file, BucketFile)
    } == {
        "a/one.bin": 300,
        "a/none": 0,
        "two.bin": 150_000,
    }
    api.download_bucket_files(BUCKET, [("a/one.bin", tmp_path / "back"), ("two.bin", tmp_path / "back2")])
    assert (tmp_path / "back").read_bytes() == b"one" * 100
    assert (tmp_path / "back2").read_bytes() == b"two" * 50_000


def test_full_bucket_refuses(api: HfApi, hub: EmulatedHub) -> None:
    api.create_bucket(BUCKET)
    hub.buckets.full = True
    with pytest.raises(BucketBatchError, match="Storage limit"):
        api.batch_bucket_files(BUCKET, add=[(b"x", "x")])


def test_job_runs_with_its_volume_and_streams_its_log(api: HfApi, hub: EmulatedHub) -> None:
    api.create_bucket(BUCKET)
    api.batch_bucket_files(BUCKET, add=[(b"hello from the bucket\n", "in.txt")])
    volume = Volume(type="bucket", source=BUCKET, mount_path="/data")
    command = ["sh", "-c", 'cat /data/in.txt; echo "$NAME $SECRET" > /data/out.txt; exit 3']
    job = api.run_job(
        image="python:3.12", command=command, env={"NAME": "env"}, secrets={"SECRET": "s3"}, volumes=[volume],
        labels={"run": "r"}, namespace="tester", timeout=60,
    )  # fmt: skip
    assert "hello from the bucket" in list(api.fetch_job_logs(job_id=job.id, follow=True, namespace="tester"))
    ended = api.wait_for_job(job.id, namespace="tester", poll_interval=0.05, timeout=20)
    assert ended.status.stage == "ERROR"
    assert ended.secrets == {"SECRET": None}
    assert [found.id for found in api.list_jobs(labels={"run": "r"}, namespace="tester")] == [job.id]
    assert (hub.buckets.folder(BUCKET) / "out.txt").read_text() == "env s3\n"


def test_exposed_port_asks_for_the_token(api: HfApi, hub: EmulatedHub) -> None:
    command = ["python3", "-c", SERVES, "8000"]
    job = api.run_job(image="python:3.12", command=command, expose=[8000], namespace="tester")
    hub.until(lambda: hub.jobs[job.id].stage == "RUNNING")
    urls = api.inspect_job(job_id=job.id, namespace="tester").status.expose_urls
    assert urls is not None
    assert httpx.get(urls[0]).status_code == 401
    bearer = {"Authorization": f"Bearer {hub.token}"}
    hub.until(lambda: httpx.get(urls[0], headers=bearer).status_code == 200)
    api.cancel_job(job_id=job.id, namespace="tester")
    assert api.inspect_job(job_id=job.id, namespace="tester").status.stage == "CANCELED"


def test_dropped_log_stream_is_taken_up_again(api: HfApi, hub: EmulatedHub) -> None:
    hub.faults.drop_log_after = 2
    job = api.run_job(image="python:3.12", command=["sh", "-c", "seq 5; sleep 2"], namespace="tester")
    hub.until(lambda: hub.jobs[job.id].stage == "RUNNING")
    assert list(api.fetch_job_logs(job_id=job.id, follow=True, namespace="tester")) == ["1", "2", "3", "4", "5"]


def test_refusals_reach_the_client(api: HfApi, hub: EmulatedHub) -> None:
    hub.faults.answers.append(("POST", "/api/jobs/", 500, 1))
    with pytest.raises(HfHubHTTPError):
        api.run_job(image="python:3.12", command=["true"], namespace="tester")
    assert api.whoami()["name"] == "tester"
    wrong = HfApi(endpoint=hub.url, token="hf_wrong")
    with pytest.raises(HfHubHTTPError, match=r"Invalid"):
        wrong.whoami()
