"""Open the arrays of centers and of a metric that the settings name, and count the centers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import zarr

from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import ConfigError, StoreNotFoundError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.text import redact, some
from streamkern.basics.warning import warn
from streamkern.centers.selectors import SELECTORS
from streamkern.config.model import METRICS
from streamkern.config.run_config import RunConfig
from streamkern.filesystem.remote_file import open_object
from streamkern.filesystem.urls import local_path, zarr_store
from streamkern.ingest.column_roles import in_order
from streamkern.ingest.tables.encoder import check_encoder
from streamkern.planning.sizes import EFFORT_LEVELS
from streamkern.solver.methods import find
from streamkern.store.store import Store, open_store
from streamkern.stream.sources.alignment import check_row_shape
from streamkern.train.resolve.training_data import Data, storage_options_for


def open_centers(
    config: RunConfig, columns: Sequence[str] | None, encoder: Mapping[str, Any] | None = None
) -> Any:
    """Open model.centers: a .npy file, a zarr array, or X of a store, (p, *row_shape).

    A remote .npy file is read at once, and X of a store if its columns have another order.

    columns : names of the training columns, in whose order the columns of a store are returned;
        None without names
    encoder : encoder of the training data, or None

    Raises
    ------
    StoreNotFoundError, ConfigError, StorageError, MissingDependencyError
        There is no such array, or it cannot be read.
    DataError
        The store has other columns or another encoder than the training data.
    """
    url = config.model.centers
    with _with_remedy(url, "model.centers", "centers", "zarr array or store", (*SELECTORS, "all")):
        array = _open(config, url)
        if not isinstance(array, zarr.Group):
            return array
        # `open_store` checks that the store is complete, and that X has rows.
        options = None if local_path(url) is not None else storage_options_for(config, url)
        store = open_store(url, x=config.data.x, y=None, storage_options=options or None)
        check_encoder(store.spec.encoder, encoder, mention("model.centers"))
        return _features(store, columns)


def open_metric(config: RunConfig, d: int) -> HostArray:
    """Read model.metric, scales (d,) or a matrix (d, r), from a .npy file or a zarr array.

    Its shape is checked first. Raises the errors of `open_centers`.
    """
    url = config.model.metric
    with _with_remedy(url, "model.metric", "a metric", "zarr array", METRICS):
        array = _open(config, url)
        if isinstance(array, zarr.Group):
            raise ConfigError(
                f"{mention('model.metric', redact(url))} is a group of arrays",
                "give the path of the array in the group that holds the metric",
            )
        check_metric(array, d)
        if isinstance(array, zarr.Array) and array.nchunks_initialized < array.nchunks:
            raise ConfigError(
                f"{mention('model.metric', redact(url))} lacks some chunks, which may be lost or "
                "zero",
                "write the array again as a .npy file, or with write_empty_chunks",
            )
        return np.asarray(array[...])


def check_metric(array: Any, d: int) -> None:
    """Raise ConfigError unless an array has the shape of a metric of d features."""
    shape = tuple(array.shape)
    fits = shape[:1] == (d,) and (len(shape) == 1 or (len(shape) == 2 and 1 <= shape[1] <= d))
    if not fits:
        raise ConfigError(
            f"{mention('model.metric')} of shape {shape} does not fit rows of {d} features",
            f"give scales ({d},), or a matrix ({d}, r) with at most as many columns",
        )


@contextlib.contextmanager
def _with_remedy(
    url: str, setting: str, content: str, kinds: str, other_values: Sequence[str]
) -> Iterator[None]:
    """Convert errors of opening an array to errors that name the setting and a remedy."""
    try:
        yield
    except StreamkernError:
        raise
    except FileNotFoundError as error:
        raise StoreNotFoundError(
            f"there is no array of {content} at {redact(url)}",
            f"correct {mention(setting)}, or set one of {some(other_values)}",
        ) from error
    except Exception as error:  # zarr raises many types if the file is not an array
        raise ConfigError(
            f"{mention(setting, redact(url))} is no .npy file, {kinds} ({redact(str(error))})",
            f"write it with numpy.save, or set one of {some(other_values)}",
        ) from error


def _open(config: RunConfig, url: str) -> Any:
    """Open a .npy file, a zarr array or a zarr group."""
    remote = local_path(url) is None
    options = storage_options_for(config, url) if remote else {}
    if not url.endswith(".npy"):
        return zarr.open(zarr_store(url, storage_options=options) if remote else url, mode="r")
    if not remote:
        return np.load(url, mmap_mode="r", allow_pickle=False)
    with open_object(url, options) as file:
        return np.load(file, allow_pickle=False)


def _features(store: Store, columns: Sequence[str] | None) -> Any:
    """Return X of a store with its columns in the order of `columns`.

    It is read only if the order differs.
    """
    names = store.spec.columns
    if names is None or columns is None or names == tuple(columns):
        return store.rows["X"]
    order = [names.index(name) for name in in_order(names, columns, mention("model.centers"))]
    return np.asarray(store.rows["X"])[:, order]


FOURIER_FEATURES = 10_000
"""Default number of Fourier features."""


def may_take_all_rows(config: RunConfig, data: Data) -> bool:
    """Return whether all rows may be centers although `count_centers` returns fewer.

    They may if solver "direct" can then solve the equations of their kernel matrix, which is the
    whole training (`solver.kernel_ridge`).
    """
    model, n, level = config.model, data.base.n_rows, EFFORT_LEVELS[config.model.effort]
    is_open = model.n_centers == "auto" and model.centers == "random" and model.features == "kernel"
    allows_direct = config.solver.name in ("auto", "direct")
    return is_open and allows_direct and level.n_centers < n <= level.all_rows


def count_centers(config: RunConfig, data: Data, *, complete: bool = True) -> int:
    """Return the number of centers p, from settings and metadata.

    `may_take_all_rows` may decide to take all rows instead. If model.n_centers is larger than the
    number of rows that have a weight, the smaller number is returned, with a warning. If it is not
    known which rows have a weight, all rows count.

    complete : whether no other rows will follow. If others may, too few rows raise ConfigError,
        because no centers are drawn from later rows.

    Raises ConfigError if the data does not suit the selector or model.centers, and the errors of
    `open_centers`.
    """
    model, n_rows = config.model, data.base.n_rows
    if model.features == "fourier":
        return FOURIER_FEATURES if model.n_features == "auto" else model.n_features
    if model.centers == "all" or find(config.solver.name, model.features).in_place:
        return n_rows
    if model.centers not in SELECTORS:  # an array
        array = open_centers(config, data.source.columns, data.source.encoder)
        check_row_shape(
            f"{mention('model.centers')} has", array.shape[1:], "the data has rows of shape",
            data.source.row_shape, sparse=data.sparse,
        )  # fmt: skip
        check_count(model.n_centers, array.shape[0], mention("model.centers"))
        return int(array.shape[0])
    # A selector chooses among the rows that have a weight.
    SELECTORS[model.centers].check(data.base)
    n_rows = data.base.n_counted or n_rows
    if model.n_centers == "auto":
        return min(n_rows, EFFORT_LEVELS[model.effort].n_centers)
    if model.n_centers <= n_rows:
        return model.n_centers
    # More centers are asked for than there are rows.
    if not complete:
        raise ConfigError(
            f"{mention('model.n_centers', model.n_centers)} centers are drawn from the first "
            f"block, which has {n_rows} rows",
            "give a first block with at least this many rows, lower n_centers, or give centers",
        )
    warn(
        f"{mention('model.n_centers', model.n_centers)} is more than the {n_rows} training rows"
        + " that have a weight" * (n_rows < data.base.n_rows)
        + ": all of them are taken as centers"
    )
    return n_rows


def check_count(n_centers: int | str, n_given: int, source: str) -> None:
    """Raise ConfigError unless model.n_centers is "auto" or the number of rows that are given.

    source : name of the array for the message
    """
    if n_centers not in ("auto", n_given):
        raise ConfigError(
            f"{mention('model.n_centers', n_centers)} differs from the {n_given} rows in {source}",
            "leave n_centers out",
        )
