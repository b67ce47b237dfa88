"""Reduce the number of centers of a model, with nearly the same predictions.

Randomly pivoted Cholesky selects q of the p centers of a model f, whose kernel functions nearly
span the kernel functions of all centers. Their weights w are fitted to f on the caller's rows x:

    minimise  sum over x of |f(x) - sum_j w_j k(x, z_j)|^2 + ridge |w|^2,

with the normal equations (k^T k + ridge I) w = k^T F. Here k (n, q) are the kernel values between n
rows and the centers, F (n, c) the outputs of f, and ridge = penalty tr(k^T k) / q. The equations of
the first q centers are the leading q x q block of the largest system, so one pass over the rows
gives the whole curve of the difference against the number of centers. Every fourth row is held out
to measure the difference.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError, DataError, MemoryBudgetError
from streamkern.basics.machine import available_memory
from streamkern.basics.message import mention
from streamkern.basics.optional import on_demand
from streamkern.basics.text import size_text
from streamkern.basics.values import checked_int, parse_bytes
from streamkern.centers.rpcholesky import PIVOT_BLOCK, rpcholesky
from streamkern.estimator.fitted import FittedModel
from streamkern.estimator.predicting import PredictionMixin
from streamkern.planning.memory import EVALUATED_ROWS, default_budget
from streamkern.store.statistics import ColumnMoments
from streamkern.train.model.kernel_model import KernelModel

_Model = TypeVar("_Model", bound=PredictionMixin)
DEFAULT_TOLERANCE = 0.05
"""Largest difference by default, in standard deviations of the outputs."""
MAX_KEPT_CENTERS = 4000
"""Largest number of centers that are kept for a tolerance."""
MIN_KEPT_CENTERS = 8
"""Smallest of the halved numbers of centers that are tried first; memory must suffice for it."""
HOLD_OUT_EVERY = 4
"""Every fourth row is held out."""
PENALTIES = tuple(10.0**k for k in range(-13, -2, 2))
"""Penalties to try, relative to the mean of the diagonal of k^T k."""


def compress(
    model: _Model, X: Any, *, n_centers: int | None = None, tolerance: float | None = None
) -> _Model:
    """Return a copy of a fitted estimator with fewer centers and nearly the same predictions.

    Parameters
    ----------
    model : a fitted `KernelClassifier` or `KernelRegressor`; it is not changed.
    X : rows like those to be predicted later, in any form that `predict` takes, at least twice as
        many as the centers to keep. They are read once, and need no targets. Rows that the model
        was not trained on are best: at a training row a rough kernel has a peak, which a model
        without that center cannot reproduce.
    n_centers : number of centers to keep, fewer than the model has.
    tolerance : largest root mean squared difference of the outputs on the held-out rows, in
        standard deviations of the outputs (default 0.05); the fewest centers within it are kept, at
        most 4000, and at most as many as the memory allows. The outputs of a classifier are f(x),
        and their variance is the mean over the classes.

    Returns
    -------
    compressed : the estimator with q of the p centers. `report_["compressed"]` holds the original
        number of centers, the difference, and the curve: pairs of a number of centers and its
        difference. Probabilities and intervals keep their calibration. Standard deviations are
        lost, and so is the state of the solver, so that `partial_fit` cannot continue the model.

    Notes
    -----
    The selection takes O(p q^2) operations, and memory for p q numbers. Then n rows with d features
    and c outputs take O(n q (d + q + c)) operations, and the equations 25 q^2 bytes. The parameter
    `memory` of the estimator limits the memory.

    Raises
    ------
    NotFittedError
        `model` is not fitted.
    ConfigError
        `model` is not an estimator of streamkern, or has no centers; `n_centers` and `tolerance`
        are both given, or one is out of range; no number of centers is within the tolerance; or
        rows have another shape than in training.
    MemoryBudgetError
        `memory` is too small for `n_centers`, or for 8 centers.
    DataError
        There are too few rows, all have the same outputs, or they lack features of the training
        rows.
    """
    if not isinstance(model, PredictionMixin):
        raise ConfigError(
            f"model is a {type(model).__name__}, not an estimator of streamkern",
            "give a fitted KernelClassifier or KernelRegressor, or the result of streamkern.load",
        )
    with contextlib.ExitStack() as stack:
        rows = model._open_rows(X, stack)
        with model._model() as kernel_model:
            return compress_model(model, kernel_model, rows, n_centers, tolerance)


def compress_model(
    model: _Model, kernel_model: KernelModel, rows: Any, n_centers: int | None,
    tolerance: float | None,
) -> _Model:  # fmt: skip
    """Return the smaller estimator; see `compress` for the parameters, and for its errors.

    kernel_model : the kernel model of `model`
    rows : source of the rows X
    """
    fitted = model._state
    if fitted.attributes["kernel_"].explicit:
        raise ConfigError(
            f"the model has no centers, because it was trained with "
            f"{mention('features', 'fourier')}",
            "train a model with a smaller n_features instead",
        )
    with kernel_model.backend.active():
        q = _max_centers(kernel_model, len(fitted.order), n_centers, tolerance, model.memory)
        Z = kernel_model.backend.asarray(fitted.centers, kernel_model.op.dtype)
        candidates = rpcholesky(kernel_model.op, Z, q, 0).rows  # in the order of the pivots
        equations = _sum_equations(kernel_model, fitted.centers[candidates], rows)
    tolerance = DEFAULT_TOLERANCE if tolerance is None else tolerance
    weights, curve = _select_size(equations, n_centers, tolerance)
    smaller = model._snapshot()
    smaller._fitted_ = _with_centers(fitted, candidates[: len(weights)], weights, curve)
    return smaller


def _max_centers(
    model: KernelModel, p: int, n_centers: int | None, tolerance: float | None, memory: int | str
) -> int:
    """Return the largest number of centers that may be kept.

    p : number of centers of the model

    Raises ConfigError or MemoryBudgetError, see `compress`.
    """
    requested = _requested_max(p, n_centers, tolerance)
    if memory == "auto":
        free_bytes = min(available_memory(), model.backend.memory_available())
        budget = default_budget(free_bytes)
    else:
        budget = parse_bytes(memory, "memory")
    # `_peak_bytes` grows with q, so the number of sizes that fit is the largest that fits.
    affordable = bisect.bisect_right(
        range(1, requested + 1), budget, key=lambda q: _peak_bytes(q, p, model.op.dtype.itemsize)
    )
    if affordable < (n_centers or min(requested, MIN_KEPT_CENTERS)):
        q = n_centers or MIN_KEPT_CENTERS
        needed = _peak_bytes(q, p, model.op.dtype.itemsize)
        remedy = f"lower n_centers to {affordable}, or " if affordable else ""
        raise MemoryBudgetError(
            f"the selection of {q} of {p} centers needs {size_text(needed)}, which is more than "
            f"the {size_text(budget)} of memory allowed",
            f"{remedy}raise {mention('memory=')}",
            needed=needed,
        )
    return affordable


def _peak_bytes(q: int, p: int, itemsize: int) -> int:
    """Return the largest number of bytes held at a time to select q of p centers and fit weights.

    itemsize : bytes of a kernel value in the selection
    """
    # `rpcholesky` ends before the equations are summed, so the larger of the two counts.
    selection = p * itemsize * (q + 4 * PIVOT_BLOCK)
    # Two float64 matrices of sums, and a product or factor of one of them, whose check for finite
    # values takes a mask of one byte a number; and the kernel values of a tile, with copies.
    equations = (3 * 8 + 1) * q**2 + 4 * 8 * q * EVALUATED_ROWS
    return max(selection, equations)


def _requested_max(p: int, n_centers: int | None, tolerance: object) -> int:
    """Return the largest number of centers that the arguments permit.

    Raises ConfigError if an argument is out of range, or if both are given.
    """
    if n_centers is not None and tolerance is not None:
        raise ConfigError(
            f"{mention('n_centers=')} and {mention('tolerance=')} are both given",
            "give one of them: each decides how many centers are kept",
        )
    if n_centers is not None:
        n_centers = checked_int("n_centers", n_centers, 1)
        if n_centers >= p:
            raise ConfigError(
                f"{mention('n_centers', n_centers)} must be smaller than the number of centers of "
                f"the model, {p}",
                "lower it",
            )
        return n_centers
    if tolerance is not None and not (
        isinstance(tolerance, int | float | np.floating) and 0 < tolerance < 1
    ):
        raise ConfigError(
            f"{mention('tolerance', tolerance)} must lie between 0 and 1, because it is a "
            "fraction of the standard deviation of the outputs; set for example "
            f"{mention('tolerance', 0.05)}"
        )
    return max(1, min(p - 1, MAX_KEPT_CENTERS))


class CenterSums:
    """Sums over n rows, in float64.

    A : (q, q) k^T k, with the kernel values k (n, q) between the rows and q candidate centers
    B : (q, c) k^T F, with the outputs F (n, c) of the original model
    squares : sum of the squares of F
    n : number of rows
    """

    def __init__(self, q: int, c: int) -> None:
        self.A = np.zeros((q, q))
        self.B = np.zeros((q, c))
        self.squares = 0.0
        self.n = 0

    def add(self, k: Floats, F: Floats) -> None:
        """Add m rows, with their kernel values k (m, q) and outputs F (m, c), to the sums."""
        self.A += k.T @ k
        self.B += k.T @ F
        self.squares += float(np.vdot(F, F))
        self.n += len(F)


@dataclass(frozen=True)
class CenterEquations:
    """The least-squares problem of all candidate centers.

    fit_sums : sums over the rows to which the weights are fitted
    held_out_sums : sums over the held-out rows, on which fits are compared
    output_std : standard deviation of the outputs F
    """

    fit_sums: CenterSums
    held_out_sums: CenterSums
    output_std: float

    def solve(self, q: int, penalty: float) -> Floats | None:
        """Return the weights (q, c) of the first q candidates; None if the factorisation fails.

        penalty : factor of |w|^2, relative to the mean of the diagonal of k^T k
        """
        linalg = on_demand("scipy.linalg")
        A, B = self.fit_sums.A[:q, :q].copy(), self.fit_sums.B[:q]
        A.flat[:: q + 1] += penalty * np.trace(A) / q
        try:
            # A.T has the memory order of LAPACK, which then overwrites it without a copy.
            factor = linalg.cho_factor(A.T, lower=True, overwrite_a=True)
            weights: Floats = linalg.cho_solve(factor, B)
        except linalg.LinAlgError:
            return None
        return weights

    def difference(self, w: Floats | None) -> float:
        """Return the RMSE of k w against F on the held-out rows, divided by `output_std`.

        w : (q, c) weights of the first q candidates; None gives infinity
        """
        if w is None:
            return math.inf
        q, sums = len(w), self.held_out_sums
        # The sum of the squares of k w - F, expanded in terms of the sums.
        total = np.vdot(w, sums.A[:q, :q] @ w) - 2 * np.vdot(w, sums.B[:q]) + sums.squares
        return math.sqrt(max(float(total), 0.0) / (sums.n * w.shape[1])) / self.output_std


def _sum_equations(model: KernelModel, centers: npt.NDArray[Any], rows: Any) -> CenterEquations:
    """Return the least-squares problem of the selected centers, summed over all rows.

    centers : (q, d) selected centers, in order of importance
    rows : source of the rows X

    Raises DataError if there are fewer than eight rows, or if all have the same outputs.
    """
    op, backend = model.op, model.backend
    to_host = backend.to_host
    Z = op.points(backend.asarray(centers, op.dtype), right=True)
    q, c = len(centers), model.n_outputs
    fit_sums, held_out_sums = CenterSums(q, c), CenterSums(q, c)
    outputs = ColumnMoments(c)
    for block in model.align_source(rows).blocks():
        for tile in model._tiles(len(block.row_ids)):
            points = op.points(model.transformed_rows(block.take(tile)), left=True)
            F = np.asarray(to_host(op.product(points, model.Z, model.weights)), np.float64)
            k = np.asarray(to_host(op.matrix(points, Z)), np.float64)
            outputs.add(F)
            is_held_out = np.arange(len(F)) % HOLD_OUT_EVERY == 0
            fit_sums.add(k[~is_held_out], F[~is_held_out])
            held_out_sums.add(k[is_held_out], F[is_held_out])
    n = fit_sums.n + held_out_sums.n
    output_std = math.sqrt(outputs.variance().mean()) if n else 0.0
    n_required = 2 * HOLD_OUT_EVERY
    if n < n_required or not output_std:
        count = "1 row" if n == 1 else f"{n} rows"
        raise DataError(
            f"X has {count}, but at least {n_required} are required"
            if n < n_required
            else "the model's outputs are the same for all rows of X",
            "give more rows, like those that will be predicted",
        )
    return CenterEquations(fit_sums, held_out_sums, output_std)


def _select_size(
    equations: CenterEquations, n_centers: int | None, tolerance: float
) -> tuple[Floats, list[list[float]]]:
    """Return the weights (q, c) of the centers to keep, and the curve of sizes and differences.

    Halved sizes are tried first, and then a bisection narrows the smallest size within the
    tolerance to 5 %. At each size the penalty with the smallest difference is used.

    Raises ConfigError if no size is within the tolerance, and DataError if there are too few rows.
    """
    largest = min(len(equations.fit_sums.A), equations.fit_sums.n)
    if n_centers is not None and largest < n_centers:
        n_fitted = equations.fit_sums.n
        raise DataError(
            f"X has {n_fitted} rows that are not held out, but {n_centers} centers need more",
            "give at least twice as many rows as centers",
        )
    best_fits: dict[int, tuple[Floats | None, float]] = {}  # size -> weights, difference

    def difference(n: int) -> float:
        """Return the smallest difference of n centers over the penalties, computed once."""
        if n not in best_fits:
            fits = [equations.solve(n, penalty) for penalty in PENALTIES]
            differences = [equations.difference(w) for w in fits]
            index = int(np.argmin(differences))
            best_fits[n] = fits[index], differences[index]
        return best_fits[n][1]

    halved = (largest >> k for k in range(1, 12) if largest >> k >= MIN_KEPT_CENTERS)
    sizes = sorted({largest, *halved})
    for n in sizes:
        difference(n)
    size = largest
    if n_centers is None:
        size = next((n for n in sizes if difference(n) <= tolerance), 0)
        if not size:
            has_few_rows = largest < len(equations.fit_sums.A)
            raise ConfigError(
                f"with {largest} centers"
                + (", as many as X has rows that are not held out," if has_few_rows else "")
                + f" the difference is {difference(largest):.2g}, above "
                f"{mention('tolerance', tolerance)}",
                ("give more rows, " if has_few_rows else "")
                + f"raise {mention('tolerance=')}, pass {mention('n_centers=')}, or pass rows that "
                "the model was not trained on",
            )
        too_small = max((n for n in sizes if n < size), default=0)
        while size - too_small > max(1, size // 20):
            midpoint = (too_small + size) // 2
            if difference(midpoint) <= tolerance:
                size = midpoint
            else:
                too_small = midpoint
    difference(size)
    weights = best_fits[size][0]
    assert weights is not None  # the largest penalty makes the matrix positive definite
    return weights, [[n, best_fits[n][1]] for n in sorted(best_fits)]


def _with_centers(
    fitted: FittedModel, kept_rows: npt.NDArray[np.int64], weights: Floats, curve: list[list[float]]
) -> FittedModel:
    """Return the fitted model with some of its centers.

    kept_rows : (q,) rows of the kept centers, in the order of the run
    weights : (q, c) weights of the kept centers, for scaled targets
    curve : pairs of a number of centers and its difference
    """
    original: Mapping[str, Any] = fitted.attributes
    scale, alpha = fitted.targets.scale, original["dual_coef_"]
    difference = next(difference for n, difference in curve if n == len(kept_rows))
    summary = {"n_centers": len(fitted.order), "difference": difference, "curve": curve}
    report = {name: value for name, value in original["report_"].items() if name != "posterior"}
    attributes = dict(original) | {
        "centers_": original["centers_"][fitted.order[kept_rows]],
        "dual_coef_": (weights * scale).astype(alpha.dtype),
        "n_centers_": len(kept_rows),
        "report_": report | {"compressed": summary},
    }
    return replace(
        fitted, attributes=attributes, order=np.arange(len(kept_rows)), posterior=None, warm=None,
        online=None, begun=None,
    )  # fmt: skip
