"""A replica's bytes as answers: where the head ends, where the answer ends; and answers of our own as bytes. Pure.

What a client gets are the replica's own bytes. llhttp only follows them: it finds the end of a body with a length, of
one in chunks and of an event stream alike, and refuses what is not HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

import httptools

from rlkit.serving.control import ControlAnswer
from rlkit.serving.http_request import HEAD_END, HOP_BY_HOP, MAX_HEAD_BYTES

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# Plain numbers: looking up a member of HTTPStatus takes longer than parsing a header.
SWITCHING_PROTOCOLS = 101
WITHOUT_BODY = frozenset({204, 304})  # RFC 9110 section 6.4.1

# How the body is framed passes on with the body; the rest of these concerns the replica's connection.
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_STAY_BEHIND = HOP_BY_HOP - _FRAMING


class BadAnswer(Exception):
    """Not an HTTP answer, or more than one."""


@dataclass(slots=True)
class AnswerHead:
    """The head of an answer.

    `raw` are its bytes; `length` is the body's, None when it comes in chunks or ends with the connection
    (`until_close`). `is_clean`: nothing in it concerns the replica's connection.
    """

    status: int
    raw: bytes
    length: int | None
    until_close: bool
    is_clean: bool

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Names and values."""
        lines = [line.partition(b":") for line in self.raw[: -len(HEAD_END)].split(b"\r\n")[1:]]
        return [(name, value.strip()) for name, _, value in lines]

    def for_client(self, keep_alive: bool) -> bytes:
        """The head as it goes to a client whose connection stays open, or does not."""
        stays_open = keep_alive and not self.until_close
        if self.is_clean and stays_open:
            return self.raw
        headers = self.headers
        listed = {
            token.strip().lower()
            for name, value in headers
            if name.lower() == b"connection"
            for token in value.split(b",")
        }
        dropped = _STAY_BEHIND | (listed - _FRAMING)
        status_line = self.raw[: self.raw.index(b"\r\n")]
        lines = [b"HTTP/1.1" + status_line[len(b"HTTP/1.1") :]]
        lines += [name + b": " + value for name, value in headers if name.lower() not in dropped]
        if not stays_open:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + HEAD_END


class AnswerReader:
    """Follows the answers on one connection, one at a time."""

    def __init__(self) -> None:
        # Without an on_body llhttp skips bodies by itself.
        self._parser = httptools.HttpResponseParser(self)
        self.expect()
        self.is_complete = True

    def expect(self) -> None:
        """A request goes out; its answer is next."""
        self.is_complete = False
        self._head: AnswerHead | None = None
        self._buffered = b""
        self._length: int | None = None
        self._is_chunked = False
        self._is_clean = True
        self._is_head_complete = False
        self._has_more = False
        self._keep_alive = False

    def feed(self, data: bytes) -> tuple[AnswerHead | None, bytes | memoryview]:
        """The head, once its last byte is here, and what of the body came with these bytes. Raises BadAnswer.

        `is_complete` says afterwards whether the answer has ended.
        """
        if self._head is not None:
            self._follow(data)
            return None, data
        head, body = self._read_head(data)
        if body:
            self._follow(body)
        return head, body

    def close(self) -> bool:
        """The connection has ended; whether that was the end of the answer, too."""
        if self._head is not None and self._head.until_close:
            self.is_complete = True
        return self.is_complete

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer has come."""
        return self._head is not None or bool(self._buffered)

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can take another request after this answer."""
        return self.is_complete and self._keep_alive

    def _read_head(self, data: bytes) -> tuple[AnswerHead | None, bytes | memoryview]:
        if self._buffered:
            data = self._buffered + data
        while True:
            end = data.find(HEAD_END) + len(HEAD_END)
            if end < len(HEAD_END):
                if len(data) > MAX_HEAD_BYTES:
                    raise BadAnswer(f"a head of more than {MAX_HEAD_BYTES} bytes")
                self._buffered = data
                return None, b""
            raw = data[:end]
            self._follow(raw)
            if not self._is_head_complete:
                raise BadAnswer("a head without an end")
            status = self._parser.get_status_code()
            if status >= 200:
                break
            if status == SWITCHING_PROTOCOLS:
                raise BadAnswer("another protocol, which nobody asked for")
            self.expect()  # 100 Continue and the like: the answer comes behind it
            data = data[end:]
        self._buffered = b""
        length = self._length
        if status in WITHOUT_BODY and length is None:
            length = 0
        until_close = length is None and not self._is_chunked
        is_clean = self._is_clean and raw.startswith(b"HTTP/1.1 ")
        self._head = AnswerHead(status, raw, length, until_close, is_clean)
        # Not copied: a large answer's first piece has a quarter of a megabyte.
        return self._head, memoryview(data)[end:] if end < len(data) else b""

    def _follow(self, data: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadAnswer("another protocol, which nobody asked for") from None
        except httptools.HttpParserError as error:
            raise BadAnswer(f"not HTTP: {error}") from None
        if self._has_more:
            raise BadAnswer("more than one answer")

    # What llhttp calls.

    def on_message_begin(self) -> None:
        self._has_more = self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in HOP_BY_HOP or self._is_head_complete:  # behind the head it is a trailer
            return
        if name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            self._is_chunked = value.lower().endswith(b"chunked")
        else:
            self._is_clean = False

    def on_headers_complete(self) -> None:
        self._is_head_complete = True

    def on_message_complete(self) -> None:
        self.is_complete = True
        self._keep_alive = self._parser.should_keep_alive()


def encode(answer: ControlAnswer, *, keep_alive: bool, with_body: bool = True) -> bytes:
    """An answer of our own as bytes; the answer to HEAD has no body."""
    lines = [
        f"HTTP/1.1 {int(answer.status)} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        *(f"{name}: {value}" for name, value in answer.headers.items()),
        *([] if keep_alive else ["Connection: close"]),
    ]
    return "\r\n".join(lines).encode("latin-1") + HEAD_END + (answer.body if with_body else b"")
