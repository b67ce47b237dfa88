"""Format names, sizes, times and tables, and remove secrets from URLs.

All text passes `redact` before it is written, so that user names, passwords, signatures and tokens
in URLs never reach a log.
"""

from __future__ import annotations

import html
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

_MAX_NAMES = 12  # in a message
SCHEDULER_ADDRESS = r"^(tcp|tls|ws|wss|ucx)://[^/@\s]+:\d{1,5}$"
"""Pattern of the address of a Dask scheduler."""


def some(names: Sequence[str]) -> str:
    """Format the names, or the first of many, for a message."""
    return ", ".join(map(repr, names[:_MAX_NAMES])) + (", ..." if len(names) > _MAX_NAMES else "")


def first_names_text(names: Sequence[object]) -> str:
    """Return the names, or the first of many, as text without quotes."""
    return ", ".join(map(str, names[:_MAX_NAMES])) + (", ..." if len(names) > _MAX_NAMES else "")


_PLURAL_OF_ONE = re.compile(
    r"(?<![\d.,:])1 (row|value|chunk|column|feature|output|center|word|epoch|file|step)s\b"
)


def use_singular(text: str) -> str:
    """Return the text with "1 row" for "1 rows" and the like."""
    return _PLURAL_OF_ONE.sub(r"1 \1", text)


def escape_unprintable(text: str) -> str:
    """Return the text with control characters, which class names may hold, as escape sequences."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def seconds_since(time: str) -> float:
    """Return the seconds since a time from `utc_now`, by the clock of this machine; at least 0."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


_MAX_BYTES = 2**1000  # damaged headers may declare more than a float can hold


def size_text(n_bytes: int) -> str:
    """Format bytes as "90 KiB" or "8 MiB", to three digits."""
    size, unit = float(min(n_bytes, _MAX_BYTES)), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"


def time_text(seconds: float) -> str:
    """Format a duration: "12 s", "3:05 min", "2:10 h", "3.4 days"; "?" if unknown."""
    if not math.isfinite(seconds):
        return "?"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60}:{rounded % 60:02} min"
    if rounded < 48 * 3600:
        return f"{rounded // 3600}:{rounded % 3600 // 60:02} h"
    return f"{seconds / 86400:.1f} days"


def text_table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Format a plain text table: one line per row, numbers right-aligned, floats to four digits."""
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max([len(name), *(len(line[j]) for line in cells)]) for j, name in enumerate(columns)]
    numeric = [any(isinstance(row.get(name), numbers.Real) for row in rows) for name in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(texts, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, cells)])


def facts_html_table(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and texts as an HTML table for a notebook, escaped and without colours."""
    style = 'style="text-align: left"'
    printed = (
        (escape_unprintable(name), escape_unprintable(use_singular(text))) for name, text in facts
    )
    rows = (
        f"<tr><th {style}>{html.escape(name)}</th><td {style}>{html.escape(text)}</td></tr>"
        for name, text in printed
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _cell(value: object) -> str:
    """Return a value as one line of redacted text; "" for None."""
    if value is None:
        return ""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):.4g}"
    return " ".join(redact(str(value)).split())


# A scheme may be followed by one slash, but a single letter with one slash is a Windows drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:://|(?<=[A-Za-z0-9+.-]{2}):/))(\S+)")
# "key:secret@bucket" without a scheme, as libraries name a bucket: a user name, a colon that no
# slash follows, and text up to an "@" in front of a letter, a digit or "*".
_PAIR = re.compile(r"""[^\s/'"(\[{<=,:]+:(?!/)[^\s'":]*[^\s'":/]@(?=[\w*])""")
SIGNED_QUERY = re.compile(
    r"(?i)((?:x-amz-[\w-]+|awsaccesskeyid|signature|sig|token|secret|password|access_?key)=)[^\s&'\"]+"
)
"""Pattern of a signature or token in the query of a URL."""

SECRET_NAME = re.compile(r"(?i)secret|token|passw|credential|signature|key|user|sas|pwd")
"""Pattern of names of fields and options whose values are secret."""


def redact(text: str | os.PathLike[str]) -> str:
    """Remove user info, query and fragment from every URL in a text.

    A raw AWS secret may contain a slash, so everything before the *last* ``@`` is removed if it
    contains a colon. A path that contains both characters loses a part that is not secret.
    """
    shortened = _URL.sub(lambda m: m[1] + _without_secrets(m[2]), os.fspath(text))
    return SIGNED_QUERY.sub(r"\1***", _PAIR.sub("***@", shortened))


def _without_secrets(address: str) -> str:
    """Return the part of a URL after its scheme, without user info, query and fragment."""
    head, separator, tail = address.rpartition("@")
    if separator and re.search(r"[?#]", head):
        return "***"  # the ? or # may belong to a password, or the @ to a query
    if separator and (":" in head or not re.search(r"[/?#]", head)):
        address = tail
    return re.split(r"[?#]", address, maxsplit=1)[0]
