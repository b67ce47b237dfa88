"""Cut a network between two addresses: bytes are held back, and connections stay open."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Any, Self

from distributed import Nanny


class Link:
    """A TCP proxy in front of a port of this machine; `cut` holds up all bytes of both ways."""

    def __init__(self, port: int) -> None:
        self._behind, self._whole = port, threading.Event()
        self._whole.set()
        self._listener = _low()
        self._open: list[socket.socket] = [self._listener]
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                front, _ = self._listener.accept()
                self._open.append(front)
                threading.Thread(target=self._join, args=(front,), daemon=True).start()

    def _join(self, front: socket.socket) -> None:
        self._whole.wait()
        try:
            back = socket.create_connection(("127.0.0.1", self._behind))
        except OSError:
            return front.close()
        self._open.append(back)
        for ends in ((front, back), (back, front)):
            threading.Thread(target=self._pump, args=ends, daemon=True).start()
        return None

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._whole.wait()
                target.sendall(data)
        self._whole.wait()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.heal()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Remote(Nanny):
    """A nanny, of a worker, that others reach by links."""

    def __init__(self, scheduler: str, own: Link, of_worker: Link, **options: Any) -> None:
        super().__init__(
            scheduler, port=own._behind, worker_port=of_worker._behind,
            contact_address=of_worker.address, nthreads=1, memory_limit=None, host="127.0.0.1",
            **options,
        )  # fmt: skip
        self._address = own.address


def _low() -> socket.socket:
    """Return an unused port below those that the system assigns, so that its address is sorted
    first."""
    for port in range(10_000, 20_000):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("there is no free port")


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
