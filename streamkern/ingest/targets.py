"""Convert raw targets to class codes or values, or raise an error that explains why not.

Class labels are integers or text. "auto" decides by the dtype, and for text by the first target of
all, so that the result does not depend on the block size: integers and words are labels, fractions
and matrices are values, and a later target of another kind is refused. Also refused are text that
is a number in another notation, missing targets, and classes if most of them have few rows. The
user then has to say what the targets are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.warning import warn
from streamkern.ingest.conform import RawBlock, warn_of_rounding
from streamkern.ingest.raw_targets import (
    as_labels,
    as_native_targets,
    as_values,
    boolean_columns,
    booleans_as_numbers,
    check_storable_text,
    missing_target_error,
    mixed_labels_error,
    other_notation_error,
)
from streamkern.ingest.tables.cells import row_number
from streamkern.ingest.tables.missing import is_missing
from streamkern.ingest.tables.numbers import is_integer, is_number, other_notation, share_a_unit
from streamkern.store import layout
from streamkern.store.class_labels import (
    BOOLEAN,
    INTEGER,
    TEXT,
    KnownClasses,
    as_boolean,
    dtype_of_texts,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_CLASSES = 65_536  # labels of more are refused, whatever `targets` says
MAX_AUTO_CLASSES = 1_000  # distinct integers; more are probably values, and refused
MANY_CLASSES = 30
"""More inferred classes are refused if their median number of rows is below `MIN_CLASS_ROWS`."""
MIN_CLASS_ROWS = 10
MAX_UNCHECKED_CLASSES = 10
"""More inferred classes are refused if they look like names of rows or like numbers with a unit."""
# Kinds of label text, as an error shows them.
_INTEGER_TEXT, _FRACTION_TEXT, _WORD_TEXT = "an integer", "a number with a fraction", "no number"


class TargetConverter:
    """Converter of y to values, or to provisional class codes while not all labels are known.

    A code is the number of labels seen before it first appeared; `sorted_class_ids` maps codes to
    the ids of the sorted class names once all rows are known.

    first_block : block of the first rows, which determine the kind of the targets
    targets : "auto", "classes" or "values", as in `ingest`
    as_text : whether all targets are text, as in a CSV
    known_classes : the existing classes; any other label is refused

    Attributes
    ----------
    are_classes : whether the targets are class labels
    shape, dtype : of the converted targets of a row
    """

    def __init__(
        self, first_block: RawBlock, targets: str = "auto", *, as_text: bool = False,
        known_classes: KnownClasses | None = None,
    ) -> None:  # fmt: skip
        if targets not in ("auto", "classes", "values"):
            raise ConfigError(
                f"{mention('targets', targets)} is unknown", 'use "auto", "classes" or "values"'
            )
        y = as_native_targets(first_block).y
        if y.ndim not in (1, 2) or (y.ndim == 2 and y.shape[1] < 1):
            raise DataError(
                f"y of {first_block.location} has shape {y.shape}", "give (n,) or (n, c)"
            )
        if y.ndim == 2 and y.shape[1] == 1:  # one column may hold labels
            y = y[:, 0]
        self._auto = targets == "auto"
        self._kind: str | None = None  # `_label_kind` of the first label of all, if it is text
        self.are_classes = targets == "classes" or (
            self._auto and _look_like_labels(first_block, y)
        )
        if self.are_classes and y.ndim > 1:
            raise DataError(
                f"y of {first_block.location} has shape {y.shape}",
                f"give class labels as one column, or use {mention('targets', 'values')} for a "
                "matrix of values",
            )
        self.shape: tuple[int, ...] = ()
        self.dtype: np.dtype[Any] = np.dtype(np.int32)
        self._are_booleans = boolean_columns(y)
        if not self.are_classes:
            self.shape = (1 if y.ndim == 1 else y.shape[1],)
            # Integers and text may need more digits than float32 has.
            is_narrow = y.dtype.kind == "f" and y.dtype.itemsize <= 4
            self.dtype = np.dtype(np.float32 if is_narrow else np.float64)
        self._codes: dict[int | str, int] = {}
        self._counts = np.zeros(0, np.int64)  # rows of each code
        self._as_text, self._known_classes = as_text, known_classes
        self._dtypes: set[str] = set()  # of labels that are not text

    @property
    def labels(self) -> list[int | str]:
        """Labels in the order of their codes."""
        return list(self._codes)

    @property
    def state(self) -> dict[str, Any]:
        """Labels, their numbers of rows, and the dtypes of those that are not text; JSON."""
        counts = self._counts.tolist()
        return {"labels": self.labels, "counts": counts, "dtypes": sorted(self._dtypes)}

    @property
    def label_dtype(self) -> str | None:
        """Dtype of the labels as in `StoreSpec`, "O" for text; None for values."""
        if not self.are_classes:
            return None
        has_text_codes = isinstance(next(iter(self._codes), ""), str)
        if has_text_codes and self._dtypes:  # dates and durations, whose codes are of their text
            return np.result_type(*map(np.dtype, self._dtypes)).str
        if has_text_codes:  # a file without types may write numbers and booleans as text
            return dtype_of_texts(map(str, self._codes)) if self._as_text else TEXT
        dtype = np.result_type(*map(np.dtype, self._dtypes)) if self._dtypes else np.dtype(INTEGER)
        # NumPy combines int64 and uint64 to float64, which does not represent all integers.
        if dtype.kind == "f" and all(np.dtype(k).kind in "iu" for k in self._dtypes):
            dtype = np.dtype(INTEGER if max(map(int, self._codes)) < 2**63 else np.uint64)
        return dtype.newbyteorder("=").str

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume from the state `state` of an interrupted pass."""
        labels = saved["labels"]
        self._codes = {label: code for code, label in enumerate(labels)}
        self._counts = np.array(saved.get("counts", [0] * len(labels)), np.int64)
        self._dtypes = set(saved.get("dtypes", ()))
        if labels and isinstance(labels[0], str):
            self._kind = _label_kind(labels[0])

    def convert(self, block: RawBlock) -> NDArray[Any]:
        """Return int32 codes (k,), or float values (k, c).

        Raises
        ------
        NonFiniteError
            If a target is NaN or infinite.
        DataError
            If a target is missing, or is not what the targets are: a number or a label, a label of
            the first kind or of a known class, or the same number of values as before. Also if
            there are too many labels.
        """
        block = as_native_targets(block)
        return self._encode(block) if self.are_classes else self._values(block)

    def sorted_class_ids(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Return the sorted class names, and for each code the id of its class.

        Integers, also when written as text, sort by value; other text alphabetically. The names of
        booleans are "False" and "True", however a CSV writes them.
        """
        names = [str(label) for label in self._codes]
        if self.label_dtype == BOOLEAN:
            truths = (as_boolean(name) for name in names)
            names = [
                str(bool(int(name)) if truth is None else truth)
                for name, truth in zip(names, truths, strict=True)
            ]
        numeric = all(map(is_integer, names))
        ordered = sorted(set(names), key=lambda name: (int(name) if numeric else 0, name))
        index_of = {name: i for i, name in enumerate(ordered)}
        return tuple(ordered), np.array([index_of[name] for name in names], np.int64)

    def check_classes(self, location: str) -> None:
        """Raise DataError if all classes are numbers, but not integers, or if classes inferred by
        "auto" look like values or names of rows.

        Warns if many classes are integers. Called once all rows are converted.
        """
        self._check_not_fractions(location)
        if not (self._auto and self.are_classes) or not len(self._counts):
            return
        n_classes, n_rows = len(self._counts), int(self._counts.sum())
        labels = [str(label) for label in self._codes]
        integers = all(map(is_integer, labels))
        are_many = n_classes > MANY_CLASSES
        has_small_classes = are_many and float(np.median(self._counts)) < MIN_CLASS_ROWS
        look_like_names = n_classes > MAX_UNCHECKED_CLASSES and 2 * n_classes > n_rows
        have_units = not integers and n_classes > MAX_UNCHECKED_CLASSES and share_a_unit(labels)
        if has_small_classes or look_like_names or have_units:
            remedy = f"choose another column with {mention('y=')} if they are names"
            if integers:
                remedy = f"pass {mention('targets', 'values')} if they are numbers"
            elif have_units:
                remedy = "write them without the unit if they are numbers"
            raise DataError(
                f"the targets of {location} ({some(labels[:5])}, ...) would be {n_classes} "
                f"classes, most of them with few of the {n_rows} rows",
                f"{remedy}, or pass {mention('targets', 'classes')} if they are classes",
            )
        if integers and are_many:
            warn(
                f"the targets of {location} are whole numbers and become {n_classes} classes; pass "
                f"{mention('targets', 'values')} if they are numbers, or "
                f"{mention('targets', 'classes')} if they are classes"
            )

    def _check_not_fractions(self, location: str) -> None:
        """Raise DataError if a file without types has only numbers as labels, some with a fraction.

        A file or data frame with types has such targets as floats, which are refused as well.
        """
        labels = list(map(str, self._codes))
        if not self._as_text or any(not is_number(k) or is_missing(k) for k in labels):
            return
        fractions = [label for label in labels if _has_fraction(label)]
        if fractions:
            raise DataError(
                f"the labels of {location} are numbers with fractions, such as {fractions[0]}",
                "class labels are integers or text; for regression, use KernelRegressor, or ingest "
                f"with {mention('targets', 'values')}",
            )

    def _values(self, block: RawBlock) -> NDArray[Any]:
        """Return targets as finite values (k, c); raise DataError for another number of them."""
        n_targets = block.y.reshape(len(block.y), -1).shape[1]
        if (n_targets,) != self.shape:
            raise DataError(
                f"{block.cell_location(0)} has {n_targets} targets, but the rows before have "
                f"{self.shape[0]}",
                "give all rows the same number of targets",
            )
        y = as_values(booleans_as_numbers(block, self._are_booleans)).reshape(len(block.y), -1)
        warn_of_rounding(y, block)
        with np.errstate(over="ignore"):
            y = np.ascontiguousarray(y, dtype=self.dtype)
        nonfinite = layout.first_nonfinite(y)
        if nonfinite is not None:
            raise _nonfinite_error(block, int(nonfinite[0]), nonfinite[2])
        return y

    def _encode(self, block: RawBlock) -> NDArray[np.int32]:
        """Return the provisional class codes (k,) of a block, and count them."""
        # Dates and durations are compared with the known classes in their unit.
        known = self._known_classes
        if known is not None and block.y.dtype.kind == known.dtype.kind in "mM":
            block = block._replace(y=block.y.astype(known.dtype))
        y = as_labels(block)
        if block.y.dtype.kind in "mM":
            self._dtypes.add(block.y.dtype.newbyteorder("=").str)
        elif y.dtype.kind != "U":
            self._dtypes.add(block.y.dtype.str if block.y.dtype.kind in "biuf" else INTEGER)
        labels, inverse = np.unique(y, return_inverse=True)
        if y.dtype.kind == "U":
            check_storable_text(block, labels.tolist())
        if self._auto and y.dtype.kind == "U":
            self._check_kinds(block, y, labels)
        self._check_known(block, y, labels)
        codes = np.empty(len(labels), np.int32)
        for i, label in enumerate(labels.tolist()):
            codes[i] = self._codes.setdefault(label, len(self._codes))
        self._check_labels(block)
        row_codes = codes[inverse.reshape(-1)]
        counts = np.bincount(row_codes, minlength=len(self._codes))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        return row_codes

    def _check_known(self, block: RawBlock, y: NDArray[Any], labels: NDArray[Any]) -> None:
        """Raise DataError for the first label that is not one of the known classes."""
        known = self._known_classes
        if known is None or all(known.find(label) is not None for label in labels.tolist()):
            return
        rows = enumerate(y.tolist())
        row, label = next((row, label) for row, label in rows if known.find(label) is None)
        raise DataError(
            f"the label of {block.cell_location(row)} is {label!r}, which is none of the classes "
            f"of the store, {some(known.names)}",
            "correct it, or ingest all rows to a new store",
        )

    def _check_kinds(self, block: RawBlock, y: NDArray[Any], labels: NDArray[Any]) -> None:
        """Raise DataError for the first label of another kind than the first label of all."""
        if any(map(is_missing, labels.tolist())):
            row = next(k for k, label in enumerate(y.tolist()) if is_missing(label))
            raise missing_target_error(block, row, labels=True)
        if any(map(other_notation, labels.tolist())):
            rows = enumerate(y.tolist())
            row, label = next((row, label) for row, label in rows if other_notation(label))
            raise other_notation_error(block, row, label, other_notation(label) or "")
        if self._kind is None:
            self._kind = _label_kind(str(y[0]))
        if all(_label_kind(label) == self._kind for label in labels.tolist()):
            return
        rows = enumerate(y.tolist())
        row, label = next((row, label) for row, label in rows if _label_kind(label) != self._kind)
        or_labels = f", {mention('targets', 'classes')} if all are labels"
        if self._as_text and self._kind == _INTEGER_TEXT and _has_fraction(label):
            or_labels = ""  # `check_classes` would refuse them
        if self._kind == _INTEGER_TEXT and is_number(label) and np.isinf(float(label)):
            raise _nonfinite_error(block, row, label)
        raise DataError(
            f"the target of {block.cell_location(row)} is {label!r}, {_label_kind(label)}, but the "
            f"target of the first row is {self._kind}",
            f"pass {mention('targets', 'values')} if all are numbers{or_labels}, or correct it",
        )

    def _check_labels(self, block: RawBlock) -> None:
        """Raise DataError for labels of two types, or for too many different labels."""
        n = len(self._codes)
        if len({type(label) for label in self._codes}) > 1:
            raise mixed_labels_error(block)
        if n > MAX_CLASSES:
            raise DataError(
                f"{block.location} has more than {MAX_CLASSES} distinct labels by row "
                f"{row_number(block.row_numbers, len(block.y) - 1)}",
                f"pass {mention('targets', 'values')} if they are numbers",
            )
        label = next(iter(self._codes))
        are_integers = isinstance(label, int) or is_integer(label)
        if self._auto and n > MAX_AUTO_CLASSES and are_integers:
            raise DataError(
                f"{block.location} has more than {MAX_AUTO_CLASSES} distinct integer targets",
                f"pass {mention('targets', 'values')} for regression or "
                f"{mention('targets', 'classes')} to keep them as labels",
            )


def _nonfinite_error(block: RawBlock, row: int, value: object) -> NonFiniteError:
    return NonFiniteError(
        f"the target of {block.cell_location(row)} is {value}, but targets must be finite",
        "correct such rows, or leave them out",
    )


def _label_kind(label: str) -> str:
    """Return which of three kinds of text a label is, as an error shows it."""
    if is_integer(label):
        return _INTEGER_TEXT
    return _FRACTION_TEXT if is_number(label) else _WORD_TEXT


def _has_fraction(label: str) -> bool:
    """Return whether a label is a number that is no integer."""
    return is_number(label) and not float(label).is_integer()


def _look_like_labels(first_block: RawBlock, y: NDArray[Any]) -> bool:
    """Return whether "auto" takes the targets y of the first block for labels."""
    if y.ndim != 1:
        return False
    if y.dtype.kind == "U":
        if is_missing(str(y[0])):
            raise missing_target_error(first_block, 0, labels=True)
        return _label_kind(str(y[0])) != _FRACTION_TEXT
    return y.dtype.kind in "biuO"
