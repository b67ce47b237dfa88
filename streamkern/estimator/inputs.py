"""The data that estimators take: arrays as scikit-learn checks them, and everything streamed."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from sklearn.utils.validation import check_array, validate_data

from streamkern.basics.errors import ConfigError, DataError, StreamkernError
from streamkern.basics.optional import on_demand
from streamkern.basics.text import some
from streamkern.filesystem.icechunk_repository import is_icechunk
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.frames import arrow_table, is_dask_table, is_frame, names_of_columns
from streamkern.ingest.numeric import is_sparse, no_rows, numeric, with_lengths
from streamkern.ingest.received import are_paths
from streamkern.ingest.tables.cells import MISSING
from streamkern.ingest.tables.encoder import Encoder, UnknownWords
from streamkern.ingest.tables.fit import fit
from streamkern.ingest.tables.key_columns import IndexDetector, array_is_rounded, warn_of_rounded
from streamkern.ingest.tables.scan import Declared
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

_ROWS = 1 << 16  # encoded at once
# Dtypes that are stored unchanged; all others become float64.
DTYPES = [np.float64, np.float32, np.float16, np.uint8, np.uint16]


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

    classes : names, if y holds indices of them
    targets : whether to read y of a store
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
            raise brings_its_own(name)
    if isinstance(X, zarr.Group | str | os.PathLike) or is_icechunk(X):
        return ZarrSource(X) if targets else ZarrSource(X, y=None)
    return ZarrSource(X) if isinstance(X, Store) else as_source(X)


def brings_its_own(name: str) -> ConfigError:
    """Return the error for targets or weights given beside a store or a source."""
    return ConfigError(
        f"{name} is given, and X is a store or a source, which has its own targets and weights",
        f"leave {name} out, or give a string with the name of an array beside the path of a Zarr "
        "group",
    )


def _lazy_rows(X: Any) -> Any:
    """Return lazy rows in a supported dtype: as for arrays in memory, others become float64."""
    dtype = np.dtype(X.dtype)
    if dtype in X_DTYPES or dtype.kind not in "biuf":
        return X
    return lazy_array(X).map_blocks(as_floats, dtype=np.float64)


def as_floats(values: npt.NDArray[Any], name: str = "X") -> npt.NDArray[np.float64]:
    """Return numbers as float64, with a warning for whole numbers that it rounds."""
    if array_is_rounded(values):
        warn_of_rounded(name)
    return values.astype(np.float64)


def columns_in_order(
    names: Sequence[str] | None, expected: Sequence[str] | None, where: str
) -> list[str] | None:
    """Return the expected names, or DataError if `names` differ; None if either has no names."""
    if names is None or expected is None:
        return None
    missing = [name for name in expected if name not in names]
    extra = [str(name) for name in names if name not in expected]
    if missing or extra:
        lacks = [f"lacks {some(missing)}"] if missing else []
        has = [f"has {some(extra)} besides"] if extra else []
        raise DataError(
            f"{where} {' and '.join(lacks + has)}",
            f"give the columns trained on, in any order: {some(expected)}",
        )
    return list(expected)


def check_features(estimator: Any, X: Any) -> None:
    """Raise DataError unless lazy X has the number of features trained on, or leaves it open."""
    n_features = math.prod(X.shape[1:])
    if n_features != estimator.n_features_in_ and n_features == n_features:  # NaN: unknown
        raise _other_features(estimator, n_features)
    schema = estimator._state.schema
    if n_features == n_features and not schema.sparse:  # rows of a block are packed there
        check_row_shape("X has", X.shape[1:], "the model was trained on", schema.row_shape)


def _other_features(estimator: Any, n_features: int) -> DataError:
    return DataError(
        f"X has {n_features} features, but {type(estimator).__name__} is expecting "
        f"{estimator.n_features_in_} features as input",
        "give those that it was trained on",
    )


def checked_rows(
    estimator: Any, X: Any, *, reset: bool, nameless: bool = False, numbers: Any = None
) -> Any:
    """Return rows (n, d), dense or sparse, or images (n, h, w, ch); `reset` records their features.

    nameless : an array, whose columns go by position, is expected although features have names: no
        warning, as a store named them, and not the user
    numbers : of X if it is a frame, as `numbers_of` returns them
    """
    refuse_packed(X, "X")
    plain = (getattr(X, "data", None) if is_sparse(X) else X) if numbers is None else numbers
    if reset and isinstance(plain, np.ndarray) and array_is_rounded(plain):
        warn_of_rounded("X")
    with one_sentence(X, "X"):
        if is_frame(X):
            rows = _checked_frame(estimator, X, numbers, reset=reset)
        else:
            rows = _checked_rows(estimator, X, reset=reset, nameless=nameless)
    n_features = int(np.prod(rows.shape[1:]))
    if reset:
        estimator.n_features_in_ = n_features
    elif n_features != estimator.n_features_in_:
        raise _other_features(estimator, n_features)
    return rows


def _checked_frame(estimator: Any, X: Any, numbers: Any, *, reset: bool) -> Any:
    """Return the rows of a frame of numbers, whose names are recorded or compared."""
    words = not_numbers(X) if numbers is None else []
    if words:
        raise DataError(
            f"X has columns that are not numbers, {some(words)}, and the model was trained on "
            "numbers",
            "give such columns as numbers, and leave out those it was not trained on",
        )
    validate_data(estimator, X.to_native(), reset=reset, skip_check_array=True)
    rows = X.to_numpy() if numbers is None else numbers  # a frame with gaps
    if reset and len(X.columns) > 1 and isinstance(X.columns[0], str):
        counter = IndexDetector()
        counter.add(rows[:, 0], 0)
        counter.warn_if_index(X.columns[0], "X")
    return check_array(
        rows, dtype=DTYPES, estimator=estimator, input_name="X",
        ensure_min_samples=2 if reset else 1,
    )  # fmt: skip


def _checked_rows(estimator: Any, X: Any, *, reset: bool, nameless: bool) -> Any:
    X = numeric(X)
    ndim = getattr(X, "ndim", 0)
    images = ndim == 4
    if ndim < 2:
        raise no_rows(X)
    if ndim == 3:
        raise DataError(
            f"X has the shape {X.shape}",
            "if these are images (n, height, width), give them a channel: X[..., None]",
        )
    # Sparse numbers keep their dtype until they are dense: no large array is copied.
    options: dict[str, Any] = {"dtype": DTYPES}
    if is_sparse(X):
        options = {"dtype": None, "accept_sparse": "csr"}
    if not images and (reset or not nameless):
        return validate_data(
            estimator, X, reset=reset, ensure_min_samples=2 if reset else 1, **options
        )
    return check_array(X, allow_nd=images, estimator=estimator, input_name="X", **options)


def not_numbers(frame: Any) -> list[str]:
    """Return the names of the columns of a data frame that are not numbers by their type."""
    return [
        str(name)
        for name, dtype in frame.schema.items()
        if not (dtype.is_numeric() or dtype.is_boolean())
    ]


def sparse_if_long(rows: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return checked rows, packed if they are sparse and long, and the form that records it."""
    if not is_sparse(rows):
        return rows, None
    packed = PackedRows.of_matrix(rows)
    if not stays_sparse(packed.n_features, packed.shape[2]):
        return rows, None
    return packed, {"sparse": packed.n_features}


def sparse_note(X: Any) -> dict[str, str]:
    """Return the entry of a report for sparse rows; empty for dense ones."""
    if not is_sparse(X):
        return {}
    made = "" if X.format == "csr" else f", of {X.format.upper()} made CSR once"
    share = X.nnz / max(1, math.prod(X.shape))
    form = "batches are made dense" if sparse_if_long(X)[1] is None else "rows stay sparse"
    return {"sparse": f"{share:.2%} of the entries are stored; {form}{made}"}


@contextlib.contextmanager
def one_sentence(values: Any, name: str) -> Iterator[None]:
    """Turn multi-line errors of scikit-learn's checks of an argument into one sentence of ours."""
    try:
        yield
    except StreamkernError:
        raise
    except ValueError as error:
        first, *others = str(error).splitlines()
        more = ["r" + line[1:] for line in others if line.startswith("Reshape")]
        if "contains NaN" in first or "contains infinity" in first:
            first = f"{first.rstrip('.')}{_nonfinite_row(values)}"
            more = ["correct such rows, or leave them out"]
        if "feature names" in first:
            listed = " ".join(others).replace(": - ", ": ").replace(" - ", ", ")
            more = [listed.replace(" Feature names", "; Feature names")]
        raise DataError("; ".join([first.rstrip(".:"), *filter(None, more)])) from None


def _nonfinite_row(given: Any) -> str:
    """Return the place of the first number that is not finite, in words; "" if unknown."""
    with contextlib.suppress(TypeError, ValueError):
        if is_sparse(given):
            entries = given.tocoo()
            wrong = entries.row[~np.isfinite(entries.data)]
        else:
            values = given.to_numpy() if is_frame(given) else given
            wrong = np.nonzero(~np.isfinite(np.asarray(values, np.float64)))[0]
        if len(wrong):
            return f" in row {wrong.min()}"
    return ""


def lazy_array(y: Any) -> Any:
    """Return a zarr array as a Dask array, to be converted in pieces; anything else as it is."""
    refuse_packed(y, "y")
    if isinstance(y, zarr.Array):
        return on_demand("dask.array").from_array(y)
    return y if y is None or hasattr(y, "__dask_graph__") else np.asarray(y)


# ------------------------------------------------------------------------------- encoded tables


def check_text_names(frame: Any) -> bool:
    """Return whether the columns of a frame that are not all numbers can be encoded, by name.

    They cannot if names are not text: DataError, or False if numbers are merely missing.
    """
    if names_of_columns(frame) is not None:
        return True
    words = not_numbers(frame)
    if words:
        unnamed = [str(name) for name in frame.columns if not isinstance(name, str)]
        raise DataError(
            f"X has columns that are not numbers, {some(words)}, which are encoded by name, and "
            f"names that are not text, {some(unnamed)}",
            "give text: X.columns = X.columns.map(str)",
        )
    return False


class _TableReader:
    """The table and its targets, in blocks, for `fit` to read."""

    def __init__(self, table: Any, y: npt.NDArray[Any]) -> None:
        self._table, self._y = table, y
        self.n_rows = len(table)

    def blocks(self, start: int, _block_bytes: int) -> Iterator[RawBlock]:
        for row in range(start, self.n_rows, _ROWS):
            rows = slice(row, row + _ROWS)
            yield RawBlock(self._table[rows], self._y[rows], "X", row)


def fitted_rows(
    X: Any, y: npt.NDArray[Any], seed: int, *, classes: bool
) -> tuple[npt.NDArray[np.float32], Encoder]:
    """Return features (n, d) of a frame to train on, and the encoder that was fitted to it.

    y, classes : checked targets, and whether they are labels
    """
    y, kind = (y.astype(str), "classes") if classes else (y, "values")
    table = _cells(X)
    if X.implementation.is_pandas_like():
        remedies = 'X.drop(columns=...), X.astype({...: float}), X.astype({...: "category"})'
    elif X.implementation.is_polars():
        remedies = "X.drop(...), X.cast({...: polars.Float64}), X.cast({...: polars.Categorical})"
    else:
        remedies = (
            "X.drop_columns(...), X.remove_columns(...) of a Dataset, or the column cast to "
            "float64 or dictionary_encode()"
        )
    fitted = fit(
        _TableReader(table, y), lambda first: TargetConverter(first, kind), Declared(), MISSING,
        seed, 0, option_names=remedies, typed=True,
    )  # fmt: skip
    rows = [fitted.encode(part, "X", row, row) for row, part in _parts(table)]
    return np.concatenate(rows), fitted.encoder


def encoded_rows(X: Any, encoder: Encoder) -> npt.NDArray[np.float32]:
    """Return features (n, d) of a frame like the one that the encoder was fitted to.

    Raises DataError for data of another form.
    """
    if not is_frame(X):
        raise DataError(
            "the model was trained on columns that are not all numbers, and takes a data frame "
            f"with the columns {some(encoder.columns)}, not a {type(X).__name__}"
        )
    names = tuple(name for name in X.columns if name not in encoder.dropped)
    table = _cells(X.select(columns_in_order(names, encoder.columns, "X")))
    unknown = UnknownWords(encoder)
    unknown.add(table)
    unknown.warn_if_many("X")
    rows = [encoder.encode(part, "X", row) for row, part in _parts(table)]
    return np.concatenate(rows) if rows else np.empty((0, len(encoder.features)), np.float32)


def _cells(X: Any) -> Any:
    """Return the frame as an Arrow table, without the columns that pandas marks as its index."""
    return arrow_table(X, "X").select(list(range(len(X.columns))))


def _parts(table: Any) -> list[tuple[int, Any]]:
    """Return parts of a table, each with the number of its first row."""
    return [(row, table[row : row + _ROWS]) for row in range(0, len(table), _ROWS)]
