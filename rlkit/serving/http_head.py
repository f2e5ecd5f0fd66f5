"""Heads of requests: parsed by llhttp, what is ambiguous refused, what was seen before known. Pure.

What two servers could read in two ways (conflicting lengths, bare CR or LF, unknown codings) must not pass a proxy, or
one request could be smuggled inside another. llhttp refuses most of it; what it leaves open is refused here.
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

# A client's heads are all the same but for the length, so a few are all there are. Heads with something unique in them
# fill this and are thrown away together: a few MB at most.
MAX_KNOWN_HEADS = 256
MAX_KNOWN_HEAD_BYTES = 2048

# A length of up to nine digits is one to every parser; what comes behind it is parsed with the rest of the head.
MAX_LENGTH_DIGITS = 9

LENGTH_LINE = b"\r\nContent-Length: "
HEAD_END = b"\r\n\r\n"


class Refused(Exception):
    """A request that is answered with an error, after which its connection is closed."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(slots=True)
class RequestHead:
    """A request line and its headers, without the body's length.

    `headers` are those that are passed on. `outgoing` keeps what was written for a replica, by its address.
    Both hold tokens, so neither is shown.
    """

    method: str
    target: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]] = field(repr=False)
    keep_alive: bool
    is_http_10: bool
    expects_continue: bool
    outgoing: dict[str, bytes] = field(default_factory=dict, repr=False)


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


def parse_head(data: bytes) -> tuple[RequestHead, int | None]:
    """A head from its first byte to the empty line, that included, and the length of the body. Raises Refused.

    The length is in bytes, None for a body that comes in chunks.
    """
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


def _checked_head(method: str, collected: _Headers, *, is_http_10: bool) -> tuple[RequestHead, int | None]:
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
    return RequestHead(method, target, path, query, passed_on, keep_alive, is_http_10, expects_continue), length


class KnownHeads:
    """Parses heads, each once that differs in more than the body's length."""

    def __init__(self) -> None:
        self._heads: dict[bytes, RequestHead] = {}

    def parse(self, data: bytes) -> tuple[RequestHead, int | None]:
        """`parse_head`, from memory when a head that differs in the length's digits only was parsed before."""
        start = data.find(LENGTH_LINE) + len(LENGTH_LINE)
        end = data.find(b"\r\n", start)
        digits = data[start:end]
        # Every line of a head that was parsed begins a header, so this is one, and the only one of its name.
        if start < len(LENGTH_LINE) or not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS:
            return parse_head(data)
        rest = data[:start] + data[end:]
        head = self._heads.get(rest)
        if head is not None:
            return head, int(digits)
        head, length = parse_head(data)
        if len(data) <= MAX_KNOWN_HEAD_BYTES:
            if len(self._heads) >= MAX_KNOWN_HEADS:
                self._heads.clear()
            self._heads[rest] = head
        return head, length
