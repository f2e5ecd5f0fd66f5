from __future__ import annotations

import itertools
from collections.abc import Callable
from http import HTTPStatus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlkit.serving.http_head import MAX_HEAD_BYTES, MAX_KNOWN_HEADS, KnownHeads, Refused, RequestHead, parse_head
from rlkit.serving.http_request import Request, RequestReader

POST = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: here\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def read_all(data: bytes, cuts: tuple[int, ...] = (), max_body: int = 1000) -> list[Request] | HTTPStatus:
    """Everything a reader makes of a connection's bytes that come in pieces: requests, or the refusal behind them."""
    reader = RequestReader(KnownHeads(), max_body)
    requests: list[Request] = []
    edges = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    try:
        for start, end in itertools.pairwise(edges):
            rest = data[start:end]
            while rest:
                request, rest = reader.feed(rest)
                if request is None:
                    assert rest == b""
                    break
                requests.append(request)
    except Refused as refused:
        return refused.status
    return requests


def only(data: bytes) -> Request:
    requests = read_all(data)
    assert isinstance(requests, list)
    (request,) = requests
    return request


def test_a_request_with_a_length() -> None:
    request = only(
        POST + b"X-Request-Id: 7\r\nConnection: keep-alive, X-Drop\r\nX-Drop: 1\r\nContent-Length: 2\r\n\r\nok"
    )
    head = request.head
    assert request.body == b"ok"
    assert (head.method, head.target, head.path, head.query) == (
        "POST",
        "/v1/completions?a=b",
        "/v1/completions",
        "a=b",
    )
    assert head.headers == [(b"X-Request-Id", b"7")]
    assert (head.keep_alive, head.is_http_10) == (True, False)


def test_a_request_in_chunks_is_one_piece() -> None:
    request = only(CHUNKED + b"3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n")
    assert request.body == b"abc0123456789"


@pytest.mark.parametrize(
    ("lines", "keep_alive"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: x, CLOSE\r\n", False),
        (b"GET / HTTP/1.0\r\n", False),
    ],
)
def test_whether_the_connection_stays_open(lines: bytes, keep_alive: bool) -> None:
    head, _ = parse_head(lines + b"\r\n")
    assert head.keep_alive is keep_alive


BAD, TOO_LARGE = HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@pytest.mark.parametrize(
    ("data", "status"),
    [
        # Two lengths, two ways to find the end.
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc", BAD),
        (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nab", BAD),
        (POST + b"Content-Length: 2, 2\r\n\r\nab", BAD),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", BAD),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", BAD),
        (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", BAD),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", HTTPStatus.NOT_IMPLEMENTED),
        (POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", BAD),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", BAD),
        (POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n", BAD),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", BAD),
        # Lengths that some read and some do not.
        (POST + b"Content-Length: +2\r\n\r\nab", BAD),
        (POST + b"Content-Length: -2\r\n\r\nab", BAD),
        (POST + b"Content-Length: 0x2\r\n\r\nab", BAD),
        (POST + b"Content-Length: 2 2\r\n\r\nab", BAD),
        (POST + b"Content-Length:\r\n\r\nab", BAD),
        (POST + b"Content-Length: 99999999999999999999999999\r\n\r\nab", BAD),
        (POST + b"Content-Length : 2\r\n\r\nab", BAD),
        # Lines that end in something else than CR LF, or not at all.
        (POST + b"X: a\nContent-Length: 2\r\n\r\nab", BAD),
        (POST + b"X: a\rContent-Length: 2\r\n\r\nab", BAD),
        (POST + b"X: a\r\n folded\r\n\r\n", BAD),
        (POST + b"X: a\x00b\r\n\r\n", BAD),
        (POST + b"X\x00: a\r\n\r\n", BAD),
        (POST + b"X y: a\r\n\r\n", BAD),
        (POST + b": a\r\n\r\n", BAD),
        (POST + b"no colon\r\n\r\n", BAD),
        (b"POST / HTTP/1.1\nHost: a\n\n", BAD),
        # Chunks.
        (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", BAD),
        (CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n", BAD),
        (CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n", BAD),
        (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", BAD),
        (CHUNKED + b"3\nabc\n0\n\n", BAD),
        (CHUNKED + b"-1\r\nabc\r\n0\r\n\r\n", BAD),
        (CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nabc", BAD),
        (CHUNKED + b"0\r\n\r\n" + POST + b"\r\n", BAD),
        # Request lines.
        (b"POST  HTTP/1.1\r\nHost: a\r\n\r\n", BAD),
        (b"POST /\x01 HTTP/1.1\r\nHost: a\r\n\r\n", BAD),
        (b"POST /a b HTTP/1.1\r\nHost: a\r\n\r\n", BAD),
        (b"post / HTTP/1.1\r\nHost: a\r\n\r\n", BAD),
        (b"POST http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", BAD),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", BAD),
        (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", BAD),
        (b"GET /\r\n\r\n", HTTPStatus.HTTP_VERSION_NOT_SUPPORTED),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", HTTPStatus.HTTP_VERSION_NOT_SUPPORTED),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", BAD),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", BAD),  # TLS
        # Hosts.
        (b"GET / HTTP/1.1\r\n\r\n", BAD),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", BAD),
        (POST + b"Expect: miracles\r\n\r\n", HTTPStatus.EXPECTATION_FAILED),
        # Sizes.
        (POST + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (POST + b"X: " + b"a" * MAX_HEAD_BYTES, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (b"a" * (MAX_HEAD_BYTES + 1), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
        (POST + b"Content-Length: 1001\r\n\r\n", TOO_LARGE),
        (CHUNKED + b"3E9\r\n" + b"a" * 1001, TOO_LARGE),
        (CHUNKED + b"1\r\na\r\n" * 500, TOO_LARGE),
    ],
)
def test_what_is_refused(data: bytes, status: HTTPStatus) -> None:
    assert read_all(data) == status


def test_an_upgrade_is_not_given_and_its_body_is_a_body() -> None:
    head = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for body in (b"Content-Length: 3\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"):
        request = only(head + body)
        assert (request.body, request.head.headers) == (b"abc", [])


def test_empty_lines_before_a_request_are_ignored() -> None:
    assert only(b"\r\n\r\n" + POST + b"\r\n").head.path == "/v1/completions"


def test_who_waits_for_continue() -> None:
    reader = RequestReader(KnownHeads())
    assert not reader.awaits_continue
    reader.feed(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert reader.awaits_continue
    reader.feed(b"o")
    assert not reader.awaits_continue
    request, _ = reader.feed(b"k")
    assert request is not None
    assert request.head.headers == []


def test_heads_are_parsed_once_whatever_their_lengths_and_only_so_many_are_kept() -> None:
    heads = KnownHeads()
    first, length = heads.parse(POST + b"Content-Length: 12\r\n\r\n")
    assert length == 12
    for digits, number in ((b"7", 7), (b"007", 7), (b"999999999", 999999999)):
        head, length = heads.parse(POST + b"Content-Length: %b\r\n\r\n" % digits)
        assert head is first
        assert length == number
    for number in range(2 * MAX_KNOWN_HEADS):
        heads.parse(POST + b"X-Request-Id: %d\r\nContent-Length: 1\r\n\r\n" % number)
    assert len(heads._heads) <= MAX_KNOWN_HEADS
    big = POST + b"X: " + b"a" * 4000 + b"\r\nContent-Length: 1\r\n\r\n"
    assert heads.parse(big)[0] is not heads.parse(big)[0]


def outcome(parse: Callable[[bytes], tuple[RequestHead, int | None]], wire: bytes) -> object:
    try:
        return parse(wire)
    except Refused as refused:
        return refused.status


LENGTHS = [
    *(b"0", b"5", b"12", b"0012", b"1234567890", b"99999999999999999999", b"", b" 5", b"5 ", b"+5", b"5,5", b"x"),
    *(b"5\r\nContent-Length: 5", b"5\r\nTransfer-Encoding: chunked", b"5\r\n 5", b"5\n", b"\xb2", b"5\r"),
]


@pytest.mark.parametrize("more", [b"", b"X: Content-Length: 5\r\n", b"X: a\r\n\tContent-Length: 5\r\n"])
def test_no_memory_changes_what_a_head_means(more: bytes) -> None:
    """Every head, after every other, is what it is when it is parsed alone: same head and length, or refused."""
    wires = [POST + more + b"Content-Length: %b\r\n\r\n" % length for length in LENGTHS]
    wires += [POST + more + b"Content-Length: %b\r\nX: 1\r\n\r\n" % length for length in LENGTHS]
    heads = KnownHeads()
    for wire in [*wires, *reversed(wires), *wires]:
        assert outcome(heads.parse, wire) == outcome(parse_head, wire)


bodies = st.binary(max_size=40)


@st.composite
def connections(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """Some requests one after the other, and their bodies; one in chunks only at the end."""
    wire, expected = b"", []
    for body in draw(st.lists(bodies, max_size=3)):
        wire += POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        expected.append(body)
    if draw(st.booleans()):
        pieces = draw(st.lists(bodies.filter(bool), max_size=3))
        wire += CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        expected.append(b"".join(pieces))
    return wire, expected


@given(connections(), st.lists(st.integers(0, 600), max_size=10))
def test_how_the_bytes_are_cut_does_not_matter(connection: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    wire, expected = connection
    requests = read_all(wire, tuple(cuts))
    assert isinstance(requests, list)
    assert [request.body for request in requests] == expected


@given(connections())
def test_byte_by_byte(connection: tuple[bytes, list[bytes]]) -> None:
    wire, expected = connection
    requests = read_all(wire, tuple(range(len(wire))))
    assert isinstance(requests, list)
    assert [request.body for request in requests] == expected


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
@example(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", [])
def test_any_bytes_are_requests_or_refused(data: bytes, cuts: list[int]) -> None:
    read_all(data, tuple(cuts))


names = st.from_regex(rb"[A-Za-z][A-Za-z0-9-]{0,10}", fullmatch=True)
values = st.from_regex(rb"[!-~]([ -~]{0,20}[!-~])?", fullmatch=True)


@given(st.lists(st.tuples(names, values), max_size=6))
def test_no_header_can_bring_another_with_it(headers: list[tuple[bytes, bytes]]) -> None:
    """Whatever is passed on is a name and a value that came, without a CR or LF in them."""
    wire = POST + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"
    try:
        head, _ = parse_head(wire)
    except Refused:
        return
    assert set(head.headers) <= set(headers)
    assert not any(b"\r" in part or b"\n" in part for header in head.headers for part in header)
