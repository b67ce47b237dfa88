"""Base class of the methods that damp the top eigendirections of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from streamkern.backend.base import Array
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.config.solver import SolverConfig, set_value
from streamkern.planning.memory import Buffers
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import (
    MAX_PROBE,
    MIN_PROBE,
    Sizes,
    batches,
    check_between,
    sample_sizes,
)
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.low_rank import (
    LowRankPreconditioner,
    build_low_rank,
    eigen_flops,
)
from streamkern.solver.precondition.step_rule import StepRule, saved_rules

MANY_CENTERS = 20_000
N_NYSTROM, LARGE_N_NYSTROM, LEVEL_SHARE = 2000, 5000, 20
LOW_RANK_OPTIONS = ("n_nystrom", "level")


@dataclass(frozen=True)
class LowRankSizes(Sizes):
    """Sizes of these methods.

    level : number of damped directions, of a sample of solver.n_nystrom rows.
    """

    level: int


_S = TypeVar("_S", bound=LowRankSizes)


class LowRank(Method[_S]):
    """Base class of EigenPro."""

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and if the size of the sample is out of range."""
        check_between("n_nystrom", set_value(options.n_nystrom), 2, problem.n_rows, "n_rows=")
        super().check(problem, options)

    def _sampled(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        """Return the rows of the sample and of the probe, and the number of damped directions."""
        return sampled(problem, options, default_sample(problem.p))

    def _batches(self, problem: ProblemShape) -> list[int]:
        """Return candidate batch sizes, best first."""
        return batches(problem)

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[_S]:
        """Return candidate sizes, best first: one sample size, and smaller and smaller batches."""
        s, h, level = self._sampled(problem, options)
        return self._sized(self._batches(problem), s, h, level=level)

    def setup_op_counts(self, sizes: _S) -> OpCounts:
        """Return the operations of the sample's eigensystem and of the step rule on the probe."""
        s, h, q = sizes.n_sample, sizes.n_probe, sizes.level
        measured = OpCounts(kept=s * s + h * (s + h), products=2 * h * q * (s + h))
        return measured + OpCounts(eigen=eigen_flops(s, q + 1))

    def correction(self, sizes: _S) -> OpCounts:
        """Return the operations per row: K(X, X_s), and its part of a step, E twice."""
        s = sizes.n_sample
        return OpCounts(entries=s, swept=2 * s * sizes.level / sizes.batch_size)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: _S) -> None:
        """Add the buffers of the sample, its eigensystem and the probe."""
        s, h, item = sizes.n_sample, sizes.n_probe, problem.itemsize
        buffers.add("setup", "K(X_s, X_s) and workspace", 3 * s, s, itemsize=item)
        buffers.add("setup", "probe, K(probe, probe)", h, problem.point + h * item)


def sample_bytes(problem: ProblemShape, sizes: LowRankSizes) -> int:
    """Return the bytes of the sample's rows and eigenvectors."""
    features = problem.d + sizes.level
    return sizes.n_sample * (problem.point + features * problem.itemsize)


def sampled(
    problem: ProblemShape, options: SolverConfig, n_nystrom: int, level: int | None = None
) -> tuple[int, int, int]:
    """Return the rows of the sample and of the probe, and the number of damped directions.

    n_nystrom, level : the defaults.
    """
    s, h = sample_sizes(problem.n_rows, set_value(options.n_nystrom) or n_nystrom, MIN_PROBE * 4)
    if options.n_nystrom != "auto":
        s, left = options.n_nystrom, problem.n_rows - options.n_nystrom
        # Only fresh rows, unless the sample has nearly all rows: then rows of the whole stream.
        h = min(h, left) if left >= MIN_PROBE // 2 else min(problem.n_rows, MAX_PROBE)
    if s < 2:
        raise ConfigError(
            f"{mention('n_nystrom', s)} must lie between 2 and n_rows={problem.n_rows}",
            "use more training rows",
        )
    level = set_value(options.level) or max(1, min(level or s // LEVEL_SHARE, s - 1))
    if level >= s:
        raise ConfigError(
            f"{mention('level', level)} must lie between 1 and n_nystrom - 1 = {s - 1}", "lower it"
        )
    return s, h, level


def default_sample(p: int) -> int:
    """Return the number of rows of EigenPro's sample."""
    return N_NYSTROM if p <= MANY_CENTERS else LARGE_N_NYSTROM


def build(work: Work[_S], samples: Samples) -> tuple[LowRankPreconditioner, dict[str, Array]]:
    """Return the preconditioner of EigenPro 2 to 4, and its arrays for the setup."""
    op, (sample, probe) = work.op, samples()
    X_s, fresh = (op.points(rows.X, right=True) for rows in (sample, probe))
    roots = None
    if sample.root is not None and probe.root is not None:
        roots = sample.root, probe.root
    P = build_low_rank(
        op, X_s, fresh, level=work.sizes.level, seed=work.seed, roots=roots
    )  # fmt: skip
    # A view of the sample would keep the probe alive, too.
    return P, {"sample": sample.X.copy(), "E": P.E, "D": P.D}


def rebuilt(work: Work[_S], setup: Setup) -> LowRankPreconditioner:
    """Return the preconditioner from the arrays of the setup."""
    arrays = setup.arrays
    X_s = work.op.points(arrays["sample"], right=True)
    (rule,) = saved_rules(setup.meta["rules"], work.options.step_scale)
    return LowRankPreconditioner(X_s, arrays["E"], arrays["D"], rule)


def cut(work: Work[_S], rule: StepRule) -> int:
    """Return the batch size, lowered to the critical batch.

    A larger one would have no larger step; up to it every row counts in full.
    """
    planned = work.sizes.batch_size
    batch = int(max(1, min(planned, rule.critical_batch)))
    if batch < planned == work.problem.batch_size:
        warn(
            f"{mention('batch_size', planned)} is lowered to {batch}: a larger batch buys "
            f"{mention('solver=')}{work.sizes.solver!r} no larger step here"
        )
    return batch


def summary(P: LowRankPreconditioner, report: Report, **sizes: int) -> dict[str, Any]:
    """Report the results of setup, and return them for the setup's `meta`."""
    rule, sizes = P.rule, {"level": int(P.E.shape[1]), **sizes}
    report("low_rank", {"leverage": rule.leverage, "lambda_1": rule.lambda_1, **sizes})
    return {"rules": [asdict(rule)], **sizes}
