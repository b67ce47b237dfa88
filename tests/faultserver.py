"""The process of a FaultProxy: takes requests, hands them on, and does what the plan says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import sys
import threading
import time
from collections import Counter, deque
from typing import Any

from benchmarks.serverprocess import Throttle
from tests.faultproxy import ANSWERS, ON_ANSWERS, ON_OBJECTS, Plan, Settings
from tests.httpwire import TO_THE_END, Broken, Head, Peer

LOG_LENGTH = 100_000


class Server:
    """The listening socket, the plan, and what is counted; one thread per connection."""

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
                sock, _ = self._listener.accept()
            except OSError:
                self._listener.close()
                time.sleep(self.settings.refuse_s)
                self._listener = self._listen()
            else:
                self.count("connections")
                threading.Thread(target=Connection(self, sock).serve, daemon=True).start()


def bound_socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


class Reset(Exception):
    """The client's connection is to be reset."""


class Connection:
    """One client's connection, with one to the server behind."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._client = Peer(sock)
        self._behind: Peer | None = None
        self._behind_is_last = False

    def serve(self) -> None:
        reset = False
        try:
            while self._serve_one():
                pass
        except Reset:
            reset = True
        except Broken as broken:
            if broken.args[0] is not self._client:
                self._server.count("upstream_errors")
                reset = True
        finally:
            self._client.close(reset)
            if self._behind:
                self._behind.close()

    def _serve_one(self) -> bool:
        """Serve one request; return whether the connection stays open."""
        request = self._client.head()
        if request is None:
            return False
        method, path = request.first[:2]
        settings, plan = self._server.settings, self._server.plan
        entry = self._server.note_request(method, path)
        fault = plan.choose(method, path, request.fields.get("range", ""))
        time.sleep(settings.latency_s)
        if fault and fault not in ON_ANSWERS:
            self._server.note_fault(entry, fault)
        if fault == "refuse":
            self._server.refuse()
            return False
        if fault == "slowdns":
            time.sleep(settings.slow_s)
        if "expect" in request.fields:
            self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault in ANSWERS:
            self._client.body(request, to=lambda data: None)
            self._client.send(own_answer(fault, method))
            return not request.is_last
        answer, behind = self._forward(request)
        if fault in ON_ANSWERS and fits(fault, answer):
            self._server.note_fault(entry, fault)
            stays = self._spoil(fault, answer, method, behind)
        else:
            if fault in ON_ANSWERS:
                plan.give_back()
            self._to_client(bytes(answer))
            behind.body(answer, self._to_client, method)
            stays = answer.body_bytes(method) != TO_THE_END
        return stays and not request.is_last

    def _forward(self, request: Head) -> tuple[Head, Peer]:
        """Hand on the request with its body; return the head of the answer and who gives it."""
        behind = self._reach_behind()
        behind.send(bytes(request.without("expect")))
        self._client.body(request, to=self._to_server)
        while answer := behind.head():
            if answer.status >= 200:
                self._behind_is_last = answer.is_last
                return answer.without("connection"), behind
        raise Broken(behind)

    def _reach_behind(self) -> Peer:
        """Return the connection to the server behind, a new one if the last cannot be used."""
        if self._behind and (self._behind_is_last or is_readable(self._behind.sock, 0)):
            self._behind.close()
            self._behind = None
        if self._behind is None:
            try:
                self._behind = Peer(socket.create_connection(self._server.upstream))
            except OSError as error:
                raise Broken(None) from error
        return self._behind

    def _spoil(self, fault: str, answer: Head, method: str, behind: Peer) -> bool:
        """Give a wrong version of the answer; return whether the connection stays open."""
        body = bytearray()
        behind.body(answer, body.extend, method)
        if fault == "lostreply":
            raise Reset
        if fault == "shorten":
            del body[len(body) // 2 :]
            answer = answer.with_length(len(body))
        if fault == "badbytes":
            body[len(body) // 3] ^= 0x10
            body[-1] ^= 0x01
        head = bytes(answer)
        if fault in ON_OBJECTS:
            self._to_client(head + body)
            return True
        self._to_client(head + body[: len(body) // 2] if body else head[:9])
        if fault == "stall":
            is_readable(self._client.sock, self._server.settings.stall_s)  # or the client left
        if fault != "truncate":
            raise Reset
        return False

    def _to_client(self, data: bytes | memoryview) -> None:
        self._server.pass_bytes("bytes_out", len(data))
        self._client.send(data)

    def _to_server(self, data: memoryview) -> None:
        assert self._behind is not None
        self._server.pass_bytes("bytes_in", len(data))
        self._behind.send(data)


def fits(fault: str, answer: Head) -> bool:
    """Return whether the fault can happen to this answer; wrong bytes need bytes of an object."""
    if fault not in ON_OBJECTS:
        return True
    return answer.status in (200, 206) and answer.fields.get("content-length", "0") != "0"


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
