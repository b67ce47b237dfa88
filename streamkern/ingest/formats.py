"""Recognise the format of a file by its ending or first bytes, and hold options for reading it."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.values import checked_int
from streamkern.ingest.decompress import COMPRESSIONS
from streamkern.ingest.tables.numbers import THOUSANDS, NumberStyle

# Format of each ending of a file name.
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
_DELIMITER_NAMES = {"\\t": "\t", "tab": "\t", "blank": " ", "\\x01": "\x01"}
"""Delimiters by names that can be typed in a shell."""
FORMATS = tuple(dict.fromkeys(ENDINGS.values()))
"""Names of all formats."""


class FileForm(NamedTuple):
    """Format of input files, and how CSV files are written; None means not given.

    format : one of `FORMATS`, whatever the ending
    names : the columns of a CSV without a header line; before `normalise` also one name, or a list
    header : whether the first line of a CSV names the columns; None infers it from the file
    delimiter : separator of the fields of a CSV, one character; " " stands for one or more spaces
        or tabs; None infers it from the file
    decimal : decimal sign of a number, "." or ","
    encoding : encoding of the text of a CSV
    skip_lines : number of lines above the header, or above the first row
    thousands : separator of groups of three digits, one of `THOUSANDS`; "" for none
    earlier_record : `record` of earlier files of the same data, whose options are the defaults
    """

    format: str | None = None
    names: Any = None
    header: bool | None = None
    delimiter: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    skip_lines: int | None = None
    thousands: str | None = None
    earlier_record: Mapping[str, Any] | None = None

    def normalise(self) -> Self:
        """Return the form with options in one spelling; raise ConfigError if one makes no sense."""
        format = "svmlight" if self.format == "libsvm" else self.format
        if format is not None and format not in FORMATS:
            raise ConfigError(
                f"{mention('format', format)} is unknown", f"use one of {', '.join(FORMATS)}"
            )
        names = self._normalised_names()
        if self.header not in (None, True, False):
            raise ConfigError(
                f"{mention('header', self.header)} must be True, False or None",
                "leave it out, so that the first line decides",
            )
        # Signs of numbers must be known, and differ; the delimiter must not occur in numbers.
        if self.decimal not in (None, ".", ","):
            raise ConfigError(f"{mention('decimal', self.decimal)} is unknown", 'use "." or ","')
        if self.thousands not in (None, "", *THOUSANDS):
            raise ConfigError(
                f"{mention('thousands', self.thousands)} is unknown",
                f"use one of {', '.join(map(repr, THOUSANDS))}",
            )
        if self.thousands and self.thousands == self.decimal:
            raise ConfigError(
                f"{mention('thousands', self.thousands)} is the same character as "
                f"{mention('decimal=')}",
                "change one of them, or leave it out",
            )
        delimiter = _DELIMITER_NAMES.get(self.delimiter or "", self.delimiter)
        if delimiter is not None and not re.fullmatch(r"[^\w\"\r\n.+-]", str(delimiter)):
            raise ConfigError(
                f"{mention('delimiter', delimiter)} must be one character that is in no number; "
                "give for example ;"
            )
        encoding = None if self.encoding is None else _codec_name(self.encoding)
        skip_lines = self.skip_lines
        if skip_lines is not None:
            skip_lines = checked_int("skip_lines", skip_lines, 0)
        return self._replace(
            format=format, names=names, delimiter=delimiter, encoding=encoding,
            skip_lines=skip_lines,
        )  # fmt: skip

    def _normalised_names(self) -> tuple[str, ...] | None:
        """Return the names of columns; raise ConfigError if two are equal, or for a header."""
        if self.names is None:
            return None
        names = [self.names] if isinstance(self.names, str) else self.names
        names = tuple(str(name).strip() for name in names)
        if not names or "" in names or len(set(names)) < len(names):
            raise ConfigError(
                f"{mention('names', self.names)} must be different names of columns; rename "
                "those that occur twice"
            )
        if self.header:
            raise ConfigError(
                f"{mention('names=')} are for a file without a header, but "
                f"{mention('header', True)} is given",
                "leave one of them out",
            )
        return names

    @property
    def style(self) -> NumberStyle:
        """Notation of numbers; if points group digits, the decimal sign is a comma."""
        default_decimal = "," if self.thousands == "." else "."
        return NumberStyle(self.decimal or default_decimal, self.thousands or "")

    def json(self) -> dict[str, Any]:
        """Return the options that were given, as JSON."""
        pairs = zip(self._fields, self, strict=True)
        options = {
            name: value for name, value in pairs if value is not None and name != "earlier_record"
        }
        return options | ({"names": list(self.names)} if self.names is not None else {})

    def record(self, format_name: str, ending: str) -> dict[str, Any] | None:
        """Return the options by which later files of the same data are read; JSON, None for none.

        format_name : the format of the file that was read
        ending : ending of its name, such as ".log"
        """
        options = self.json()
        if self.format is not None or self.earlier_format(ending) is not None:
            options["endings"] = [ending]
        return {**options, "format": format_name} if options else None

    def earlier_format(self, ending: str) -> str | None:
        """Return the format that was given for an earlier file with this ending."""
        record = self.earlier_record or {}
        return record.get("format") if ending in record.get("endings", ()) else None

    def for_format(self, format_name: str) -> FileForm:
        """Return the form for files of a format, with the recorded options as defaults."""
        record = self.earlier_record or {}
        if record.get("format") != format_name:
            return self
        options = self._fields[1:-1]  # all but `format` and `earlier_record`
        defaults = {name: record.get(name) for name in options}
        if defaults["names"] is not None:
            defaults["names"] = None if self.header else tuple(defaults["names"])
        if self.names is not None:
            defaults["header"] = None
        merged = self._replace(**{k: v for k, v in defaults.items() if getattr(self, k) is None})
        if merged.thousands and merged.thousands == merged.style.decimal:
            # The option given now replaces the recorded one that contradicts it.
            contradicted: Any = "decimal" if self.thousands is not None else "thousands"
            merged = merged._replace(**{contradicted: None})
        if self.skip_lines is not None:  # then a difference from earlier files is intended
            merged = merged._replace(earlier_record={**record, "skip_lines": None})
        return merged


DEFAULT_FORM = FileForm()
"""The form of files for which no option is given."""


def _codec_name(encoding: str) -> str:
    """Return Python's name of a text encoding."""
    try:
        "".encode(encoding)  # refuses codecs of bytes, such as base64
        return codecs.lookup(encoding).name
    except (LookupError, TypeError, UnicodeError):
        raise ConfigError(
            f"{mention('encoding', encoding)} is unknown",
            "use an encoding of Python, such as latin-1 or utf-16",
        ) from None


HEAD_BYTES: Final = 4096
"""Number of bytes of a file that are read to recognise its format."""
IDX_DTYPES: Final = {
    0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8",
}  # fmt: skip
_MAGIC_BYTES: Final = {
    b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow", b"\x93NUMPY": "npy",
    b"\x89HDF\r\n\x1a\n": "hdf5", b"CDF\x01": "netcdf", b"CDF\x02": "netcdf", b"CDF\x05": "netcdf",
}  # fmt: skip
_COMPRESSION_MAGIC_BYTES: Final = {
    b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
}  # fmt: skip
_FORMAT_NAMES: Final = {
    "parquet": "a Parquet file", "arrow": "an Arrow IPC file", "npy": "a .npy file",
    "npz": "a .npz archive", "hdf5": "an HDF5 file", "netcdf": "a NetCDF file",
    "idx": "an IDX file", "jsonl": "a file of JSON lines", "svmlight": "an svmlight file",
}  # fmt: skip
_PANDAS_REMEDY: Final = (
    "convert it to a Parquet file, for example with pandas.{}({!r}).to_parquet({!r})"
)
_UNREAD_TEXT_FORMATS: Final = (
    (rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body)\b", "an HTML page, which a server may "
     "send in place of a file", "download the file again"),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the file itself",
     "get the file with git lfs pull"),
    (rb"\s*(%[^\n]*\s+)*@relation\b", "an ARFF file", "read it with scipy.io.arff.loadarff, and "
     "ingest a data frame of its rows"),
    (rb"\s*\[\s*[{\[]", "one array of JSON", "write one object per line, for example with "
        "pandas.read_json({path!r}).to_json('rows.jsonl', orient='records', lines=True)"),
)  # fmt: skip
"""Text formats that are not read: (pattern of the beginning, name, remedy)."""
_UNREAD_BINARY_FORMATS: Final = (
    (rb"MATLAB 5\.0", "a MATLAB file in a format before version 7.3",
     "read it with scipy.io.loadmat, and write its arrays with numpy.savez"),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|PK\x03\x04.{26}\[Content_Types\]", "an Excel file",
     "read_excel"),
    (rb"SQLite format 3\0", "a SQLite database",
     "read its table with pandas.read_sql, and ingest the data frame"),
    (rb"FEA1", "a Feather file of version 1", "read_feather"),
    (rb"ORC", "an ORC file", "read_orc"),
    (rb"\x80[\x02-\x05]", "a pickle", "read_pickle"),
    (rb"%PDF-", "a PDF", "write its table as a CSV"),
)  # fmt: skip
"""Binary formats that are not read, likewise. A remedy "read_..." names a function of pandas."""
_CONTROL_CHARACTERS: Final = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_BINARY_FORMATS: Final = ("parquet", "arrow", "npy", "npz", "hdf5", "netcdf", "idx")
_NUMBER_BYTES: Final = rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_SVMLIGHT_LINE: Final = re.compile(
    rb"(?:\s*#[^\n]*\n)*%b(?:,%b)*(?: +qid:[0-9]+)?(?:[ \t]+[0-9]+:%b)+[ \t]*(?:#[^\n]*)?\r?\n"
    % (_NUMBER_BYTES, _NUMBER_BYTES, _NUMBER_BYTES)
)


def is_idx(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is an IDX file."""
    return len(head) >= 4 and head[:2] == b"\0\0" and head[2] in IDX_DTYPES and head[3] > 0


def detect_content(
    head: bytes, path: str, format_name: str | None = None
) -> tuple[str | None, str] | None:
    """Return (format, message) for a file that begins with `head`; None if it may be a CSV.

    The format is None if the file cannot be read under its name and format: its format is not read
    at all, it is compressed, or it is text in place of a binary file. The message names the content
    and the remedy.

    format_name : the format as which the file was opened; if binary, text is recognised as well
    """
    is_text = is_utf8_text(head)
    flags = re.IGNORECASE | re.DOTALL if is_text else re.DOTALL
    for start, description, remedy in _UNREAD_TEXT_FORMATS if is_text else _UNREAD_BINARY_FORMATS:
        if re.match(start, head, flags):
            if remedy.startswith("read_"):
                stem = path.removesuffix(f".{path.rpartition('.')[2]}")
                remedy = _PANDAS_REMEDY.format(remedy, path, f"{stem}.parquet")
            return None, f"{description}; {remedy.replace('{path!r}', repr(path))}"
    readable = _format_of(head, is_text)
    if readable is not None:
        remedy = f"give {mention('format', readable)}, or rename it"
        return readable, f"{_FORMAT_NAMES[readable]}; {remedy}"
    if ending := detect_compression(head):
        words = f"compressed by {COMPRESSIONS[ending]}, but its name lacks the ending {ending}"
        return None, f"{words}; rename it to {path.rpartition('/')[2]}{ending}"
    if is_text and head.strip() and format_name in _BINARY_FORMATS:
        return None, f"text; give {mention('format', 'csv')} if it is a CSV, or rename it"
    return None


def is_utf8_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8 text without control characters."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4 or len(head) < HEAD_BYTES:  # else the end cuts a character
            return False
    return _CONTROL_CHARACTERS.search(head) is None


def detect_compression(head: bytes) -> str | None:
    """Return the ending that a compressed file should have; None if it is not compressed."""
    if is_utf8_text(head):
        return None
    magics = _COMPRESSION_MAGIC_BYTES.items()
    return next((ending for magic, ending in magics if head.startswith(magic)), None)


def _format_of(head: bytes, is_text: bool) -> str | None:
    """Return the format of a file that begins with `head`; None for a CSV or an unknown format."""
    if is_text:
        if _SVMLIGHT_LINE.match(head):
            return "svmlight"
        return "jsonl" if _is_json_line(head) else None
    if is_idx(head):
        return "idx"
    if re.match(rb"PK\x03\x04.{26}[^/]{0,200}?\.npy", head, re.DOTALL):
        return "npz"
    return next((name for magic, name in _MAGIC_BYTES.items() if head.startswith(magic)), None)


def _is_json_line(head: bytes) -> bool:
    """Return whether the first line is a JSON object, or the beginning of a long one."""
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    if not re.match(rb'\{\s*"', line):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return len(line) + 1 >= len(head)  # longer than the bytes read
