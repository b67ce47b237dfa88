"""Arrays of a setup of which every rank has some rows, saved by rank 0 as if it had all of them.

The others hand in what it asks for, a chunk at a time: no rank ever holds the whole.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import Communicator
from streamkern.planning.memory import RANK_SLAB_BYTES
from streamkern.rundir.checkpoint_format import ChunkedArray
from streamkern.solver.precondition.stripes import add_up, within


@dataclass(frozen=True)
class Stripe:
    """Of an array (n, width) the rows `own`, which are this rank's; of a lower triangular one, up
    to the last of their columns."""

    name: str
    rows: Array
    n: int
    width: int
    own: slice


def stripes_in(
    arrays: Mapping[str, Array],
    names: tuple[str, ...],
    ranks: Communicator,
    whole: Iterable[str] = (),
) -> list[Stripe]:
    """Those of them that are shared out, in the same order on all ranks. Everybody calls it.

    names : how the names of lower triangular ones begin. whole : of those of which each rank has
    its `Ranks.stripe`.
    """
    found = []
    for name in sorted(name for name in arrays if name.startswith(names)):
        n = int(ranks.allgather([len(arrays[name])]).sum())
        found.append(Stripe(name, arrays[name], n, n, ranks.triangle(n)))
    for name in whole:
        n, width = int(ranks.allgather([len(arrays[name])]).sum()), arrays[name].shape[1]
        found.append(Stripe(name, arrays[name], n, width, ranks.stripe(n)))
    return found


def gathered(
    a: Array,
    ids: npt.NDArray[np.int64],
    n: int,
    grid: RankGrid,
    ranks: Communicator,
    backend: Backend,
) -> npt.NDArray[Any] | None:
    """On rank 0 the n rows of an array, on the host; None on the others. Everybody calls it.

    a : this rank's rows, which the ranks of its column have as well. ids : which they are,
    ascending.
    """
    shape, host = (n, *a.shape[1:]), None
    if not ranks.rank:
        host = np.empty(shape, np.dtype(a.dtype))
    row_bytes = max(1, int(np.prod(a.shape[1:])) * a.dtype.itemsize)
    for part in tiles(n, max(1, RANK_SLAB_BYTES // row_bytes)):
        whole = backend.xp.zeros((part.stop - part.start, *a.shape[1:]), a.dtype)
        first, stop = np.searchsorted(ids, (part.start, part.stop)).tolist()
        if grid.row == 0 and first < stop:
            whole[backend.xp.asarray(ids[first:stop] - part.start)] = a[first:stop]
        add_up(whole, ranks, backend)
        if host is not None:
            host[part] = backend.to_host(whole)
    return host


def gather_and_save(
    stripes: list[Stripe], ranks: Communicator, backend: Backend,
    save: Callable[[dict[str, ChunkedArray]], object],
) -> None:  # fmt: skip
    """Have rank 0 save arrays, given to it as if it had all of their rows. Everybody calls it."""
    window = _Window(stripes, ranks, backend)
    if ranks.rank:
        while window.hand_in() is not None:
            pass
        return
    counter = _Counter()
    parts: dict[str, ChunkedArray] = {
        stripe.name: _Whole(counter, k, (stripe.n, stripe.width), np.dtype(stripe.rows.dtype))
        for k, stripe in enumerate(stripes)
    }
    try:
        counter.serve(lambda: save(parts), window.hand_in)
    finally:
        window.close()


class _Window:
    """Where the rows of all ranks come together. On the thread of a rank, which its sums need."""

    def __init__(self, stripes: list[Stripe], ranks: Communicator, backend: Backend) -> None:
        self._stripes, self._ranks, self._backend = stripes, ranks, backend

    def hand_in(self, k: int = -1, part: slice = slice(0, 0)) -> npt.NDArray[Any] | None:
        """The rows that rank 0 asks for, of array k; None once it needs no more."""
        k, start, stop = (
            int(each) for each in self._ranks.broadcast_scalars([k, part.start, part.stop])
        )
        if k < 0:
            return None
        stripe = self._stripes[k]
        xp = self._backend.xp
        whole = xp.zeros((stop - start, stripe.width), stripe.rows.dtype)
        at, here = within(slice(start, stop), stripe.own)
        whole[at, : stripe.rows.shape[1]] = xp.asarray(stripe.rows[here])
        return self._backend.to_host(self._ranks.sum(whole, self._backend))

    def close(self) -> None:
        """Tell the others that no more is needed."""
        self._ranks.broadcast_scalars([-1, 0, 0])


class _Counter:
    """Where threads that save ask for rows, and the rank's own thread gives them."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[int, slice, Future[Any]] | None] = queue.SimpleQueue()

    def ask(self, k: int, part: slice) -> npt.NDArray[Any]:
        """Rows of array k, once they are there."""
        answer: Future[Any] = Future()
        self._asked.put((k, part, answer))
        rows: npt.NDArray[Any] = answer.result()
        return rows

    def serve(self, job: Callable[[], object], give: Callable[[int, slice], Any]) -> None:
        """Do the job on another thread, and give it what it asks for. After an error it is given
        no more, and the error comes out when it has ended."""
        failure: BaseException | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="streamkern-setup") as pool:
            done = pool.submit(job)
            done.add_done_callback(lambda _: self._asked.put(None))
            while True:
                try:
                    asked = self._asked.get()
                    if asked is None:
                        break
                    self._give(asked, give, failure)
                except BaseException as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        done.result()

    @staticmethod
    def _give(
        asked: tuple[int, slice, Future[Any]], give: Callable[[int, slice], Any],
        failure: BaseException | None,
    ) -> None:  # fmt: skip
        k, part, answer = asked
        try:
            if failure is not None:
                raise failure
            answer.set_result(give(k, part))
        except BaseException as error:
            answer.set_exception(error)
            raise


@dataclass(frozen=True)
class _Whole:
    """An array of which the ranks have the rows, as what is saved by parts."""

    counter: _Counter
    k: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ndim: int = 2

    def __getitem__(self, part: Any) -> Any:
        return self.counter.ask(self.k, part)

    def __setitem__(self, part: Any, host: Any) -> None:
        raise TypeError("it is read only")
