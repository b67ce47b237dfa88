"""Formatting of names, sizes, times and tables, and `redact`.

All text passes `redact` before it is written: user names, passwords, signatures and tokens in URLs
never reach a log.
"""

from __future__ import annotations

import html
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

_SHOWN = 12  # names in a message
SCHEDULER_ADDRESS = r"^(tcp|tls|ws|wss|ucx)://[^/@\s]+:\d{1,5}$"
"""Pattern of the address of a Dask scheduler."""


def some(names: Sequence[str]) -> str:
    """Format the names, or the first of many, for a message."""
    return ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")


_ONE = re.compile(
    r"(?<![\d.,:])1 (row|value|chunk|column|feature|output|center|word|epoch|file|step)s\b"
)


def singular(text: str) -> str:
    """Return the text with "1 row" for "1 rows" and the like."""
    return _ONE.sub(r"1 \1", text)


def printable(text: str) -> str:
    """Return the text with control characters, which names of classes may hold, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def seconds_since(time: str) -> float:
    """Return the seconds since a time of `utc_now`, by the clock of this machine; at least 0."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


_MOST = 2**1000  # damaged headers may declare more than a float can hold


def size_text(n_bytes: int) -> str:
    """Format bytes as "90 KiB" or "8 MiB", to three digits."""
    size, unit = float(min(n_bytes, _MOST)), "bytes"
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
    right = [any(isinstance(row.get(name), numbers.Real) for row in rows) for name in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(w) if r else text.ljust(w)
            for text, w, r in zip(texts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, cells)])


def html_table_of(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and texts as an HTML table for a notebook, without colours; all is escaped."""
    left = 'style="text-align: left"'
    shown = ((printable(name), printable(singular(text))) for name, text in facts)
    rows = (
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(text)}</td></tr>"
        for name, text in shown
    )
    return f"<table><tbody>{''.join(rows)}</tbody></table>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):.4g}"
    return " ".join(redact(str(value)).split())


# One letter and one slash are a Windows drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:://|(?<=[A-Za-z0-9+.-]{2}):/))(\S+)")
# Without a scheme, as libraries name a bucket: key and secret, or a part of a query.
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
    contains a colon. A path that contains both is shortened too much; the alternative leaks.
    """
    shortened = _URL.sub(lambda m: m[1] + _without_secrets(m[2]), os.fspath(text))
    return SIGNED_QUERY.sub(r"\1***", _PAIR.sub("***@", shortened))


def _without_secrets(rest: str) -> str:
    head, at, tail = rest.rpartition("@")
    if at and re.search(r"[?#]", head):
        return "***"  # of a password, or before a query that contains an @
    if at and (":" in head or not re.search(r"[/?#]", head)):
        rest = tail
    return re.split(r"[?#]", rest, maxsplit=1)[0]
