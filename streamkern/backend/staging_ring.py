"""Copies between host and device: a ring of staging buffers for batches, and arrays for files.

The consumer requests batch i + 1 when step i is queued. At that moment an event is recorded on the
compute stream; once it is reached, the buffers of batch i are free. A slot's next copy waits for
that event alone, on a stream of its own, and runs beside the steps in progress. The host waits for
one thing: that the copy out of a pinned buffer, `depth` batches old, is over before it writes there
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, Uploader


class Event(Protocol):
    """A position in a stream. Before it is recorded there is nothing to wait for."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work in order. An event may be recorded again; waiting refers to the last recording."""

    def record(self, event: Any) -> Any: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Transfers(NamedTuple):
    """Operations of a device that a ring needs.

    event : makes an event.
    empty_pinned, empty : bytes -> (bytes,) uint8 on the host and on the device.
    send : (pinned, device) copies on `copying`, without waiting for it.
    """

    computing: Stream
    copying: Stream
    event: Callable[[], Event]
    empty_pinned: Callable[[int], npt.NDArray[np.uint8]]
    empty: Callable[[int], Array]
    send: Callable[[npt.NDArray[Any], Array], None]


@dataclass
class _Slot:
    filled: Event
    free: Event
    pinned: Any = None
    device: Any = None


class Ring(Uploader):
    """Ring whose copies overlap the compute stream; buffers grow to the largest batch so far."""

    def __init__(self, backend: Backend, transfers: Transfers, depth: int) -> None:
        super().__init__(backend, depth)
        self.transfers = transfers
        self._slots = [_Slot(transfers.event(), transfers.event()) for _ in range(depth)]
        self._turn = 0
        self._room = 0

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return the rows on the device, in the storage dtype; valid until `depth` later calls."""
        computing, copying = self.transfers.computing, self.transfers.copying
        if self._turn:
            computing.record(self._slots[(self._turn - 1) % self.depth].free)
        if host.nbytes == 0:
            return self.backend.xp.empty(host.shape, host.dtype)
        if host.nbytes > self._room:
            self._grow(host.nbytes)
        slot = self._slots[self._turn % self.depth]
        self._turn += 1
        slot.filled.synchronize()
        pinned, device = (
            a[: host.nbytes].view(host.dtype).reshape(host.shape)
            for a in (slot.pinned, slot.device)
        )
        np.copyto(pinned, host)
        copying.wait_event(slot.free)
        self.transfers.send(pinned, device)
        copying.record(slot.filled)
        computing.wait_event(slot.filled)
        return device

    def _grow(self, nbytes: int) -> None:
        """Enlarge all slots at once, when none is in use: computing has waited for every copy."""
        self.transfers.computing.synchronize()
        for slot in self._slots:
            slot.pinned = self.transfers.empty_pinned(nbytes)
            slot.device = self.transfers.empty(nbytes)
        self._room = nbytes

    def close(self) -> None:
        """Wait for the copies and drop the buffers."""
        self.transfers.copying.synchronize()
        self._slots, self._room = [], 0


class ByParts:
    """A device array whose slices are read and written as host arrays."""

    def __init__(self, backend: Backend, array: Array) -> None:
        self.backend, self.array = backend, array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, part: Any) -> npt.NDArray[Any]:
        return self.backend.to_host(self.array[part])

    def __setitem__(self, part: Any, host: npt.NDArray[Any]) -> None:
        with self.backend.active():
            self.array[part].set(np.ascontiguousarray(host, self.dtype))
