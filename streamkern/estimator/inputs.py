"""Check rows of estimators in memory (arrays, data frames), and open rows that are streamed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from sklearn.utils.validation import check_array, validate_data

from streamkern.basics.errors import ConfigError, DataError, RowShapeError
from streamkern.basics.optional import on_demand
from streamkern.basics.text import some
from streamkern.estimator.mistakes import shorten_errors
from streamkern.filesystem.icechunk_repository import is_icechunk
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.frames import (
    arrow_table,
    is_dask_table,
    is_frame,
    is_of_duckdb,
    names_of_columns,
)
from streamkern.ingest.input_files import are_paths
from streamkern.ingest.numeric import is_sparse, no_rows, numeric, with_lengths
from streamkern.ingest.tables.ambiguity import (
    ARROW_REMEDIES,
    PANDAS_REMEDIES,
    POLARS_REMEDIES,
    ColumnRemedies,
)
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder, UnknownWords
from streamkern.ingest.tables.fit import fit
from streamkern.ingest.tables.key_columns import (
    IndexDetector,
    array_is_rounded,
    warn_of_rounded_integers,
)
from streamkern.ingest.tables.scan import ColumnDeclarations
from streamkern.ingest.targets import TargetConverter
from streamkern.store.layout import X_DTYPES
from streamkern.store.packing import refuse_packed
from streamkern.store.sparse_rows import PackedRows, stays_sparse
from streamkern.store.store import Store
from streamkern.stream.sources.alignment import check_row_shape
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.user import as_source, is_source

_ENCODED_ROWS = 1 << 16
"""Number of rows of a table that are encoded at a time."""
ROW_DTYPES = [np.float64, np.float32, np.float16, np.uint8, np.uint16]
"""Dtypes in which rows are kept; all others are converted to float64."""


def is_stream(X: Any) -> bool:
    """Return whether X is read in pieces: a store, a source, a zarr or Dask array, or paths."""
    return (
        isinstance(X, Store | zarr.Group | zarr.Array)
        or are_paths(X)
        or is_source(X)
        or is_icechunk(X)
        or hasattr(X, "__dask_graph__")
    )


def open_stream(
    X: Any, y: Any = None, sample_weight: Any = None, *, classes: Sequence[str] | None = None,
    targets: bool = True,
) -> BaseSource:  # fmt: skip
    """Return the source of data that `is_stream` accepts.

    classes : names of the classes, if y holds their ids
    targets : whether to read the targets of a store

    Raises ConfigError if targets or weights are given beside a store or a source.
    """
    for name, array in (("X", X), ("y", y), ("sample_weight", sample_weight)):
        refuse_packed(array, name)
    if is_dask_table(X):
        names = names_of_columns(X) if X.ndim == 2 else None
        rows = with_lengths(X, "X")
        source = ArraySource(rows, y, classes=classes, sample_weight=sample_weight)
        source.columns = names
        return source
    if isinstance(X, zarr.Array) or hasattr(X, "__dask_graph__"):
        rows = _lazy_rows(X)
        return ArraySource(rows, y, classes=classes, sample_weight=sample_weight)
    for name, array in (("y", y), ("sample_weight", sample_weight)):
        if array is not None:
            raise own_targets_error(name)
    if isinstance(X, zarr.Group | str | os.PathLike) or is_icechunk(X):
        return ZarrSource(X) if targets else ZarrSource(X, y=None)
    return ZarrSource(X) if isinstance(X, Store) else as_source(X)


def own_targets_error(name: str) -> ConfigError:
    """Return the error for targets or weights (`name`) that are given beside a store or source."""
    return ConfigError(
        f"{name} cannot be given with a store or a source as X, which has its own targets and "
        "weights",
        f"leave {name} out; for a Zarr group, {name} may be the name of one of its arrays",
    )


def _lazy_rows(X: Any) -> Any:
    """Return lazy rows in a dtype that stores support; other numbers are converted to float64."""
    dtype = np.dtype(X.dtype)
    if dtype in X_DTYPES or dtype.kind not in "biuf":
        return X
    return to_dask_or_numpy(X).map_blocks(as_floats, dtype=np.float64)


def as_floats(values: npt.NDArray[Any], name: str = "X") -> npt.NDArray[np.float64]:
    """Return numbers as float64, with a warning if whole numbers are rounded."""
    if array_is_rounded(values):
        warn_of_rounded_integers(name)
    return values.astype(np.float64)


def order_columns(names: Sequence[str] | None, expected: Sequence[str] | None) -> list[str] | None:
    """Return the names of X's columns in the expected order; None if either list is missing.

    Raises DataError if a name is missing, or is not expected.
    """
    if names is None or expected is None:
        return None
    missing = [name for name in expected if name not in names]
    unexpected = [str(name) for name in names if name not in expected]
    if missing or unexpected:
        problems = [f"lacks {some(missing)}"] if missing else []
        problems += [f"has {some(unexpected)} besides"] if unexpected else []
        raise DataError(
            f"X {' and '.join(problems)}",
            f"give the columns of the training data, in any order: {some(expected)}",
        )
    return list(expected)


def check_features(estimator: Any, X: Any) -> None:
    """Raise RowShapeError if lazy X has another number of features or shape than in training.

    If the number is unknown, NaN in Dask, it is checked when the blocks are computed.
    """
    n_features = math.prod(X.shape[1:])
    if math.isnan(n_features):
        return
    if n_features != estimator.n_features_in_:
        raise _feature_count_error(estimator, n_features)
    schema = estimator._state.schema
    if not schema.sparse:  # packed sparse rows have the row shape (2, k), unlike X
        check_row_shape("X has", X.shape[1:], "the model was trained on", schema.row_shape)


def _feature_count_error(estimator: Any, n_features: int) -> RowShapeError:
    """Return the error for another number of features, worded as scikit-learn's tests require."""
    return RowShapeError(
        f"X has {n_features} features, but {type(estimator).__name__} is expecting "
        f"{estimator.n_features_in_} features as input",
        "give the features of the training data",
    )


def checked_rows(
    estimator: Any, X: Any, *, reset: bool, nameless: bool = False, numbers: Any = None
) -> Any:
    """Return checked rows: (n, d), dense or sparse, or images (n, h, w, channels).

    reset : whether to record the number and names of the features on the estimator, rather than to
        compare them with the recorded ones
    nameless : whether an array without names is expected, because the names of the features come
        from a store; scikit-learn would warn otherwise
    numbers : the values of X if it is a data frame of numbers, as `frame_numbers` returns them

    Raises DataError for rows that are not finite numbers, or have other features.
    """
    refuse_packed(X, "X")
    values = (getattr(X, "data", None) if is_sparse(X) else X) if numbers is None else numbers
    if reset and isinstance(values, np.ndarray) and array_is_rounded(values):
        warn_of_rounded_integers("X")
    with shorten_errors(X, "X", encodable=reset and getattr(X, "ndim", 2) == 2):
        if is_frame(X):
            rows = _checked_frame(estimator, X, numbers, reset=reset)
        else:
            rows = _checked_rows(estimator, X, reset=reset, nameless=nameless)
    n_features = int(np.prod(rows.shape[1:]))
    if reset:
        estimator.n_features_in_ = n_features
    elif n_features != estimator.n_features_in_:
        raise _feature_count_error(estimator, n_features)
    return rows


def _checked_frame(estimator: Any, X: Any, numbers: Any, *, reset: bool) -> Any:
    """Return the rows of a data frame of numbers, and record or compare its names."""
    text_columns = non_numeric_columns(X) if numbers is None else []
    if text_columns:
        raise DataError(
            f"X has columns that are not numbers, {some(text_columns)}, but the model was trained "
            "on numbers",
            "convert these columns to numbers, or leave them out if the model was trained without "
            "them",
        )
    validate_data(estimator, X.to_native(), reset=reset, skip_check_array=True)
    rows = X.to_numpy() if numbers is None else numbers  # None for a frame with gaps
    if reset and len(X.columns) > 1 and isinstance(X.columns[0], str):
        detector = IndexDetector()
        detector.add(rows[:, 0], 0)
        detector.warn_if_index(X.columns[0], "X")
    return check_array(
        rows, dtype=ROW_DTYPES, estimator=estimator, input_name="X",
        ensure_min_samples=2 if reset else 1,
    )  # fmt: skip


def _checked_rows(estimator: Any, X: Any, *, reset: bool, nameless: bool) -> Any:
    """Return the rows of an array, checked by scikit-learn; see `checked_rows`."""
    X = numeric(X)
    ndim = getattr(X, "ndim", 0)
    are_images = ndim == 4
    if ndim < 2:
        raise no_rows(X)
    if ndim == 3:
        raise DataError(
            f"X has the shape {X.shape}",
            "if these are images (n, height, width), give them a channel: X[..., None]",
        )
    # Sparse rows keep their dtype until they are made dense, so that no large array is copied.
    options: dict[str, Any] = {"dtype": ROW_DTYPES}
    if is_sparse(X):
        options = {"dtype": None, "accept_sparse": "csr"}
    if not are_images and (reset or not nameless):
        return validate_data(
            estimator, X, reset=reset, ensure_min_samples=2 if reset else 1, **options
        )
    return check_array(X, allow_nd=are_images, estimator=estimator, input_name="X", **options)


def non_numeric_columns(frame: Any) -> list[str]:
    """Return the names of the columns of a data frame whose dtype is not numeric."""
    return [
        str(name)
        for name, dtype in frame.schema.items()
        if not (dtype.is_numeric() or dtype.is_boolean())
    ]


def pack_long_rows(rows: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return checked rows, packed if they are sparse and long, and their file form.

    The file form is None for rows that are not packed.
    """
    if not is_sparse(rows):
        return rows, None
    packed = PackedRows.of_matrix(rows)
    if not stays_sparse(packed.n_features, packed.shape[2]):
        return rows, None
    return packed, {"sparse": packed.n_features}


def sparse_note(X: Any) -> dict[str, str]:
    """Return the entry of `report_` for sparse rows; empty for dense rows."""
    if not is_sparse(X):
        return {}
    conversion = "" if X.format == "csr" else f", of {X.format.upper()} made CSR once"
    share = X.nnz / max(1, math.prod(X.shape))
    form = "batches are made dense" if pack_long_rows(X)[1] is None else "rows stay sparse"
    return {"sparse": f"{share:.2%} of the entries are stored; {form}{conversion}"}


def to_dask_or_numpy(y: Any) -> Any:
    """Return a zarr array as a Dask array, a Dask array unchanged, and other arrays as NumPy's."""
    refuse_packed(y, "y")
    if isinstance(y, zarr.Array):
        return on_demand("dask.array").from_array(y)
    return y if y is None or hasattr(y, "__dask_graph__") else np.asarray(y)


# ------------------------------------------------------------------------------- encoded tables


def check_text_names(frame: Any) -> bool:
    """Return whether the names of all columns are text, so that the columns can be encoded.

    Raises DataError if they are not and a column has to be encoded, because it is not numeric.
    """
    if names_of_columns(frame) is not None:
        return True
    text_columns = non_numeric_columns(frame)
    if text_columns:
        other_names = [str(name) for name in frame.columns if not isinstance(name, str)]
        raise DataError(
            f"X has columns that are not numbers, {some(text_columns)}, which can be encoded only "
            f"if all names of columns are text; {some(other_names)} are not",
            "convert the names: X.columns = X.columns.map(str)",
        )
    return False


class _TableReader:
    """A reader for `tables.fit` that yields an Arrow table and its targets in blocks of rows."""

    has_types = True  # text is never a number, even if it looks like one

    def __init__(self, table: Any, y: npt.NDArray[Any]) -> None:
        self._table, self._y = table, y
        self.n_rows = len(table)

    def blocks(self, start: int, _block_bytes: int) -> Iterator[RawBlock]:
        for row in range(start, self.n_rows, _ENCODED_ROWS):
            rows = slice(row, row + _ENCODED_ROWS)
            yield RawBlock(self._table[rows], self._y[rows], "X", row)


_DUCKDB_REMEDIES = ColumnRemedies(
    'X.df().astype({...: "category"})', "X.select('* REPLACE (...::DOUBLE AS ...)')", "",
    "X.select('* EXCLUDE (...)')", "X.select('* REPLACE (TRY_CAST(... AS DOUBLE) AS ...)')",
    "X.select('* REPLACE (TRY_CAST(... AS TIMESTAMP) AS ...)')",
    """X.select('* REPLACE (strptime("{name}", $${form}$$) AS "{name}")')""",
)  # fmt: skip


def fit_encoder(
    X: Any, y: npt.NDArray[Any], seed: int, *, classes: bool
) -> tuple[npt.NDArray[np.float32], Encoder]:
    """Return the features (n, d) of a data frame, and the encoder that was fitted to it.

    y : (n,) or (n, c) checked targets, from which words are encoded
    seed : seed of the random numbers of the encoder
    classes : whether the targets are labels
    """
    y, kind = (y.astype(str), "classes") if classes else (y, "values")
    table = _cells(X)
    remedies = ARROW_REMEDIES
    if X.implementation.is_pandas_like():
        remedies = PANDAS_REMEDIES
    elif X.implementation.is_polars():
        remedies = POLARS_REMEDIES
    elif is_of_duckdb(X):
        remedies = _DUCKDB_REMEDIES
    fitted = fit(
        _TableReader(table, y), lambda block: TargetConverter(block, kind), ColumnDeclarations(),
        MISSING, seed, 0, remedies=remedies,
        wrong_cell_remedy="correct it, or replace it by a missing value",
    )  # fmt: skip
    features = [fitted.encode(part, "X", row, row) for row, part in _parts(table)]
    return np.concatenate(features), fitted.encoder


def encode_rows(X: Any, encoder: Encoder) -> npt.NDArray[np.float32]:
    """Return the features (n, d) of a data frame with the columns that the encoder was fitted to.

    Raises DataError for other columns, or if X is not a data frame.
    """
    if not is_frame(X):
        raise DataError(
            f"X is a {type(X).__name__}, but the model was trained on a data frame",
            f"give a data frame with the columns {some(encoder.columns)}",
        )
    names = tuple(name for name in X.columns if name not in encoder.dropped)
    table = _cells(X.select(order_columns(names, encoder.columns)))
    parts = [encoder.encode(part, "X", row) for row, part in _parts(table)]  # refuses wrong cells
    unknown = UnknownWords(encoder)
    unknown.add(table)
    unknown.warn_if_many("X")
    return np.concatenate(parts) if parts else np.empty((0, len(encoder.features)), np.float32)


def _cells(X: Any) -> Any:
    """Return the frame as an Arrow table, without the columns that pandas marks as its index."""
    return arrow_table(X, "X").select(list(range(len(X.columns))))


def _parts(table: Any) -> list[tuple[int, Any]]:
    """Return (number of the first row, part) of each part of a table."""
    starts = range(0, len(table), _ENCODED_ROWS)
    return [(row, table[row : row + _ENCODED_ROWS]) for row in starts]
