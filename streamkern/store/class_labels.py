"""Convert between the labels of classes and their names, and look labels up.

A store and a model keep class names as text, together with the dtype of the labels that the names
were made from: integers, booleans, floating-point numbers, dates, or text ("O").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXT = "O"
BOOLEAN = np.dtype(bool).str
INTEGER, UNSIGNED = np.dtype(np.int64).str, np.dtype(np.uint64).str
_BOOLEAN_TEXTS = {"true": True, "false": False}


def labels_from_names(names: Sequence[str], dtype: str | None = None) -> NDArray[Any]:
    """Return the labels (c,) from which the names of classes were made.

    dtype : dtype of the labels, as text. Older stores and runs have None: then the labels are
        integers if all names are integers in their shortest form, else text.
    """
    if dtype is None and _are_integers(names):
        dtype = INTEGER
    kind = "U" if dtype is None else np.dtype(dtype).kind
    if kind == "b":
        return np.array([name == "True" for name in names])
    if kind == "m":  # a duration, with a name such as "3 days"
        numbers = np.array([int(name.split()[0]) for name in names])
        unit = np.datetime_data(np.dtype(f"{dtype}"))[0]
        return numbers.astype("m8" if unit == "generic" else f"m8[{unit}]").astype(dtype)
    if kind in "iuf":
        return np.array([float(name) if kind == "f" else int(name) for name in names], dtype)
    return np.array(names, dtype if kind in "OM" else None)


def dtype_of_texts(texts: Iterable[str]) -> str:
    """Return the dtype of labels that a file without types holds as text.

    It is INTEGER if all texts are integers in their shortest form, or UNSIGNED if some of them are
    2^63 or above; BOOLEAN if all are true or false, in any case; and otherwise TEXT.
    """
    texts = list(texts)
    if texts and all(text.lower() in _BOOLEAN_TEXTS for text in texts):
        return BOOLEAN
    return next((k for k in (INTEGER, UNSIGNED) if texts and _are_integers(texts, k)), TEXT)


def as_boolean(text: str) -> bool | None:
    """Return the value of "true" or "false", in any case; None for other text."""
    return _BOOLEAN_TEXTS.get(text.lower())


def encode_labels(y: NDArray[Any], labels: NDArray[Any], first_row: int) -> NDArray[np.int64]:
    """Return the index in `labels` of each label in y, (k,) int64.

    labels : (c,) distinct labels
    first_row : number of the first row of y, for messages

    Raises DataError for a label that is not in `labels`.
    """
    order = np.argsort(labels, kind="stable")
    position = np.minimum(np.searchsorted(labels[order], y), len(labels) - 1)
    ids: NDArray[np.int64] = order[position].astype(np.int64, copy=False)
    if (is_unknown := labels[ids] != y).any():
        row = int(np.argmax(is_unknown))
        raise DataError(
            f"label {np.asarray(y[row]).item()!r} of row {first_row + row} is none of the "
            f"{len(labels)} classes",
            "correct it, or leave the row out",
        )
    return ids


class KnownClasses:
    """The classes of a store or a model, in which the labels of other rows are looked up.

    A label is found by its value (1, 1.0 and True are one value), or else by its text or by the
    number in its text. So the same table has the same classes in a file, a store and a data frame,
    although a file may keep no types.

    names, dtype : as for `labels_from_names`
    """

    def __init__(self, names: Sequence[str], dtype: str | None = None) -> None:
        self.names = tuple(names)
        labels = labels_from_names(names, dtype)
        self.dtype: np.dtype[Any] = labels.dtype
        self._ids: dict[Any, int] = {name: k for k, name in enumerate(names)}
        values = labels.tolist()
        if labels.dtype.kind not in "biuf":  # True is found among the texts of a CSV file
            values = list(map(as_boolean, names))
        self._ids |= {value: k for k, value in enumerate(values) if value is not None}

    def find(self, label: Any) -> int | None:
        """Return the id of a label; None if it is not one of the classes."""
        if isinstance(label, np.generic):
            label = str(label) if label.dtype.kind in "mM" else label.item()
        class_id = self._ids.get(label)
        if class_id is None:
            class_id = self._ids.get(_number(label) if isinstance(label, str) else str(label))
        return class_id

    def class_ids(self, names: Sequence[str], dtype: str | None) -> list[int | None]:
        """Return the id of each class of other data, None for an unknown class.

        names, dtype : classes of the other data, as for `labels_from_names`
        """
        return [self.find(label) for label in labels_from_names(names, dtype)]


def _number(text: str) -> bool | int | float | None:
    """Return the number or truth value written in `text`; None for other text."""
    truth = as_boolean(text)
    if truth is not None:
        return truth
    if not text.isascii() or "_" in text:
        return None
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            pass
    return None


def _are_integers(names: Sequence[str], dtype: str = INTEGER) -> bool:
    """Return whether all names are numbers of an integer dtype, in their shortest form."""
    try:
        integers = np.array([int(name) for name in names], dtype)
    except (ValueError, OverflowError):
        return False
    return [str(k) for k in integers.tolist()] == list(names)
