"""Plain SGD and linear EigenPro on explicit features, f(x) = phi(x)^T w.

phi is either random Fourier features, which the operator evaluates in place of a kernel, or
Nystrom features, phi(x) = L^-1 k(Z, x) with K(Z, Z) = L L^T, for which |w| is the RKHS norm of f.
The solver stores alpha = L^-T w, so that f = K(., Z) alpha is evaluated like any other model; a
step w -= u becomes alpha -= L^-T u, and the gradient in w is L^-1 times the gradient in alpha. So
all methods on features take the step of `solver.block_step` with a single block,

    alpha -= eta H^T P H (K(Z, X) r / m),      H = L^-1 (Nystrom), I (Fourier),

where P = I for SGD, and for linear EigenPro (EP1 eq. 7, which has no ridge)

    P = I - sum_i (1 - tau (lam_{q+1} + ridge) / (lam_i + ridge)) e_i e_i^T

in the top eigendirections e_i of the covariance of the features of the s rows of the setup sample,
Phi^T Phi / s. They are computed from the eigenvectors v_i of Phi Phi^T / s, (s, s), which has the
same eigenvalues: e_i = Phi^T v_i / sqrt(s lam_i). The paper takes tau = 1/4 with features. P
contains the ridge, because with nearly equal centers lam_{q+1} is far below the ridge, and
directions that are damped to so small an eigenvalue would never be learned.

The third method on features, `solver.block`, has H from the whole covariance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from streamkern.backend.base import Array, tiles
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.solver import SolverConfig
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import Buffers, MemoryNeeds, count_products
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.solver.base import Solver
from streamkern.solver.block_step import BlockSolver
from streamkern.solver.in_place import (
    PAPER_LEVEL,
    PAPER_N_NYSTROM,
    SGD,
    EigenPro1,
    probe_rows,
    small_batches,
)
from streamkern.solver.low_rank import LowRank, LowRankSizes, low_rank_sizes
from streamkern.solver.method import Report, Samples, Setup, Work
from streamkern.solver.precondition.block import BlockPreconditioner
from streamkern.solver.precondition.low_rank import eigen_flops, rule_of_gram, sample_eigenpairs
from streamkern.solver.precondition.norm import WeightNorm, check_overlap, noise_floor, weight_norm
from streamkern.solver.precondition.step_rule import StepRule, rules_from_meta

TAU = 0.25
"""Default of tau, which EigenPro 1.0 takes for explicit features (Ma and Belkin 2017)."""
FEATURE_COLUMNS = 4096
"""Number of features that are evaluated at once, if they are independent of each other."""
FEATURE_PROBE_STAGE = 5
"""Number of the stage in the seed of the start vector for lambda_1."""


def build_linear(
    op: KernelOperator, Z: Points, S: Points | None, probe: Points, *, level: int = 0,
    tau: float = TAU, ridge: float = 0.0, seed: int = 0, root: Array | None = None,
) -> BlockPreconditioner:  # fmt: skip
    """Return the preconditioner H^T P H, as a single block, with its step rule.

    Z : points that define the p features.
    S : setup sample, s rows prepared as the left operand of a product (`Points`); None for level 0.
    probe : h rows prepared likewise, on which the step rule is measured; none of them is in S.
    level : number of directions that EigenPro damps.
    tau, ridge : see the module docstring.
    seed : seed of the start vectors of the eigensolvers.
    root : (h,) square roots of the sample weights of the probe.

    Cost 4 s p (d + s) + 2 h p (d + h) FLOPs, and for Nystrom features p^3 + 2 (s + h) p^2 more.
    Memory besides the result 3 s^2 + h^2 + 2 s FEATURE_COLUMNS elements, or with Nystrom features
    3 s^2 + h^2 + 2 (p + s) p.
    """
    norm = weight_norm(op, Z, noise_floor(op, len(Z)) if ridge else 0.0)
    damped_directions = None if S is None else _directions(op, norm, Z, S, level, tau, ridge, seed)
    rule = _measure(op, norm, Z, probe, damped_directions, seed, root)
    if ridge:
        rule = rule.with_ridge(ridge)
    H = None if norm.L is None else norm.inverse(op.backend, len(Z), op.dtype)
    return BlockPreconditioner(
        [slice(0, len(Z))], [H], [rule], 0.0, [norm.jitter], damped_directions=damped_directions
    )


def _slabs(
    op: KernelOperator, norm: WeightNorm, X: Points, Z: Points
) -> Iterator[tuple[slice, Array]]:
    """Yield (columns, Phi[:, columns]) for slices of the features of X, (n, width) each.

    With Nystrom features there is only one slice, as L combines all columns.
    """
    slices = tiles(len(Z), FEATURE_COLUMNS) if norm.L is None else [slice(0, len(Z))]
    for columns in slices:
        yield columns, norm.features(op.backend, op.matrix(X, Z[columns]))


def _directions(
    op: KernelOperator, norm: WeightNorm, Z: Points, S: Points, level: int, tau: float,
    ridge: float, seed: int,
) -> tuple[Array, Array]:  # fmt: skip
    """Return E (p, q), and D = 1 - tau (lam_{q+1} + ridge) / (lam_i + ridge)."""
    xp, s = op.backend.xp, len(S)
    G = xp.zeros((s, s), op.dtype)
    for _, Phi in _slabs(op, norm, S, Z):
        op.backend.add_gram(G, xp.ascontiguousarray(Phi.T), 1 / s)
    op.backend.mirror_lower(G)
    check_overlap(op, float(G.diagonal().sum()), "covariance")
    lam, V = sample_eigenpairs(op, G, level, seed)
    del G
    tail, lam = lam[-1], lam[:-1]
    V = xp.ascontiguousarray(V[:, :-1] / xp.sqrt(s * lam))
    E = xp.empty((len(Z), len(lam)), op.dtype)
    for columns, Phi in _slabs(op, norm, S, Z):
        op.backend.matmul_t(Phi, V, E[columns])
    # The tail is an upper estimate, so it may exceed the last of the other eigenvalues.
    return E, xp.maximum(1 - tau * (tail + ridge) / (lam + ridge), 0)


def _measure(
    op: KernelOperator, norm: WeightNorm, Z: Points, probe: Points,
    damped_directions: tuple[Array, Array] | None, seed: int, root: Array | None,
) -> StepRule:  # fmt: skip
    """Return the step rule: ell = max phi^T P phi, and lambda_1 of Phi P Phi^T / h on the probe."""
    xp, h = op.backend.xp, len(probe)
    G = xp.zeros((h, h), op.dtype)
    # Phi P Phi^T = Phi Phi^T - (Phi E) D (Phi E)^T.
    Phi_E_and_D = None
    if damped_directions is not None:
        E, D = damped_directions
        Phi_E = xp.zeros((h, len(D)), op.dtype)
        Phi_E_and_D = Phi_E, D
    for columns, Phi in _slabs(op, norm, probe, Z):
        op.backend.add_gram(G, xp.ascontiguousarray(Phi.T), 1.0)
        if Phi_E_and_D is not None:
            Phi_E += op.backend.matmul(Phi, E[columns], xp.empty_like(Phi_E))
    op.backend.mirror_lower(G)
    return rule_of_gram(op, G, Phi_E_and_D, root, [seed, FEATURE_PROBE_STAGE], check=True)


class LinearSolver(BlockSolver):
    """Steps on features, with the running average of the solvers that converge slowly."""

    remedy = f"{mention('solver.ridge')} or a larger bandwidth"

    def __init__(self, *arguments: Any, **solver_arguments: Any) -> None:
        super().__init__(*arguments, **solver_arguments)
        self.average_k = Solver.average_k


class LinearEigenPro(LowRank[LowRankSizes]):
    """EigenPro 1.0 on features: its settings, sizes and costs. With level 0 it is plain SGD."""

    name = EigenPro1.name
    sizes = LowRankSizes
    features = ("nystrom", "fourier")

    def _batches(self, problem: ProblemShape) -> list[int]:
        return small_batches(problem)

    def _sample_sizes(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        """Return the rows of the sample and of the probe, and the level.

        The default level is that of the paper, but at most an eighth of the p features: if nearly
        all directions are damped, the steps fit the noise.
        """
        if options.level != "auto" and options.level >= problem.p:
            raise ConfigError(
                f"{mention('level', options.level)} must lie between 1 and the number of features "
                f"- 1 = {problem.p - 1}",
                "lower it",
            )
        level = max(1, min(PAPER_LEVEL, problem.p // 8))
        return low_rank_sizes(problem, options, PAPER_N_NYSTROM, level)

    def op_counts(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of the setup and of the training.

        The setup multiplies features of the sample and of the probe, and computes L^-1 for Nystrom
        features.
        """
        n, p, q = problem.n_rows * problem.epochs, problem.p, sizes.level
        s = sizes.n_sample if q else 0
        h = sizes.n_probe
        setup = OpCounts(
            kept=p * (2 * s + h), products=p * (3 * s * s + h * h),
            eigen=eigen_flops(s, q + 1) if q else 0,
        )  # fmt: skip
        columns = 2 * q  # of the matrices that a step reads: E twice
        if problem.features == "nystrom":
            setup += OpCounts(kept=p * p, factors=2 * p**3 / 3, products=p * p * (s + h))
            columns += p  # H twice, of which each product reads a triangle: p / 2 columns
        steps = -(-n // sizes.batch_size)
        return setup, OpCounts(kept=p * n, swept=p * n + p * columns * steps)

    def needs(self, problem: ProblemShape, sizes: LowRankSizes) -> MemoryNeeds:
        """Return the memory needs; the setup has H and the damped directions."""
        rows = max(sizes.batch_size, sizes.n_probe)
        H_columns = problem.p if problem.features == "nystrom" else 0
        setup = problem.p * (H_columns + sizes.level)
        return MemoryNeeds(rows, problem.c, setup=setup)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers of `build_linear` and of the steps on its result."""
        add, p, item = buffers.add, problem.p, problem.itemsize
        s, h, q = sizes.n_sample, sizes.n_probe, sizes.level
        is_nystrom = problem.features == "nystrom"
        add("setup", "sample and probe", s + h, problem.prepared_row_bytes)
        # Two copies: one is transposed for the product with itself.
        columns = p if is_nystrom else min(p, FEATURE_COLUMNS)
        add("setup", "features of the sample", 2 * max(s, h), columns, itemsize=item)
        add("setup", "products of features", 3 * s * s + h * h, itemsize=item)
        product_rows = count_products(buffers, problem, max(s, h, p if is_nystrom else 0))
        if is_nystrom:
            add("always", "inverse L^-1 of the factor of K(Z, Z)", p, p, itemsize=item)
            add("setup", "factor L of K(Z, Z)", p + product_rows, p, itemsize=item)
        if q:
            add("always", "eigenvectors", p, q, itemsize=item)
            add("train", "damped part of a step", 2 * p, problem.c, itemsize=item)
        add("train", "features of a batch", sizes.batch_size, p, itemsize=item)

    def compute(self, work: Work[LowRankSizes], samples: Samples, report: Report) -> Setup:
        """Compute H, the damped directions and the step rule."""
        op, options, level = work.op, work.options, work.sizes.level
        raw_sample, raw_probe = samples()
        root = raw_probe.root
        S, probe = (op.points(rows.X, left=True) for rows in (raw_sample, raw_probe))
        del raw_sample, raw_probe
        op.backend.release()
        pre = build_linear(
            op, work.Z, S if level else None, probe, level=level,
            tau=TAU if options.damping == "auto" else options.damping, ridge=options.fixed_ridge,
            seed=work.seed, root=root,
        )  # fmt: skip
        arrays = {} if pre.H[0] is None else {"H.0": pre.H[0]}
        if pre.damped_directions is not None:
            arrays["E"], arrays["D"] = pre.damped_directions
            level = len(pre.damped_directions[1])
        (rule,) = pre.rules
        report("linear", asdict(rule) | {"jitter": pre.jitter, "level": level})
        meta = {"rules": [asdict(rule)], "jitter": pre.jitter, "level": level}
        return Setup(arrays, meta | {"batch_size": work.sizes.batch_size})

    def assemble(self, work: Work[LowRankSizes], setup: Setup) -> Solver:
        """Return the block solver on one block."""
        arrays, meta, options, problem = setup.arrays, setup.meta, work.options, work.problem
        pre = BlockPreconditioner(
            [slice(0, len(work.Z))], [arrays.get("H.0")],
            rules_from_meta(meta["rules"], options.step_scale), 0.0, [meta["jitter"]],
            damped_directions=(arrays["E"], arrays["D"]) if "E" in arrays else None,
        )  # fmt: skip
        return LinearSolver(
            work.op, work.Z, pre,
            seed=work.seed, ridge=options.fixed_ridge,
            cycled=problem.n_rows if problem.repeats else None, **work.solver_arguments(setup),
        )  # fmt: skip


class LinearSGD(LinearEigenPro):
    """Plain SGD on features: its settings, sizes and costs. The setup needs only a probe."""

    name = SGD.name

    def _sample_sizes(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        return 0, probe_rows(problem), 0
