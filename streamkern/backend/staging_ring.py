"""Copies between host and device: a ring of staging buffers for batches, and arrays for files.

The consumer requests batch i + 1 after it has queued step i. At that moment an event is recorded on
the compute stream; when the stream reaches it, the device buffer of batch i is free. The next copy
to this buffer waits for the event on another stream, so copies run at the same time as steps. The
host waits only before it writes to a pinned buffer, until the copy from it, `depth` batches ago,
has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, Uploader


class Transfers(NamedTuple):
    """The streams and operations of a device that a ring needs.

    computing, copying : the streams of steps and of copies, as of CuPy. A wait for an event refers
        to its last recording, and returns at once if it was never recorded.
    event : function that returns a new event.
    empty_pinned, empty : functions of a number of bytes that return an uninitialised uint8 array,
        in pinned memory of the host and on the device.
    send : function (pinned, device) that queues a copy on `copying`.
    """

    computing: Any
    copying: Any
    event: Callable[[], Any]
    empty_pinned: Callable[[int], npt.NDArray[np.uint8]]
    empty: Callable[[int], Array]
    send: Callable[[npt.NDArray[Any], Array], None]


@dataclass
class _Slot:
    """The buffers of one batch.

    filled : the copy to the device has ended.
    free : the steps no longer read the device buffer.
    """

    filled: Any
    free: Any
    pinned: Any = None
    device: Any = None


class Ring(Uploader):
    """Ring of staging buffers, which grow to the largest batch so far."""

    def __init__(self, backend: Backend, transfers: Transfers, depth: int) -> None:
        super().__init__(backend, depth)
        self.transfers = transfers
        self._slots = [_Slot(transfers.event(), transfers.event()) for _ in range(depth)]
        self._n_uploads = 0
        self._slot_bytes = 0

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return the array on the device, valid until the `depth`-th next call."""
        computing, copying = self.transfers.computing, self.transfers.copying
        if self._n_uploads:
            computing.record(self._slots[(self._n_uploads - 1) % self.depth].free)
        if host.nbytes == 0:
            return self.backend.xp.empty(host.shape, host.dtype)
        if host.nbytes > self._slot_bytes:
            self._grow(host.nbytes)
        slot = self._slots[self._n_uploads % self.depth]
        self._n_uploads += 1
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
        """Replace the buffers of all slots by larger ones, after the compute stream is idle.

        Then no copy is in progress either, because the compute stream waits for every copy.
        """
        self.transfers.computing.synchronize()
        for slot in self._slots:
            slot.pinned = self.transfers.empty_pinned(nbytes)
            slot.device = self.transfers.empty(nbytes)
        self._slot_bytes = nbytes

    def close(self) -> None:
        """Wait for the copies and drop the buffers."""
        self.transfers.copying.synchronize()
        self._slots, self._slot_bytes = [], 0


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
