from __future__ import annotations

import itertools
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.serving.control import error, json_answer
from rlkit.serving.http_answer import AnswerHead, AnswerReader, BadAnswer, encode
from rlkit.serving.http_head import MAX_HEAD_BYTES

OK = b"HTTP/1.1 200 OK\r\n"


def follow(wire: bytes, cuts: tuple[int, ...] = ()) -> tuple[AnswerHead | None, bytes, AnswerReader]:
    """An answer that comes in pieces: its head, all that came of its body, and the reader."""
    reader = AnswerReader()
    reader.expect()
    found, body = None, b""
    for start, end in itertools.pairwise([0, *sorted({min(cut, len(wire)) for cut in cuts}), len(wire)]):
        if start < end:
            head, data = reader.feed(wire[start:end])
            assert head is None or found is None
            found = head or found
            body += data
    return found, body, reader


def head_of(wire: bytes) -> AnswerHead:
    head, _, _ = follow(wire)
    assert head is not None
    return head


EVENTS = b"".join(b"%x\r\ndata: %d\n\n\r\n" % (len(b"data: %d\n\n" % i), i) for i in range(5)) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("wire", "body", "length"),
    [
        (OK + b"Content-Length: 5\r\n\r\n", b"whole", 5),
        (OK + b"Content-Length: 0\r\n\r\n", b"", 0),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", EVENTS, None),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 0),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", 5),
        (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\n", b"whole", 5),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_bytes_of_an_answer_are_passed_and_its_end_is_found(
    wire: bytes, body: bytes, length: int | None, step: int
) -> None:
    head, passed, reader = follow(wire + body, tuple(range(0, len(wire + body), step)))
    assert head is not None
    assert (head.raw, head.length, passed) == (wire, length, body)
    assert (head.until_close, head.is_clean) == (False, True)
    assert head.for_client(True) is head.raw
    assert reader.is_complete
    assert reader.is_reusable


def test_an_answer_without_an_end_ends_with_its_connection() -> None:
    head, body, reader = follow(OK + b"Content-Type: text/plain\r\n\r\nsome")
    assert head is not None
    assert (head.until_close, body, reader.is_complete) == (True, b"some", False)
    assert reader.close()
    assert not reader.is_reusable
    assert head.for_client(True).endswith(b"\r\nConnection: close\r\n\r\n")


def test_an_answer_cut_off_is_not_complete() -> None:
    for wire in (OK, OK + b"Content-Length: 5\r\n\r\nhalf", OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nwho", b""):
        _, _, reader = follow(wire)
        assert not reader.close()
        assert reader.has_begun is bool(wire)


def test_one_answer_after_another() -> None:
    reader = AnswerReader()
    for body in (b"one", b"", b"three"):
        reader.expect()
        head, data = reader.feed(OK + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        assert head is not None
        assert (data, reader.is_reusable) == (body, True)


def test_answers_before_the_answer_are_swallowed() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    wire = early + OK + b"Content-Length: 2\r\n\r\nok"
    for cuts in ((), tuple(range(len(wire)))):
        head, body, reader = follow(wire, cuts)
        assert head is not None
        assert (head.status, head.headers, body) == (200, [(b"Content-Length", b"2")], b"ok")
        assert reader.is_reusable


@pytest.mark.parametrize(
    "wire",
    [
        b"garbage\r\n\r\n",
        b"<html></html>" + b" " * MAX_HEAD_BYTES,
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        b"HTTP/1.1 2000 High\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok",
        OK + b"Content-Length: two\r\n\r\nok",
        OK + b"X: a\r\n folded\r\n\r\n",
        OK + b"X: a\nY: b\r\n\r\n",
        OK + b"X" * (MAX_HEAD_BYTES + 1),
        OK + b"Transfer-Encoding: chunked\r\n\r\nno chunk",
        OK + b"Content-Length: 2\r\n\r\nok, and more",
        OK + b"Content-Length: 2\r\n\r\nok" + OK + b"Content-Length: 2\r\n\r\nno",
        OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n",
    ],
)
def test_what_is_not_one_answer_is_refused(wire: bytes) -> None:
    with pytest.raises(BadAnswer):
        follow(wire)


def test_what_concerns_the_replicas_connection_stays_behind() -> None:
    head = head_of(
        OK + b"Connection: close, X-One\r\nX-One: 1\r\nX-Two: 2\r\nKeep-Alive: 5\r\nContent-Length: 2\r\n\r\nok"
    )
    assert not head.is_clean
    assert head.for_client(True) == OK + b"X-Two: 2\r\nContent-Length: 2\r\n\r\n"


def test_a_connection_the_replica_closes_is_not_used_again() -> None:
    _, _, reader = follow(OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok")
    assert reader.is_complete
    assert not reader.is_reusable
    _, _, reader = follow(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert reader.is_complete
    assert not reader.is_reusable


def test_an_older_answer_is_told_in_the_clients_version() -> None:
    head = head_of(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert head.for_client(True) == OK + b"Content-Length: 2\r\n\r\n"


def test_a_client_that_closes_is_told_so() -> None:
    head = head_of(OK + b"Content-Length: 2\r\n\r\nok")
    assert head.for_client(False) == OK + b"Content-Length: 2\r\nConnection: close\r\n\r\n"


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_are_an_answer_or_refused(data: bytes, cuts: list[int]) -> None:
    for wire in (data, OK + data, OK + b"Transfer-Encoding: chunked\r\n\r\n" + data):
        try:
            _, body, _ = follow(wire, tuple(cuts))
        except BadAnswer:
            continue
        assert body in wire


def test_answers_of_our_own() -> None:
    data = encode(json_answer({"a": 1}), keep_alive=True)
    assert data == OK + b'Content-Type: application/json; charset=utf-8\r\nContent-Length: 8\r\n\r\n{"a": 1}'
    refusal = encode(error(HTTPStatus.SERVICE_UNAVAILABLE, "no", {"Retry-After": "1"}), keep_alive=False)
    head, body, reader = follow(refusal)
    assert head is not None
    assert (head.status, b'"message": "no"' in body, reader.is_complete) == (503, True, True)
    assert {(b"Retry-After", b"1"), (b"Connection", b"close")} <= set(head.headers)
    assert encode(json_answer({"a": 1}), keep_alive=True, with_body=False).endswith(b"Content-Length: 8\r\n\r\n")
