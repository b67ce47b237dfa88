"""Measure the sums of the direct solver, against the product of two float64 matrices.

A batch of m rows adds m p^2 FLOPs to the lower half of K^T K; the floor is the time of as many
FLOPs at the speed of a square float64 product on all threads.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np

from benchmarks.harness import C, Figure, check, figure, in_turns, one_hot, points, rates
from benchmarks.step import Steps, operator
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.solver.direct_step import DirectSolver

REPEATS = 7
SMALL = {"sizes": (300,), "dims": (16,), "batch": 256, "product": 512}


def measure(
    repeats: int, *, sizes: tuple[int, ...] = (2000, 4000), dims: tuple[int, ...] = (16, 64),
    batch: int = 2048, product: int = 2048,
) -> list[Figure]:  # fmt: skip
    """Return rows/s of a step, of its kernel values and of its loss, and the FLOP/s of the sums."""
    with closing(get_backend("cpu")) as backend:
        return [f for p in sizes for d in dims for f in _of(repeats, backend, p, d, batch, product)]


def _of(repeats: int, backend: Backend, p: int, d: int, m: int, product: int) -> list[Figure]:
    Z, X = points(p, d, 1), points(m, d, 2)
    op = operator(backend, Z)
    solver = DirectSolver(op, op.points(Z, right=True), n_outputs=C, max_batch=m)
    steps, rng = Steps(solver, X, one_hot(X)), np.random.default_rng(3)
    K, G = np.ascontiguousarray(solver.K64), np.zeros((p, p))
    A, B = rng.standard_normal((2, product, product))
    out = np.empty((product, product))

    def sums() -> None:
        with backend.single_threaded_blas():
            backend.add_gram(G, K, 1.0)

    calls = {"step": steps, "sums": sums, "DGEMM": lambda: np.matmul(A, B, out=out)}
    times = in_turns(calls, repeats)
    _check(steps, K)
    dgemm = 2 * product**3 / float(np.median(times["DGEMM"]))
    case, work = f"p={p}, d={d}, m={m}", m * p * p / 1e9
    of_sums = figure(case, "sums", "GFLOP/s", rates(work, times["sums"]), floor=dgemm / 1e9)
    floor = dgemm / (p * p)
    return [of_sums, figure(case, "step", "rows/s", rates(m, times["step"]), floor=floor)]


def _check(steps: Steps, K: np.ndarray) -> None:
    """Check that the sums equal the sums of repeated steps with one batch."""
    G = steps.state.pending["G"][0]
    made = steps.state.rows / len(K)
    some = slice(0, 50)
    is_right = np.allclose(np.tril(G[some, some]), made * np.tril(K[:, some].T @ K[:, some]))
    check(bool(is_right), "the sum of K^T K")
