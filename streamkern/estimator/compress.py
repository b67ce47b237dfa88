"""Reduce the number of centers of a model, with nearly the same predictions.

Of the p centers of a model f, some are chosen by randomly pivoted Cholesky, which covers the span
of their kernel functions, and get the weights w with which they are nearest to f on rows x of the
caller's:

    minimise  sum over x of |f(x) - sum_j w_j k(x, z_j)|^2 + penalty |w|^2.

The normal equations of the largest choice hold those of every smaller one, as their leading part.
One pass over the rows therefore gives the whole curve of the difference against the number of
centers. Every fourth row is held out: it judges, and does not fit.
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
TOLERANCE, MOST, FEWEST, JUDGING = 0.05, 4000, 8, 4
"""The default tolerance; the most centers to keep, whose equations take 400 MB; the fewest; and the
rows of which one is held out."""


def compress(
    model: _Model, X: Any, *, n_centers: int | None = None, tolerance: float | None = None
) -> _Model:
    """Return a copy of a fitted estimator with fewer centers and nearly the same predictions.

    Parameters
    ----------
    model : a fitted `KernelClassifier` or `KernelRegressor`; it is not changed.
    X : rows like those that will be predicted, in any form that `predict` takes, at least twice as
        many as centers are kept. They are read once, and need no targets. Rows that the model was
        not trained on are best: at its own centers a rough kernel has peaks, which no fewer centers
        have.
    n_centers : how many centers to keep, fewer than there are.
    tolerance : keep the fewest centers, at most 4000 and as many as the memory allows, with which
        the root mean squared difference of the outputs on held-out rows is at most so much of the
        spread of the outputs; .05 by default. For classes the outputs are scores, and the spread is
        over rows and classes.

    Returns
    -------
    The estimator with q of the p centers. `report_["compressed"]` holds the number of centers
    before, the difference, and the curve: pairs of a number of centers and the difference with it.
    Probabilities and intervals keep their calibration; standard deviations are lost, and so is the
    state of the solver: `partial_fit` does not continue from it.

    Time n q (d + q + c) for n rows and p q^2 for the choice. Memory 25 q^2 bytes for the equations,
    and before them p q numbers for the choice, within the estimator's parameter `memory`.

    Raises
    ------
    ConfigError
        `model` is no estimator of streamkern, both numbers are given, or one is out of range, or no
        choice is within the tolerance, or the model has no centers.
    MemoryBudgetError
        The memory is not enough for so many centers.
    DataError
        There are too few rows.
    """
    if not isinstance(model, Predicting):
        raise ConfigError(
            f"model is a {type(model).__name__}, and no estimator of streamkern",
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
    """Return what `compress` does. kernel_model : that of `model`. rows : a source"""
    fitted = model._state
    if fitted.attributes["kernel_"].explicit:
        raise ConfigError(
            f"the model is one of {mention('features', 'fourier')}, which has no centers",
            "train one with fewer features",
        )
    with kernel_model.backend.active():
        most = _most(kernel_model, len(fitted.order), n_centers, tolerance, model.memory)
        chosen = _pivots(kernel_model, fitted.centers, most)
        equations = _equations(kernel_model, fitted.centers[chosen], rows)
    kept, curve = _fewest(equations, n_centers, TOLERANCE if tolerance is None else tolerance)
    other = model._snapshot()
    other._fitted_ = _with_centers(fitted, chosen[: len(kept)], kept, curve)
    return other


def _most(
    model: KernelModel, p: int, n_centers: int | None, tolerance: float | None, memory: int | str
) -> int:
    """Return the largest number of centers that may be kept; raise what `compress` does."""
    most = _asked(p, n_centers, tolerance)
    if memory == "auto":
        free = min(available_memory(), model.backend.memory_available())
        budget = default_budget(free)
    else:
        budget = parse_bytes(memory, "memory")
    fit = bisect.bisect_right(
        range(1, most + 1), budget, key=lambda q: _bytes(q, p, model.op.dtype.itemsize)
    )
    if fit < (n_centers or min(most, FEWEST)):
        needed = _bytes(n_centers or FEWEST, p, model.op.dtype.itemsize)
        fewer = f"lower n_centers to {fit}, or " if fit else ""
        raise MemoryBudgetError(
            f"to choose {n_centers or FEWEST} of {p} centers takes {size_text(needed)}, and the "
            f"memory allows {size_text(budget)}",
            f"{fewer}raise {mention('memory=')}",
            needed=needed,
        )
    return fit


def _bytes(q: int, p: int, itemsize: int) -> int:
    """Return the most bytes held to choose q of p centers and their weights.

    First `rpcholesky` takes them, then `CenterEquations`: two matrices, a product or a factor of
    them, and the mask of its check.
    """
    choosing = p * itemsize * (q + 4 * PIVOT_BLOCK)
    return max(choosing, (3 * 8 + 1) * q**2 + 4 * 8 * q * EVALUATED_ROWS)


def _asked(p: int, n_centers: int | None, tolerance: object) -> int:
    """Return the largest number of centers by the arguments, after checking them."""
    if n_centers is not None and tolerance is not None:
        raise ConfigError(
            f"{mention('n_centers=')} and {mention('tolerance=')} are both given",
            "give one of them: either decides how many centers are kept",
        )
    if n_centers is not None:
        n_centers = checked_int("n_centers", n_centers, 1)
        if n_centers >= p:
            raise ConfigError(
                f"{mention('n_centers', n_centers)}, and the model has {p} centers",
                "give fewer",
            )
        return n_centers
    if tolerance is not None and not (
        isinstance(tolerance, int | float | np.floating) and 0 < tolerance < 1
    ):
        raise ConfigError(
            f"{mention('tolerance', tolerance)} must lie between 0 and 1: it is a share of the "
            "spread of the outputs"
        )
    return max(1, min(p - 1, MOST))


def _pivots(model: KernelModel, centers: npt.NDArray[Any], n: int) -> npt.NDArray[np.int64]:
    """Return n centers that cover the span of all, the most important first."""
    Z = model.backend.asarray(centers, model.op.dtype)
    return rpcholesky(model.op, Z, n, 0).rows


def _equations(model: KernelModel, centers: npt.NDArray[Any], rows: Any) -> CenterEquations:
    """Return the sums over all rows."""
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
        judging = np.arange(len(F)) % JUDGING == 0
        fit.add(k[~judging], F[~judging])
        held.add(k[judging], F[judging])
    n = fit.n + held.n
    spread = math.sqrt(outputs.variance().mean()) if n else 0.0
    if n < 2 * JUDGING or not spread:
        raise DataError(
            f"X has {n} rows, on which the model's outputs have the spread {spread:g}",
            "give more rows, like those that will be predicted",
        )
    return CenterEquations(fit, held, spread)


def _prepared(model: KernelModel, rows: Any) -> Iterator[Any]:
    """Yield the rows as the kernel takes them, a tile at a time."""
    for block in model.checked(rows).blocks():
        for part in model._tiles(len(block.row_ids)):
            yield model.prepared(block.take(part))


def _fewest(
    equations: CenterEquations, n_centers: int | None, tolerance: float
) -> tuple[Floats, list[list[float]]]:
    """Return the weights of the candidates that are kept, and the curve."""
    most = min(len(equations.fit.A), equations.fit.n)
    if n_centers is not None and most < n_centers:
        raise DataError(
            f"X has {equations.fit.n} rows that are not held out, and {n_centers} centers are kept",
            "give at least twice as many rows as centers",
        )
    tried: dict[int, tuple[Floats | None, float]] = {}

    def at(n: int) -> float:
        if n not in tried:
            found = [equations.weights(n, penalty) for penalty in PENALTIES]
            errors = [equations.difference(w) for w in found]
            best = int(np.argmin(errors))
            tried[n] = found[best], errors[best]
        return tried[n][1]

    sizes = sorted({most, *(most >> k for k in range(1, 12) if most >> k >= FEWEST)})
    for n in sizes:
        at(n)
    keep = most
    if n_centers is None:
        keep = next((n for n in sizes if at(n) <= tolerance), 0)
        if not keep:
            few = most < len(equations.fit.A)
            raise ConfigError(
                f"with {most} centers"
                + (", which are as many as X has rows that are not held out," if few else "")
                + f" the outputs differ by {at(most):.2g} of their spread, and "
                f"{mention('tolerance', tolerance)} is less",
                ("give more rows, or raise it" if few else "raise it")
                + f", or give {mention('n_centers=')}; they differ less on rows that the model was "
                "not trained on",
            )
        low = max((n for n in sizes if n < keep), default=0)
        while keep - low > max(1, keep // 20):
            middle = (low + keep) // 2
            low, keep = (low, middle) if at(middle) <= tolerance else (middle, keep)
    at(keep)
    weights = tried[keep][0]
    assert weights is not None  # the largest penalty makes the equations positive
    return weights, [[n, tried[n][1]] for n in sorted(tried)]


def _with_centers(
    fitted: FittedModel, chosen: npt.NDArray[np.int64], weights: Floats, curve: list[list[float]]
) -> FittedModel:
    """Return the record of the model of the chosen centers. chosen : in the order of the run"""
    before: Mapping[str, Any] = fitted.attributes
    scale, alpha = fitted.targets.scale, before["dual_coef_"]
    difference = next(error for n, error in curve if n == len(chosen))
    found = {"n_centers": len(fitted.order), "difference": difference, "curve": curve}
    report = {name: value for name, value in before["report_"].items() if name != "posterior"}
    attributes = dict(before) | {
        "centers_": before["centers_"][fitted.order[chosen]],
        "dual_coef_": (weights * scale).astype(alpha.dtype),
        "n_centers_": len(chosen),
        "report_": report | {"compressed": found},
    }
    return replace(
        fitted, attributes=attributes, order=np.arange(len(chosen)), posterior=None, warm=None,
        online=None, begun=None,
    )  # fmt: skip
