"""The formats of files: by ending, by first bytes, or as a caller says; how a CSV is written."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from streamkern.basics.errors import ConfigError

ENDINGS = {
    ".npy": "npy", ".npz": "npz", ".csv": "csv", ".tsv": "csv", ".txt": "csv",
    ".tab": "csv", ".data": "csv", ".dat": "csv",
    ".parquet": "parquet", ".pq": "parquet", ".parq": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".h5": "hdf5", ".hdf5": "hdf5", ".hdf": "hdf5", ".h5ad": "hdf5", ".mat": "hdf5",
    ".nc": "netcdf", ".nc4": "netcdf", ".cdf": "netcdf", ".netcdf": "netcdf",
    ".svm": "svmlight", ".libsvm": "svmlight", ".svmlight": "svmlight",
    ".idx": "idx", ".zarr": "zarr",
}  # fmt: skip
TABLES = ("csv", "parquet", "arrow", "jsonl")
"""Formats whose columns have names, targets and weights among them."""
MAGIC = {
    b"PAR1": "parquet", b"ARROW1": "arrow", b"\x93NUMPY": "npy", b"\x89HDF\r\n\x1a\n": "hdf5",
    b"CDF\x01": "netcdf", b"CDF\x02": "netcdf", b"CDF\x05": "netcdf",
}  # fmt: skip
FORMATS = tuple(dict.fromkeys(ENDINGS.values()))


class FileForm(NamedTuple):
    """The format of input files, and how those that are CSV are written.

    Attributes
    ----------
    format : str or None
        One of `FORMATS`, whatever the ending says.
    names : tuple of str or None
        The columns of a CSV without a header line.
    header : bool or None
        Whether the first line of a CSV names the columns; None looks at the file.
    delimiter : str or None
        Of the fields of a CSV, one character; a blank stands for one or more blanks or tabs. None
        looks at the file.
    decimal : str
        "." or ",", before the fraction of a number.
    encoding : str
        Of the text of a CSV.
    skip_lines : int
        Lines above the header, or above the first row.
    """

    format: str | None = None
    names: tuple[str, ...] | None = None
    header: bool | None = None
    delimiter: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"
    skip_lines: int = 0

    @classmethod
    def of(
        cls,
        format: str | None = None,
        names: str | Sequence[str] | None = None,
        header: bool | None = None,
        delimiter: str | None = None,
        decimal: str = ".",
        encoding: str = "utf-8",
        skip_lines: int = 0,
    ) -> FileForm:
        """Return the form that these arguments ask for; ConfigError where one makes no sense."""
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
        if decimal not in (".", ","):
            raise ConfigError(f'decimal="{decimal}" is unknown; use "." or ","')
        delimiter = {"\\t": "\t", "tab": "\t", "blank": " "}.get(delimiter or "", delimiter)
        if delimiter is not None and not re.fullmatch(r"[^\w\"\r\n.+-]", delimiter):
            raise ConfigError(
                f"delimiter={delimiter!r} must be one character that is in no number, such as ;"
            )
        if delimiter == decimal:
            raise ConfigError(f"delimiter={delimiter!r} is also what decimal= says; give another")
        try:
            "".encode(encoding)  # a codec of bytes, such as base64, is refused
            encoding = codecs.lookup(encoding).name
        except (LookupError, UnicodeError):
            raise ConfigError(
                f'encoding="{encoding}" is unknown; use one of Python\'s, such as latin-1 or utf-16'
            ) from None
        if skip_lines < 0:
            raise ConfigError(f"skip_lines={skip_lines} must be 0 or more")
        return cls(format, given, header, delimiter, decimal, encoding, skip_lines)

    def json(self) -> dict[str, Any]:
        """Return what was asked for beyond the defaults; JSON."""
        usual = type(self)()
        pairs = zip(self._fields, self, usual, strict=True)
        return {name: value for name, value, default in pairs if value != default}
