"""Load and save arrays of a setup or a checkpoint whose rows are divided over the ranks.

Each rank loads its shard, part by part, to its device or to the host. To save a setup, rank 0
requests one chunk of rows at a time, so that no rank holds an entire array. The arrays of a
checkpoint, which are smaller, are gathered in the host memory of rank 0.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import HostArray, Ints
from streamkern.planning.memory import RANK_SLAB_BYTES
from streamkern.rundir.checkpoint_format import SavedGroup
from streamkern.rundir.chunked_array import ChunkedArray, allocate_on_host
from streamkern.solver.precondition.partition import gather_rows, overlap
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.run_snapshot import POST_TRAINING_PREFIXES, is_solver_array


def setup_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of this rank's shards of a setup."""
    method, ranks = run.method, run.inputs.ranks
    partition = method.center_partition(run.problem, run.sizes, ranks)

    def rows(name: str, n: int) -> Ints | slice | None:
        if not partition.is_replicated:
            if name.startswith(("Z", *method.center_array_prefixes)):
                return partition.rows(name)
            if name.startswith(method.column_array_prefixes):
                return partition.in_block[0]
        is_sharded = name.startswith(method.sharded_arrays) and not ranks.is_single
        return ranks.triangle(n) if is_sharded else None

    return DeviceLoader(run.backend, is_solver_array, rows)


def state_loader(run: ResolvedRun) -> DeviceLoader:
    """Return the loader of a checkpoint; if ranks partition the centers, it loads the rows of this
    rank."""
    partition = run.method.center_partition(run.problem, run.sizes, run.inputs.ranks)

    def rows(name: str, n: int) -> Ints | None:
        is_sharded = _is_state_array(name) and not partition.is_replicated
        return run.method.rows_of(name, n, partition) if is_sharded else None

    return DeviceLoader(run.backend, _is_state_array, rows)


def _is_state_array(name: str) -> bool:
    """Return whether an array of a checkpoint lies on the device."""
    return name != "window" and not name.startswith(POST_TRAINING_PREFIXES)


class DeviceLoader:
    """Load arrays from a run directory to the device part by part (a `TargetFactory`).

    Thus the host never holds an entire setup, which may have p^2 numbers.

    on_device : returns whether the array of a name goes to the device
    rows : returns the rows to load, from the name and the length of an array: ascending row
        numbers; a slice for rows of a lower triangular matrix, whose zero columns at the right are
        left out; or None for all rows
    """

    def __init__(
        self, backend: Backend, on_device: Callable[[str], bool],
        rows: Callable[[str, int], Ints | slice | None],
    ) -> None:  # fmt: skip
        self._backend, self._on_device, self._rows = backend, on_device, rows
        self._loaded_arrays: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray:
        rows = self._rows(name, shape[0]) if shape else None
        if rows is None:
            loaded_shape = shape
        elif isinstance(rows, slice):
            loaded_shape = rows.stop - rows.start, rows.stop
            rows = np.arange(rows.start, rows.stop)
        else:
            loaded_shape = (len(rows), *shape[1:])
        if self._on_device(name):
            with self._backend.active():
                self._loaded_arrays[name] = self._backend.xp.empty(loaded_shape, dtype)
            target: ChunkedArray = self._backend.by_parts(self._loaded_arrays[name])
        elif rows is None:
            return allocate_on_host(name, shape, dtype)
        else:
            target = self._loaded_arrays[name] = np.empty(loaded_shape, dtype)
        return target if rows is None else RowsTarget(shape, target, rows)

    def arrays(self, saved: SavedGroup) -> dict[str, Array]:
        """Return all loaded arrays, on the host and on the device."""
        return saved.arrays | self._loaded_arrays


class RowsTarget:
    """Target of an array that is read by parts; it keeps some rows, and their first columns.

    shape : shape of the array that is read
    target : receives the rows that are kept; its width is the number of columns kept
    rows : numbers of the rows that are kept, ascending
    """

    def __init__(self, shape: tuple[int, ...], target: ChunkedArray, rows: Ints) -> None:
        self.shape, self.dtype, self.ndim = shape, target.dtype, len(shape)
        self._target, self._rows = target, rows
        self._columns = slice(None) if target.ndim == 1 else slice(target.shape[1])

    def __getitem__(self, part: Any) -> Any:
        raise KeyError(part)

    def __setitem__(self, part: Any, host: Any) -> None:
        first, stop = (int(k) for k in np.searchsorted(self._rows, (part.start, part.stop)))
        if first < stop:
            rows = self._rows[first:stop] - part.start
            are_consecutive = rows[-1] - rows[0] == len(rows) - 1
            # A slice is a view, which saves a copy.
            part_rows = host[rows[0] : rows[-1] + 1] if are_consecutive else host[rows]
            if part_rows.ndim > 1:
                part_rows = part_rows[:, self._columns]
            self._target[first:stop] = part_rows


@dataclass(frozen=True)
class Stripe:
    """The rows of an array (n, width) that belong to this rank.

    name : name of the array
    rows : these rows; in a lower triangular array, only their first `row_range.stop` columns
    n, width : shape of the entire array
    row_range : indices of these rows
    """

    name: str
    rows: Array
    n: int
    width: int
    row_range: slice


def stripes_in(
    arrays: Mapping[str, Array],
    triangular: tuple[str, ...],
    ranks: Communicator,
    full_width: Iterable[str] = (),
) -> list[Stripe]:
    """Return this rank's stripes of the divided arrays, in the same order on all ranks. Collective.

    triangular : prefixes of the names of lower triangular arrays
    full_width : names of arrays with all columns, whose rows are divided by `Communicator.stripe`
    """

    def stripe(name: str, range_of: Callable[[int], slice], width: int | None = None) -> Stripe:
        n = int(ranks.allgather([len(arrays[name])]).sum())
        return Stripe(name, arrays[name], n, n if width is None else width, range_of(n))

    names = sorted(name for name in arrays if name.startswith(triangular))
    stripes = [stripe(name, ranks.triangle) for name in names]
    return stripes + [stripe(name, ranks.stripe, arrays[name].shape[1]) for name in full_width]


def gather_on_rank_0(
    a: Array,
    ids: Ints,
    n: int,
    grid: RankGrid,
    ranks: Communicator,
    backend: Backend,
) -> HostArray | None:
    """Return all n rows of an array on the host of rank 0, and None on other ranks. Collective.

    a : (q, ...) rows of this rank; the other ranks of its grid column hold the same rows
    ids : (q,) numbers of these rows, ascending
    """
    shape, host = (n, *a.shape[1:]), None
    if not ranks.rank:
        host = np.empty(shape, np.dtype(a.dtype))
    row_bytes = max(1, int(np.prod(a.shape[1:])) * a.dtype.itemsize)
    for part in tiles(n, max(1, RANK_SLAB_BYTES // row_bytes)):
        slab = backend.xp.zeros((part.stop - part.start, *a.shape[1:]), a.dtype)
        first, stop = np.searchsorted(ids, (part.start, part.stop)).tolist()
        if grid.row == 0 and first < stop:
            slab[backend.xp.asarray(ids[first:stop] - part.start)] = a[first:stop]
        gather_rows(slab, ranks, backend)
        if host is not None:
            host[part] = backend.to_host(slab)
    return host


def gather_and_save(
    stripes: list[Stripe], ranks: Communicator, backend: Backend,
    save: Callable[[dict[str, ChunkedArray]], object],
) -> None:  # fmt: skip
    """Call `save` on rank 0 with arrays that fetch their rows from the other ranks. Collective.

    save : writes the arrays by name; it runs on another thread
    """
    exchange = partial(_exchange_rows, stripes, ranks, backend)
    if ranks.rank:
        while exchange() is not None:
            pass
        return
    requests = _RequestQueue()
    parts: dict[str, ChunkedArray] = {
        stripe.name: _GatheredArray(
            requests, k, (stripe.n, stripe.width), np.dtype(stripe.rows.dtype)
        )
        for k, stripe in enumerate(stripes)
    }
    try:
        requests.serve(lambda: save(parts), exchange)
    finally:
        exchange()


def _exchange_rows(
    stripes: list[Stripe], ranks: Communicator, backend: Backend, k: int = -1,
    part: slice = slice(0, 0),
) -> HostArray | None:  # fmt: skip
    """Return the rows that rank 0 requests; None if it needs no more. Collective.

    It is called on the main thread of each rank, which collectives need.

    k, part : on rank 0, index of the array in `stripes`, and its requested rows; -1 to end
    """
    k, start, stop = (int(i) for i in ranks.broadcast_scalars([k, part.start, part.stop]))
    if k < 0:
        return None
    stripe, xp = stripes[k], backend.xp
    slab = xp.zeros((stop - start, stripe.width), stripe.rows.dtype)
    slab_rows, own_rows = overlap(slice(start, stop), stripe.row_range)
    slab[slab_rows, : stripe.rows.shape[1]] = xp.asarray(stripe.rows[own_rows])
    gather_rows(slab, ranks, backend)
    return backend.to_host(slab)


class _RequestQueue:
    """Queue of requests for rows, from the threads that save to the main thread of rank 0."""

    def __init__(self) -> None:
        self._requests = queue.SimpleQueue[tuple[int, slice, Future[Any]] | None]()

    def rows_of(self, k: int, part: slice) -> HostArray:
        """Request rows of array k, wait for them, and return them."""
        reply: Future[HostArray] = Future()
        self._requests.put((k, part, reply))
        return reply.result()

    def serve(self, job: Callable[[], object], read_rows: Callable[[int, slice], Any]) -> None:
        """Run the job on another thread, and answer its requests with `read_rows`.

        After an error, further requests fail with it, and it is raised when the job has ended.
        """
        failure: BaseException | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="streamkern-setup") as pool:
            job_future = pool.submit(job)
            job_future.add_done_callback(lambda _: self._requests.put(None))
            while True:
                request = None
                try:
                    request = self._requests.get()
                    if request is None:
                        break
                    k, part, reply = request
                    if failure is not None:
                        raise failure
                    reply.set_result(read_rows(k, part))
                except BaseException as error:
                    failure = failure or error
                    if request is not None and not request[-1].done():
                        request[-1].set_exception(failure)
        if failure is not None:
            raise failure
        job_future.result()


@dataclass(frozen=True)
class _GatheredArray:
    """Read-only array whose rows are fetched from the ranks when they are read.

    k : index of the array in `stripes`
    """

    requests: _RequestQueue
    k: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ndim: int = 2

    def __getitem__(self, part: Any) -> Any:
        return self.requests.rows_of(self.k, part)

    def __setitem__(self, part: Any, host: Any) -> None:
        raise TypeError("a gathered array is read-only; copy it with numpy.asarray to change it")
