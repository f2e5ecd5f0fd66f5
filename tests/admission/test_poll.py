"""One page of /metrics, or None."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlkit.admission.poll import MetricsPoll


async def served(handler: web.Response | Exception | None) -> str | None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if handler is None:
            await asyncio.Event().wait()
        if isinstance(handler, Exception):
            raise handler
        assert isinstance(handler, web.Response)
        return handler

    app = web.Application()
    app.add_routes([web.get("/metrics", answer)])
    async with TestServer(app, shutdown_timeout=0.01) as server, MetricsPoll(f"{server.make_url('/')}") as poll:
        return await poll.page()


async def test_the_page_is_its_text() -> None:
    assert await served(web.Response(text="vllm:x 1\n")) == "vllm:x 1\n"


@pytest.mark.parametrize("status", [404, 401, 500])
async def test_another_status_is_no_page(status: int) -> None:
    assert await served(web.Response(text="vllm:x 1\n", status=status)) is None


async def test_bytes_that_are_no_text_are_no_page() -> None:
    assert await served(web.Response(body=b"\xff\xfe", content_type="text/plain", charset="utf-8")) is None


async def test_a_server_that_does_not_answer_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.admission.poll.TIMEOUT_S", 0.02)
    assert await served(None) is None


async def test_nobody_listening_is_no_page() -> None:
    async with MetricsPoll("http://127.0.0.1:1") as poll:
        assert await poll.page() is None
