"""Parts of `gpu_step` that train in this process: dampings, factors in halves, a million centers.

Rows are made up (`made_problem`, or random numbers), so that nothing has to be read.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.backend.batch import Batch
from streamkern.basics.randomness import RowRandom
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points, point_width
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver
from streamkern.solver.block_step import BlockSolver
from streamkern.solver.method import Setup
from streamkern.solver.precondition import block as block_module
from streamkern.solver.precondition.block import block_slices
from streamkern.solver.precondition.block_factor import BlockInputs
from streamkern.solver.precondition.partition import Centers
from streamkern.solver.precondition.samples import Sample, SampleRows
from streamkern.solver.precondition.step_rule import fresh_eigenvalue
from tools.gpu_clock import Figures, guarded
from tools.gpu_solver import FedSteps, distances, made_problem, made_rows, made_solver, made_work
from tools.gpu_step_parts import LATE, Bench, floored, step_floor_ms

BANDWIDTH = 0.7
"""Of made problems, over the root of d: about the median distance over two."""
HELD_OUT = 4096
AT_ONCE = 16
"""Steps between two looks at the time."""


class Made(NamedTuple):
    """A made problem on the device: rows in the order of the stream, centers, and held-out rows."""

    op: KernelOperator
    z: Points
    X: Array
    Y: Array
    held_out: tuple[Array, Array]

    @classmethod
    def of(cls, bench: Bench, rows: int, p: int, d: int, c: int) -> Made:
        """Return a problem of so many rows, of which none is a center."""
        op = distances(bench.backend, "high", d, bandwidth=BANDWIDTH)
        held_out = min(HELD_OUT, rows)
        X, Y = (bench.backend.asarray(a) for a in made_problem(rows + p + held_out, d, c))
        z = op.points(X[rows : rows + p], right=True)
        return cls(op, z, X[:rows], Y[:rows], (X[rows + p :], Y[rows + p :]))

    def test_mse(self, alpha: Array) -> float:
        """Return the mean squared error of weights on the held-out rows."""
        X, Y = self.held_out
        residuals = self.op.product(self.op.points(X, left=True), self.z, alpha) - Y
        return float((residuals**2).mean())

    def train(self, solver: Solver, seconds: float, steps: int | None = None) -> Figures:
        """Take steps until the time is over, or so many, and return what came of them."""
        backend, n, m = self.op.backend, len(self.X), min(solver.max_batch, len(self.X))
        state, done, ids = solver.init(), 0, np.arange(n)
        began, took = time.perf_counter(), 0.0
        while (took < seconds) if steps is None else (done < steps):
            for _ in range(AT_ONCE if steps is None else steps):
                rows = slice(done * m % (n - m + 1), done * m % (n - m + 1) + m)
                solver.step(state, Batch(self.X[rows], self.Y[rows], ids[rows]))
                done += 1
            backend.synchronize()
            took = time.perf_counter() - began
        solver.finish(state)
        return {
            "steps": done, "step_ms": 1e3 * took / done, "training_s": took,
            "test_mse": self.test_mse(solver.weights(state)),
        }  # fmt: skip


def _setup(
    made: Made, b: int, m: int, s: int, h: int, options: SolverConfig | None = None
) -> tuple[Any, Any, Setup]:
    """Return the block method, its work and its setup, from the last rows of the stream."""
    shape = made.X.shape[1], made.Y.shape[1], m, s, h
    method, work = made_work(
        made.op, made.z, "block", shape, options, rows=len(made.X), block_size=b, keep=True
    )
    first = len(made.X) - s - h
    samples = [
        SampleRows(made.X[rows], made.Y[rows].copy())
        for rows in (slice(first, first + s), slice(first + s, None))
    ]
    setup = method.compute(work, lambda: samples, lambda *event: None)
    return method, work, setup


def damping(
    bench: Bench, entry: Figures, *, rows: int, p: int, b: int, d: int, c: int, m: int, sample: int,
    probe: int, seconds: float, values: Any,
) -> None:  # fmt: skip
    """Train for equal times with several dampings. p : centers, in blocks of b."""
    made = Made.of(bench, rows, p, d, c)
    for value in values:
        if bench.late():
            entry[f"damping {value:g}"] = LATE
            continue
        began = time.perf_counter()
        method, work, setup = _setup(made, b, m, sample, probe, SolverConfig(damping=value))
        bench.backend.synchronize()
        figures = {"setup_s": time.perf_counter() - began}
        figures["lambda_1"] = max(rule["lambda_1"] for rule in setup.meta["rules"])
        figures |= made.train(method.assemble(work, setup), seconds)
        entry[f"damping {value:g}"] = figures
        del method, work, setup
        bench.backend.release()


def halves(
    bench: Bench, entry: Figures, *, rows: int, p: int, b: int, d: int, c: int, m: int, sample: int,
    probe: int, steps: int,
) -> None:  # fmt: skip
    """Train with factors in float32, and with factors in float16."""
    made = Made.of(bench, rows, p, d, c)
    points = made.op.points(made.held_out[0], left=True)
    for name, factor_dtype in (("float32", "auto"), ("float16", "float16")):
        began = time.perf_counter()
        options = SolverConfig(name="block", factor_dtype=factor_dtype)
        method, work, setup = _setup(made, b, m, sample, probe, options)
        bench.backend.synchronize()
        figures = {"setup_s": time.perf_counter() - began}
        scale = setup.meta.get("factor_scales", [1.0])[0]
        H = setup.arrays["H.0"].astype(np.float32) / scale
        figures |= _spectrum(made.op, H, made.z[: len(H)], points)
        del H
        entry[name] = figures | made.train(method.assemble(work, setup), 0.0, steps)
        del method, work, setup
        bench.backend.release()
    for key in ("lambda_1", "mean_leverage", "test_mse"):
        entry[f"{key}_of_float16_over_float32"] = entry["float16"][key] / entry["float32"][key]


def _spectrum(op: KernelOperator, H: Array, z: Points, rows: Points) -> Figures:
    """Return leverages of rows in a block, and lambda_1 of their covariance."""
    backend, xp = op.backend, op.backend.xp
    K = op.matrix(rows, z)
    phi = backend.matmul(H, K.T, xp.empty(K.T.shape, op.dtype), lower=True)
    leverage = backend.to_host(xp.einsum("ij,ij->j", phi, phi))
    largest = float(leverage.max())
    start = backend.asarray(made_rows("exact", 1, len(H), 3)[0])
    return {
        "lambda_1": fresh_eigenvalue(backend, phi, largest, start),
        "mean_leverage": float(leverage.mean()), "largest_leverage": largest,
    }  # fmt: skip


# --- a million centers ----------------------------------------------------------------------------


def million(
    bench: Bench, entry: Figures, *, p: int, b: int, d: int, c: int, m: int, made_blocks: int,
    sample: int, probe: int, seconds: float, room: float = 0.8,
) -> None:  # fmt: skip
    """Time the setup of some blocks and steps of all, whose factors are those of the former.

    p is halved until the points, K and the factors fit into `room` of the memory.
    """
    backend, op = bench.backend, distances(bench.backend, "high", d)
    width = point_width(d, op.precision, backend, op.kernel)
    row = width * op.operand_dtype.itemsize + 4 * (m + 1)
    free = room * backend.memory_available() - 8 * made_blocks * b**2
    while p > 2 * made_blocks * b and p * row > free:
        p //= 2
    n = -(-p // b)
    entry |= {"centers": p, "blocks": n, "features": d, "outputs": c, "batch": m}
    z = _random_points(op, p, d, b)
    samples = [
        Sample(op.points(backend.asarray(made_rows("exact", k, d, k)), left=True),
               backend.asarray(made_rows("exact", k, c, k + 1)))
        for k in (sample, probe)
    ]  # fmt: skip
    began = time.perf_counter()
    first = slice(0, min(made_blocks * b, p))
    inputs = BlockInputs(op, Centers.of(z[first], backend), *samples, batch=m)
    pre = block_module.build_block(inputs, block_slices(first.stop, b))
    backend.synchronize()
    took = time.perf_counter() - began
    entry["setup"] = {
        "blocks": len(pre.blocks), "seconds": took, "peak_bytes": _peak_bytes(backend),
        "seconds_of_all_blocks_if_each_takes_as_long": took * n / len(pre.blocks),
    }  # fmt: skip
    factors = pre.H
    del samples, inputs, pre
    # The ridge for which setup makes room: it takes as many values of K(Z, Z) as a batch of K.
    for name, share in (("without a ridge", 0.0), ("with a ridge", 4 * max(1.0, m / b) / n**2)):
        backend.release()
        made = partial(made_solver, op, z, factors, b, c=c, m=m, share=share)
        late = bench.late()
        entry[name] = LATE if late else guarded(partial(_steps_of, bench, made, m, d, seconds))


def _steps_of(
    bench: Bench, made: Callable[[], BlockSolver], m: int, d: int, seconds: float
) -> Figures:
    solver = made()
    steps = FedSteps(bench.clock, solver, made_rows("exact", m, d, 1))
    try:
        figures = steps.measured(seconds)
    finally:
        steps.close()
    figures = floored(figures.pop("ms"), step_floor_ms(bench, solver, m)) | figures
    ridge = solver.ridge_term
    figures["blocks_of_the_ridge_per_step"] = ridge.count / ridge.stride if solver.ridge else 0.0
    return figures | {"peak_bytes": _peak_bytes(bench.backend)}


def _random_points(op: KernelOperator, p: int, d: int, at_once: int) -> Points:
    """Return p random centers, drawn on the device."""
    backend = op.backend
    z = op.empty_points(p, op.kernel.features(d), right=True)
    for rows in tiles(p, at_once):
        ids = backend.asarray(np.arange(rows.start, rows.stop))
        drawn = RowRandom(backend.xp, 0, 0, 9, ids, np.float32, fills=backend.fills).normal((d,))
        op.points(drawn, out=z[rows])
    return z


def _peak_bytes(backend: Any) -> int:
    """Return the bytes of CuPy's pool, which keeps what was ever in use; else of the process."""
    pool = getattr(backend.xp, "get_default_memory_pool", None)
    if pool is None:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(pool().total_bytes())
