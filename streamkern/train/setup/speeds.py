"""Measure the speed of this machine for each kind of work of a run, briefly, on rows of the run.

Kernel, precision, matrix widths and batch size are taken from the run, as far as they affect the
speed. Nothing is written, and only the requested kinds of work are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.half_products import half_product
from streamkern.kernels.fourier import FourierFeatures, frequencies
from streamkern.kernels.products import KernelOperator
from streamkern.planning.op_counts import NO_WORK, OpCounts, Speeds
from streamkern.solver.precondition.low_rank import EIGH_FLOPS
from streamkern.solver.precondition.noise import NOISE_ROWS
from streamkern.store.row_block import RowBlock, concatenate_blocks
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

TimedCall = tuple[float, Callable[[], object]]
"""Amount of work that a call does, in the unit of its kind (see `OpCounts`), and the call."""


class _Timing(NamedTuple):
    """Seconds per unit of work, and additional seconds of the first call, which compiles."""

    unit_s: float
    first_call_s: float


class _ReadRows(NamedTuple):
    """Rows, the seconds to read one of them, and the processor time that is part of these."""

    block: RowBlock
    read_s: float
    busy_s: float


def measure_speeds(run: ResolvedRun, counts: Iterable[OpCounts]) -> Speeds:
    """Measure the kinds of work that these operation counts contain.

    Takes about `MEASURED_S`, and longer on slow storage.
    """
    backend, total = run.backend, sum(counts, NO_WORK)
    with backend.active():
        reading = _read_units(run)
        X, prepared = _prepare(run, reading.block)
        timings = {
            kind: _time_calls(backend, *call())
            for kind, call in _calls(run, X, total).items()
            if getattr(total, kind)
        }
    backend.release()
    first_calls = (timings[kind].first_call_s for kind in ("kept", "entries") if kind in timings)
    compiled = max(first_calls, default=0.0)
    speeds = OpCounts(**{kind: timing.unit_s for kind, timing in timings.items()})
    return Speeds(speeds, prepared.unit_s, reading.read_s, reading.busy_s, compiled)


def _time_calls(backend: Backend, amount: float, call: Callable[[], object]) -> _Timing:
    """Return the median time of calls, per unit of work.

    The first call, which compiles, is not counted.

    amount : units of work of a call
    """

    def call_s() -> float:
        start = perf_counter()
        call()
        backend.synchronize()
        return perf_counter() - start

    first_s, seconds, loop_start = call_s(), list[float](), perf_counter()
    while not seconds or perf_counter() - loop_start < MEASURED_S / MEASUREMENTS:
        seconds.append(call_s())
    return _Timing(median(seconds) / amount, max(first_s - median(seconds), 0.0))


def _read_units(run: ResolvedRun) -> _ReadRows:
    """Read random units for a while.

    The first unit is not timed if there are others, because it opens files.
    """
    source, seed = run.data.source, run.config.run.random_state
    units = np.random.default_rng([seed, 0]).permutation(source.n_units)[:MAX_TIMED_UNITS].tolist()
    blocks, wall_s, busy_s, rows, size = list[RowBlock](), 0.0, 0.0, 0, 0
    for k, u in enumerate(units):
        start, cpu_start = perf_counter(), thread_time()
        block = source.read_unit(u, seed, SETUP_EPOCH)
        elapsed, cpu_s = perf_counter() - start, thread_time() - cpu_start
        if size < MAX_KEPT_BYTES:
            blocks.append(block)
            size += block.X.nbytes
        if k or len(units) == 1:
            wall_s, busy_s, rows = wall_s + elapsed, busy_s + cpu_s, rows + len(block.X)
        if wall_s > MEASURED_S / MEASUREMENTS:
            break
    return _ReadRows(concatenate_blocks(blocks), wall_s / rows, min(busy_s, wall_s) / rows)


def _prepare(run: ResolvedRun, block: RowBlock) -> tuple[Array, _Timing]:
    """Return at most a batch of rows, transformed as for a step, and the seconds per row."""
    source, backend = run.data.source, run.backend
    part = block.take(slice(min(run.sizes.batch_size, len(block.X))))
    prepared: list[Array] = []

    def call() -> None:
        prepared[:] = prepare(
            backend, part, run.data.weight_factors, transforms=source.feed_transforms,
            dtype=np.float64 if run.precision == "float64" else np.float32,
            seed=run.config.run.random_state, epoch=SETUP_EPOCH, n_classes=source.n_classes,
        )[:1]  # fmt: skip

    seconds = _time_calls(backend, len(part.X), call)
    return prepared[0], seconds


def _calls(run: ResolvedRun, X: Array, counts: OpCounts) -> dict[str, Callable[[], TimedCall]]:
    """Return, for each kind of work, a function that makes its call with the arrays it needs."""
    backend, dtype = run.backend, X.dtype
    side = min(getattr(run.sizes, "block_size", run.problem.p), MAX_SIDE)
    wide = min(run.problem.p if counts.wide_products else NOISE_ROWS, MAX_SIDE)
    matrix = cache(lambda: _KernelMatrix(run, X))
    return {
        "entries": lambda: matrix().evaluation(keep=False),
        "kept": lambda: matrix().evaluation(keep=True),
        "swept": lambda: matrix().sweep(side),
        "half_swept": lambda: _half_products(backend, side, run.problem.c),
        "calls": lambda: matrix().call(),
        "products": lambda: _gram_product(backend, side, side, dtype),
        "factors": lambda: _factor(backend, side, dtype),
        "eigen": lambda: _eigenpairs(run, dtype),
        "wide_products": lambda: _gram_product(backend, run.sizes.batch_size, wide, np.float64),
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

    def evaluation(self, *, keep: bool) -> TimedCall:
        """Return a product K W. keep : whether K is stored, as the setup does it"""
        W, F = self.wide if keep else (self.W, self.F)
        K = self.K if keep else None
        return self.K.size, lambda: self.op.product(self.x, self.z, W, out=F, keep=K)

    def sweep(self, side: int) -> TimedCall:
        """Return the products with K^T and with K of a sweep, for a matrix with at least `side`
        rows."""
        n, backend = max(side, len(self.K)), self.backend
        K, right, out = (
            backend.xp.ones((n, width), self.op.dtype) for width in (side, self.c, self.c)
        )
        left = backend.xp.ones((side, self.c), self.op.dtype)

        def multiply() -> None:
            with backend.single_threaded_blas():
                backend.matmul_t(K, right, left)
                backend.matmul(K, left, out)

        return 2 * K.size, multiply

    def call(self) -> TimedCall:
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


def _half_products(backend: Backend, side: int, c: int) -> TimedCall:
    """Return the products with a float16 matrix and with its transpose, for both of its reads."""
    H = backend.xp.ones((side, side), np.float16)
    g, out = (backend.xp.ones((side, c), np.float32) for _ in range(2))

    def multiply() -> None:
        with backend.single_threaded_blas():
            half_product(backend, H, g, out)
            half_product(backend, H, g, out, transposed=True)

    return 2 * H.size, multiply


def _gram_product(backend: Backend, rows: int, columns: int, dtype: Any) -> TimedCall:
    """Return the Gram product of a matrix with k rows and b columns, for half of its symmetric
    result: k b^2 FLOPs."""
    W, C = backend.xp.ones((rows, columns), dtype), backend.xp.zeros((columns, columns), dtype)

    def call() -> None:
        with backend.single_threaded_blas():
            backend.add_gram(C, W, 1.0)

    return rows * columns**2, call


def _factor(backend: Backend, n: int, dtype: Any) -> TimedCall:
    """Return the Cholesky factorisation of an n x n matrix: n^3 / 3 FLOPs."""
    A, work = backend.xp.ones((n, n), dtype), backend.xp.empty((n, n), dtype)
    A[backend.xp.arange(n), backend.xp.arange(n)] += n

    def call() -> None:
        work[...] = A
        backend.cholesky(work)

    return n**3 / 3, call


def _eigenpairs(run: ResolvedRun, dtype: Any) -> TimedCall:
    """Return the computation of the top eigenpairs of a matrix as large as the setup sample's."""
    n, level = min(run.sizes.n_sample, MAX_EIGEN_SIDE), getattr(run.sizes, "level", 1)
    rng = np.random.default_rng(0)
    samples = run.backend.asarray(rng.standard_normal((n, n)), dtype)
    A = samples @ samples.T
    k = max(1, min(n - 1, level * n // run.sizes.n_sample))
    return EIGH_FLOPS * n**3, lambda: run.backend.top_eigh(A.copy(), k)
