"""Write the rows of a source to a store, with all transforms applied: parallel and resumable.

    BatchReader --batches, in plan order--> [ pool: transforms, digest, write ] --> statistics

Rows keep the row numbers of the source, which count the rows of the files or arrays that its stores
were made from; replica r of row k of n is r n + k.

Chunk i is batch i of one epoch, so it is a pure function of (source, seed, epoch, i). Chunks left
by a killed call are verified by their digests and kept, and the same call makes the rest: the store
has the same bits as without the interruption.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from streamkern.backend.base import Backend
from streamkern.basics.errors import ConfigError
from streamkern.basics.progress import Progress
from streamkern.basics.values import checked_int
from streamkern.filesystem.ownership import mark_at
from streamkern.filesystem.path_kinds import check_output
from streamkern.filesystem.urls import zarr_store
from streamkern.store import layout
from streamkern.store.chunk_output import (
    COPIES_PER_CHUNK,
    DEFAULT_MEMORY,
    checked_chunk_bytes,
    fill_store,
    n_writers,
    refuse_same_location,
)
from streamkern.store.layout import StoreSpec
from streamkern.store.row_block import RowBlock
from streamkern.store.store import open_store
from streamkern.store.writer import StoreWriter, is_made_from
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.row_maker import RowMaker
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource, Source
from streamkern.stream.sources.mixture import open_stores, stored_rows
from streamkern.stream.sources.sampling import values_of_rows
from streamkern.stream.sources.stores import stores_in
from streamkern.stream.sources.transforms import Transform, from_config
from streamkern.stream.sources.unit_edges import unit_edges
from streamkern.stream.sources.user import as_source


def augment_store(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    copies: int = 1,
    transforms: Sequence[Mapping[str, Any] | Transform] = (),
    weights: Sequence[float] | None = None,
    x: str = "X",
    y: str = "y",
    sample_weight: str | None = None,
    foreign: bool = False,
    input_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> StoreSpec:
    """Write `copies` augmented replicas of one or several stores to a store; return its spec.

    Parameters
    ----------
    inputs : one URL or several
    out : URL of the new store
    copies : number of replicas of each row
    transforms : transforms, or tables as in a run file, such as ``{"kind": "noise", "sigma": 0.5}``
    weights : shares of the inputs in the rows, see `MixtureSource`
    x, y : names of the arrays
    sample_weight : name of the sample weights in stores that streamkern did not write
    foreign : read stores of streamkern as if another program had written them, see `open_store`
    input_options : storage options of the inputs
    settings : as for `materialise`

    Raises the errors of `materialise`, of `open_store` for the inputs, and of `MixtureSource`.
    """
    urls = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    source = open_stores(
        urls, weights, x=x, y=y, w=sample_weight, foreign=foreign, storage_options=input_options
    )
    if copies != 1 or transforms:
        source = AugmentedSource(source, copies, from_config(transforms))
    return materialise(source, out, **settings)


def materialise(
    source: Source,
    out_url: str | os.PathLike[str],
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    chunk_mb: float = 8,
    compress: str = "auto",
    dtype: Any = None,
    overwrite: bool = False,
    threads: int | str = "auto",
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StoreSpec:
    """Write every virtual row of `source` to a store at `out_url`; return its spec.

    Rows and targets are as in one epoch of training; sample weights are kept unchanged. Targets
    that a transform changes (mix-up) are stored as values. NumPy draws the noise even if compiled
    code is installed, whose last bits differ; so a call may be resumed with or without it.

    Parameters
    ----------
    seed, epoch : seed and epoch of the order and of every draw
    shuffle : False keeps the rows in the order of the source
    chunk_mb : MiB of X in a chunk
    compress : compression, as for `StoreWriter`
    dtype : dtype of X. Default: as read, or float32 (float64 from float64) with a feed transform.
        Another dtype must hold every value; floats may be rounded to narrower floats.
    overwrite : replace a store made by streamkern; anything else at `out_url` is never deleted
    threads : threads that read, and threads that make chunks; "auto" as for `BatchReader`
    memory : bound on the memory used, in bytes
    progress : called with ("write", rows done, rows in all) after each chunk
    storage_options : storage options of `out_url`

    Raises
    ------
    ConfigError, DataError
        If a setting is invalid, a row cannot be stored, or `out_url` holds other files.
    ResumeMismatchError
        If `out_url` has an unfinished store of other data or settings.
    """
    seed, epoch = checked_int("seed", seed, 0), checked_int("epoch", epoch, 0)
    source = as_source(source)
    chunk_bytes = _checked_settings(source, out_url, chunk_mb, memory)
    maker = RowMaker(source, seed, dtype, Backend(threads=1))
    target_row_bytes = 0 if maker.classes is not None else source.n_outputs * maker.y_dtype.itemsize
    chunk_rows = layout.rows_per_chunk(source.row_shape, maker.dtype, chunk_bytes, target_row_bytes)
    reader = BatchReader(  # each of its batches becomes one chunk
        source,
        batch_size=min(chunk_rows, source.n_rows),
        seed=seed,
        block_bytes=min(128 << 20, memory // 8),
        in_flight_bytes=min(64 << 20, memory // 12),
        threads=threads,
        in_order=not shuffle,
        keep_bytes=memory // 8 if source.n_rows > stored_rows(source).n_rows else 0,
    )
    # Set once for the whole pool: limits that each thread sets and resets would outlive it.
    with reader, maker.backend.single_threaded_blas():
        plan = _content_plan(maker, reader, epoch, shuffle)
        if not overwrite and _is_written_by_same_call(out_url, storage_options, plan, compress):
            return open_store(out_url, storage_options=storage_options).spec
        writer = StoreWriter(
            out_url,
            row_shape=source.row_shape, x_dtype=maker.dtype,
            n_outputs=source.n_outputs, classes=maker.classes,
            chunk_rows=reader.batch_size,
            overwrite=overwrite,
            compress=compress,
            n_rows=source.n_rows,
            y_dtype=maker.y_dtype,
            storage_options=storage_options,
            plan=plan,
            weighted=source.weighted,
            columns=source.columns, target_columns=maker.target_columns,
            label_dtype=None if maker.classes is None else source.label_dtype,
            files=source.files, n_origins=source.n_origins,
            hides_copies=source.hides_copies and not source.n_origins, encoder=source.encoder,
            weight_column=source.weight_column, file_form=source.file_form,
        )  # fmt: skip
        n_threads = n_writers(out_url, memory // 2, chunk_bytes)
        n_threads = n_threads if threads == "auto" else min(n_threads, int(threads))
        numbers_of = row_numbers(source, reader.mix_units + n_threads)
        chunks_from = partial(_chunks_from, maker, reader, epoch, numbers_of)
        return fill_store(writer, chunks_from, n_threads, progress)


def _content_plan(
    maker: RowMaker, reader: BatchReader, epoch: int, shuffle: bool
) -> dict[str, Any]:
    """Return everything that determines the content of the store."""
    order = reader.order_key()
    # The memory changes the order of the rows only through the units in a shuffle block.
    order["memory"] = order.pop("mix_units")
    return {
        "source": maker.source.describe(), "epoch": epoch, "shuffle": shuffle,
        "dtype": maker.dtype.name, **order,
    }  # fmt: skip


def _is_written_by_same_call(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
    plan: Mapping[str, Any],
    compress: str,
) -> bool:
    """Return whether the same call has written the store before."""
    check_output(url, "stores")
    mark = mark_at(zarr_store(url, storage_options=storage_options), str(url))
    return mark is not None and is_made_from(mark, plan, compress)


def _chunks_from(
    maker: RowMaker, reader: BatchReader, epoch: int,
    numbers_of: Callable[[np.ndarray], np.ndarray], start: int,
) -> Iterator[Callable[[], RowBlock]]:  # fmt: skip
    """Yield functions that make chunk `start` and the chunks after it.

    numbers_of : from `row_numbers`
    """

    def make_chunk(i: int, rows: RowBlock) -> RowBlock:
        chunk = maker.make(rows, epoch, f"chunk {i}")
        return chunk._replace(row_ids=numbers_of(rows.row_ids))

    for i, rows in enumerate(reader.epoch(epoch, start), start):
        yield partial(make_chunk, i, rows.copy())  # the reader reuses its arrays


def _checked_settings(
    source: BaseSource, out_url: str | os.PathLike[str], chunk_mb: float, memory: int
) -> int:
    """Return the bytes of a chunk; raise ConfigError for settings that are not possible."""
    chunk_bytes = checked_chunk_bytes(chunk_mb, memory, 4 * COPIES_PER_CHUNK)
    if source.n_outputs < 1:
        raise ConfigError("the source has no targets y", "add targets, because a store needs them")
    refuse_same_location((store.url for store in stores_in(source)), out_url)
    return chunk_bytes


def row_numbers(source: BaseSource, n_cached_units: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from virtual rows (k,) to their row numbers, (k,) uint64; thread-safe.

    n_cached_units : number of units whose row numbers stay in memory, 8 bytes for each row
    """
    edges, numbers_of_unit = unit_edges(source), lru_cache(n_cached_units)(source.source_rows)
    return lambda rows: values_of_rows(edges, rows, numbers_of_unit, layout.ROW_NUMBER_DTYPE)
