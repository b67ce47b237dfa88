"""Targets that are text: read as numbers, or checked before they become classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from streamkern.basics.errors import DataError
from streamkern.ingest.tables.numbers import is_integer, is_number, numbers
from streamkern.ingest.tables.writing import other_writing, said, share_a_unit

FEW_CLASSES = 10  # numbers in another notation, such as percentages, that may be meant as labels
ROWS_OF_A_CLASS = 5  # mean from which on they count as labels, as months and times often are


def values_of_text(y: Any) -> Any:
    """Return targets (n,) or (n, c) with text converted to numbers; others as they are.

    Raises DataError for text that is not a number.
    """
    kind = getattr(getattr(y, "dtype", None), "kind", "")
    if kind not in ("U", "S", "T", "O"):
        return y
    held: npt.NDArray[Any] = np.array(y[:] if isinstance(y, zarr.Array) else y, dtype=object)
    width = max(1, held.size // max(1, len(held)))
    flat = held.reshape(-1)
    cells = [k.decode("utf-8", "replace") if isinstance(k, bytes) else k for k in flat.tolist()]
    texts = {k: cell for k, cell in enumerate(cells) if isinstance(cell, str)}
    if not texts:
        return y
    try:
        flat[list(texts)] = numbers(texts.values())
    except ValueError:
        place, wrong = next(text for text in texts.items() if not is_number(text[1]))
        way = other_writing(wrong)
        what = "which is no number" if way is None else said(way)
        raise DataError(
            f"y holds {wrong[:80]!r} in row {place // width}, {what}, and KernelRegressor takes "
            "numbers; write them with a point and nothing around them, or use KernelClassifier if "
            "they are labels"
        ) from None
    return flat.reshape(held.shape)


def refuse_numbers_as_labels(names: Sequence[str], n_rows: int) -> None:
    """Raise DataError for classes that are numbers or dates written as text, one for each value.

    A few of them, such as 5% and 10%, are labels like others, and so are many if each has
    `ROWS_OF_A_CLASS` rows in the mean.

    Parameters
    ----------
    names : of the classes.
    n_rows : rows that have them.
    """
    many = 2 * len(names) > n_rows
    few_rows = len(names) > FEW_CLASSES and n_rows < ROWS_OF_A_CLASS * len(names)
    if not names or not (many or few_rows):
        return
    whole = sum(map(is_integer, names))
    ways = {name: way for name in names if (way := other_writing(name)) is not None}
    if not ways and many:
        numeric = [name for name in names if is_number(name) and not is_integer(name)]
        ways = dict.fromkeys(numeric, "a fraction")
    if not ways and share_a_unit(names):
        ways = dict.fromkeys(names, "a unit")
    if not ways or 2 * (len(ways) + whole) <= len(names):
        return
    name, way = next(iter(ways.items()))
    raise DataError(
        f"y holds {name[:80]!r}, {said(way)}, and {len(names)} such values in {n_rows} rows would "
        "be as many classes; give numbers to KernelRegressor, written with a point and nothing "
        'around them, or, if they are classes, ingest the rows with targets="classes" '
        "(streamkern.ingest_store) and fit the store"
    )
