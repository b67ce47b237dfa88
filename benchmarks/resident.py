"""Resident memory of a process, from /proc (Linux)."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def resident_bytes(key: str, pid: int | None = None) -> int:
    """Return the resident memory now ("VmRSS") or at its peak ("VmHWM").

    pid : of the process; this one by default. 0 is returned where there is no such process.
    """
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> None:
    """Let the peak begin with the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def begin_peak() -> int:
    """Give free memory back, reset the peak, and return the bytes that are resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    return resident_bytes("VmRSS")
