"""Convert raw targets to numbers or labels, with errors for those that are neither."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.basics.message import mention
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.tables.cells import row_number
from streamkern.ingest.tables.key_columns import objects_are_rounded, warn_of_rounded_integers
from streamkern.ingest.tables.missing import is_missing, missing_in
from streamkern.ingest.tables.numbers import (
    is_number,
    notation_text,
    numbers,
    other_notation,
    style_remedy,
)
from streamkern.store.class_labels import as_boolean

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_LABEL = 256
"""Largest number of characters of a label."""
MAX_INTEGER_LABEL = 2.0**53
"""Floats below this size are labels if they are integers; larger floats may be rounded."""
MAX_SHOWN = 80
"""Number of characters of a target that an error message shows."""

# Kinds of dtypes (`numpy.dtype.kind`).
NUMERIC_KINDS = "biuf"
INTEGER_KINDS = "biu"
DATE_KINDS = "mM"
OBJECT_OR_BYTES_KINDS = "OS"
OBJECT_OR_TEXT_KINDS = "OU"


def as_native_targets(block: RawBlock) -> RawBlock:
    """Return the block with y as text, booleans or float64 if all its objects are of that kind.

    Bytes are decoded, and decimals become floats. A missing target is "" among text, and NaN among
    floats; booleans with a missing one stay objects. So do integers, which float64 might round, and
    objects of several kinds.

    Raises DataError for bytes that are not UTF-8, and for text that `check_storable_text` refuses.
    """
    y = block.y
    if y.dtype.kind == "T":
        return block._replace(y=y.astype(str))
    if y.dtype.kind not in OBJECT_OR_BYTES_KINDS:
        return block
    targets = [_decode(target, block, row) for row, target in enumerate(y.ravel().tolist())]
    present_targets = [
        target for target in targets if isinstance(target, str) or not is_missing(target)
    ]
    converted: NDArray[Any]
    if not present_targets:
        return block
    if all(isinstance(target, str) for target in present_targets):
        texts = [target if isinstance(target, str) else "" for target in targets]
        check_storable_text(block, texts)
        converted = np.array(texts)
    elif all(isinstance(target, bool) for target in targets):
        converted = np.array(targets, bool)
    elif all(isinstance(target, Decimal | float) for target in present_targets):
        converted = np.array(list(map(_as_float, targets)))
        if objects_are_rounded(block.y.ravel(), converted):
            warn_of_rounded_integers(f"the target of {block.location}")
    else:
        return block
    return block._replace(y=converted.reshape(y.shape))


def check_storable_text(block: RawBlock, texts: Sequence[str]) -> None:
    """Raise DataError if a text has a null character, or half of a surrogate pair."""
    for row, text in enumerate(texts):
        if "\0" in text or (not text.isascii() and _has_lone_surrogate(text)):
            raise DataError(
                f"the target of {block.cell_location(row)} is {text[:MAX_SHOWN]!r}, which contains "
                "a null character or half of a surrogate pair",
                "correct it",
            )


def _has_lone_surrogate(text: str) -> bool:
    """Return whether text has half of a surrogate pair, so that it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _as_float(value: Any) -> float:
    """Return a value as a float, NaN if it is missing."""
    return np.nan if is_missing(value) else float(value)


def missing_target_error(block: RawBlock, row: int, *, labels: bool = False) -> DataError:
    """Return the error for a row without a target. labels : whether the text may be a label."""
    text = ""
    if block.y.dtype.kind == "U":
        cells = np.atleast_1d(block.y[row]).tolist()
        text = next((cell for cell in cells if is_missing(cell)), "").strip()
    note = f" ({text!r})" if text else ""
    remedy = f"{mention('drop_missing_targets', True)} leaves such rows out"
    if text and labels:
        remedy += f", and {mention('targets', 'classes')} takes {text!r} for a label"
    error_class = NonFiniteError if block.y.dtype.kind == "f" else DataError
    return error_class(f"the target of {block.cell_location(row)} is missing{note}", remedy)


def other_notation_error(block: RawBlock, row: int, text: str, notation: str) -> DataError:
    """Return the error for a target that is a number or a date in another notation."""
    option, as_classes = style_remedy(text), mention("targets", "classes")
    remedy = (
        "write it as a number, with a point and nothing around it, or pass "
        f"{as_classes} if such text is a label"
    )
    if option is not None:
        remedy = (
            f"in a CSV {option}, elsewhere give numbers; {as_classes} takes such text for labels"
        )
    shown = f"the target of {block.cell_location(row)} is {text[:MAX_SHOWN]!r}"
    return DataError(f"{shown}, {notation_text(notation)}", remedy)


def dtype_error(block: RawBlock, dtype: np.dtype[Any]) -> DataError:
    """Return the error for targets of a dtype that is neither numbers nor labels."""
    description, remedy = f"of dtype {dtype}", "convert them"
    if dtype.kind in DATE_KINDS:
        description = "dates" if dtype.kind == "M" else "durations"
        remedy = "convert them, for example to days"
    rule = f"y of {block.location} is {description}, but targets must be numbers or labels"
    return DataError(rule, remedy)


def as_values(block: RawBlock) -> NDArray[Any]:
    """Return targets (k,) or (k, c), which may be text or objects, as numbers.

    Raises
    ------
    DataError
        If a target is missing or is not a number.
    NonFiniteError
        If a target is NaN.
    """
    y = block.y
    if y.dtype.kind == "U":
        y = _numbers_of_text(block)
    elif y.dtype.kind == "O" and all(
        is_missing(value) or isinstance(value, int | float | Decimal) for value in y.ravel()
    ):
        y = np.array(list(map(_as_float, y.ravel()))).reshape(y.shape)
    if (
        block.y.dtype.kind in OBJECT_OR_TEXT_KINDS
        and y.dtype.kind == "f"
        and objects_are_rounded(block.y, y)
    ):
        warn_of_rounded_integers(f"the target of {block.location}")
    if y.dtype.kind not in NUMERIC_KINDS:
        raise dtype_error(block, y.dtype)
    is_missing_row = missing_in(y)
    if is_missing_row.any():
        raise missing_target_error(block, int(np.argmax(is_missing_row)))
    return y


def boolean_columns(y: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (c,) bool: whether the first present target of each column is the text true or false.

    y : (k,) or (k, c) targets of the first rows
    """
    columns = y.reshape(len(y), -1).T
    if y.dtype.kind != "U":
        return np.zeros(len(columns), bool)
    first_texts = (next((t for t in c.tolist() if not is_missing(t)), "") for c in columns)
    return np.array([as_boolean(text) is not None for text in first_texts])


def booleans_as_numbers(block: RawBlock, are_booleans: NDArray[np.bool_]) -> RawBlock:
    """Return the block with 1 and 0 in place of the texts true and false, as NumPy converts them.

    are_booleans : (c,) the columns with such targets, from `boolean_columns`

    Raises DataError for another text in one of these columns, since the first row has none.
    """
    if block.y.dtype.kind != "U" or not are_booleans.any():
        return block
    y = block.y.reshape(len(block.y), -1).copy()
    for k in np.flatnonzero(are_booleans):
        for row, text in enumerate(y[:, k].tolist()):
            truth = as_boolean(text)
            if truth is not None:
                y[row, k] = str(int(truth))
            elif not is_missing(text):
                raise DataError(
                    f"the target of {block.cell_location(row)} is {text[:MAX_SHOWN]!r}, but the "
                    "target of the first row is true or false",
                    "write all of them as true or false, or all as numbers",
                )
    return block._replace(y=y.reshape(block.y.shape))


def _numbers_of_text(block: RawBlock) -> NDArray[np.float64]:
    """Return text as numbers.

    Raises DataError for the first target that is not a number.
    """
    try:
        return np.array(numbers(block.y.ravel().tolist())).reshape(block.y.shape)
    except ValueError:
        rows = block.y.reshape(len(block.y), -1).tolist()
        cells = ((row, cell) for row, cells in enumerate(rows) for cell in cells)
        row, text = next((r, t) for r, t in cells if not is_number(t) or is_missing(t))
    if is_missing(text):
        raise missing_target_error(block, row)
    notation = other_notation(text)
    if notation is not None:
        raise other_notation_error(block, row, text, notation)
    raise DataError(
        f"the target of {block.cell_location(row)} is {text[:MAX_SHOWN]!r}, not a number",
        f"correct it, or pass {mention('targets', 'classes')} if all targets are labels",
    )


def as_labels(block: RawBlock) -> NDArray[Any]:
    """Return targets as integers or text, (k,); text such as NA is a label here.

    block : from `as_native_targets`, so that text is not of dtype object unless other objects are
        mixed with it

    Raises
    ------
    DataError
        If a target is missing, is neither an integer nor text, or is too long; or if text and
        integers are mixed.
    NonFiniteError
        If a target is NaN.
    """
    y = block.y.reshape(len(block.y))
    kind = y.dtype.kind
    if kind in INTEGER_KINDS:
        return y.astype(np.int64) if kind == "b" else y
    if kind in DATE_KINDS and not np.isnat(y).any():
        texts = np.array([str(moment) for moment in y])  # as in the classes of a classifier
        _check_label_length(block, int(np.char.str_len(texts).max(initial=0)))
        return texts
    is_missing_row = np.char.str_len(y) == 0 if kind == "U" else missing_in(y)
    if is_missing_row.any():
        raise missing_target_error(block, int(np.argmax(is_missing_row)))
    if kind == "f":
        with np.errstate(invalid="ignore", over="ignore"):
            integers = np.isfinite(y) & (y == np.floor(y)) & (np.abs(y) < MAX_INTEGER_LABEL)
        if integers.all():
            return y.astype(np.int64)
        row = int(np.argmin(integers))
        raise DataError(
            f"the label of {block.cell_location(row)} is {y[row]}",
            f"class labels are integers or text; pass {mention('targets', 'values')} for "
            "regression",
        )
    if kind == "O":
        labels = y.tolist()
        for row, label in enumerate(labels):
            if not isinstance(label, str) and type(label) is not int:
                raise DataError(
                    f"the label of {block.cell_location(row)} is {label!r}",
                    "class labels must be integers or text: convert an array with list(map(str, "
                    "y))",
                )
        if len({type(label) for label in labels}) > 1:
            raise mixed_labels_error(block)
        for row, label in enumerate(labels):
            if not -(2**63) <= label < 2**64:
                raise DataError(
                    f"the label of {block.cell_location(row)} is an integer of "
                    f"{label.bit_length()} bits",
                    "labels may have at most 64 bits: write larger ones as text",
                )
        return np.array(labels, dtype=object)  # Python integers do not wrap
    if kind != "U":
        raise dtype_error(block, y.dtype)
    _check_label_length(block, int(np.char.str_len(y).max()))
    return y


def mixed_labels_error(block: RawBlock) -> DataError:
    """Return the error for labels that mix text and integers."""
    return DataError(
        f"{block.location} mixes text and integer labels",
        "use one kind, for example list(map(str, y))",
    )


def _decode(label: Any, block: RawBlock, row: int) -> Any:
    """Return bytes as text, a NumPy scalar as a Python object, and any other object unchanged.

    Raises DataError for bytes that are not UTF-8.
    """
    if isinstance(label, np.generic):
        label = label.item()
    if not isinstance(label, bytes):
        return label
    try:
        return label.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the label of {block.cell_location(row)} is {label[:MAX_SHOWN]!r}, which is not "
            "text in UTF-8",
            "write labels as text or integers",
        ) from error


def _check_label_length(block: RawBlock, length: int) -> None:
    """Raise DataError if the longest label of the block has more than `MAX_LABEL` characters."""
    if length > MAX_LABEL:
        raise DataError(
            f"a label in the rows of {block.location} from row {row_number(block.row_numbers, 0)} "
            f"on has {length} characters, but at most {MAX_LABEL} are allowed",
            "shorten the label",
        )
