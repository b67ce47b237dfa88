"""Check the labels of a classifier, and convert between labels and outputs of the model.

A row has one class, or several labels: targets (n, L) of 0 or 1, one column for each label. For
several labels, the model has an output for each label, and a row has the labels whose output is
above a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.values import to_builtin
from streamkern.estimator.inputs import to_dask_or_numpy
from streamkern.estimator.mistakes import shorten_errors
from streamkern.estimator.targets import check_length
from streamkern.store.class_labels import KnownClasses, labels_from_names
from streamkern.store.packing import refuse_packed
from streamkern.stream.sources.alignment import ReorderedSource
from streamkern.stream.sources.base import BaseSource

LABEL_THRESHOLD = 0.5
"""Output above which a row has a label."""


@dataclass(frozen=True)
class Labels:
    """The labels of the training data of a classifier.

    classes : (c,) sorted labels, as in scikit-learn; 0 to L - 1 if a row has several labels
    order : (c,) the number of the model's output for each class; None if both are in one order
    indicator : dtype of targets (n, L) with a column of 0 or 1 for each label; None if each row has
        one class
    """

    classes: npt.NDArray[Any]
    order: npt.NDArray[np.int64] | None = None
    indicator: str | None = None

    @classmethod
    def from_targets(cls, y: npt.NDArray[Any]) -> Self:
        """Return the labels that occur in y, (n,), as `checked_labels` returns it."""
        if y.dtype.kind != "O":
            return cls(np.unique(y))
        return cls(np.array(sorted(set(y.tolist())), dtype=object))

    @classmethod
    def from_names(cls, names: Sequence[str], dtype: Any = None) -> Self:
        """Return the labels for the names of classes in a source or a model.

        dtype : dtype of the labels from which the names were made; None if unknown, see
            `labels_from_names`
        """
        labels = labels_from_names(names, None if dtype is None else str(dtype))
        order = np.argsort(labels, kind="stable")
        is_sorted = np.array_equal(order, np.arange(len(order)))
        return cls(labels[order], None if is_sorted else order)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs; None if a row has several labels."""
        if self.indicator is not None:
            return None
        in_order = self.classes if self.order is None else self.classes[np.argsort(self.order)]
        # `tolist` would convert dates to numbers or other types.
        are_dates = in_order.dtype.kind in "mM"
        return tuple(str(label) for label in (in_order if are_dates else in_order.tolist()))

    @property
    def texts(self) -> tuple[str, ...]:
        """The labels in order if they are text; empty for numbers and dates."""
        return () if self.classes.dtype.kind not in "OU" else tuple(map(str, self.classes.tolist()))

    @property
    def dtype(self) -> str | None:
        """The dtype, as text, with which `from_names` restores the labels; None if it cannot."""
        if self.classes.dtype.kind in "biufUmM":
            return str(self.classes.dtype.str)
        return "O" if all(type(label) is str for label in self.classes.tolist()) else None

    def ids(self, y: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the number of the model's output for each label, (n,).

        Raises DataError for a label that the training data did not have.
        """
        y = self.to_comparable(y)
        ids = np.minimum(np.searchsorted(self.classes, y), len(self.classes) - 1)
        unseen = self.classes[ids] != y
        if unseen.any():
            raise self._unseen_label_error(y, int(np.argmax(unseen)))
        return ids.astype(np.int64) if self.order is None else self.order[ids]

    def to_comparable(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return labels, (n,), with a dtype that can be compared with `classes`.

        Labels of another kind, such as text after training on numbers, are converted by their
        names; DataError for one that no class has.
        """
        y = y.astype(object) if y.dtype.kind == "T" else y
        if _comparable_kind(y.dtype) == _comparable_kind(self.classes.dtype):
            return y
        classes = KnownClasses([str(label) for label in self.classes.tolist()], self.dtype)
        labels, inverse = np.unique(y, return_inverse=True)
        positions = [classes.find(label) for label in labels.tolist()]
        if None in positions:
            raise self._unseen_label_error(y, int(np.argmax(inverse == positions.index(None))))
        return self.classes[np.array(positions, np.int64)[inverse]]

    def _unseen_label_error(self, y: npt.NDArray[Any], row: int) -> DataError:
        """Return the error for a label that is not among the classes."""
        return DataError(
            f"label {np.asarray(y[row]).item()!r} of row {row} is none of the "
            f"{len(self.classes)} classes of the training data, {some(self.names or ())}",
            "leave such rows out, or train a new model on all labels: fit without warm_start, or "
            "partial_fit with classes= in the first call",
        )

    def lazy_ids(self, y: Any) -> Any:
        """Return the result of `ids` for labels that may be lazy; a Dask array if they are."""
        y = to_dask_or_numpy(y)
        if isinstance(y, np.ndarray):
            return self.ids(y)
        return y.map_blocks(self.ids, dtype=np.int64)

    def sort_outputs(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return F, (n, c) outputs of the model, with the columns in the order of `classes`."""
        return F if self.order is None else F[:, self.order]


def _comparable_kind(dtype: np.dtype[Any]) -> str:
    """Return "number", "text", or the kind of other dtypes; labels of one kind can be compared."""
    if dtype.kind in "biuf":
        return "number"
    return "text" if dtype.kind in "OU" else dtype.kind


def checked_labels(y: Any, n_rows: int, name: str = "y") -> npt.NDArray[Any]:
    """Return class labels, (n,), with a dtype that `save` can store.

    They are whole numbers, bools, NumPy dates, or text. Text remains an array of objects or of
    NumPy's text dtype; lists are converted by NumPy.

    Raises
    ------
    DataError
        A label is missing, empty, of another kind, or has characters that files cannot store; the
        message names its row. Or y has several columns, fractions, or a length other than `n_rows`.
    """
    if isinstance(y, list | tuple) and any(isinstance(label, str) for label in y):
        # NumPy would convert all of them to text, including numbers and None.
        _checked_objects(np.fromiter(y, object, len(y)), name)
    refuse_packed(y, name)
    # y may be a zarr array of text of variable length, kind "T", which must be read explicitly.
    has_variable_length = getattr(getattr(y, "dtype", None), "kind", "") == "T"
    array = np.asarray(y[:] if has_variable_length else y)
    if array.dtype.kind in "SO":
        _refuse_bytes(array, name)
    if array.size and array.dtype.kind not in "OTUbiufmM":
        raise _label_kind_error(array.flat[0], 0, name)
    with shorten_errors(y, name):
        labels: npt.NDArray[Any] = column_or_1d(array, warn=True)
    check_length(labels, n_rows)
    if labels.dtype.kind in "OT":
        labels = _checked_objects(labels.astype(object), name)
    kind = labels.dtype.kind
    if kind == "U":
        _check_text(labels.tolist(), name)
    elif kind in "fmM" and not np.isfinite(labels).all():
        row = int(np.isfinite(labels).argmin())
        raise _missing_label_error(labels[row], row, name)
    if kind == "f":
        try:
            check_classification_targets(labels)
        except ValueError:
            raise DataError(
                f"Unknown label type: continuous: {name} holds numbers with fractions, which are "
                "values, not classes",
                "use KernelRegressor",
            ) from None
        labels = labels if labels.dtype.itemsize <= 8 else labels.astype(np.float64)
    return labels


def _refuse_bytes(labels: npt.NDArray[Any], name: str) -> None:
    """Raise DataError for bytes, which are not equal to the text that `predict` would return."""
    flat = labels.ravel().tolist()
    row = next((k for k, label in enumerate(flat) if isinstance(label, bytes)), None)
    if row is not None:
        raise DataError(
            f"the label {flat[row]!r} of row {row} of {name} is bytes, not text",
            f"decode the labels: [k.decode() for k in {name}]",
        )


_LABEL_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "truth": (bool, np.bool_),  # before numbers, because bool is a subclass of int
    "number": (int, float, np.integer, np.floating),
}
"""Kind of labels in an array of objects -> their types; all labels must be of one kind."""


def _checked_objects(labels: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Return labels in an array of objects: text unchanged, numbers with NumPy's dtype for them."""
    values = labels.tolist()
    types = set(map(type, values))
    # Nearly all such arrays hold only str, and need no check of each label.
    kinds = {} if types == {str} else {label_type: _kind_of(label_type) for label_type in types}
    for row, label in enumerate(values if kinds else ()):
        if _is_missing(label):
            raise _missing_label_error(label, row, name)
        kind = kinds[type(label)]
        is_enum = kind == "text" and str(label) != label  # a member of an Enum of text
        if is_enum or kind is None or kind != kinds[type(values[0])]:
            raise _label_kind_error(label, row, name)
    if not kinds or set(kinds.values()) == {"text"}:
        _check_text(values, name)
        return np.fromiter(map(str, values), object, len(values))
    numbers = np.array(values)
    if numbers.dtype.kind == "O":  # a number is too large for any dtype
        largest = max(values, key=abs)
        raise _label_kind_error(largest, values.index(largest), name)
    return numbers


def _kind_of(label_type: type) -> str | None:
    """Return the name in `_LABEL_TYPES` of a type's kind; None for other types."""
    kinds = (kind for kind, types in _LABEL_TYPES.items() if issubclass(label_type, types))
    return next(kinds, None)


def _check_text(labels: list[str], name: str) -> None:
    """Raise DataError unless files and NumPy can store all of the labels."""
    for label in set(labels):
        if not label:
            raise DataError(
                f"the label of row {labels.index(label)} of {name} is empty, which means missing",
                "fill in such labels, or leave such rows out",
            )
        # UTF-8 has no lone surrogates, and NumPy drops NUL at the end of text.
        if "\0" in label or label != label.encode(errors="ignore").decode():
            raise DataError(
                f"the label {label!r} of row {labels.index(label)} of {name} has a character that "
                "files cannot store",
                "remove the character from the labels",
            )


def _is_missing(label: Any) -> bool:
    """Return whether a value means a missing label: None, NaN, NaT or the NA of pandas."""
    try:
        return label is None or bool(label != label)
    except (TypeError, ArithmeticError):  # NA has no truth value
        return True
    except ValueError:  # an array
        return False


def _missing_label_error(label: Any, row: int, name: str) -> DataError:
    """Return the error for a label that is missing or infinite."""
    value = "NaN" if _is_missing(label) else "infinity"
    return DataError(
        f"Input {name} contains {value}: the label of row {row} is {label}",
        "fill in such labels, or leave such rows out",
    )


def _label_kind_error(label: Any, row: int, name: str) -> DataError:
    """Return the error for a label that is of no supported kind, or of another than the first."""
    as_text = f"list(map(str, {name}))"
    return DataError(
        f"the label {label!r} of row {row} of {name} is of type {type(label).__name__}, but labels "
        "must be all text, all whole numbers, all True or False, or all dates of NumPy",
        f"give {mention(f'{name}={as_text}')}, for example",
    )


# --------------------------------------------------------------------------- several labels


def is_indicator(y: Any) -> bool:
    """Return whether the targets are (n, L) with L above 1: a column for each of several labels."""
    return y is not None and len(target_shape(y)) == 2 and target_shape(y)[1] > 1


def target_shape(y: Any) -> tuple[int, ...]:
    """Return the shape of targets, which may be partly unknown in Dask."""
    return tuple(y.shape if hasattr(y, "shape") else np.asarray(y).shape)


def indicator_labels(n_labels: int, y: Any = None) -> Labels:
    """Return the labels of targets with a column for each label, numbered 0 to L - 1.

    y : the targets, whose dtype predictions will have; int64 if it is not numeric
    """
    dtype = np.dtype(getattr(y, "dtype", None) or np.asarray(y).dtype)
    indicator = dtype if dtype.kind in "biuf" else np.dtype(np.int64)
    return Labels(np.arange(n_labels), indicator=indicator.str)


class SeveralLabels(ReorderedSource):
    """A source of a store's rows, whose targets have a column of 0 or 1 for each label."""

    kind = "labels"

    def __init__(self, base: BaseSource) -> None:
        super().__init__(base, base.columns, base.target_columns)

    def _ordered_targets(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        _as_zeros_and_ones(y)
        return y


def check_label_columns(n_outputs: int, labels: Labels) -> None:
    """Raise DataError unless a store has a column for each of the labels of the training data."""
    if labels.indicator is None or n_outputs != len(labels.classes):
        c = len(labels.classes)
        trained = f"{c} labels for each row"
        remedy = f"give {c} columns of 0 or 1"
        if labels.indicator is None:
            trained, remedy = f"{c} classes, one for each row", "give one class for each row"
        raise DataError(
            f"the data has {n_outputs} columns of targets, but the model was trained on {trained}",
            remedy,
        )


def check_target_form(y: Any, labels: Labels) -> None:
    """Raise DataError unless y has the form of the training targets: (n,), or (n, L)."""
    has_several, c = labels.indicator is not None, len(labels.classes)
    if is_indicator(y) != has_several or (has_several and target_shape(y)[1] != c):
        trained, remedy = f"one of {c} classes for each row", "give labels of shape (n,)"
        if has_several:
            trained, remedy = f"{c} labels for each row", f"give columns of 0 or 1, (n, {c})"
        raise DataError(
            f"y has shape {target_shape(y)}, but the model was trained on {trained}", remedy
        )


def checked_indicator(y: Any, n_rows: int) -> npt.NDArray[np.float64]:
    """Return targets with a column for each label as float64 (n, L); DataError unless 0 or 1."""
    try:
        with shorten_errors(y, "y"):
            indicator = check_array(y, dtype=None, input_name="y")
    except TypeError:  # for pandas.NA
        raise DataError(
            "y has no value in some row", "leave such rows out, or fill them in"
        ) from None
    check_length(indicator, n_rows)
    return _as_zeros_and_ones(indicator)


def checked_lazy_indicator(y: Any) -> Any:
    """Return the result of `checked_indicator` for targets that may be lazy, checked when read."""
    y = to_dask_or_numpy(y)
    if isinstance(y, np.ndarray):
        return checked_indicator(y, len(y))
    return y.rechunk({1: -1}).map_blocks(_as_zeros_and_ones, dtype=np.float64)


def _as_zeros_and_ones(y: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return targets (n, L) as float64; DataError unless all are 0 or 1."""
    is_other = (y != 0) & (y != 1)
    if is_other.any():
        value = to_builtin(y[is_other][0])
        text = f"{value:g}" if isinstance(value, int | float) else repr(value)
        raise DataError(
            f"y has a column for each of {y.shape[1]} labels and holds {text}",
            "give 0 or 1 there, or the classes of the rows in one column; for values use "
            "KernelRegressor",
        )
    values: npt.NDArray[np.float64] = y.astype(np.float64)
    return values
