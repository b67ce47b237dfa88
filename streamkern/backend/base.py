"""One interface to the array library and the device.

All other code uses the array module `backend.xp` and the methods below. `Backend` is the CPU, with
NumPy. It distributes tiles over a pool of threads, each with a single-threaded BLAS, because one
large multi-threaded GEMM followed by element-wise passes would read the kernel matrix from memory
several times. `cupy_backend.CupyBackend` processes tiles in order on one stream of a GPU.

Every sum has a fixed order, so a result has the same bits for any number of threads.
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
from streamkern.backend.dense import Array, DenseAlgebra, tiles
from streamkern.backend.host_memory import PAGEABLE, HostMemory
from streamkern.backend.workspaces import Workspaces
from streamkern.basics.errors import ConfigError
from streamkern.basics.machine import available_cpus, available_memory
from streamkern.basics.message import mention
from streamkern.basics.randomness import Fillers
from streamkern.planning.problem import CPU, Costs

__all__ = ["Array", "Backend", "Uploader", "tiles"]

_T = TypeVar("_T")

WIDE_FEATURES = 128
"""Columns of prepared points from which tiles are `wide_tile_cols` wide."""


class Backend(DenseAlgebra):
    """NumPy on `threads` threads. Use as a context manager, or call `close`.

    Parameters
    ----------
    threads : int, default: the processors this process may use.
    """

    name = "cpu"
    tile_rows = 1024
    tile_cols, wide_tile_cols = 256, 512
    """Rows and columns of a tile of a kernel matrix. It fits in a core's L2 cache, and is taller
    than wide, because the BLAS repacks the column operand for every tile. Wide rows have a larger
    tile: passes over the tile take a smaller part of the time, and repacking a larger one."""
    group_tiles = 1
    """Smallest number of tiles of a group, see `kernels.products`."""
    prepare_rows = 256
    """Number of rows that are prepared at once."""
    kept_in_place = False
    """Whether the GEMM writes directly to the kernel matrix that is kept, instead of to a tile in
    cache that is then copied."""
    norms_in_columns = True
    """Whether the squared norms enter the GEMM as two extra columns, which saves passes over a
    tile. If not, the compiled pass that applies the profile adds them."""
    tensor_cores = False
    """Whether products in half precision are much faster than in float32."""
    accelerator = "none"
    """Name of the compiler of element-wise passes; "none" without one."""
    fills: Fillers | None = None
    """Compiled fill functions for `basics.randomness`, if any."""
    staging = 0
    """Number of device buffers of an uploader; 0 on the CPU."""
    host_memory: HostMemory = PAGEABLE
    """Memory for host arrays that are uploaded."""
    library_bytes = 0
    """Bytes of libraries that only this backend loads."""
    float64_cost = 2.0
    """Time of a FLOP in float64, in units of the time of a FLOP in float32."""
    l1_entries = 1 << 15
    """Entries of a tile of L1 distances. It fits in the L1 cache with a buffer of differences."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"{mention('threads', threads)} must be at least 1", "raise it")
        self.threads = threads or available_cpus()
        self.xp: Any = np
        freed_arrays.keep()
        lapack.load_libraries()  # before `blas_libraries`, which finds only loaded libraries
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

        Blocks may be nested, also in a block of another backend. Code of a caller must not run
        within a block, so a generator must not yield in one. Does nothing on the CPU.
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
        """Return the facts that must be equal for two runs to have the same bits."""
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
        """Return a C-ordered device array; on the CPU, `host` itself if it is one of the dtype."""
        return np.ascontiguousarray(host, dtype=dtype)

    def to_host(self, a: Array) -> npt.NDArray[Any]:
        """Return a host array; on the CPU the array itself."""
        return np.asarray(a)

    def copy_to_host(self, a: Array) -> npt.NDArray[Any]:
        """Return a host array that nothing else writes to."""
        return np.array(a)

    def by_parts(self, a: Array) -> Any:
        """Return a view of `a` whose slices are read and written as host arrays, for files.

        The view has a shape, a dtype, and items ``[rows]``. On the CPU it is the array itself. On a
        GPU only the slices in use are copied to the host.
        """
        return a

    def uploader(self, depth: int = 3) -> Uploader:
        """Return a ring of `depth` device buffers for host batches."""
        return Uploader(self, depth)

    def synchronize(self) -> None:
        """Wait until the device has completed all queued work."""

    def release(self) -> None:
        """Return freed memory to the system. To be called between phases: it slows allocations."""
        freed_arrays.release()

    def memory_available(self) -> int:
        """Return the bytes that can be allocated now without swapping."""
        return available_memory()

    def tile_width(self, width: int) -> int:
        """Return the number of columns of a tile for prepared points with `width` columns."""
        return self.tile_cols if width < WIDE_FEATURES else self.wide_tile_cols

    def costs(self, precision: str) -> Costs:
        """Return the costs of work on this backend, for plans."""
        return CPU

    # -- walking tiles ---------------------------------------------------------------------

    def single_threaded_blas(self) -> AbstractContextManager[None]:
        """Limit BLAS calls to their own thread for a `with` block. May be nested.

        Around many calls of `run`, it saves setting the limit in each call.
        """
        return lapack.one_thread(self._blas)

    def run(self, fn: Callable[[_T], None], items: Iterable[_T]) -> None:
        """Call `fn` on every item, in any order, and return when all calls have returned.

        The calling thread takes items as well, because waking another thread takes longer than a
        small item. `fn` must write to its own part of an output only, and must not call `run`.
        After an error no further item is started, and the error is raised once all threads are
        idle.
        """
        items = list(items)
        with self.single_threaded_blas():
            if self._pool is None or len(items) < 2:
                for item in items:
                    fn(item)
                return
            # One future per thread, not per item, because a future takes about 10 us.
            queue = iter(items)
            lock, stop = threading.Lock(), threading.Event()

            def process_queue() -> None:
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

            other_threads = min(self.threads, len(items)) - 1
            futures = [self._pool.submit(process_queue) for _ in range(other_threads)]
            try:
                with np.errstate(all="warn", under="ignore"):  # NumPy's default, as in the pool
                    process_queue()
                wait(futures)
            except BaseException:  # including an interrupt, which only this thread receives
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
        """Return the dtype of prepared points. The CPU stores half-precision values as float32."""
        return np.dtype(np.float64 if precision == "float64" else np.float32)

    def gemm(self, A: Array, B: Array, out: Array) -> None:
        """Compute out = A @ B.T on this thread. A : (r, k), B : (t, k), out : (r, t)."""
        with np.errstate(invalid="ignore"):  # OpenBLAS may set the flag for finite rows
            self._multiply(A, B.T, out)

    def _multiply(self, A: Array, B: Array, out: Array) -> None:
        """Compute out = A @ B; a single row is multiplied as two equal rows.

        A product of a single row would be a matrix-vector product, which adds in another order.
        Some kernels of OpenBLAS, as for Haswell, also do so for other numbers of rows.
        """
        if len(A) > 1:
            np.matmul(A, B, out=out)
            return
        with (
            self.workspace((2, A.shape[1]), A.dtype) as two_rows,
            self.workspace((2, B.shape[1]), out.dtype) as product,
        ):
            two_rows[...] = A
            np.matmul(two_rows, B, out=product)
            out[...] = product[: len(A)]

    def l1_distances(self, A: Array, B: Array, out: Array) -> None:
        """Set out to the sums of |a - b| over the features. A : (r, d), B : (t, d), out : (r, t).

        Each feature takes three passes over out, because a GEMM cannot compute this.
        """
        for rows in tiles(len(A), max(1, self.l1_entries // max(1, len(B)))):
            a, total = A[rows], out[rows]
            total[...] = 0
            with self.workspace(total.shape, total.dtype) as difference:
                for k in range(A.shape[1]):
                    self.xp.subtract(a[:, k, None], B[:, k], out=difference)
                    self.xp.absolute(difference, out=difference)
                    total += difference

    def multiply_sparse(self, rows: Sequence[Array], columns: Sequence[Array], out: Array) -> None:
        """Set out (m, p) to the product of two sparse matrices, (m, v) and (v, p).

        rows, columns : the two matrices in CSR form, each as (values, column numbers, row starts).
        """
        csr, (m, p) = self.sparse.csr_matrix, out.shape
        v = len(columns[2]) - 1
        out[...] = (csr(tuple(rows), shape=(m, v)) @ csr(tuple(columns), shape=(v, p))).toarray()

    def square_norms(self, points: Array, out: Array) -> None:
        """Set out to |x|^2 of each row, summed in float64. points : (r, d), out : (r,).

        float64 avoids rounding errors of the norms in distances, and takes little time.
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
        overwrite: bool = False,
    ) -> None:
        """Turn a tile into kernel values, in place; then out += tile @ W and keep <- tile.

        tile : (r, t) L1 distances for an L1 kernel; otherwise products of points if there are
            norms, and their squared distances if not.
        norms : squared norms ((r,), (t,)) of the tile's rows and columns, or None.
        scale : factor by which squared distances are multiplied.
        W : (t, c), or None.
        out : (r, c).
        keep : (r, t), or the tile itself, or None.
        overwrite : write tile @ W to `out`, instead of adding it.
        """
        self.apply_profile(kernel, tile, scale, norms)
        if keep is not None and keep is not tile:
            keep[...] = tile
        if W is not None:
            assert out is not None
            if overwrite:
                out[...] = 0
            self.add_product(tile, W, out)

    def add_product(self, tile: Array, W: Array, out: Array) -> None:
        """Compute out += tile @ W on this thread. tile : (r, t), W : (t, c), out : (r, c)."""
        with self.workspace(out.shape, out.dtype) as product:
            if W.shape[1] == 1:  # not by `matmul`, for the reason given in `_multiply`
                np.vecdot(tile, W[:, 0], out=product[:, 0])
            else:
                self._multiply(tile, W, product)
            out += product

    def apply_profile(
        self, kernel: Any, tile: Array, scale: float, norms: tuple[Array, Array] | None
    ) -> None:
        """Replace the tile of `finish_tile` by kernel values, in place."""
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
            self.xp.maximum(tile, zeros, out=tile)  # faster than maximum(tile, 0)
        if scale != 1:
            tile *= scale
        self._set(tile, kernel.profile(tile, self.xp))

    @staticmethod
    def _set(tile: Array, value: Array) -> None:
        """Copy value to the tile, unless the profile has worked in place."""
        if value is not tile:
            tile[...] = value


class Uploader:
    """Copies host arrays to the device. On the CPU, it returns them without a copy if it can."""

    def __init__(self, backend: Backend, depth: int) -> None:
        self.backend, self.depth = backend, depth

    def upload(self, host: npt.NDArray[Any]) -> Array:
        """Return a host array on the device, in the same dtype."""
        return self.backend.asarray(host)

    def close(self) -> None:
        """Wait for the copies, and release the device buffers."""
