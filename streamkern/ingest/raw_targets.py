"""Convert raw targets to numbers or labels, with errors for those that are neither."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from streamkern.basics.errors import DataError, NonFiniteError
from streamkern.basics.message import mention
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.tables.key_columns import objects_are_rounded, warn_of_rounded
from streamkern.ingest.tables.missing import is_missing, missing_in
from streamkern.ingest.tables.numbers import (
    is_number,
    notation_text,
    numbers,
    other_notation,
    style_remedy,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_LABEL = 256  # most characters of a label


def plain_targets(block: RawBlock) -> RawBlock:
    """Return the block with targets as numbers or text if objects or bytes are all of one kind.

    A missing target is NaN among numbers, and "" among text.
    """
    y = block.y
    if y.dtype.kind == "T":
        return block._replace(y=y.astype(str))
    if y.dtype.kind not in "SO":
        return block
    labels = [_decoded(k, block, row) for row, k in enumerate(y.ravel().tolist())]
    present = [k for k in labels if isinstance(k, str) or not is_missing(k)]
    converted: NDArray[Any]
    if not present:
        return block
    if all(isinstance(k, str) for k in present):
        texts = [k if isinstance(k, str) else "" for k in labels]
        refuse_odd_text(block, texts)
        converted = np.array(texts)
    elif all(isinstance(k, bool) for k in present) and len(present) == len(labels):
        converted = np.array(labels, bool)
    elif all(isinstance(k, Decimal | float) for k in present):
        converted = np.array([np.nan if is_missing(k) else float(k) for k in labels])
        if objects_are_rounded(block.y.ravel(), converted):
            warn_of_rounded(f"the target of {block.location}")
    else:
        return block
    return block._replace(y=converted.reshape(y.shape))


def refuse_odd_text(block: RawBlock, texts: Sequence[str]) -> None:
    """Raise DataError for text that cannot be kept: with a null character, or invalid Unicode."""
    for row, text in enumerate(texts):
        if "\0" in text or (not text.isascii() and _is_broken(text)):
            raise DataError(
                f"the target of {block.cell_location(row)} is {text[:80]!r}, which contains a null "
                "character or half of a surrogate pair",
                "correct it",
            )


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def missing_target(block: RawBlock, row: int, *, labels: bool = False) -> DataError:
    """Return the error for a row without a target. labels : whether its text may be a label."""
    text = ""
    if block.y.dtype.kind == "U":
        cells = np.atleast_1d(block.y[row]).tolist()
        text = next((k for k in cells if is_missing(k)), "").strip()
    note = f" ({text!r})" if text else ""
    remedy = f"{mention('drop_missing_targets', True)} leaves such rows out"
    if text and labels:
        remedy += f", and {mention('targets', 'classes')} takes {text!r} for a label"
    error_class = NonFiniteError if block.y.dtype.kind == "f" else DataError
    return error_class(f"the target of {block.cell_location(row)} is missing{note}; {remedy}")


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
    return DataError(
        f"the target of {block.cell_location(row)} is {text[:80]!r}, {notation_text(notation)}",
        remedy,
    )


def dtype_problem(dtype: np.dtype[Any]) -> str:
    """Return a description of targets of this dtype, with the remedy."""
    if dtype.kind in "mM":
        noun = "dates" if dtype.kind == "M" else "durations"
        return f"{noun}, but targets must be numbers or labels; convert them, for example to days"
    return f"of dtype {dtype}, but targets must be numbers or labels; convert them"


def as_values(block: RawBlock) -> NDArray[Any]:
    """Return targets (k,) or (k, c) as numbers, which may be given as text or objects."""
    y = block.y
    if y.dtype.kind == "U":
        y = _numbers_of_text(block)
    elif y.dtype.kind == "O" and all(
        is_missing(k) or isinstance(k, int | float | Decimal) for k in y.ravel()
    ):
        y = np.array([np.nan if is_missing(k) else float(k) for k in y.ravel()]).reshape(y.shape)
    if block.y.dtype.kind in "UO" and y.dtype.kind == "f" and objects_are_rounded(block.y, y):
        warn_of_rounded(f"the target of {block.location}")
    if y.dtype.kind not in "biuf":
        raise DataError(f"y of {block.location} is {dtype_problem(y.dtype)}")
    missing = missing_in(y)
    if missing.any():
        raise missing_target(block, int(np.argmax(missing)))
    return y


def _numbers_of_text(block: RawBlock) -> NDArray[np.float64]:
    """Return text as numbers; raise DataError for the first target that is none."""
    try:
        return np.array(numbers(block.y.ravel().tolist())).reshape(block.y.shape)
    except ValueError:
        rows = block.y.reshape(len(block.y), -1).tolist()
        cells = ((row, cell) for row, cells in enumerate(rows) for cell in cells)
        row, wrong = next(k for k in cells if not is_number(k[1]) or is_missing(k[1]))
    if is_missing(wrong):
        raise missing_target(block, row)
    notation = other_notation(wrong)
    if notation is not None:
        raise other_notation_error(block, row, wrong, notation)
    raise DataError(
        f"the target of {block.cell_location(row)} is {wrong[:80]!r}, not a number",
        f"correct it, or pass {mention('targets', 'classes')} if all targets are labels",
    )


def as_labels(block: RawBlock) -> NDArray[Any]:
    """Return y as integers or text (k,); text such as NA is a label here."""
    y = block.y.reshape(len(block.y))
    kind = y.dtype.kind
    if kind in "biu":
        return y.astype(np.int64) if kind == "b" else y
    if kind in "mM" and not np.isnat(y).any():
        texts = np.array([str(moment) for moment in y])  # the spelling of classifiers
        _refuse_long(block, int(np.char.str_len(texts).max(initial=0)))
        return texts
    missing = np.char.str_len(y) == 0 if kind == "U" else missing_in(y)
    if missing.any():
        raise missing_target(block, int(np.argmax(missing)))
    if kind == "f":
        with np.errstate(invalid="ignore", over="ignore"):
            integers = np.isfinite(y) & (y == np.floor(y)) & (np.abs(y) < 2.0**53)
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
            raise mixed_labels(block)
        for row, label in enumerate(labels):
            if not -(2**63) <= label < 2**64:
                raise DataError(
                    f"the label of {block.cell_location(row)} is an integer of "
                    f"{label.bit_length()} bits",
                    "labels may have at most 64 bits: write larger ones as text",
                )
        return np.array(labels, dtype=object)  # Python integers do not wrap
    if kind != "U":
        raise DataError(f"y of {block.location} is {dtype_problem(y.dtype)}")
    _refuse_long(block, int(np.char.str_len(y).max()))
    return y


def mixed_labels(block: RawBlock) -> DataError:
    """Return the error for labels that mix text and integers."""
    return DataError(
        f"{block.location} mixes text and integer labels",
        "use one kind, for example list(map(str, y))",
    )


def _decoded(label: Any, block: RawBlock, row: int) -> Any:
    if isinstance(label, np.generic):
        label = label.item()
    if not isinstance(label, bytes):
        return label
    try:
        return label.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the label of {block.cell_location(row)} is {label[:80]!r}, which is not text in "
            "UTF-8",
            "write labels as text or integers",
        ) from error


def _refuse_long(block: RawBlock, length: int) -> None:
    if length > MAX_LABEL:
        raise DataError(
            f"a label of {block.location} after row {block.start} has {length} characters, but at "
            f"most {MAX_LABEL} are allowed",
            "shorten the label",
        )
