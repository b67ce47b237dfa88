"""Formats of files, by ending, first bytes or argument, and options for reading a CSV."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamkern.basics.errors import ConfigError
from streamkern.basics.values import checked_int
from streamkern.ingest.tables.number_style import THOUSANDS, NumberStyle

ENDINGS = {
    ".npy": "npy", ".npz": "npz", ".csv": "csv", ".tsv": "csv", ".txt": "csv",
    ".tab": "csv", ".data": "csv", ".dat": "csv",
    ".parquet": "parquet", ".pq": "parquet", ".parq": "parquet",
    ".arrow": "arrow", ".arrows": "arrow", ".feather": "arrow", ".ipc": "arrow",
    ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".h5": "hdf5", ".hdf5": "hdf5", ".hdf": "hdf5", ".h5ad": "hdf5", ".mat": "hdf5",
    ".nc": "netcdf", ".nc4": "netcdf", ".cdf": "netcdf", ".netcdf": "netcdf",
    ".svm": "svmlight", ".libsvm": "svmlight", ".svmlight": "svmlight",
    ".idx": "idx", ".zarr": "zarr",
}  # fmt: skip
TABLES = ("csv", "parquet", "arrow", "jsonl")
"""Formats with named columns, which include targets and weights."""
NAMED_ARRAYS = ("npz", "hdf5", "netcdf")
"""Formats of files that hold named arrays."""
_DELIMITERS = {"\\t": "\t", "tab": "\t", "blank": " ", "\\x01": "\x01"}
FORMATS = tuple(dict.fromkeys(ENDINGS.values()))


class FileForm(NamedTuple):
    """Format of input files, and how CSV files are written; None means not given.

    Attributes
    ----------
    format : str
        One of `FORMATS`, whatever the ending.
    names : tuple of str
        The columns of a CSV without a header line.
    header : bool
        Whether the first line of a CSV names the columns; None infers it from the file.
    delimiter : str
        Separator of the fields of a CSV, one character; a blank stands for one or more blanks or
        tabs. None infers it from the file.
    decimal : str
        Decimal sign of a number, "." or ",".
    encoding : str
        Encoding of the text of a CSV.
    skip_lines : int
        Lines above the header, or above the first row.
    thousands : str
        Separator of groups of three digits, one of `THOUSANDS`; "" for none.
    recorded : JSON
        `record` of earlier files of the same data, whose options are the defaults.
    """

    format: str | None = None
    names: tuple[str, ...] | None = None
    header: bool | None = None
    delimiter: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    skip_lines: int | None = None
    thousands: str | None = None
    recorded: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        format: str | None = None,
        names: str | Sequence[str] | None = None,
        header: bool | None = None,
        delimiter: str | None = None,
        decimal: str | None = None,
        encoding: str | None = None,
        skip_lines: int | None = None,
        thousands: str | None = None,
    ) -> FileForm:
        """Return the form for these arguments; raise ConfigError if one makes no sense."""
        format = "svmlight" if format == "libsvm" else format
        if format is not None and format not in FORMATS:
            raise ConfigError(f'format="{format}" is unknown; use one of {", ".join(FORMATS)}')
        given = (names,) if isinstance(names, str) else None if names is None else tuple(names)
        if given is not None:
            given = tuple(str(name).strip() for name in given)
            if not given or "" in given or len(set(given)) < len(given):
                raise ConfigError(f"names={names!r} must be names of columns, no two alike")
            if header:
                raise ConfigError(
                    "names= are those of a file without a header, and header=True says that it "
                    "has one; leave one of them out"
                )
        if header not in (None, True, False):
            raise ConfigError(f"header={header!r} must be True, False or None")
        if decimal not in (None, ".", ","):
            raise ConfigError(f'decimal="{decimal}" is unknown; use "." or ","')
        if thousands is not None and thousands not in ("", *THOUSANDS):
            raise ConfigError(
                f"thousands={thousands!r} is unknown; use one of {', '.join(map(repr, THOUSANDS))}"
            )
        if thousands and thousands == decimal:
            raise ConfigError(
                f'thousands="{thousands}" is also what decimal= says; give another one, or leave '
                "one out"
            )
        delimiter = _DELIMITERS.get(delimiter or "", delimiter)
        if delimiter is not None and not re.fullmatch(r"[^\w\"\r\n.+-]", str(delimiter)):
            raise ConfigError(
                f"delimiter={delimiter!r} must be one character that is in no number, such as ;"
            )
        if encoding is not None:
            encoding = _codec(encoding)
        if skip_lines is not None:
            skip_lines = checked_int("skip_lines", skip_lines, 0)
        return cls(format, given, header, delimiter, decimal, encoding, skip_lines, thousands)

    @property
    def style(self) -> NumberStyle:
        """Notation of numbers; if points group digits, the decimal sign is a comma."""
        usual = "," if self.thousands == "." else "."
        return NumberStyle(self.decimal or usual, self.thousands or "")

    def json(self) -> dict[str, Any]:
        """Return the options that were given, as JSON."""
        pairs = zip(self._fields, self, strict=True)
        found = {name: value for name, value in pairs if value is not None and name != "recorded"}
        return found | ({"names": list(self.names)} if self.names is not None else {})

    def record(self, kind: str, ending: str) -> dict[str, Any] | None:
        """Return the options by which later files of the same data are read; JSON, None for none.

        kind : the format of the file that was read
        ending : ending of its name, such as ".log"
        """
        found = self.json()
        if self.format is not None or self.recorded_kind(ending) is not None:
            found["endings"] = [ending]
        return {**found, "format": kind} if found else None

    def recorded_kind(self, ending: str) -> str | None:
        """Return the format that was given for an earlier file with this ending."""
        recorded = self.recorded or {}
        return recorded.get("format") if ending in recorded.get("endings", ()) else None

    def for_kind(self, kind: str) -> FileForm:
        """Return the form for files of a format, with the recorded options as defaults."""
        recorded = self.recorded or {}
        if recorded.get("format") != kind:
            return self
        usual = {name: recorded.get(name) for name in self._fields[1:-1]}
        if usual["names"] is not None:
            usual["names"] = None if self.header else tuple(usual["names"])
        if self.names is not None:
            usual["header"] = None
        asked = {name: value for name, value in self.json().items() if name != "names"}
        merged = self._replace(**{k: v for k, v in usual.items() if getattr(self, k) is None})
        if merged.thousands and merged.thousands == merged.style.decimal:
            # The option given now replaces the recorded one that contradicts it.
            merged = merged._replace(
                **{"decimal": None} if "thousands" in asked else {"thousands": None}
            )
        if self.skip_lines is not None:  # then a difference from earlier files is intended
            merged = merged._replace(recorded={**recorded, "skip_lines": None})
        return merged


NO_OPTIONS = FileForm()
"""The form of files without any options."""


def _codec(encoding: str) -> str:
    """Return Python's name of a text encoding."""
    try:
        "".encode(encoding)  # refuses codecs of bytes, such as base64
        return codecs.lookup(encoding).name
    except (LookupError, TypeError, UnicodeError):
        raise ConfigError(
            f'encoding="{encoding}" is unknown; use one of Python\'s, such as latin-1 or utf-16'
        ) from None
