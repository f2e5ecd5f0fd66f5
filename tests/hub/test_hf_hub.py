"""The Hub's client with patience: what passes, what is told, and that nothing is started twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hub.hub_server import EmulatedHub
from huggingface_hub import HfApi

from rlkit.engines.hf_hub import ATTEMPTS, Hub
from rlkit.engines.hf_jobs import JobRequest
from rlkit.errors import BadInput, RlkitError

pytestmark = pytest.mark.hub


@pytest.fixture
def client(api: HfApi) -> Hub:
    return Hub.connect(None, first_wait_s=0.001, api=api)


def request(name: str = "one") -> JobRequest:
    return JobRequest(
        role="trainer",
        replica=None,
        image="python:3.12",
        command=("sleep", "60"),
        env={},
        flavor="cpu-basic",
        timeout_s=60,
        labels={"tool": "rlkit", "run": name, "launch": "1"},
        volumes=(),
        secrets=("HF_TOKEN",),
    )


@pytest.mark.parametrize("status", [429, 500, 503])
def test_refusal_that_passes_is_waited_out(client: Hub, hub: EmulatedHub, status: int) -> None:
    hub.faults.answers.append(("POST", "/api/jobs/", status, 2))
    client.start(request())
    assert len(hub.jobs) == 1


def test_refusal_that_lasts_is_told_in_one_line(client: Hub, hub: EmulatedHub) -> None:
    hub.faults.answers.append(("POST", "/api/jobs/", 500, ATTEMPTS))
    with pytest.raises(RlkitError, match=r"starting trainer on cpu-basic: .*500") as error:
        client.start(request())
    assert "\n" not in str(error.value)
    assert not hub.jobs


def test_job_whose_answer_was_lost_is_not_started_again(client: Hub, hub: EmulatedHub) -> None:
    first = client.start(request())
    hub.faults.answers.append(("POST", "/api/jobs/", 502, 1))
    assert client.start(request()).id == first.id
    assert len(hub.jobs) == 1


def test_token_without_rights_is_told(client: Hub, hub: EmulatedHub) -> None:
    hub.faults.read_only_token = True
    with pytest.raises(RlkitError, match="write access"):
        client.start(request())
    with pytest.raises(RlkitError, match="write access"):
        client.make_bucket("tester/new")


def test_no_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.engines.hf_hub.get_token", lambda: None)
    with pytest.raises(BadInput, match="hf auth login"):
        Hub.connect(None)


def test_only_own_jobs_are_found(client: Hub, hub: EmulatedHub) -> None:
    mine, other = client.start(request("mine")), client.start(request("other"))
    assert [job.id for job in client.find({"run": "mine"})] == [mine.id]
    assert {job.id for job in client.find({"tool": "rlkit"})} == {mine.id, other.id}


def test_cancelling_what_is_over_is_fine(client: Hub, hub: EmulatedHub) -> None:
    job = client.start(request())
    client.cancel(job.id)
    hub.faults.answers.append(("POST", "/cancel", 500, ATTEMPTS))
    client.cancel(job.id)
    assert not hub.running()


def test_files_come_back_with_their_size(client: Hub, tmp_path: Path) -> None:
    client.make_bucket("tester/files")
    client.put("tester/files", [(b"x" * 1000, "a/b"), (b"y", "other")])
    listed = client.listing("tester/files", "a")
    assert [file.path for file in listed] == ["a/b"]
    client.get("tester/files", [(file, tmp_path / "deep" / "b") for file in listed])
    assert (tmp_path / "deep" / "b").read_bytes() == b"x" * 1000


def test_folder_is_not_another_whose_name_begins_as_its_own_does(client: Hub, hub: EmulatedHub) -> None:
    client.make_bucket("tester/files")
    client.put("tester/files", [(b"x", "runs/one/a"), (b"x", "runs/one-2/a")])
    assert [file.path for file in client.listing("tester/files", "runs/one")] == ["runs/one/a"]
    client.remove("tester/files", "runs/one")
    assert client.listing("tester/files", "runs/one") == []
    assert len(client.listing("tester/files", "runs/one-2")) == 1


def test_full_bucket_is_told(client: Hub, hub: EmulatedHub) -> None:
    client.make_bucket("tester/files")
    hub.buckets.full = True
    with pytest.raises(RlkitError, match="Storage limit reached"):
        client.put("tester/files", [(b"x", "a")])


def test_hub_that_is_away_is_not_an_end(client: Hub, hub: EmulatedHub) -> None:
    job = client.start(request())
    hub.faults.answers.append(("GET", f"/api/jobs/tester/{job.id}", 500, 1))
    assert client.look(job.id) is None
    assert client.look(job.id) is not None


def test_log_is_followed_through_refusals_and_drops(client: Hub, hub: EmulatedHub) -> None:
    job = client.start(replace(request(), command=("sh", "-c", "seq 5; sleep 1; echo end")))
    hub.faults.answers.append(("GET", "/logs", 500, 2))
    hub.faults.drop_log_after = 3
    assert list(client.follow(job.id)) == ["1", "2", "3", "4", "5", "end"]


def test_log_that_is_always_refused_is_given_up(client: Hub, hub: EmulatedHub) -> None:
    job = client.start(request())
    hub.faults.answers.append(("GET", "/logs", 500, 2 * ATTEMPTS))
    assert not list(client.follow(job.id))
