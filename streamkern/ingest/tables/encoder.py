"""The encoder of a table: the code of every column, in one document that stores and models keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.values import json_digest
from streamkern.basics.warning import warn
from streamkern.ingest.tables.cells import RowsInFile, WrongCellError, row_number
from streamkern.ingest.tables.columns import ColumnCode, KnownWords, TargetMeans, column_code
from streamkern.ingest.tables.missing import MissingMarkers
from streamkern.ingest.tables.words import row_folds

ENCODER_VERSION = 1
MAX_NEW_SHARE, MAX_NEW_SHARE_OF_NAMES = 0.5, 0.9
"""Share of cells with new words above which these are probably spelled differently; and the share
for columns of many different words, such as names, which are new in most rows anyway."""
_NOUN_OF_KIND = {"number": "a number", "date": "a date"}


@dataclass(frozen=True, eq=False)
class Encoder:
    """Map from rows of a table to features (k, d), float32.

    codes : codes of the columns, in order
    dropped : names of columns that are not features
    missing : texts that mark a missing cell in a text column
    """

    codes: tuple[ColumnCode, ...]
    dropped: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the table."""
        return tuple(code.name for code in self.codes)

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Names of the d features, all distinct."""
        names: dict[str, None] = {}
        for code in self.codes:
            for name in code.features:
                while name in names:
                    name += "_"
                names[name] = None
        return tuple(names)

    @cached_property
    def groups(self) -> tuple[tuple[str, slice], ...]:
        """Each column of the table with the slice of its features."""
        groups, start = [], 0
        for code in self.codes:
            stop = start + len(code.features)
            groups.append((code.name, slice(start, stop)))
            start = stop
        return tuple(groups)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the encoder."""
        return json_digest(self.json())

    def json(self) -> dict[str, Any]:
        """Return the encoder as JSON, for `from_json`."""
        return {
            "version": ENCODER_VERSION,
            "columns": [code.json() for code in self.codes],
            "dropped": list(self.dropped),
            "missing": list(self.missing),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], location: str) -> Encoder:
        """Return the encoder that `json` saved; raise DataError if it is of another version."""
        if saved.get("version") != ENCODER_VERSION:
            raise DataError(
                f"the encoder of {location} is of version {saved.get('version')}, but this "
                f"streamkern supports version {ENCODER_VERSION}",
                "install a newer streamkern",
            )
        codes = tuple(map(column_code, saved["columns"]))
        return cls(codes, tuple(saved["dropped"]), tuple(saved["missing"]))

    def encode(self, table: Any, location: str, start: RowsInFile) -> NDArray[np.float32]:
        """Return features (k, d) of an Arrow table that has the columns.

        location : name of the file, for messages
        start : row numbers within the file, as in `row_number`, for messages

        Raises DataError for a cell that does not fit its column as seen in training.
        """
        return side_by_side(
            [
                encode_column(code, self.cells(table, code.name), location, start)
                for code in self.codes
            ]
        )

    def cells(self, table: Any, name: str) -> Any:
        """Return a column of a table, with null in cells whose text marks a missing one."""
        return self._markers.with_nulls(table.column(name))

    @cached_property
    def _markers(self) -> MissingMarkers:
        return MissingMarkers(self.missing)

    def lines(self) -> list[tuple[str, str, str]]:
        """Return (column, kind, description) of each column, for people."""
        lines = []
        for code in self.codes:
            missing_text = f", {code.n_missing:,} missing" if code.n_missing else ""
            lines.append((code.name, code.kind, code.description() + missing_text))
        return lines + [(name, "left out", "") for name in self.dropped]


class UnknownWords:
    """Counter of cells in new rows whose word was not seen in training, or that have no word."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._codes = [code for code in encoder.codes if isinstance(code, KnownWords)]
        self._counts = np.zeros((len(self._codes), 2), np.int64)
        self._n_rows = 0

    def add(self, table: Any) -> None:
        """Count the words of an Arrow table."""
        self._n_rows += len(table)
        for counts, code in zip(self._counts, self._codes, strict=True):
            counts += code.n_unknown(self._encoder.cells(table, code.name))

    def warn_if_many(self, location: str) -> None:
        """Warn of columns most of whose words are unknown, usually because of their spelling.

        Many different words, such as names, are new in most rows anyway, so nine tenths of them
        have to be unknown.
        Also warn of columns without any word that had one in every training row.
        """
        for code, (unknown, n_words) in zip(self._codes, self._counts.tolist(), strict=True):
            is_of_names = code.kind == TargetMeans.kind
            share = MAX_NEW_SHARE_OF_NAMES if is_of_names else MAX_NEW_SHARE
            if code.known and unknown > share * n_words:
                warn(
                    f"column {code.name!r} of {location} has words in {n_words:,} rows, of which "
                    f"{unknown:,} did not occur in training and carry no information; are they "
                    f"spelled as in training ({some([word[:40] for word in code.known])})?"
                )
            if self._n_rows and not n_words and not code.n_missing:
                warn(
                    f"column {code.name!r} of {location} is missing in all of {self._n_rows:,} "
                    "rows, and in no training row: it carries no information; is it meant to be "
                    "empty?"
                )


def column_notes(encoder: Mapping[str, Any] | None, location: str) -> dict[str, str]:
    """Return a description of the encoding of each column; empty without an encoder."""
    if encoder is None:
        return {}
    lines = Encoder.from_json(encoder, location).lines()
    return {name: f"{kind}: {text}" if text else kind for name, kind, text in lines}


def encode_column(
    code: ColumnCode, column: Any, location: str, start: RowsInFile
) -> NDArray[np.float64]:
    """Return the features of one column; raise DataError with the position of a wrong cell."""
    try:
        return code.encode(column)
    except WrongCellError as error:
        raise wrong_cell_error(error, code.name, code.kind, location, start) from None


def wrong_cell_error(
    error: WrongCellError, name: str, kind: str, location: str, start: RowsInFile,
    remedy: str = "correct it",
) -> DataError:  # fmt: skip
    """Return the error for a cell that does not fit its column.

    name, kind, location : of the column
    start : row numbers of the block within its file, as in `row_number`
    """
    noun = _NOUN_OF_KIND.get(kind, "a word")
    problem = "infinite" if error.text in ("inf", "-inf") else f"not {noun}"
    cell_location = f"{location}, row {row_number(start, error.row)}, column {name!r}"
    reason = error.reason or f"is {problem}"
    return DataError(f"{cell_location} is {error.text[:80]!r}, which {reason}", remedy)


def side_by_side(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float32]:
    """Concatenate the features (k, ...) of all columns to (k, d), in float32."""
    return np.concatenate(parts, axis=1, dtype=np.float32, casting="same_kind")


def check_encoder(
    encoder: Mapping[str, Any] | None, expected: Mapping[str, Any] | None, location: str
) -> None:
    """Raise DataError unless both are the same encoder, or both are None.

    Columns of another encoder may have the same names but mean something else.
    """
    if encoder is None and expected is None:
        return
    if expected is None:
        raise DataError(
            f"{location} is an encoded table, but plain numbers are needed",
            "give plain numbers in the units of training, or use a model that was trained on a "
            "table",
        )
    if encoder is None:
        raise DataError(
            f"{location} holds plain numbers, but the features of an encoded table are needed",
            f"give the table itself, or ingest it with {mention('like=')} and the training store",
        )
    if json_digest(dict(encoder)) != json_digest(dict(expected)):
        raise DataError(
            f"{location} is a table that was encoded in another way",
            f"ingest it again with {mention('like=')} and the training store",
        )


@dataclass(frozen=True, eq=False)
class FittedEncoder:
    """An encoder, and the fold means that encode the rows it was fitted on.

    encoder : encoder of other rows
    seed : seed of the folds
    fold_means : for each column encoded by targets, the means (N_FOLDS, 2 + words, t) without the
        rows of each fold: first of missing cells, then of each word, then of all rows
    """

    encoder: Encoder
    seed: int
    fold_means: dict[str, NDArray[np.float64]]

    def encode(self, table: Any, location: str, start: RowsInFile, row: int) -> NDArray[np.float32]:
        """Return features (k, d) of training rows, with target means from the other folds.

        table, location, start : as in `Encoder.encode`
        row : number of the first row, counted over all files
        """
        if not self.fold_means:
            return self.encoder.encode(table, location, start)
        folds = row_folds(self.seed, row, len(table))
        parts = []
        for code in self.encoder.codes:
            column = self.encoder.cells(table, code.name)
            part = encode_column(code, column, location, start)
            if isinstance(code, TargetMeans):
                index, _ = code.word_indices(column)
                means = self.fold_means[code.name][folds, index]
                part[:, : means.shape[1]] = code.standardise(means)
            parts.append(part)
        return side_by_side(parts)
