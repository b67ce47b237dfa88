"""Write predictions as files: Zarr, .npy, CSV and Parquet, once from the first row to the last.

In all of them row k belongs to row k of the data, or `row` holds its row number; labels are the
user's own. Tables may have the columns of the input before those of the predictions. Memory is that
of one slab.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.codecs import Crc32cCodec

from streamkern.basics.optional import import_optional
from streamkern.basics.values import parsed_json
from streamkern.filesystem.ownership import ATTRIBUTE
from streamkern.ingest.original_columns import OriginalColumns, texts
from streamkern.store.class_labels import labels_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_BYTES = 8 << 20  # of values in a chunk of Zarr
GROUP_BYTES = 32 << 20  # smallest row group of Parquet
_TEXT_CELLS = 1 << 16  # cells of CSV made at once
_NUMBER = re.compile(
    r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)", re.IGNORECASE | re.ASCII
)
Slabs = Iterable[tuple[int, Any, Any]]
"""First position; row numbers (k,), or a list of input columns (k,); values (k, c) or ids."""


MOST_PROBABLE = "most_probable"
"""Name of the labels of probabilities; the model itself may predict another class."""


@dataclass(frozen=True)
class PredictionTable:
    """Description of the predictions, known before the first one.

    n_rows : of all
    dtype : of the values
    width : c, or 1 if only class ids are kept
    classes : label of each class, or None for values
    names : of the targets, if they have any
    numbered : whether the positions differ from the row numbers
    only_ids : whether values are class ids (k, 1)
    record : origin of the predictions
    scores : a word for the values of classes
    beside : columns of the input to write before the predictions
    escapes_formulas : whether CSV text that a spreadsheet would compute gets a "'" in front
    """

    n_rows: int
    dtype: np.dtype[Any]
    width: int
    classes: NDArray[Any] | None
    names: tuple[str, ...] | None
    numbered: bool = False
    only_ids: bool = False
    record: dict[str, Any] = field(default_factory=dict)
    scores: str = "score"
    beside: OriginalColumns | None = None
    escapes_formulas: bool = False

    @property
    def said(self) -> bool:
        """True if the largest value is that of the predicted class."""
        return self.scores == "score"

    @property
    def chunk_rows(self) -> int:
        """Rows of a Zarr chunk."""
        return max(1, CHUNK_BYTES // (self.width * self.dtype.itemsize))

    def labels(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the label of each row of values (k, c)."""
        assert self.classes is not None
        labels: NDArray[Any] = self.classes[values.argmax(axis=1)]
        return labels

    def header(self) -> list[str]:
        """Return the names of the columns of a table, all distinct."""
        names = ["row"] if self.beside is None else list(self.beside.names)
        if self.classes is None:
            several = [f"value_{k}" for k in range(self.width)] if self.width > 1 else ["value"]
            wanted = list(self.names or several)
        else:
            label = self.names[0] if self.names else "label"
            wanted = [
                label if self.said else MOST_PROBABLE,
                *(f"{self.scores}_{name}" for name in self.classes.tolist()),
            ]
        for name in wanted:
            while name in names:
                name += "_"
            names.append(name)
        return names

    def columns(self, rows: Any, values: NDArray[Any], part: slice = slice(None)) -> list[Any]:
        """Return the columns of a table, as in `header`, or a part of their rows."""
        before = [rows] if self.beside is None else rows
        labels = [] if self.classes is None else [self.labels(values[part])]
        return [*(column[part] for column in before), *labels, *values[part].T]


def answered_labels(names: Sequence[str], dtype: str | None) -> NDArray[Any]:
    """Return the labels (c,) as written to files: those of `labels_of`, or text, also for dates."""
    labels = labels_of(names, dtype)
    if labels.dtype.kind in "iu" and np.can_cast(labels.dtype, np.int64):
        return labels.astype(np.int64)
    return labels if labels.dtype.kind in "biufU" else np.array(names)


def write_zarr(group: Any, answers: PredictionTable, slabs: Slabs) -> None:
    """Write `values` (n, c) into an empty group.

    Also `labels` (n,) for classes, or `most_probable` for probabilities, and `row` (n,) if
    numbered. Unwritten parts read as no prediction: NaN, a label that no class has, and row
    2**64 - 1.
    """
    n, c, rows = answers.n_rows, answers.width, min(answers.chunk_rows, answers.n_rows)

    def array(name: str, shape: tuple[int, ...], dtype: Any, fill: Any) -> Any:
        return group.create_array(
            name, shape=shape, chunks=(rows, *shape[1:]), dtype=dtype, fill_value=fill,
            compressors=[Crc32cCodec()], config={"write_empty_chunks": True},
        )  # fmt: skip

    values_out = array("values", (n, c), answers.dtype, np.nan)
    made = {"values": values_out}
    if answers.classes is not None:
        text = answers.classes.dtype.kind == "U"
        absent = _no_class(answers.classes)
        labels = "labels" if answers.said else MOST_PROBABLE
        made[labels] = array(labels, (n,), str if text else answers.classes.dtype, absent)
    if answers.numbered:
        made["row"] = array("row", (n,), np.uint64, np.iinfo(np.uint64).max)
    for first, numbers, values in slabs:
        part = slice(first, first + len(values))
        made["values"][part] = values
        if answers.classes is not None:
            made[labels][part] = answers.labels(values)
        if answers.numbered:
            made["row"][part] = numbers


def _no_class(classes: NDArray[Any]) -> int | float | bool | str:
    """Return a label that no class has: the lowest free number, NaN, or a text.

    For booleans, which have no free label, it is False.
    """
    known = set(classes.tolist())
    if classes.dtype.kind in "bf":
        return False if classes.dtype.kind == "b" else np.nan
    if classes.dtype.kind in "iu":
        number = int(np.iinfo(classes.dtype).min)
        while number in known and number < np.iinfo(classes.dtype).max:
            number += 1
        return number
    text = "<missing>"
    while text in known:
        text += "_"
    return text


def write_npy(path: Path, answers: PredictionTable, slabs: Slabs) -> None:
    """Write one array: labels (n,) if class ids were kept, else values (n, c), or (n,) of one."""
    labels = answers.classes if answers.only_ids else None
    dtype = answers.dtype if labels is None else labels.dtype
    flat = labels is not None or (answers.classes is None and answers.width == 1)
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (answers.n_rows,) if flat else (answers.n_rows, answers.width),
    }
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, _, values in slabs:
            part = values if labels is None else labels[values[:, 0]]
            file.write(np.ascontiguousarray(part).view(np.uint8).data)


def write_csv(path: Path, answers: PredictionTable, slabs: Slabs) -> None:
    """Write columns `row` or those of the input, the label of classes, and the values.

    UTF-8, with a header. Numbers have as many digits as distinguish them from their neighbours.
    """
    header = answers.header()
    step = max(1, _TEXT_CELLS // len(header))
    with path.open("w", newline="", encoding="utf-8") as file:
        plain = csv.writer(file, lineterminator="\n")
        # Before Python 3.13 a CR is not quoted, and would end the line for most readers.
        quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
        plain.writerow(map(escaped, header) if answers.escapes_formulas else header)
        for _, rows, values in slabs:
            for start in range(0, len(values), step):
                columns = answers.columns(rows, values, slice(start, start + step))
                cells = [_texts(*k) for k in zip(columns, header, strict=True)]
                if answers.escapes_formulas:
                    cells = [[*map(escaped, column)] for column in cells]
                returns = any("\r" in "".join(column) for column in cells)
                (quoted if returns else plain).writerows(zip(*cells, strict=True))


def escaped(text: str) -> str:
    """Return a CSV cell with "'" in front of text that a spreadsheet would read as a formula."""
    formula = text[:1] in tuple("=+-@\t\r") and not _NUMBER.fullmatch(text)
    return f"'{text}" if formula else text


def _texts(column: Any, name: str) -> list[str]:
    if isinstance(column, np.ndarray):
        found: list[str] = column.astype(str).tolist()
        return found
    return texts(column, name)


def write_parquet(path: Path, answers: PredictionTable, slabs: Slabs) -> None:
    """Write the columns of `write_csv`, and the origin of the predictions as metadata."""
    arrow = import_optional("pyarrow", "writing Parquet")
    parquet = import_optional("pyarrow.parquet", "writing Parquet")
    own, beside = answers.header(), answers.beside
    fields, metadata = [], {ATTRIBUTE: json.dumps(answers.record)}
    if beside is not None:
        fields, own = beside.arrow_fields(), own[len(beside.names) :]
        metadata = {**((beside.schema and beside.schema.metadata) or {}), **metadata}
    no_rows: Any = np.empty(0, np.uint64) if beside is None else []
    empty = answers.columns(no_rows, np.empty((0, answers.width), answers.dtype))
    fields += [(name, arrow.array(column).type) for name, column in zip(own, empty, strict=True)]
    schema = arrow.schema(fields, metadata=metadata)
    with parquet.ParquetWriter(path, schema) as file:
        waiting, waiting_bytes = [], 0
        for _, rows, values in slabs:
            columns = [
                arrow.array(np.ascontiguousarray(k)) if isinstance(k, np.ndarray) else k
                for k in answers.columns(rows, values)
            ]
            waiting.append(arrow.table(columns, schema=schema))
            waiting_bytes += waiting[-1].nbytes
            if waiting_bytes >= GROUP_BYTES:
                file.write_table(arrow.concat_tables(waiting))
                waiting, waiting_bytes = [], 0
        if waiting:
            file.write_table(arrow.concat_tables(waiting))


def parquet_record(path: Path) -> Any:
    """Return the record that `write_parquet` saved in a file; None if another program wrote it."""
    parquet = import_optional("pyarrow.parquet", "reading Parquet")
    try:
        found = parquet.read_schema(path).metadata or {}
        return parsed_json(found[ATTRIBUTE.encode()])
    except (ValueError, KeyError):  # pyarrow.ArrowInvalid is a ValueError
        return None


FILES: dict[str, Callable[[Path, PredictionTable, Slabs], None]] = {
    ".npy": write_npy,
    ".csv": write_csv,
    ".parquet": write_parquet,
}
