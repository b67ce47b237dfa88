"""NCCL: sums over ranks that have a GPU each, from device to device.

Uses CuPy's module `nccl`. Scalars and bytes, among them those that initialise NCCL, go through the
host by the given communicator. If a rank is lost, the others hang in a sum that does not end:
their processes are killed with their generation, and nothing is aborted, because that may hang.
"""

from __future__ import annotations

import socket
import zlib
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.backend.cupy_backend import CupyBackend
from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import BackendError


def on_devices(ranks: Communicator, backend: Backend) -> Communicator:
    """Return ranks whose sums go from GPU to GPU, if NCCL can be used.

    Every rank must have its own GPU, and NCCL; otherwise returns `ranks`. A collective call. Raises
    BackendError if NCCL is there but does not start.
    """
    if ranks.is_single:
        return ranks
    library: Any = backend.nccl() if isinstance(backend, CupyBackend) else None
    place = 0 if library is None else _place(backend)
    there, places = ranks.allgather([library is not None, place]).T
    if not there.all() or len(set(places)) < ranks.size:
        return ranks
    # It consists of C chars, which are signed on some machines and unsigned on others.
    number = () if ranks.rank else library.get_unique_id()
    heard = ranks.broadcast_bytes(np.asarray(number, np.int16).tobytes())
    together = tuple(np.frombuffer(heard, np.int16).tolist())
    try:
        with backend.active():
            communicator = library.NcclCommunicator(ranks.size, together, ranks.rank)
    except Exception as error:  # NCCL's own type
        raise BackendError(
            f"NCCL does not begin on rank {ranks.rank} of {ranks.size}: {error}; see to the cause "
            "(NCCL_DEBUG=WARN says more), or set run.device='cpu'"
        ) from error
    return Nccl(ranks, communicator, library, backend)


def _place(backend: Any) -> int:
    """Return a number that identifies the device among those of all machines."""
    return zlib.crc32(f"{socket.gethostname()} {backend.device.pci_bus_id}".encode())


class Nccl(Communicator):
    """Communicator that sums arrays on GPUs by NCCL; see `on_devices`.

    Sums are in place, on the backend's stream: the host does not wait.
    """

    def __init__(self, host: Communicator, communicator: Any, library: Any, backend: Any) -> None:
        self.rank, self.size, self._host = host.rank, host.size, host
        self._communicator, self._backend, self._library = communicator, backend, library
        self._types: dict[np.dtype[Any], int] = {
            np.dtype(np.float32): library.NCCL_FLOAT32,
            np.dtype(np.float64): library.NCCL_FLOAT64,
        }
        self._under_way = deque[tuple[Any, Any]]()
        self._on_device_s = 0.0

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        """Seconds of the host's sums, and of the device's sums that have ended."""
        cuda = self._backend.xp.cuda
        while self._under_way and self._under_way[0][1].done:
            self._on_device_s += cuda.get_elapsed_time(*self._under_way.popleft()) / 1000
        return self._host.waited_s + self._on_device_s

    def sum(self, a: Array, backend: Backend) -> Array:
        """Sum an array over the ranks, see `Communicator`; arrays on the host go through it."""
        if not isinstance(a, self._backend.xp.ndarray) or a.dtype not in self._types:
            return self._host.sum(a, backend)
        if not a.size:
            return a
        whole = a if a.flags.c_contiguous else self._backend.xp.ascontiguousarray(a)
        event, stream = self._backend.xp.cuda.Event, self._backend.stream
        began, ended = event(), event()
        began.record(stream)
        self._communicator.allReduce(
            whole.data.ptr, whole.data.ptr, whole.size, self._types[whole.dtype],
            self._library.NCCL_SUM, stream.ptr,
        )  # fmt: skip
        ended.record(stream)
        self._under_way.append((began, ended))
        if whole is not a:
            a[...] = whole
        return a

    def _total(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._host._total(mine)

    def _timed(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._host._timed(mine)
