"""Files and stores given in place of arrays.

Files are ingested into a temporary store for training, and read directly for predictions.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import zarr

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention, mentions
from streamkern.basics.text import some
from streamkern.basics.values import parse_bytes
from streamkern.basics.warning import append_to_warnings
from streamkern.estimator.fitted import Schema
from streamkern.estimator.inputs import open_stream, own_targets_error
from streamkern.estimator.targets import refuse_numbers_as_labels
from streamkern.filesystem.abandoned import FIT_PREFIX, create_locked_folder, remove_locked
from streamkern.filesystem.icechunk_repository import is_icechunk
from streamkern.filesystem.urls import StrictStore, local_path
from streamkern.ingest.columns import DEFAULT_ARRAYS, ReadRequest, as_list
from streamkern.ingest.convert_data import ConvertedData, convert_data
from streamkern.ingest.convert_input import convert_input
from streamkern.ingest.frames import are_names, is_dask_table, is_frame
from streamkern.ingest.hub_datasets import hub_names, is_hub_dataset
from streamkern.ingest.ingest import ingest
from streamkern.ingest.input_files import FileOpener, are_paths, format_by_ending
from streamkern.ingest.path_patterns import expand_paths
from streamkern.ingest.tables.numbers import is_number
from streamkern.ingest.zarr_groups import arrays_with_text, foreign_group, has_array, own_state
from streamkern.predict.input_rows import FileRows, open_rows
from streamkern.store.chunk_output import DEFAULT_MEMORY
from streamkern.store.store import Store
from streamkern.store.zarr_json import store_mark
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.user import is_source


def is_files(X: Any) -> bool:
    """Return whether X is a path, a list of paths or a pattern of files, and not of a store."""
    if not are_paths(X) or is_icechunk(X):
        return False
    urls = expand_paths(list(X) if isinstance(X, tuple) else X)
    urls = urls if isinstance(urls, list) else [urls]
    path = local_path(urls[0])
    has_unknown_ending = format_by_ending(urls[0]) is None
    if len(urls) > 1 or (has_unknown_ending and path is not None and path.is_file()):
        return True
    with ExitStack() as files:
        return FileOpener({}, files).format_name(urls[0]) != "zarr"


INGEST_OPTIONS = frozenset(inspect.signature(ingest).parameters) - {
    "inputs", "out_url", "y", "sample_weight", "memory", "seed",
}  # fmt: skip
"""Parameters of `ingest` that its errors mention, but that `fit` and `predict` do not have."""


@contextmanager
def _explain_ingest_options() -> Iterator[None]:
    """Explain options of `ingest` that errors and warnings of a block mention."""
    try:
        with append_to_warnings(_option_hint):
            yield
    except (ConfigError, DataError) as error:
        error.append(_option_hint(error.message))
        raise


def _option_hint(message: str) -> str:
    """Return the text that explains the first option of `ingest` in a message, or ""."""
    names = (mention.name for mention in mentions(message) if mention.value is not None)
    option = next((name for name in names if name in INGEST_OPTIONS), None)
    if option is None or "ingest_store" in message:
        return ""
    return (
        f" ({option} is an option of streamkern.ingest_store: convert the file to a store with it "
        "and give the store, or read the file into a data frame and give the frame)"
    )


def resolve_data(
    X: Any, y: Any = None, sample_weight: Any = None, expected: Schema | None = None
) -> ConvertedData:
    """Return rows, targets and weights, with names replaced by the columns or arrays they mean.

    Parameters
    ----------
    X, y, sample_weight : as for `fit`; y and sample_weight may name columns or arrays of X.
    expected : schema of earlier data. If y or sample_weight is not given, a table's columns that
        were targets or weights in the earlier data are taken.

    Returns
    -------
    data : as from `convert_data`; for a store whose arrays are named, its source as X.

    Raises
    ------
    ConfigError
        Targets or weights are given beside a store or source that has its own, or the names are not
        those of the store's targets and weights.
    DataError
        X has no column or array of a name, or some target columns of a data frame have other names
        than in the earlier data.
    """
    if (y is not None or sample_weight is not None) and _has_targets(X):
        raise own_targets_error("sample_weight" if y is None else "y")
    if _is_store(X):
        return _resolve_store(X, y, sample_weight, expected)
    if expected is None:
        return convert_data(X, y, sample_weight, DEFAULT_ARRAYS)
    arrays = expected.named_arrays
    if is_hub_dataset(X):
        X, y, sample_weight = _resolve_hub_data(X, y, sample_weight, expected)
    data = convert_data(X, expected.in_trained_order(y), sample_weight, arrays)
    if data.y is None and (names := _find_targets(data.X, expected)):
        data = convert_data(data.X, names, data.sample_weight, arrays)
    data = data.with_target_order(expected.target_names)
    if data.sample_weight is not None:
        return data
    return data._replace(sample_weight=_find_weights(data.X, expected))


def _resolve_store(X: Any, y: Any, sample_weight: Any, expected: Schema | None) -> ConvertedData:
    """Return the result of `resolve_data` for a store; y and sample_weight must be names."""
    for name, array in (("y", y), ("sample_weight", sample_weight)):
        if array is not None and not isinstance(array, str):
            raise own_targets_error(name)
    group, x = _foreign_group(X), None
    if group is not None:
        if expected is not None:
            request = ReadRequest(None, y, sample_weight)
            request = expected.named_arrays.apply_to(request, partial(has_array, group))
            x, y, sample_weight = request.x, request.y, request.w
        # Text must be encoded, so arrays with text are read into memory like a table.
        arrays = arrays_with_text(group, x or "X", "y" if y is None else y, sample_weight)
        if arrays is not None:
            names = None if y is None else (y,)
            data = convert_data(*arrays)
            return data._replace(
                names=names, targets_are_columns=y is not None, weight_column=sample_weight
            )
    if x is None and y is None and sample_weight is None:
        return ConvertedData(X, None, None)
    return ConvertedData(_open_named_arrays(X, y, sample_weight, x or "X"), None, None)


def _resolve_hub_data(X: Any, y: Any, sample_weight: Any, expected: Schema) -> tuple[Any, Any, Any]:
    """Return a Hugging Face data set, and its targets and weights by the names of earlier data.

    Columns of targets or weights are left out if arrays are given in place of them.
    """
    targets = _find_targets(X, expected)
    unused: list[Any] = []
    if y is None:
        y = targets
    elif targets is not None and not are_names(y, X):
        unused = as_list(targets)
    weights = expected.weight_column
    if weights in hub_names(X) and weights not in (expected.given_columns or ()):
        if sample_weight is None:
            sample_weight = weights
        elif not isinstance(sample_weight, str):
            unused = [*unused, weights]
    return X.remove_columns(unused) if unused else X, y, sample_weight


def _find_targets(X: Any, expected: Schema) -> Any:
    """Return the name or names of the columns of a table that were the targets in training.

    None unless the table has all of them.
    """
    names = expected.target_names
    has_columns = is_frame(X) or (is_dask_table(X) and X.ndim == 2)
    columns = X.columns if has_columns else hub_names(X) if is_hub_dataset(X) else ()
    if not names or set(names) & set(expected.given_columns or ()):
        return None
    if not all(isinstance(name, str) and name in columns for name in names):
        return None
    return names[0] if len(names) == 1 else names


def _find_weights(X: Any, expected: Schema) -> Any:
    """Return the column of a table that was the sample weights in training; None without one."""
    name = expected.weight_column
    if (
        name is None
        or name in (expected.given_columns or ())
        or not (is_frame(X) or is_dask_table(X))
    ):
        return None
    return convert_input(X[name], "sample_weight") if name in X.columns else None


def _has_targets(X: Any) -> bool:
    """Return whether X is a source or an open store, which include their targets."""
    # `is_source` looks for attributes, and Delayed objects of Dask have every attribute.
    return isinstance(X, Store) or (is_source(X) and not hasattr(X, "__dask_graph__"))


def _is_store(X: Any) -> bool:
    """Return whether X is a Zarr group, or the path of one."""
    return isinstance(X, zarr.Group) or is_icechunk(X) or (are_paths(X) and not is_files(X))


def _foreign_group(X: Any) -> zarr.Group | None:
    """Return the group of a store that another program wrote; None for other data."""
    return None if not _is_store(X) or is_icechunk(X) else foreign_group(X)


def open_without_targets(X: Any, schema: Schema) -> BaseSource:
    """Return a source of the rows of a store, or of other streamed data, without targets."""
    group = _foreign_group(X)
    if group is not None:
        request = schema.named_arrays.apply_to(
            ReadRequest(targets=False), partial(has_array, group)
        )
        if request.x is not None:
            return ZarrSource(X, x=request.x, y=None)
    return open_stream(X, targets=False)


def _open_named_arrays(X: Any, y: str | None, w: str | None, x: str = "X") -> ZarrSource:
    """Return the source of a store in which the rows, targets and weights have these names.

    In a store of streamkern the arrays have fixed names; y and w must be the names of the columns
    that it was made from. Raises ConfigError otherwise.
    """
    if not _is_streamkern_store(X):
        source = ZarrSource(X, x=x, y="y" if y is None else y, w=w)
        source.target_columns = None if y is None else (y,)
        source.weight_column = w
        return source
    source = ZarrSource(X)
    targets = source.target_columns or ()
    if y is not None and y != "y" and targets != (y,):
        raise ConfigError(
            f"{mention('y', y)} is not the target of this store of streamkern"
            f"{', which is ' + some(targets) if targets else ''}",
            "leave y out",
        )
    if w is not None and (not source.weighted or w not in ("w", source.weight_column)):
        weights = "other" if source.weighted else "no"
        raise ConfigError(
            f"{mention('sample_weight', w)} is given, but this store of streamkern has {weights} "
            f"weights",
            "leave sample_weight out",
        )
    return source


def _is_streamkern_store(X: Any) -> bool:
    """Return whether streamkern wrote the store at a path, or the group."""
    if isinstance(X, zarr.Group):
        return store_mark(StrictStore(X.store), X.path, str(X.store_path)) is not None
    if not are_paths(X):  # an object of icechunk
        return False
    with ExitStack() as files:
        return own_state(X, FileOpener({}, files)) is not None


_block_stores: ContextVar[ExitStack | None] = ContextVar("_block_stores", default=None)


@contextmanager
def remove_temporary_stores() -> Iterator[None]:
    """Remove, at the end of a block, the stores that `ingest_temporarily` creates in it."""
    with ExitStack() as stores:
        token = _block_stores.set(stores)
        try:
            yield
        finally:
            _block_stores.reset(token)


def ingest_temporarily(
    X: Any, y: Any, sample_weight: Any, *, targets: str, seed: int, memory: Any,
    expected: Schema | None = None,
) -> ZarrSource:  # fmt: skip
    """Return a source of the rows of files, in a temporary store.

    The store is removed when the source is no longer referenced, or at the end of the block of
    `remove_temporary_stores`.

    y, sample_weight, targets, seed, memory : as `ingest` takes them; memory may be "auto"
    expected : schema of an earlier table, whose columns of targets and weights are the default
    """
    folder, lock = create_locked_folder(FIT_PREFIX)
    try:
        budget = DEFAULT_MEMORY if memory == "auto" else parse_bytes(memory, "memory")
        with _explain_ingest_options():
            ingest(
                X, folder / "rows.zarr", y=y, sample_weight=sample_weight, targets=targets,
                seed=seed, memory=budget,
                like=None if expected is None else expected.to_like(),  # type: ignore[arg-type]
            )  # fmt: skip
        source = ZarrSource(folder / "rows.zarr")
        _refuse_continuous_classes(source)
    except BaseException:
        remove_locked(folder, lock)
        raise
    remove = weakref.finalize(source, remove_locked, folder, lock)
    if (stores := _block_stores.get()) is not None:
        stores.callback(remove)
    return source


def have_several_labels(y: Any, expected: Schema | None) -> bool:
    """Return whether the rows of files have a column for each of several labels.

    y : as for `fit` of a classifier
    expected : schema of an earlier table, whose targets are meant if y is None
    """
    if y is None and expected is not None and expected.labels is not None:
        return expected.labels.indicator is not None
    return isinstance(y, list | tuple) and len(y) > 1


def _refuse_continuous_classes(source: ZarrSource) -> None:
    """Raise DataError for classes that are continuous numbers, as `fit` does for arrays."""
    names = source.classes or ()
    numbers = [float(name) for name in names if is_number(name)]
    if len(numbers) == len(names) and not np.isfinite(numbers).all():
        raise DataError(
            f"y holds {', '.join(n for n in names if not np.isfinite(float(n)))} among numbers, "
            "which is not a class",
            "correct such rows, or leave them out",
        )
    for name in names:
        if is_number(name) and np.isfinite(float(name)) and not float(name).is_integer():
            raise DataError(
                f"y holds numbers with fractions, such as {name}, which are values, not classes",
                f"use KernelRegressor, or ingest the rows with {mention('targets', 'classes')} "
                f"and fit the store",
            )
    refuse_numbers_as_labels(source.classes or (), source.n_rows)


@contextmanager
def open_file_rows(
    X: Any, schema: Schema, y: Any = None, sample_weight: Any = None, *, targets: bool
) -> Iterator[FileRows]:
    """Open the rows of files, in the form of the training data, during a block.

    y, sample_weight : names of columns; default: those of the training data
    targets : whether to read targets
    """
    with ExitStack() as files, _explain_ingest_options():
        paths = [os.fspath(path) for path in (X if isinstance(X, list | tuple) else [X])]
        yield open_rows(  # type: ignore[misc]  # for stores this would be a source
            paths, files, schema, targets=targets, y=y, sample_weight=sample_weight
        )


def resolve_test(test: Any, y: Any) -> tuple[Any, Any]:
    """Return rows and targets of the argument `test` of `fit`.

    y : targets of the training data; if it is the name of a column, that column of `test` is used

    Raises ConfigError for a tuple of another length than 2.
    """
    if not isinstance(test, tuple):
        # A store of streamkern has its targets under any name of the column.
        has_targets = _has_targets(test) or (_is_store(test) and _is_streamkern_store(test))
        return test, y if isinstance(y, str) and not has_targets else None
    if len(test) != 2:
        raise ConfigError(
            f"test is a tuple of {len(test)}", f"give {mention('test=')}(X, y), or a store"
        )
    return test


def missing_targets_error(name: str, expected: Schema | None) -> DataError:
    """Return the error for rows without targets.

    name : class of the estimator
    expected : schema of the training data, if the rows are for a fitted estimator
    """
    if expected is not None:
        return DataError(
            "rows for further training, for testing and for scoring need targets y, but these "
            "have none",
            f"give targets as in partial_fit(X, y), fit(..., {mention('test=')}(X, y)), "
            "score(X, y) or evaluate(model, X, y)",
        )
    return DataError(
        f"{name} requires y to be passed, but the target y is None",
        "give targets, or a store that includes them",
    )
