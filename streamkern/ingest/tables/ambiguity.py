"""Describe ambiguous columns in an error: the problem, and the remedies of the interface."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from streamkern.basics.message import mention

_DATE_FORMATS = (
    "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m",
    "%d/%m/%y", "%m/%d/%y", "%d.%m.%y", "%d-%m-%y", "%m-%d-%y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y",
    "%d-%b-%y", "%d. %B %Y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y", "%d%b%Y",
)  # fmt: skip
_TIME_FORMATS = (
    "", " %H:%M", " %H:%M:%S", "T%H:%M", "T%H:%M:%S", " %I:%M %p", " %I:%M:%S %p",
    " %H:%M:%S.%f", "T%H:%M:%S.%f",
)  # fmt: skip


class Ambiguity(NamedTuple):
    """A column that can be read in several ways.

    text : the problem, and what the user can do about it
    remedies : names of the fields of `ColumnRemedies` that resolve it
    """

    text: str
    remedies: tuple[str, ...] = ("categorical", "drop")


class ColumnRemedies(NamedTuple):
    """Options or code that resolve an ambiguity, as text; "" if the interface has none.

    categorical : makes a column categorical
    numeric : reads a column as numbers
    dates : reads a column as dates
    drop : leaves out a column
    missing_words : makes the words of a column of numbers missing values
    missing_dates : makes the words of a column of dates missing values
    date_format : reads a column as dates in a format; a template with {name} and {form}
    """

    categorical: str
    numeric: str
    dates: str
    drop: str
    missing_words: str
    missing_dates: str
    date_format: str

    def describe(self, ambiguities: Iterable[Ambiguity]) -> str:
        """Return the remedies that some of the ambiguities name, in parentheses."""
        names = {name for ambiguity in ambiguities for name in ambiguity.remedies}
        texts = (text for name, text in self._asdict().items() if name in names)
        return f"({', '.join(dict.fromkeys(filter(None, texts)))})"

    def with_date_format(self, name: str, texts: Sequence[str]) -> str:
        """Return the remedy that gives the format of a column of dates, some of them `texts`."""
        return self.date_format.format(name=name, form=date_format(texts) or "%d/%m/%Y")


OPTION_REMEDIES = ColumnRemedies(
    mention("categorical="), mention("numeric="), mention("dates="), mention("drop="),
    mention("na_values="), mention("na_values="), mention("{name}=") + "{form}",
)  # fmt: skip
"""The arguments of `ingest`, and the options of its command."""

PANDAS_REMEDIES = ColumnRemedies(
    'X.astype({...: "category"})', "X.astype({...: float})", "", "X.drop(columns=...)",
    'pandas.to_numeric(X[...], errors="coerce")',
    'pandas.to_datetime(X[...], format="ISO8601", errors="coerce")',
    'pandas.to_datetime(X[{name!r}], format="{form}")',
)  # fmt: skip

POLARS_REMEDIES = ColumnRemedies(
    "X.cast({...: polars.Categorical})", "X.cast({...: polars.Float64})", "", "X.drop(...)",
    "X[...].cast(polars.Float64, strict=False)", "X[...].str.to_datetime(strict=False)",
    'X[{name!r}].str.to_datetime("{form}")',
)  # fmt: skip

ARROW_REMEDIES = ColumnRemedies(
    "dictionary_encode() of the column", "the column cast to float64", "",
    "X.drop_columns(...), X.remove_columns(...) of a Dataset", "", "",
    'pyarrow.compute.strptime(X[{name!r}], "{form}", "s")',
)  # fmt: skip


def date_format(texts: Sequence[str]) -> str | None:
    """Return the first common format of `strptime` that reads all texts; None if none does."""
    for day, time in product(_DATE_FORMATS, _TIME_FORMATS):
        if all(_has_format(text, day + time) for text in texts):
            return day + time
    return None


def _has_format(text: str, form: str) -> bool:
    """Return whether a text is a date in a format of `strptime`."""
    try:
        datetime.datetime.strptime(text, form)
    except ValueError:
        return False
    return True
