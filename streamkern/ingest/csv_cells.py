"""Open CSV files as numbers, or as columns of text for an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.basics.optional import import_optional
from streamkern.basics.text import redact
from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.csv_files import CsvReader
from streamkern.ingest.csv_lines import recoded
from streamkern.ingest.formats import FileForm
from streamkern.ingest.input_files import FileOpener, Url


class CsvCells(CsvReader):
    """A `CsvReader` whose blocks hold X as an Arrow table of text, with null for missing cells."""

    def __init__(
        self,
        where: str,
        open_file: Any,
        asked: ReadRequest,
        identity: Any,
        form: FileForm | None = None,
    ) -> None:
        import_optional("pyarrow", "reading words, dates and missing values")
        super().__init__(where, open_file, asked, identity, form)
        if self.columns is None:
            raise DataError(
                f"{where} has no header line, and columns that are no numbers go by name; add one, "
                "or give their names with names="
            )
        self._usual_missing = list(asked.cells or ())

    def _by_arrow(self, content: bytes) -> tuple[Any, list[Any], list[Any], Any] | None:
        table = self._arrow_table(content, "string")
        beside = None if table is None else self._texts_beside(table)
        if beside is None:
            return None
        return self._kept_of(self._cells([table.column(str(k)) for k in self._features]), *beside)

    def _taken(self, n_rows: int) -> tuple[Callable[..., None], Callable[[], Any]]:
        texts: list[list[str]] = [[] for _ in self._features]

        def take(fields: Sequence[str], _place: Callable[[], str]) -> None:
            for own, k in zip(texts, self._features, strict=True):
                own.append(fields[k])

        arrow = import_optional("pyarrow")
        return take, lambda: self._cells([arrow.array(own, arrow.string()) for own in texts])

    def _cells(self, columns: Sequence[Any]) -> Any:
        """Return the table of these columns, with text stripped."""
        arrow, compute = import_optional("pyarrow"), import_optional("pyarrow.compute")
        missing = arrow.array(self._usual_missing, arrow.string())
        nothing = arrow.scalar(None, arrow.string())
        found = {}
        for k, column in zip(self._features, columns, strict=True):
            text = compute.utf8_trim_whitespace(column)
            if not self._style.plain:
                text = self._with_points(text, self._names[k])
            found[self._names[k]] = compute.if_else(compute.is_in(text, missing), nothing, text)
        return arrow.table(found)

    def _with_points(self, text: Any, name: str) -> Any:
        """Return numbers in Python's notation."""
        wrong = self._style.contradictions(text)
        if wrong.any():
            cell = str(text[int(np.argmax(wrong))])
            raise self._style.contradiction(cell, f"column {name!r} of {self._where}")
        return self._style.with_points(text)


def open_csv(url: Url, asked: ReadRequest, place: FileOpener) -> CsvReader:
    """Return a reader of a CSV file of numbers; the file is opened anew for every pass."""
    return opened_csv(CsvReader, url, asked, place)


def opened_csv(kind: type[CsvReader], url: Url, asked: ReadRequest, place: FileOpener) -> CsvReader:
    """Return a reader of this class for a CSV file, read in the form that was asked for."""
    form = place.form.for_kind("csv")
    opened = partial(place.open_once, url)
    if form.encoding not in (None, "utf-8"):
        opened = partial(recoded, opened, form.encoding, redact(url))
    said = form.json()
    identity = [place.identity(url), asked.json(), *([said] if said else [])]
    return kind(redact(url), opened, asked, identity, form)


def open_csv_cells(url: Url, asked: ReadRequest, place: FileOpener) -> CsvReader:
    """Return a reader of a CSV file as text; the file is opened anew for every pass."""
    return opened_csv(CsvCells, url, asked, place)
