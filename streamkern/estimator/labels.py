"""The labels of a classifier: checked, numbered for the training, and given back by `predict`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, unique_labels

from streamkern.basics.errors import DataError
from streamkern.estimator.inputs import check_length, lazy_array, one_sentence
from streamkern.predict.answer_files import class_labels
from streamkern.store.packing import refuse_packed


@dataclass(frozen=True)
class Labels:
    """The labels a classifier was trained on.

    classes : (c,) sorted, as scikit-learn has them; 0 to L - 1 where a row has several labels.
    order : (c,) the model's output of each class; None where both are in the same order.
    indicator : dtype of targets (n, L) with a column of 0 or 1 for each label; None for targets
    with one class for each row.
    """

    classes: npt.NDArray[Any]
    order: npt.NDArray[np.int64] | None = None
    indicator: str | None = None

    @classmethod
    def of_targets(cls, y: Any) -> Self:
        """Return the labels that occur in y, (n,) or a list."""
        return cls(unique_labels(y))

    @classmethod
    def from_names(cls, names: Sequence[str], dtype: Any = None) -> Self:
        """Return the labels of the classes of a source or a model, which holds names.

        dtype : of the labels that the names were made of; None if unknown, see `class_labels`.
        """
        labels = _from_names(names, dtype)
        order = np.argsort(labels, kind="stable")
        same = np.array_equal(order, np.arange(len(order)))
        return cls(labels[order], None if same else order)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the classes in the order of the outputs; None where a row has several labels."""
        if self.indicator is not None:
            return None
        in_order = self.classes if self.order is None else self.classes[np.argsort(self.order)]
        return tuple(str(label) for label in in_order.tolist())

    @property
    def dtype(self) -> str | None:
        """The dtype, as text, of labels that their names restore; None of others."""
        if self.classes.dtype.kind in "biufU":
            return str(self.classes.dtype.str)
        return "O" if all(type(label) is str for label in self.classes.tolist()) else None

    def ids(self, y: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the output of the model that stands for each label, (n,)."""
        y = y.astype(object) if y.dtype.kind == "T" else y
        ids = np.minimum(np.searchsorted(self.classes, y), len(self.classes) - 1)
        unseen = self.classes[ids] != y
        if unseen.any():
            row = int(np.argmax(unseen))
            raise DataError(
                f"label {np.asarray(y[row]).item()!r} of row {row} is none of the "
                f"{len(self.classes)} classes trained on; with partial_fit, name all labels in the "
                "first call's classes="
            )
        return ids.astype(np.int64) if self.order is None else self.order[ids]

    def streamed_ids(self, y: Any) -> Any:
        """Return the same for labels that are read in pieces."""
        y = lazy_array(y)
        if isinstance(y, np.ndarray):
            return self.ids(y)
        return y.map_blocks(self.ids, dtype=np.int64)

    def sorted(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the outputs of the model, (n, c), in the order of `classes`."""
        return F if self.order is None else F[:, self.order]


def checked_labels(y: Any, n_rows: int) -> npt.NDArray[Any]:
    """Class labels (n,) of any kind."""
    refuse_packed(y, "y")
    if getattr(getattr(y, "dtype", None), "kind", "") == "T":  # strings of any length
        y = np.asarray(y[:]).astype(object)
    with one_sentence(y, "y"):
        labels: npt.NDArray[Any] = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        _check_one_kind(labels)
        check_classification_targets(labels)
    check_length(labels, n_rows)
    return labels


def _check_one_kind(labels: npt.NDArray[Any]) -> None:
    """Raise DataError where words are among other labels, which nobody can sort."""
    if labels.dtype.kind != "O":
        return
    words = np.array([isinstance(label, str) for label in labels])
    if words.any() and not words.all():
        row = int(words.argmin())
        raise DataError(
            f"the label {labels[row]!r} of row {row} is no word, as others are; give labels of one "
            "kind, and leave out rows without one"
        )


def _from_names(names: Sequence[str], dtype: Any) -> npt.NDArray[Any]:
    if dtype is None:
        return class_labels(names)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.array([name == "True" for name in names])
    if kind in "iuf":
        number = float if kind == "f" else int
        return np.array([number(name) for name in names], dtype)
    return np.array(names, dtype if kind == "O" else None)
