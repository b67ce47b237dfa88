"""Data frames with columns that are not numbers, or with gaps: encoded as `ingest` encodes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import DataError
from streamkern.basics.text import some
from streamkern.estimator.inputs import checked_values, not_numbers
from streamkern.estimator.labels import checked_labels
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.frames import arrow_table, is_frame, names_of_columns
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder, UnknownWords
from streamkern.ingest.tables.fit import FittedEncoder, fit
from streamkern.ingest.tables.scan import Declared
from streamkern.ingest.targets import TargetConverter

_ROWS = 1 << 16  # encoded at once


def check_text_names(frame: Any) -> bool:
    """Return whether the columns of a frame that are not all numbers can be encoded, by name.

    They cannot if names are no text: DataError, or False if numbers are merely missing.
    """
    if names_of_columns(frame) is not None:
        return True
    words = not_numbers(frame)
    if words:
        unnamed = [str(name) for name in frame.columns if not isinstance(name, str)]
        raise DataError(
            f"X has columns that are not numbers, {some(words)}, which are encoded by name, and "
            f"names that are not text, {some(unnamed)}; give text: X.columns = X.columns.map(str)"
        )
    return False


class _Rows:
    """The table and its targets, in blocks, for `fit` to read."""

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
    """Return features (n, d) of a frame to train on, and the encoder that was fitted to it.

    classes : whether y are labels
    """
    table = _cells(X)
    labels = classes and np.ndim(y) == 1
    given = checked_labels(y, len(table)).astype(str) if labels else checked_values(y, len(table))
    found = fit(
        _Rows(table, given),
        lambda first: TargetConverter(first, "classes" if labels else "values"),
        Declared(), MISSING, seed, 0, ways=_ways(X), typed=True,
    )  # fmt: skip
    return _encoded(table, found), found.encoder


def _ways(X: Any) -> str:
    """Return the remedies in the syntax of a frame's library."""
    if X.implementation.is_pandas_like():
        return 'X.drop(columns=...), X.astype({...: float}), X.astype({...: "category"})'
    if X.implementation.is_polars():
        return "X.drop(...), X.cast({...: polars.Float64}), X.cast({...: polars.Categorical})"
    return "X.drop_columns(...), or the column cast to float64 or dictionary_encode()"


def encoded_rows(X: Any, encoder: Encoder) -> npt.NDArray[np.float32]:
    """Return features (n, d) of a frame like the one that the encoder was fitted to.

    Raises DataError for data of another form.
    """
    if not is_frame(X):
        raise DataError(
            "the model was trained on columns that are not all numbers, and takes a data frame "
            f"with the columns {some(encoder.columns)}, not a {type(X).__name__}"
        )
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
    table, unknown = _cells(X.select(list(encoder.columns))), UnknownWords(encoder)
    unknown.add(table)
    unknown.tell("X")
    return _encoded(table, encoder)


def _cells(X: Any) -> Any:
    """Return the frame as an Arrow table, without the columns that pandas marks as its index."""
    return arrow_table(X, "X").select(list(range(len(X.columns))))


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
