"""Collective operations between ranks, the processes that train a run together.

Each rank computes its shard of a step. A sum over all shards has the same bits on every rank, so
ranks that make a decision from it agree without further messages. Messages are numbers or raw
bytes, never pickled objects.

`Collective` uses XGBoost's collective over TCP, without authentication: use it on trusted networks
only. It copies arrays on a GPU to the host and back; `Nccl` does not.
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
from streamkern.basics.machine import boot_id
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional, install_command
from streamkern.basics.warning import warn
from streamkern.planning.memory import RANK_SLAB_BYTES


class Communicator:
    """Collective operations of one of `size` ranks. This base class is a single rank.

    All ranks must call the collective methods, in the same order.
    """

    rank, size = 0, 1
    waited_s = 0.0
    """Seconds spent in collective calls: waiting for other ranks, and transferring."""

    @property
    def is_single(self) -> bool:
        """True if this is the only rank."""
        return self.size == 1

    def sum(self, a: Array, backend: Backend) -> Array:
        """Sum `a` over the ranks, in place. Collective; all ranks get the same bits."""
        if self.is_single or not a.size:
            return a
        if a.nbytes > RANK_SLAB_BYTES and a.ndim > 1:
            rows = max(1, len(a) * RANK_SLAB_BYTES // a.nbytes)
            for part in tiles(len(a), rows):
                self.sum(a[part] if len(a) > 1 else a[0], backend)
            return a
        host = np.ascontiguousarray(backend.to_host(a))
        total = self._timed_total(host)
        a[...] = backend.asarray(total.reshape(host.shape), a.dtype)
        return a

    def broadcast_scalars(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the numbers of rank 0 on all ranks. Collective."""
        values = np.asarray(numbers, np.float64)
        if self.is_single:
            return values
        return self._timed_total(np.zeros_like(values) if self.rank else values)

    def allgather(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return the k numbers of every rank, (size, k). Collective."""
        gathered = np.zeros((self.size, len(numbers)))
        gathered[self.rank] = numbers
        return gathered if self.is_single else self._timed_total(gathered)

    def agree(self, condition: bool) -> bool:
        """Return whether the condition is true on every rank. Collective."""
        return bool(self.allgather([condition]).all())

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return the bytes of rank 0 on all ranks. Collective."""
        if self.is_single:
            return data
        length = int(self.broadcast_scalars([len(data)])[0])
        return self.broadcast(np.frombuffer(data.ljust(length, b"\0"), np.uint8).copy()).tobytes()

    def broadcast(self, a: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Overwrite the host array `a` with the bits of rank 0's, and return it. Collective."""
        if self.is_single:
            return a
        flat = a.reshape(-1).view(np.uint8)
        if self.rank:
            flat[:] = 0
        for part in tiles(len(flat), RANK_SLAB_BYTES):
            total = self._timed_total(flat[part])
            if self.rank:
                flat[part] = total
        return a

    def exclusive_scan(self, count: int) -> int:
        """Return the sum of the counts of all ranks before this one. Collective."""
        return int(self.allgather([count])[: self.rank].sum())

    def _timed_total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `_total`, and add its time to `waited_s`."""
        start = time.perf_counter()
        total = self._total(values)
        self.waited_s += time.perf_counter() - start
        return total

    def _total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the sum of the arrays of all ranks, on the host. Collective."""
        raise NotImplementedError

    def stripe(self, n: int) -> slice:
        """Return this rank's stripe of n rows; it may be empty."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def triangle(self, n: int) -> slice:
        """Return this rank's rows of a lower triangular n x n matrix.

        Each rank has about the same number of entries.
        """
        start, stop = (round(n * (k / self.size) ** 0.5) for k in (self.rank, self.rank + 1))
        return slice(start, stop)


SINGLE = Communicator()
"""The communicator of a run on a single rank."""


class Collective(Communicator):
    """Communicator between processes, by `xgboost.collective`; see `process_group`.

    If a rank is lost, a sum on the others raises RankLostError or, occasionally with XGBoost 3.2,
    never returns. The process that starts the ranks must therefore end all of them.

    library : the module `xgboost.collective`.
    """

    def __init__(self, rank: int, size: int, library: Any) -> None:
        self.rank, self.size, self._library = rank, size, library
        self._thread = threading.get_ident()

    def _total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        library = self._library
        if threading.get_ident() != self._thread:  # there the library would sum over one rank
            raise RuntimeError("only the thread that joined the process group can sum over ranks")
        try:
            return np.asarray(library.allreduce(values, library.Op.SUM)).reshape(values.shape)
        except Exception as error:  # XGBoost's own type, for a lost peer or a timeout
            raise RankLostError(
                f"another rank has ended or does not respond: {_summary(error)}",
                "run the same command again to continue",
            ) from error


def _summary(error: Exception) -> str:
    """Return the first informative line of an error of XGBoost, which contains stack traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if not line.startswith(("[bt]", "Stack trace"))]
    return (informative or lines or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def process_group(rank: int, tracker: Mapping[str, Any]) -> Iterator[Communicator]:
    """Connect to the other ranks through `tracker`, and yield the communicator.

    A process can be in one group at a time.

    tracker : result of `xgboost.tracker.RabitTracker.worker_args` in the process that started the
        ranks

    Raises
    ------
    RankLostError
        The ranks cannot connect.
    """
    library = import_optional("xgboost.collective", "a run of several ranks", "ranks")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints messages
            # The library numbers ranks by the alphabetical order of their task ids.
            library.init(**tracker, dmlc_task_id=f"{rank:06d}")
    except Exception as error:
        raise RankLostError(
            f"the ranks cannot connect: {_summary(error)}",
            "check that the machines of the workers reach each other, and run the same command "
            "again",
        ) from error
    yield Collective(library.get_rank(), library.get_world_size(), library)
    library.finalize()  # after a failure this would wait for the other ranks


def on_devices(ranks: Communicator, backend: Backend) -> Communicator:
    """Return a communicator that sums arrays on the GPUs by NCCL, or `ranks` itself.

    NCCL is used if every rank has it and a GPU of its own. Rank 0 warns if only NCCL is missing.
    Collective. Raises BackendError if NCCL is installed but does not start.
    """
    if ranks.is_single:
        return ranks
    on_gpu = isinstance(backend, CupyBackend)
    library: Any = backend.nccl() if isinstance(backend, CupyBackend) else None
    device_number = _device_number(backend) if on_gpu else 0
    on_gpus, has_nccl, devices = ranks.allgather([on_gpu, library is not None, device_number]).T
    if not on_gpus.all() or len(set(devices)) < ranks.size:
        return ranks
    if not has_nccl.all():
        if not ranks.rank:
            _warn_without_nccl(np.flatnonzero(has_nccl == 0).tolist(), backend)
        return ranks
    unique_id = ranks.broadcast_bytes(b"" if ranks.rank else library.get_unique_id())
    try:
        with backend.active():
            communicator = library.NcclCommunicator(ranks.size, unique_id, ranks.rank)
    except Exception as error:  # NCCL's own type
        raise BackendError(
            f"NCCL does not start on rank {ranks.rank} of {ranks.size}: {error}",
            f"set NCCL_DEBUG=WARN to see the cause, or use {mention('run.device', 'cpu')}",
        ) from error
    return Nccl(ranks, communicator, library, backend)


def _device_number(backend: Any) -> int:
    """Return a number that identifies the GPU among the GPUs of all machines.

    Containers on two machines may have the same host name, so the boot id is included, as in NCCL.
    """
    name = f"{socket.gethostname()} {boot_id()} {backend.device.pci_bus_id}"
    return zlib.crc32(name.encode())


def _warn_without_nccl(ranks: list[int], backend: Any) -> None:
    """Warn that all-reduces copy arrays through the host. ranks : ranks without NCCL"""
    cuda = backend.xp.cuda.runtime.runtimeGetVersion() // 1000
    warn(
        f"all-reduces between the GPUs copy every array through host memory and TCP: CuPy finds no "
        f"NCCL on rank {', '.join(map(str, ranks))}. Install it there: "
        f"{install_command(f'gpu-cuda{cuda}')}"
    )


class Nccl(Communicator):
    """Communicator that sums arrays on GPUs by NCCL; see `on_devices`.

    A sum runs in place on the backend's stream, and the host does not wait for it.
    """

    def __init__(self, host: Communicator, communicator: Any, library: Any, backend: Any) -> None:
        self.rank, self.size, self._host = host.rank, host.size, host
        self._communicator, self._backend, self._library = communicator, backend, library
        self._types: dict[np.dtype[Any], int] = {
            np.dtype(np.float32): library.NCCL_FLOAT32,
            np.dtype(np.float64): library.NCCL_FLOAT64,
            np.dtype(np.uint8): library.NCCL_UINT8,
        }
        self._pending_events = deque[tuple[Any, Any]]()
        self._on_device_s = 0.0

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        """Seconds spent in sums on the host, and in finished sums on the device."""
        cuda = self._backend.xp.cuda
        while self._pending_events and self._pending_events[0][1].done:
            self._on_device_s += cuda.get_elapsed_time(*self._pending_events.popleft()) / 1000
        return self._host.waited_s + self._on_device_s

    def sum(self, a: Array, backend: Backend) -> Array:
        """Sum an array over the ranks in place, see `Communicator.sum`.

        The host sums its own arrays, and arrays of dtypes other than float32, float64 and uint8.
        """
        if not isinstance(a, self._backend.xp.ndarray) or a.dtype not in self._types:
            return self._host.sum(a, backend)
        if not a.size:
            return a
        contiguous = a if a.flags.c_contiguous else self._backend.xp.ascontiguousarray(a)
        event, stream = self._backend.xp.cuda.Event, self._backend.stream
        start_event, end_event = event(), event()
        start_event.record(stream)
        self._communicator.allReduce(
            contiguous.data.ptr, contiguous.data.ptr, contiguous.size,
            self._types[contiguous.dtype], self._library.NCCL_SUM, stream.ptr,
        )  # fmt: skip
        end_event.record(stream)
        self._pending_events.append((start_event, end_event))
        if contiguous is not a:
            a[...] = contiguous
        return a

    def _total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._host._total(values)

    def _timed_total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._host._timed_total(values)
