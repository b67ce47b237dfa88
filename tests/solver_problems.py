"""Shared parts of the numerical tests: small problems, and every solver ready to run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.config.solver import SolverConfig
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.fourier import FourierFeatures, frequencies
from streamkern.kernels.points import Grid, Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.problem import ProblemShape
from streamkern.planning.sizes import Sizes
from streamkern.solver.base import Solver, State
from streamkern.solver.method import Method, Report, Setup, Work
from streamkern.solver.methods import find
from streamkern.solver.precondition.block_factor import BlockInputs
from streamkern.solver.precondition.partition import Centers
from streamkern.solver.precondition.samples import Sample, SampleRows
from tests import reference as ref
from tests.plans import solver_settings

Array = npt.NDArray[Any]


SEED = 3
"""Seed of every setup."""
RADIAL = ["cauchy", "gaussian", "laplace", "matern32", "matern52"]


def rows(seed: int, *shape: int) -> npt.NDArray[np.float64]:
    """Return standard normal numbers that depend on the seed and the shape only."""
    return np.random.default_rng([seed, 7]).normal(size=shape)


def operator(
    kernel: str = "laplace",
    bandwidth: float = 2.0,
    precision: str = "float64",
    *,
    backend: Backend | None = None,
    tile: tuple[int, int] | None = None,
    shift: Array | None = None,
) -> KernelOperator:
    """Return an operator on one thread, in float64 unless asked otherwise."""
    backend = backend or Backend(threads=1)
    if tile is not None:
        backend.tile_rows, backend.tile_cols = tile
    grid = GRID if precision == "integer" else None
    return KernelOperator(get_kernel(kernel, bandwidth), backend, precision, shift, grid)


def both(op: KernelOperator, X: Array) -> Points:
    """Return points that can stand on either side of a product."""
    return op.points(op.backend.asarray(X, op.dtype), left=True, right=True)


def block_inputs(
    op: KernelOperator, Z: Array, S: Sample, probe: Sample, **options: Any
) -> BlockInputs:
    """Return the inputs of `build_block` for the centers Z (p, d)."""
    return BlockInputs(op, Centers.of(both(op, Z), op.backend, S.ranks), S, probe, **options)


def quiet(event: str, fields: dict[str, Any]) -> None:
    """Report nothing."""


# --- every solver -------------------------------------------------------------------------------

GRID = Grid(offset=0.25, step=2.0**-6)

RIDGED = ("blocks", "direct", "direct, all rows", "falkon")
"""Solvers that tests of all of them give a ridge."""

SOLVERS: dict[str, dict[str, Any]] = {
    "block": {"solver": "block", "block_size": 24},
    "blocks": {"solver": "block", "block_size": 7},
    "blocks, recomputed": {"solver": "block", "block_size": 7, "keep": False},
    "eigenpro3": {"solver": "eigenpro3", "projection": "exact"},
    "eigenpro3, resident": {"solver": "eigenpro3", "projection": "resident"},
    "eigenpro3, inexact": {"solver": "eigenpro3", "projection": "inexact"},
    "eigenpro4": {"solver": "eigenpro4", "projection": "exact", "period": 3},
    "eigenpro2": {"solver": "eigenpro2"},
    "direct": {"solver": "direct"},
    "direct, all rows": {"solver": "direct", "n_sums": 0},
    "direct, fourier": {"solver": "direct", "features": "fourier"},
    "falkon": {"solver": "falkon"},
    "eigenpro1": {"solver": "eigenpro1"},
    "sgd": {"solver": "sgd"},
    "sgd, nystrom": {"solver": "sgd", "features": "nystrom", "level": 0},
    "sgd, fourier": {"solver": "sgd", "features": "fourier", "level": 0},
    "eigenpro1, nystrom": {"solver": "eigenpro1", "features": "nystrom", "level": 6},
    "eigenpro1, fourier": {"solver": "eigenpro1", "features": "fourier", "level": 6},
    "blocks, fourier": {"solver": "block", "block_size": 7, "features": "fourier"},
    "block, nystrom": {"solver": "block", "block_size": 24, "features": "nystrom"},
    "direct, nystrom": {"solver": "direct", "features": "nystrom"},
}
IN_PLACE = ("sgd", "eigenpro1", "eigenpro2", "direct, all rows")
"""Those whose centers are the training rows."""


_SMALL = {
    "batch_size": 20, "block_size": 24, "keep": True, "n_probe": 100, "level": 12, "period": 1,
    "projection": "none", "n_sums": 1, "loader_block_bytes": 1 << 20,
    "loader_in_flight_bytes": 1 << 20, "widened": False,
}  # fmt: skip


def small_sizes(solver: str = "block", features: str = "kernel", **changes: Any) -> Any:
    """Return sizes for 24 centers, of the kind that the method has."""
    kind = find(solver, features).sizes
    plain = {**_SMALL, "solver": solver, "n_sample": 120 if solver == "block" else 60, **changes}
    return kind(**{name: plain[name] for name in kind.__dataclass_fields__ if name in plain})


@dataclass
class Case:
    """A solver's inputs: setup arrays are on the device of `op`."""

    op: KernelOperator
    sizes: Sizes
    options: SolverConfig
    X: Array
    Y: Array
    Z: Array
    X_s: Array
    probe: Array
    setup: Setup
    sample_rows: npt.NDArray[np.int64] | None
    features: str = "kernel"
    cycled: int | None = None

    @property
    def m(self) -> int:
        """Return the largest batch."""
        return int(self.setup.meta["batch_size"])

    @property
    def method(self) -> Method[Any]:
        return find(self.sizes.solver, self.features)

    def solver(
        self, setup: Setup | None = None, op: KernelOperator | None = None,
        ranks: Communicator = SINGLE, center_ranks: int = 1,
    ) -> Solver:  # fmt: skip
        """Assemble a new solver, of other setup arrays or on another operator if given."""
        op = featured(op or self.op, self.features, len(self.Z))
        problem = problem_of(self.Z, self.Y.shape[1], self.features, self.cycled)
        problem = replace(problem, ranks=ranks.size, center_ranks=center_ranks)
        points = both(op, self.Z)
        work = Work(op, points, problem, self.sizes, self.options, SEED, ranks=ranks)
        setup = replace(setup or self.setup, sample_rows=self.sample_rows)
        return self.method.assemble(work, setup)

    def columns(self, X: Array) -> Array:
        """Return K(X, Z), or the Fourier features of X, in float64."""
        if self.features != "fourier":
            return ref.laplace(X, self.Z, 2.0)
        omega, phases = self.Z[:, :-1], self.Z[:, -1]
        return np.asarray(np.sqrt(2 / len(phases)) * np.cos(X @ omega.T + phases))

    def batch(self, t: int) -> npt.NDArray[np.int64]:
        """Return the rows of batch t: no row twice in an epoch; every third batch is short."""
        epoch, i = divmod(t, len(self.X) // self.m)
        order = np.random.default_rng([5, epoch]).permutation(len(self.X))
        return order[i * self.m : (i + 1) * self.m - (3 if t % 3 == 2 and self.m > 4 else 0)]

    def step(self, solver: Solver, state: State, t: int) -> float:
        """Take step t and return the loss."""
        batch = self.batch(t)
        on_device, dtype = solver.backend.asarray, solver.op.dtype
        X, Y = on_device(self.X[batch], dtype), on_device(self.Y[batch], dtype)
        return float(solver.step(state, Batch(X, Y, batch))[0].sum())


def problem_of(
    Z: Array, c: int, features: str = "kernel", cycled: int | None = None
) -> ProblemShape:
    """Return the problem of training Z's functions on `cycled` rows, or on 100 000 new ones."""
    p, d = Z.shape
    return ProblemShape(
        n_rows=cycled or 100_000, epochs=1, d=d, c=c, p=p, row_bytes=8 * d, unit_rows=100,
        itemsize=8, threads=1, width=d + 2, tile_bytes=1 << 16, repeats=cycled is not None,
        features=features,
    )  # fmt: skip


def featured(op: KernelOperator, features: str, n_features: int) -> KernelOperator:
    """Return the operator of Fourier features of the kernel of `op`, where they are asked for.

    Their precision is that of the arithmetic alone.
    """
    if features != "fourier" or isinstance(op.kernel, FourierFeatures):
        return op
    precision = "float64" if op.precision == "float64" else "exact"
    return KernelOperator(
        FourierFeatures(n_features, op.kernel.describe()), op.backend, precision
    )  # fmt: skip


def make_case(
    op: KernelOperator, name: str, *, options: SolverConfig | None = None,
    set_batch_size: int | None = None, p: int = 24, **changes: Any,
) -> Case:  # fmt: skip
    """Compute the setup of a solver named in SOLVERS on a problem of 240 rows in 3 dimensions."""
    requested = SOLVERS[name] | changes
    features, sizes = requested.get("features", "kernel"), small_sizes(**requested)
    options = options or solver_settings(ridge=0.0)
    X, fresh = rows(0, 240, 3), rows(2, 300, 3)
    Y = np.stack([np.sin(X[:, 0]) + X[:, 1], X[:, 2] ** 2], axis=1) + 0.3 * rows(3, 240, 2)
    Z, X_s = rows(1, p, 3), fresh[: sizes.n_sample]
    probe, sample_rows = fresh[-sizes.n_probe :], None
    if features == "fourier":
        Z = frequencies(op.kernel, 3, len(Z), 3)
    if find(sizes.solver, features).takes_rows(sizes):
        sample_rows = np.arange(0, 240, 4)
        Z, X_s, probe = X, X[sample_rows], X
    setup = computed(
        op, Z, X_s, probe, sizes, options, n_outputs=Y.shape[1], features=features,
        batch_size=set_batch_size,
    )  # fmt: skip
    return Case(op, sizes, options, X, Y, Z, X_s, probe, setup, sample_rows, features)


def computed(
    op: KernelOperator,
    Z: Array,
    X_s: Array,
    probe: Array,
    sizes: Sizes,
    options: SolverConfig,
    report: Report = quiet,
    n_outputs: int = 1,
    features: str = "kernel",
    cycled: int | None = None,
    batch_size: int | None = None,
) -> Setup:
    """Compute a setup from host arrays, with targets of zero: the solver starts from nothing."""
    op = featured(op, features, len(Z))

    def samples() -> tuple[SampleRows, SampleRows]:
        asarray = op.backend.asarray
        arrays = [asarray(a, op.dtype) for a in (X_s, probe)]
        first, second = (
            SampleRows(a, asarray(np.zeros((len(a), n_outputs)), op.dtype)) for a in arrays
        )
        return first, second

    problem = problem_of(Z, n_outputs, features, cycled)
    problem = replace(problem, n_rows=100_000, batch_size=batch_size)
    work = Work(op, both(op, Z), problem, sizes, options, SEED)
    return find(sizes.solver, features).compute(work, samples, report)


def close(actual: Array, desired: Array, relative: float = 1e-9) -> None:
    np.testing.assert_allclose(actual, desired, rtol=0, atol=relative * np.abs(desired).max())


def one_pass(case: Case, solver: Solver, state: State, ids: Array | None = None) -> dict[str, Any]:
    """Bring all rows, or `ids`, in batches, the last one short, and end the pass."""
    ids = np.arange(len(case.X)) if ids is None else ids
    for start in range(0, len(ids), case.m):
        batch = ids[start : start + case.m]
        X, Y = (a[batch].astype(solver.op.dtype) for a in (case.X, case.Y))
        solver.step(state, Batch(X, Y, batch))
    return solver.end_epoch(state)


class Quartic(Kernel):
    """A kernel of a user's own."""

    def profile(self, sq: Array, xp: Any) -> Array:
        return 1 / (1 + sq * sq)
