"""Copies between host and device: a ring of device buffers for batches, and arrays for files.

The consumer requests batch i + 1 after it has queued step i. At that moment an event is recorded on
the compute stream; when the stream reaches it, the device buffer of batch i is free. The next copy
to this buffer waits for the event on another stream, so copies run at the same time as steps.

The device copies a batch directly from the block buffer of the loader, which is in pinned memory,
while the host goes on. The loader therefore overwrites a block buffer only after the event of the
last copy from it, see `HostMemory.last_copy`, and the ring refers to the arrays of the copies in
progress, so that a buffer is not freed either. The host is at most `depth` batches ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, Uploader
from streamkern.backend.host_memory import HostMemory
from streamkern.basics.text import size_text
from streamkern.basics.warning import warn


class Transfers(NamedTuple):
    """The streams and operations of a device that uploads need.

    computing, copying : the streams of steps and of copies, as of CuPy. A wait for an event refers
        to its last recording, and returns at once if it was never recorded.
    event : function that returns a new event.
    pin : function of a number of bytes that returns a buffer of pinned host memory; raises
        MemoryError if the driver refuses it.
    empty : function of a number of bytes that returns an uninitialised uint8 array on the device.
    send : function (host, device) that queues a copy on `copying`.
    device : context manager that makes the device the thread's current one.
    """

    computing: Any
    copying: Any
    event: Callable[[], Any]
    pin: Callable[[int], Any]
    empty: Callable[[int], Array]
    send: Callable[[npt.NDArray[Any], Array], None]
    device: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class CopyEvent:
    """The event of the last copy from pinned memory, for which any thread may wait.

    A thread whose current device is GPU 0, the default, might open a context there if it waited for
    an event of another GPU.
    """

    event: Any
    device: AbstractContextManager[Any]

    def synchronize(self) -> None:
        """Wait until the copy has ended."""
        with self.device:
            self.event.synchronize()


class PinnedMemory(HostMemory):
    """Pinned memory, from which a device copies by itself while the host goes on."""

    def __init__(self, transfers: Transfers) -> None:
        self.transfers, self._is_full = transfers, False

    @property
    def empty(self) -> Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]:
        return self._empty

    def _empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an uninitialised array, which is pageable once the driver refuses to pin memory.

        The driver copies from pageable memory through its own pinned buffer, on the calling thread.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes and not self._is_full:
            try:
                return np.ndarray(shape, dtype, self.transfers.pin(nbytes))
            except MemoryError as error:
                self._is_full = True
                warn(
                    f"the loader could not pin {size_text(nbytes)} of host memory, and copies its "
                    f"rows to the GPU more slowly, from pageable memory ({error})",
                    once="pinned memory",
                )
        return np.empty(shape, dtype)

    def last_copy(self) -> Any:
        event = self.transfers.event()
        self.transfers.copying.record(event)
        return CopyEvent(event, self.transfers.device)


@dataclass
class _Slot:
    """The device buffer of one batch.

    upload_event : recorded at the end of the copy to the device.
    release_event : recorded after the last step that reads the device buffer.
    host : array of the copy, whose memory must exist until the copy has ended.
    device : (n_bytes,) uint8, the device buffer.
    """

    upload_event: Any
    release_event: Any
    host: Any = None
    device: Any = None


class Ring(Uploader):
    """Ring of device buffers, which grow to the largest batch so far."""

    def __init__(self, backend: Backend, transfers: Transfers, depth: int) -> None:
        super().__init__(backend, depth)
        self.transfers = transfers
        self._slots = [_Slot(transfers.event(), transfers.event()) for _ in range(depth)]
        self._n_uploads = 0
        self._slot_bytes = 0

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return the array on the device, valid until the `depth`-th next call.

        The host array must not change before the event `last_copy` of the backend's host memory.
        """
        computing, copying = self.transfers.computing, self.transfers.copying
        if self._n_uploads:
            computing.record(self._slots[(self._n_uploads - 1) % self.depth].release_event)
        if host.nbytes == 0:
            return self.backend.xp.empty(host.shape, host.dtype)
        if host.nbytes > self._slot_bytes:
            self._grow(host.nbytes)
        slot = self._slots[self._n_uploads % self.depth]
        self._n_uploads += 1
        slot.upload_event.synchronize()  # before `slot.host` is released
        slot.host = np.ascontiguousarray(host)
        device = slot.device[: host.nbytes].view(host.dtype).reshape(host.shape)
        copying.wait_event(slot.release_event)
        self.transfers.send(slot.host, device)
        copying.record(slot.upload_event)
        computing.wait_event(slot.upload_event)
        return device

    def _grow(self, nbytes: int) -> None:
        """Replace the buffers of all slots by larger ones, after the compute stream is idle.

        Then no copy is in progress either, because the compute stream waits for every copy.
        """
        self.transfers.computing.synchronize()
        for slot in self._slots:
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
