"""EigenPro 3.0, and delayed projection (EigenPro 4).

EP3 and EP4 are one loop. A step on a fresh batch X (m, d), Y (m, c):

    g      = f(X) - Y,   f = K(., Z) alpha + K(., X_tmp) delta + K(., X_s) gamma
    X      joins the temporary centers with weights delta = -eta/m g
    gamma += eta/m E D E^T K(X_s, X) g
    h     -= eta/m K(Z, X) g                       (values of the temporary part at Z)

and every `period` steps the part outside the span of Z is projected onto it:

    alpha += proj(h + K(Z, X_s) gamma),            delta, gamma, X_tmp, h <- 0.

period = 1 is EP3 Algorithm 2; period * m close to p is EP4. K(X, Z) is evaluated once and serves
f and h; the correction is linear, so its values at Z are taken once per projection and the p x q
matrix of the papers never exists.

Differs from EP3/EP4: the step size (see `step_rule`), which the papers take from lam_{q+1},
and the running average, which helps these methods too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.backend.batch import Batch
from streamkern.basics.errors import ConfigError
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.effort import Effort
from streamkern.planning.memory import Buffers, Needs
from streamkern.planning.problem import Problem
from streamkern.planning.sizes import LOADERS, Options, batches, check_between, steps
from streamkern.solver.base import Solver, State
from streamkern.solver.low_rank import (
    MANY_CENTERS,
    OPTIONS,
    LowRank,
    LowRankSizes,
    build,
    cut,
    default_sample,
    rebuilt,
    sample_bytes,
    sampled,
    summary,
)
from streamkern.solver.method import STEPS, Report, Samples, Setup, Work
from streamkern.solver.precondition.low_rank import LowRankPreconditioner
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.solver.projection import (
    INNER_NYSTROM,
    ExactProjection,
    IterativeProjection,
    Projection,
)


class DelayedProjectionSolver(Solver):
    """EP3 (period = 1) and EP4 (period > 1).

    Parameters
    ----------
    columns : of a point, see `KernelOperator.columns`. max_batch : largest m that `step` will see.
    period : steps from one projection to the next.

    Cost per step 2 m p (d + 2 c) + 2 m s (d + 2 c) FLOPs and, for the temporary centers, on
    average m (period - 1) m (d + c) more; per projection that of `projection` plus 2 p s (d + c).
    Memory max_batch * p for K(X, Z), period * max_batch * (d + c) for the temporary centers.
    """

    growing = ("points", "norms", "delta")

    def __init__(
        self,
        op: KernelOperator,
        Z: Points,
        preconditioner: LowRankPreconditioner,
        projection: Projection,
        *,
        columns: int,
        period: int,
        max_batch: int,
        **shared: Any,
    ) -> None:
        super().__init__(op, Z, **shared)
        if period < 1:
            raise ConfigError(f"period={period} must be at least 1")
        self.P, self.projection = preconditioner, projection
        self.columns, self.period, self.max_batch = columns, period, max_batch
        xp = op.backend.xp
        self.K = xp.empty((max_batch, len(Z)), op.dtype)
        self.f, self.part = (xp.empty((max_batch, self.n_outputs), op.dtype) for _ in range(2))
        self.h = xp.empty((len(Z), self.n_outputs), op.dtype)
        self.x = op.empty_points(max_batch, Z.width, left=True, right=True)
        self.correction = xp.empty((len(preconditioner.X_s), self.n_outputs), op.dtype)

    def _pending(self) -> dict[str, Array]:
        xp, dtype, c = self.backend.xp, self.op.dtype, self.n_outputs
        # The last batch of a period is projected at once and never becomes temporary centers.
        capacity = (self.period - 1) * self.max_batch
        temporary = self.op.empty_points(capacity, self.Z.width, right=True)
        norms = {} if temporary.norms is None else {"norms": temporary.norms}
        right = temporary.right
        assert right is not None
        right[:, self.columns :] = 0
        if temporary.norms is None:
            right[:, -2] = 1
        return {
            "points": right,
            **norms,
            "delta": xp.zeros((capacity, c), dtype),
            "gamma": xp.zeros((len(self.P.X_s), c), dtype),
            "h": xp.zeros((len(self.Z), c), dtype),
        }

    def arrays(self, state: State) -> dict[str, Array]:
        """With the temporary centers in the form that every backend can go on from."""
        arrays = super().arrays(state)
        temporary = Points(None, arrays["points"], arrays.get("norms"))
        points, norms = temporary.portable(self.columns)
        return arrays | {"points": points, "norms": norms}

    def rules(self) -> list[StepRule]:
        """One."""
        return [self.P.rule]

    def _step(self, state: State, batch: Batch) -> Array:
        op, m, n, pending = self.op, len(batch.X), batch.whole, state.pending
        x = op.points(batch.X, out=self.x[:m])
        g = self._values(state, x)
        g -= batch.Y
        loss = self._measure(state, batch, g, self.part[:m])
        self._weigh(g, batch.w)
        g *= state.scale * self.P.rule.eta(n) / n
        gamma, h = pending["gamma"], pending["h"]
        gamma += self._total(self.P.correction(op, x, g, self.correction))
        h -= self._total(self.backend.matmul_t(self.K[:m], g, self.h))
        if (state.steps + 1) % self.period == 0:
            self._project(state)
        else:
            self._remember(state, x, g, n)
        return loss

    def _remember(self, state: State, x: Points, g: Array, n: int) -> None:
        """The batch as temporary centers, in the order of the ranks, on all of them."""
        new = slice(state.n_pending, state.n_pending + n)
        first = self.ranks.before(len(g))
        parts = {"points": x.right, "norms": x.norms, "delta": g}
        for name, part in parts.items():
            if part is not None:
                kept = state.pending[name][new]
                if not self.ranks.alone:
                    kept[...] = 0
                kept[first : first + len(g)] = part
                self._total(kept)
        delta = state.pending["delta"][new]
        self.backend.xp.negative(delta, out=delta)
        state.n_pending += n

    def _values(self, state: State, x: Points) -> Array:
        """f(X), all three parts; K(X, Z) stays in self.K."""
        op, m, pending = self.op, len(x), state.pending
        f = op.product(x, self.Z, state.alpha, out=self.f[:m], keep=self.K[:m])
        if state.n_pending:
            used = slice(0, state.n_pending)
            temporary = Points(None, pending["points"], pending.get("norms"))[used]
            f += op.product(x, temporary, pending["delta"][used], out=self.part[:m])
            f += op.product(x, self.P.X_s, pending["gamma"], out=self.part[:m])
        return f

    def _project(self, state: State) -> None:
        h, gamma = state.pending["h"], state.pending["gamma"]
        h += self.op.product(self.Z, self.P.X_s, gamma, out=self.h)
        state.alpha += self._of_first(self.projection.solve(h))
        h[...] = 0
        gamma[...] = 0
        state.n_pending = 0
        self._average(state)

    def finish(self, state: State) -> None:
        """Project what the last, incomplete period left."""
        if state.n_pending:
            self._project(state)


@dataclass(frozen=True)
class ProjectedSizes(LowRankSizes):
    """period : steps from one projection to the next. projection : see `projection`. Batch and
    period are upper bounds until setup has measured the critical batch."""

    period: int
    projection: str


class EigenPro3(LowRank[ProjectedSizes]):
    """The method above with a projection after every step, and what it takes."""

    name = "eigenpro3"
    over_ranks = True
    options = (*OPTIONS, "period", "projection", *STEPS, "warm_start")
    sizes = ProjectedSizes

    def check_options(self, options: Options) -> None:
        """It knows one period."""
        super().check_options(options)
        if options.period not in (None, 1):
            raise ConfigError(
                f'solver.period={options.period} must be 1 with solver.name="{self.name}", which '
                'projects after every step; set name = "eigenpro4" to delay the projection'
            )

    def check(self, problem: Problem, options: Options) -> None:
        """With the period."""
        super().check(problem, options)
        total = steps(problem, options)
        check_between("period", options.period, 1, total, "the steps of the run, ")

    def _period(self, problem: Problem, options: Options, m: int) -> int:
        return 1

    def candidates(self, problem: Problem, options: Options) -> Sequence[ProjectedSizes]:
        """A projection that needs little memory is the last resort."""
        s, h, level = sampled(problem, options, default_sample(problem.p))
        best = "exact" if problem.p <= MANY_CENTERS else "resident"
        projections = [best, "inexact"] if options.projection is None else [options.projection]
        return [
            ProjectedSizes(
                self.name, m, s, h, *loader, level=level,
                period=self._period(problem, options, m), projection=projection,
            )
            for projection in projections
            for m in batches(problem, options)
            for loader in LOADERS
        ]  # fmt: skip

    def effort(self, problem: Problem, sizes: ProjectedSizes) -> tuple[Effort, Effort]:
        """An eigensystem and the factor of K(Z, Z); per row K(X, Z), twice K(X, X_s) and half a
        period of temporary centers; per period a projection."""
        n, p, m = problem.n_rows * problem.epochs, problem.p, sizes.batch_size
        s, before = sizes.n_sample, self.setup_effort(sizes)
        tail = s if sizes.period > 1 else 0
        row = self.correction(sizes) + Effort(
            kept=p, swept=p, entries=tail + (sizes.period - 1) * m / 2
        )
        each = Effort(entries=p * s)
        if sizes.projection == "exact":
            before += Effort(kept=p * p, factors=p**3 / 3)
            each += Effort(swept=p * p)
        elif sizes.projection == "resident":
            before += Effort(kept=p * p)
            each += Effort(swept=p * p, entries=p * s)
        else:
            each += Effort(entries=p * (p + s))
        return before, row.times(n) + each.times(-(-n // m) / sizes.period)

    def needs(self, problem: Problem, sizes: ProjectedSizes) -> Needs:
        """A projection evaluates K(Z, X_s), and K(Z, Z)."""
        m, s, h, p = sizes.batch_size, sizes.n_sample, sizes.n_probe, problem.p
        factor = p * p if sizes.projection == "exact" else 0
        saved = s * (problem.d + sizes.level) + factor
        return Needs(False, max(m, h, s, p), problem.c, setup=saved)

    def add_buffers(self, buffers: Buffers, problem: Problem, sizes: ProjectedSizes) -> None:
        """The sample, the projection, the temporary centers."""
        add, item, p, c = buffers.add, problem.itemsize, problem.p, problem.c
        add("always", "Nystrom rows, eigenvectors", sample_bytes(problem, sizes))
        super().add_buffers(buffers, problem, sizes)
        if sizes.projection != "inexact":
            add("always", "K(Z, Z)", p, p, itemsize=item)
        if sizes.projection != "exact":
            inner, probed = min(INNER_NYSTROM, p), min(2 * INNER_NYSTROM, p)
            add("setup", "eigensystem of the projection", 3 * inner, inner, itemsize=item)
            add("setup", "K(probe, probe) of the projection", probed, probed, itemsize=item)
        add("train", "K(X, Z)", sizes.batch_size, p, itemsize=item)
        # Cut to the critical batch, a period has more steps but no more rows than before.
        rows = sizes.period * sizes.batch_size if sizes.period > 1 else 0
        add("train", "temporary centers", rows, problem.point + c * item)
        add("train", "values at the centers", 3 * p, c, itemsize=item)

    def compute(self, work: Work[ProjectedSizes], samples: Samples, report: Report) -> Setup:
        """The preconditioner, the batch that it allows, the projection."""
        sizes = work.sizes
        P, arrays = build(work, samples)
        projected, meta = _compute_projection(work)
        batch, period = cut(work, P.rule), sizes.period
        if period > 1:
            period = max(1, round(period * sizes.batch_size / batch))
        meta |= summary(P, report, batch_size=batch, period=period)
        return Setup(arrays | projected, meta)

    def assemble(
        self, work: Work[ProjectedSizes], setup: Setup,
        sample_rows: npt.NDArray[np.int64] | None = None,
    ) -> Solver:  # fmt: skip
        """The step and the projection."""
        return DelayedProjectionSolver(
            work.op, work.Z, rebuilt(work, setup), _assemble_projection(work, setup),
            columns=work.op.columns(setup.arrays["sample"].shape[1]), period=setup.meta["period"],
            max_batch=setup.meta["batch_size"], **work.shared,
        )  # fmt: skip


class EigenPro4(EigenPro3):
    """The same with a projection after as many rows as there are centers."""

    name = "eigenpro4"

    def check_options(self, options: Options) -> None:
        """Any period."""
        LowRank.check_options(self, options)

    def _period(self, problem: Problem, options: Options, m: int) -> int:
        return options.period or max(1, round(problem.p / m))


def _compute_projection(work: Work[ProjectedSizes]) -> tuple[dict[str, Array], dict[str, Any]]:
    op, Z = work.op, work.Z
    if work.sizes.projection == "exact":
        exact = ExactProjection.build(op, Z)
        return {"projection.L": exact.L}, {"jitter": exact.jitter}
    # Not resident: `assemble` evaluates K(Z, Z), here it would be dropped unused.
    inner = IterativeProjection.build(
        op, Z, level=max(1, min(INNER_NYSTROM, len(Z)) // 10), n_nystrom=INNER_NYSTROM,
        max_batch=work.sizes.batch_size, seed=work.options.seed,
    )  # fmt: skip
    arrays = {"projection.E": inner.P.E, "projection.D": inner.P.D}
    return arrays, {"projection_rule": asdict(inner.P.rule), "projection_batch": inner.batch}


def _assemble_projection(work: Work[ProjectedSizes], setup: Setup) -> Projection:
    op, Z, arrays, meta = work.op, work.Z, setup.arrays, setup.meta
    if work.sizes.projection == "exact":
        return ExactProjection(op, arrays["projection.L"], meta["jitter"])
    E, D = arrays["projection.E"], arrays["projection.D"]
    P = LowRankPreconditioner(Z[: len(E)], E, D, StepRule(**meta["projection_rule"]))
    resident = work.sizes.projection == "resident"
    return IterativeProjection(op, Z, P, batch=meta["projection_batch"], resident=resident)
