"""Measure the speed of this machine for each kind of work of a run, briefly, on rows of the run.

Kernel, precision, matrix widths and batch size are taken from the run, as far as they affect the
speed. Nothing is written, and only the requested kinds of work are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.fourier import FourierFeatures, frequencies
from streamkern.kernels.products import KernelOperator
from streamkern.planning.op_counts import OpCounts, Speeds
from streamkern.solver.precondition.low_rank import EIGH_FLOPS
from streamkern.solver.precondition.noise import NOISE_ROWS
from streamkern.store.row_block import RowBlock, concatenated
from streamkern.stream.feed import prepare
from streamkern.stream.sources.transforms import SETUP_EPOCH
from streamkern.train.resolve.resolved_run import ResolvedRun

SECONDS = 2.0
"""Approximate duration of all measurements together."""
SHARES = 12
"""Number of equal parts into which `SECONDS` is divided; each measurement takes one."""
MAX_SIDE, COLUMNS, ENTRIES = 4096, 8192, 1 << 24
"""Largest side of a square matrix, and largest number of columns and of entries of a kernel matrix;
larger matrices have about the same speed."""
EIGEN = 1536
"""Largest side of the matrix of an eigendecomposition."""
READ_BYTES, MAX_TIMED_UNITS = 32 << 20, 64
"""Bytes of rows that are kept for the other measurements, and largest number of units read."""

Clock = Callable[[], float]
Call = tuple[float, Callable[[], object]]
"""Amount of work that a call does, in the unit of its kind (see `OpCounts`), and the call."""


class _Timed(NamedTuple):
    """Seconds per unit of work, and additional seconds of the first call, which compiles."""

    unit: float
    first: float


class _Sampled(NamedTuple):
    """Rows, the seconds to read one row, and the processor seconds among them."""

    block: RowBlock
    read: float
    busy: float


def measure_speeds(
    run: ResolvedRun, counts: Iterable[OpCounts], clock: Clock = time.perf_counter
) -> Speeds:
    """Measure the kinds of work that these operation counts contain.

    Takes about `SECONDS`, and longer on slow storage.

    clock : clock in seconds; pass another one if the machine is busy
    """
    backend, asked = run.backend, sum(counts, OpCounts())
    with backend.active():
        reading = _read(run, SECONDS / SHARES)
        X, prepared = _prepare(run, reading.block, SECONDS / SHARES, clock)
        each = {
            kind: _timed(backend, SECONDS / SHARES, *call(), clock)
            for kind, call in _calls(run, X, asked).items()
            if getattr(asked, kind)
        }
    backend.release()
    compiled = max((each[kind].first for kind in ("kept", "entries") if kind in each), default=0.0)
    speeds = OpCounts(**{kind: timed.unit for kind, timed in each.items()})
    return Speeds(speeds, prepared.unit, reading.read, reading.busy, compiled)


def _timed(
    backend: Backend, share: float, amount: float, call: Callable[[], object], clock: Clock
) -> _Timed:
    """Return the median time of calls within `share` seconds, per unit of work.

    The first call, which compiles, is not counted.

    amount : units of work of a call
    """
    start = clock()
    call()
    backend.synchronize()
    first = clock() - start
    taken, began = list[float](), clock()
    while not taken or clock() - began < share:
        start = clock()
        call()
        backend.synchronize()
        taken.append(clock() - start)
    return _Timed(median(taken) / amount, max(first - median(taken), 0.0))


def _read(run: ResolvedRun, share: float) -> _Sampled:
    """Read random units for `share` seconds.

    The first unit is not timed if there are others, because it opens files.
    """
    source, seed = run.data.source, run.config.run.random_state
    units = np.random.default_rng([seed, 0]).permutation(source.n_units)[:MAX_TIMED_UNITS].tolist()
    blocks, wall, busy, rows, size = list[RowBlock](), 0.0, 0.0, 0, 0
    for at, u in enumerate(units):
        began, computed = time.perf_counter(), time.thread_time()
        block = source.read_unit(u, seed, SETUP_EPOCH)
        taken, computing = time.perf_counter() - began, time.thread_time() - computed
        if size < READ_BYTES:
            blocks.append(block)
            size += block.X.nbytes
        if at or len(units) == 1:
            wall, busy, rows = wall + taken, busy + computing, rows + len(block.X)
        if wall > share:
            break
    return _Sampled(concatenated(blocks), wall / rows, min(busy, wall) / rows)


def _prepare(run: ResolvedRun, block: RowBlock, share: float, clock: Clock) -> tuple[Array, _Timed]:
    """Return at most a batch of rows, transformed as for a step, and the seconds per row."""
    source, backend = run.data.source, run.backend
    part = block.take(slice(min(run.sizes.batch_size, len(block.X))))
    made: list[Array] = []

    def call() -> None:
        made[:] = prepare(
            backend, part, run.data.weight_factors, transforms=source.feed_transforms,
            dtype=np.float64 if run.precision == "float64" else np.float32,
            seed=run.config.run.random_state, epoch=SETUP_EPOCH, n_outputs=source.n_outputs,
            classes=source.classes,
        )[:1]  # fmt: skip

    seconds = _timed(backend, share, len(part.X), call, clock)
    return made[0], seconds


def _calls(run: ResolvedRun, X: Array, asked: OpCounts) -> dict[str, Callable[[], Call]]:
    """Return, for each kind of work, a function that makes its call with the arrays it needs."""
    backend, item = run.backend, X.dtype
    side = min(getattr(run.sizes, "block_size", run.problem.p), MAX_SIDE)
    wide = min(run.problem.p if asked.wide_products else NOISE_ROWS, MAX_SIDE)
    made: list[_KernelMatrix] = []

    def matrix() -> _KernelMatrix:
        made.extend([] if made else [_KernelMatrix(run, X)])
        return made[0]

    return {
        "entries": lambda: matrix().evaluated(keep=False),
        "kept": lambda: matrix().evaluated(keep=True),
        "swept": lambda: matrix().swept(side),
        "calls": lambda: matrix().call(),
        "products": lambda: _product(backend, side, side, item),
        "factors": lambda: _factor(backend, side, item),
        "eigen": lambda: _eigenpairs(run, item),
        "wide_products": lambda: _product(backend, run.sizes.batch_size, wide, np.float64),
        "wide_factors": lambda: _factor(backend, wide, np.float64),
    }


class _KernelMatrix:
    """Kernel matrix K(X, Z) of a batch and some centers."""

    def __init__(self, run: ResolvedRun, X: Array) -> None:
        backend, c = run.backend, run.problem.c
        m = run.sizes.batch_size
        q = max(1, min(run.problem.p, COLUMNS, ENTRIES // m))
        host = backend.to_host(X)
        self.op, Z = _operator(run, host, q)
        self.backend, self.c = backend, c
        self.x = self.op.points(backend.asarray(np.resize(host, (m, host.shape[1]))), left=True)
        self.z = self.op.points(backend.asarray(Z), right=True)
        ones, empty, dtype = backend.xp.ones, backend.xp.empty, self.op.dtype
        self.K, self.W, self.F = ones((m, q), dtype), ones((q, c), dtype), empty((m, c), dtype)
        wide = run.method.outputs(run.problem)
        self.wide = ones((q, wide), dtype), empty((m, wide), dtype)

    def evaluated(self, *, keep: bool) -> Call:
        W, F = self.wide if keep else (self.W, self.F)
        K = self.K if keep else None
        return self.K.size, lambda: self.op.product(self.x, self.z, W, out=F, keep=K)

    def swept(self, side: int) -> Call:
        """Return the products with K^T and with K of a sweep, for a matrix with at least `side`
        rows."""
        n, backend = max(side, len(self.K)), self.backend
        K, right, out = (
            backend.xp.ones((n, width), self.op.dtype) for width in (side, self.c, self.c)
        )
        left = backend.xp.ones((side, self.c), self.op.dtype)

        def both() -> None:
            with backend.single_threaded_blas():
                backend.matmul_t(K, right, left)
                backend.matmul(K, left, out)

        return 2 * K.size, both

    def call(self) -> Call:
        """Return a product of a single entry, whose time is the overhead of a call."""
        x, z, W, F, K = self.x[:1], self.z[:1], self.W[:1], self.F[:1], self.K[:1, :1]
        return 1, lambda: self.op.product(x, z, W, out=F, keep=K)


def _operator(run: ResolvedRun, X: Any, q: int) -> tuple[KernelOperator, Any]:
    """Return the kernel operator, and q rows as centers, or q frequencies of Fourier features.

    A bandwidth that the setup would choose is replaced by the median distance.
    """
    model, few = run.config.model, X[:NOISE_ROWS].astype(np.float64)

    def width(geometry: str) -> float:
        if not isinstance(model.bandwidth, str):
            return model.bandwidth
        same = len(few) < 2 or not np.ptp(few, axis=0).any()
        norm = "cityblock" if geometry == "l1" else "euclidean"
        return 1.0 if same else median_bandwidth(few, norm, sparse=run.data.sparse)

    kernel = run.data.kernel_of(get_kernel(model.kernels[0], width))
    Z = np.resize(X, (q, X.shape[1]))
    if run.metric is not None:
        kernel = kernel.with_metric(run.metric)
    if model.features == "fourier":
        Z = frequencies(kernel, X.shape[1], q, 0).astype(X.dtype)
        kernel = FourierFeatures(q, kernel.describe())
    shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
    return KernelOperator(kernel, run.backend, run.precision, shift, run.grid), Z


def _product(backend: Backend, rows: int, columns: int, dtype: Any) -> Call:
    """Return the Gram product of a matrix with k rows and b columns, for half of its symmetric
    result: k b^2 FLOPs."""
    W, C = backend.xp.ones((rows, columns), dtype), backend.xp.zeros((columns, columns), dtype)
    return rows * columns**2, lambda: _alone(backend, lambda: backend.add_gram(C, W, 1.0))


def _factor(backend: Backend, n: int, dtype: Any) -> Call:
    """Return the Cholesky factorisation of an n x n matrix: n^3 / 3 FLOPs."""
    A, room = backend.xp.ones((n, n), dtype), backend.xp.empty((n, n), dtype)
    A[backend.xp.arange(n), backend.xp.arange(n)] += n

    def call() -> None:
        room[...] = A
        backend.cholesky(room)

    return n**3 / 3, call


def _eigenpairs(run: ResolvedRun, dtype: Any) -> Call:
    n, level = min(run.sizes.n_sample, EIGEN), getattr(run.sizes, "level", 1)
    rng = np.random.default_rng(0)
    drawn = run.backend.asarray(rng.standard_normal((n, n)), dtype)
    A = drawn @ drawn.T
    k = max(1, min(n - 1, level * n // run.sizes.n_sample))
    return EIGH_FLOPS * n**3, lambda: run.backend.top_eigh(A.copy(), k)


def _alone(backend: Backend, call: Callable[[], None]) -> None:
    with backend.single_threaded_blas():
        call()
