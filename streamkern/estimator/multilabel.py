"""Several labels for each row: targets (n, L) of 0 or 1, one column for each label.

The model has a function for each label, fitted to its column, and a row has the labels whose
function is above a half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import check_array

from streamkern.basics.errors import DataError
from streamkern.basics.values import to_builtin
from streamkern.estimator.inputs import check_length, lazy_array, one_sentence
from streamkern.estimator.labels import Labels
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.column_order import Ordered
from streamkern.train.model import KernelModel

HALF = 0.5


def is_indicator(y: Any) -> bool:
    """Return whether the targets have a column for each of several labels."""
    return y is not None and len(shape_of(y)) == 2 and shape_of(y)[1] > 1


def shape_of(y: Any) -> tuple[int, ...]:
    """Return the shape of targets, which may be partly unknown in Dask."""
    return tuple(y.shape if hasattr(y, "shape") else np.asarray(y).shape)


def several_labels(n_labels: int) -> Labels:
    """Return the labels of a store with a column for each: predictions are whole numbers."""
    return Labels(np.arange(n_labels), indicator=np.dtype(np.int64).str)


def check_outputs_alike(n_outputs: int, labels: Labels) -> None:
    """Raise DataError unless a store has a column for each of the labels trained on."""
    if labels.indicator is None or n_outputs != len(labels.classes):
        trained = "classes, one for each row" if labels.indicator is None else "labels for each row"
        raise DataError(
            f"the data has {n_outputs} columns of targets, and the model was trained on "
            f"{len(labels.classes)} {trained}; give such targets"
        )


class SeveralLabels(Ordered):
    """The rows of a store whose targets have a column of 0 or 1 for each of several labels."""

    kind = "labels"

    def __init__(self, base: BaseSource) -> None:
        super().__init__(base, base.columns, base.target_columns)

    def _ordered_targets(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        _zeros_and_ones(y)
        return y


def indicator_labels(y: Any) -> Labels:
    """Return the labels of the columns, 0 to L - 1.

    Predictions have the dtype of y, or are whole numbers if that is not numeric.
    """
    dtype = np.dtype(getattr(y, "dtype", None) or np.asarray(y).dtype)
    known = (dtype if dtype.kind in "biuf" else np.dtype(np.int64)).str
    return Labels(np.arange(shape_of(y)[1]), indicator=known)


def check_alike(y: Any, classes: npt.NDArray[Any], *, several: bool) -> None:
    """Raise DataError unless y has the form trained on. several : labels for each row"""
    if is_indicator(y) == several and (not several or shape_of(y)[1] == len(classes)):
        return
    if several:
        raise DataError(
            f"y has shape {shape_of(y)}; the model was trained on {len(classes)} labels for each "
            f"row, give a column of 0 or 1 for each: (n, {len(classes)})"
        )
    raise DataError(
        f"y has shape {shape_of(y)}; the model was trained on one of {len(classes)} classes for "
        "each row, give (n,) labels"
    )


def checked_indicator(y: Any, n_rows: int) -> npt.NDArray[np.float64]:
    """Return the targets as values (n, L), all 0 or 1."""
    try:
        with one_sentence(y, "y"):
            found = check_array(y, dtype=None, input_name="y")
    except TypeError:  # for pandas.NA
        raise DataError(
            "y has no value in some row; leave such rows out, or fill them in"
        ) from None
    check_length(found, n_rows)
    return _zeros_and_ones(found)


def streamed_indicator(y: Any) -> Any:
    """Return these values for targets that are read in pieces, and checked then."""
    y = lazy_array(y)
    if isinstance(y, np.ndarray):
        return checked_indicator(y, len(y))
    return y.rechunk({1: -1}).map_blocks(_zeros_and_ones, dtype=np.float64)


def _zeros_and_ones(y: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wrong = (y != 0) & (y != 1)
    if wrong.any():
        value = to_builtin(y[wrong][0])
        held = f"{value:g}" if isinstance(value, int | float) else repr(value)
        raise DataError(
            f"y has a column for each of {y.shape[1]} labels and holds {held}; give 0 or 1 "
            "there, or the classes of the rows in one column; for values use KernelRegressor"
        )
    values: npt.NDArray[np.float64] = y.astype(np.float64)
    return values


def subset_accuracy(model: KernelModel, source: BaseSource) -> float:
    """Return the share of rows that get all of their labels and no other."""
    right = 0
    with model.backend.active():
        for _, F, Y in model.stream(source):
            right += int(((F > HALF) == (Y > HALF)).all(axis=1).sum())
    return right / source.n_rows
