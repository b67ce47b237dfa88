"""From plain arrays and resolved sizes to a solver, in two halves.

`compute` does the work that is done once per run: it factors, takes eigensystems and measures
steps, and returns all of it as named arrays and JSON values. `assemble` makes the solver from
those, whether they were computed a moment ago or read back from a run directory, so that a resumed
run continues with the same bits and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.sizes import INNER_NYSTROM, Sizes
from streamkern.solver.base import Solver
from streamkern.solver.block import BlockSolver
from streamkern.solver.direct import DirectSolver
from streamkern.solver.eigenpro import (
    DelayedProjectionSolver,
    EigenPro1Solver,
    EigenPro2Solver,
    SGDSolver,
)
from streamkern.solver.falkon import FalkonSolver
from streamkern.solver.precondition.block import (
    BlockPreconditioner,
    Sample,
    block_slices,
    build_block,
    build_from_centers,
)
from streamkern.solver.precondition.eigenfunctions import build_extended
from streamkern.solver.precondition.linear import TAU, build_linear
from streamkern.solver.precondition.low_rank import (
    LowRankPreconditioner,
    build_low_rank,
    measure_low_rank,
)
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.projection import ExactProjection, IterativeProjection, Projection

TOLERANCE = 1e-4
"""Of FALKON's relative residual. At 3e-4 the test error on noisy digits had the exact model's first
four digits; float32 ends at about 1e-6."""
Report = Callable[[str, dict[str, Any]], None]


class Rows(NamedTuple):
    """Transformed rows of the stream: X (n, d), targets Y (n, c), and the square roots of the
    sample weights (n,), or None. fresh : first row that is not in the other sample as well."""

    X: Array
    Y: Array
    root: Array | None = None
    fresh: int = 0


@dataclass
class Setup:
    """What is computed once: device arrays by name, and numbers that go into the log."""

    arrays: dict[str, Array]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Choices:
    """Settings of the method that are not sizes. tolerance : of FALKON; None: `TOLERANCE`.
    cycled : rows of an epoch, where every one brings the same."""

    ridge: float = 0.0
    damping: float | None = None
    tolerance: float | None = None
    average: bool = True
    step_scale: float = 1.0
    seed: int = 0
    cycled: int | None = None


def compute(
    op: KernelOperator,
    Z: Points,
    samples: Callable[[], tuple[Rows, Rows]],
    sizes: Sizes,
    choices: Choices,
    *,
    n_samples: int,
    epochs: int = 1,
    report: Report,
) -> Setup:
    """Factors, eigensystems and step rules.

    Z : points of the centers, both sides. samples : gives the sample (s rows) and the probe (h),
    transformed rows of the stream; a function, so that the raw rows can be dropped when the
    prepared ones exist. For SGD, EigenPro 1 and 2 they are rows of the training set, as are the
    centers.
    n_samples : rows the whole run will see, each of them `epochs` times.
    """
    if sizes.solver == "block":
        return _compute_block(op, Z, samples, sizes, choices, n_samples, epochs, report)
    if sizes.solver in ("direct", "falkon"):
        return _compute_from_centers(op, Z, sizes, choices, report)
    if sizes.linear:
        return _compute_linear(op, Z, samples, sizes, choices, report)
    if sizes.solver == "sgd":
        return _compute_plain(op, samples, sizes, choices, report)
    return _compute_low_rank(op, Z, samples, sizes, choices, report)


def _compute_block(
    op: KernelOperator, Z: Points, samples: Callable[[], tuple[Rows, Rows]], sizes: Sizes,
    choices: Choices, n_samples: int, epochs: int, report: Report,
) -> Setup:  # fmt: skip
    S, P = (
        Sample(op.points(rows.X, left=True), rows.Y, rows.root, rows.fresh) for rows in samples()
    )
    op.backend.release()
    pre = build_block(
        op, Z, S, P, block_size=sizes.block_size, n_samples=n_samples, epochs=epochs,
        damping=choices.damping, ridge=choices.ridge, seed=choices.seed, report=report,
    )  # fmt: skip
    return Setup(
        _factors(pre),
        {
            "rules": [asdict(rule) for rule in pre.rules],
            "mu": pre.mu,
            "jitter": pre.jitter,
            "jitters": pre.jitters,
            "start_rows": pre.start_rows,
            "batch_size": sizes.batch_size,
            "period": 1,
        },
    )


def _compute_from_centers(
    op: KernelOperator, Z: Points, sizes: Sizes, choices: Choices, report: Report
) -> Setup:
    """Without a sample of the stream."""
    meta: dict[str, Any] = {"rules": [], "batch_size": sizes.batch_size, "period": 1}
    if sizes.solver == "direct":
        return Setup({}, meta)
    pre = build_from_centers(op, Z, ridge=choices.ridge)
    report("block", {"block": 0, "blocks": 1, "mu": pre.mu, "jitter": pre.jitter})
    return Setup({"H.0": pre.H[0]}, meta | {"mu": pre.mu, "jitter": pre.jitter})


def _factors(pre: BlockPreconditioner) -> dict[str, Array]:
    arrays = {f"H.{b}": H for b, H in enumerate(pre.H) if H is not None}
    if pre.start is not None:
        arrays["start"] = pre.start
    arrays |= {f"G.{b}": G for b, G in enumerate(pre.sketches or [])}
    if pre.L is not None:
        arrays["L"] = pre.L
    return arrays if pre.damped is None else arrays | dict(zip("ED", pre.damped, strict=True))


def _compute_linear(
    op: KernelOperator, Z: Points, samples: Callable[[], tuple[Rows, Rows]], sizes: Sizes,
    choices: Choices, report: Report,
) -> Setup:  # fmt: skip
    sample, fresh = samples()
    root = fresh.root
    S, probe = (op.points(rows.X, left=True) for rows in (sample, fresh))
    del sample, fresh
    op.backend.release()
    pre = build_linear(
        op, Z, S if sizes.level else None, probe, level=sizes.level,
        tau=TAU if choices.damping is None else choices.damping, ridge=choices.ridge,
        seed=choices.seed, root=root,
    )  # fmt: skip
    level = 0 if pre.damped is None else len(pre.damped[1])
    meta = {
        "rules": [asdict(rule) for rule in pre.rules],
        "mu": 0.0,
        "jitter": pre.jitter,
        "jitters": pre.jitters,
        "start_rows": pre.start_rows,
        "level": level,
        "batch_size": sizes.batch_size,
        "period": 1,
    }
    report("linear", asdict(pre.rules[0]) | {"jitter": pre.jitter, "level": level})
    return Setup(_factors(pre), meta)


def _compute_plain(
    op: KernelOperator, samples: Callable[[], tuple[Rows, Rows]], sizes: Sizes,
    choices: Choices, report: Report,
) -> Setup:  # fmt: skip
    """The step that the kernel itself allows; a ridge adds to both terms, see `step_rule`."""
    fresh = samples()[1]
    probe = op.points(fresh.X, left=True, right=True)
    rule = measure_low_rank(op, None, probe, choices.seed, fresh.root)
    if choices.ridge:
        lambda_1 = rule.lambda_1 + choices.ridge
        rule = StepRule(rule.leverage + lambda_1, lambda_1)
    report("plain", asdict(rule) | {"batch_size": sizes.batch_size})
    return Setup({}, {"rules": [asdict(rule)], "batch_size": sizes.batch_size, "period": 1})


def _compute_low_rank(
    op: KernelOperator, Z: Points, samples: Callable[[], tuple[Rows, Rows]], sizes: Sizes,
    choices: Choices, report: Report,
) -> Setup:  # fmt: skip
    sample, probe = samples()
    X_s = op.points(sample.X, left=True, right=True)
    fresh = op.points(probe.X, left=True, right=True)
    if sizes.solver == "eigenpro1":
        tau = 1.0 if choices.damping is None else choices.damping
        P = build_extended(
            op, Z, X_s, fresh, level=sizes.level, tau=tau, seed=choices.seed, root=probe.root
        )
        arrays: dict[str, Array] = {"E": P.E, "D": P.D}
    else:
        roots = None
        if sample.root is not None and probe.root is not None:
            roots = sample.root, probe.root
        P = build_low_rank(op, X_s, fresh, level=sizes.level, seed=choices.seed, roots=roots)
        # A view of the sample would keep the probe alive, too.
        arrays = {"sample": sample.X.copy(), "E": P.E, "D": P.D}
    rule, batch = P.rule, sizes.batch_size
    meta: dict[str, Any] = {"level": int(P.E.shape[1])}
    if not sizes.in_place:
        _compute_projection(op, Z, sizes, choices, arrays, meta)
    if sizes.solver != "eigenpro1":
        # Past the critical batch a larger batch buys nothing; before it every row counts in full.
        batch = int(max(1, min(batch, rule.critical_batch)))
    period = max(1, round(sizes.period * sizes.batch_size / batch)) if sizes.period > 1 else 1
    meta |= {"rules": [asdict(rule)], "batch_size": batch, "period": period}
    report("low_rank", {"leverage": rule.leverage, "lambda_1": rule.lambda_1,
                        "level": meta["level"], "batch_size": batch, "period": period})  # fmt: skip
    return Setup(arrays, meta)


def _compute_projection(
    op: KernelOperator, Z: Points, sizes: Sizes, choices: Choices, arrays: dict[str, Array],
    meta: dict[str, Any],
) -> None:  # fmt: skip
    if sizes.projection == "exact":
        exact = ExactProjection.build(op, Z)
        arrays["projection.L"] = exact.L
        meta["jitter"] = exact.jitter
        return
    # Not resident: `assemble` evaluates K(Z, Z), here it would be dropped unused.
    inner = IterativeProjection.build(
        op, Z, level=max(1, min(INNER_NYSTROM, len(Z)) // 10), n_nystrom=INNER_NYSTROM,
        max_batch=sizes.batch_size, resident=False, seed=choices.seed,
    )  # fmt: skip
    arrays |= {"projection.E": inner.P.E, "projection.D": inner.P.D}
    meta |= {"projection_rule": asdict(inner.P.rule), "projection_batch": inner.batch}


def assemble(
    op: KernelOperator,
    Z: Points,
    setup: Setup,
    sizes: Sizes,
    choices: Choices,
    *,
    n_outputs: int,
    sample_rows: npt.NDArray[np.int64] | None = None,
) -> Solver:
    """The solver that `setup` describes. `sample_rows` : EigenPro 2's sample, as center numbers."""
    rules = [
        StepRule(rule["leverage"], rule["lambda_1"], choices.step_scale)
        for rule in setup.meta["rules"]
    ]
    shared: dict[str, Any] = {
        "n_outputs": n_outputs,
        "average": choices.average,
        "max_batch": setup.meta["batch_size"],
    }
    arrays = setup.arrays
    if sizes.solver in ("direct", "falkon"):
        if not choices.ridge:
            Z = Z.columns()
        if sizes.solver == "direct":
            return DirectSolver(
                op, Z, ridge=choices.ridge, repeats=choices.cycled is not None, **shared
            )
        return FalkonSolver(
            op, Z, arrays["H.0"], ridge=choices.ridge, jitter=setup.meta["jitter"],
            tolerance=choices.tolerance or TOLERANCE, **shared,
        )  # fmt: skip
    if sizes.solver == "block" or sizes.linear:
        blocks = block_slices(len(Z), sizes.block_size)
        H = [arrays.get(f"H.{b}") for b in range(len(blocks))]
        damped = (arrays["E"], arrays["D"]) if "E" in arrays else None
        pre = BlockPreconditioner(
            blocks, H, rules, setup.meta["mu"], setup.meta["jitters"], arrays.get("start"),
            setup.meta["start_rows"],
            [arrays[f"G.{b}"] for b in range(len(blocks))] if "G.0" in arrays else None,
            arrays.get("L"), damped,
        )  # fmt: skip
        if not choices.ridge or pre.L is not None:
            Z = Z.columns()  # the centers are columns only from here on
        return BlockSolver(
            op, Z, pre, seed=choices.seed, ridge=choices.ridge, keep=sizes.keep,
            name=sizes.solver, cycled=choices.cycled, **shared,
        )  # fmt: skip
    if sizes.solver == "sgd":
        return SGDSolver(op, Z.columns(), rules[0], ridge=choices.ridge, **shared)
    own = sizes.solver == "eigenpro1"
    X_s = Z if own else op.points(arrays["sample"], left=True, right=True)
    P = LowRankPreconditioner(X_s, arrays["E"], arrays["D"], rules[0])
    if own:
        return EigenPro1Solver(op, Z, P, **shared)
    if sizes.solver == "eigenpro2":
        assert sample_rows is not None
        return EigenPro2Solver(op, Z, P, sample=sample_rows, **shared)
    projection = _assemble_projection(op, Z, setup, sizes)
    return DelayedProjectionSolver(op, Z, P, projection, period=setup.meta["period"], **shared)


def _assemble_projection(op: KernelOperator, Z: Points, setup: Setup, sizes: Sizes) -> Projection:
    if sizes.projection == "exact":
        return ExactProjection(op, setup.arrays["projection.L"], setup.meta["jitter"])
    E, D = setup.arrays["projection.E"], setup.arrays["projection.D"]
    P = LowRankPreconditioner(Z[: len(E)], E, D, StepRule(**setup.meta["projection_rule"]))
    resident = sizes.projection == "resident"
    return IterativeProjection(op, Z, P, batch=setup.meta["projection_batch"], resident=resident)
