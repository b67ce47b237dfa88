"""Write predictions to an output: complete and in order, or marked as incomplete.

    source --units--> model --values--> buffer (orders) --slabs--> output

Predictions go to scratch files first, and from there to the output in one sweep. A killed call
resumes from the last save when it is repeated; then, and after a full disk, the predictions are
those of an uninterrupted call.
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
from streamkern.filesystem.ownership import PREDICTIONS, refuse_within
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.filesystem.urls import local_path
from streamkern.predict.prediction_buffer import PredictionBuffer
from streamkern.predict.prediction_files import (
    DONE,
    FILES,
    PUBLISHING,
    PredictionFile,
    PredictionGroup,
)
from streamkern.predict.prediction_table import PredictionTable, Slabs
from streamkern.store.chunk_output import refuse_same_place
from streamkern.stream.sources.base import UNIT_BYTES

ORDERS = ("source", "store")
_COMPUTED = "computed"  # the first stage of the buffer


Compute = Callable[[int], Iterator[tuple[int, NDArray[Any], NDArray[Any]]]]
"""Yields (index in reading order, numbers of the rows (k,), values (k, c)) from an index on."""


def write_predictions(
    table: PredictionTable, compute: Compute, url: str | os.PathLike[str], *,
    order: str = "source", values: bool = False, overwrite: bool = False,
    storage_options: Any = None, progress: Progress | None = None,
) -> int:  # fmt: skip
    """Write predictions to `url`; return the number of rows.

    table : description of the predictions; its number of rows is 0 if it is unknown
    others : see `KernelModel.predict_to`
    """
    ending = _ending(url, order)
    _check_table(table, url, ending)
    table = _with_record(table, ending, order, values)
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
        n_rows = output.rows_done(buffer)
        if n_rows is None:
            try:
                output.check_free()
            except StreamkernError:
                if not buffer.n_rows:  # left by the last finished call
                    scratch.discard()
                raise
            if buffer.stage == DONE:  # and its output is gone
                buffer.restart()
            with _discarded_if_bad(scratch):
                if not buffer.stage:
                    _fill(buffer, compute, table, progress)
            table = replace(table, n_rows=buffer.n_rows)
            output.write(table, _slabs(buffer, scratch, table), lambda: buffer.save(PUBLISHING))
            buffer.finish(DONE)
            n_rows = buffer.n_rows
        scratch.discard()
    return n_rows


@contextmanager
def _discarded_if_bad(scratch: Scratch) -> Iterator[None]:
    """Delete the scratch on an error that makes it useless to a later call."""
    try:
        yield
    except (StorageError, CorruptChunkError):
        raise  # the computed predictions are good, or deleted: the same call resumes
    except StreamkernError:
        scratch.discard()
        raise


def _slabs(buffer: PredictionBuffer, scratch: Scratch, table: PredictionTable) -> Slabs:
    """Yield the predictions in order; if writing fails otherwise, they stay in the scratch."""
    with _discarded_if_bad(scratch):
        if table.input_columns is None:
            yield from buffer.slabs()
        else:  # in the blocks in which they were read for prediction
            yield from with_input_columns(table.input_columns.blocks(UNIT_BYTES), buffer.slabs())


def with_input_columns(blocks: Iterator[list[Any]], slabs: Slabs) -> Slabs:
    """Yield (first position, columns of the input (k,), values (k, c)) for each block of columns.

    Raises DataError unless there are as many rows as predictions.
    """
    parts, first = (values for _, _, values in slabs), 0
    held = next(parts, np.empty((0, 1)))
    for columns in blocks:
        k = len(columns[0])
        while len(held) < k and (part := next(parts, None)) is not None:
            held = np.concatenate((held, part))
        if len(held) < k:
            raise _other_rows(f"more than the {first + len(held)} that were predicted")
        yield first, columns, held[:k]
        held, first = held[k:], first + k
    if len(held) or next(parts, None) is not None:
        raise _other_rows(f"{first}, and more were predicted")


def _other_rows(rows: str) -> DataError:
    return DataError(
        f"the input has other rows than it had when it was predicted ({rows})",
        "give the same command or call again, which begins anew",
    )


def _ending(url: str | os.PathLike[str], order: str) -> str:
    """Return the ending of the output; raise ConfigError if it cannot be written as requested."""
    ending = os.path.splitext(os.fspath(url).rstrip("/"))[1].lower()
    refuse_within(url, "predictions")
    if order not in ORDERS:
        raise ConfigError(f"{mention('order', order)} is unknown", 'use "source" or "store"')
    if ending not in FILES:
        if ending not in ("", ".zarr"):
            raise ConfigError(
                f"cannot write predictions to {redact(os.fspath(url))}",
                f"its ending must be .zarr, {' or '.join(FILES)}",
            )
        return ".zarr"
    if local_path(url) is None:
        raise ConfigError(
            f"{redact(os.fspath(url))} is remote, where predictions can only go to .zarr",
            "give that, or a local file",
        )
    if ending == ".parquet":  # before hours of computing, not after
        import_optional("pyarrow.parquet", "writing Parquet")
    if (ending, order) == (".npy", "store"):
        raise ConfigError(
            f"{mention('order', 'store')} needs the number of each row beside its answer, and a "
            ".npy file has room for one array",
            "write .zarr, .csv or .parquet, or use the order of the source",
        )
    return ending


def _check_table(table: PredictionTable, url: str | os.PathLike[str], ending: str) -> None:
    """Raise ConfigError if the output cannot hold the table."""
    if table.escapes_formulas and ending != ".csv":
        raise ConfigError(
            f"{mention('escape_formulas', True)} is for .csv, and not for {redact(os.fspath(url))}",
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
    refuse_same_place(table.input_columns.urls, url)
    if ending == ".csv":
        table.input_columns.check_texts()


def _with_record(table: PredictionTable, ending: str, order: str, values: bool) -> PredictionTable:
    """Return the table with the parts that the output holds, and its record."""
    only_ids = ending == ".npy" and table.classes is not None and not values
    if only_ids:
        table = replace(table, dtype=np.dtype(np.int32), width=1)
    record = {**table.record, "kind": PREDICTIONS, "order": order, "ids": only_ids}
    if table.input_columns is not None:
        record["with_input"] = True
    record["identity"] = json_digest(record)
    return replace(table, only_ids=only_ids, numbered=order == "store", record=record)


def _fill(
    buffer: PredictionBuffer, compute: Compute, table: PredictionTable, progress: Progress | None
) -> None:
    """Compute all predictions into the buffer."""
    for first, rows, values in compute(buffer.n_rows):
        positions = np.arange(first, first + len(rows)) if table.numbered else rows
        stored = values.argmax(axis=1)[:, None] if table.only_ids else values
        buffer.add(positions, rows, stored)
        if progress is not None:
            progress("predicted", buffer.n_rows, table.n_rows or None)
    buffer.save(_COMPUTED)
