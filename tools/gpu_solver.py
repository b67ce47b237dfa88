"""Steps of the block solver with made-up numbers: blocks, sketches and a ridge as plans have them.

No setup is needed. The time does not depend on the values, but they are not zeros, with which a GPU
draws less power and may be faster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.config.solver import SolverConfig
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.points import Grid, Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.problem import ProblemShape
from streamkern.solver.block_step import BlockSolver
from streamkern.solver.method import Method, Work
from streamkern.solver.methods import find
from streamkern.solver.precondition.block import SKETCH, BlockPreconditioner, block_slices
from streamkern.solver.precondition.step_rule import StepRule
from tools import gpu_clock
from tools.gpu_clock import LEAST, MOST, Clock, Figures, Place, Spans, replaced

# Centers of a block, as plans have them, and fewer where the factors would take more bytes.
BLOCK, FACTOR_BYTES = 15_000, 20 * 10**9
SHARE = 0.003
"""Fraction of the ridge's effect that a step takes in the run of 1.2e8 rows on an H100."""
# Leverages of that run, and steps so short that made-up numbers do not grow.
RULE = StepRule(1e4, 2.0, scale=1e-6, damped=True, mean=1e4)
MU = 1e-5
CALLS = (
    "assign", "finish_tile", "gemm", "matmul", "matmul_t", "square_norms", "sum_squares",
)  # fmt: skip
KERNELS = ("assign", "finish_tile", "square_norms", "sum_squares")
"""Those that launch a kernel of their own on a GPU."""


def made_rows(mode: str, rows: int, d: int, seed: int) -> np.ndarray:
    """Return rows in storage form: pixels for the integer mode, normal numbers else."""
    rng = np.random.default_rng(seed)
    if mode == "integer":
        return rng.integers(0, 256, (rows, d), np.uint8)
    return rng.standard_normal((rows, d), np.float32)


def distances(
    backend: Any, mode: str, d: int, *, pixels: bool = False, bandwidth: float = 1.4
) -> KernelOperator:
    """Return the operator of a Laplace kernel, for distances of a few bandwidths.

    pixels : whether the rows are pixels in other modes as well.
    bandwidth : of other rows, over the root of d.
    """
    pixels = pixels or mode == "integer"
    kernel = Laplace((100.0 if pixels else bandwidth) * d**0.5)
    shift = np.full(d, 128 if pixels else 0, np.float32)
    grid = Grid(0.0, 1.0) if mode == "integer" else None
    return KernelOperator(kernel, backend, mode, shift, grid)


def made_problem(rows: int, d: int, c: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return rows (rows, d) and targets (rows, c), smooth functions of six hidden numbers.

    Features have a deviation of about 1, and targets a noise of .1.
    """
    fixed, rng = np.random.default_rng(12), np.random.default_rng([seed, 13])
    A, B = (fixed.standard_normal((6, k)).astype(np.float32) for k in (d, c))
    hidden = rng.standard_normal((rows, 6), np.float32)
    X = np.tanh(hidden @ A) + 0.3 * rng.standard_normal((rows, d), np.float32)
    Y = np.sin(hidden @ B) + 0.1 * rng.standard_normal((rows, c), np.float32)
    return X, Y


def made_factor(backend: Any, b: int, seed: int = 0) -> Array:
    """Return a lower triangular matrix near the identity, (b, b) float32."""
    xp, rng = backend.xp, np.random.default_rng([seed, 4])
    H = xp.empty((b, b), np.float32)
    height = min(b, 1024)
    noise = backend.asarray(rng.standard_normal((height, b), np.float32) * 0.1 / b**0.5)
    for rows in tiles(b, height):
        H[rows] = xp.tril(noise[: rows.stop - rows.start], rows.start)
    H.reshape(-1)[:: b + 1] = 1
    return H


def planned_block(p: int) -> int:
    """Return the centers of a block, of p in all."""
    return min(p, BLOCK, FACTOR_BYTES // (4 * p))


def made_solver(
    op: KernelOperator, z: Points, factors: Sequence[Array], block_size: int, *, c: int, m: int,
    share: float = 0.0,
) -> BlockSolver:  # fmt: skip
    """Return a solver whose blocks have these factors in turn.

    z : the centers.
    m : rows of a step.
    share : fraction of the ridge's effect that a step takes in a block; 0: no ridge.
    """
    backend, blocks = op.backend, block_slices(len(z), block_size)
    n, rng = len(blocks), np.random.default_rng(5)
    H = [factors[b % len(factors)][: s.stop - s.start, : s.stop - s.start]
         for b, s in enumerate(blocks)]  # fmt: skip
    sketches = [
        backend.asarray(rng.standard_normal((len(each), SKETCH), np.float32) / len(each))
        for each in H
    ]
    ridge = share * MU / RULE.eta(m)
    pre = BlockPreconditioner(
        blocks, H, [RULE] * n, MU, [1e-6 if ridge else 0.0] * n, sketches=sketches,
        L=H[0] if ridge and n == 1 else None,
    )  # fmt: skip
    return BlockSolver(op, z, pre, max_batch=m, seed=0, n_outputs=c, ridge=ridge)


def made_work(
    op: KernelOperator, z: Points, name: str, shape: tuple[int, int, int, int, int],
    options: SolverConfig | None = None, *, rows: int = 0, **own: Any,
) -> tuple[Method[Any], Work[Any]]:  # fmt: skip
    """Return a method and the work of its setup, with these sizes in place of planned ones.

    shape : features, outputs, rows of a batch, of the sample and of the probe.
    rows : rows over which the stream cycles; 0: a million rows, each new.
    own : sizes of the method's own.
    """
    d, c, m, s, h = shape
    problem = ProblemShape(
        n_rows=rows or 10**6, epochs=1, d=d, c=c, p=len(z), row_bytes=4 * (d + c), unit_rows=1000,
        itemsize=4, threads=1, width=z.width, tile_bytes=1 << 20, repeats=bool(rows),
    )  # fmt: skip
    method: Method[Any] = find(name, "kernel")
    sizes = method.sizes(
        solver=name, batch_size=m, n_sample=s, n_probe=h, loader_block_bytes=1,
        loader_in_flight_bytes=1, **own,
    )  # fmt: skip
    return method, Work(op, z, problem, sizes, options or SolverConfig(), 0)


class FedSteps:
    """Steps on one batch, which comes through the ring in storage form, as in training."""

    def __init__(self, clock: Clock, solver: BlockSolver, host_X: np.ndarray) -> None:
        self.clock, self.solver, self.host_X = clock, solver, host_X
        backend, m = clock.backend, len(host_X)
        Y = np.random.default_rng(4).standard_normal((m, solver.n_outputs), np.float32)
        X = backend.xp.empty(host_X.shape, np.float32)
        self.batch = Batch(X, backend.asarray(Y), np.arange(m))
        self.state, self.ring = solver.init(), backend.uploader()
        self.starts: list[Any] = []
        self.ends: list[Any] = []
        for _ in range(3):
            self.take()
        backend.synchronize()
        self.once_s = clock.between(self.starts[-1], self.ends[-1]) / 1e3

    def take(self) -> None:
        """Upload the batch, and take a step."""
        uploaded = self.ring.upload(self.host_X)
        self.starts.append(self.clock.mark())
        self.batch.X[...] = uploaded
        self.solver.step(self.state, self.batch)
        self.ends.append(self.clock.mark())

    def measured(self, seconds: float) -> Figures:
        """Return times of a step, from 5 to 50 of them back to back."""
        clock, backend = self.clock, self.clock.backend
        repeats = min(MOST, max(LEAST, int(seconds / max(self.once_s, 1e-6))))
        self.starts.clear(), self.ends.clear()
        began = time.perf_counter()
        for _ in range(repeats):
            self.take()
        enqueued = (time.perf_counter() - began) * 1e3
        backend.synchronize()
        wall = (time.perf_counter() - began) * 1e3
        busy = sum(clock.between(a, b) for a, b in zip(self.starts, self.ends, strict=True))
        # From the end of a step to the arrival of the next batch, as the compute stream sees it.
        stall = sum(clock.between(a, b) for a, b in zip(self.ends, self.starts[1:], strict=False))
        return {
            "ms": wall / repeats,
            # As long as `ms` where the host is what steps wait for.
            "enqueued_ms": enqueued / repeats,
            "samples_per_s": len(self.host_X) * repeats / wall * 1e3,
            "busy": busy / wall,
            "stall": stall / wall,
            "blocks": len(self.solver.preconditioner.blocks),
        }

    def parts(self) -> Figures:
        """Return milliseconds of a step's parts on the device, the mean of a few steps."""
        solver, spans = self.solver, Spans(self.clock)
        with spans.around([
            Place(self, "take", "step"),
            Place(solver.op, "points", "points"),
            Place(solver, "_residual", "residual"),
            Place(solver, "_block_step", lambda state, b, *of: f"block {b}"),
            Place(solver, "_update_residual", "updates of the residual"),
            Place(solver.ridge_term, "_refresh", "ridge"),
        ]):  # fmt: skip
            for _ in range(LEAST):
                self.take()
        found = spans.times()
        means = {name: figures["own_ms"] / LEAST for name, figures in found.items()}
        rest = means.pop("step")
        return {f"{name}_ms": ms for name, ms in sorted(means.items())} | {"rest_ms": rest}

    def close(self) -> None:
        """Release the ring."""
        self.ring.close()


def step(clock: Clock, op: KernelOperator, z: Points, host_X: np.ndarray, c: int) -> Figures:
    """Time steps with blocks and sketches as in a run, and without a ridge."""
    blocks = block_slices(len(z), planned_block(len(z)))
    factors = [made_factor(clock.backend, s.stop - s.start) for s in blocks]
    solver = made_solver(op, z, factors, planned_block(len(z)), c=c, m=len(host_X))
    steps = FedSteps(clock, solver, host_X)
    figures = steps.measured(gpu_clock.SECONDS)
    figures |= calls(clock.backend, steps.take)
    steps.close()
    return figures


def calls(backend: Any, work: Callable[[], object]) -> Figures:
    """Return calls of the backend's methods in `work`, and on a GPU launches that can be counted.

    These are cuBLAS's and those of kernels of this package. Copies, sums and other operations of
    CuPy's own are missing, a fifth of a step on the tests' stand-in for it.
    """
    counts, library = Counter[str](), Counter[str]()
    with ExitStack() as stack:
        for name in CALLS:
            counted = _counting(getattr(backend, name), name, counts)
            stack.enter_context(replaced(backend, name, counted))
        blas = getattr(backend, "blas", None)
        if blas is not None:
            stack.enter_context(replaced(blas, "_cublas", _Counted(blas._cublas, library)))
        work()
    figures: Figures = {"calls": dict(counts)}
    if blas is not None:
        figures["cublas_launches"] = library.total()
        figures["counted_launches"] = library.total() + sum(counts[name] for name in KERNELS)
    return figures


def _counting(call: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        counts[name] += 1
        return call(*given, **named)

    return counted


class _Counted:
    """A library whose calls are counted; its constants are numbers."""

    def __init__(self, library: Any, counts: Counter[str]) -> None:
        self._library, self._counts = library, counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        return _counting(found, name, self._counts) if callable(found) else found
