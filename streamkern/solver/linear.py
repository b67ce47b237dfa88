"""Plain SGD and EigenPro on explicit features: see `precondition.linear`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.config.solver import SolverConfig
from streamkern.planning.effort import OpCounts
from streamkern.planning.memory import Buffers, MemoryNeeds, count_products
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import LOADERS
from streamkern.solver.base import Solver
from streamkern.solver.block_step import BlockSolver
from streamkern.solver.eigenpro_in_place import PAPER_LEVEL, PAPER_N_NYSTROM, EigenPro1
from streamkern.solver.low_rank import LowRank, LowRankSizes, sampled
from streamkern.solver.method import Report, Samples, Setup, Work
from streamkern.solver.precondition import eigen
from streamkern.solver.precondition.block import BlockPreconditioner
from streamkern.solver.precondition.linear import FEATURE_COLUMNS, TAU, build_linear
from streamkern.solver.precondition.step_rule import saved_rules
from streamkern.solver.sgd import SGD, probe_rows, small_batches


class LinearEigenPro(LowRank[LowRankSizes]):
    """EigenPro 1.0 on features: its settings, sizes and costs. level = 0 is plain SGD."""

    name = EigenPro1.name
    sizes = LowRankSizes
    features = ("nystrom", "fourier")

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[LowRankSizes]:
        """Return candidate sizes, best first: the paper's sample, and smaller batches in turn."""
        s, h, level = self._sampled(problem, options)
        return [
            LowRankSizes(self.name, m, s, h, *loader, level=level)
            for m in small_batches(problem)
            for loader in LOADERS
        ]

    def _sampled(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        """Return the rows of the sample and of the probe, and the level.

        The level is the paper's, but at most a fraction of the p features: if nearly all directions
        are damped, steps fit the noise (p = 160, no ridge: a test error of 55 with level 159
        instead of 0.025 with 20, relative to f = 0).
        """
        if options.level != "auto" and options.level >= problem.p:
            raise ConfigError(
                f"level={options.level} must lie between 1 and the number of features - 1 = "
                f"{problem.p - 1}; lower it"
            )
        level = max(1, min(PAPER_LEVEL, problem.p // 8))
        return sampled(problem, options, PAPER_N_NYSTROM, level)

    def effort(self, problem: ProblemShape, sizes: LowRankSizes) -> tuple[OpCounts, OpCounts]:
        """Return the operations of setup and of training.

        Setup has products of features of the sample and of the probe, and L^-1 if there is one.
        """
        n, p, q = problem.n_rows * problem.epochs, problem.p, sizes.level
        s, h = sizes.n_sample if q else 0, sizes.n_probe
        before = OpCounts(
            kept=p * (2 * s + h), products=p * (3 * s * s + h * h),
            eigen=eigen.flops(s, q + 1) if q else 0,
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
        return MemoryNeeds(not problem.ridge, rows, problem.c, setup=saved)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: LowRankSizes) -> None:
        """Add the buffers of `precondition.linear.build_linear` and of the steps on its result."""
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
            add("always", "L^-1", p, p, itemsize=item)
            add("setup", "L", p + solving, p, itemsize=item)
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

    def assemble(
        self, work: Work[LowRankSizes], setup: Setup,
        sample_rows: npt.NDArray[np.int64] | None = None,
    ) -> Solver:  # fmt: skip
        """Return the block solver on one block."""
        arrays, meta, options, problem = setup.arrays, setup.meta, work.options, work.problem
        pre = BlockPreconditioner(
            [slice(0, len(work.Z))], [arrays.get("H.0")],
            saved_rules(meta["rules"], options.step_scale), 0.0, [meta["jitter"]],
            damped=(arrays["E"], arrays["D"]) if "E" in arrays else None,
        )  # fmt: skip
        return BlockSolver(
            work.op, work.Z if options.fixed_ridge else work.Z.columns(), pre,
            remedy="solver.ridge or a larger bandwidth", average_k=Solver.average_k,
            max_batch=meta["batch_size"], seed=work.seed, ridge=options.fixed_ridge,
            cycled=problem.n_rows if problem.repeats else None, **work.shared,
        )  # fmt: skip


class LinearSGD(LinearEigenPro):
    """Plain SGD on features: its settings, sizes and costs. Setup needs only a probe."""

    name = SGD.name

    def _sampled(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        return 0, probe_rows(problem), 0
