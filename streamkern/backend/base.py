"""One interface to the array library and the device.

Everything else is written once against `backend.xp` and the few methods below. NumPy, here, and
CuPy, in `cupy_backend`, differ in how tiles are walked: NumPy distributes them over a pool of
threads, each with a single-threaded BLAS, because one big multi-threaded GEMM followed by
element-wise passes streams the kernel matrix through memory several times; CuPy walks them in
order on one stream.

Every reduction has a fixed order that does not depend on the number of threads, so a result is
the same bit for bit on one thread or sixteen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import scipy.sparse

from streamkern.backend import freed_arrays, lapack
from streamkern.backend.dense import Array, DenseAlgebra, Workspaces, tiles
from streamkern.backend.lapack import one_thread
from streamkern.basics.errors import ConfigError
from streamkern.basics.machine import available_cpus, available_memory
from streamkern.basics.message import mention
from streamkern.basics.randomness import Fills
from streamkern.planning.problem import CPU, Costs

__all__ = ["Array", "Backend", "Uploader", "tiles"]

_T = TypeVar("_T")

WIDE_FEATURES = 128


class Backend(DenseAlgebra):
    """NumPy on `threads` threads. Use as a context manager, or call `close`.

    Parameters
    ----------
    threads : int, default: the processors this process may use.
    """

    name = "cpu"
    tile_rows = 1024
    tile_cols, wide_tile_cols = 256, 512
    """A tile is as large as a core's L2, and tall, because the BLAS repacks the column operand for
    every tile: 1024 x 256 was 3 to 15 % faster than 512 x 512. With WIDE_FEATURES or more the
    passes over a tile matter less, and the copies more: 1024 x 512 was 3 to 4 % faster."""
    group_tiles = 1
    prepare_rows = 256
    kept_in_place = False
    """Whether the GEMM writes whole rows straight into the kept kernel matrix, instead of copying
    each tile from cache."""
    norms_in_columns = True
    """Whether the squared norms enter the GEMM as two extra columns, which saves passes over a
    tile; otherwise the pass that applies the profile adds them, at no cost on that device."""
    tensor_cores = False
    """Whether products in half precision are much faster than in float32."""
    accelerator = "none"
    fills: Fills | None = None
    """Compiled fill functions for `basics.randomness`, if any."""
    staging = 0
    """Number of staging buffers of an uploader; 0 on the CPU."""
    library_bytes = 0
    """Bytes of libraries that this backend loads, beyond `import streamkern`."""
    float64_cost = 2.0
    """Time of a FLOP in float64, in units of the time of a FLOP in float32."""
    l1_entries = 1 << 15
    """Entries of a tile of L1-norm distances; the tile and an equally large buffer of differences
    fit in the first-level cache."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"{mention('threads', threads)} must be at least 1")
        self.threads = threads or available_cpus()
        self.xp: Any = np
        freed_arrays.keep()
        lapack.load_libraries()  # only libraries that are already loaded can be limited
        self._blas = lapack.blas_libraries()
        self._pool = (
            ThreadPoolExecutor(self.threads - 1, thread_name_prefix="streamkern-tile")
            if self.threads > 1
            else None
        )
        self._workspaces = Workspaces()

    def __enter__(self) -> Backend:
        return self

    @property
    def sparse(self) -> Any:
        """The library of sparse matrices for arrays of `xp`."""
        return scipy.sparse

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make arrays of this backend usable on the calling thread for a `with` block.

        May be nested, also within that of another backend. Does nothing on the CPU. Must not be
        held across a `yield` to arbitrary code of a caller.
        """
        yield

    def stepping(self) -> AbstractContextManager[None]:
        """Prepare this process for many short steps for a `with` block. Does nothing on the CPU."""
        return nullcontext()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the pool's threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def describe(self) -> dict[str, object]:
        """Return everything that has to be equal for two runs to agree bit for bit."""
        libraries = sorted(
            {
                f"{lib['internal_api']} {lib['version']} {lib.get('architecture', '')} "
                f"on {lib['num_threads']} threads"
                for lib in self._blas.info()
            }
        )
        return {
            "device": self.name,
            "numpy": np.__version__,
            "blas": libraries,
            "accelerator": self.accelerator,
        }

    # -- data in and out -------------------------------------------------------------------

    def asarray(self, host: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
        """Return a C-ordered device array; on the CPU the array itself if nothing has to change."""
        return np.ascontiguousarray(host, dtype=dtype)

    def to_host(self, a: Array) -> npt.NDArray[Any]:
        """Return a host array; on the CPU the array itself."""
        return np.asarray(a)

    def copy_to_host(self, a: Array) -> npt.NDArray[Any]:
        """Return a host array that nothing else writes to."""
        return np.array(a)

    def by_parts(self, a: Array) -> Any:
        """Return a view of `a` whose parts are read and written as host arrays, for files.

        It has a shape, a dtype, and parts ``[rows]`` that may be read and set. On the CPU it is the
        array itself; from a device, no array of the size of `a` comes to the host.
        """
        return a

    def uploader(self, depth: int = 3) -> Uploader:
        """Return a ring of `depth` staging buffers for host batches."""
        return Uploader(self, depth)

    def synchronize(self) -> None:
        """Wait until the device has completed all queued work."""

    def release(self) -> None:
        """Give freed memory back. Call between phases only: the next allocation pays for it."""
        freed_arrays.release()

    def memory_available(self) -> int:
        """Return the bytes that can be allocated now without swapping."""
        return available_memory()

    def tile_width(self, width: int) -> int:
        """Return the columns of a tile, for prepared points with `width` columns."""
        return self.tile_cols if width < WIDE_FEATURES else self.wide_tile_cols

    def costs(self, precision: str) -> Costs:
        """Return the costs of work on this backend, for plans."""
        return CPU

    # -- walking tiles ---------------------------------------------------------------------

    def single_threaded_blas(self) -> AbstractContextManager[None]:
        """Limit BLAS calls to their own thread for a `with` block. May be nested.

        Around many calls of `run` it saves setting the limit for each, about 30 us.
        """
        return one_thread(self._blas)

    def run(self, fn: Callable[[_T], None], items: Iterable[_T]) -> None:
        """Call `fn` on every item, in any order, and return when all are done.

        The calling thread works as well: to wake another one takes longer than a small item. `fn`
        must write to its own part of an output only, and must not call `run`. After an error no
        further item is started, and the error is raised once all threads are idle.
        """
        work = list(items)
        with self.single_threaded_blas():
            if self._pool is None or len(work) < 2:
                for item in work:
                    fn(item)
                return
            # One future per thread rather than per item: a future costs about 10 us.
            queue = iter(work)
            lock, stop = threading.Lock(), threading.Event()

            def drain() -> None:
                while not stop.is_set():
                    with lock:
                        item = next(queue, stop)
                    if item is stop:
                        return
                    try:
                        fn(cast("_T", item))
                    except BaseException:
                        stop.set()
                        raise

            others = min(self.threads, len(work)) - 1
            futures = [self._pool.submit(drain) for _ in range(others)]
            try:
                with np.errstate(all="warn", under="ignore"):  # NumPy's default, as in the pool
                    drain()
                wait(futures)
            except BaseException:  # an interrupt of this thread reaches the others here
                stop.set()
                wait(futures)
                raise
            for future in futures:
                future.result()

    def workspace(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> AbstractContextManager[Array]:
        """Lend a scratch array for a `with` block; see `Workspaces`."""
        return self._workspaces.lend(self.xp, shape, dtype)

    def operand_dtype(self, precision: str) -> np.dtype[Any]:
        """Return the dtype of points in a GEMM. Half precision is emulated in float32 here."""
        return np.dtype(np.float64 if precision == "float64" else np.float32)

    def gemm(self, A: Array, B: Array, out: Array) -> None:
        """Compute out = A @ B.T on this thread. A : (r, k), B : (t, k), out : (r, t)."""
        self._rows_of(A, B.T, out)

    def _rows_of(self, A: Array, B: Array, out: Array) -> None:
        """Compute out = A @ B, such that a row's result does not depend on the number of rows.

        A single row would be a matrix-vector product, whose order of additions differs from that of
        a matrix product: the prediction of a row would depend on the rows computed together with
        it.
        """
        if len(A) > 1:
            np.matmul(A, B, out=out)
            return
        with (
            self.workspace((2, A.shape[1]), A.dtype) as pair,
            self.workspace((2, B.shape[1]), out.dtype) as both,
        ):
            pair[...] = A
            np.matmul(pair, B, out=both)
            out[...] = both[: len(A)]

    def l1_distances(self, A: Array, B: Array, out: Array) -> None:
        """Set out to the sums of |a - b| over the features. A : (r, d), B : (t, d), out : (r, t).

        No GEMM computes this: it takes three passes over out for each feature.
        """
        for rows in tiles(len(A), max(1, self.l1_entries // max(1, len(B)))):
            a, total = A[rows], out[rows]
            total[...] = 0
            with self.workspace(total.shape, total.dtype) as part:
                for k in range(A.shape[1]):
                    self.xp.subtract(a[:, k, None], B[:, k], out=part)
                    self.xp.absolute(part, out=part)
                    total += part

    def multiply_sparse(self, rows: Sequence[Array], columns: Sequence[Array], out: Array) -> None:
        """Set out to a product of two sparse matrices in CSR form, (m, v) and (v, p).

        rows, columns : values, column numbers, and starts of the rows in both. out : (m, p).
        """
        csr, (m, p) = self.sparse.csr_matrix, out.shape
        v = len(columns[2]) - 1
        out[...] = (csr(tuple(rows), shape=(m, v)) @ csr(tuple(columns), shape=(v, p))).toarray()

    def add_unequal(self, A: Array, B: Array, weights: Sequence[float], out: Array) -> None:
        """Add to out the weights of the columns in which rows differ.

        A : (r, k), B : (t, k), weights : k numbers, out : (r, t).
        """
        with (
            self.workspace(out.shape, np.bool_) as unequal,
            self.workspace(out.shape, out.dtype) as part,
        ):
            for k, weight in enumerate(weights):
                self.xp.not_equal(A[:, k, None], B[:, k], out=unequal)
                part[...] = unequal
                part *= weight
                out += part

    def square_norms(self, points: Array, out: Array) -> None:
        """Set out to |x|^2 per row, summed in float64. points : (r, d), out : (r,).

        float64 norms cost nothing next to the product, and remove their error from the distance.
        """
        with self.workspace(out.shape, np.float64) as norms:
            np.einsum("ij,ij->i", points, points, dtype=np.float64, out=norms)
            out[...] = norms

    def finish_tile(
        self,
        kernel: Any,
        tile: Array,
        norms: tuple[Array, Array] | None,
        scale: float,
        W: Array | None,
        out: Array | None,
        keep: Array | None,
        *,
        first: bool = False,
    ) -> None:
        """Turn a GEMM's tile into kernel values, in place; out += tile @ W; keep <- tile.

        tile : (r, t) squared distances over `scale`, or, with norms ((r,), (t,)), products of
            points; L1 distances for a kernel of L1 distances.
        W : (t, c).
        out : (r, c).
        keep : (r, t), may be the tile itself.
        first : `out` is not read, and starts at zero.
        """
        self.apply_profile(kernel, tile, scale, norms)
        if keep is not None and keep is not tile:
            keep[...] = tile
        if W is not None:
            assert out is not None
            if first:
                out[...] = 0
            self.add_product(tile, W, out)

    def add_product(self, tile: Array, W: Array, out: Array) -> None:
        """Compute out += tile @ W on this thread. tile : (r, t), W : (t, c), out : (r, c)."""
        with self.workspace(out.shape, out.dtype) as share:
            if W.shape[1] == 1:  # see `_rows_of`: rows must not depend on the batch
                np.vecdot(tile, W[:, 0], out=share[:, 0])
            else:
                self._rows_of(tile, W, share)
            out += share

    def apply_profile(
        self, kernel: Any, tile: Array, scale: float, norms: tuple[Array, Array] | None
    ) -> None:
        """Apply the kernel's profile to scale times squared distances, in place; see `finish_tile`.

        An inner-product kernel receives products and norms; an L1 kernel receives L1 distances.
        """
        if kernel.geometry == "l1":
            self._set(tile, kernel.profile(tile, self.xp))
            return
        if kernel.geometry == "inner":
            assert norms is not None
            self._set(tile, kernel.of_products(tile, norms[0][:, None], norms[1], self.xp))
            return
        if norms is not None:
            tile *= -2
            tile += norms[0][:, None]
            tile += norms[1]
        with self.workspace(tile.shape[1:], tile.dtype) as zeros:
            zeros[...] = 0
            self.xp.maximum(tile, zeros, out=tile)  # a third of the time of maximum(tile, 0)
        if scale != 1:
            tile *= scale
        self._set(tile, kernel.profile(tile, self.xp))

    @staticmethod
    def _set(tile: Array, value: Array) -> None:
        if value is not tile:
            tile[...] = value


class Uploader:
    """Copies host arrays to the device. On the CPU they are already there."""

    def __init__(self, backend: Backend, depth: int) -> None:
        self.backend = backend
        self.depth = depth

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return the same rows on the device, in the storage dtype."""
        return self.backend.asarray(host)

    def close(self) -> None:
        """Release the staging buffers."""
