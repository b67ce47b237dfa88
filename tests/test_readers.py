"""Raw files are read right or refused: cut, altered, padded, enormous and odd ones."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numcodecs.zstd import Zstd

from streamkern.decompress import decompressed
from streamkern.errors import DataError, MemoryBudgetError
from streamkern.ingest import ingest
from streamkern.readers import open_reader
from tests.test_ingest import write_idx

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: bytes(Zstd(3, checksum=True).encode(data)),  # as the zstd command writes
}
ENDINGS = pytest.mark.parametrize("ending", PACK)
ROWS = np.random.default_rng(5).integers(0, 256, (300, 7)).astype(np.uint8)
LABELS = np.arange(300) % 3


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def read(inputs: Any, y: Any = None, block_bytes: int = 1 << 20, **wish: Any) -> Any:
    """All rows of X."""
    with ExitStack() as files:
        reader = open_reader(inputs, y, files, **wish)
        return np.concatenate([block.X for block in reader.blocks(0, block_bytes)])


# ------------------------------------------------------------------------------ compressed files


@ENDINGS
def test_every_flipped_bit_of_a_compressed_array_is_refused_or_harmless(
    tmp_path: Path, ending: str
) -> None:
    """W0."""
    whole = PACK[ending](npy(ROWS))
    path = tmp_path / f"X.npy.{ending}"
    rng = np.random.default_rng(1)
    refused = 0
    for bit in [
        *rng.integers(0, 8 * len(whole), 120),
        *range(8 * (len(whole) - 8), 8 * len(whole)),
    ]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            np.testing.assert_array_equal(read(path, LABELS), ROWS)
        except DataError:
            refused += 1
    assert refused > 100
    path.write_bytes(whole)
    np.testing.assert_array_equal(read(path, LABELS), ROWS)


@ENDINGS
@pytest.mark.parametrize("kind", ["npy", "idx", "csv"])
def test_a_compressed_file_is_read_to_its_end(tmp_path: Path, kind: str, ending: str) -> None:
    """W0: cut anywhere, followed by anything, of a second stream that is damaged."""
    X = np.ones((60, 4), np.float32)
    write_idx(tmp_path / "X.idx", X)
    text = "a,b,c,d,y\n" + "1,1,1,1,0\n" * 60
    data = {"npy": npy(X), "idx": (tmp_path / "X.idx").read_bytes(), "csv": text.encode()}[kind]
    whole = PACK[ending](data)
    path = tmp_path / f"X.{kind}.{ending}"
    y = None if kind == "csv" else LABELS[:60]
    path.write_bytes(whole)
    assert len(read(path, y)) == 60
    two = PACK[ending](data[:100]) + PACK[ending](data[100:])
    path.write_bytes(two)  # as pigz, pbzip2 and pzstd write
    assert len(read(path, y)) == 60
    second = len(PACK[ending](data[:100]))
    broken = bytearray(two)
    broken[second] ^= 1
    for bad in (
        whole[:-1],
        whole[:-6],
        whole[:20],
        whole + b"more",
        bytes(broken),
        two[: second + 3],
    ):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=rf"X\.{kind}\.{ending} .*(damaged|ends|empty)"):
            read(path, y)


def test_the_checksum_of_gzip_is_compared_before_a_store_is_complete(tmp_path: Path) -> None:
    """W0."""
    packed = bytearray(gzip.compress(npy(ROWS)))
    packed[-6] ^= 1
    (tmp_path / "X.npy.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"X\.npy\.gz does not decompress.*CRC"):
        ingest(tmp_path / "X.npy.gz", tmp_path / "out", y=LABELS)
    assert not (tmp_path / "out").exists()


@ENDINGS
def test_decompressed_files_can_be_rewound(ending: str) -> None:
    data = np.random.default_rng(0).bytes(1 << 20)
    file = decompressed(io.BytesIO(PACK[ending](data)), f"x.{ending}")
    for start, size in ((0, 10), (900_000, 5), (5, 300_000), (1 << 20, 1), (0, 1 << 21)):
        file.seek(start)
        assert file.read(size) == data[start : start + size]
    file.close()


# ------------------------------------------------------------------------------ arrays in files


@pytest.mark.parametrize("name", ["X.npy", "X.idx", "y.npy"])
def test_what_follows_an_array_is_refused(tmp_path: Path, name: str) -> None:
    """W0: also without compression."""
    write_idx(tmp_path / "X.idx", ROWS)
    (tmp_path / "X.npy").write_bytes(npy(ROWS))
    (tmp_path / "y.npy").write_bytes(npy(LABELS))
    with (tmp_path / name).open("ab") as file:
        file.write(npy(ROWS))
    X = tmp_path / ("X.npy" if name == "y.npy" else name)
    with pytest.raises(DataError, match=rf"{name} goes on after the last of its 300 rows"):
        read(X, tmp_path / "y.npy")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_rows_beyond_the_memory_are_refused_unread(tmp_path: Path, ending: str) -> None:
    """R4."""
    with io.BytesIO() as file:
        shape = {"descr": "|u1", "fortran_order": False, "shape": (2, 800_000_000)}
        np.lib.format.write_array_header_1_0(file, shape)
        head = file.getvalue()
    data = head + bytes(1 << 20)
    path = tmp_path / f"X.npy{ending}"
    path.write_bytes(gzip.compress(data) if ending else data)
    with pytest.raises(MemoryBudgetError, match=r"a row of .*X\.npy.* takes 80\d+ bytes"):
        ingest(path, tmp_path / "out", y=[0, 1], memory=64 << 20, chunk_mb=1)
    assert [k.name for k in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "head",
    [
        b"\x93NUMPY\x09\x00\x76\x00" + b"{'descr': '|u1', 'shape': (1, 1)}".ljust(118),
        b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'shape': ((((((".ljust(118),
        b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '|u1', 'fortran_order': False, "
        b"'shape': (-3, 2)}".ljust(77),
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 31) + b"{}",
        b"\x93NUMPY",
        b"",
    ],
)  # fmt: skip
def test_odd_npy_headers_get_a_sentence(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "X.npy").write_bytes(head)
    with pytest.raises(DataError, match=r"X\.npy is not a \.npy file"):
        read(tmp_path / "X.npy", LABELS)


def test_an_encrypted_archive_gets_a_sentence(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", X=ROWS, y=LABELS)
    with zipfile.ZipFile(tmp_path / "d.npz") as archive:
        offsets = [archive.start_dir, *(k.header_offset for k in archive.infolist())]
    data = bytearray((tmp_path / "d.npz").read_bytes())
    for offset in offsets:
        data[offset + (8 if data[offset + 2] == 1 else 6)] |= 1
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"X of .*d\.npz can not be read: .*encrypted"):
        read(tmp_path / "d.npz")
