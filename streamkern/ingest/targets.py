"""Turns raw targets into class codes or values, or says in one sentence why it can not.

Class labels are integers or text. "auto" decides by the dtype, and of text by the first target of
all, so that nothing depends on how rows come in blocks: integers and words are labels, numbers with
a fraction and matrices are values, and a target of another kind later on is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError
from streamkern.basics.text import some
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.numbers import is_integer, is_number, numbers
from streamkern.store import layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_CLASSES = 65_536
MAX_AUTO_CLASSES = 1_000  # more distinct integers than this are probably values: ask
MAX_LABEL = 256  # characters of one
_INTEGER, _FRACTION, _WORD = "an integer", "a number with a fraction", "no number"


class Targets:
    """Converts y: to provisional class codes while labels are being discovered, or to values.

    A code is the number of labels seen before it first appeared; `ranks` maps codes to the ids
    of the sorted class names once all rows are known. classes : that there are, any other one is
    refused.
    """

    def __init__(
        self, first: RawBlock, targets: str = "auto", classes: Sequence[str] | None = None
    ) -> None:
        if targets not in ("auto", "classes", "values"):
            raise ConfigError(f'targets="{targets}" is unknown; use "auto", "classes" or "values"')
        y = first.y
        if y.ndim not in (1, 2) or (y.ndim == 2 and y.shape[1] < 1):
            raise DataError(f"y of {first.where} has shape {y.shape}; it must be (n,) or (n, c)")
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        self._auto = targets == "auto"
        self._kind: str | None = None  # of labels that are text
        self.are_classes = targets == "classes" or (self._auto and _look_like_labels(y))
        if self.are_classes and y.ndim > 1:
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
        self._classes = classes

    @property
    def labels(self) -> list[int | str]:
        """Labels in the order of their codes; JSON, for `restore`."""
        return list(self._codes)

    def restore(self, labels: Sequence[int | str]) -> None:
        """Go on from the labels of an interrupted pass."""
        self._codes = {label: code for code, label in enumerate(labels)}
        if labels and isinstance(labels[0], str):
            self._kind = _kind(labels[0])

    def convert(self, block: RawBlock) -> NDArray[Any]:
        """(k,) int32 codes, or (k, c) float values."""
        return self._encode(block) if self.are_classes else self._values(block)

    def ranks(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Sorted class names, and for each code the id of its class.

        Integers, also when written as text, sort by value; other text alphabetically.
        """
        labels = self.labels
        numeric = all(isinstance(k, int) or is_integer(k) for k in labels)
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
        if self._auto and y.dtype.kind == "U":
            self._check_kinds(block, y, found)
        self._check_known(block, y, found)
        codes = np.empty(len(found), np.int32)
        for i, label in enumerate(found.tolist()):
            codes[i] = self._codes.setdefault(label, len(self._codes))
        self._check_labels(block)
        return codes[inverse.reshape(-1)]

    def _check_known(self, block: RawBlock, y: NDArray[Any], found: NDArray[Any]) -> None:
        """Raise for the first label that is none of the classes, where those are known."""
        if self._classes is None or set(map(str, found.tolist())) <= set(self._classes):
            return
        row, label = next(k for k in enumerate(y.tolist()) if str(k[1]) not in self._classes)
        raise DataError(
            f"the label of {block.place(row)} is {label!r}, which is none of the classes of the "
            f"store, {some(self._classes)}; correct it, or ingest all rows to a new store"
        )

    def _check_kinds(self, block: RawBlock, y: NDArray[Any], found: NDArray[Any]) -> None:
        """Raise for the first label that is of another kind than the first of all."""
        if self._kind is None:
            self._kind = _kind(str(y[0]))
        if all(_kind(label) == self._kind for label in found.tolist()):
            return
        row, label = next(k for k in enumerate(y.tolist()) if _kind(k[1]) != self._kind)
        raise DataError(
            f"the target of {block.place(row)} is {label!r}, {_kind(label)}, and that of the first "
            f'row is {self._kind}; pass targets="values" if all are numbers, targets="classes" if '
            "all are labels, or correct it"
        )

    def _check_labels(self, block: RawBlock) -> None:
        n = len(self._codes)
        if len({type(label) for label in self._codes}) > 1:
            raise DataError(f"{block.where} mixes text and integer labels; use one kind")
        if n > MAX_CLASSES:
            raise DataError(
                f"{block.where} has more than {MAX_CLASSES} distinct labels by row "
                f'{block.start + len(block.y)}; pass targets="values" if they are numbers'
            )
        first = next(iter(self._codes))
        if self._auto and n > MAX_AUTO_CLASSES and (isinstance(first, int) or is_integer(first)):
            raise DataError(
                f"{block.where} has more than {MAX_AUTO_CLASSES} distinct integer targets; pass "
                'targets="values" for regression or targets="classes" to keep them as labels'
            )


def _kind(label: str) -> str:
    if is_integer(label):
        return _INTEGER
    return _FRACTION if is_number(label) else _WORD


def _look_like_labels(y: NDArray[Any]) -> bool:
    """Whether "auto" takes targets that begin like this for labels; text may be numbers."""
    if y.ndim != 1:
        return False
    if y.dtype.kind == "U":
        return _kind(str(y[0])) != _FRACTION
    return y.dtype.kind in "biuSO"


def _as_numbers(block: RawBlock) -> NDArray[np.float64]:
    """Text targets (k,) or (k, c) as numbers."""
    try:
        return np.array(numbers(block.y.ravel().tolist())).reshape(block.y.shape)
    except ValueError:
        rows = block.y.reshape(len(block.y), -1).tolist()
        cells = ((row, cell) for row, cells in enumerate(rows) for cell in cells)
        row, wrong = next(k for k in cells if not is_number(k[1]))
        raise DataError(
            f"the target of {block.place(row)} is {wrong!r}, not a number; pass "
            'targets="classes" if the targets are labels'
        ) from None


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
