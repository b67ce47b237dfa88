"""Write predictions as files: Zarr, .npy, CSV and Parquet, once from the first row to the last.

In all formats, row k belongs to row k of the data, or the column `row` has its row number. Labels
are those of the user. Tables may have the columns of the input before the predictions. One slab is
in memory at a time. A file gets its name only when it is complete and durable; a Zarr group has a
mark from its first file on, which says whether it is complete.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact
from streamkern.basics.values import parse_json
from streamkern.filesystem.durable import sync_file, sync_folder
from streamkern.filesystem.ownership import (
    ATTRIBUTE,
    PREDICTIONS,
    begin_group,
    check_kind,
    is_marked,
    mark_at,
    mark_file,
    publish_group,
)
from streamkern.filesystem.urls import local_path, zarr_store
from streamkern.ingest.original_columns import texts
from streamkern.predict.prediction_buffer import PredictionBuffer
from streamkern.predict.prediction_table import PredictionTable, Slabs

ROW_GROUP_BYTES = 32 << 20  # smallest row group of a Parquet file
_CSV_BLOCK_CELLS = 1 << 16  # cells of a CSV that are formatted at once
_NUMBER = re.compile(
    r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)", re.IGNORECASE | re.ASCII
)
PUBLISHING, DONE = "publishing", "done"
"""Stages of a prediction buffer, after all predictions are computed."""


def write_zarr(group: Any, table: PredictionTable, slabs: Slabs) -> None:
    """Write `values` (n, c) into an empty group.

    Also `labels` (n,) for classes, or `most_probable` for probabilities, and `row` (n,) if
    numbered. Unwritten parts have fill values: NaN, the result of `_fill_label`, row 2**64 - 1.
    """
    n, c = table.n_rows, table.width
    chunk_rows = min(table.chunk_rows, n)

    def array(name: str, shape: tuple[int, ...], dtype: Any, fill: Any) -> Any:
        return group.create_array(
            name, shape=shape, chunks=(chunk_rows, *shape[1:]), dtype=dtype, fill_value=fill,
            compressors=[Crc32cCodec()], config={"write_empty_chunks": True},
        )  # fmt: skip

    arrays = {"values": array("values", (n, c), table.dtype, np.nan)}
    if table.classes is not None:
        dtype: Any = str if table.classes.dtype.kind == "U" else table.classes.dtype
        name = "labels" if table.label_name == "label" else table.label_name
        labels = array(name, (n,), dtype, _fill_label(table.classes))
    if table.numbered:
        arrays["row"] = array("row", (n,), np.uint64, np.iinfo(np.uint64).max)
    for start, numbers, values in slabs:
        part = slice(start, start + len(values))
        arrays["values"][part] = values
        if table.classes is not None:
            labels[part] = table.labels(values)
        if table.numbered:
            arrays["row"][part] = numbers


def _fill_label(classes: NDArray[Any]) -> int | float | bool | str:
    """Return a label that no class has: the lowest free number, NaN, or a text.

    For booleans, which have no free label, it is False.
    """
    labels = set(classes.tolist())
    if classes.dtype.kind in "bf":
        return False if classes.dtype.kind == "b" else np.nan
    if classes.dtype.kind in "iu":
        number = int(np.iinfo(classes.dtype).min)
        while number in labels and number < np.iinfo(classes.dtype).max:
            number += 1
        return number
    text = "<missing>"
    while text in labels:
        text += "_"
    return text


def write_npy(path: Path, table: PredictionTable, slabs: Slabs) -> None:
    """Write one array: labels (n,) if only class ids were kept, else values (n, c) or (n,)."""
    labels = table.classes if table.only_ids else None
    dtype = table.dtype if labels is None else labels.dtype
    flat = labels is not None or (table.classes is None and table.width == 1)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (table.n_rows,) if flat else (table.n_rows, table.width),
    }
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, _, values in slabs:
            part = values if labels is None else labels[values[:, 0]]
            file.write(np.ascontiguousarray(part).view(np.uint8).data)


def write_csv(path: Path, table: PredictionTable, slabs: Slabs) -> None:
    """Write the column `row` or the columns of the input, the label of classes, and the values.

    The file is UTF-8 with a header. Numbers have the fewest digits that read back as the same
    value.
    """
    header = table.header()
    step = max(1, _CSV_BLOCK_CELLS // len(header))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        # Python before 3.13 does not quote a CR, which would end the line for most readers.
        quoting_writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerow(map(escape_formula, header) if table.escapes_formulas else header)
        for _, rows, values in slabs:
            for start in range(0, len(values), step):
                columns = table.columns(rows, values, slice(start, start + step))
                cells = list(map(_cell_texts, columns, header))
                if table.escapes_formulas:
                    cells = [[*map(escape_formula, column)] for column in cells]
                has_returns = any("\r" in "".join(column) for column in cells)
                (quoting_writer if has_returns else writer).writerows(zip(*cells, strict=True))


def escape_formula(text: str) -> str:
    """Return a CSV cell with "'" in front of text that a spreadsheet would read as a formula."""
    is_formula = text[:1] in tuple("=+-@\t\r") and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


def _cell_texts(column: Any, name: str) -> list[str]:
    """Return a column as the texts of CSV cells."""
    if not isinstance(column, np.ndarray):
        return texts(column, name)
    cells: list[str] = column.astype(str).tolist()
    return cells


def write_parquet(path: Path, table: PredictionTable, slabs: Slabs) -> None:
    """Write the columns of `write_csv`, and the origin of the predictions as metadata."""
    arrow = import_optional("pyarrow", "writing Parquet")
    parquet = import_optional("pyarrow.parquet", "writing Parquet")
    names, inputs = table.header(), table.input_columns
    fields, metadata = [], {ATTRIBUTE: json.dumps(table.record)}
    if inputs is not None:
        fields, names = inputs.arrow_fields(), names[len(inputs.names) :]
        metadata = {**((inputs.schema and inputs.schema.metadata) or {}), **metadata}
    no_rows: Any = np.empty(0, np.uint64) if inputs is None else []
    empty = table.columns(no_rows, np.empty((0, table.width), table.dtype))
    fields += [(name, arrow.array(column).type) for name, column in zip(names, empty, strict=True)]
    schema = arrow.schema(fields, metadata=metadata)
    with parquet.ParquetWriter(path, schema) as file:
        # Slabs are collected until they fill a row group.
        pending, pending_bytes = [], 0
        for _, rows, values in slabs:
            columns = [
                arrow.array(np.ascontiguousarray(a)) if isinstance(a, np.ndarray) else a
                for a in table.columns(rows, values)
            ]
            pending.append(arrow.table(columns, schema=schema))
            pending_bytes += pending[-1].nbytes
            if pending_bytes >= ROW_GROUP_BYTES:
                file.write_table(arrow.concat_tables(pending))
                pending, pending_bytes = [], 0
        if pending:
            file.write_table(arrow.concat_tables(pending))


def parquet_record(path: Path) -> Any:
    """Return the record that `write_parquet` saved in a file; None if another program wrote it."""
    parquet = import_optional("pyarrow.parquet", "reading Parquet")
    try:
        metadata = parquet.read_schema(path).metadata or {}
        return parse_json(metadata[ATTRIBUTE.encode()])
    except (ValueError, KeyError):  # pyarrow.ArrowInvalid is a ValueError
        return None


FILE_WRITERS: dict[str, Callable[[Path, PredictionTable, Slabs], None]] = {
    ".npy": write_npy,
    ".csv": write_csv,
    ".parquet": write_parquet,
}


class PredictionGroup:
    """A Zarr group as output.

    record : JSON that identifies the predictions, stored as the mark of the group
    """

    def __init__(
        self, url: str | os.PathLike[str], options: Any, record: dict[str, Any], overwrite: bool
    ) -> None:
        self._url, self._overwrite = os.fspath(url), overwrite
        self._writing = {**record, "status": "writing"}
        self._complete = {**record, "status": "complete"}
        self._store = zarr_store(url, storage_options=options, read_only=False)

    def n_finished_rows(self, buffer: PredictionBuffer) -> int | None:
        """Return the number of rows if the same call already wrote the output; else None."""
        # Without a scratch folder, another call wrote the output.
        if not buffer.has_begun or mark_at(self._store, self._url) != self._complete:
            return None
        values: Any = zarr.open_group(self._store, mode="r")["values"]
        return int(values.shape[0])

    def check_replaceable(self) -> None:
        """Raise an error if the URL holds something that this call must not replace."""
        mark = mark_at(self._store, self._url)
        if mark is None:
            return
        check_kind(mark, PREDICTIONS, self._url)
        if mark.get("status") == "complete" and not self._overwrite:
            raise _exists_error(self._url)

    def write(
        self, table: PredictionTable, slabs: Slabs, before_change: Callable[[], None]
    ) -> None:
        """Write the predictions. before_change : called before the first change of the output"""
        self.check_replaceable()
        before_change()
        group = begin_group(self._store, self._url, self._writing)
        if table.classes is not None:
            group.attrs["classes"] = table.classes.tolist()
        write_zarr(group, table, slabs)
        publish_group(group, self._complete)


class PredictionFile:
    """A local file, written in the scratch folder beside it and renamed when it is durable."""

    def __init__(
        self, url: str | os.PathLike[str], folder: Path, ending: str, overwrite: bool
    ) -> None:
        path = local_path(url)
        assert path is not None
        self._path, self._ending = path.resolve(), ending
        self._overwrite = overwrite
        # The name marks a temporary file, and is the same in every call, so that a call finds the
        # file of a killed one.
        self._temporary = folder / f".answers{ending}.{0:032x}.streamkern"

    def n_finished_rows(self, buffer: PredictionBuffer) -> int | None:
        if buffer.stage not in (PUBLISHING, DONE) or not self._path.exists():
            return None
        # A call killed between the two steps of renaming leaves both names.
        renamed = not self._temporary.exists() or self._temporary.samefile(self._path)
        return buffer.n_rows if renamed else None

    def check_replaceable(self) -> None:
        if not os.path.lexists(self._path):
            return
        if not self._overwrite:
            raise self._exists_error()
        if not self._has_mark():
            raise ConfigError(
                f"{self._path} was not written by streamkern, or was changed since, so it is not "
                "overwritten",
                "delete it, or give another output",
            )

    def _has_mark(self) -> bool:
        """Return whether the existing file is marked as predictions."""
        if self._ending != ".parquet" or not self._path.is_file():
            return is_marked(self._path, PREDICTIONS)
        record = parquet_record(self._path)
        return isinstance(record, dict) and record.get("kind") == PREDICTIONS

    def write(
        self, table: PredictionTable, slabs: Slabs, before_change: Callable[[], None]
    ) -> None:
        FILE_WRITERS[self._ending](self._temporary, table, slabs)
        mark_file(self._temporary, PREDICTIONS)
        sync_file(self._temporary)
        self.check_replaceable()
        before_change()
        if self._overwrite:
            self._temporary.replace(self._path)
        else:
            self._rename_if_absent()
        sync_folder(self._path.parent)

    def _exists_error(self) -> ConfigError:
        return _exists_error(str(self._path), *(() if self._has_mark() else ("delete it",)))

    def _rename_if_absent(self) -> None:
        """Rename the temporary file, but never replace a file that has just appeared."""
        try:
            os.link(self._temporary, self._path)
        except FileExistsError:
            raise self._exists_error() from None
        except OSError:  # no links on this file system: rely on the check before
            self._temporary.replace(self._path)
        else:
            sync_folder(self._path.parent)  # the new name is durable before the old one is removed
            self._temporary.unlink()


def _exists_error(url: str, remedy: str = f"pass {mention('overwrite', True)}") -> ConfigError:
    """Return the error for an output that exists and is not replaced."""
    return ConfigError(f"{redact(url)} already exists", f"give another output, or {remedy}")
