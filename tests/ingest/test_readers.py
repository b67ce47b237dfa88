"""Check that compressed, cut, altered or huge files are read correctly or refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray
from numcodecs.zstd import Zstd

from streamkern.basics.errors import DataError, MemoryBudgetError
from streamkern.ingest.decompress import open_decompressed
from streamkern.ingest.ingest import ingest
from tests.ingest.read_arrays import open_input, read_arrays
from tests.raw_files import npy, write_hdf5, write_idx

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: bytes(Zstd(3, checksum=True).encode(data)),  # as the zstd command writes
}
ENDINGS = pytest.mark.parametrize("suffix", PACK)
ROWS = np.random.default_rng(5).integers(0, 256, (300, 7)).astype(np.uint8)
LABELS = np.arange(300) % 3


def read(inputs: Any, y: Any = None, block_bytes: int = 1 << 20, **options: Any) -> Any:
    """Return X of all rows."""
    return read_arrays(inputs, y, block_bytes, **options)[0]


# ------------------------------------------------------------------------------ compressed files


@ENDINGS
def test_flipped_bit_of_compressed_array_is_refused_or_harmless(
    tmp_path: Path, suffix: str
) -> None:
    full = PACK[suffix](npy(ROWS))
    path = tmp_path / f"X.npy.{suffix}"
    rng = np.random.default_rng(1)
    n_refused = 0
    trailer_bits = range(8 * (len(full) - 8), 8 * len(full))
    for bit in [*rng.integers(0, 8 * len(full), 120), *trailer_bits]:
        data = bytearray(full)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            np.testing.assert_array_equal(read(path, LABELS), ROWS)
        except DataError:
            n_refused += 1
    assert n_refused > 100
    path.write_bytes(full)
    np.testing.assert_array_equal(read(path, LABELS), ROWS)


@ENDINGS
@pytest.mark.parametrize("kind", ["npy", "idx", "csv"])
def test_compressed_file_is_read_to_its_end(tmp_path: Path, kind: str, suffix: str) -> None:
    """Check whole, cut and continued files, and files of two streams, of which one is damaged."""
    X = np.ones((60, 4), np.float32)
    write_idx(tmp_path / "X.idx", X)
    text = "a,b,c,d,y\n" + "1,1,1,1,0\n" * 60
    data = {"npy": npy(X), "idx": (tmp_path / "X.idx").read_bytes(), "csv": text.encode()}[kind]
    full = PACK[suffix](data)
    path = tmp_path / f"X.{kind}.{suffix}"
    y = None if kind == "csv" else LABELS[:60]
    path.write_bytes(full)
    assert len(read(path, y)) == 60
    first_stream = PACK[suffix](data[:100])
    two_streams = first_stream + PACK[suffix](data[100:])
    path.write_bytes(two_streams)  # as pigz, pbzip2 and pzstd write
    assert len(read(path, y)) == 60
    broken, cut = bytearray(two_streams), two_streams[: len(first_stream) + 3]
    broken[len(first_stream)] ^= 1
    for damaged in (full[:-1], full[:-6], full[:20], full + b"more", bytes(broken), cut):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"X\.{kind}\.{suffix} .*(damaged|ends|empty)"):
            read(path, y)


def test_compressed_parquet_hdf5_and_netcdf_are_read(tmp_path: Path) -> None:
    table = pandas.DataFrame({"a": ROWS[:, 0], "b": ROWS[:, 1], "y": LABELS})
    table.to_parquet(tmp_path / "t.parquet")
    write_hdf5(tmp_path / "t.h5", X=ROWS, y=LABELS)
    data = xarray.Dataset({"X": (("n", "d"), ROWS), "y": ("n", LABELS)})
    data.to_netcdf(tmp_path / "t.nc", engine="h5netcdf")
    data.astype("f4").to_netcdf(tmp_path / "classic.nc", engine="scipy")
    for name in ("t.parquet", "t.h5", "t.nc", "classic.nc"):
        plain = ingest(tmp_path / name, tmp_path / f"{name}.zarr", y="y", seed=0)
        for suffix, pack in (("gz", gzip.compress), ("bz2", bz2.compress)):
            packed = tmp_path / f"{name}.{suffix}"
            packed.write_bytes(pack((tmp_path / name).read_bytes()))
            spec = ingest(packed, tmp_path / f"{packed.name}.zarr", y="y", seed=0)
            assert spec.class_counts == plain.class_counts, packed.name
            np.testing.assert_array_equal(spec.mean, plain.mean)


@ENDINGS
def test_decompressed_files_can_be_rewound(suffix: str) -> None:
    data = np.random.default_rng(0).bytes(1 << 20)
    file = open_decompressed(io.BytesIO(PACK[suffix](data)), f"x.{suffix}")
    for start, size in ((0, 10), (900_000, 5), (5, 300_000), (1 << 20, 1), (0, 1 << 21)):
        file.seek(start)
        assert file.read(size) == data[start : start + size]
    assert (file.seek(-5, 2), file.read()) == ((1 << 20) - 5, data[-5:])
    file.close()


# ------------------------------------------------------------------------------ arrays in files


@pytest.mark.parametrize("name", ["X.npy", "X.idx", "y.npy"])
def test_bytes_after_an_array_are_refused(tmp_path: Path, name: str) -> None:
    write_idx(tmp_path / "X.idx", ROWS)
    (tmp_path / "X.npy").write_bytes(npy(ROWS))
    (tmp_path / "y.npy").write_bytes(npy(LABELS))
    with (tmp_path / name).open("ab") as file:
        file.write(npy(ROWS))
    X = tmp_path / ("X.npy" if name == "y.npy" else name)
    with pytest.raises(DataError, match=rf"{name} has more bytes than its 300 rows need"):
        read(X, tmp_path / "y.npy")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_rows_beyond_memory_are_refused_unread(tmp_path: Path, suffix: str) -> None:
    with io.BytesIO() as file:
        shape = {"descr": "|u1", "fortran_order": False, "shape": (2, 800_000_000)}
        np.lib.format.write_array_header_1_0(file, shape)
        head = file.getvalue()
    data = head + bytes(1 << 20)
    path = tmp_path / f"X.npy{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    message = r"a row of .*X\.npy.* takes 763 MiB, but memory= allows"
    with pytest.raises(MemoryBudgetError, match=message):
        ingest(path, tmp_path / "out", y=[0, 1], memory=64 << 20, chunk_mb=1)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "head",
    [
        b"\x93NUMPY\x09\x00\x76\x00" + b"{'descr': '|u1', 'shape': (1, 1)}".ljust(118),
        b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'shape': ((((((".ljust(118),
        b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'fortran_order': False, "
        b"'shape': (-3, 2)}".ljust(77),
        b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', b'shape': (1, 1), 3: 4}".ljust(118),
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + b"{}",
        b"\x93NUMPY",
        b"",
    ],
)  # fmt: skip
def test_invalid_npy_headers_are_refused_in_one_sentence(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "X.npy").write_bytes(head)
    with pytest.raises(DataError, match=r"X\.npy is (not a \.npy file|empty)"):
        read(tmp_path / "X.npy", LABELS)


# ------------------------------------------------------------------------------------------ Parquet


def write_parquet(path: Path, **columns: Any) -> Path:
    """Write columns to a Parquet file; return its path."""
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("fixed", [False, True])
def test_parquet_lists_are_read_by_offsets(tmp_path: Path, fixed: bool) -> None:
    """Check lists from a row in the middle, with row groups that a batch does not divide."""
    X = np.arange(300.0).reshape(100, 3)
    kind = pa.list_(pa.float64(), 3) if fixed else pa.list_(pa.float64())
    table = pa.table({"X": pa.array(X.tolist(), kind), "y": np.arange(100) % 2})
    pq.write_table(table, tmp_path / "l.parquet", row_group_size=37)
    with ExitStack() as files:
        reader = open_input(tmp_path / "l.parquet", files, "y")
        for start in (0, 5, 37, 99):
            blocks = list(reader.blocks(start, 8 * 3 * 10))
            np.testing.assert_array_equal(np.concatenate([block.X for block in blocks]), X[start:])


def test_row_groups_with_wrong_counts_are_refused(tmp_path: Path) -> None:
    """Check a damaged footer with 8 rows in place of 10, which misaligned lists and labels."""
    path, X = tmp_path / "t.parquet", [[1.0, 2], [3.0, 4]] * 12
    pq.write_table(pa.table({"X": X, "y": list("ab") * 12}), path, row_group_size=10)
    content, n_refused = path.read_bytes(), 0
    ten, eight = b"\x16\x14", b"\x16\x10"  # as 64-bit fields of Thrift
    for match in re.finditer(ten, content):
        path.write_bytes(content[: match.start()] + eight + content[match.end() :])
        with ExitStack() as files:
            try:
                blocks = list(open_input(path, files, "y").blocks(0, 1 << 20))
            except DataError as error:
                n_refused += bool(re.search("is damaged: .* rows", str(error)))
            else:
                assert np.concatenate([block.X for block in blocks]).tolist() == X
    assert n_refused == 2  # groups of ten rows


@pytest.mark.parametrize("directory", [False, True])
def test_undecodable_archive_names_are_refused(tmp_path: Path, directory: bool) -> None:
    """Check names that are flagged as UTF-8 and are not, before an entry and in the directory."""
    np.savez(tmp_path / "w.npz", X=ROWS, y=LABELS)
    with zipfile.ZipFile(tmp_path / "w.npz") as archive:
        entry, directory_start = archive.getinfo("X.npy").header_offset, archive.start_dir
    data = bytearray((tmp_path / "w.npz").read_bytes())
    flags, name = entry + 6, entry + 30
    if directory:
        flags, name = directory_start + 8, directory_start + 46
    data[flags + 1] |= 8
    data[name] = 0xC0
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"d\.npz (is not a \.npz file|does not decompress)"):
        read(tmp_path / "d.npz", "y")
