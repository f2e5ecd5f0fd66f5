"""A client's bytes as requests: heads read, bodies collected, what is too large or badly cut refused. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import httptools

from rlkit.serving.http_head import HEAD_END, MAX_HEAD_BYTES, KnownHeads, Refused, RequestHead

# A batch of 1,024 prompts (vLLM's own limit) of 32 k tokens is about 200 MB of JSON.
MAX_BODY_BYTES = 256 * 1024**2

# What a parser of a body in chunks is told first; it need not see the head once more.
_CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(slots=True)
class Request:
    """A complete request; a body that came in chunks is one piece here."""

    head: RequestHead
    body: bytes


class _Chunks:
    """Collects a body that comes in chunks; trailers are dropped."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False
        self.has_more = False  # something follows the body

    def on_message_begin(self) -> None:
        self.has_more = self.is_complete

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


class RequestReader:
    """Cuts one connection's bytes into requests."""

    def __init__(self, heads: KnownHeads, max_body: int = MAX_BODY_BYTES) -> None:
        self._heads = heads
        self._max_body = max_body
        self._head: RequestHead | None = None
        self._length: int | None = None  # of its body
        self._parts: list[bytes] = []  # of a head or body that is not complete
        self._chunks: _Chunks | None = None
        self._chunk_parser: httptools.HttpRequestParser | None = None
        self.received = 0  # bytes of the head or body that is not complete

    @property
    def head(self) -> RequestHead | None:
        """The head of the request whose body is not complete."""
        return self._head

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
        if self._length is None:
            return self._read_chunks(head, data)
        return self._read_body(head, self._length, data)

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
        head, length = self._heads.parse(data[:end])
        self._head, self._length = head, length
        if length is None:
            self._chunks = _Chunks()
            self._chunk_parser = httptools.HttpRequestParser(self._chunks)
            self._chunk_parser.feed_data(_CHUNKED)
        elif length > self._max_body:
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
        request = Request(head, bytes(self._chunks.body))
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
