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
from streamkern.kernels.fourier import FourierFeatures, frequencies
from streamkern.kernels.products import KernelOperator
from streamkern.planning.op_counts import OpCounts, Speeds
from streamkern.solver.precondition.low_rank import EIGH_FLOPS
from streamkern.solver.precondition.noise import NOISE_ROWS
from streamkern.store.row_block import RowBlock, concatenated
from streamkern.stream.feed import prepare
from streamkern.stream.sources.transforms import SETUP_EPOCH
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_kernel import kernel_of_settings

MEASURED_S = 2.0
"""Approximate duration of all measurements together, in seconds."""
MEASUREMENTS = 12
"""Number of measurements that share `MEASURED_S` equally."""
MAX_SIDE, MAX_KERNEL_COLUMNS, MAX_KERNEL_ENTRIES = 4096, 8192, 1 << 24
"""Largest side of a square matrix, and largest number of columns and of entries of a kernel matrix;
larger matrices have about the same speed."""
MAX_EIGEN_SIDE = 1536
"""Largest side of the matrix of an eigendecomposition."""
MAX_KEPT_BYTES, MAX_TIMED_UNITS = 32 << 20, 64
"""Size of the rows that are kept for the other measurements, in bytes, and largest number of units
that are read."""

Clock = Callable[[], float]
Call = tuple[float, Callable[[], object]]
"""Amount of work that a call does, in the unit of its kind (see `OpCounts`), and the call."""


class _Timed(NamedTuple):
    """Seconds per unit of work, and additional seconds of the first call, which compiles."""

    unit_s: float
    first_call_s: float


class _ReadRows(NamedTuple):
    """Rows, the seconds to read one of them, and the processor time that is part of these."""

    block: RowBlock
    read_s: float
    busy_s: float


def measure_speeds(
    run: ResolvedRun, counts: Iterable[OpCounts], clock: Clock = time.perf_counter
) -> Speeds:
    """Measure the kinds of work that these operation counts contain.

    Takes about `MEASURED_S`, and longer on slow storage.

    clock : clock in seconds; pass another one if the machine is busy
    """
    backend, total = run.backend, sum(counts, OpCounts())
    with backend.active():
        reading = _read(run, MEASURED_S / MEASUREMENTS)
        X, prepared = _prepare(run, reading.block, MEASURED_S / MEASUREMENTS, clock)
        timings = {
            kind: _timed(backend, MEASURED_S / MEASUREMENTS, *call(), clock)
            for kind, call in _calls(run, X, total).items()
            if getattr(total, kind)
        }
    backend.release()
    compiled = max(
        (timings[kind].first_call_s for kind in ("kept", "entries") if kind in timings), default=0.0
    )
    speeds = OpCounts(**{kind: timing.unit_s for kind, timing in timings.items()})
    return Speeds(speeds, prepared.unit_s, reading.read_s, reading.busy_s, compiled)


def _timed(
    backend: Backend, budget_s: float, amount: float, call: Callable[[], object], clock: Clock
) -> _Timed:
    """Return the median time of calls within `budget_s` seconds, per unit of work.

    The first call, which compiles, is not counted.

    amount : units of work of a call
    """
    start = clock()
    call()
    backend.synchronize()
    first_s = clock() - start
    seconds, loop_start = list[float](), clock()
    while not seconds or clock() - loop_start < budget_s:
        start = clock()
        call()
        backend.synchronize()
        seconds.append(clock() - start)
    return _Timed(median(seconds) / amount, max(first_s - median(seconds), 0.0))


def _read(run: ResolvedRun, budget_s: float) -> _ReadRows:
    """Read random units for `budget_s` seconds.

    The first unit is not timed if there are others, because it opens files.
    """
    source, seed = run.data.source, run.config.run.random_state
    units = np.random.default_rng([seed, 0]).permutation(source.n_units)[:MAX_TIMED_UNITS].tolist()
    blocks, wall_s, busy_s, rows, size = list[RowBlock](), 0.0, 0.0, 0, 0
    for k, u in enumerate(units):
        start, cpu_start = time.perf_counter(), time.thread_time()
        block = source.read_unit(u, seed, SETUP_EPOCH)
        elapsed, cpu_s = time.perf_counter() - start, time.thread_time() - cpu_start
        if size < MAX_KEPT_BYTES:
            blocks.append(block)
            size += block.X.nbytes
        if k or len(units) == 1:
            wall_s, busy_s, rows = wall_s + elapsed, busy_s + cpu_s, rows + len(block.X)
        if wall_s > budget_s:
            break
    return _ReadRows(concatenated(blocks), wall_s / rows, min(busy_s, wall_s) / rows)


def _prepare(
    run: ResolvedRun, block: RowBlock, budget_s: float, clock: Clock
) -> tuple[Array, _Timed]:
    """Return at most a batch of rows, transformed as for a step, and the seconds per row."""
    source, backend = run.data.source, run.backend
    part = block.take(slice(min(run.sizes.batch_size, len(block.X))))
    prepared: list[Array] = []

    def call() -> None:
        prepared[:] = prepare(
            backend, part, run.data.weight_factors, transforms=source.feed_transforms,
            dtype=np.float64 if run.precision == "float64" else np.float32,
            seed=run.config.run.random_state, epoch=SETUP_EPOCH, n_outputs=source.n_outputs,
            classes=source.classes,
        )[:1]  # fmt: skip

    seconds = _timed(backend, budget_s, len(part.X), call, clock)
    return prepared[0], seconds


def _calls(run: ResolvedRun, X: Array, counts: OpCounts) -> dict[str, Callable[[], Call]]:
    """Return, for each kind of work, a function that makes its call with the arrays it needs."""
    backend, dtype = run.backend, X.dtype
    side = min(getattr(run.sizes, "block_size", run.problem.p), MAX_SIDE)
    wide = min(run.problem.p if counts.wide_products else NOISE_ROWS, MAX_SIDE)
    matrices: list[_KernelMatrix] = []

    def matrix() -> _KernelMatrix:
        matrices.extend([] if matrices else [_KernelMatrix(run, X)])
        return matrices[0]

    return {
        "entries": lambda: matrix().evaluated(keep=False),
        "kept": lambda: matrix().evaluated(keep=True),
        "swept": lambda: matrix().swept(side),
        "calls": lambda: matrix().call(),
        "products": lambda: _product(backend, side, side, dtype),
        "factors": lambda: _factor(backend, side, dtype),
        "eigen": lambda: _eigenpairs(run, dtype),
        "wide_products": lambda: _product(backend, run.sizes.batch_size, wide, np.float64),
        "wide_factors": lambda: _factor(backend, wide, np.float64),
    }


class _KernelMatrix:
    """Kernel matrix K(X, Z) of a batch and some centers."""

    def __init__(self, run: ResolvedRun, X: Array) -> None:
        backend, c = run.backend, run.problem.c
        m = run.sizes.batch_size
        q = max(1, min(run.problem.p, MAX_KERNEL_COLUMNS, MAX_KERNEL_ENTRIES // m))
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
    kernel = kernel_of_settings(run, X, run.metric)
    Z = np.resize(X, (q, X.shape[1]))
    if run.config.model.features == "fourier":
        Z = frequencies(kernel, X.shape[1], q, 0).astype(X.dtype)
        kernel = FourierFeatures(q, kernel.describe())
    shift = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
    return KernelOperator(kernel, run.backend, run.precision, shift, run.grid), Z


def _product(backend: Backend, rows: int, columns: int, dtype: Any) -> Call:
    """Return the Gram product of a matrix with k rows and b columns, for half of its symmetric
    result: k b^2 FLOPs."""
    W, C = backend.xp.ones((rows, columns), dtype), backend.xp.zeros((columns, columns), dtype)
    return rows * columns**2, lambda: _single_threaded(backend, lambda: backend.add_gram(C, W, 1.0))


def _factor(backend: Backend, n: int, dtype: Any) -> Call:
    """Return the Cholesky factorisation of an n x n matrix: n^3 / 3 FLOPs."""
    A, work = backend.xp.ones((n, n), dtype), backend.xp.empty((n, n), dtype)
    A[backend.xp.arange(n), backend.xp.arange(n)] += n

    def call() -> None:
        work[...] = A
        backend.cholesky(work)

    return n**3 / 3, call


def _eigenpairs(run: ResolvedRun, dtype: Any) -> Call:
    n, level = min(run.sizes.n_sample, MAX_EIGEN_SIDE), getattr(run.sizes, "level", 1)
    rng = np.random.default_rng(0)
    samples = run.backend.asarray(rng.standard_normal((n, n)), dtype)
    A = samples @ samples.T
    k = max(1, min(n - 1, level * n // run.sizes.n_sample))
    return EIGH_FLOPS * n**3, lambda: run.backend.top_eigh(A.copy(), k)


def _single_threaded(backend: Backend, call: Callable[[], None]) -> None:
    with backend.single_threaded_blas():
        call()
