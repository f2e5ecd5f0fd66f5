"""A client's bytes as requests: heads parsed by llhttp, bodies collected, anything ambiguous refused. Pure.

What two servers could read in two ways (conflicting lengths, bad chunks, bare CR or LF) must not pass a proxy, or one
request could be smuggled inside another. llhttp refuses it by default; what it leaves open is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus

import httptools

# RFC 9110 section 7.6.1: these concern one connection. Host and length are written anew for the next one, and a body is
# complete before it is sent on, so that nothing is left to expect.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

# Node's and uvicorn's limits are 16 and 64 KiB; a head of a completion request has a few hundred bytes.
MAX_HEAD_BYTES = 32 * 1024

# A batch of 1,024 prompts (vLLM's own limit) of 32 k tokens is about 200 MB of JSON.
MAX_BODY_BYTES = 256 * 1024**2

# A client's heads differ in their length only, so a few hundred are all there are; heads with something unique in them
# fill this and are thrown away together, at most 2 MB.
MAX_KNOWN_HEADS = 1024
MAX_KNOWN_HEAD_BYTES = 2048

HEAD_END = b"\r\n\r\n"


class Refused(Exception):
    """A request that is answered with an error, after which its connection is closed."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(slots=True)
class RequestHead:
    """A request line and its headers.

    `headers` are those that are passed on; `length` is the body's in bytes, None when it comes in chunks. `outgoing`
    keeps the head as it was written for a replica, by the replica's number.
    """

    method: str
    target: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    length: int | None
    keep_alive: bool
    is_http_10: bool
    expects_continue: bool
    outgoing: dict[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """A complete request; a body that came in chunks is one piece here."""

    head: RequestHead
    body: bytes


class _Headers:
    """Collects what llhttp finds."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.are_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.are_complete = True


class _Chunks:
    """Collects a body that comes in chunks; trailers are dropped."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_complete = False
        self.has_more = False  # something follows the body

    def on_message_begin(self) -> None:
        self.has_more = self.is_complete

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


def parse_head(data: bytes) -> RequestHead:
    """A head from its first byte to the empty line, that included. Raises Refused."""
    collected = _Headers()
    parser = httptools.HttpRequestParser(collected)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # asked for, not given: the request is answered as if it had not asked
    except httptools.HttpParserError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"not a valid HTTP request: {error}") from None
    if not collected.are_complete:
        raise Refused(HTTPStatus.BAD_REQUEST, "not a valid HTTP request: its head has no end")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise Refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/{version} is not spoken here")
    if not collected.url.startswith(b"/"):
        raise Refused(HTTPStatus.BAD_REQUEST, "the request's target is not a path")
    return _checked_head(parser.get_method().decode(), collected, is_http_10=version == "1.0")


def _checked_head(method: str, collected: _Headers, *, is_http_10: bool) -> RequestHead:
    length: int | None = 0
    hosts = 0
    expects_continue = False
    connection: set[bytes] = set()
    for name, value in collected.headers:
        match name.lower():
            case b"host":
                hosts += 1
            case b"content-length":
                length = int(value)
            case b"transfer-encoding":
                if is_http_10:
                    raise Refused(HTTPStatus.BAD_REQUEST, "Transfer-Encoding in an HTTP/1.0 request")
                if value.lower() != b"chunked":
                    raise Refused(HTTPStatus.NOT_IMPLEMENTED, "a Transfer-Encoding other than chunked")
                length = None
            case b"connection":
                connection |= {token.strip().lower() for token in value.split(b",")}
            case b"expect":
                if value.lower() != b"100-continue":
                    raise Refused(HTTPStatus.EXPECTATION_FAILED, "an Expect other than 100-continue")
                expects_continue = True
    if hosts > 1 or (hosts == 0 and not is_http_10):
        raise Refused(HTTPStatus.BAD_REQUEST, f"{hosts} Host headers in a request that needs one")
    passed_on = [
        (name, value)
        for name, value in collected.headers
        if name.lower() not in HOP_BY_HOP and name.lower() not in connection
    ]
    target = collected.url.decode("latin-1")
    path, _, query = target.partition("?")
    keep_alive = b"close" not in connection and not is_http_10
    return RequestHead(method, target, path, query, passed_on, length, keep_alive, is_http_10, expects_continue)


class KnownHeads:
    """Parses heads, each different one once."""

    def __init__(self) -> None:
        self._heads: dict[bytes, RequestHead] = {}

    def parse(self, data: bytes) -> RequestHead:
        """`parse_head`, from memory when these very bytes were parsed before."""
        head = self._heads.get(data)
        if head is None:
            head = parse_head(data)
            if len(data) <= MAX_KNOWN_HEAD_BYTES:
                if len(self._heads) >= MAX_KNOWN_HEADS:
                    self._heads.clear()
                self._heads[data] = head
        return head


class RequestReader:
    """Cuts one connection's bytes into requests."""

    def __init__(self, heads: KnownHeads, max_body: int = MAX_BODY_BYTES) -> None:
        self._heads = heads
        self._max_body = max_body
        self._head: RequestHead | None = None
        self._parts: list[bytes] = []  # of a head or body that is not complete
        self._chunks: _Chunks | None = None
        self._chunk_parser: httptools.HttpRequestParser | None = None
        self.received = 0  # bytes of the head or body that is not complete

    @property
    def in_body(self) -> bool:
        """Whether a head is complete and its body is not."""
        return self._head is not None

    @property
    def awaits_continue(self) -> bool:
        """Whether the client waits for `100 Continue` and has sent nothing of its body."""
        return self._head is not None and self._head.expects_continue and self.received == 0

    def feed(self, data: bytes) -> tuple[Request | None, bytes]:
        """The request these bytes complete, if they do, and the bytes behind it. Raises Refused."""
        head = self._head
        if head is None:
            head, data = self._read_head(data)
            if head is None:
                return None, b""
        if head.length is None:
            return self._read_chunks(head, data)
        return self._read_body(head, head.length, data)

    def _read_head(self, data: bytes) -> tuple[RequestHead | None, bytes]:
        if self._parts:
            data = b"".join([*self._parts, data])
        elif data[:1] in b"\r\n":
            data = data.lstrip(b"\r\n")  # RFC 9112 section 2.2: empty lines before a request are to be ignored
        end = data.find(HEAD_END)
        if end < 0:
            self._keep_for_later(data)
            return None, b""
        end += len(HEAD_END)
        if end > MAX_HEAD_BYTES:
            raise _too_large_head()
        self._parts, self.received = [], 0
        head = self._head = self._heads.parse(data[:end])
        if head.length is None:
            self._chunks = _Chunks()
            self._chunk_parser = httptools.HttpRequestParser(self._chunks)
            self._chunk_parser.feed_data(data[:end])
        elif head.length > self._max_body:
            raise _too_large_body(self._max_body)
        return head, data[end:]

    def _keep_for_later(self, data: bytes) -> None:
        if len(data) > MAX_HEAD_BYTES:
            raise _too_large_head()
        line, newline, _ = data.partition(b"\n")
        # Without this, a client that ends its lines in LF alone would wait for its own timeout.
        if newline and not line.endswith(b"\r"):
            raise Refused(HTTPStatus.BAD_REQUEST, "not a valid HTTP request: a line does not end in CR LF")
        self._parts, self.received = ([data] if data else []), len(data)

    def _read_body(self, head: RequestHead, length: int, data: bytes) -> tuple[Request | None, bytes]:
        missing = length - self.received
        if len(data) < missing:
            if data:
                self._parts.append(data)
                self.received += len(data)
            return None, b""
        body, rest = (data, b"") if len(data) == missing else (data[:missing], data[missing:])
        if self._parts:
            body = b"".join([*self._parts, body])
        self._start_over()
        return Request(head, body), rest

    def _read_chunks(self, head: RequestHead, data: bytes) -> tuple[Request | None, bytes]:
        assert self._chunks is not None
        assert self._chunk_parser is not None
        if not data:
            return None, b""
        self.received += len(data)
        if self.received > self._max_body:
            raise _too_large_body(self._max_body)
        try:
            self._chunk_parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"not a valid chunked body: {error}") from None
        if not self._chunks.is_complete:
            return None, b""
        if self._chunks.has_more:
            # Where the next request begins is not known, and a client that waits for its answers does not send one.
            raise Refused(HTTPStatus.BAD_REQUEST, "a request behind a chunked body, before its answer")
        request = Request(head, b"".join(self._chunks.parts))
        self._start_over()
        return request, b""

    def _start_over(self) -> None:
        self._head = self._chunks = self._chunk_parser = None
        self._parts, self.received = [], 0


def _too_large_head() -> Refused:
    reason = f"the request's head is larger than {MAX_HEAD_BYTES} bytes"
    return Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason)


def _too_large_body(limit: int) -> Refused:
    return Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request's body is larger than {limit} bytes")
