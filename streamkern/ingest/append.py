"""Append rows of raw data to a finished store: read once, shuffle the new rows, publish.

    reader --blocks--> conform --rows--> spool (shuffles) --chunks--> appender --> store

The existing rows stay where they are, and the new rows follow in a random order of their own: an
epoch takes chunks in random order and mixes the rows of several, so that both parts are mixed again
in training. Row numbers continue from the existing ones: a row number counts over all files, old
and new.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError, DataError, StorageError, StreamkernError
from streamkern.basics.message import mention
from streamkern.basics.progress import Progress
from streamkern.basics.text import redact, some
from streamkern.basics.values import checked_int, json_digest, parse_bytes
from streamkern.basics.warning import warn_each_once
from streamkern.filesystem.durable import check_writable
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.filesystem.urls import check_missing, local_path
from streamkern.ingest.columns import ReadRequest, recorded_form, unused_columns
from streamkern.ingest.convert_data import convert_for_store
from streamkern.ingest.first_pass import (
    SpooledRows,
    block_size,
    converters_of_store,
    spool_limit,
    spool_rows,
)
from streamkern.ingest.formats import FileForm
from streamkern.ingest.input_files import FileOpener, format_by_ending, is_path
from streamkern.ingest.path_patterns import expand_paths, input_paths
from streamkern.ingest.reader import Reader, encoded_reader
from streamkern.ingest.readers import check_header, is_table, open_reader
from streamkern.ingest.shuffle import Spool, chunks_of_spool
from streamkern.ingest.tables.encoder import Encoder, check_encoder
from streamkern.store import layout
from streamkern.store.appender import StoreAppender, complete_append
from streamkern.store.chunk_output import (
    DEFAULT_MEMORY,
    fill_store,
    n_writers,
    refuse_same_location,
)
from streamkern.store.class_labels import KnownClasses
from streamkern.store.layout import StoreSpec
from streamkern.store.store import Store, open_store
from streamkern.store.writer import source_digest

__all__ = ["append"]


def append(
    inputs: Any, store: str | os.PathLike[str], *,
    x: Any = None, y: Any = None, sample_weight: Any = None, shuffle: bool = True, seed: int = 0,
    dtype: Any = None, memory: int | float | str = DEFAULT_MEMORY, progress: Progress | None = None,
    input_options: Mapping[str, Any] | None = None, missing: str = "error", external: bool = False,
    foreign: bool = False, drop_missing_targets: bool = False, format: str | None = None,
    names: Any = None, header: bool | None = None, delimiter: str | None = None,
    decimal: str | None = None, encoding: str | None = None, skip_lines: int | None = None,
    thousands: str | None = None,
) -> StoreSpec:  # fmt: skip
    """Append the rows of `inputs` to `store`; return the spec of the extended store.

    At every instant the store is the old one or the new one. A process that reads the old one at
    the same time continues with its rows. After a kill the same call resumes, and rows that it has
    appended already are not appended again: to append the same rows twice in a row, pass another
    seed.

    Parameters
    ----------
    inputs, x, input_options, missing, external, foreign
        As for `ingest`. Columns are taken by the names that the store has, in its order.
    store : str or path
        A finished streamkern store on a disk.
    y, sample_weight
        As for `ingest`; for a table by default the target columns of the store, and the column of
        its weights.
    shuffle, seed
        Order of the new rows among themselves.
    dtype : dtype, optional
        Dtype of the store, if rows are to be rounded to it.
    memory : int or str
        Bytes to stay within, or a size such as "1 GiB", beyond four chunks of the store; scratch
        files are beside the store.
    progress : callable, optional
        Called with ("read" or "write", rows done, rows in all or None) after each block.

    drop_missing_targets, format, names, header, delimiter, decimal, encoding, skip_lines, thousands
        As for `ingest`.

    Raises
    ------
    ConfigError, StoreNotFoundError
        If there is no such store, or it is not on a disk.
    DataError, NonFiniteError
        If rows do not fit the store, which stays as it was; or if another call appends to it.
    OSError
        If reading or writing fails, also because the disk is full: run the same command again to
        resume.
    """
    checked_int("seed", seed, 0)
    check_missing(missing)
    memory = parse_bytes(memory, "memory")
    form = FileForm(format, names, header, delimiter, decimal, encoding, skip_lines, thousands)
    path = _checked_store_path(store)
    form = form.normalise()._replace(earlier_record=recorded_form(open_store(path).spec) or {})
    inputs = expand_paths(inputs, input_options)
    _refuse_svmlight(inputs, form)
    inputs, x, y, sample_weight, form = convert_for_store(inputs, x, y, sample_weight, form)
    folder = scratch_folder(path, ending=".append")
    with warn_each_once(), ExitStack() as files, Scratch(folder) as spill:
        spill.claim()
        try:
            old_store = open_store(path)
            _check_store(old_store, dtype)
            spec = old_store.spec
            if is_table(inputs, form):
                y = list(spec.target_columns or ()) or None if y is None else y
                if sample_weight is None:
                    sample_weight = spec.weight_column
            opener = FileOpener(input_options, files, missing=missing, external=external,
                                foreign=foreign, form=form, memory=memory)  # fmt: skip
            request = ReadRequest(x, y, sample_weight, drop_missing=drop_missing_targets)
            open_input = partial(open_reader, inputs, opener=opener)
            reader = _reader(open_input, request, spec, is_table(inputs, form))
            refuse_same_location(input_paths(inputs), path)
            _check_names(reader, spec, x)
            plan = {"inputs": reader.identity, "seed": int(seed) if shuffle else None}
            if drop_missing_targets:
                plan["drop_missing_targets"] = True
            complete_append(path)
            if not _is_last_append(old_store, plan):
                key = json_digest(plan)
                limit = spool_limit(memory)
                make_spool = partial(Spool, limit_bytes=limit, scratch=spill, seed=plan["seed"])
                rows = spool_rows(
                    reader, files, partial(converters_of_store, spec=spec), make_spool, key, dtype,
                    block_size(memory), progress,
                )  # fmt: skip
                _write(rows, path, reader, key, memory, progress)
                rows.spool.discard()
        except StorageError:
            raise  # the spooled rows are good, and the same call resumes from them
        except StreamkernError:
            spill.discard()
            raise
        spill.discard()
    return open_store(path).spec


def _refuse_svmlight(inputs: Any, form: FileForm) -> None:
    """Raise DataError for svmlight files if the store lacks their first feature number."""
    is_recorded = (form.earlier_record or {}).get("format") == "svmlight"
    if is_recorded or not is_path(next(iter(input_paths(inputs)), None)):
        return
    if form.format == "svmlight" or "svmlight" in map(format_by_ending, input_paths(inputs)):
        raise DataError(
            "svmlight files do not record whether feature numbers begin at 0 or 1, and this "
            "store was not made from such files",
            "ingest all files together, to a new store, or append the arrays that "
            "sklearn.datasets.load_svmlight_file reads with zero_based=",
        )


def _reader(
    open_input: Callable[[ReadRequest], Reader], request: ReadRequest, spec: StoreSpec,
    is_table: bool,
) -> Reader:  # fmt: skip
    """Return a reader of rows with the columns of the store, encoded if the store is."""
    if spec.encoder is not None and is_table:
        encoder = Encoder.from_json(spec.encoder, "the store")
        return encoded_reader(open_input, request, encoder)
    reader = open_input(request._replace(columns=spec.columns))
    check_encoder(reader.encoder, spec.encoder, "the data to append")
    return reader


def _checked_store_path(store: str | os.PathLike[str]) -> os.PathLike[str]:
    """Return the absolute path of the store.

    Raises ConfigError unless it is on a local disk that can be written to.
    """
    if not isinstance(store, str | os.PathLike):
        raise ConfigError(
            f"store is a {type(store).__name__}, but must be the path of one store",
            "give it after the rows: append_store(inputs, store)",
        )
    path = local_path(store)
    if path is None:
        raise ConfigError(
            f"{redact(store)} is not on a local disk, but rows can be appended only there",
            f"ingest the rows to a second store, and list both stores in {mention('data.train')}",
        )
    open_store(path)  # fails before a folder for scratch files is made beside the store
    for folder in (path, scratch_folder(path, ending=".append")):
        check_writable(folder, redact(store))
    return path.absolute()


def _check_store(store: Store, dtype: Any) -> None:
    """Raise DataError for a store that cannot grow, and ConfigError for another dtype."""
    spec = store.spec
    if spec.foreign:
        raise DataError(
            f"{store!r} was not written by streamkern",
            "ingest it, and append to the store that this makes",
        )
    if spec.n_origins or spec.hides_copies:
        raise DataError(
            f"{store!r} holds augmented copies, which could not be distinguished from new rows",
            "append to the store that the copies were made from, and augment that store again",
        )
    if spec.mean is None or spec.scale is None:
        raise DataError(f"{store!r} has no statistics to update", "ingest the data again")
    if dtype is not None and layout.requested_x_dtype(dtype) != spec.x_dtype:
        raise ConfigError(
            f"{mention(f'dtype={layout.requested_x_dtype(dtype).name}')} differs from the dtype of "
            f"{store!r}",
            "leave it out, or ingest all rows to a new store",
        )


def _check_names(reader: Reader, spec: StoreSpec, x: Any) -> None:
    """Raise DataError if column names differ from the store, where both have names.

    One target may have another name, except the name of a column that the store leaves out. In
    files without names, positions take the place of names if the features have recorded positions.
    """
    check_header(reader, spec.columns, x)
    expected, names = spec.target_columns, reader.target_columns
    left_out = {*unused_columns(spec.file_form), *(spec.encoder or {}).get("dropped", ())}
    positions, recorded = (
        (form or {}).get("positions") or {} for form in (reader.file_form, spec.file_form)
    )
    if x is None and "x" in recorded and positions.get("width") == recorded["width"]:
        expected, names = (tuple(map(str, record["y"])) for record in (recorded, positions))
        left_out = {*names} - {*map(str, recorded["x"])}
    if expected is None or names is None or expected == names:
        return
    if len(expected) > 1 or left_out & {*names}:
        raise DataError(
            f"the targets are {some(names)}, but the targets of the store are {some(expected)}",
            f"give the same in the same order with {mention('y=')}",
        )


def _is_last_append(store: Store, plan: Mapping[str, Any]) -> bool:
    """Return whether the same call appended the last rows of the store.

    Raises DataError if the rows cannot be compared, as the rows of an iterator.
    """
    if store.stored_chunks.contents.mark.get("appended") != json_digest(plan):
        return False
    if source_digest(plan, "") is None:
        raise DataError(
            f"the rows that were last appended to {store!r} have the same first and last row as "
            "these rows, and the others cannot be compared",
            f"if they are other rows, give another {mention('seed=')}; if not, they are already "
            "in the store",
        )
    return True


def _write(
    rows: SpooledRows, path: os.PathLike[str], reader: Reader, key: str, memory: int,
    progress: Progress | None,
) -> None:  # fmt: skip
    """Write the spooled rows to the store as new chunks, and publish them."""
    spool, targets = rows.spool, rows.targets
    appender = StoreAppender(
        path, spool.n_rows, rows.files.row_counts if reader.files else (), key, rows.files.n_dropped
    )
    spec = appender.spec
    ids_of_codes = None
    if spec.classes is not None:
        known_classes = KnownClasses(spec.classes, spec.label_dtype)
        ids_of_codes = np.array([known_classes.find(label) for label in targets.labels], np.int64)
    n_ahead = n_writers(path, memory // 4, spec.chunk_rows * spec.row_bytes)
    chunks_from = partial(chunks_of_spool, spool, ids_of_codes, spec, head=appender.head)
    fill_store(appender, chunks_from, n_ahead, progress)
