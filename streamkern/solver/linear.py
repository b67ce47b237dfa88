"""Plain SGD and linear EigenPro on explicit features, f(x) = phi(x)^T w.

phi is either random Fourier features, which the operator evaluates in place of a kernel, or
Nystrom's, phi(x) = L^-1 k(Z, x) with K(Z, Z) = L L^T, for which |w| is the RKHS norm of f. Weights
are kept as alpha = L^-T w, so that f = K(., Z) alpha is evaluated like any other model; a step
w -= u becomes alpha -= L^-T u, and the gradient in w is L^-1 times that in alpha. So all methods on
features are one, the step of `solver.block_step` with a single block,

    alpha -= eta H^T P H (K(Z, X) r / m),      H = L^-1 (Nystrom), I (Fourier),

where P = I for SGD, and for linear EigenPro (EP1 eq. 7, which has no ridge)

    P = I - sum_i (1 - tau (lam_{q+1} + ridge) / (lam_i + ridge)) e_i e_i^T

in the top eigendirections of the covariance of the features of a sample, Phi^T Phi / s. They come
from Phi Phi^T / s, (s, s), which has the same eigenvalues: e_i = Phi^T v_i / sqrt(s lam_i). The
paper takes tau = 1/4 with features. The ridge is in P because P has to level it as well: with
nearly equal centers lam_{q+1} is far below it, and directions damped that far never move.

`solver.block_step` itself is the third method: H from the whole covariance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

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
from streamkern.solver.low_rank import LowRank, LowRankSizes, sampled
from streamkern.solver.method import Report, Samples, Setup, Work
from streamkern.solver.precondition.block import BlockPreconditioner
from streamkern.solver.precondition.low_rank import eigen_flops, rule_of_gram, sample_eigenpairs
from streamkern.solver.precondition.norm import WeightNorm, check_overlap, noise_floor, weight_norm
from streamkern.solver.precondition.step_rule import StepRule, saved_rules

TAU = 0.25
FEATURE_COLUMNS = 4096
"""Number of features that are evaluated at once, if they are independent of each other."""


def build_linear(
    op: KernelOperator, Z: Points, S: Points | None, probe: Points, *, level: int = 0,
    tau: float = TAU, ridge: float = 0.0, seed: int = 0, root: Array | None = None,
) -> BlockPreconditioner:  # fmt: skip
    """Return one block with the map H^T P H, and its step rule, measured on `probe`.

    Z : points of the features, p.
    S, probe : left points, s and h of them, without a row in common; S only for level >= 1.
    level : number of directions that EigenPro damps.
    root : (h,) square roots of the sample weights of the probe.

    Cost 4 s p (d + s) + 2 h p (d + h) FLOPs, for Nystrom's features p^3 + 2 (s + h) p^2 more;
    memory besides the result 3 s^2 + h^2 + 2 s FEATURE_COLUMNS elements; 2 (p + s) p for Nystrom's.
    """
    norm = weight_norm(op, Z, noise_floor(op, len(Z)) if ridge else 0.0)
    damped = None if S is None else _directions(op, norm, Z, S, level, tau, ridge, seed)
    rule = _measure(op, norm, Z, probe, damped, seed, root)
    if ridge:  # P <= I, so that a ridge of unit metric adds no more than itself
        lambda_1 = rule.lambda_1 + ridge
        rule = StepRule(rule.leverage + lambda_1, lambda_1)
    H = None if norm.L is None else norm.inverse(op.backend, len(Z), op.dtype)
    return BlockPreconditioner([slice(0, len(Z))], [H], [rule], 0.0, [norm.jitter], damped=damped)


def _slabs(
    op: KernelOperator, norm: WeightNorm, X: Points, Z: Points
) -> Iterator[tuple[slice, Array]]:
    """Yield columns of Phi, (n, width) at a time; all at once if L couples them."""
    for columns in tiles(len(Z), FEATURE_COLUMNS) if norm.L is None else [slice(0, len(Z))]:
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
    # The tail is an upper estimate, so the last of the others may seem to be below it.
    return E, xp.maximum(1 - tau * (tail + ridge) / (lam + ridge), 0)


def _measure(
    op: KernelOperator, norm: WeightNorm, Z: Points, probe: Points,
    damped: tuple[Array, Array] | None, seed: int, root: Array | None,
) -> StepRule:  # fmt: skip
    """Return ell = max phi^T P phi and lambda_1 of Phi P Phi^T / h on the probe."""
    xp, h = op.backend.xp, len(probe)
    G = xp.zeros((h, h), op.dtype)
    Q = None if damped is None else xp.zeros((h, len(damped[1])), op.dtype)
    for columns, Phi in _slabs(op, norm, probe, Z):
        op.backend.add_gram(G, xp.ascontiguousarray(Phi.T), 1.0)
        if damped is not None and Q is not None:
            Q += op.backend.matmul(Phi, damped[0][columns], xp.empty_like(Q))
    op.backend.mirror_lower(G)
    along = None if damped is None else (Q, damped[1])
    return rule_of_gram(op, G, along, root, [seed, 5], checked=True)


class LinearEigenPro(LowRank[LowRankSizes]):
    """EigenPro 1.0 on features: its settings, sizes and costs. level = 0 is plain SGD."""

    name = EigenPro1.name
    sizes = LowRankSizes
    features = ("nystrom", "fourier")

    def _batches(self, problem: ProblemShape) -> list[int]:
        return small_batches(problem)

    def _sampled(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        """Return the rows of the sample and of the probe, and the level.

        The level is the paper's, but at most a fraction of the p features: if nearly all directions
        are damped, steps fit the noise (p = 160, no ridge: a test error of 55 with level 159
        instead of 0.025 with 20, relative to f = 0).
        """
        if options.level != "auto" and options.level >= problem.p:
            raise ConfigError(
                f"{mention('level', options.level)} must lie between 1 and the number of features "
                f"- 1 = {problem.p - 1}",
                "lower it",
            )
        level = max(1, min(PAPER_LEVEL, problem.p // 8))
        return sampled(problem, options, PAPER_N_NYSTROM, level)

    def op_counts(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of setup and of training.

        Setup has products of features of the sample and of the probe, and L^-1 if there is one.
        """
        n, p, q = problem.n_rows * problem.epochs, problem.p, sizes.level
        s, h = sizes.n_sample if q else 0, sizes.n_probe
        before = OpCounts(
            kept=p * (2 * s + h), products=p * (3 * s * s + h * h),
            eigen=eigen_flops(s, q + 1) if q else 0,
        )  # fmt: skip
        applied = 2 * q
        if problem.features == "nystrom":
            before += OpCounts(kept=p * p, factors=2 * p**3 / 3, products=p * p * (s + h))
            applied += p
        steps = -(-n // sizes.batch_size)
        return before, OpCounts(kept=p * n, swept=p * n + p * applied * steps)

    def needs(self, problem: ProblemShape, sizes: LowRankSizes) -> MemoryNeeds:
        """Return the memory needs of the map of the features and of the damped directions."""
        rows = max(sizes.batch_size, sizes.n_probe)
        coupled = problem.p if problem.features == "nystrom" else 0
        saved = problem.p * (coupled + sizes.level)
        return MemoryNeeds(rows, problem.c, setup=saved)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers of `build_linear` and of the steps on its result."""
        add, p, item = buffers.add, problem.p, problem.itemsize
        s, h, q = sizes.n_sample, sizes.n_probe, sizes.level
        coupled = problem.features == "nystrom"
        add("setup", "sample and probe", s + h, problem.point)
        # Two copies: one is transposed for the product with itself.
        columns = p if coupled else min(p, FEATURE_COLUMNS)
        add("setup", "features of the sample", 2 * max(s, h), columns, itemsize=item)
        add("setup", "products of features", 3 * s * s + h * h, itemsize=item)
        solving = count_products(buffers, problem, max(s, h, p if coupled else 0))
        if coupled:
            add("always", "inverse L^-1 of the factor of K(Z, Z)", p, p, itemsize=item)
            add("setup", "factor L of K(Z, Z)", p + solving, p, itemsize=item)
        if q:
            add("always", "eigenvectors", p, q, itemsize=item)
            add("train", "damped part of a step", 2 * p, problem.c, itemsize=item)
        add("train", "features of a batch", sizes.batch_size, p, itemsize=item)

    def compute(self, work: Work[LowRankSizes], samples: Samples, report: Report) -> Setup:
        """Compute the map of the features, the damped directions and the step rule."""
        op, options, level = work.op, work.options, work.sizes.level
        sample, fresh = samples()
        root = fresh.root
        S, probe = (op.points(rows.X, left=True) for rows in (sample, fresh))
        del sample, fresh
        op.backend.release()
        pre = build_linear(
            op, work.Z, S if level else None, probe, level=level,
            tau=TAU if options.damping == "auto" else options.damping, ridge=options.fixed_ridge,
            seed=work.seed, root=root,
        )  # fmt: skip
        arrays = {} if pre.H[0] is None else {"H.0": pre.H[0]}
        if pre.damped is not None:
            arrays["E"], arrays["D"] = pre.damped
            level = len(pre.damped[1])
        (rule,) = pre.rules
        report("linear", asdict(rule) | {"jitter": pre.jitter, "level": level})
        meta = {"rules": [asdict(rule)], "jitter": pre.jitter, "level": level}
        return Setup(arrays, meta | {"batch_size": work.sizes.batch_size})

    def assemble(self, work: Work[LowRankSizes], setup: Setup) -> Solver:
        """Return the block solver on one block."""
        arrays, meta, options, problem = setup.arrays, setup.meta, work.options, work.problem
        pre = BlockPreconditioner(
            [slice(0, len(work.Z))], [arrays.get("H.0")],
            saved_rules(meta["rules"], options.step_scale), 0.0, [meta["jitter"]],
            damped=(arrays["E"], arrays["D"]) if "E" in arrays else None,
        )  # fmt: skip
        return BlockSolver(
            work.op, work.Z, pre,
            remedy=f"{mention('solver.ridge')} or a larger bandwidth", average_k=Solver.average_k,
            seed=work.seed, ridge=options.fixed_ridge,
            cycled=problem.n_rows if problem.repeats else None, **work.shared(setup),
        )  # fmt: skip


class LinearSGD(LinearEigenPro):
    """Plain SGD on features: its settings, sizes and costs. Setup needs only a probe."""

    name = SGD.name

    def _sampled(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        return 0, probe_rows(problem), 0
