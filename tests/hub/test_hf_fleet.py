"""Where a Job's ports are, and with which token a receiver is asked."""

from __future__ import annotations

import os

import pytest

from rlkit.engines.hf_fleet import url_of
from rlkit.engines.hf_jobs import TOKEN_VARIABLE
from rlkit.engines.hf_token import RECEIVER_VARIABLE, receiver_token_variable

pytestmark = pytest.mark.hub


def test_port_is_found_by_its_name_whatever_the_order() -> None:
    urls = ["https://id--8001.hf.jobs/", "https://id--8000.hf.jobs/"]
    assert url_of(urls, (8000, 8001), 8000) == "https://id--8000.hf.jobs"
    assert url_of(urls, (8000, 8001), 8001) == "https://id--8001.hf.jobs"


def test_port_without_a_name_is_found_by_its_place() -> None:
    assert url_of(["http://127.0.0.1:5", "http://127.0.0.1:6"], (8000, 8001), 8001) == "http://127.0.0.1:6"


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
