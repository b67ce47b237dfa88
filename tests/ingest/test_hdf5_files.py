"""Check that HDF5 data that are incomplete, damaged, missing or elsewhere are refused."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from streamkern.basics.errors import DataError
from streamkern.ingest.ingest import ingest
from tests.ingest.read_arrays import open_input, read_arrays
from tests.raw_files import write_hdf5


def read(inputs: Any, y: Any = None, block_bytes: int = 1 << 20, **options: Any) -> Any:
    """Return X of all rows."""
    return read_arrays(inputs, y, block_bytes, **options)[0]


def test_unwritten_hdf5_chunks_are_refused(tmp_path: Path) -> None:
    for chunks in (None, (10, 3)):
        path = write_hdf5(tmp_path / "h.h5", y=np.arange(40) % 2)
        with h5py.File(path, "a") as file:
            X = file.create_dataset("X", (40, 3), "f8", chunks=chunks)
            if chunks:
                X[:30] = 1
        with pytest.raises(
            DataError, match=r"X of .*h\.h5 has parts that were never written.*fill"
        ):
            ingest(path, tmp_path / "out")
        assert ingest(path, tmp_path / f"s{chunks}", missing="fill").n_rows == 40
        with h5py.File(path, "a") as file:
            file["X"][:] = 1
        assert read(path).shape == (40, 3)


@pytest.mark.parametrize(
    ("skipped", "size", "right"),
    [(1, 44, True), (1, 36, False), (3, 40, True), (3, 39, False), (2, 44, False)],
)
def test_short_hdf5_chunks_are_refused(
    skipped: int, size: int, right: bool, tmp_path: Path
) -> None:
    """Write chunks of other lengths than their rows, for which HDF5 returns arbitrary memory.

    skipped : mask of the filters that the chunk skips: 1 is gzip, 2 are checksums
    """
    rows = np.arange(10, dtype="<f4")
    with h5py.File(tmp_path / "t.h5", "w") as file:
        X = file.create_dataset(
            "X", (20, 1), "<f4", chunks=(10, 1), compression="gzip", fletcher32=True
        )
        X[...], file["y"] = 1, np.arange(20)
        summed = rows.tobytes() + fletcher32(rows.tobytes()).to_bytes(4, "little")
        X.id.write_direct_chunk((10, 0), summed[:size], skipped)
    with ExitStack() as files:
        if right:
            actual = [block.X for block in open_input(tmp_path / "t.h5", files).blocks(0, 1 << 20)]
            np.testing.assert_array_equal(np.concatenate(actual)[10:, 0], rows)
        else:
            with pytest.raises(DataError, match=r"is damaged|filter"):
                list(open_input(tmp_path / "t.h5", files).blocks(0, 1 << 20))


def fletcher32(data: bytes) -> int:
    """Return the checksum as HDF5 computes it, for an even number of bytes."""
    low_sum = high_sum = 0
    for word in np.frombuffer(data, ">u2").tolist():
        low_sum = (low_sum + word) % 65535
        high_sum = (high_sum + low_sum) % 65535
    return high_sum << 16 | low_sum


def test_virtual_hdf5_without_source_is_refused(tmp_path: Path) -> None:
    source = write_hdf5(tmp_path / "source.h5", data=np.ones((40, 3)))
    path = write_hdf5(tmp_path / "v.h5", y=np.arange(40) % 2)
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((40, 3), "f8")
        layout[:] = h5py.VirtualSource("source.h5", "data", (40, 3))
        file.create_virtual_dataset("X", layout)
        half = h5py.VirtualLayout((40, 3), "f8")
        half[:20] = h5py.VirtualSource("source.h5", "data", (40, 3))[:20]
        file.create_virtual_dataset("half", half)
    with pytest.raises(DataError, match="is made of data in other files; give external"):
        read(path)
    np.testing.assert_array_equal(read(path, external=True), np.ones((40, 3)))
    with pytest.raises(DataError, match="virtual parts without a source"):
        read(path, x="half", external=True)
    source.unlink()
    with pytest.raises(DataError, match=r"source.h5, is not there"):
        read(path, external=True)
    assert not read(path, external=True, missing="fill").any()


def test_hdf5_links_to_other_files_need_permission(tmp_path: Path) -> None:
    """Check links, soft links that lead to links, and external storage."""
    write_hdf5(tmp_path / "other.h5", secret=np.ones((40, 3)))
    path = write_hdf5(tmp_path / "l.h5", y=np.arange(40) % 2)
    (tmp_path / "raw").write_bytes(np.ones((40, 3)).tobytes())
    with h5py.File(path, "a") as file:
        file["X"] = h5py.ExternalLink("other.h5", "/secret")
        file["soft"] = h5py.SoftLink("/X")
        location = [(str(tmp_path / "raw"), 0, 40 * 3 * 8)]
        file.create_dataset("apart", (40, 3), "f8", external=location)
    for name in ("X", "soft", "apart"):
        with pytest.raises(DataError, match=rf"{name} of .*l\.h5 is .*other file.*external=True"):
            read(path, x=name)
        np.testing.assert_array_equal(read(path, x=name, external=True), np.ones((40, 3)))
    (tmp_path / "raw").write_bytes(b"short")
    with pytest.raises(DataError, match="lacks data in"):
        read(path, x="apart", external=True)


def test_columns_of_hdf5_table_have_names(tmp_path: Path) -> None:
    rows = np.array([(1, 0.5, b"u"), (2, 1.5, b"v")], dtype=[("a", "i4"), ("b", "f8"), ("t", "S1")])
    path = write_hdf5(tmp_path / "t.h5", people=rows)
    with ExitStack() as files:
        reader = open_input(path, files, "t", columns=["b", "a"])
        (block,) = reader.blocks(0, 1 << 20)
    np.testing.assert_array_equal(block.X, [[0.5, 1], [1.5, 2]])
    assert block.y.tolist() == [b"u", b"v"]
    assert (reader.columns, reader.target_columns) == (("b", "a"), ("t",))
    assert read(path, y="t", x=["a"]).shape == (2, 1)
    with pytest.raises(DataError, match="lacks 'c'"):
        read(path, y="t", columns=["a", "b", "c"])


def test_missing_integers_of_r_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["X"], file["y"] = np.ones((6, 2)), np.array([1, 2, -(2**31), 1, 2, 1], "i4")
        file["y"].attrs["rhdf5-NA.OK"] = 1
    with pytest.raises(DataError, match=r"row 2 is missing: .*NA in R"):
        read_arrays(tmp_path / "r.h5")
