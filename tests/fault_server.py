"""Run the process of a FaultProxy, which forwards requests and injects the planned faults.

Requests and answers are taken whole before they are handed on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from http.server import BaseHTTPRequestHandler
from typing import Any

from benchmarks.serverprocess import Throttle
from tests.fault_proxy import ANSWERS, ON_ANSWERS, ON_OBJECTS, Plan, Settings

LOG_LENGTH = 100_000
PIECE_BYTES = 1 << 18
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER with which a closed connection is an error at the other end, and no end."""


class Server:
    """The listening socket, the plan and the counts; one thread per connection."""

    def __init__(self, upstream: tuple[str, int], settings: Settings) -> None:
        self.upstream = upstream
        self.settings = settings
        self.plan = Plan(settings)
        self.throttle = Throttle(settings.bandwidth)
        self._lock = threading.Lock()
        self._counts = Counter(connections=0, bytes_in=0, bytes_out=0, upstream_errors=0)
        self._requests: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._log: deque[list[str | None]] = deque(maxlen=LOG_LENGTH)
        # A socket that is bound but does not listen keeps the port while the listener is closed.
        self._holder = bound_socket(0)
        self.port: int = self._holder.getsockname()[1]
        self._listener = self._listen()

    # What the test asks for.

    def set(self, **changes: Any) -> None:
        self.settings = dataclasses.replace(self.settings, **changes)
        self.plan = Plan(self.settings)
        self.throttle = Throttle(self.settings.bandwidth)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {**self._counts, "requests": self._requests, "faults": self._faults}

    def log(self) -> list[list[str | None]]:
        with self._lock:
            taken = list(self._log)
            self._log.clear()
        return taken

    # What connections report.

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def pass_bytes(self, name: str, n_bytes: int) -> None:
        """Count bytes that are about to pass, and wait for their turn."""
        self.throttle.take(n_bytes)
        self.count(name, n_bytes)

    def note_request(self, method: str, path: str) -> list[str | None]:
        entry: list[str | None] = [method, path, None]
        with self._lock:
            self._requests[method] += 1
            self._log.append(entry)
        return entry

    def note_fault(self, entry: list[str | None], fault: str) -> None:
        with self._lock:
            self._faults[fault] += 1
            entry[2] = fault

    # The listening socket.

    def _listen(self) -> socket.socket:
        sock = bound_socket(self.port)
        sock.listen(1024)
        return sock

    def refuse(self) -> None:
        """Stop listening; `accept_forever` begins again after a while."""
        with contextlib.suppress(OSError):  # another connection's fault may have done it already
            self._listener.shutdown(socket.SHUT_RDWR)

    def accept_forever(self) -> None:
        while True:
            try:
                accepted = self._listener.accept()
            except OSError:
                self._listener.close()
                time.sleep(self.settings.refuse_s)
                self._listener = self._listen()
            else:
                self.count("connections")
                threading.Thread(target=self._serve, args=accepted, daemon=True).start()

    def _serve(self, sock: socket.socket, address: Any) -> None:
        try:
            Handler(sock, address, self)
        except Reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        except (OSError, ValueError):
            pass  # the client left, in the middle of a request or of its answer
        finally:
            sock.close()


def bound_socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


class Reset(Exception):
    """The client's connection is to be reset."""


class Handler(BaseHTTPRequestHandler):
    """One client's connection, with one to the server behind."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self.behind = http.client.HTTPConnection(*self.server.upstream)

    def finish(self) -> None:
        self.behind.close()
        super().finish()

    def handle_expect_100(self) -> bool:
        """Leave the answer to `do_GET`, as a fault may come before it."""
        return True

    def do_GET(self) -> None:
        """Serve a request of any method."""
        settings, plan = self.server.settings, self.server.plan
        entry = self.server.note_request(self.command, self.path)
        fault = plan.choose(self.command, self.path, self.headers.get("Range", ""))
        time.sleep(settings.latency_s)
        if fault and fault not in ON_ANSWERS:
            self.server.note_fault(entry, fault)
        if fault == "refuse":
            self.server.refuse()
            self.close_connection = True
            return
        if fault == "slowdns":
            time.sleep(settings.slow_s)
        if "Expect" in self.headers:
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        sent = self._body()
        if fault in ANSWERS:
            self.wfile.write(own_answer(fault, self.command))
            return
        answer, body = self._forwarded(sent)
        if fault in ON_OBJECTS and not (answer.status in (200, 206) and body):
            plan.give_back()
            fault = None
        if fault in ON_ANSWERS:
            self.server.note_fault(entry, fault)
            self._spoil(fault, answer, body)
        else:
            self._to_client(self._head(answer, len(body)) + body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _body(self) -> bytes:
        """Return the body of the request; a chunked one without its coding."""
        if not self._is_chunked():
            n_bytes = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(n_bytes)
            if len(body) < n_bytes:
                raise ConnectionError("the client left")
            return body
        chunks = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # the trailer
            pass
        return b"".join(chunks)

    def _is_chunked(self) -> bool:
        return "chunked" in self.headers.get("Transfer-Encoding", "").lower()

    def _forwarded(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """Hand on the request, and return the answer of the server behind and its body."""
        behind = self.behind
        if behind.sock is not None and is_readable(behind.sock, 0):
            behind.close()  # the server has closed it
        try:
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "transfer-encoding", "content-length"):
                    behind.putheader(name, value)
            if self._is_chunked() or "Content-Length" in self.headers:
                behind.putheader("Content-Length", str(len(body)))
            behind.endheaders()
            for at in range(0, len(body), PIECE_BYTES):
                piece = body[at : at + PIECE_BYTES]
                self.server.pass_bytes("bytes_in", len(piece))
                behind.send(piece)
            answer = behind.getresponse()
            return answer, answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.server.count("upstream_errors")
            raise Reset from error

    def _head(self, answer: http.client.HTTPResponse, n_bytes: int) -> bytes:
        """Return the head of an answer, for a body of `n_bytes`."""
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        has_body = self.command != "HEAD" and answer.status not in (204, 304)
        dropped = ("connection", "transfer-encoding", "content-length" if has_body else "")
        lines += [f"{k}: {v}" for k, v in answer.getheaders() if k.lower() not in dropped]
        if has_body:
            lines.append(f"Content-Length: {n_bytes}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _spoil(self, fault: str, answer: http.client.HTTPResponse, body: bytes) -> None:
        """Give a wrong version of the answer."""
        if fault == "lostreply":
            raise Reset
        if fault == "shorten":
            body = body[: len(body) // 2]
        if fault == "badbytes":
            wrong = bytearray(body)
            wrong[len(body) // 3] ^= 0x10
            wrong[-1] ^= 0x01
            body = bytes(wrong)
        head = self._head(answer, len(body))
        if fault in ON_OBJECTS:
            self._to_client(head + body)
            return
        self._to_client(head + body[: len(body) // 2] if body else head[:9])
        if fault == "stall":
            is_readable(self.connection, self.server.settings.stall_s)  # or the client left
        if fault != "truncate":
            raise Reset
        self.close_connection = True

    def _to_client(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            self.server.pass_bytes("bytes_out", len(piece))
            self.wfile.write(piece)


def own_answer(fault: str, method: str) -> bytes:
    status, kind, text = ANSWERS[fault]
    body = b"" if method == "HEAD" else text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def is_readable(sock: socket.socket, wait_s: float) -> bool:
    """Return whether there is something to read, or the end, within `wait_s`."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def serve(host: str, port: str, settings: str) -> None:
    server = Server((host, int(port)), Settings(**json.loads(settings)))
    threading.Thread(target=server.accept_forever, daemon=True).start()
    print(server.port, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(server, name)(**arguments)), flush=True)
    os._exit(0)  # the parent is gone, or done: threads and connections end with the process


if __name__ == "__main__":
    serve(*sys.argv[1:])
