"""Data frames whose columns are not all numbers, or lack some: encoded as `ingest` encodes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import DataError
from streamkern.basics.optional import need
from streamkern.basics.text import some
from streamkern.estimator.foreign import check_names, has_columns, is_dask_table
from streamkern.estimator.inputs import checked_values, holds_numbers
from streamkern.estimator.labels import checked_labels
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.tables.cells import MISSING, NUMBER, is_text, matches, present
from streamkern.ingest.tables.encoder import Encoder, UnknownWords
from streamkern.ingest.tables.fit import FittedEncoder, fit
from streamkern.ingest.tables.scan import Declared
from streamkern.ingest.targets import Targets

_ROWS = 1 << 16  # encoded at once


def is_frame(X: Any) -> bool:
    """Whether X is a data frame in memory that Arrow can read."""
    return has_columns(X) and not is_dask_table(X) and hasattr(X, "__arrow_c_stream__")


def needs_encoder(X: Any) -> bool:
    """Whether a column is no number, or lacks some. Columns go by name, so all names are text."""
    if not is_frame(X) or len(set(X.columns)) < len(X.columns):
        return False  # the latter is refused elsewhere
    words = [k for k in X.columns if _is_category(X[k]) or not holds_numbers(X[k])]
    unnamed = [k for k in X.columns if not isinstance(k, str)]
    if words and unnamed:
        raise DataError(
            f"X has columns that are not numbers, {some(list(map(str, words)))}, which are encoded "
            f"by name, and names that are not text, {some(list(map(str, unnamed)))}; give text: "
            "X.columns = X.columns.map(str)"
        )
    return not unnamed and (bool(words) or _lacks_some(X))


def _is_category(column: Any) -> bool:
    return "categor" in type(column.dtype).__name__.lower()


def _lacks_some(X: Any) -> bool:
    if hasattr(X, "isna"):
        return bool(X.isna().to_numpy().any())
    counts = (column.null_count + _n_nan(column) for column in _arrow_table(X).columns)
    return any(counts)


def _n_nan(column: Any) -> int:
    if not need("pyarrow.types").is_floating(column.type):
        return 0
    return need("pyarrow.compute").sum(need("pyarrow.compute").is_nan(column)).as_py() or 0


def _arrow_table(X: Any) -> Any:
    arrow = need("pyarrow", "a data frame with words, dates or missing values")
    try:
        return arrow.table(X)
    except (arrow.ArrowException, TypeError, OverflowError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"X has a column that is neither numbers nor words ({reason}); give it one type, with "
            "astype, or drop it"
        ) from error


class _Rows:
    """What `fit` reads: the table and its targets, in blocks."""

    def __init__(self, table: Any, y: npt.NDArray[Any]) -> None:
        self._table, self._y = table, y
        self.n_rows = len(table)

    def blocks(self, start: int, _block_bytes: int) -> Iterator[RawBlock]:
        for at in range(start, self.n_rows, _ROWS):
            rows = slice(at, at + _ROWS)
            yield RawBlock(self._table[rows], self._y[rows], "X", at)


def fitted_rows(
    X: Any, y: Any, seed: int, *, classes: bool
) -> tuple[npt.NDArray[np.float32], Encoder]:
    """Features (n, d) of a frame to train on, and the encoder that was fitted to it.

    classes : whether y are labels
    """
    table = _columns_of(X)
    _check_text(table)
    labels = classes and np.ndim(y) == 1
    given = checked_labels(y, len(table)).astype(str) if labels else checked_values(y, len(table))
    found = fit(
        _Rows(table, given), lambda first: Targets(first, "classes" if labels else "values"),
        Declared(categorical=tuple(k for k in X.columns if _is_category(X[k]))), MISSING, seed, 0,
        ways='X.drop(columns=...), X.astype({...: "category"})',
    )  # fmt: skip
    return _encoded(table, found), found.encoder


def _check_text(table: Any) -> None:
    """DataError for text in which all is written as numbers: names, say, of which 01 is none and 1
    another. In a CSV, where everything is text, they would be numbers."""
    texts = [name for name in table.column_names if is_text(table[name].type)]
    there = {name: present(table[name]) for name in texts}
    numbers = [
        name
        for name in texts
        if there[name].any() and matches(table[name], NUMBER)[there[name]].all()
    ]
    if numbers:
        raise DataError(
            f"X has columns of text in which all is written as numbers, {some(numbers)}; say what "
            f'they are: X.astype({{{numbers[0]!r}: float}}), or "category"'
        )


def encoded_rows(X: Any, encoder: Encoder) -> npt.NDArray[np.float32]:
    """Features (n, d) of a frame like the one that the encoder was fitted to; DataError else."""
    if not is_frame(X):
        raise DataError(
            "the model was trained on columns that are not all numbers, and takes a data frame "
            f"with the columns {some(encoder.columns)}, not a {type(X).__name__}"
        )
    check_names(X, "X")
    lacking = [name for name in encoder.columns if name not in X.columns]
    known = {*encoder.columns, *encoder.dropped}
    besides = [str(name) for name in X.columns if name not in known]
    if lacking or besides:
        said = [f"lacks {some(lacking)}"] if lacking else []
        said += [f"has {some(besides)} besides"] if besides else []
        raise DataError(
            f"X {' and '.join(said)}; give the columns trained on, in any order: "
            f"{some(encoder.columns)}"
        )
    table, unknown = _columns_of(X[list(encoder.columns)]), UnknownWords(encoder)
    unknown.add(table)
    unknown.tell("X")
    return _encoded(table, encoder)


def _columns_of(X: Any) -> Any:
    """The frame as an Arrow table, without what pandas says is its index."""
    table = _arrow_table(X)
    return table.select(list(X.columns))


def _encoded(table: Any, encoder: Encoder | FittedEncoder) -> npt.NDArray[np.float32]:
    parts = []
    for at in range(0, len(table), _ROWS):
        part = table[at : at + _ROWS]
        if isinstance(encoder, FittedEncoder):
            parts.append(encoder.encode(part, "X", at, at))
        else:
            parts.append(encoder.encode(part, "X", at))
    if parts:
        return np.concatenate(parts)
    width = len((encoder.encoder if isinstance(encoder, FittedEncoder) else encoder).features)
    return np.empty((0, width), np.float32)
