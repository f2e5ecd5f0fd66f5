"""Where a Job's ports are, and with which token a receiver is asked."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rlkit.engines.hf_fleet import Fleet, Started, url_of
from rlkit.engines.hf_jobs import TOKEN_VARIABLE
from rlkit.engines.hf_token import RECEIVER_VARIABLE, receiver_token_variable
from rlkit.engines.hf_watch import Limits

pytestmark = pytest.mark.hub


def test_port_is_found_by_its_name_whatever_the_order() -> None:
    urls = ["https://id--8001.hf.jobs/", "https://id--8000.hf.jobs/"]
    assert url_of(urls, (8000, 8001), 8000) == "https://id--8000.hf.jobs"
    assert url_of(urls, (8000, 8001), 8001) == "https://id--8001.hf.jobs"


def test_port_without_a_name_is_found_by_its_place() -> None:
    assert url_of(["http://127.0.0.1:5", "http://127.0.0.1:6"], (8000, 8001), 8001) == "http://127.0.0.1:6"


def fleet_of(expose: tuple[int, ...], urls: list[str]) -> tuple[Fleet, Started]:
    """A fleet of one Job, of which the Hub says that it has these addresses."""
    info: Any = SimpleNamespace(id="1", status=SimpleNamespace(expose_urls=urls, stage="RUNNING", message=None))
    hub: Any = SimpleNamespace(token="t", look=lambda _: info)
    request: Any = SimpleNamespace(expose=expose, name="replica-0")
    watch: Any = SimpleNamespace(serves=False)
    return Fleet(hub, Limits(1.0, 1.0), {}, lambda event: None), Started(request, info, watch)


def test_addresses_are_taken_once_all_ports_have_one() -> None:
    """They are exposed one after the other."""
    urls = ["http://127.0.0.1:5"]
    fleet, job = fleet_of((8000, 8001), urls)
    fleet._read(job)
    assert (job.url, job.receiver) == (None, None)
    urls.append("http://127.0.0.1:6")
    fleet._read(job)
    assert (job.url, job.receiver) == ("http://127.0.0.1:5", "http://127.0.0.1:6")


@pytest.mark.parametrize(("status", "info"), [(200, {"vllm": 1}), (404, {}), (429, None), (502, None), (503, None)])
def test_trouble_of_the_jobs_proxy_is_no_answer_of_the_replica(status: int, info: dict[str, int] | None) -> None:
    fleet, job = fleet_of((8000,), ["http://127.0.0.1:5"])
    fleet._read(job)
    fleet._client = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(status, json={"vllm": 1})))
    assert fleet.server_info(job) == info


def test_receiver_in_a_group_is_asked_with_another_token_than_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "hf_secret")
    monkeypatch.setenv(RECEIVER_VARIABLE, "")
    assert receiver_token_variable(is_direct=False) == TOKEN_VARIABLE
    tokens = set()
    for _ in range(2):  # in the replica's Job and in the trainer's
        assert receiver_token_variable(is_direct=True) == RECEIVER_VARIABLE
        tokens.add(os.environ[RECEIVER_VARIABLE])
    (token,) = tokens
    assert len(token) == 64
    assert "hf_secret" not in token
