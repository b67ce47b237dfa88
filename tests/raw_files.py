"""Raw files, and places in memory."""

from __future__ import annotations

import gzip
import io
import struct
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


def write_idx(path: Path, array: NDArray[Any]) -> None:
    """Write an array as IDX, compressed if the name ends with .gz."""
    codes = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}
    head = struct.pack(
        f">BBBB{array.ndim}I", 0, 0, codes[array.dtype.name], array.ndim, *array.shape
    )
    data = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_hdf5(path: Path, **arrays: Any) -> Path:
    """Write arrays to an HDF5 file by name; return its path."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def memory_url() -> str:
    """Return a URL in memory that no other test uses."""
    return f"memory://tests/{uuid.uuid4().hex}"


def npy(array: Any) -> bytes:
    """Return the content of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
