"""Reduce the number of centers of a model, with nearly the same predictions.

Randomly pivoted Cholesky selects q of the p centers of a model f, so that their kernel functions
nearly span those of all centers. Their weights w are fitted to f on the caller's rows x:

    minimise  sum over x of |f(x) - sum_j w_j k(x, z_j)|^2 + penalty |w|^2.

The normal equations of the first q centers are the leading q x q block of the largest system. One
pass over the rows therefore gives the whole curve of the difference against the number of centers.
Every fourth row is held out to measure the difference.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError, DataError, MemoryBudgetError
from streamkern.basics.machine import available_memory
from streamkern.basics.message import mention
from streamkern.basics.text import size_text
from streamkern.basics.values import checked_int, parse_bytes
from streamkern.centers.rpcholesky import PIVOT_BLOCK, rpcholesky
from streamkern.estimator.center_equations import PENALTIES, CenterEquations, CenterSums
from streamkern.estimator.fitted import FittedModel
from streamkern.estimator.predicting import Predicting
from streamkern.planning.memory import EVALUATED_ROWS, default_budget
from streamkern.store.statistics import ColumnMoments
from streamkern.train.model.kernel_model import KernelModel

_Model = TypeVar("_Model", bound=Predicting)
DEFAULT_TOLERANCE = 0.05
"""Largest difference by default, in standard deviations of the outputs."""
MAX_KEPT_CENTERS = 4000
"""Largest number of centers that a tolerance keeps; their equations take 400 MB."""
MIN_KEPT_CENTERS = 8
"""Smallest of the halved numbers of centers that are tried first."""
HOLD_OUT_EVERY = 4
"""One of so many rows is held out."""


def compress(
    model: _Model, X: Any, *, n_centers: int | None = None, tolerance: float | None = None
) -> _Model:
    """Return a copy of a fitted estimator with fewer centers and nearly the same predictions.

    Parameters
    ----------
    model : a fitted `KernelClassifier` or `KernelRegressor`; it is not changed.
    X : rows like those that will be predicted, in any form that `predict` takes, and at least twice
        as many as centers are kept. They are read once, and need no targets. Rows that the model
        was not trained on are best: at a training row a rough kernel has a peak, which a model
        without that center cannot reproduce.
    n_centers : number of centers to keep, fewer than the model has.
    tolerance : keep the fewest centers, at most 4000 and as many as the memory allows, with which
        the root mean squared difference of the outputs on the held-out rows is at most `tolerance`
        times the standard deviation of the outputs (default 0.05). The outputs of a classifier are
        the scores, and the variance is the mean over the classes.

    Returns
    -------
    The estimator with q of the p centers. `report_["compressed"]` holds the original number of
    centers, the difference, and the curve: pairs of a number of centers and its difference.
    Probabilities and intervals keep their calibration. Standard deviations are lost, and so is the
    state of the solver, so that `partial_fit` cannot continue the model.

    The selection takes time p q^2 and memory for p q numbers. Then n rows with d features and c
    outputs take time n q (d + q + c), and the equations 25 q^2 bytes. The memory stays within the
    estimator's parameter `memory`.

    Raises
    ------
    ConfigError
        `model` is not an estimator of streamkern, or has no centers; `n_centers` and `tolerance`
        are both given, or one is out of range; or no number of centers is within the tolerance.
    MemoryBudgetError
        `memory` is too small for the number of centers.
    DataError
        There are too few rows, or all have the same outputs.
    """
    if not isinstance(model, Predicting):
        raise ConfigError(
            f"model is a {type(model).__name__}, not an estimator of streamkern",
            "give a fitted KernelClassifier or KernelRegressor, or what streamkern.load returns",
        )
    with contextlib.ExitStack() as stack:
        rows = model._source_of(X, stack)
        with model._model() as kernel_model:
            return compressed(model, kernel_model, rows, n_centers, tolerance)


def compressed(
    model: _Model, kernel_model: KernelModel, rows: Any, n_centers: int | None,
    tolerance: float | None,
) -> _Model:  # fmt: skip
    """Return the smaller estimator; see `compress` for parameters and errors.

    kernel_model : the kernel model of `model`
    rows : source of the rows X
    """
    fitted = model._state
    if fitted.attributes["kernel_"].explicit:
        raise ConfigError(
            f"the model has {mention('features', 'fourier')}, and therefore no centers",
            "train one with fewer features",
        )
    with kernel_model.backend.active():
        most = _max_centers(kernel_model, len(fitted.order), n_centers, tolerance, model.memory)
        chosen = _pivots(kernel_model, fitted.centers, most)
        equations = _equations(kernel_model, fitted.centers[chosen], rows)
    tolerance = DEFAULT_TOLERANCE if tolerance is None else tolerance
    weights, curve = _select_size(equations, n_centers, tolerance)
    smaller = model._snapshot()
    smaller._fitted_ = _with_centers(fitted, chosen[: len(weights)], weights, curve)
    return smaller


def _max_centers(
    model: KernelModel, p: int, n_centers: int | None, tolerance: float | None, memory: int | str
) -> int:
    """Return the largest number of centers that may be kept.

    p : number of centers of the model

    Raises ConfigError or MemoryBudgetError, see `compress`.
    """
    most = _requested_max(p, n_centers, tolerance)
    if memory == "auto":
        free = min(available_memory(), model.backend.memory_available())
        budget = default_budget(free)
    else:
        budget = parse_bytes(memory, "memory")
    fit = bisect.bisect_right(
        range(1, most + 1), budget, key=lambda q: _peak_bytes(q, p, model.op.dtype.itemsize)
    )
    if fit < (n_centers or min(most, MIN_KEPT_CENTERS)):
        wanted = n_centers or MIN_KEPT_CENTERS
        needed = _peak_bytes(wanted, p, model.op.dtype.itemsize)
        fewer = f"lower n_centers to {fit}, or " if fit else ""
        raise MemoryBudgetError(
            f"selecting {wanted} of {p} centers takes {size_text(needed)}, and "
            f"the memory allows {size_text(budget)}",
            f"{fewer}raise {mention('memory=')}",
            needed=needed,
        )
    return fit


def _peak_bytes(q: int, p: int, itemsize: int) -> int:
    """Return the largest number of bytes held at a time to select q of p centers and fit weights.

    `rpcholesky` and `CenterEquations` run one after the other. The equations are two matrices, and
    a product or a factor of them with the mask of its check.
    """
    selecting = p * itemsize * (q + 4 * PIVOT_BLOCK)
    return max(selecting, (3 * 8 + 1) * q**2 + 4 * 8 * q * EVALUATED_ROWS)


def _requested_max(p: int, n_centers: int | None, tolerance: object) -> int:
    """Return the largest number of centers that the arguments allow; the memory may allow fewer.

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
                f"{mention('n_centers', n_centers)} must be below the model's {p} centers",
                "give fewer",
            )
        return n_centers
    if tolerance is not None and not (
        isinstance(tolerance, int | float | np.floating) and 0 < tolerance < 1
    ):
        raise ConfigError(
            f"{mention('tolerance', tolerance)} must lie between 0 and 1: it is a fraction of "
            "the standard deviation of the outputs"
        )
    return max(1, min(p - 1, MAX_KEPT_CENTERS))


def _pivots(model: KernelModel, centers: npt.NDArray[Any], n: int) -> npt.NDArray[np.int64]:
    """Return the rows of n pivots among the centers (p, d), the most important first.

    Their kernel functions nearly span those of all centers.
    """
    Z = model.backend.asarray(centers, model.op.dtype)
    return rpcholesky(model.op, Z, n, 0).rows


def _equations(model: KernelModel, centers: npt.NDArray[Any], rows: Any) -> CenterEquations:
    """Return the least-squares problem of the selected centers, summed over all rows.

    centers : (q, d) selected centers, in order of importance
    rows : source of the rows X

    Raises DataError if there are fewer than eight rows, or if all have the same outputs.
    """
    op, backend = model.op, model.backend
    to_host = backend.to_host
    Z = op.points(backend.asarray(centers, op.dtype), right=True)
    q, c = len(centers), model.n_outputs
    fit, held = CenterSums(q, c), CenterSums(q, c)
    outputs = ColumnMoments(c)
    for X in _prepared(model, rows):
        points = op.points(X, left=True)
        F = np.asarray(to_host(op.product(points, model.Z, model.weights)), np.float64)
        k = np.asarray(to_host(op.matrix(points, Z)), np.float64)
        outputs.add(F)
        held_out = np.arange(len(F)) % HOLD_OUT_EVERY == 0
        fit.add(k[~held_out], F[~held_out])
        held.add(k[held_out], F[held_out])
    n = fit.n + held.n
    spread = math.sqrt(outputs.variance().mean()) if n else 0.0
    least = 2 * HOLD_OUT_EVERY
    if n < least or not spread:
        count = "1 row" if n == 1 else f"{n} rows"
        raise DataError(
            f"X has {count}, and at least {least} are needed"
            if n < least
            else "the model's outputs are the same for all rows of X",
            "give more rows, like those that will be predicted",
        )
    return CenterEquations(fit, held, spread)


def _prepared(model: KernelModel, rows: Any) -> Iterator[Any]:
    """Yield tiles of the rows in the form that the kernel takes."""
    for block in model.checked(rows).blocks():
        for part in model._tiles(len(block.row_ids)):
            yield model.prepared(block.take(part))


def _select_size(
    equations: CenterEquations, n_centers: int | None, tolerance: float
) -> tuple[Floats, list[list[float]]]:
    """Return the weights (q, c) of the centers to keep, and the curve of sizes and differences.

    Halved sizes are tried first, and then a bisection narrows the smallest size within the
    tolerance to 5 %. At each size the penalty with the smallest difference is used.

    Raises ConfigError if no size is within the tolerance, and DataError if there are too few rows.
    """
    most = min(len(equations.fit.A), equations.fit.n)
    if n_centers is not None and most < n_centers:
        raise DataError(
            f"X has {equations.fit.n} rows that are not held out, and {n_centers} centers are kept",
            "give at least twice as many rows as centers",
        )
    tried: dict[int, tuple[Floats | None, float]] = {}

    def difference(n: int) -> float:
        if n not in tried:
            fits = [equations.weights(n, penalty) for penalty in PENALTIES]
            differences = [equations.difference(w) for w in fits]
            best = int(np.argmin(differences))
            tried[n] = fits[best], differences[best]
        return tried[n][1]

    sizes = sorted({most, *(most >> k for k in range(1, 12) if most >> k >= MIN_KEPT_CENTERS)})
    for n in sizes:
        difference(n)
    keep = most
    if n_centers is None:
        keep = next((n for n in sizes if difference(n) <= tolerance), 0)
        if not keep:
            few_rows = most < len(equations.fit.A)
            raise ConfigError(
                f"with {most} centers"
                + (", as many as X has rows that are not held out," if few_rows else "")
                + f" the difference is {difference(most):.2g}, above "
                f"{mention('tolerance', tolerance)}",
                ("give more rows, " if few_rows else "")
                + f"raise {mention('tolerance=')}, pass {mention('n_centers=')}, or pass rows that "
                "the model was not trained on",
            )
        low = max((n for n in sizes if n < keep), default=0)
        while keep - low > max(1, keep // 20):
            middle = (low + keep) // 2
            low, keep = (low, middle) if difference(middle) <= tolerance else (middle, keep)
    difference(keep)
    weights = tried[keep][0]
    assert weights is not None  # the largest penalty makes the equations positive
    return weights, [[n, tried[n][1]] for n in sorted(tried)]


def _with_centers(
    fitted: FittedModel, chosen: npt.NDArray[np.int64], weights: Floats, curve: list[list[float]]
) -> FittedModel:
    """Return the fitted model of the chosen centers.

    chosen : (q,) rows of the kept centers, in the order of the run
    weights : (q, c), for targets that are scaled
    """
    before: Mapping[str, Any] = fitted.attributes
    scale, alpha = fitted.targets.scale, before["dual_coef_"]
    difference = next(error for n, error in curve if n == len(chosen))
    summary = {"n_centers": len(fitted.order), "difference": difference, "curve": curve}
    report = {name: value for name, value in before["report_"].items() if name != "posterior"}
    attributes = dict(before) | {
        "centers_": before["centers_"][fitted.order[chosen]],
        "dual_coef_": (weights * scale).astype(alpha.dtype),
        "n_centers_": len(chosen),
        "report_": report | {"compressed": summary},
    }
    return replace(
        fitted, attributes=attributes, order=np.arange(len(chosen)), posterior=None, warm=None,
        online=None, begun=None,
    )  # fmt: skip
