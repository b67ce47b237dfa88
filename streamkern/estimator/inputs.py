"""The data that estimators take: arrays as scikit-learn checks them, and everything streamed."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _check_sample_weight, _num_samples, check_array, validate_data

from streamkern.basics.errors import ConfigError, DataError, StreamkernError
from streamkern.basics.optional import on_demand
from streamkern.basics.text import some
from streamkern.estimator.text_targets import values_of_text
from streamkern.filesystem.icechunk_repository import is_icechunk
from streamkern.ingest.dask_tables import with_lengths
from streamkern.ingest.frames import is_dask_table, is_frame, names_of_columns
from streamkern.ingest.given import are_paths
from streamkern.ingest.plain_arrays import is_sparse, no_rows, numeric
from streamkern.ingest.rounding import without_long_doubles
from streamkern.ingest.tables.long_numbers import array_is_rounded, warn_of_rounded
from streamkern.ingest.tables.row_counter import RowCounter
from streamkern.store.layout import X_DTYPES
from streamkern.store.packing import refuse_packed
from streamkern.store.sample_weights import NEGLIGIBLE_WEIGHT
from streamkern.store.store import Store
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.row_shapes import check_row_shape
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.user import as_source, is_source

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
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    classes: Sequence[str] | None = None,
    targets: bool = True,
) -> BaseSource:
    """Return the source of data that `is_stream` accepts.

    classes : names, if y holds indices of them
    targets : whether to read y of a store
    """
    for name, given in (("X", X), ("y", y), ("sample_weight", sample_weight)):
        refuse_packed(given, name)
    if is_dask_table(X):
        names = names_of_columns(X) if X.ndim == 2 else None
        rows = with_lengths(X, "X")
        source = ArraySource(rows, y, classes=classes, sample_weight=sample_weight)
        source.columns = names
        return source
    if isinstance(X, zarr.Array) or hasattr(X, "__dask_graph__"):
        rows = _lazy_rows(X)
        return ArraySource(rows, y, classes=classes, sample_weight=sample_weight)
    for name, given in (("y", y), ("sample_weight", sample_weight)):
        if given is not None:
            raise brings_its_own(name)
    if isinstance(X, zarr.Group | str | os.PathLike) or is_icechunk(X):
        return ZarrSource(X) if targets else ZarrSource(X, y=None)
    return ZarrSource(X) if isinstance(X, Store) else as_source(X)


def brings_its_own(name: str) -> ConfigError:
    """Return the error for targets or weights given beside a store or a source."""
    return ConfigError(
        f"{name} is given, and X is a store or a source, which has its own targets and weights; "
        f"leave {name} out, or give a string with the name of an array beside the path of a Zarr "
        "group"
    )


def _lazy_rows(X: Any) -> Any:
    """Return lazy rows in a supported dtype: as for arrays in memory, others become float64."""
    dtype = np.dtype(X.dtype)
    if dtype in X_DTYPES or dtype.kind not in "biuf":
        return X
    return lazy_array(X).map_blocks(_as_floats, dtype=np.float64)


def _as_floats(values: npt.NDArray[Any], name: str = "X") -> npt.NDArray[np.float64]:
    """Return numbers as float64, with a warning for whole numbers that it rounds."""
    if array_is_rounded(values):
        warn_of_rounded(name)
    return values.astype(np.float64)


def columns_in_order(
    found: tuple[str, ...] | None, wanted: tuple[str, ...] | None, where: str
) -> list[str] | None:
    """Return the names found in the order wanted, or DataError if they differ; None without."""
    if found is None or wanted is None:
        return None
    lacking = [name for name in wanted if name not in found]
    besides = [name for name in found if name not in wanted]
    if lacking or besides:
        lacks = [f"lacks {some(lacking)}"] if lacking else []
        has = [f"has {some(besides)} besides"] if besides else []
        raise DataError(
            f"{where} {' and '.join(lacks + has)}; give the columns trained on, in any order: "
            f"{some(wanted)}"
        )
    return list(wanted)


def check_features(estimator: Any, X: Any) -> None:
    """Raise DataError unless lazy X has the number of features trained on, or leaves it open."""
    n_features = math.prod(X.shape[1:])
    if n_features != estimator.n_features_in_ and n_features == n_features:  # NaN: unknown
        raise _other_features(estimator, n_features)
    if n_features == n_features:
        shape = estimator._state.schema.row_shape
        check_row_shape("X has", X.shape[1:], "the model was trained on", shape)


def _other_features(estimator: Any, n_features: int) -> DataError:
    return DataError(
        f"X has {n_features} features, but {type(estimator).__name__} is expecting "
        f"{estimator.n_features_in_} features as input; give those that it was trained on"
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
            "numbers; give such columns as numbers, and leave out those it was not trained on"
        )
    validate_data(estimator, X.to_native(), reset=reset, skip_check_array=True)
    rows = X.to_numpy() if numbers is None else numbers  # a frame with gaps
    if reset and len(X.columns) > 1 and isinstance(X.columns[0], str):
        counter = RowCounter()
        counter.add(rows[:, 0], 0)
        counter.tell(X.columns[0], "X")
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
            f"X has the shape {X.shape}; if these are images (n, height, width), give them a "
            "channel: X[..., None]"
        )
    # Sparse numbers keep their dtype until they are dense: no large array is copied.
    wanted: dict[str, Any] = {"dtype": DTYPES}
    if is_sparse(X):
        wanted = {"dtype": None, "accept_sparse": "csr"}
    if not images and (reset or not nameless):
        return validate_data(
            estimator, X, reset=reset, ensure_min_samples=2 if reset else 1, **wanted
        )
    return check_array(X, allow_nd=images, estimator=estimator, input_name="X", **wanted)


def not_numbers(frame: Any) -> list[str]:
    """Return the names of the columns of a data frame that are no numbers by their type."""
    return [
        str(name)
        for name, dtype in frame.schema.items()
        if not (dtype.is_numeric() or dtype.is_boolean())
    ]


def sparse_note(X: Any) -> dict[str, str]:
    """Return the entry of a report for sparse rows; empty for dense ones."""
    if not is_sparse(X):
        return {}
    made = "" if X.format == "csr" else f", of {X.format.upper()} made CSR once"
    share = X.nnz / max(1, math.prod(X.shape))
    return {"sparse": f"{share:.2%} of the entries are stored; batches are made dense{made}"}


@contextlib.contextmanager
def one_sentence(given: Any, name: str) -> Iterator[None]:
    """Turn multi-line errors of scikit-learn's checks of an argument into one sentence of ours."""
    try:
        yield
    except StreamkernError:
        raise
    except ValueError as error:
        first, *others = str(error).splitlines()
        more = ["r" + line[1:] for line in others if line.startswith("Reshape")]
        if "contains NaN" in first or "contains infinity" in first:
            first = f"{first.rstrip('.')}{_nonfinite_row(given)}"
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


def checked_values(y: Any, n_rows: int) -> npt.NDArray[Any]:
    """Return regression targets (n,) or (n, c), floating."""
    refuse_packed(y, "y")
    y = values_of_text(y)
    kind = np.asarray(y).dtype.kind
    if kind in "mM" or (kind == "O" and _is_time(y)):
        raise DataError(
            "y holds dates or durations, of which the unit would decide the values; give numbers, "
            "such as the days since a date: (y - y.min()) / np.timedelta64(1, 'D')"
        )
    if (
        kind == "O"
        and (odd := next((k for k in np.asarray(y).flat if np.ndim(k)), None)) is not None
    ):
        raise DataError(
            f"y holds {odd!r}, which is no number but several; give a column for each of them, "
            "np.array(list(y))"
        )
    try:
        with one_sentence(y, "y"):
            values: npt.NDArray[Any] = check_array(
                y, dtype="numeric", ensure_2d=False, input_name="y"
            )
        check_length(values, n_rows)
        values = without_long_doubles(values, "y")
        return values if values.dtype.kind == "f" else _as_floats(values, "y")
    except TypeError:  # float() of an object that is no number
        raise _no_number(y) from None


def _no_number(y: Any) -> DataError:
    """Return the error that names the first target that `float` does not take."""
    rows = np.asarray(y, dtype=object).reshape(len(y), -1)
    cells = ((row, cell) for row, part in enumerate(rows) for cell in part)
    row, cell = next(found for found in cells if not _is_taken(found[1]))
    return DataError(
        f"y holds {str(cell)[:80]!r} in row {row}, of type {type(cell).__name__}, which is no "
        "number; give a number for each row"
    )


def _is_taken(cell: Any) -> bool:
    """Return False for a cell for which `float` raises TypeError; None is a missing number."""
    try:
        float(cell)
    except TypeError:
        return cell is None
    except ValueError:
        return True
    return True


def _is_time(y: Any) -> bool:
    """Return True if the first value is a period, a date or a duration in an array of objects."""
    first = next(iter(np.asarray(y).ravel()[:1]), None)
    return hasattr(first, "freqstr") or isinstance(first, datetime.date | datetime.timedelta)


def floating(y: Any) -> Any:
    """Return streamed regression targets in a floating dtype, so that they are no labels."""
    y = lazy_array(y)
    y = values_of_text(y)
    if y is None or y.dtype.kind == "f":
        return y
    if isinstance(y, np.ndarray):
        return _as_floats(y, "y")
    return y.map_blocks(_as_floats, "y", dtype=np.float64)


def lazy_array(y: Any) -> Any:
    """Return a zarr array as a Dask array, to be converted in pieces; anything else as it is."""
    refuse_packed(y, "y")
    if isinstance(y, zarr.Array):
        return on_demand("dask.array").from_array(y)
    return y if y is None or hasattr(y, "__dask_graph__") else np.asarray(y)


def checked_weights(sample_weight: Any, X: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return sample weights (n,), from one number or one for each row; None for None."""
    if sample_weight is None:
        return None
    refuse_packed(sample_weight, "sample_weight")
    shape, n_rows = np.shape(sample_weight), _num_samples(X)
    if shape and shape != (n_rows,):
        raise DataError(
            f"sample_weight has the shape {shape}, and there are {n_rows} rows; give one weight "
            "for each row"
        )
    if np.size(sample_weight) and not np.any(sample_weight):
        raise DataError(
            "all sample weights are zero, and no row counts; give some rows a weight above 0"
        )
    with one_sentence(sample_weight, "sample_weight"):
        w: npt.NDArray[Any] = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if w.min(initial=0) < 0:
        raise DataError(
            f"sample_weight of row {int(w.argmin())} is {w.min():g}; weights are 0 or above"
        )
    # They are kept as float32, and divided by their mean: a power of two changes no bit.
    largest = w.max(initial=0)
    if largest > 0 and not 1e-30 < largest < 1e30:
        w = np.ldexp(w, -int(np.frexp(largest)[1]))
    return w


def counted_rows(X: Any, y: Any, sample_weight: Any, *, fewest: int = 1) -> tuple[Any, Any, Any]:
    """Return all three without rows whose weight is 0, or negligible beside the largest.

    Such rows take no part in scaling, encoding and centers. Invalid weights are returned unchanged,
    for `checked_weights`. Raises DataError if fewer rows than `fewest` are left.
    """
    weights = np.asarray(sample_weight)
    if weights.shape != np.shape(y)[:1] or weights.dtype.kind not in "biuf" or not len(weights):
        return X, y, sample_weight
    largest = weights.max()
    kept = weights > NEGLIGIBLE_WEIGHT * largest
    if kept.all() or not (np.isfinite(largest) and largest > 0 and (weights >= 0).all()):
        return X, y, sample_weight
    rows = np.flatnonzero(kept)
    if len(rows) < fewest:
        raise DataError(
            f"sample_weight of row {rows[0]} is {largest:g}, beside which the other weights count "
            f"as 0, and {len(rows)} row is too few; give more rows a weight of that size"
        )
    X = X.tocsr() if is_sparse(X) else X  # other sparse forms have no rows to take
    if isinstance(y, zarr.Array):
        refuse_packed(y, "y")
        y = y[:]
    left = X[rows] if is_frame(X) else _safe_indexing(X, rows)
    return left, _safe_indexing(y, rows), weights[rows]


def check_length(y: npt.NDArray[Any], n_rows: int) -> None:
    """Raise DataError unless there is a target for each row."""
    if len(y) != n_rows:
        raise DataError(f"X has {n_rows} rows and y has {len(y)}; give one target for each row")
