"""Recognise the format of a file by its first bytes, if its name gives none or a wrong one."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from streamkern.ingest.decompress import COMPRESSIONS

HEAD: Final = 4096
"""Number of bytes of a file that are read to recognise its format."""
IDX_DTYPES: Final = {
    0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8",
}  # fmt: skip
_MAGIC: Final = {
    b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow", b"\x93NUMPY": "npy",
    b"\x89HDF\r\n\x1a\n": "hdf5", b"CDF\x01": "netcdf", b"CDF\x02": "netcdf", b"CDF\x05": "netcdf",
}  # fmt: skip
_PACKED: Final = {
    b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
}  # fmt: skip
_NAMES: Final = {
    "parquet": "a Parquet file", "arrow": "an Arrow IPC file", "npy": "a .npy file",
    "npz": "a .npz archive", "hdf5": "an HDF5 file", "netcdf": "a NetCDF file",
    "idx": "an IDX file", "jsonl": "a file of JSON lines", "svmlight": "an svmlight file",
}  # fmt: skip
_CONVERTED: Final = "make a Parquet file of it, as by pandas.{}({!r}).to_parquet({!r})"
_TEXTS: Final = (
    (rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|head|body)\b", "a page of HTML, as a server sends "
     "in place of a file that it does not give", "get the file again from where it is"),
    (rb"version https://git-lfs", "a pointer of Git LFS, and not the file itself",
     "get the file with git lfs pull"),
    (rb"\s*(%[^\n]*\s+)*@relation\b", "an ARFF file", "read it by scipy.io.arff.loadarff, and "
     "ingest a frame of its rows"),
    (rb"\s*\[\s*[{\[]", "one array of JSON", "write one object a line, as by "
     "pandas.read_json({path!r}).to_json('rows.jsonl', orient='records', lines=True)"),
)  # fmt: skip
"""Text formats that are not read: pattern of the beginning, name, and remedy."""
_BINARIES: Final = (
    (rb"MATLAB 5\.0", "a file of MATLAB before version 7.3",
     "read it by scipy.io.loadmat, and write its arrays by numpy.savez"),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|PK\x03\x04.{26}\[Content_Types\]", "a file of Excel",
     "read_excel"),
    (rb"SQLite format 3\0", "a database of SQLite",
     "read its table by pandas.read_sql, and ingest the frame"),
    (rb"FEA1", "a file of Feather version 1", "read_feather"),
    (rb"ORC", "an ORC file", "read_orc"),
    (rb"\x80[\x02-\x05]", "a pickle", "read_pickle"),
    (rb"%PDF-", "a PDF", "write its table as a CSV"),
)  # fmt: skip
"""Binary formats that are not read, likewise; the remedy may be a function of pandas."""
_CONTROL: Final = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_OF_BYTES: Final = ("parquet", "arrow", "npy", "npz", "hdf5", "netcdf", "idx")
_NUMBER: Final = rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_SVMLIGHT: Final = re.compile(
    rb"(?:\s*#[^\n]*\n)*%b(?:,%b)*(?: +qid:[0-9]+)?(?:[ \t]+[0-9]+:%b)+[ \t]*(?:#[^\n]*)?\r?\n"
    % (_NUMBER, _NUMBER, _NUMBER)
)


class Content(NamedTuple):
    """Recognised content of a file: the format if it can be read, its name, and the remedy."""

    format: str | None
    words: str
    remedy: str


def is_idx(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is an IDX file."""
    return len(head) >= 4 and head[:2] == b"\0\0" and head[2] in IDX_DTYPES and head[3] > 0


def content_of(head: bytes, path: str, kind: str | None = None) -> Content | None:
    """Return the content of a file that begins with `head`; None if it is unknown or may be a CSV.

    kind : the format that the file was read as; text in place of an array is then recognised too
    """
    text = is_utf8_text(head)
    for start, words, remedy in _TEXTS if text else _BINARIES:
        if re.match(start, head, re.IGNORECASE | re.DOTALL if text else re.DOTALL):
            if remedy.startswith("read_"):
                stem = path.removesuffix(f".{path.rpartition('.')[2]}")
                remedy = _CONVERTED.format(remedy, path, f"{stem}.parquet")
            return Content(None, words, remedy.replace("{path!r}", repr(path)))
    found = _format_of(head, text)
    if found is not None:
        return Content(found, _NAMES[found], f'give format="{found}", or rename it')
    if ending := compression_of(head):
        words = f"compressed by {COMPRESSIONS[ending]}, and its name does not say so"
        return Content(None, words, f"rename it to {path.rpartition('/')[2]}{ending}")
    if text and head.strip() and kind in _OF_BYTES:
        return Content(None, "text", 'give format="csv" if it is a CSV, or rename it')
    return None


def is_utf8_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are UTF-8 text without control characters."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4 or len(head) < HEAD:  # else the end cuts a character
            return False
    return _CONTROL.search(head) is None


def compression_of(head: bytes) -> str | None:
    """Return the ending that a compressed file should have; None if it is not compressed."""
    if is_utf8_text(head):
        return None
    return next((_PACKED[magic] for magic in _PACKED if head.startswith(magic)), None)


def _format_of(head: bytes, text: bool) -> str | None:
    if text:
        if _SVMLIGHT.match(head):
            return "svmlight"
        return "jsonl" if _is_json_line(head) else None
    if is_idx(head):
        return "idx"
    if re.match(rb"PK\x03\x04.{26}[^/]{0,200}?\.npy", head, re.DOTALL):
        return "npz"
    return next((_MAGIC[magic] for magic in _MAGIC if head.startswith(magic)), None)


def _is_json_line(head: bytes) -> bool:
    line = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    if not re.match(rb'\{\s*"', line):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return len(line) + 1 >= len(head)  # longer than the bytes read
