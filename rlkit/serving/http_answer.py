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

# Answers without a body that say so by their status (RFC 9110 section 6.4.1).
BODILESS = frozenset({HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED})

# Framing passes on as it is, with the body it belongs to.
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class BadAnswer(Exception):
    """Not an HTTP answer, or more than one."""


@dataclass(slots=True)
class AnswerHead:
    """The head of an answer.

    `raw` are its bytes; `length` is the body's, None when it comes in chunks or ends with the connection
    (`until_close`). `is_clean`: nothing in it concerns the replica's connection only.
    """

    status: int
    raw: bytes
    headers: list[tuple[bytes, bytes]]
    length: int | None
    until_close: bool
    is_clean: bool

    def for_client(self, keep_alive: bool) -> bytes:
        """The head as it goes to a client whose connection stays open, or does not."""
        stays_open = keep_alive and not self.until_close
        if self.is_clean and stays_open:
            return self.raw
        listed = {token.strip().lower() for value in self._all(b"connection") for token in value.split(b",")}
        dropped = (HOP_BY_HOP - _FRAMING) | (listed - _FRAMING)
        line = self.raw[: self.raw.index(b"\r\n")]
        lines = [b"HTTP/1.1" + line[len(b"HTTP/1.1") :]]
        lines += [name + b": " + value for name, value in self.headers if name.lower() not in dropped]
        if not stays_open:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + HEAD_END

    def _all(self, name: bytes) -> list[bytes]:
        return [value for other, value in self.headers if other.lower() == name]


class AnswerReader:
    """Follows the answers on one connection, one at a time."""

    def __init__(self) -> None:
        # Without an on_body llhttp skips bodies by itself.
        self._parser = httptools.HttpResponseParser(self)
        self._start_over()
        self.is_complete = True

    def expect(self) -> None:
        """A request goes out; its answer is next."""
        self._start_over()

    def feed(self, data: bytes) -> tuple[AnswerHead | None, bytes]:
        """The head, once its last byte is here, and what of the body came with these bytes. Raises BadAnswer.

        `is_complete` says afterwards whether the answer has ended.
        """
        head = None
        if self._head is None:
            head, data = self._read_head(data)
            if head is None:
                return None, b""
        if data:
            self._follow(data)
        return head, data

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

    def _start_over(self) -> None:
        self.is_complete = False
        self._head: AnswerHead | None = None
        self._buffered = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_clean = True
        self._is_head_complete = False
        self._has_more = False
        self._keep_alive = False

    def _read_head(self, data: bytes) -> tuple[AnswerHead | None, bytes]:
        while True:
            if self._buffered:
                data = self._buffered + data
            end = data.find(HEAD_END) + len(HEAD_END)
            if end < len(HEAD_END):
                if len(data) > MAX_HEAD_BYTES:
                    raise BadAnswer(f"a head of more than {MAX_HEAD_BYTES} bytes")
                self._buffered = data
                return None, b""
            raw, data = (data, b"") if end == len(data) else (data[:end], data[end:])
            self._follow(raw)
            if not self._is_head_complete:
                raise BadAnswer("a head without an end")
            status = self._parser.get_status_code()
            if status >= 200:
                break
            if status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise BadAnswer("another protocol, which nobody asked for")
            self._start_over()  # 100 Continue and the like: the answer comes behind it
        self._buffered = b""
        self._head = self._make_head(status, raw)
        return self._head, data

    def _make_head(self, status: int, raw: bytes) -> AnswerHead:
        length, chunked = (0 if status in BODILESS else None), False
        for name, value in self._headers:
            match name.lower():
                case b"content-length":
                    length = int(value)
                case b"transfer-encoding":
                    chunked = value.lower().endswith(b"chunked")
        until_close = length is None and not chunked
        is_clean = self._is_clean and raw.startswith(b"HTTP/1.1 ")
        return AnswerHead(status, raw, self._headers, length, until_close, is_clean)

    def _follow(self, data: bytes) -> None:
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
        if self._is_head_complete:
            return  # a trailer
        self._headers.append((name, value))
        lowered = name.lower()
        if lowered in HOP_BY_HOP and lowered not in _FRAMING:
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
