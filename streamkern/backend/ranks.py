"""Ranks: trainers that make one step together, and the sums between them.

Every rank has a part of the rows of a batch, and sees the same sums; so all of them go the same way
without a word beside. Nothing is sent but numbers.

`Collective` is XGBoost's, by TCP, without authentication: for networks that one trusts. An array of
a GPU goes through the host.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.basics.errors import RankLostError
from streamkern.basics.optional import need
from streamkern.planning.memory import RANK_SLAB_BYTES


class Communicator:
    """One of `size` trainers. On its own: a sum over one is what it is."""

    rank, size = 0, 1
    waited_s = 0.0
    """In sums: for the others, and for the numbers on their way."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    def sum(self, a: Array, backend: Backend) -> Array:
        """a <- its sum over the ranks, with the same bits on all of them. Everybody calls it."""
        if self.alone or not a.size:
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
        """Those of rank 0, on all ranks. Everybody calls it."""
        mine = np.asarray(numbers, np.float64)
        return mine if self.alone else self._timed(np.zeros_like(mine) if self.rank else mine)

    def allgather(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """(size, k): the k numbers of every rank. Everybody calls it."""
        said = np.zeros((self.size, len(numbers)))
        said[self.rank] = numbers
        return said if self.alone else self._timed(said)

    def agree(self, so: bool) -> bool:
        """Whether all ranks say so. Everybody calls it."""
        return bool(self.allgather([so]).all())

    def broadcast_bytes(self, said: bytes) -> bytes:
        """What rank 0 says, to all ranks. Everybody calls it."""
        if self.alone:
            return said
        length = int(self.broadcast_scalars([len(said)])[0])
        return self.broadcast(np.frombuffer(said.ljust(length, b"\0"), np.uint8).copy()).tobytes()

    def broadcast(self, a: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """a, on the host, <- what rank 0 has there, every bit of it. Everybody calls it."""
        if self.alone:
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
        """The counts of the ranks before this one, added up. Everybody calls it."""
        return int(self.allgather([count])[: self.rank].sum())

    def _timed(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        began = time.perf_counter()
        total = self._total(mine)
        self.waited_s += time.perf_counter() - began
        return total

    def _total(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        raise NotImplementedError

    def stripe(self, n: int) -> slice:
        """The part of n rows that is this rank's; some may have none."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def triangle(self, n: int) -> slice:
        """The rows of a lower triangular matrix of n that are this rank's: equal areas."""
        first, last = (round(n * (k / self.size) ** 0.5) for k in (self.rank, self.rank + 1))
        return slice(first, last)


SINGLE = Communicator()


class Threads(Communicator):
    """Ranks that are threads of one process. `made` gives all of them."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.rank, self.size, self._board = rank, size, board

    @classmethod
    def made(cls, size: int) -> list[Threads]:
        """As many ranks, each for a thread of its own."""
        board = _Board(size)
        return [cls(rank, size, board) for rank in range(size)]

    def _total(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self._board.total(self.rank, mine)

    def abort(self) -> None:
        """Who waits for this rank fails, now or later."""
        self._board.abort()


class _Board:
    """Where threads lay down what they have. Added up in the order of the ranks by each of them."""

    def __init__(self, size: int) -> None:
        self.size, self.broken = size, False
        self.laid: dict[int, dict[int, npt.NDArray[Any]]] = {}
        self.turns, self.changed = [0] * size, threading.Condition()

    def total(self, rank: int, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with self.changed:
            turn = self.turns[rank]
            self.turns[rank] += 1
            parts = self.laid.setdefault(turn, {})
            parts[rank] = mine.copy()
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(parts) == self.size or self.broken)
            if len(parts) < self.size:
                raise RankLostError("another rank has failed")
            self.laid.pop(turn - 1, None)  # who is here has added that up
        first, *others = (parts[k] for k in range(self.size))
        return np.asarray(sum(others, first))

    def abort(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class Collective(Communicator):
    """Ranks that are processes, by `xgboost.collective`; see `process_group`.

    A sum with one that is gone raises RankLostError, but now and then, of XGBoost 3.2, never ends:
    so whoever starts the processes has to end them all when it sees that one is gone.
    """

    def __init__(self, rank: int, size: int, library: Any) -> None:
        self.rank, self.size, self._library = rank, size, library
        self._thread = threading.get_ident()

    def _total(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        library = self._library
        if threading.get_ident() != self._thread:  # to the library another one is alone
            raise RuntimeError("sums of ranks are for the thread that has joined them")
        try:
            return np.asarray(library.allreduce(mine, library.Op.SUM)).reshape(mine.shape)
        except Exception as error:  # XGBoost's own type: a peer that is gone, a time that is up
            raise RankLostError(f"another rank is gone, or too slow: {_short(error)}") from error


def _short(error: Exception) -> str:
    """The last line that says something; XGBoost's errors come with traces of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("[bt]", "Stack trace"))]
    return (said or lines or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def process_group(rank: int, tracker: Mapping[str, Any]) -> Iterator[Communicator]:
    """The ranks that `tracker`, of the process that started them, brings together.

    tracker : what `xgboost.tracker.RabitTracker.worker_args` returned. Once in a process at a time.

    Raises
    ------
    RankLostError
        They do not come together.
    """
    library = need("xgboost.collective", "a run of several ranks", "ranks")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where it says who has which rank
            library.init(**tracker, dmlc_task_id=f"{rank:06d}")  # in the order of text
    except Exception as error:
        raise RankLostError(f"the ranks do not come together: {_short(error)}") from error
    yield Collective(library.get_rank(), library.get_world_size(), library)
    library.finalize()  # not after a failure: it would wait for the others
