"""What a run says about itself: names, sizes, tables, and `redact`.

No text leaves without passing `redact`: user names, passwords, signatures and tokens in URLs never
reach a log.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from streamkern.basics.redaction import redact as redact

_SHOWN = 12  # names in a message
SCHEDULER_ADDRESS = r"^(tcp|tls|ws|wss|ucx)://[^/@\s]+:\d{1,5}$"
"""What the address of a Dask scheduler looks like."""


def some(names: Sequence[str]) -> str:
    """The names, or the first of many, for a message."""
    return ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_MOST = 2**1000  # what damaged headers declare may be more than a float can be


def size_text(n_bytes: int) -> str:
    """Bytes as "90 KiB" or "8 MiB", to three digits."""
    size, unit = float(min(n_bytes, _MOST)), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"


def table(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """Plain text table: one line per row, numbers to the right, floats to four digits."""
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


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{float(value):.4g}"
    return " ".join(redact(str(value)).split())
