"""Encode columns of each kind as features; a code is fitted once, saved as JSON and never changes.

Features are on the scale that the engine gives the columns of a table: numbers and days are
standardised, and two words are as far apart as two random rows are in a standardised column
(squared distance 2), however rare they are. So a rare word or a missing value is not far away from
everything else. A missing number becomes the mean, next to a feature that flags it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.optional import on_demand
from streamkern.basics.text import some
from streamkern.ingest.tables import cells
from streamkern.ingest.tables.words import word_indices

HASHED_FEATURES = 32
"""Number of features of a hashed column."""
# Periods in days. With a mean year, a date has the same phase every year to half a day.
CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}
DAY_MILLISECONDS = 86_400_000
Values = NDArray[np.float64]


@dataclass(frozen=True)
class ColumnCode(ABC):
    """Encoding of one column of a table.

    name : name of the column
    n_missing : number of missing cells in the rows that the code was fitted on; if there are any,
        the last feature flags missing cells
    """

    name: str
    n_missing: int
    kind: ClassVar[str]

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        names = tuple(self._features())
        return (*names, f"{self.name} is missing") if self.n_missing else names

    def encode(self, column: Any) -> Values:
        """Return features (k, len(features)) of k Arrow cells; raise WrongCellError for others."""
        values, missing = self._encode(column)
        return np.column_stack([values, missing]) if self.n_missing else values

    def json(self) -> dict[str, Any]:
        """Return the code as JSON, for `column_code`."""
        return {"kind": self.kind, **{name: _lists(field) for name, field in asdict(self).items()}}

    @abstractmethod
    def description(self) -> str:
        """Return a description of the encoding for people."""

    @abstractmethod
    def _features(self) -> Iterator[str]:
        """Yield the names of the features, without the flag of missing cells."""

    @abstractmethod
    def _encode(self, column: Any) -> tuple[Values, NDArray[np.bool_]]:
        """Return the values of the features of `_features`, and a mask (k,) of missing cells."""


@dataclass(frozen=True)
class Number(ColumnCode):
    """Number minus its mean, divided by its standard deviation; a missing one becomes the mean.

    mean : mean of the column
    std : standard deviation of the column; 1 if it is constant
    """

    mean: float
    std: float
    kind: ClassVar[str] = "number"

    def description(self) -> str:
        return f"mean {self.mean:.6g}, standard deviation {self.std:.3g}"

    def _features(self) -> Iterator[str]:
        yield self.name

    def _encode(self, column: Any) -> tuple[Values, NDArray[np.bool_]]:
        return _standardise_values(cells.as_numbers(column), self.mean, self.std)


@dataclass(frozen=True)
class Date(ColumnCode):
    """Date as a standardised number of days, and sine and cosine of its phase in some cycles.

    mean : mean of the days since 1970-01-01
    std : standard deviation of the days; 1 if they are equal
    form : strptime format of text; None for ISO 8601
    cycles : year, week and day, if the column spans at least two of them
    zoned : whether the dates have a time zone; None if unknown
    """

    mean: float
    std: float
    form: str | None
    cycles: tuple[str, ...]
    zoned: bool | None
    kind: ClassVar[str] = "date"

    def description(self) -> str:
        form = "" if self.form is None else f" ({self.form})"
        return f"days{form}{''.join(f', {cycle}' for cycle in self.cycles)}"

    def _features(self) -> Iterator[str]:
        yield self.name
        for cycle in self.cycles:
            yield from (f"{self.name} {cycle} sin", f"{self.name} {cycle} cos")

    def _encode(self, column: Any) -> tuple[Values, NDArray[np.bool_]]:
        days = cells.as_days(column, self.form)
        cells.check_zone(column, self.form, self.zoned)
        values, missing = _standardise_values(days, self.mean, self.std)
        parts = [values]
        for cycle in self.cycles:
            known_days = np.where(missing, 0, days)[:, None]
            parts += [np.sin(angle) for angle in cycle_angles(known_days, CYCLES[cycle], np.floor)]
        out = np.concatenate(parts, axis=1)
        out[missing] = 0
        return out, missing


def cycle_angles(days: Any, length: float, floor: Callable[[Any], Any]) -> list[Any]:
    """Return two angles whose sines are the sine and the cosine of the phase of dates in a cycle.

    days : dates in days, a NumPy array or a value of the graph of an export
    length : length of the cycle in days
    floor : the function for `days` that rounds down, such as numpy.floor

    Dates of the same phase have bit-identical angles, and so have the two phases of the same sine:
    the phase is a whole number of milliseconds, mirrored at the turning points. Otherwise the sine
    at noon would be the rounding error of the date, which quantile scores would enlarge.
    """
    period_ms = length * DAY_MILLISECONDS
    phase_ms = floor((days - floor(days / length) * length) * DAY_MILLISECONDS + 0.5)
    angles = []
    # For the sine the phase is shifted by a quarter of the period.
    for shifted_ms in (phase_ms - period_ms / 4, phase_ms):
        phase_in_period = shifted_ms - floor(shifted_ms / period_ms) * period_ms
        angles.append(
            (abs(phase_in_period - period_ms / 2) - period_ms / 4) * (2 * math.pi / period_ms)
        )
    return angles


@dataclass(frozen=True)
class KnownWords(ColumnCode):
    """Base of codes for columns whose words were all kept.

    known : the words of the rows that the code was fitted on
    """

    known: tuple[str, ...]

    def n_unknown(self, column: Any) -> tuple[int, int]:
        """Return the number of cells with a word not seen in training, and with any word."""
        texts, codes = cells.as_words(column)
        unknown = word_indices(self._word_index, texts, codes) < 0
        return int(unknown.sum()), int((codes >= 0).sum())

    @cached_property
    def _word_index(self) -> dict[str, int]:
        # Earlier versions kept the line breaks of words in data frames.
        words = (word.replace("\r\n", "\n").replace("\r", "\n") for word in self.known)
        return {word: 1 + k for k, word in enumerate(words)}


@dataclass(frozen=True)
class OneHot(KnownWords):
    """One feature for each word; an unknown word sets none of them.

    Without known words, only the missing cells of the column have a feature.
    """

    kind: ClassVar[str] = "one-hot"

    def description(self) -> str:
        if not self.known:
            return "no words"
        return f"{len(self.known)} words: {some([word[:40] for word in self.known])}"

    def _features(self) -> Iterator[str]:
        return (f"{self.name}={word}" for word in self.known)

    def _encode(self, column: Any) -> tuple[Values, NDArray[np.bool_]]:
        texts, codes = cells.as_words(column)
        index = word_indices(self._word_index, texts, codes)
        out = np.zeros((len(codes), len(self.known)))
        rows = np.flatnonzero(index > 0)
        out[rows, index[rows] - 1] = 1
        return out, codes < 0


@dataclass(frozen=True)
class Hashed(ColumnCode):
    """Plus or minus 1 in one of a few features, chosen by the hash of the word.

    For columns with too many words to keep. As scikit-learn's `FeatureHasher` (Weinberger et al.,
    ICML 2009). Unknown words are hashed too.
    """

    kind: ClassVar[str] = "hashed"

    def description(self) -> str:
        return f"more words than are kept, hashed to {HASHED_FEATURES} features"

    def _features(self) -> Iterator[str]:
        return (f"{self.name} #{k}" for k in range(HASHED_FEATURES))

    def _encode(self, column: Any) -> tuple[Values, NDArray[np.bool_]]:
        texts, codes = cells.as_words(column)
        murmurhash3_32 = on_demand("sklearn.utils").murmurhash3_32
        hashes = np.array([0, *(murmurhash3_32(text) for text in texts)], np.int64)[codes + 1]
        out = np.zeros((len(codes), HASHED_FEATURES))
        rows = np.flatnonzero(codes >= 0)
        row_hashes = hashes[rows]
        out[rows, np.abs(row_hashes) % HASHED_FEATURES] = np.where(row_hashes >= 0, 1, -1)
        return out, codes < 0


@dataclass(frozen=True)
class TargetMeans(KnownWords):
    """Mean of each of t targets over the rows with a word, standardised.

    means : t means of each word in `known`
    missing : t means of missing cells
    unknown : t means of unknown words, which are the means of all rows
    mean : t means that are subtracted from the features
    std : t standard deviations by which the features are divided
    outputs : names of the t targets
    """

    means: tuple[tuple[float, ...], ...]
    missing: tuple[float, ...]
    unknown: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    outputs: tuple[str, ...]
    kind: ClassVar[str] = "target means"

    def description(self) -> str:
        return f"{len(self.known)} words, by the mean target beside them"

    def _features(self) -> Iterator[str]:
        return (f"{self.name} by {output}" for output in self.outputs)

    def _encode(self, column: Any) -> tuple[Values, NDArray[np.bool_]]:
        index, missing = self.word_indices(column)
        return self.standardise(np.array([self.missing, *self.means, self.unknown])[index]), missing

    def word_indices(self, column: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return indices (k,), 0 if missing, last if unknown, and a mask of missing cells."""
        texts, codes = cells.as_words(column)
        return word_indices(self._word_index, texts, codes, unknown=len(self.known) + 1), codes < 0

    def standardise(self, means: Values) -> Values:
        """Return the features for means (k, t)."""
        out: Values = (means - np.array(self.mean)) / np.array(self.std)
        return out


def _standardise_values(
    values: Values, mean: float, std: float
) -> tuple[Values, NDArray[np.bool_]]:
    """Return numbers (k,) as a standardised feature (k, 1), 0 if missing, and a mask of those."""
    missing = np.isnan(values)
    if np.isinf(values).any():
        row = int(np.argmax(np.isinf(values)))
        raise cells.WrongCellError(row, str(values[row]))
    return np.where(missing, 0, (values - mean) / std)[:, None], missing


_CODES = {code.kind: code for code in (Number, Date, OneHot, Hashed, TargetMeans)}


def column_code(saved: Mapping[str, Any]) -> ColumnCode:
    """Return the code that `ColumnCode.json` saved."""
    fields = {name: _tuples(value) for name, value in saved.items() if name != "kind"}
    return _CODES[saved["kind"]](**fields)


def _lists(value: Any) -> Any:
    """Return nested tuples as lists, for JSON; other values unchanged."""
    return list(map(_lists, value)) if isinstance(value, list | tuple) else value


def _tuples(value: Any) -> Any:
    """Return nested lists as tuples; other values unchanged."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
