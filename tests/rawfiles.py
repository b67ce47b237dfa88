"""Raw files that no library writes."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

from numpy.typing import NDArray


def write_idx(path: Path, array: NDArray[Any]) -> None:
    codes = {"uint8": 8, "int32": 12, "float32": 13}
    head = struct.pack(
        f">BBBB{array.ndim}I", 0, 0, codes[array.dtype.name], array.ndim, *array.shape
    )
    data = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
