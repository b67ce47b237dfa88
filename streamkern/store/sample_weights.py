"""Sample weights w_i >= 0 of mean 1; the squared loss is half the mean of w_i |f(x_i) - y_i|^2.

A row may have a weight (array `w` of a store, `sample_weight` of an array), and a class may have
one; training uses the product of both, divided by its mean over an epoch. With mean 1 the ridge,
the losses and the step rules keep the scale that they have without weights, and a row with weight 3
counts as three copies of it. The weights of rows are stored as float32 before this division,
so the rows of a mixture of stores keep the proportions in which they were stored.

The weights of whole stores in a mixture (`data.weights`) are not sample weights, but the shares of
the stores in the rows of an epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.warning import warn

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHT_DTYPE = np.dtype(np.float32)
NEGLIGIBLE_WEIGHT = 1e-12
"""Weights up to this multiple of the largest count as 0, because float32 cannot show their effect.
"""
TINY_TOTAL = 1e-300
"""Replaces a total weight of 0 as a divisor."""
IMBALANCE_RATIO = 100
"""Rows of the largest class per row of the smallest, above which `class_notes` reports them."""
ClassWeight = Mapping[str, float] | Literal["balanced"]


def as_weights(
    w: Any, n_rows: int, location: str, row_numbers: int | NDArray[np.int64] = 0
) -> NDArray[np.float32]:
    """Return the weights as (n_rows,) float32, finite and none below 0.

    location : name of the input, for messages
    row_numbers : the number of the first row or the numbers (n_rows,) of all rows, for messages

    Raises
    ------
    DataError
        If w has another shape, does not have numbers, or has a weight that is negative, NaN or, as
        float32, infinite.
    """
    w = np.asarray(w)
    if w.shape != (n_rows,) or w.dtype.kind not in "biuf":
        raise DataError(
            f"the sample weights of {location} have shape {w.shape} and dtype {w.dtype}",
            f"give one number for each of its {n_rows} rows",
        )
    with np.errstate(over="ignore"):
        weights: NDArray[np.float32] = w.astype(WEIGHT_DTYPE, copy=False)
    invalid = ~(np.isfinite(weights) & (weights >= 0))
    largest = w.max(initial=0)
    too_small = 0 < largest < np.finfo(WEIGHT_DTYPE).tiny
    # All weights are valid as they were given, but some are infinite as float32.
    too_large = invalid.any() and np.isfinite(largest) and w.min() >= 0
    if too_small or too_large:
        raise DataError(
            f"the sample weights of {location} are up to {largest:.3g}, which float32 cannot hold",
            "divide all of them by their mean",
        )
    if invalid.any():
        row = int(np.argmax(invalid))
        number = row_numbers + row if isinstance(row_numbers, int) else row_numbers[row]
        raise DataError(
            f"the sample weight of {location}, row {number}, is {w[row]}",
            "give finite numbers, 0 or above",
        )
    return weights


def warn_of_unused(w: Any, n_rows: int, location: str) -> None:
    """Warn if the array `w` of a group or file could be sample weights that were not requested.

    w : the member called "w", or None
    n_rows : number of rows of X
    location : name of the group, for messages
    """
    dtype = getattr(w, "dtype", None)
    if getattr(w, "shape", None) == (n_rows,) and getattr(dtype, "kind", "") in "biuf":
        warn(
            f"the array 'w' of {location} has a number for each row, and is not used as sample "
            f"weights; give {mention('sample_weight', 'w')} to use it, or ignore this if it holds "
            "something else"
        )


def add_totals(
    totals: NDArray[np.float64], y: NDArray[Any], w: NDArray[Any] | None, classes: bool
) -> None:
    """Add the weights of a block to `totals`, (c,) by class or (1,); without weights, its rows.

    y : (k,) class ids if `classes`, otherwise any array of k targets
    w : (k,) sample weights, or None
    """
    if classes:
        totals += np.bincount(y.astype(np.int64), w, minlength=len(totals))
    else:
        totals += len(y) if w is None else w.sum(dtype=np.float64)


class WeightedRows(Protocol):
    """The attributes of a source that `weight_factors` uses, see `BaseSource`."""

    n_rows: int
    classes: tuple[str, ...] | None
    weighted: bool

    @property
    def totals(self) -> NDArray[np.float64] | None: ...


def weight_factors(
    source: WeightedRows, class_weight: ClassWeight | None = None
) -> NDArray[np.float64] | None:
    """Return the factors of the row weights that make their mean 1; None without weights.

    The result is (c,), one factor for each class, or (1,) if targets are values.

    class_weight : weights by class name, 1 for classes without one; or "balanced", which gives
        every class that has rows the same total weight: n / (classes * rows of the class) per row,
        as in scikit-learn

    Raises
    ------
    ConfigError
        If class_weight is given for values, names an unknown class, or the rows per class are not
        known.
    DataError
        If all weights are 0.
    """
    totals = source.totals
    if class_weight is None and not source.weighted:
        return None
    if class_weight is not None and source.classes is None:
        raise ConfigError(
            f"{mention('data.class_weight')} needs classes, but the targets are values",
            "leave it out, or give a weight for each row",
        )
    if totals is None:
        raise ConfigError(
            f"{mention('data.class_weight', class_weight)} needs the number of rows of each class, "
            "which this source does not know",
            "write the rows to a store first",
        )
    factors = _class_factors(class_weight, source.classes or (), totals)
    total = float(factors @ totals)
    if not total > 0:
        raise DataError("all sample weights are zero", "give some rows a weight above 0")
    return np.asarray(factors * (source.n_rows / total))


def has_weight(w: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (k,) bool, True for weights w (k,) that are not negligible beside the largest."""
    return np.asarray(w > NEGLIGIBLE_WEIGHT * w.max(initial=0))


def weigh_rows(
    y: NDArray[Any], w: NDArray[Any] | None, factors: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return the weights (k,) of rows with targets y, (k,) class ids or (k, c) values.

    Weights that are negligible beside the largest are 0.

    w : (k,) sample weights, or None
    factors : from `weight_factors`, or None
    """
    weights = np.ones(len(y)) if w is None else w.astype(np.float64)
    if factors is not None:
        weights *= factors[0] if y.ndim > 1 or len(factors) == 1 else factors[y.astype(int)]
    return np.where(has_weight(weights), weights, 0.0)


def class_notes(classes: tuple[str, ...], totals: NDArray[np.float64], noun: str) -> list[str]:
    """Return sentences about anything unusual in the classes.

    totals : (c,) number of rows of each class, or their total weight
    noun : noun for the sentences, "weight", or "rows", which a phrase may follow
    """
    present = np.flatnonzero(totals > 0)
    if len(present) == 0:
        return []
    if len(present) == 1:
        verb = "are" if noun.startswith("rows") else "is"
        return [
            f"all {noun} {verb} of class {classes[present[0]]!r}, so there is nothing to learn; "
            "add rows of another class"
        ]
    notes = []
    if len(present) < len(totals):
        empty_class = classes[int(np.argmin(totals > 0))]
        n_others = len(totals) - len(present) - 1
        clause = f"class {empty_class!r} has no {noun}"
        if n_others:
            clause = f"class {empty_class!r} and {n_others} more have no {noun}"
        notes.append(f"{clause}, and will not be predicted")
    shares = totals / totals.sum()
    low, high = present[np.argmin(totals[present])], int(np.argmax(totals))
    if totals[high] > IMBALANCE_RATIO * totals[low]:
        notes.append(
            f"classes are unbalanced: class {classes[low]!r} has {100 * shares[low]:.2g}% of the "
            f"{noun} and class {classes[high]!r} {100 * shares[high]:.3g}%; set class_weight = "
            '"balanced" if both matter alike'
        )
    return notes


def _class_factors(
    class_weight: ClassWeight | None, classes: tuple[str, ...], totals: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the factor (c,) of each class, before the mean weight is made 1."""
    if class_weight is None:
        return np.ones(len(totals))
    if class_weight == "balanced":
        present = totals > 0
        total = max(totals.sum(), TINY_TOTAL)
        shares = np.where(present, totals, 1) * max(1, present.sum()) / total
        return np.asarray(present / shares)
    unknown = [name for name in class_weight if name not in classes]
    if unknown:
        raise ConfigError(
            f"{mention('data.class_weight')} has the class {unknown[0]!r}, which does not occur "
            "in the data",
            f"use its classes, {some(classes)}",
        )
    return np.array([float(class_weight.get(name, 1.0)) for name in classes])
