"""Raw files, and places in memory."""

from __future__ import annotations

import gzip
import io
import struct
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_idx(path: Path, array: NDArray[Any]) -> None:
    codes = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}
    head = struct.pack(
        f">BBBB{array.ndim}I", 0, 0, codes[array.dtype.name], array.ndim, *array.shape
    )
    data = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def memory_url() -> str:
    """Return a URL in memory that no other test uses."""
    return f"memory://tests/{uuid.uuid4().hex}"


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
