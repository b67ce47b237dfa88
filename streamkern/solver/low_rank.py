"""Base class of the EigenPro methods, which damp the top eigendirections of the setup sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from streamkern.backend.base import Array
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.config.solver import SolverConfig, number_or_none
from streamkern.planning.memory import Buffers
from streamkern.planning.op_counts import OpCounts
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import (
    MAX_PROBE,
    MIN_PROBE,
    Sizes,
    batch_candidates,
    check_between,
    sample_sizes,
)
from streamkern.solver.method import Method, Report, Samples, Setup, Work
from streamkern.solver.precondition.low_rank import (
    LowRankPreconditioner,
    build_low_rank,
    eigen_flops,
)
from streamkern.solver.precondition.step_rule import StepRule, rules_from_meta

MANY_CENTERS = 20_000
"""Number of centers above which the setup sample is large."""
N_NYSTROM, LARGE_N_NYSTROM, ROWS_PER_DIRECTION = 2000, 5000, 20
"""Default number of rows in the setup sample, and in a large one; and rows per damped direction."""
DEFAULT_PROBE = 4 * MIN_PROBE
"""Default number of rows in the probe, on which the step rule is measured."""


@dataclass(frozen=True)
class LowRankSizes(Sizes):
    """Sizes of the EigenPro methods.

    level : number of damped directions.
    """

    level: int


_S = TypeVar("_S", bound=LowRankSizes)


class LowRank(Method[_S]):
    """Base class of the EigenPro methods."""

    def check(self, problem: ProblemShape, options: SolverConfig) -> None:
        """Raise ConfigError as `Method.check`, and if the size of the sample is out of range."""
        check_between("n_nystrom", options.n_nystrom, 2, problem.n_rows, "n_rows=")
        super().check(problem, options)

    def _sample_sizes(self, problem: ProblemShape, options: SolverConfig) -> tuple[int, int, int]:
        """Return the rows of the setup sample and of the probe, and the level of EigenPro."""
        default = N_NYSTROM if problem.p <= MANY_CENTERS else LARGE_N_NYSTROM
        return low_rank_sizes(problem, options, default)

    def _batches(self, problem: ProblemShape) -> list[int]:
        """Return candidate batch sizes, best first."""
        return batch_candidates(problem)

    def candidates(self, problem: ProblemShape, options: SolverConfig) -> Sequence[_S]:
        """Return candidate sizes, best first: one size of the sample, and decreasing batches."""
        s, h, level = self._sample_sizes(problem, options)
        return self._sizes_for_batches(self._batches(problem), s, h, level=level)

    def setup_op_counts(self, sizes: _S) -> OpCounts:
        """Return the operations of the sample's eigensystem and of the step rule on the probe."""
        s, h, q = sizes.n_sample, sizes.n_probe, sizes.level
        measured = OpCounts(kept=s * s + h * (s + h), products=2 * h * q * (s + h))
        return measured + OpCounts(eigen=eigen_flops(s, q + 1))

    def correction(self, sizes: _S) -> OpCounts:
        """Return the operations of the correction, per row: K(X, X_s), and a share of reading E."""
        s = sizes.n_sample
        return OpCounts(entries=s, swept=2 * s * sizes.level / sizes.batch_size)

    def add_buffers(self, buffers: Buffers, problem: ProblemShape, sizes: _S) -> None:
        """Add the buffers of the sample, its eigensystem and the probe."""
        s = sizes.n_sample
        buffers.add("setup", "K(X_s, X_s) and workspace", 3 * s, s, itemsize=problem.itemsize)
        add_probe(buffers, problem, sizes)


def add_probe(buffers: Buffers, problem: ProblemShape, sizes: Sizes) -> None:
    """Add the buffers of the step rule: the probe, and its kernel matrix."""
    h = sizes.n_probe
    row_bytes = problem.prepared_row_bytes + h * problem.itemsize
    buffers.add("setup", "probe, K(probe, probe)", h, row_bytes)


def sample_bytes(problem: ProblemShape, sizes: LowRankSizes) -> int:
    """Return the bytes of the setup sample's rows and eigenvectors."""
    features = problem.d + sizes.level
    return sizes.n_sample * (problem.prepared_row_bytes + features * problem.itemsize)


def low_rank_sizes(
    problem: ProblemShape, options: SolverConfig, n_nystrom: int, level: int | None = None
) -> tuple[int, int, int]:
    """Return the rows of the sample and of the probe, and the number of damped directions.

    n_nystrom, level : default rows of the setup sample, and default of the damped directions; level
        None: one for every `ROWS_PER_DIRECTION` rows.

    Raises ConfigError if the sample has fewer than two rows, or as many damped directions as rows.
    """
    s, h = sample_sizes(
        problem.n_rows, number_or_none(options.n_nystrom) or n_nystrom, DEFAULT_PROBE
    )
    if options.n_nystrom != "auto":
        s, n_others = options.n_nystrom, problem.n_rows - options.n_nystrom
        # The probe has only rows outside the sample, unless nearly all rows are in the sample: then
        # it has rows of the whole stream.
        h = min(h, n_others) if n_others >= MIN_PROBE // 2 else min(problem.n_rows, MAX_PROBE)
    if s < 2:
        raise ConfigError(
            f"{mention('n_nystrom', s)} must lie between 2 and n_rows={problem.n_rows}",
            "use more training rows",
        )
    default_level = max(1, min(level or s // ROWS_PER_DIRECTION, s - 1))
    level = number_or_none(options.level) or default_level
    if level >= s:
        raise ConfigError(
            f"{mention('level', level)} must lie between 1 and n_nystrom - 1 = {s - 1}", "lower it"
        )
    return s, h, level


def compute_preconditioner(
    work: Work[_S], samples: Samples
) -> tuple[LowRankPreconditioner, dict[str, Array]]:
    """Return the preconditioner of EigenPro 2 to 4, and its arrays for the setup."""
    op, (sample, probe) = work.op, samples()
    X_s, probe_points = (op.points(rows.X, right=True) for rows in (sample, probe))
    P = build_low_rank(
        op, X_s, probe_points, level=work.sizes.level, seed=work.seed, sample_root=sample.root,
        root=probe.root,
    )  # fmt: skip
    # A view of the sample would keep the memory of the probe allocated.
    return P, {"sample": sample.X.copy(), "E": P.E, "D": P.D}


def load_preconditioner(work: Work[_S], setup: Setup) -> LowRankPreconditioner:
    """Return the preconditioner of a setup."""
    arrays = setup.arrays
    X_s = work.op.points(arrays["sample"], right=True)
    (rule,) = rules_from_meta(setup.meta["rules"], work.options.step_scale)
    return LowRankPreconditioner(X_s, arrays["E"], arrays["D"], rule)


def lower_batch_size(work: Work[_S], rule: StepRule) -> int:
    """Return the planned batch size, or the critical batch if that is smaller.

    Up to the critical batch, the step grows in proportion to the batch; beyond it, hardly.
    """
    planned = work.sizes.batch_size
    batch = int(max(1, min(planned, rule.critical_batch)))
    if batch < planned == work.problem.batch_size:
        warn(
            f"{mention('batch_size', planned)} is lowered to {batch}: with these data, a larger "
            f"batch does not allow larger steps of {mention('solver=')}{work.sizes.solver!r}"
        )
    return batch


def report_setup(P: LowRankPreconditioner, report: Report, **sizes: int) -> dict[str, Any]:
    """Report the results of the setup to the log, and return them as `Setup.meta`."""
    rule, sizes = P.rule, {"level": int(P.E.shape[1]), **sizes}
    report("low_rank", {"leverage": rule.leverage, "lambda_1": rule.lambda_1, **sizes})
    return {"rules": [asdict(rule)], **sizes}
