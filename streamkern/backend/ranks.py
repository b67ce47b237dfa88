"""Ranks: trainers that make one step together, and the communication between them.

Every rank has a part of the rows of a batch, and receives the same sums; so all ranks make the same
decisions without further messages. Only numbers are sent.

`Collective` is XGBoost's, over TCP, without authentication: for trusted networks. An array on a GPU
goes through the host.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.cupy_backend import CupyBackend
from streamkern.basics.errors import BackendError, RankLostError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.planning.memory import RANK_SLAB_BYTES


class Communicator:
    """One of `size` trainers. Here the only one: its sums are its own values."""

    rank, size = 0, 1
    waited_s = 0.0
    """Seconds spent in sums: waiting for other ranks, and transferring."""

    @property
    def is_single(self) -> bool:
        """True if this is the only rank."""
        return self.size == 1

    def sum(self, a: Array, backend: Backend) -> Array:
        """Replace `a` by its sum over the ranks, the same bits on each. A collective call."""
        if self.is_single or not a.size:
            return a
        if a.nbytes > RANK_SLAB_BYTES and a.ndim > 1:
            rows = max(1, len(a) * RANK_SLAB_BYTES // a.nbytes)
            for part in tiles(len(a), rows):
                self.sum(a[part] if len(a) > 1 else a[0], backend)
            return a
        host = np.ascontiguousarray(backend.to_host(a))
        total = self._timed(host)
        a[...] = backend.asarray(total.reshape(host.shape), a.dtype)
        return a

    def broadcast_scalars(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the numbers of rank 0 on all ranks. A collective call."""
        mine = np.asarray(numbers, np.float64)
        return mine if self.is_single else self._timed(np.zeros_like(mine) if self.rank else mine)

    def allgather(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the k numbers of every rank, (size, k). A collective call."""
        said = np.zeros((self.size, len(numbers)))
        said[self.rank] = numbers
        return said if self.is_single else self._timed(said)

    def agree(self, so: bool) -> bool:
        """Return whether `so` is true on all ranks. A collective call."""
        return bool(self.allgather([so]).all())

    def broadcast_bytes(self, said: bytes) -> bytes:
        """Return the bytes of rank 0 on all ranks. A collective call."""
        if self.is_single:
            return said
        length = int(self.broadcast_scalars([len(said)])[0])
        return self.broadcast(np.frombuffer(said.ljust(length, b"\0"), np.uint8).copy()).tobytes()

    def broadcast(self, a: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Replace `a`, on the host, by that of rank 0, every bit of it. A collective call."""
        if self.is_single:
            return a
        flat = a.reshape(-1).view(np.uint8)
        if self.rank:
            flat[:] = 0
        for part in tiles(len(flat), RANK_SLAB_BYTES):
            total = self._timed(flat[part])
            if self.rank:
                flat[part] = total
        return a

    def exclusive_scan(self, count: int) -> int:
        """Return the sum of the counts of all ranks before this one. A collective call."""
        return int(self.allgather([count])[: self.rank].sum())

    def _timed(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        began = time.perf_counter()
        total = self._total(mine)
        self.waited_s += time.perf_counter() - began
        return total

    def _total(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        raise NotImplementedError

    def stripe(self, n: int) -> slice:
        """Return this rank's part of n rows; it may be empty."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def triangle(self, n: int) -> slice:
        """Return this rank's rows of a lower triangular matrix with n rows: equal areas."""
        first, last = (round(n * (k / self.size) ** 0.5) for k in (self.rank, self.rank + 1))
        return slice(first, last)


SINGLE = Communicator()


class Collective(Communicator):
    """Ranks that are processes, by `xgboost.collective`; see `process_group`.

    A sum with a lost rank raises RankLostError, but occasionally, with XGBoost 3.2, never ends: so
    the process that starts the ranks has to end them all when it finds that one is gone.
    """

    def __init__(self, rank: int, size: int, library: Any) -> None:
        self.rank, self.size, self._library = rank, size, library
        self._thread = threading.get_ident()

    def _total(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        library = self._library
        if threading.get_ident() != self._thread:  # in other threads the library has one rank
            raise RuntimeError("sums of ranks are for the thread that has joined them")
        try:
            return np.asarray(library.allreduce(mine, library.Op.SUM)).reshape(mine.shape)
        except Exception as error:  # XGBoost's own type: a peer that is gone, a time that is up
            raise RankLostError(f"another rank is gone, or too slow: {_short(error)}") from error


def _short(error: Exception) -> str:
    """Return the first informative line; XGBoost's errors contain stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if not line.startswith(("[bt]", "Stack trace"))]
    return (informative or lines or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def process_group(rank: int, tracker: Mapping[str, Any]) -> Iterator[Communicator]:
    """Join the ranks that `tracker` connects, as a context manager.

    tracker : result of `xgboost.tracker.RabitTracker.worker_args` in the process that started the
        ranks. Once in a process at a time.

    Raises
    ------
    RankLostError
        The ranks cannot connect.
    """
    library = import_optional("xgboost.collective", "a run of several ranks", "ranks")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where the library prints the ranks
            library.init(**tracker, dmlc_task_id=f"{rank:06d}")  # ranks sort by this text
    except Exception as error:
        raise RankLostError(f"the ranks do not come together: {_short(error)}") from error
    yield Collective(library.get_rank(), library.get_world_size(), library)
    library.finalize()  # not after a failure: it would wait for the others


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
            f"NCCL does not begin on rank {ranks.rank} of {ranks.size}: {error}",
            f"see to the cause (NCCL_DEBUG=WARN says more), or give {mention('run.device', 'cpu')}",
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
