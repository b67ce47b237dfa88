"""Write predictions to a file or a Zarr group, in order.

    source --units--> model --values--> buffer (sorts) --slabs--> output

Predictions are buffered in scratch files, and written to the output once all are computed. A file
appears when it is complete; a Zarr group is marked as incomplete until then. After a kill or a full
disk, the same call resumes from the last save and writes the same predictions as an uninterrupted
call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    StorageError,
    StreamkernError,
)
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.progress import Progress
from streamkern.basics.text import redact
from streamkern.basics.values import json_digest
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.ownership import PREDICTIONS
from streamkern.filesystem.path_kinds import check_output
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.filesystem.urls import local_path
from streamkern.predict.prediction_buffer import PredictionBuffer
from streamkern.predict.prediction_files import (
    DONE,
    FILE_WRITERS,
    PUBLISHING,
    PredictionFile,
    PredictionGroup,
)
from streamkern.predict.prediction_table import PredictionTable, Slabs
from streamkern.store.chunk_output import refuse_same_location
from streamkern.stream.sources.base import UNIT_BYTES

ORDERS = ("source", "store")
_COMPUTED = "computed"  # stage of the buffer when all predictions are in it

Compute = Callable[[int], Iterator[tuple[int, NDArray[Any], NDArray[Any]]]]
"""Yields (index in reading order, row numbers (k,), values (k, c)), starting at a given index."""


def write_predictions(
    table: PredictionTable, compute: Compute, url: str | os.PathLike[str], *,
    order: str = "source", values: bool = False, overwrite: bool = False,
    storage_options: Any = None, progress: Progress | None = None,
) -> int:  # fmt: skip
    """Write predictions to `url`; return the number of rows.

    table : description of the predictions; its `n_rows` is 0 if the number is unknown
    order, values, overwrite, storage_options, progress : see `KernelModel.predict_to`

    Raises
    ------
    ConfigError
        The output cannot hold such predictions, or exists and may not be replaced.
    DataError
        The row numbers of the data are damaged, or the input has changed in the meantime.
    MissingDependencyError
        A package for the format of the output is not installed.
    StorageError
        The output cannot be written.
    """
    ending = _checked_ending(url, order)
    _check_table(table, url, ending)
    table = _output_table(table, ending, order, values)
    folder = scratch_folder(url, ending=".predict")
    output = (
        PredictionGroup(url, storage_options, table.record, overwrite)
        if ending == ".zarr"
        else PredictionFile(url, folder, ending, overwrite)
    )
    with disk_full_hint(os.fspath(url)), Scratch(folder) as scratch:
        buffer = PredictionBuffer(
            scratch, table.record, table.dtype, table.width,
            numbered=table.numbered, chunk_rows=table.chunk_rows,
        )  # fmt: skip
        n_rows = output.n_finished_rows(buffer)
        if n_rows is None:
            try:
                output.check_replaceable()
            except StreamkernError:
                if not buffer.n_rows:  # there is nothing that a later call could resume
                    scratch.discard()
                raise
            if buffer.stage == DONE:  # the output was deleted since
                buffer.restart()
            with _discard_on_data_error(scratch):
                if not buffer.stage:
                    _compute_missing(buffer, compute, table, progress)
            table = replace(table, n_rows=buffer.n_rows)
            slabs = _output_slabs(buffer, scratch, table)
            output.write(table, slabs, lambda: buffer.save(PUBLISHING))
            buffer.finish(DONE)
            n_rows = buffer.n_rows
        scratch.discard()
    return n_rows


@contextmanager
def _discard_on_data_error(scratch: Scratch) -> Iterator[None]:
    """Delete the scratch on errors of streamkern from which the same call cannot resume."""
    try:
        yield
    except (StorageError, CorruptChunkError):
        raise  # the predictions in the scratch are valid, or already deleted: the call resumes
    except StreamkernError:
        scratch.discard()
        raise


def _output_slabs(buffer: PredictionBuffer, scratch: Scratch, table: PredictionTable) -> Slabs:
    """Yield the slabs of the output in order.

    Errors in reading the slabs delete the scratch, see `_discard_on_data_error`; errors in writing
    the output do not.
    """
    with _discard_on_data_error(scratch):
        if table.input_columns is None:
            yield from buffer.slabs()
        else:  # blocks of the same size as for the prediction
            yield from with_input_columns(table.input_columns.blocks(UNIT_BYTES), buffer.slabs())


def with_input_columns(blocks: Iterator[list[Any]], slabs: Slabs) -> Slabs:
    """Yield (first position, columns of the input (k,), values (k, c)) for each block of rows.

    Raises DataError unless the input has as many rows as there are predictions.
    """
    slab_values = (values for _, _, values in slabs)
    start = 0  # position of the first prediction in `pending`
    pending = next(slab_values, np.empty((0, 1)))  # predictions not yet yielded
    for columns in blocks:
        k = len(columns[0])
        while len(pending) < k and (next_values := next(slab_values, None)) is not None:
            pending = np.concatenate((pending, next_values))
        if len(pending) < k:
            raise _changed_input_error(f"more than the {start + len(pending)} that were predicted")
        yield start, columns, pending[:k]
        pending, start = pending[k:], start + k
    if len(pending) or next(slab_values, None) is not None:
        raise _changed_input_error(f"{start}, and more were predicted")


def _changed_input_error(rows: str) -> DataError:
    """Return the error for an input that changed after its rows were predicted."""
    return DataError(
        f"the input has changed since its rows were predicted (rows: {rows})",
        "repeat the same command or call, which begins again",
    )


def _checked_ending(url: str | os.PathLike[str], order: str) -> str:
    """Return the extension of the output's format; raise ConfigError if it cannot be written."""
    ending = os.path.splitext(os.fspath(url).rstrip("/"))[1].lower()
    check_output(url, "predictions")
    if order not in ORDERS:
        raise ConfigError(f"{mention('order', order)} is unknown", 'use "source" or "store"')
    if ending not in FILE_WRITERS:
        if ending not in ("", ".zarr"):
            raise ConfigError(
                f"cannot write predictions to {redact(os.fspath(url))}",
                f"give an output that ends in .zarr, {' or '.join(FILE_WRITERS)}",
            )
        return ".zarr"
    if local_path(url) is None:
        raise ConfigError(
            f"{redact(os.fspath(url))} is remote, where only .zarr can be written",
            "give a URL that ends in .zarr, or a local file",
        )
    if ending == ".parquet":  # raise for a missing package before predictions are computed
        import_optional("pyarrow.parquet", "writing Parquet")
    if (ending, order) == (".npy", "store"):
        raise ConfigError(
            f"{mention('order', 'store')} needs row numbers next to the predictions, but a .npy "
            "file holds a single array",
            "write .zarr, .csv or .parquet, or use the order of the source",
        )
    return ending


def _check_table(table: PredictionTable, url: str | os.PathLike[str], ending: str) -> None:
    """Raise ConfigError if the output cannot hold the table."""
    if table.escapes_formulas and ending != ".csv":
        raise ConfigError(
            f"{mention('escape_formulas', True)} needs a .csv, not {redact(os.fspath(url))}",
            "leave it out",
        )
    if table.input_columns is None:
        return
    if ending not in (".csv", ".parquet"):
        raise ConfigError(
            f"{redact(os.fspath(url))} cannot hold the columns of the input "
            f"({mention('with_input', True)})",
            "write .csv or .parquet",
        )
    refuse_same_location(table.input_columns.urls, url)
    if ending == ".csv":
        table.input_columns.check_texts()


def _output_table(table: PredictionTable, ending: str, order: str, values: bool) -> PredictionTable:
    """Return the description of the stored columns, with the record that identifies the output."""
    only_ids = ending == ".npy" and table.classes is not None and not values
    if only_ids:
        table = replace(table, dtype=np.dtype(np.int32), width=1)
    record = {**table.record, "kind": PREDICTIONS, "order": order, "ids": only_ids}
    if table.input_columns is not None:
        record["with_input"] = True
    record["identity"] = json_digest(record)
    return replace(table, only_ids=only_ids, numbered=order == "store", record=record)


def _compute_missing(
    buffer: PredictionBuffer, compute: Compute, table: PredictionTable, progress: Progress | None
) -> None:
    """Compute the predictions that are not in the buffer yet, and add them to it."""
    for start, rows, values in compute(buffer.n_rows):
        positions = np.arange(start, start + len(rows)) if table.numbered else rows
        records = values.argmax(axis=1)[:, None] if table.only_ids else values
        buffer.add(positions, rows, records)
        if progress is not None:
            progress("predicted", buffer.n_rows, table.n_rows or None)
    buffer.save(_COMPUTED)
