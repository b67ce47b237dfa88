"""Files in the place of arrays: trained on through a temporary store, predicted directly."""

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
from streamkern.basics.warning import warnings_completed
from streamkern.estimator.fitted import Schema
from streamkern.estimator.inputs import brings_its_own, open_stream
from streamkern.estimator.targets import refuse_numbers_as_labels
from streamkern.filesystem.abandoned import FIT_PREFIX, locked_folder, remove_locked
from streamkern.filesystem.icechunk_repository import is_icechunk
from streamkern.filesystem.urls import StrictStore, local_path
from streamkern.ingest.columns import DEFAULT_ARRAYS, ReadRequest, as_list
from streamkern.ingest.frames import are_names, is_dask_table, is_frame
from streamkern.ingest.hub_datasets import hub_names, is_hub_dataset
from streamkern.ingest.ingest import ingest
from streamkern.ingest.input_files import FileOpener, kind_by_ending
from streamkern.ingest.path_patterns import expand_paths
from streamkern.ingest.received import Received, are_paths, received, received_data
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
    """Return whether X is the path of a file, of a folder of files, or a pattern, and no store."""
    if not are_paths(X) or is_icechunk(X):
        return False
    urls = expand_paths(list(X) if isinstance(X, tuple) else X)
    urls = urls if isinstance(urls, list) else [urls]
    path = local_path(urls[0])
    if len(urls) > 1 or (kind_by_ending(urls[0]) is None and path is not None and path.is_file()):
        return True
    with ExitStack() as files:
        return FileOpener({}, files).kind(urls[0]) != "zarr"


INGEST_OPTIONS = frozenset(inspect.signature(ingest).parameters) - {
    "inputs", "out_url", "y", "sample_weight", "memory", "seed",
}  # fmt: skip
"""Parameters of ingest that `fit` and `predict` do not have, and that its errors mention."""


@contextmanager
def _explaining_ingest_options() -> Iterator[None]:
    """Say in errors and warnings which function has the options of `ingest` that they mention."""
    try:
        with warnings_completed(_hint):
            yield
    except (ConfigError, DataError) as error:
        error.append(_hint(error.message))
        raise


def _hint(message: str) -> str:
    """Return the text that explains the first option of `ingest` in a message, or ""."""
    names = (mention.name for mention in mentions(message) if mention.value is not None)
    option = next((name for name in names if name in INGEST_OPTIONS), None)
    if option is None or "ingest_store" in message:
        return ""
    return (
        f" ({option} is an option of streamkern.ingest_store: make a store of the file with it and "
        "give that, or read the file into a data frame and give this)"
    )


def given_data(
    X: Any, y: Any = None, sample_weight: Any = None, like: Schema | None = None
) -> Received:
    """Return the data as `received_data` does; for a store with names its source, without them.

    like : the schema of earlier data, whose columns of targets and weights are taken from a table
        that has them
    """
    others = [array for array in (y, sample_weight) if array is not None]
    if others and _is_open(X):
        raise brings_its_own("sample_weight" if y is None else "y")
    if not _is_store(X):
        arrays = DEFAULT_ARRAYS if like is None else like.named_arrays
        if like is not None and is_hub_dataset(X):
            X, y, sample_weight = _hub_data(X, y, sample_weight, like)
        data = received_data(X, y, sample_weight, arrays)
        if like is not None and data.y is None and (names := _targets_in(data.X, like)):
            data = received_data(data.X, names, data.sample_weight, arrays)
        if like is None or data.sample_weight is not None:
            return data
        return data._replace(sample_weight=_weights_in(data.X, like))
    if not all(isinstance(array, str) for array in others):
        raise brings_its_own("sample_weight" if y is None or isinstance(y, str) else "y")
    group, x = _foreign(X), None
    if group is not None:
        if like is not None:
            request = ReadRequest(None, y, sample_weight)
            request = like.named_arrays.filled(request, partial(has_array, group))
            x, y, sample_weight = request.x, request.y, request.w
        column = sample_weight
        read = arrays_with_text(group, x or "X", "y" if y is None else y, column)
        if read is not None:
            names = None if y is None else (y,)
            data = received_data(*read)
            return data._replace(names=names, of_columns=y is not None, weight_column=column)
    if x is None and y is None and sample_weight is None:
        return Received(X, None, None)
    return Received(_store_by_names(X, y, sample_weight, x or "X"), None, None)


def _hub_data(X: Any, y: Any, sample_weight: Any, like: Schema) -> tuple[Any, Any, Any]:
    """Return a data set of Hugging Face, its targets and weights, by the names of earlier data.

    Columns that held these before, and are given as arrays now, are left out.
    """
    targets, others = _targets_in(X, like), []
    if y is None:
        y = targets
    elif targets is not None and not are_names(y, X):
        others = as_list(targets)
    weights = like.weight_column
    if weights in hub_names(X) and weights not in (like.given_columns or ()):
        if sample_weight is None:
            sample_weight = weights
        elif not isinstance(sample_weight, str):
            others = [*others, weights]
    return X.remove_columns(others) if others else X, y, sample_weight


def _targets_in(X: Any, like: Schema) -> Any:
    """Return the name or names of the columns of a table that held the targets in training.

    None unless the table has them all.
    """
    names = [*(like.target_columns or like.output_names or ())]
    held = X.columns if is_frame(X) else hub_names(X) if is_hub_dataset(X) else ()
    if not names or set(names) & set(like.given_columns or ()):
        return None
    if not all(isinstance(name, str) and name in held for name in names):
        return None
    return names[0] if len(names) == 1 else names


def _weights_in(X: Any, like: Schema) -> Any:
    """Return the column of a table that held the weights in training; None without one."""
    name = like.weight_column
    if name is None or name in (like.given_columns or ()) or not (is_frame(X) or is_dask_table(X)):
        return None
    return received(X[name], "sample_weight") if name in X.columns else None


def _is_open(X: Any) -> bool:
    """Return whether X is a source or an open store, which have their targets with them."""
    # Delayed objects of Dask have every attribute.
    return isinstance(X, Store) or (is_source(X) and not hasattr(X, "__dask_graph__"))


def _is_store(X: Any) -> bool:
    """Return whether X is a Zarr group, or the path of one."""
    return isinstance(X, zarr.Group) or is_icechunk(X) or (are_paths(X) and not is_files(X))


def _foreign(X: Any) -> zarr.Group | None:
    """Return the group of a store that another program wrote; else None."""
    return None if not _is_store(X) or is_icechunk(X) else foreign_group(X)


def rows_without_targets(X: Any, schema: Schema) -> BaseSource:
    """Return a source of the rows of a store, or of other streamed data, without targets."""
    group = _foreign(X)
    if group is not None:
        request = schema.named_arrays.filled(ReadRequest(targets=False), partial(has_array, group))
        if request.x is not None:
            return ZarrSource(X, x=request.x, y=None)
    return open_stream(X, targets=False)


def _store_by_names(X: Any, y: str | None, w: str | None, x: str = "X") -> ZarrSource:
    """Return the source of a store whose arrays of targets and weights have these names.

    A store of streamkern has names of columns instead, which must match the given ones.
    """
    if not _is_own(X):
        source = ZarrSource(X, x=x, y="y" if y is None else y, w=w)
        source.target_columns, source.weight_column = None if y is None else (y,), w
        return source
    source = ZarrSource(X)
    targets = source.target_columns or ()
    if y is not None and y != "y" and targets != (y,):
        raise ConfigError(
            f"{mention('y', y)} is not the target of this store of streamkern's"
            f"{', which is ' + some(targets) if targets else ''}",
            "leave y out",
        )
    if w is not None and (not source.weighted or w not in ("w", source.weight_column)):
        held = "other" if source.weighted else "no"
        raise ConfigError(
            f"{mention('sample_weight', w)} is given, and this store of streamkern's has {held} "
            f"weights",
            "leave sample_weight out",
        )
    return source


def _is_own(X: Any) -> bool:
    """Return whether streamkern wrote the store at a path, or the group."""
    if isinstance(X, zarr.Group):
        return store_mark(StrictStore(X.store), X.path, str(X.store_path)) is not None
    if not are_paths(X):  # an object of icechunk
        return False
    with ExitStack() as files:
        return own_state(X, FileOpener({}, files)) is not None


_stores: ContextVar[ExitStack | None] = ContextVar("stores of this call", default=None)


@contextmanager
def temporary_stores() -> Iterator[None]:
    """Remove at the end of a block the stores that `ingested` makes in it."""
    with ExitStack() as stores:
        token = _stores.set(stores)
        try:
            yield
        finally:
            _stores.reset(token)


def ingested(
    X: Any, y: Any, sample_weight: Any, *, targets: str, seed: int, memory: Any,
    like: Schema | None = None,
) -> ZarrSource:  # fmt: skip
    """Return a source of the rows of files, in a temporary store.

    The store is removed when the source is no longer referenced, or at the end of the block of
    `temporary_stores`.

    y, sample_weight : as `ingest` takes them
    like : the schema of an earlier table, whose columns of targets and weights are the default
    """
    folder, lock = locked_folder(FIT_PREFIX)
    try:
        most = DEFAULT_MEMORY if memory == "auto" else parse_bytes(memory, "memory")
        with _explaining_ingest_options():
            ingest(
                X, folder / "rows.zarr", y=y, sample_weight=sample_weight, targets=targets,
                seed=seed, memory=most,
                like=None if like is None else like.of_tables(),  # type: ignore[arg-type]
            )  # fmt: skip
        source = ZarrSource(folder / "rows.zarr")
        _refuse_continuous(source)
    except BaseException:
        remove_locked(folder, lock)
        raise
    removed = weakref.finalize(source, remove_locked, folder, lock)
    if (stores := _stores.get()) is not None:
        stores.callback(removed)
    return source


def are_several_labels(y: Any, like: Schema | None) -> bool:
    """Return whether a classifier's rows in files have a column for each of several labels.

    like : the schema of an earlier table, whose targets are meant if y is None
    """
    if y is None and like is not None and like.labels is not None:
        return like.labels.indicator is not None
    return isinstance(y, list | tuple) and len(y) > 1


def _refuse_continuous(source: ZarrSource) -> None:
    """Raise DataError for classes that are continuous numbers, as `fit` does for arrays."""
    names = source.classes or ()
    numbers = [float(name) for name in names if is_number(name)]
    if len(numbers) == len(names) and not np.isfinite(numbers).all():
        raise DataError(
            f"y holds {', '.join(k for k in names if not np.isfinite(float(k)))} among numbers, "
            "which is not a class",
            "fill in or drop such rows",
        )
    for name in names:
        if is_number(name) and np.isfinite(float(name)) and not float(name).is_integer():
            raise DataError(
                f"y holds numbers with fractions, such as {name}, which are values and not classes",
                f"use KernelRegressor, or ingest the rows with {mention('targets', 'classes')} "
                f"and fit the store",
            )
    refuse_numbers_as_labels(source.classes or (), source.n_rows)


@contextmanager
def rows_of_files(
    X: Any, schema: Schema, y: Any = None, sample_weight: Any = None, *, targets: bool
) -> Iterator[FileRows]:
    """Open the rows of files in the form of the training data, within a block.

    targets : whether to read targets, from the columns y, by default those of the training
    """
    with ExitStack() as files, _explaining_ingest_options():
        paths = [os.fspath(path) for path in (X if isinstance(X, list | tuple) else [X])]
        yield open_rows(  # type: ignore[misc]  # for stores this would be a source
            paths, files, schema, targets=targets, y=y, sample_weight=sample_weight
        )


def test_pair(test: Any, y: Any) -> tuple[Any, Any]:
    """Return rows and targets of `test`. y : of the rows trained on, which may name columns"""
    if not isinstance(test, tuple):
        # Targets of a store of streamkern are found by their position.
        named = isinstance(y, str) and not (_is_store(test) and _is_own(test))
        return test, y if named and not _is_open(test) else None
    if len(test) != 2:
        raise ConfigError(
            f"test is a tuple of {len(test)}", f"give {mention('test=')}(X, y), or a store"
        )
    return test


def no_targets(name: str, like: Schema | None) -> DataError:
    """Return the error for rows without targets. like : of the rows trained on, if these differ"""
    if like is not None:
        return DataError(
            "rows to continue training, to test or to score with have no targets y",
            f"give them as partial_fit(X, y), fit(..., {mention('test=')}(X, y)), score(X, y) or "
            "evaluate(model, X, y)",
        )
    return DataError(
        f"{name} requires y to be passed, but the target y is None",
        "give targets, or a store that holds them",
    )
