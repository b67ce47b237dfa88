"""HTTP/1.1 messages on a socket, as bytes to be handed on: heads, bodies, nothing more."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

PIECE_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 16
TO_THE_END = float("inf")
CHUNKED = -1.0

Sink = Callable[[memoryview], object]


class Broken(Exception):
    """A connection ended in the middle of a message; its argument is the Peer that did it."""


class Head:
    """The head of a request or an answer: its first line and its fields, bytes as they came."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.first = lines[0].decode("latin-1").split(None, 2)
        self.fields: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            self.fields[name.strip().lower()] = value.strip()

    def __bytes__(self) -> bytes:
        return b"".join(self.lines) + b"\r\n"

    def without(self, name: str) -> Head:
        """Return this head without the field `name`, which is in lower case."""
        prefix = f"{name}:".encode("latin-1")
        kept = [line for line in self.lines[1:] if not line.lower().startswith(prefix)]
        return Head([self.lines[0], *kept])

    def with_length(self, n_bytes: int) -> Head:
        line = f"Content-Length: {n_bytes}\r\n".encode("latin-1")
        return Head([*self.without("content-length").lines, line])

    @property
    def status(self) -> int:
        return int(self.first[1])

    @property
    def is_last(self) -> bool:
        """Whether the connection closes after this message."""
        return "close" in self.fields.get("connection", "").lower() or "HTTP/1.0" in self.first

    def body_bytes(self, method: str | None = None) -> float:
        """Return the length of the body that follows, or CHUNKED.

        For an answer, `method` is the request's; its body may be TO_THE_END of the stream.
        """
        if method == "HEAD" or (method and self.status in (204, 304)):
            return 0
        if "chunked" in self.fields.get("transfer-encoding", "").lower():
            return CHUNKED
        return float(self.fields.get("content-length", TO_THE_END if method else 0))


class Peer:
    """One end of the wire. Each failure of this end raises Broken(self)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._reader = sock.makefile("rb")
        self._piece = memoryview(bytearray(PIECE_BYTES))

    def send(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise Broken(self) from error

    def head(self) -> Head | None:
        """Return the next head; None when the stream ends before it."""
        lines: list[bytes] = []
        while (line := self._line()).strip():
            lines.append(line)
        if lines and not line:
            raise Broken(self)
        return Head(lines) if lines else None

    def body(self, head: Head, to: Sink, method: str | None = None) -> None:
        """Hand on the body after `head`, a chunked one with its coding. See `Head.body_bytes`."""
        n_bytes = head.body_bytes(method)
        if n_bytes == CHUNKED:
            self._chunks(to)
        else:
            self._bytes(n_bytes, to)

    def close(self, reset: bool = False) -> None:
        """Close the connection; with `reset` the other end gets an error, not an end."""
        with contextlib.suppress(OSError):
            if reset:
                at_once = struct.pack("ii", 1, 0)
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            self._reader.close()
        self.sock.close()

    def _line(self) -> bytes:
        try:
            return self._reader.readline(MAX_LINE_BYTES)
        except OSError as error:
            raise Broken(self) from error

    def _bytes(self, n_bytes: float, to: Sink) -> None:
        while n_bytes > 0:
            try:
                n = self._reader.readinto1(self._piece[: int(min(n_bytes, PIECE_BYTES))])
            except OSError as error:
                raise Broken(self) from error
            if n:
                to(self._piece[:n])
                n_bytes -= n
            elif n_bytes == TO_THE_END:
                return
            else:
                raise Broken(self)

    def _chunks(self, to: Sink) -> None:
        size = -1
        while size:
            line = self._line()
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise Broken(self) from None
            to(memoryview(line))
            if size:
                self._bytes(size + 2, to)
        while (line := self._line()).strip():  # the trailer
            to(memoryview(line))
        if not line:
            raise Broken(self)
        to(memoryview(line))
