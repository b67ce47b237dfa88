"""Reads CSV and TSV files in blocks, by numpy's parser, with errors that name line and column."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from streamkern.conform import RawBlock
from streamkern.errors import DataError

_DELIMITERS = ",;\t|"


class CsvReader:
    """Rows of numbers with target columns, after an optional header line.

    A first line in which some field is not a number is the header; without one the columns are
    named by position. Features are parsed in float64 and stored as float32 unless another dtype
    is asked for. Targets are handed on as text, so that labels keep their spelling. Quoted
    fields are understood, line breaks inside them are not.
    """

    def __init__(
        self,
        where: str,
        open_file: Callable[[], IO[bytes]],
        target: Any,
        identity: Any,
        split: Callable[[Sequence[str], Any, str], tuple[list[str], list[str]]],
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
        targets, self._features = split(self._names, target, where)
        self._feature_columns = [self._names.index(name) for name in self._features]
        self._target_columns = [self._names.index(name) for name in targets]

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        rows = max(1, block_bytes // (8 * len(self._names)))
        with self._lines() as file:
            numbered = _content(file)
            skip = start + (1 if self._header else 0)
            next(islice(numbered, skip, skip), None)
            while block := list(islice(numbered, rows)):
                yield self._parse(block, start)
                start += len(block)

    def _lines(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(self._open(), encoding="utf-8-sig", newline="")

    def _parse(self, numbered: list[tuple[int, str]], start: int) -> RawBlock:
        lines = [line for _, line in numbered]
        try:
            if any(self._n_fields(line) != len(self._names) for line in lines):
                raise ValueError("lines with another number of fields")
            X = self._load(lines, self._feature_columns, np.float64)
            y = self._load(lines, self._target_columns, np.dtype(str))
        except ValueError as error:
            self._blame(numbered, start)
            raise DataError(f"{self._where}, near row {start}: {error}") from error
        y = np.char.strip(y)
        return RawBlock(
            X,
            y[:, 0] if len(self._target_columns) == 1 else y,
            self._where,
            start,
            self._features,
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
