"""Reads tables in blocks: CSV by numpy's parser, Parquet by pyarrow; errors name row and column."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from itertools import islice
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from streamkern.columns import Asked, Files, split_columns
from streamkern.conform import RawBlock
from streamkern.errors import DataError
from streamkern.optional import need

_DELIMITERS = ",;\t|"


class CsvReader:
    """Rows of numbers with target columns, after an optional header line.

    A first line in which some field is not a number is the header; without one the columns are
    named by position. Features are parsed in float64 and stored as float32 unless another dtype
    is asked for. Targets are handed on as text, so that labels keep their spelling. Quoted
    fields are understood, line breaks inside them are not.
    """

    files: Files = ()  # named by who opened them

    def __init__(
        self,
        where: str,
        open_file: Callable[[], IO[bytes]],
        asked: Asked,
        identity: Any,
    ) -> None:
        self.n_rows: int | None = None
        self.natural_dtype: np.dtype[Any] | None = np.dtype(np.float32)
        self.identity = identity
        self._where, self._open = where, open_file
        with self._lines() as file:
            first = next(_content(file), (0, ""))[1]
        if not first.strip():
            raise DataError(f"{where} is empty")
        self._delimiter = max(_DELIMITERS, key=first.count)
        fields = [k.strip() for k in next(csv.reader([first], delimiter=self._delimiter))]
        self._header = not all(_is_number(field) for field in fields)
        self._names = fields if self._header else [str(i) for i in range(len(fields))]
        split = split_columns(self._names, asked, where, named=self._header)
        self.columns = split.features if self._header else None
        self.target_columns = split.targets if self._header else None
        self._features = split.features
        position = {name: i for i, name in enumerate(self._names)}
        self._weight_columns = [position[name] for name in split.weights]
        self._feature_columns = [position[name] for name in split.features]
        self._target_columns = [position[name] for name in split.targets]

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        rows = max(1, block_bytes // (8 * len(self._names)))
        with self._lines() as file:
            numbered = _content(file)
            skip = start + (1 if self._header else 0)
            next(islice(numbered, skip, skip), None)
            while block := list(islice(numbered, rows)):
                yield self._parse(block, start)
                start += len(block)
        self.n_rows = start

    def _lines(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(self._open(), encoding="utf-8-sig", newline="")

    def _parse(self, numbered: list[tuple[int, str]], start: int) -> RawBlock:
        lines = [line for _, line in numbered]
        try:
            if any(self._n_fields(line) != len(self._names) for line in lines):
                raise ValueError("lines with another number of fields")
            X = self._load(lines, self._feature_columns, np.float64)
            y = np.empty((len(lines), 0))
            if self._target_columns:
                y = np.char.strip(self._load(lines, self._target_columns, np.dtype(str)))
            weights = self._weight_columns
            w = self._load(lines, weights, np.dtype(str))[:, 0] if weights else None
        except ValueError as error:
            self._blame(numbered, start)
            raise DataError(f"{self._where}, near row {start}: {error}") from error
        return RawBlock(
            X,
            y[:, 0] if len(self._target_columns) == 1 else y,
            self._where,
            start,
            self._features,
            w,
        )

    def _n_fields(self, line: str) -> int:
        if '"' in line:
            return len(next(csv.reader([line], delimiter=self._delimiter)))
        return line.count(self._delimiter) + 1

    def _load(self, lines: list[str], columns: list[int], dtype: Any) -> NDArray[Any]:
        return np.loadtxt(
            lines,
            dtype=dtype,
            delimiter=self._delimiter,
            usecols=columns,
            comments=None,
            quotechar='"',
            ndmin=2,
        )

    def _blame(self, numbered: list[tuple[int, str]], start: int) -> None:
        """Raise for the first line that is wrong, naming line and column."""
        for row, (number, line) in enumerate(numbered):
            place = f"{self._where}, row {start + row} (line {number})"
            fields = next(csv.reader([line], delimiter=self._delimiter))
            if len(fields) != len(self._names):
                raise DataError(
                    f"{place} has {len(fields)} fields, the first line has {len(self._names)}"
                )
            for name, column in zip(self._features, self._feature_columns, strict=True):
                if not _is_number(fields[column]):
                    what = repr(fields[column]) if fields[column].strip() else "empty"
                    raise DataError(
                        f"{place}, column {name!r} is {what}; features are numbers: encode, fill "
                        "in or drop such rows"
                    )


def _content(file: IO[str]) -> Iterator[tuple[int, str]]:
    """(line number from 1, line) of the lines that are not blank."""
    return ((n, line) for n, line in enumerate(file, start=1) if line.strip())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class ParquetReader:
    """Columns of a Parquet file; a column of lists asked for by name, or named X, is X itself."""

    files: Files = ()  # named by who opened them

    def __init__(self, where: str, file: Any, asked: Asked, identity: Any) -> None:
        parquet = need("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(file)
        except ValueError as error:  # pyarrow.ArrowInvalid
            raise DataError(f"{where} is not a readable Parquet file: {error}") from error
        self.n_rows: int | None = self._file.metadata.num_rows
        self.natural_dtype: np.dtype[Any] | None = None
        self.identity = identity
        self._where = where
        schema = self._file.schema_arrow
        name = "X" if asked.x is None else asked.x
        self._lists = name in schema.names and "list" in str(schema.field(name).type)
        if self._lists:
            asked = asked._replace(x=name, columns=None)
        split = split_columns(schema.names, asked, where)
        self.columns = None if self._lists else split.features
        self.target_columns = split.targets
        self._features, self._targets, self._weights = split.features, split.targets, split.weights

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row_bytes = max(1, self._file.metadata.row_group(0).total_byte_size) if self.n_rows else 1
        group_rows = self._file.metadata.row_group(0).num_rows if self.n_rows else 1
        rows = max(1, int(block_bytes * max(group_rows, 1) / row_bytes) // 2)
        row = 0
        columns = [*self._features, *self._targets, *self._weights]
        for batch in self._file.iter_batches(batch_size=rows, columns=columns):
            skip = min(max(start - row, 0), len(batch))
            row += len(batch)
            if skip < len(batch):
                yield self._block(batch.slice(skip), row - len(batch) + skip)

    def close(self) -> None:
        self._file.close()

    def _block(self, batch: Any, start: int) -> RawBlock:
        for name in (*self._features, *self._targets, *self._weights):
            column = batch.column(name)
            if column.null_count:
                row = start + column.is_null().index(True).as_py()
                raise DataError(
                    f"{self._where}, row {row}, column {name!r} is null; fill in or drop such rows"
                )
        if self._lists:
            lists = batch.column(self._features[0])
            flat = lists.flatten().to_numpy(zero_copy_only=False)
            if len(flat) % len(lists):
                raise DataError(f"{self._where}: lists in {self._features[0]!r} differ in length")
            X = flat.reshape(len(lists), -1)
        else:
            X = np.stack([self._numbers(batch, name) for name in self._features], axis=1)
        y = [batch.column(name).to_numpy(zero_copy_only=False) for name in self._targets]
        return RawBlock(
            X,
            y[0] if len(y) == 1 else np.stack(y, axis=1) if y else np.empty((len(X), 0)),
            self._where,
            start,
            None if self._lists else self._features,
            self._numbers(batch, self._weights[0]) if self._weights else None,
        )

    def _numbers(self, batch: Any, name: str) -> NDArray[Any]:
        values = batch.column(name).to_numpy(zero_copy_only=False)
        if values.dtype.kind not in "biuf":
            raise DataError(
                f"{self._where}, column {name!r} is {batch.column(name).type}; features are "
                "numbers: encode or leave out the column"
            )
        return np.asarray(values)
