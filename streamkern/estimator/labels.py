"""The labels of a classifier: checked, numbered for the training, and returned by `predict`.

A row has one class, or several labels: targets (n, L) of 0 or 1, one column for each label. The
model then has a function for each label, fitted to its column, and a row has the labels whose
function is above a half.
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
from streamkern.estimator.inputs import lazy_array, one_sentence
from streamkern.estimator.targets import check_length
from streamkern.store.class_labels import KnownClasses, labels_of
from streamkern.store.packing import refuse_packed
from streamkern.stream.sources.alignment import ReorderedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.train.model.kernel_model import KernelModel

HALF = 0.5


@dataclass(frozen=True)
class Labels:
    """The labels a classifier was trained on.

    classes : (c,) sorted, as scikit-learn has them; 0 to L - 1 if a row has several labels
    order : (c,) the model's output of each class; None if both are in the same order
    indicator : dtype of targets (n, L) with a column of 0 or 1 for each label; None for targets
        with one class for each row
    """

    classes: npt.NDArray[Any]
    order: npt.NDArray[np.int64] | None = None
    indicator: str | None = None

    @classmethod
    def of_targets(cls, y: npt.NDArray[Any]) -> Self:
        """Return the labels that occur in y, which are checked."""
        if y.dtype.kind != "O":
            return cls(np.unique(y))
        return cls(np.array(sorted(set(y.tolist())), dtype=object))

    @classmethod
    def from_names(cls, names: Sequence[str], dtype: Any = None) -> Self:
        """Return the labels of the classes of a source or a model, which holds names.

        dtype : of the labels that the names were made of; None if unknown, see `labels_of`
        """
        labels = labels_of(names, None if dtype is None else str(dtype))
        order = np.argsort(labels, kind="stable")
        same = np.array_equal(order, np.arange(len(order)))
        return cls(labels[order], None if same else order)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs; None if a row has several labels."""
        if self.indicator is not None:
            return None
        in_order = self.classes if self.order is None else self.classes[np.argsort(self.order)]
        # `tolist` turns some dates into numbers, and others into different dates.
        dates = in_order.dtype.kind in "mM"
        return tuple(str(label) for label in (in_order if dates else in_order.tolist()))

    @property
    def texts(self) -> tuple[str, ...]:
        """The labels that are text, in their order; empty for numbers and dates."""
        return () if self.classes.dtype.kind not in "OU" else tuple(map(str, self.classes.tolist()))

    @property
    def dtype(self) -> str | None:
        """The dtype, as text, of labels that their names restore; None for others."""
        if self.classes.dtype.kind in "biufUmM":
            return str(self.classes.dtype.str)
        return "O" if all(type(label) is str for label in self.classes.tolist()) else None

    def ids(self, y: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the output of the model for each label, (n,)."""
        y = self.alike(y)
        ids = np.minimum(np.searchsorted(self.classes, y), len(self.classes) - 1)
        unseen = self.classes[ids] != y
        if unseen.any():
            raise self._unseen(y, int(np.argmax(unseen)))
        return ids.astype(np.int64) if self.order is None else self.order[ids]

    def alike(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return labels that can be compared with `classes`; DataError for an unknown one.

        Labels of another type, such as text after training on numbers, are looked up.
        """
        y = y.astype(object) if y.dtype.kind == "T" else y
        if _line(y.dtype) == _line(self.classes.dtype):
            return y
        known = KnownClasses([str(label) for label in self.classes.tolist()], self.dtype)
        labels, inverse = np.unique(y, return_inverse=True)
        positions = [known.find(label) for label in labels.tolist()]
        if None in positions:
            raise self._unseen(y, int(np.argmax(inverse == positions.index(None))))
        return self.classes[np.array(positions, np.int64)[inverse]]

    def _unseen(self, y: npt.NDArray[Any], row: int) -> DataError:
        return DataError(
            f"label {np.asarray(y[row]).item()!r} of row {row} is none of the {len(self.classes)} "
            f"classes trained on, {some(self.names or ())}",
            "leave such rows out, or begin anew with all labels: fit without warm_start, or "
            "partial_fit with classes= at first",
        )

    def streamed_ids(self, y: Any) -> Any:
        """Return the outputs as `ids` does, for labels that are read in pieces."""
        y = lazy_array(y)
        if isinstance(y, np.ndarray):
            return self.ids(y)
        return y.map_blocks(self.ids, dtype=np.int64)

    def sorted(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the outputs of the model, (n, c), in the order of `classes`."""
        return F if self.order is None else F[:, self.order]


def _line(dtype: np.dtype[Any]) -> str:
    """Return the kind of labels: numbers and truth values can be compared, and text with text."""
    return {"b": "number", "i": "number", "u": "number", "f": "number"}.get(
        dtype.kind, "text" if dtype.kind in "OU" else dtype.kind
    )


def checked_labels(y: Any, n_rows: int, name: str = "y") -> npt.NDArray[Any]:
    """Return class labels (n,), which `save` keeps as they are, with their dtype.

    They are whole numbers, True and False, dates of NumPy, or text, which stays an array of objects
    or of NumPy's text as y is; lists are converted by NumPy.

    Raises
    ------
    DataError
        A row has no label, or one of another kind, which is named with its row.
    """
    if isinstance(y, list | tuple) and any(isinstance(label, str) for label in y):
        # NumPy would turn all of them into text.
        _checked_objects(np.fromiter(y, object, len(y)), name)
    refuse_packed(y, name)
    of_any_length = getattr(getattr(y, "dtype", None), "kind", "") == "T"
    array = np.asarray(y[:] if of_any_length else y)  # a zarr array of text, too
    if array.dtype.kind in "SO":
        _refuse_bytes(array, name)
    if array.size and array.dtype.kind not in "OTUbiufmM":
        raise _other_kind(array.flat[0], 0, name)
    with one_sentence(y, name):
        labels: npt.NDArray[Any] = column_or_1d(array, warn=True)
    check_length(labels, n_rows)
    if labels.dtype.kind in "OT":
        labels = _checked_objects(labels.astype(object), name)
    kind = labels.dtype.kind
    if kind == "U":
        _check_text(labels.tolist(), name)
    elif kind in "fmM" and not np.isfinite(labels).all():
        row = int(np.isfinite(labels).argmin())
        raise _no_label(labels[row], row, name)
    if kind == "f":
        try:
            check_classification_targets(labels)
        except ValueError:
            raise DataError(
                f"Unknown label type: continuous: {name} holds numbers with fractions, which are "
                "values and not classes",
                "use KernelRegressor",
            ) from None
        labels = labels if labels.dtype.itemsize <= 8 else labels.astype(np.float64)
    return labels


def _refuse_bytes(labels: npt.NDArray[Any], name: str) -> None:
    """Raise DataError for bytes, which equal no text that `predict` could return."""
    flat = labels.ravel().tolist()
    row = next((k for k, label in enumerate(flat) if isinstance(label, bytes)), None)
    if row is not None:
        raise DataError(
            f"the label {flat[row]!r} of row {row} of {name} is bytes, and labels are text, which "
            f"bytes are not equal to",
            f"give [k.decode() for k in {name}]",
        )


_KINDS: tuple[tuple[type, ...], ...] = (
    (str,),
    (bool, np.bool_),
    (int, float, np.integer, np.floating),
)
"""Types of labels in an array of objects; all labels must be of one entry."""


def _checked_objects(labels: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Return text as it is, and numbers with the dtype that NumPy has for all of them."""
    listed = labels.tolist()
    types = {} if (kinds := set(map(type, listed))) == {str} else {t: _kind_of(t) for t in kinds}
    for row, label in enumerate(listed if types else ()):
        if _is_missing(label):
            raise _no_label(label, row, name)
        of_enum = types[type(label)] == 0 and str(label) != label  # text of an Enum
        if of_enum or types[type(label)] is None or types[type(label)] != types[type(listed[0])]:
            raise _other_kind(label, row, name)
    if not types or set(types.values()) == {0}:
        _check_text(listed, name)
        return np.fromiter(map(str, listed), object, len(listed))
    numbers = np.array(listed)
    if numbers.dtype.kind == "O":  # too large for any dtype
        largest = max(listed, key=abs)
        raise _other_kind(largest, listed.index(largest), name)
    return numbers


def _kind_of(kind: type) -> int | None:
    return next((k for k, kinds in enumerate(_KINDS) if issubclass(kind, kinds)), None)


def _check_text(labels: list[str], name: str) -> None:
    """Raise DataError unless files and NumPy can hold all of the labels."""
    for label in set(labels):
        if not label:
            raise DataError(
                f"the label of row {labels.index(label)} of {name} is empty, which stands for a "
                "missing one",
                "give it one, or leave such rows out",
            )
        if "\0" in label or label != label.encode(errors="ignore").decode():
            raise DataError(
                f"the label {label!r} of row {labels.index(label)} of {name} has a character that "
                "is not kept in files",
                "take it out of the labels",
            )


def _is_missing(label: Any) -> bool:
    """Return True for a value that stands for no label: None, NaN, NaT or the NA of pandas."""
    try:
        return label is None or bool(label != label)
    except (TypeError, ArithmeticError):  # NA has no truth value
        return True
    except ValueError:  # an array
        return False


def _no_label(label: Any, row: int, name: str) -> DataError:
    what = "NaN" if _is_missing(label) else "infinity"
    return DataError(
        f"Input {name} contains {what}: the label of row {row} is {label}",
        "give it one, or leave such rows out",
    )


def _other_kind(label: Any, row: int, name: str) -> DataError:
    text = f"list(map(str, {name}))"
    return DataError(
        f"the label {label!r} of row {row} of {name} is of type {type(label).__name__}",
        "labels are all text, all whole numbers, all True or False, or all dates of NumPy: give "
        f"{mention(f'{name}={text}')}, for example",
    )


# --------------------------------------------------------------------------- several labels


def is_indicator(y: Any) -> bool:
    """Return whether the targets have a column for each of several labels."""
    return y is not None and len(shape_of(y)) == 2 and shape_of(y)[1] > 1


def shape_of(y: Any) -> tuple[int, ...]:
    """Return the shape of targets, which may be partly unknown in Dask."""
    return tuple(y.shape if hasattr(y, "shape") else np.asarray(y).shape)


def indicator_labels(n_labels: int, y: Any = None) -> Labels:
    """Return the labels of columns, 0 to L - 1.

    Predictions have the dtype of y, or are whole numbers if that is not numeric.
    """
    dtype = np.dtype(getattr(y, "dtype", None) or np.asarray(y).dtype)
    known = dtype if dtype.kind in "biuf" else np.dtype(np.int64)
    return Labels(np.arange(n_labels), indicator=known.str)


class SeveralLabels(ReorderedSource):
    """The rows of a store whose targets have a column of 0 or 1 for each of several labels."""

    kind = "labels"

    def __init__(self, base: BaseSource) -> None:
        super().__init__(base, base.columns, base.target_columns)

    def _ordered_targets(self, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
        _zeros_and_ones(y)
        return y


def check_outputs_alike(n_outputs: int, labels: Labels) -> None:
    """Raise DataError unless a store has a column for each of the labels trained on."""
    if labels.indicator is None or n_outputs != len(labels.classes):
        trained = "classes, one for each row" if labels.indicator is None else "labels for each row"
        raise DataError(
            f"the data has {n_outputs} columns of targets, and the model was trained on "
            f"{len(labels.classes)} {trained}",
            "give such targets",
        )


def check_alike(y: Any, labels: Labels) -> None:
    """Raise DataError unless y has the form trained on."""
    several, c = labels.indicator is not None, len(labels.classes)
    if is_indicator(y) != several or (several and shape_of(y)[1] != c):
        form = f"one of {c} classes for each row, give (n,) labels"
        if several:
            form = f"{c} labels for each row, give a column of 0 or 1 for each: (n, {c})"
        raise DataError(f"y has shape {shape_of(y)}", f"the model was trained on {form}")


def checked_indicator(y: Any, n_rows: int) -> npt.NDArray[np.float64]:
    """Return the targets as values (n, L), all 0 or 1."""
    try:
        with one_sentence(y, "y"):
            indicator = check_array(y, dtype=None, input_name="y")
    except TypeError:  # for pandas.NA
        raise DataError(
            "y has no value in some row", "leave such rows out, or fill them in"
        ) from None
    check_length(indicator, n_rows)
    return _zeros_and_ones(indicator)


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
            f"y has a column for each of {y.shape[1]} labels and holds {held}",
            "give 0 or 1 there, or the classes of the rows in one column; for values use "
            "KernelRegressor",
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
