"""Describe ambiguous columns in an error: the problem, and the remedies of the interface."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.ingest.tables.numbers import csv_note, notation_text, other_notation, share_a_unit
from streamkern.ingest.tables.scan import Column

_MAX_WORDS_WITH_UNIT = (
    40  # distinct words such as "5 kg" up to which they may be categories without other numbers
)

_MAX_DESCRIBED_COLUMNS = 6
"""Number of ambiguous columns whose problem a message describes."""
_DATE_FORMATS = (
    "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m",
    "%d/%m/%y", "%m/%d/%y", "%d.%m.%y", "%d-%m-%y", "%m-%d-%y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y",
    "%d-%b-%y", "%d. %B %Y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y", "%d%b%Y",
)  # fmt: skip
_TIME_FORMATS = (
    "", " %H:%M", " %H:%M:%S", "T%H:%M", "T%H:%M:%S", " %I:%M %p", " %I:%M:%S %p",
    " %H:%M:%S.%f", "T%H:%M:%S.%f",
)  # fmt: skip
_RIVAL_DATE_FORMATS = ("%m.%d.%Y",)
"""Formats that are never suggested, but may be meant by texts that others read as well."""


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

    @property
    def choices(self) -> str:
        """The remedies that drop a column or make it categorical."""
        return "; or ".join(filter(None, (self.drop, self.categorical)))


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


def problems_text(ambiguities: Mapping[str, Ambiguity]) -> str:
    """Return the problems of columns as one text; of many columns, the rest have only names.

    ambiguities : by name of the column
    """
    texts = [ambiguity.text for ambiguity in ambiguities.values()][:_MAX_DESCRIBED_COLUMNS]
    if rest := list(ambiguities)[_MAX_DESCRIBED_COLUMNS:]:
        texts.append(f"and {len(rest)} more: {some(rest)}")
    return "; ".join(texts)


def describe_ambiguity(
    column: Column, remedies: ColumnRemedies = OPTION_REMEDIES
) -> Ambiguity | None:
    """Return why a column is ambiguous, with its remedies; None if it is not.

    column : the column, after its last cell
    remedies : the remedies of the interface
    """
    kind, name = column.infer_kind(), column.name
    # Cells that no encoding supports.
    if not column.has_scalars:
        problem = f"{name!r} is {column.arrow_type}, which is not a cell of a table: drop it"
        if column.has_number_lists:
            problem += (
                f", or take its lists alone as the features, {mention('x', name)} for an "
                f"ingest, numpy.stack(X[{name!r}]) in place of a data frame X"
            )
        return Ambiguity(problem, ("drop",))
    if kind == "empty" or column.declared_kind is not None or column.type_kind == "category":
        return None
    # Numbers that may be names: those that the table declares as text, and those like "007".
    if column.is_declared_text and kind == "number" and not column.is_boolean:
        return Ambiguity(
            f"{name!r} is text, but every cell is a number: decide whether the column is "
            "numeric or categorical",
            ("categorical", "numeric", "drop"),
        )
    if column.first_padded_number is not None and kind == "number" and column.kind is None:
        row, text = column.first_padded_number
        return Ambiguity(
            f"{name!r} holds numbers with zeros before them ({text} in row {row}), as codes "
            "and names have: call it categorical, or numeric",
            ("categorical", "numeric", "drop"),
        )
    if kind != "category":
        return None
    # Words that may be numbers or dates.
    text_ambiguity = _describe_text_ambiguity(column, list(column.example_words), remedies)
    are_codes = text_ambiguity is None and column.consists_of_codes()
    if column.has_numbers_and_words and not are_codes:
        assert column.first_number is not None
        assert column.first_word is not None
        (row, number), (word_row, word) = column.first_number, column.first_word
        notation = other_notation(word)
        notation_note = "" if notation is None else f", a number or date with {notation}"
        return Ambiguity(
            f"{name!r} mixes numbers ({number} in row {row}) and words ({word[:40]!r} in row "
            f"{word_row}{notation_note}): make it categorical, correct the words"
            f"{csv_note(word)}, or mark them as missing",
            ("categorical", "drop", "missing_words"),
        )
    return text_ambiguity if column.kind is None else None


def _describe_text_ambiguity(
    column: Column, words: list[str], remedies: ColumnRemedies
) -> Ambiguity | None:
    """Return why these words may be numbers or dates, with a remedy; None for other words.

    column : the column, after its last cell
    words : examples of the words of the column
    remedies : the remedies of the interface
    """
    name = column.name
    if column.first_date and column.first_not_a_date:
        (row, date), (word_row, word) = column.first_date, column.first_not_a_date
        return Ambiguity(
            f"{name!r} mixes dates ({date} in row {row}) and words ({word[:40]!r} in row "
            f"{word_row}): correct the words, mark them as missing, or make it categorical",
            ("categorical", "drop", "missing_dates"),
        )
    if column.first_wrong_date:
        row, text, reason = column.first_wrong_date
        return Ambiguity(
            f"{name!r} holds dates, of which {text!r} in row {row} {reason}: correct it, or "
            "make the column categorical",
        )
    notations = {word: notation for word in words if (notation := other_notation(word)) is not None}
    # A third of the words suffices: a column of words has hardly any in such notations.
    if notations and 3 * len(notations) >= len(words):
        word, notation = next(iter(notations.items()))
        if notation == "a time":
            return Ambiguity(
                f"{name!r} holds times like {word[:40]!r}: write them as numbers, for "
                "example minutes, or make it categorical",
            )
        if notation in ("a date", "a month"):
            form = date_format(words) or "%d/%m/%Y"
            date_remedy = remedies.date_format.format(name=name, form=form)
            return Ambiguity(
                f"{name!r} holds dates like {word[:40]!r}, which can be read in several ways: "
                f"give their format ({date_remedy}, for example), "
                "or make it categorical",
                ("categorical", "dates", "drop"),
            )
        return Ambiguity(
            f"{name!r} holds numbers like {word[:40]!r}, {notation_text(notation)}: write them "
            f"with a point and nothing around them{csv_note(word)}, or call it categorical",
        )
    max_with_unit = 0 if column.has_numbers_and_words else _MAX_WORDS_WITH_UNIT
    if len(words) > max_with_unit and share_a_unit(words):
        return Ambiguity(
            f"{name!r} holds numbers like {words[0][:40]!r}, with a unit: write them without, "
            "or call it categorical",
        )
    return None


def only_date_format(texts: Sequence[str]) -> str | None:
    """Return the only common format of `strptime` that reads all texts as dates.

    None if no format does, if several do, or if the years have two digits. The dates 1/2/1994 and
    1/29/1994, for example, can only be read with the month first. Months such as 2001-02 may also
    be seasons.
    """
    if not texts or other_notation(texts[0]) != "a date":
        return None
    days = (*_DATE_FORMATS, *_RIVAL_DATE_FORMATS)
    forms = [day + time for day, time in product(days, _TIME_FORMATS)]
    found = [form for form in forms if all(_has_format(text, form) for text in texts)]
    return found[0] if len(found) == 1 and "%y" not in found[0] else None


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
