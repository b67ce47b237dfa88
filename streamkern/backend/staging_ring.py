"""A ring of staging buffers between a loader and a device, whatever the device is.

The consumer asks for batch i + 1 when step i is queued, so at that moment an event on the compute
stream marks the buffers of batch i as free once it is reached. A slot's next copy waits for that
event alone, on a stream of its own, and runs beside the steps that are under way. The host waits
for one thing: that the copy out of a pinned buffer, `depth` batches old, is over before it writes
there again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, Uploader


class Event(Protocol):
    """A place in a stream. Before it is recorded there is nothing to wait for."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work in order. An event may be recorded again; who waits, waits for the last recording."""

    def record(self, event: Any) -> Any: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Transfers(NamedTuple):
    """What a ring needs of a device.

    event : makes an event. empty_pinned, empty : bytes -> (bytes,) uint8, host and device.
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
    """Copies that overlap the compute stream; buffers grow to the largest batch seen."""

    def __init__(self, backend: Backend, transfers: Transfers, depth: int) -> None:
        super().__init__(backend, depth)
        self.transfers = transfers
        self._slots = [_Slot(transfers.event(), transfers.event()) for _ in range(depth)]
        self._turn = 0
        self._room = 0

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Rows on the device, in the storage dtype; good until `depth` more are asked for."""
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
        """All slots at once, when no one uses them: computing has waited for every copy."""
        self.transfers.computing.synchronize()
        for slot in self._slots:
            slot.pinned = self.transfers.empty_pinned(nbytes)
            slot.device = self.transfers.empty(nbytes)
        self._room = nbytes

    def close(self) -> None:
        """Wait for the copies and drop the buffers."""
        self.transfers.copying.synchronize()
        self._slots, self._room = [], 0
