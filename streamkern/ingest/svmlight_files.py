"""Read svmlight and libsvm files, whose rows are a label and the features that are not 0.

A first pass finds the number of features, whether they are counted from 0 or from 1, the longest
row, and whether all labels are integers; then rows are made dense, or packed, in pieces.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.optional import on_demand
from streamkern.basics.text import redact
from streamkern.basics.warning import warn
from streamkern.ingest.array_reader import check_row_bytes
from streamkern.ingest.columns import ReadRequest, as_list
from streamkern.ingest.conform import RawBlock
from streamkern.ingest.input_files import FileOpener, Url
from streamkern.ingest.reader import FileReader, Reader
from streamkern.ingest.tables.key_columns import text_is_rounded, warn_of_rounded_integers
from streamkern.store.sparse_rows import MAX_GAP, longest_row, pack_rows

_PIECE_BYTES = 4 << 20  # bytes of text that are parsed at a time
_MAX_FEATURES_OF_DENSE_ROWS = 1 << 24
_MAX_EXACT_INTEGER = 2.0**53  # integers below it are exact in float64
_MAX_FEATURE_NUMBER = 2**31 - 1  # of the reader in scikit-learn
SVMLIGHT = "svmlight"


class SvmlightReader(Reader):
    """Reader of an svmlight file.

    n_features : number of features if it is known; None for those up to the highest number

    Attributes
    ----------
    first_number : number of the first feature in earlier files of the same data; None if unknown
    lowest : lowest feature number in the file
    highest : highest feature number in the file
    """

    as_text = True

    def __init__(
        self, url: Url, request: ReadRequest, opener: FileOpener, n_features: int | None
    ) -> None:
        self._url, self._opener, self._location = url, opener, redact(url)
        self._targets, self._warned_of_rounding = request.targets, False
        record = opener.form.earlier_record or {}
        self.first_number: int | None = None
        if record.get("format") == SVMLIGHT:
            self.first_number = record.get("first")
        # Earlier rows of another format do not tell whether these feature numbers begin at 0 or 1.
        base_is_unknown = opener.form.earlier_record is not None and self.first_number is None
        if self.first_number is not None and n_features is None:
            n_features = record["n_features"]
        self.identity = [opener.identity(url), n_features, self.first_number]
        self._scan_file()
        if self._n_rows == 0:
            raise DataError(f"{self._location} has no rows", "give a file with rows")
        fits_both = n_features is not None and 0 < self.lowest <= self.highest < n_features
        if base_is_unknown and fits_both:
            raise DataError(
                f"{self._location} does not record whether feature numbers begin at 0 or 1, and "
                "the model was not trained on svmlight files",
                "give the rows as an array: read them with sklearn.datasets.load_svmlight_file, "
                "with n_features and zero_based",
            )
        self._warn_of_queries()
        # Features are counted from 1 unless there is a feature 0, as in scikit-learn.
        self.count_from(0 if self.lowest == 0 else 1, n_features)

    def count_from(self, base: int, n_features: int | None) -> None:
        """Number the features from `base`, 0 or 1; raise DataError if earlier files differ.

        n_features : number of features; None for those up to the highest
        """
        if self.first_number is not None:
            if self.first_number > self.lowest:
                raise DataError(
                    f"{self._location} has a feature 0, but in the rows before the feature numbers "
                    "begin at 1",
                    "number the features of all files in the same way, or ingest all files "
                    "together, to a new store",
                )
            base = self.first_number
        self._zero_based, highest = base == 0, self.highest
        width = max(1, highest + 1 - base)
        if n_features is not None and width > n_features:
            problem = f"{self._location} has the feature {highest}, counted from {base}"
            if self.first_number is not None:
                raise DataError(
                    f"{problem}, but the rows before have {n_features} features",
                    "ingest all files together, to a new store",
                )
            raise DataError(
                f"{problem}, but {n_features} features were requested",
                f"leave {mention('x=')} out, or give the number of features in the file",
            )
        self._width = n_features or width
        first_number = 1 - self._zero_based
        self.file_form = {"format": SVMLIGHT, "first": first_number, "n_features": self._width}
        self.sparse_shape = self._width, self._longest + self._width // MAX_GAP

    def pack(self, width: int) -> None:
        super().pack(width)
        self.natural_dtype, self.as_text = np.dtype(np.float64), False

    def blocks(self, start: int, block_bytes: int) -> Iterator[RawBlock]:
        row_bytes = 8 * (2 * self.width if self.width is not None else self._width)
        if self.width is None and self._width > _MAX_FEATURES_OF_DENSE_ROWS:
            raise DataError(
                f"{self._location} has {self._width:,} features, and a row with {self._longest:,} "
                "entries that are not 0",
                f"such rows become dense, with at most {_MAX_FEATURES_OF_DENSE_ROWS:,} features: "
                "hash or select features first",
            )
        step = max(1, block_bytes // row_bytes)
        check_row_bytes(row_bytes, 1, self._location, block_bytes)
        for first_row, lines in self._pieces():
            if first_row + len(lines) <= start:
                continue
            for offset in range(max(0, start - first_row), len(lines), step):
                part = lines[offset : offset + step]
                X, y = self._parse(part, first_row + offset, self._width, self._zero_based)
                self._warn_of_rounding(X, part)
                labels = y.astype(np.int64) if self._labels_are_integers else y
                rows = X.toarray() if self.width is None else pack_rows(X, self.width, np.float64)
                yield RawBlock(
                    rows, labels if self._targets else np.empty((len(y), 0)),
                    self._location, first_row + offset,
                )  # fmt: skip

    def _warn_of_queries(self) -> None:
        """Warn if rows belong to queries, which are ignored."""
        _, lines = next(self._pieces())
        if b" qid:" in lines[0].replace(b"\t", b" "):
            warn(
                f"the rows of {self._location} have a qid, the query that they belong to; it is "
                "ignored: their targets are fitted as they are"
            )

    def _warn_of_rounding(self, X: Any, lines: list[bytes]) -> None:
        """Warn once of integers that float64 rounds."""
        if not self._warned_of_rounding and np.abs(X.data).max(initial=0) >= _MAX_EXACT_INTEGER:
            cells = (
                cell.rpartition(b":")[2].decode() for line in lines for cell in line.split()[1:]
            )
            if any(map(text_is_rounded, cells)):
                self._warned_of_rounding = True
                warn_of_rounded_integers(self._location)

    def _scan_file(self) -> None:
        """Count the rows, and find the lowest and highest index and whether labels are integers."""
        self._n_rows = 0
        self._longest = 1
        self._labels_are_integers = True
        self.lowest, self.highest = int(np.iinfo(np.int64).max), -1
        for first_row, lines in self._pieces():
            X, y = self._parse(lines, first_row, None, True)
            self._n_rows += len(y)
            self._longest = max(self._longest, longest_row(X.indptr, 0))
            if X.nnz:
                self.lowest = min(self.lowest, int(X.indices.min()))
                self.highest = max(self.highest, int(X.indices.max()))
            with np.errstate(invalid="ignore"):
                integers = (y == np.floor(y)) & (np.abs(y) < _MAX_EXACT_INTEGER)
            self._labels_are_integers &= bool(integers.all())

    def _pieces(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the number of the first row and the lines of pieces of the file."""
        first_row = 0
        with self._opener.open_once(self._url) as file:
            for lines in filter(None, map(_rows, _texts(file))):
                yield first_row, lines
                first_row += len(lines)

    def _parse(
        self, lines: list[bytes], first_row: int, width: int | None, zero_based: bool
    ) -> tuple[Any, NDArray[np.float64]]:
        """Return the sparse rows and labels of lines; raise DataError that names a wrong line.

        first_row : number of the first row
        width : number of features; None for those up to the highest in these lines
        zero_based : whether features are counted from 0, not 1
        """
        text = io.BytesIO(b"\n".join(lines))
        load = on_demand("sklearn.datasets").load_svmlight_file
        try:
            X, y = load(text, n_features=width, zero_based=zero_based, dtype=np.float64)
        except (ValueError, IndexError, OverflowError, UnicodeDecodeError) as error:
            if len(lines) > 1:  # find the line by bisection
                n_half = len(lines) // 2
                self._parse(lines[:n_half], first_row, width, zero_based)
                self._parse(lines[n_half:], first_row + n_half, width, zero_based)
            line_name = f"{self._location}, line {self._line_number(first_row)}"
            raise DataError(f"{line_name}, {_line_problem(lines[0], error)}") from error
        return X, y

    def _line_number(self, row: int) -> int:
        """Return the line number, counted from 1, of a row number of the file."""
        with self._opener.open_once(self._url) as file:
            lines = (line for text in _texts(file) for line in text.split(b"\n"))
            rows = (number for number, line in enumerate(lines, 1) if _rows(line))
            return next(itertools.islice(rows, row, None))


def open_svmlight(url: Url, request: ReadRequest, opener: FileOpener) -> SvmlightReader:
    """Return a reader of an svmlight or libsvm file. An integer `x` is the number of features.

    Raises ConfigError if targets, weights or names of features are requested, and DataError if the
    file has no rows or a wrong line, or its features do not fit `x` or earlier files.
    """
    location = redact(url)
    if request.y is not None or request.w is not None:
        name = "y" if request.y is not None else "sample_weight"
        raise ConfigError(
            f"{mention(f'{name}=')} was given for {location}, but the rows of svmlight files begin "
            "with their targets and have no weights",
            "leave it out",
        )
    if [str(k).isdecimal() for k in as_list(request.x)] == [True]:  # text on a command line
        request = request._replace(x=int(as_list(request.x)[0]))
    if request.x is not None and (not isinstance(request.x, int) or request.x < 1):
        raise ConfigError(
            f"{mention('x', request.x)} was given for {location}, but features of svmlight files "
            "have no names",
            "leave it out, or give the number of features, if rows have more than this file shows",
        )
    return SvmlightReader(url, request, opener, request.x)


def number_features_alike(readers: Sequence[FileReader], n_features: int | None) -> None:
    """Number the features of several files alike: from 0 in all if one has a feature 0."""
    files = [
        (reader, reader.reader) for reader in readers if isinstance(reader.reader, SvmlightReader)
    ]
    if len(files) < 2 or files[0][1].first_number is not None:
        return
    base = 0 if any(file.lowest == 0 for _, file in files) else 1
    highest = max(file.highest for _, file in files)
    for reader, file in files:
        file.count_from(base, n_features or max(1, highest + 1 - base))
        reader.file_form, reader.sparse_shape = file.file_form, file.sparse_shape


def _texts(file: Any) -> Iterator[bytes]:
    """Yield pieces of the text that end before a line break, or with the file."""
    incomplete_line = b""
    while piece := file.read(_PIECE_BYTES):
        text, newline, incomplete_line = (incomplete_line + piece).rpartition(b"\n")
        if newline:
            yield text
    yield incomplete_line


def _rows(text: bytes) -> list[bytes]:
    """Return the rows: the lines without comments that are not blank."""
    lines = (line.partition(b"#")[0].strip() for line in text.split(b"\n"))
    return [line for line in lines if line]


def _line_problem(line: bytes, error: Exception) -> str:
    """Return why scikit-learn refuses a line, with a remedy."""
    label, *cells = line.decode("utf-8", "replace").split()
    if "," in label:
        return f"has the labels {label}; give rows of one label, or of one number, each"
    numbers = (cell.partition(":")[0] for cell in cells)
    large = next((n for n in numbers if n.isdecimal() and int(n) > _MAX_FEATURE_NUMBER), None)
    if large is not None:
        return (
            f"has the feature number {large}, and at most {_MAX_FEATURE_NUMBER} is read; number "
            "the features that occur from 1, or hash them to fewer (FeatureHasher of scikit-learn)"
        )
    return (
        f"is not a row of an svmlight file ({str(error).rstrip('.')}); write it as "
        "LABEL FEATURE:VALUE ..., its features in order"
    )
