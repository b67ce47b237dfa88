"""Measure the setup of a run, and its share of a run of 10^6 samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness import (
    SGEMM_SIZE,
    C,
    Figure,
    Sgemm,
    check,
    figure,
    in_turns,
    one_hot,
    points,
)
from benchmarks.step import RUN_SAMPLES, Steps, operator, planned
from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.kernels.products import KernelOperator
from streamkern.solver.block_sizes import BlockSizes
from streamkern.solver.low_rank import ROWS_PER_DIRECTION, LowRankSizes
from streamkern.solver.method import Work
from streamkern.solver.precondition.block import block_slices
from streamkern.solver.precondition.low_rank import LowRankPreconditioner, build_low_rank
from streamkern.solver.precondition.samples import SampleRows

REPEATS, STEPS = 3, 5
SMALL = {
    "d": 64, "runs": (("block", 512),), "eigensystems": (256,), "sgemm_size": 1024,
}  # fmt: skip
PROBE_ROWS = 2048


def measure(
    repeats: int,
    *,
    d: int = 784,
    runs: tuple[tuple[str, int], ...] = (
        *(("block", 2000), ("block", 10_000)),
        ("eigenpro4", 10_000),
    ),
    eigensystems: tuple[int, ...] = (2000, 5000),
    sgemm_size: int = SGEMM_SIZE,
) -> list[Figure]:
    """Return seconds; the floor is the least number of FLOPs at the speed of SGEMM.

    runs : solver and p; sizes are those a run of 10^6 samples gets, and `share` is the setup's
    part of setup and steps, from steps timed with what was set up. eigensystems : rows s of
    `build_low_rank`, with s / 20 directions.
    """
    sgemm = Sgemm(sgemm_size)
    with get_backend("cpu") as backend:
        found = [_run(repeats, backend, solver, p, d, sgemm) for solver, p in runs]
        return found + [_eigensystem(repeats, backend, s, d, sgemm) for s in eigensystems]


def _run(repeats: int, backend: Backend, solver: str, p: int, d: int, sgemm: Sgemm) -> Figure:
    run = planned(p, d, solver)
    method, sizes = run.method, run.sizes
    Z = points(p, d, 1)
    op = operator(backend, Z)
    z = op.points(Z, right=True)
    sample, probe = (
        SampleRows(X := points(n, d, seed), np.sin(X[:, :C]))
        for n, seed in ((sizes.n_sample, 2), (sizes.n_probe, 3))
    )
    work = Work(op, z, run.problem, sizes, run.config.solver, run.config.run.random_state)
    made: dict[str, Any] = {}

    def build() -> None:
        made.clear()  # as in a run, the memory is there once
        made["setup"] = method.compute(work, lambda: (sample, probe), lambda event, fields: None)

    times = in_turns({"setup": build, "SGEMM": sgemm}, repeats, warm_up=False)
    setup = made["setup"]
    m, period = setup.meta["batch_size"], setup.meta.get("period", 1)
    X = points(m, d, 4)
    steps = Steps(method.assemble(work, setup), X, one_hot(X), period)
    rate = m * period / np.median(in_turns({"": steps}, STEPS)[""])
    steps.check(f"the setup of {solver} at p={p}")
    flops = _block_flops(sizes, p, d) if solver == "block" else _eigenpro_flops(sizes, p, d)
    seconds = float(np.median(times["setup"]))
    return figure(
        f"{solver}, p={p}, d={d}, s={sizes.n_sample}", "streamkern", "s",
        times["setup"], floor=flops / sgemm.speed(times["SGEMM"]),
        share=seconds / (seconds + RUN_SAMPLES / rate), samples_per_s=float(rate),
    )  # fmt: skip


def _block_flops(sizes: BlockSizes, p: int, d: int) -> float:
    """Return the FLOPs of `BlockPreconditioner` in its cheapest order, with halves of symmetric
    products."""
    s, h, total = sizes.n_sample, sizes.n_probe, 0.0
    for block in block_slices(p, sizes.block_size):
        b = block.stop - block.start
        kernel = b * b * d + 2 * (s + h) * b * d
        covariance = s * b * b + b**3  # K_bS K_Sb, then L^-1 on both sides
        factors = (1 + 1 + 2) * b**3 / 3  # L, A, A^-1 L^-1
        total += kernel + covariance + factors + h * b * b
    return total


def _eigenpro_flops(sizes: LowRankSizes, p: int, d: int) -> float:
    """Return the FLOPs of the eigensystem, K(Z, Z) and its Cholesky factor."""
    low_rank = _low_rank_flops(sizes.n_sample, sizes.n_probe, sizes.level, d)
    return low_rank + p * p * d + p**3 / 3


def _low_rank_flops(s: int, h: int, q: int, d: int) -> float:
    """Return the FLOPs of the kernel values, one product with q vectors, and the step rule on the
    probe."""
    return s * s * d + 2 * s * s * q + h * h * d + 2 * h * s * (d + q) + h * h * q


def _eigensystem(repeats: int, backend: Backend, s: int, d: int, sgemm: Sgemm) -> Figure:
    X, q = points(s, d, 1), s // ROWS_PER_DIRECTION
    op = operator(backend, X)
    X_s = op.points(X, right=True)
    probe = op.points(points(min(PROBE_ROWS, s), d, 2), right=True)
    made: list[LowRankPreconditioner] = []

    def build() -> None:
        made[:] = [build_low_rank(op, X_s, probe, level=q)]

    times = in_turns({"build": build, "SGEMM": sgemm}, repeats, warm_up=False)
    _check_eigenvectors(op, made[0])
    flops = _low_rank_flops(s, len(probe), q, d)
    return figure(
        f"eigensystem, s={s}, q={q}, d={d}", "streamkern", "s", times["build"],
        floor=flops / sgemm.speed(times["SGEMM"]),
    )  # fmt: skip


def _check_eigenvectors(op: KernelOperator, P: LowRankPreconditioner) -> None:
    """Check that E is orthonormal and invariant under K(X_s, X_s), to 0.001 of its largest
    eigenvalue."""
    E = P.E.astype(np.float64)
    KE = op.gram(P.X_s).astype(np.float64) @ E
    values = E.T @ KE
    is_right = np.allclose(E.T @ E, np.eye(E.shape[1]), atol=1e-3)
    residual = np.linalg.norm(KE - E @ values, axis=0).max()
    check(bool(is_right and residual < 1e-3 * values.max()), f"the eigensystem of {len(E)} rows")
