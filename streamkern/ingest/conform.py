"""Turns raw blocks of rows into what a store holds, or says in one sentence why it can not.

X keeps its dtype when a store can hold it; wider integers become floats. Targets are either
class labels (integers or text) or values. "auto" decides from the first block: text and integers
are labels, numbers with a fraction and matrices are values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError
from streamkern.store import layout
from streamkern.store.sample_weights import as_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_CLASSES = 65_536
MAX_AUTO_CLASSES = 1_000  # more distinct integers than this are probably values: ask
MAX_LABEL = 256  # characters of one
_INTEGER = re.compile(r"[+-]?\d+\Z")


class RawBlock(NamedTuple):
    """Consecutive rows of one input, as read.

    X (k, ...), y (k,) or (k, c), (k, 0) where no targets are read; `where` names the file, `start`
    the block's first row in it, `columns` the feature columns, where the format names them; w (k,)
    the sample weights, as numbers or text, where there are some.
    """

    X: NDArray[Any]
    y: NDArray[Any]
    where: str
    start: int
    columns: Sequence[str] | None = None
    w: NDArray[Any] | None = None

    def part(self, start: int, stop: int | None = None) -> RawBlock:
        """The rows from `start` to `stop` of the block."""
        rows, first = slice(start, stop), self.start + start
        w = None if self.w is None else self.w[rows]
        return self._replace(X=self.X[rows], y=self.y[rows], start=first, w=w)

    def weights(self) -> NDArray[np.float32] | None:
        """The sample weights as stored; DataError for one that is no number, 0 or above."""
        if self.w is None:
            return None
        try:
            w = self.w.astype(np.float64) if self.w.dtype.kind in "UO" else self.w
        except (ValueError, TypeError) as error:
            raise DataError(
                f"a sample weight after {self.place(0)} is not a number ({error}); correct it"
            ) from error
        return as_weights(w, len(self.X), self.where, self.start)

    def place(self, row: int, column: int | None = None) -> str:
        """``train.csv, row 17, column 'age'`` for messages; rows are counted from 0."""
        text = f"{self.where}, row {self.start + row}"
        if column is None:
            return text
        return f"{text}, column {column if self.columns is None else repr(self.columns[column])}"


class Features:
    """Converts X; row shape and dtype are settled by the first block.

    Parameters
    ----------
    first : the first rows
    dtype : to convert all rows to, whatever theirs is. By default the narrowest stored one that
        holds them, and rows that come later in one that it does not hold are refused.
    natural : the dtype of the rows where it is known of all of them, or else that of `first`
    """

    def __init__(self, first: RawBlock, dtype: Any = None, natural: Any = None) -> None:
        shape = first.X.shape[1:]
        self._source_shape = shape
        # (n, h, w) images get their one channel.
        self.row_shape: tuple[int, ...] = (*shape, 1) if len(shape) == 2 else shape
        self._settled = dtype is None
        self.dtype: np.dtype[Any] = (
            _storage_dtype(first.X.dtype if natural is None else natural, first.where)
            if dtype is None
            else layout.wanted_dtype(dtype)
        )
        layout.check_row_layout(self.row_shape, self.dtype, f"X of {first.where}")

    def convert(self, block: RawBlock) -> NDArray[Any]:
        """(k, *row_shape) of `dtype`, C order, finite.

        Raises
        ------
        NonFiniteError
            NaN or infinity, before or after the conversion; names file, row and column.
        DataError
            Another row shape, something that is not a number, a value `dtype` can not hold, or
            rows of a dtype it can not hold, where it was not asked for.
        """
        X = block.X
        if X.shape[1:] != self._source_shape:
            raise DataError(
                f"{block.place(0)} has rows of shape {X.shape[1:]}, the rows before have "
                f"{self._source_shape}; all rows must agree"
            )
        if X.dtype.kind not in "biuf":
            raise DataError(f"X of {block.where} has dtype {X.dtype}; it must be numbers")
        if self._settled:
            self._refuse_wider(block)
        self._refuse_nonfinite(X, block, "")
        with np.errstate(over="ignore", invalid="ignore"):
            out = np.ascontiguousarray(X, dtype=self.dtype).reshape(len(X), *self.row_shape)
        if self.dtype.kind == "u" and X.dtype.newbyteorder("=") != self.dtype:
            flat = X.reshape(len(X), -1)
            changed = out.reshape(len(X), -1) != flat
            if changed.any():
                row, column = (int(k) for k in np.argwhere(changed)[0])
                raise DataError(
                    f"{block.place(row, column)} is {flat[row, column]}, which {self.dtype} can "
                    "not hold exactly; choose another dtype="
                )
        if self.dtype.kind == "f" and X.dtype.kind == "f" and X.dtype.itemsize > out.itemsize:
            self._refuse_nonfinite(out, block, f" as {self.dtype} (the value overflows it)")
        return out

    def _refuse_wider(self, block: RawBlock) -> None:
        wanted = _storage_dtype(block.X.dtype, block.where)
        if len(block.X) and not np.can_cast(wanted, self.dtype, "safe"):
            raise DataError(
                f"{block.place(0)} is {block.X.dtype.name}, and the rows before are stored as "
                f"{self.dtype.name}, which can not hold it: pass "
                f'dtype="{np.promote_types(wanted, self.dtype).name}"'
            )

    @staticmethod
    def _refuse_nonfinite(X: NDArray[Any], block: RawBlock, suffix: str) -> None:
        found = layout.first_nonfinite(X)
        if found is not None:
            row, column, value = found
            raise NonFiniteError(
                f"{block.place(row, column)} is {value}{suffix}; streamkern trains on finite "
                "numbers: fill in or drop such rows first"
            )


def _storage_dtype(source: np.dtype[Any], where: str) -> np.dtype[Any]:
    """The narrowest stored dtype that holds every value of `source` (int64 up to 2^53)."""
    source = source.newbyteorder("=")
    if source in layout.X_DTYPES:
        return source
    if source.kind not in "biuf" or source.itemsize > 8:
        raise DataError(f"X of {where} has dtype {source}; it must be numbers of at most 64 bits")
    if source.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(np.float32 if source.itemsize <= 2 else np.float64)


class Targets:
    """Converts y: to provisional class codes while labels are being discovered, or to values.

    A code is the number of labels seen before it first appeared; `ranks` maps codes to the ids
    of the sorted class names once all rows are known.
    """

    def __init__(self, first: RawBlock, targets: str = "auto") -> None:
        if targets not in ("auto", "classes", "values"):
            raise ConfigError(f'targets="{targets}" is unknown; use "auto", "classes" or "values"')
        y = first.y
        if y.ndim not in (1, 2) or (y.ndim == 2 and y.shape[1] < 1):
            raise DataError(f"y of {first.where} has shape {y.shape}; it must be (n,) or (n, c)")
        self._auto = targets == "auto"
        column = y.ndim == 1 or y.shape[1] == 1
        self.are_classes = targets == "classes" or (self._auto and _look_like_labels(y))
        if self.are_classes and not column:
            raise DataError(
                f"y of {first.where} has shape {y.shape}; class labels are one column, "
                'use targets="values" for a matrix'
            )
        self.shape: tuple[int, ...] = (
            () if self.are_classes else (1 if y.ndim == 1 else y.shape[1],)
        )
        source = y.dtype.newbyteorder("=")
        if self.are_classes:
            self.dtype: np.dtype[Any] = np.dtype(np.int32)
        elif source.kind == "f" and source.itemsize <= 4:
            self.dtype = np.dtype(np.float32)
        else:
            self.dtype = np.dtype(np.float64)
        self._codes: dict[int | str, int] = {}

    @property
    def labels(self) -> list[int | str]:
        """Labels in the order of their codes; JSON, for `restore`."""
        return list(self._codes)

    def restore(self, labels: Sequence[int | str]) -> None:
        """Go on from the labels of an interrupted pass."""
        self._codes = {label: code for code, label in enumerate(labels)}

    def convert(self, block: RawBlock) -> NDArray[Any]:
        """(k,) int32 codes, or (k, c) float values."""
        return self._encode(block) if self.are_classes else self._values(block)

    def ranks(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Sorted class names, and for each code the id of its class.

        Integers, also when written as text, sort by value; other text alphabetically.
        """
        labels = self.labels
        numeric = all(_is_integer(k) for k in labels)
        order = sorted(
            range(len(labels)),
            key=lambda i: (int(labels[i]), str(labels[i])) if numeric else (0, str(labels[i])),
        )
        ranks = np.empty(len(labels), np.int64)
        ranks[order] = np.arange(len(labels))
        return tuple(str(labels[i]) for i in order), ranks

    def _values(self, block: RawBlock) -> NDArray[Any]:
        y = _as_numbers(block) if block.y.dtype.kind == "U" else block.y
        if y.dtype.kind not in "biuf":
            raise DataError(
                f'y of {block.where} has dtype {y.dtype}; targets="values" must be numbers'
            )
        y = y.reshape(len(y), -1)
        if y.shape[1:] != self.shape:
            raise DataError(
                f"{block.place(0)} has {y.shape[1]} targets, the rows before have {self.shape[0]}"
            )
        with np.errstate(over="ignore"):
            y = np.ascontiguousarray(y, dtype=self.dtype)
        found = layout.first_nonfinite(y)
        if found is not None:
            raise NonFiniteError(
                f"the target of {block.place(found[0])} is {found[2]}; targets must be finite"
            )
        return y

    def _encode(self, block: RawBlock) -> NDArray[np.int32]:
        y = _as_labels(block, self._auto)
        found, inverse = np.unique(y, return_inverse=True)
        codes = np.empty(len(found), np.int32)
        for i, label in enumerate(found.tolist()):
            codes[i] = self._codes.setdefault(label, len(self._codes))
        self._check_labels(block)
        return codes[inverse.reshape(-1)]

    def _check_labels(self, block: RawBlock) -> None:
        n = len(self._codes)
        if len({type(label) for label in self._codes}) > 1:
            raise DataError(f"{block.where} mixes text and integer labels; use one kind")
        if n > MAX_CLASSES:
            raise DataError(
                f"{block.where} has more than {MAX_CLASSES} distinct labels by row "
                f'{block.start + len(block.y)}; pass targets="values" if they are numbers'
            )
        if self._auto and n > MAX_AUTO_CLASSES and _is_integer(next(iter(self._codes))):
            raise DataError(
                f"{block.where} has more than {MAX_AUTO_CLASSES} distinct integer targets; pass "
                'targets="values" for regression or targets="classes" to keep them as labels'
            )


def _is_integer(label: int | str) -> bool:
    return isinstance(label, int) or _INTEGER.match(label) is not None


def _is_fraction(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not _is_integer(text)


def _look_like_labels(y: NDArray[Any]) -> bool:
    """Whether "auto" takes a first block of targets for labels; text numbers count as numbers."""
    if y.ndim != 1:
        return False
    if y.dtype.kind == "U":
        # A number with a fraction means values, even beside text: "NA" among them is a mistake
        # to be named, not a class.
        return not any(_is_fraction(label) for label in np.unique(y).tolist())
    return y.dtype.kind in "biuUSO"


def _as_numbers(block: RawBlock) -> NDArray[np.float64]:
    """Text targets (k,) or (k, c) as numbers."""
    try:
        return block.y.astype(np.float64)
    except ValueError:
        for row, cells in enumerate(block.y.reshape(len(block.y), -1).tolist()):
            for cell in cells:
                try:
                    float(cell)
                except ValueError:
                    raise DataError(
                        f"the target of {block.place(row)} is {cell!r}, not a number; pass "
                        'targets="classes" if the targets are labels'
                    ) from None
        raise


def _as_labels(block: RawBlock, auto: bool) -> NDArray[Any]:
    """y as (k,) integers or text."""
    y = block.y.reshape(len(block.y))
    kind = y.dtype.kind
    if kind in "biu":
        return y.astype(np.int64) if kind == "b" else y
    if kind == "f":
        with np.errstate(invalid="ignore"):
            whole = np.isfinite(y) & (y == np.floor(y)) & (np.abs(y) < 2.0**53)
        if whole.all():
            return y.astype(np.int64)
        row = int(np.argmin(whole))
        hint = '; pass targets="values" for regression' if auto or np.isfinite(y[row]) else ""
        raise DataError(
            f"the label of {block.place(row)} is {y[row]}; class labels are integers or text{hint}"
        )
    if kind in "SO":
        decoded = [_decoded(k, block, row) for row, k in enumerate(y.tolist())]
        for row, label in enumerate(decoded):
            if not isinstance(label, str) and type(label) is not int:
                raise DataError(
                    f"the label of {block.place(row)} is {label!r}; class labels are integers "
                    "or text"
                )
        if len({type(label) for label in decoded}) > 1:
            raise DataError(f"{block.where} mixes text and integer labels; use one kind")
        if type(decoded[0]) is int:
            return _as_integers(decoded, block)
        _refuse_long(block, max(map(len, decoded)))
        y = np.array(decoded)
    elif kind != "U":
        raise DataError(f"y of {block.where} has dtype {y.dtype}; labels are integers or text")
    lengths = np.char.str_len(y)
    _refuse_long(block, int(lengths.max()))
    empty = lengths == 0
    if empty.any():
        raise DataError(
            f"{block.place(int(np.argmax(empty)))} has no label; drop or fill such rows"
        )
    return y


def _decoded(label: Any, block: RawBlock, row: int) -> Any:
    if not isinstance(label, bytes):
        return label
    try:
        return label.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the label of {block.place(row)} is {label[:80]!r}, which is not text in UTF-8; write "
            "labels as text or integers"
        ) from error


def _as_integers(labels: list[int], block: RawBlock) -> NDArray[Any]:
    """Labels as Python's integers, which do not wrap."""
    for row, label in enumerate(labels):
        if not -(2**63) <= label < 2**64:
            raise DataError(
                f"the label of {block.place(row)} is an integer of {label.bit_length()} bits; 64 "
                "are allowed: write such labels as text"
            )
    return np.array(labels, dtype=object)


def _refuse_long(block: RawBlock, length: int) -> None:
    if length > MAX_LABEL:
        raise DataError(
            f"a label of {block.where} after row {block.start} has {length} characters, "
            f"{MAX_LABEL} are allowed; shorten it"
        )
