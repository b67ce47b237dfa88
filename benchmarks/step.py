"""A whole training step: kernel, both products, preconditioner, projection, averaging."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import (
    SGEMM_SIZE,
    C,
    Figure,
    Sgemm,
    bandwidth,
    check,
    compare,
    figure,
    in_turns,
    installed,
    one_hot,
    our_backends,
    points,
    rates,
)
from benchmarks.plain import TorchBlockStep
from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.backend.rank_grid import RankGrid
from streamkern.backend.ranks import SINGLE
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import Solver
from streamkern.solver.block_step import ORDER_STAGE, BlockSolver
from streamkern.solver.eigenpro import ProjectedSizes
from streamkern.solver.eigenpro_step import DelayedProjectionSolver
from streamkern.solver.precondition.block import BlockPreconditioner, block_slices
from streamkern.solver.precondition.low_rank import LowRankPreconditioner
from streamkern.solver.precondition.partition import Partition
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.projection import ExactProjection
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import RunInputs

REPEATS = 7
RUN_SAMPLES = 1_000_000
SMALL = {"d": 64, "sizes": (768,), "eigenpro": 512, "sgemm_size": 1024}
SEED = 0


def measure(
    repeats: int, *, d: int = 784, sizes: tuple[int, ...] = (2000, 10_000, 30_000),
    eigenpro: int = 10_000, sgemm_size: int = SGEMM_SIZE,
) -> list[Figure]:  # fmt: skip
    """Return samples/s; the floor is one evaluation of K(X, Z) per sample, 2 p d FLOPs at the speed
    of SGEMM.

    Sizes are those of a run of 10^6 samples; the values in the preconditioners are made up, as
    the time does not depend on them. sizes : p of the default solver. eigenpro : p of the others,
    whose projections are part of the time.
    """
    sgemm = Sgemm(sgemm_size)
    figures = [f for p in sizes for f in _block(repeats, p, d, sgemm)]
    return [*figures, *_eigenpro(repeats, eigenpro, d, sgemm)]


def planned(p: int, d: int, solver: str = "block") -> ResolvedRun:
    """Plan a run of 10^6 samples with p centers."""
    source = sk.GeneratorSource(_no_rows, RUN_SAMPLES, (d,), np.float32, C, name="no rows")
    tables = {
        "data": {"train": "made up", "scale": "none", "epochs": 1},
        "model": {"kernel": "laplace", "metric": "none", "n_centers": p},
        "solver": {"name": solver},
        "run": {"device": "cpu"},
    }
    run = open_run(sk.RunConfig.from_tables(tables), RunInputs(source))
    run.backend.close()
    return run


def _no_rows(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    raise AssertionError("sizes are known before the first row is read")


class Steps:
    """One batch after another, always the same; `__call__` makes as many steps as a round has."""

    def __init__(self, solver: Solver, X: np.ndarray, Y: np.ndarray, a_round: int = 1) -> None:
        self.solver, self.X, self.Y, self.a_round = solver, X, Y, a_round
        self.rows = np.arange(len(X))
        self.state = solver.init()
        self.losses: list[float] = []

    def __call__(self) -> None:
        for _ in range(self.a_round):
            loss = self.solver.step(self.state, Batch(self.X, self.Y, self.rows))
            self.losses.append(float(loss[0].sum()))

    def check(self, what: str) -> None:
        """Check that the loss has fallen, and that nothing has overflowed."""
        alpha = self.solver.weights(self.state)
        is_right = np.isfinite(alpha).all() and self.losses[-1] < self.losses[0]
        check(bool(is_right), what)


def operator(backend: Backend, Z: np.ndarray) -> KernelOperator:
    """Return the kernel operator of a run with the centers Z (p, d)."""
    return KernelOperator(sk.Laplace(bandwidth(Z.shape[1])), backend, shift=Z.mean(axis=0))


def _default_solver(
    backend: Backend, Z: np.ndarray, pre: BlockPreconditioner, max_batch: int
) -> Solver:
    op = operator(backend, Z)
    return BlockSolver(
        op, op.points(Z, right=True), pre, n_outputs=C, max_batch=max_batch, seed=SEED
    )


def _block(repeats: int, p: int, d: int, sgemm: Sgemm) -> list[Figure]:
    sizes = planned(p, d).sizes
    m = sizes.batch_size
    Z, X = points(p, d, 1), points(m, d, 2)
    Y, pre = one_hot(X), _made_up(p, sizes.block_size)
    with ExitStack() as stack:
        backends = {name: stack.enter_context(b) for name, b in our_backends().items()}
        calls: dict[str, Callable[[], object]] = {
            name: Steps(_default_solver(b, Z, pre, m), X, Y) for name, b in backends.items()
        }
        torch = installed("torch")
        if torch is not None:
            calls["PyTorch"] = TorchSteps(torch, Z, pre, X, Y)
        times = in_turns({**calls, "SGEMM": sgemm}, repeats)
        for name in backends:
            calls[name].check(f"the step at p={p} by {name}")
            if torch is not None:
                _check_equal(calls[name], calls["PyTorch"])
    floor = sgemm.speed(times["SGEMM"]) / (2 * p * d)
    case = f"p={p}, d={d}, m={m}, b={sizes.block_size}"
    figures = [figure(case, v, "samples/s", rates(m, times[v]), floor=floor) for v in calls]
    compare(figures, backends)
    return figures


def _made_up(p: int, block_size: int) -> BlockPreconditioner:
    """Lower triangular factors near the identity, with steps short enough for the loss to fall."""
    rng, blocks = np.random.default_rng(4), block_slices(p, block_size)
    H = []
    for block in blocks:
        b = block.stop - block.start
        factor = np.tril(rng.standard_normal((b, b), dtype=np.float32))
        factor *= np.float32(0.3 / np.sqrt(b))
        factor[np.arange(b), np.arange(b)] = 1
        H.append(factor)
    # K^T K / m has entries below 1, so p bounds its eigenvalues, and 4 p with H around it.
    rules, none = [StepRule(4 * p, 4 * p) for _ in blocks], [0.0 for _ in blocks]
    return BlockPreconditioner(blocks, H, rules, 0.0, none)


class TorchSteps:
    """The step with PyTorch, with the same order of the blocks."""

    def __init__(
        self, torch: Any, Z: np.ndarray, pre: BlockPreconditioner, X: np.ndarray, Y: np.ndarray
    ) -> None:
        self.X, self.Y, self.n_blocks, self.done = X, Y, len(pre.blocks), 0
        self.inner = TorchBlockStep(
            torch, Z, pre.blocks, pre.H, [rule.eta(len(X)) for rule in pre.rules],
            bandwidth=bandwidth(Z.shape[1]), max_batch=len(X), n_outputs=C,
            average_k=0.5 if self.n_blocks <= 4 else 1,
        )  # fmt: skip

    def __call__(self) -> None:
        rng = np.random.default_rng([SEED, ORDER_STAGE, self.done])
        self.inner.step(self.X, self.Y, rng.permutation(self.n_blocks).tolist())
        self.done += 1


def _check_equal(ours: Steps, torchs: TorchSteps) -> None:
    """Both made the same steps: the same average, to float32."""
    mine, theirs = ours.state.average, torchs.inner.average.numpy()
    error = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
    check(bool(error < 1e-3), f"the step, next to PyTorch's (off by {error:.1e})")


def _eigenpro(repeats: int, p: int, d: int, sgemm: Sgemm) -> list[Figure]:
    Z = points(p, d, 1)
    found = []
    for name in ("eigenpro4", "eigenpro3"):
        sizes = planned(p, d, name).sizes
        m, period = sizes.batch_size, sizes.period
        X = points(m, d, 2)
        Y = one_hot(X)
        with ExitStack() as stack:
            backends = {v: stack.enter_context(b) for v, b in our_backends().items()}
            calls = {
                v: Steps(_eigenpro_solver(b, Z, sizes), X, Y, period) for v, b in backends.items()
            }
            times = in_turns({**calls, "SGEMM": sgemm}, repeats)
            for steps in calls.values():
                steps.check(f"{name} at p={p}")
        floor = sgemm.speed(times["SGEMM"]) / (2 * p * d)
        case = f"{name}, p={p}, d={d}, m={m}, period={period}"
        found += [
            figure(case, v, "samples/s", rates(period * m, times[v]), floor=floor) for v in calls
        ]
    return found


def _eigenpro_solver(backend: Backend, Z: np.ndarray, sizes: ProjectedSizes) -> Solver:
    """Return an EigenPro solver with an orthonormal E, little damping and a factor near the
    identity."""
    op = operator(backend, Z)
    rng, s, p = np.random.default_rng(5), sizes.n_sample, len(Z)
    E = np.linalg.qr(rng.standard_normal((s, sizes.level), dtype=np.float32))[0]
    D = np.full(sizes.level, 1e-3 / s, np.float32)
    X_s = op.points(points(s, Z.shape[1], 3), right=True)
    pre = LowRankPreconditioner(X_s, E, D, StepRule(4 * p, 4 * p))
    L = np.eye(p, dtype=np.float32)
    L += np.tril(np.full((p, p), 1e-3 / p, np.float32), -1)
    return DelayedProjectionSolver(
        op, op.points(Z, right=True), pre,
        ExactProjection(L, Partition([slice(0, p)], RankGrid(), SINGLE, backend)),
        columns=op.columns(Z.shape[1]), period=sizes.period, n_outputs=C,
        max_batch=sizes.batch_size,
    )  # fmt: skip
