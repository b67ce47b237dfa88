"""Check that cut, altered, padded or huge raw files are read correctly or refused."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd

from streamkern.basics.errors import DataError, MemoryBudgetError
from streamkern.ingest.append import append
from streamkern.ingest.decompress import open_decompressed
from streamkern.ingest.ingest import ingest
from tests.ingest.read_arrays import open_input, read_arrays
from tests.raw_files import npy, write_hdf5, write_idx
from tests.traced_memory import traced_memory

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
    refused = 0
    trailer_bits = range(8 * (len(full) - 8), 8 * len(full))
    for bit in [*rng.integers(0, 8 * len(full), 120), *trailer_bits]:
        data = bytearray(full)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            np.testing.assert_array_equal(read(path, LABELS), ROWS)
        except DataError:
            refused += 1
    assert refused > 100
    path.write_bytes(full)
    np.testing.assert_array_equal(read(path, LABELS), ROWS)


@ENDINGS
@pytest.mark.parametrize("kind", ["npy", "idx", "csv"])
def test_compressed_file_is_read_to_its_end(tmp_path: Path, kind: str, suffix: str) -> None:
    """Check files that are cut anywhere, followed by other bytes, or have a damaged second
    stream."""
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
    """Check Parquet, HDF5 and NetCDF."""
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
    """Check that additional bytes after an array are refused, also without compression."""
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
    assert [k.name for k in tmp_path.iterdir()] == [path.name]


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


# ---------------------------------------------------------------------------------------------- CSV


def parse_by_csv_module(text: str) -> tuple[list[list[float]], list[str]]:
    """Return X, and the labels in the last column, by Python's csv module, line by line."""
    lines = [line for line in text.split("\n")[1:] if line.strip(" ")]
    rows = [next(csv.reader([line], strict=True)) for line in lines]
    return [[float(k) for k in row[:-1]] for row in rows], [row[-1].strip() for row in rows]


def read_csv_rows(path: Path, block_bytes: int = 1 << 20, start: int = 0) -> tuple[Any, list[str]]:
    """Return X and the labels of the rows of a CSV from `start` on."""
    with ExitStack() as files:
        reader = open_input(path, files, "t")
        blocks = list(reader.blocks(start, block_bytes))
    X = np.concatenate([block.X for block in blocks])
    return X, [label for block in blocks for label in block.y.tolist()]


NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**25), 10**25).map(str),
    st.sampled_from(["1.", ".5", "+7", "-0", "1E5", "1e-400", " 2.5 ", "\t3", "1e+3"]),
)
ODD_NUMBERS = st.sampled_from(["", "1_0", "0x10", "1d5", "nan(3)", "٣", "1,", "x", "\u00a01"])
WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters='\n\r"\0,', exclude_categories=["Cs"]),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("ignore:.*whole numbers above 2")
@given(
    rows=st.lists(st.tuples(NUMBERS, NUMBERS, WORDS, st.booleans()), min_size=1, max_size=12),
    block_bytes=st.integers(700, 2000),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    start=st.integers(0, 14),
    blank=st.booleans(),
    data=st.data(),
)
def test_both_csv_parsers_equal_csv_module(
    tmp_path_factory: Any, rows: Any, block_bytes: int, end: str, start: int, blank: bool, data: Any
) -> None:
    """Check both parsers with any size of pieces and any first row."""
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    lines = [
        f'"{a}",{b},"{word}x"' if quoted else f"{a},{b},{word}x" for a, b, word, quoted in rows
    ]
    text = end.join(["a,b,t", *lines, *(["", "  "] if blank else [])])
    text += end if data.draw(st.booleans()) else ""
    path.write_bytes(text.encode())
    lines = ["a,b,t", *lines]
    expected_X, expected_labels = parse_by_csv_module("\n".join(lines))
    for hidden in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if hidden:
                patch.setitem(sys.modules, "pyarrow.csv", None)
            if start >= len(rows):
                with pytest.raises(ValueError, match="concatenate"):
                    read_csv_rows(path, block_bytes, start)
                continue
            X, labels = read_csv_rows(path, block_bytes, start)
        np.testing.assert_array_equal(X, expected_X[start:])
        assert labels == expected_labels[start:]


@settings(max_examples=150, deadline=None)
@given(
    cells=st.lists(
        st.tuples(NUMBERS | ODD_NUMBERS, NUMBERS | ODD_NUMBERS, WORDS), min_size=1, max_size=6
    )
)
def test_both_csv_parsers_refuse_the_same_files(tmp_path_factory: Any, cells: Any) -> None:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_bytes("\n".join(["a,b,t", *(",".join(row) for row in cells)]).encode())
    results: list[Any] = []
    for hidden in (False, True):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # words with commas may look like rows with names
            if hidden:
                patch.setitem(sys.modules, "pyarrow.csv", None)
            try:
                X, labels = read_csv_rows(path)
                results.append((X.tolist(), labels))
            except DataError as error:
                results.append(str(error))
    assert repr(results[0]) == repr(results[1])


@pytest.fixture(params=["pyarrow", "csv"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse CSV files by pyarrow, or, if it is not installed, by the csv module."""
    if request.param == "csv":
        monkeypatch.setitem(sys.modules, "pyarrow.csv", None)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (['3,4,"Oslo', "5,6,Rome", "7,8,Bonn", '9,10,Lima"', "11,12,Rome"], 3),
        (["1,2,Rome"] * 50 + ['1,2,"Oslo'] + ["1,2,Rome"] * 40 + ['1,2,Pa"ris', '1,2,"x"'], 53),
        (["1,2,Rome"] * 4990 + ['1,2,"Oslo'] + ["1,2,Rome"] * 9, 4993),
        (['3,4,"Os"lo'], 3),
        (['3,"4,x'], 3),
    ],
)
def test_stray_quote_is_refused_by_line(tmp_path: Path, rows: list[str], line: int) -> None:
    (tmp_path / "s.csv").write_text("\n".join(["a,b,city", "1,2,Rome", *rows]) + "\n")
    with pytest.raises(DataError, match=rf"s\.csv, row {line - 2} \(line {line}\) .*quote"):
        ingest(tmp_path / "s.csv", tmp_path / "out", y="city")
    assert not (tmp_path / "out").exists()


def test_quote_inside_a_field_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text('a,t\n1,Pa"ris\n2,"Lo ""n"" don"\n"3","x,y"\n')
    X, labels = read_csv_rows(tmp_path / "s.csv")
    assert (X[:, 0].tolist(), labels) == ([1, 2, 3], ['Pa"ris', 'Lo "n" don', "x,y"])


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_csv_in_one_line_is_refused_within_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.csv{suffix}"
    with gzip.open(path, "wb", 1) if suffix else path.open("wb") as file:
        file.write(b"a,b,t\n1,2,3\n")
        for _ in range(100):
            file.write(b"1," * (1 << 20))
    with (
        traced_memory() as traced,
        pytest.raises(DataError, match=r"line 3 of .*t\.csv.* is longer than 2 MiB"),
    ):
        ingest(path, tmp_path / "out", y="t", memory=64 << 20, chunk_mb=1)
    assert traced.peak < 64 << 20
    path.write_bytes(gzip.compress(b"1," * (5 << 20)) if suffix else b"1," * (5 << 20))
    with pytest.raises(DataError, match=r"line 1 of .* is longer than"):
        ingest(path, tmp_path / "out", y="t", memory=64 << 20, chunk_mb=1)


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,t\n1,x\n2,é\n".encode("latin-1"),
            r"line 3 of .* byte 0xe9, which is not UTF-8; .*encoding=",
        ),
        ("a,t\n1,x\n".encode("utf-16"), r"line 1 of .* not UTF-8"),
        ("a,t\n1,x\n".encode("utf-16-le"), r"line 1 of .* null byte"),
        (
            b'a,t\n1,"' + b"x" * 140_000 + b'"\n',
            r"t.csv, row 0 \(line 2\) has a field of more than 131072",
        ),
        (b'a,"' + b"x" * 140_000 + b'"\n1,2\n', "line 1 of .* has a field of more than 131072"),
        (b"a,t\n1," + b"x" * 5000 + b"\n", r"column 't' has 5000 characters"),
        (b"a,t\n1," + b"7" * 5000 + b"\n", r"column 't' has 5000 characters"),
        (b"5.1,3.5,setosa\n4.9,3.0,setosa\n", "may be a header or a row; .*names="),
        (b"a,2019,u\nx,1,2\n", "may be a header or a row; .*names="),
    ],
)
def test_invalid_csv_is_refused_in_one_sentence(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(DataError, match=message):
        ingest(tmp_path / "t.csv", tmp_path / "out", y="t")


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
            np.testing.assert_array_equal(np.concatenate([k.X for k in blocks]), X[start:])


def test_row_groups_with_wrong_counts_are_refused(tmp_path: Path) -> None:
    """Check a damaged footer with 8 rows in place of 10, which misaligned lists and labels."""
    path, X = tmp_path / "t.parquet", [[1.0, 2], [3.0, 4]] * 12
    pq.write_table(pa.table({"X": X, "y": list("ab") * 12}), path, row_group_size=10)
    data, ten, refused = path.read_bytes(), b"\x16\x14", 0  # a 64-bit field of Thrift's
    for actual in re.finditer(ten, data):
        path.write_bytes(data[: actual.start()] + b"\x16\x10" + data[actual.end() :])
        with ExitStack() as files:
            try:
                blocks = list(open_input(path, files, "y").blocks(0, 1 << 20))
            except DataError as error:
                refused += bool(re.search("is damaged: .* rows", str(error)))
            else:
                assert np.concatenate([block.X for block in blocks]).tolist() == X
    assert refused == 2  # groups of ten rows


# ------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("kind", ["npy", "parquet", "array"])
def test_labels_above_2_63_are_exact(tmp_path: Path, kind: str) -> None:
    y = np.array([2**64 - 1, 0, 2**63, 2**64 - 1], np.uint64)
    X = np.eye(4, dtype=np.float32)
    inputs: Any = X
    if kind == "npy":
        np.save(tmp_path / "X.npy", X)
        inputs = tmp_path / "X.npy"
    elif kind == "parquet":
        inputs = write_parquet(tmp_path / "t.parquet", X=X.tolist(), y=y)
    spec = ingest(inputs, tmp_path / "s", y="y" if kind == "parquet" else y, shuffle=False)
    assert spec.classes == ("0", str(2**63), str(2**64 - 1))
    assert spec.class_counts == (1, 1, 2)


# --------------------------------------------------------------------------------------------- HDF5


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
    """Check that short chunks are refused, because HDF5 returns arbitrary memory. Skipped filters
    of a chunk: 1 is gzip, 2 are checksums."""
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
            actual = [k.X for k in open_input(tmp_path / "t.h5", files).blocks(0, 1 << 20)]
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


@pytest.mark.parametrize("directory", [False, True])
def test_undecodable_archive_names_are_refused(tmp_path: Path, directory: bool) -> None:
    """Check names that are flagged as UTF-8 and are not, before an entry and in the directory."""
    np.savez(tmp_path / "w.npz", X=ROWS, y=LABELS)
    with zipfile.ZipFile(tmp_path / "w.npz") as archive:
        at = {k.filename: k.header_offset for k in archive.infolist()}["X.npy"]
        start = archive.start_dir
    data = bytearray((tmp_path / "w.npz").read_bytes())
    flags, name = (start + 8, start + 46) if directory else (at + 6, at + 30)
    data[flags + 1] |= 8
    data[name] = 0xC0
    (tmp_path / "d.npz").write_bytes(data)
    with pytest.raises(DataError, match=r"d\.npz (is not a \.npz file|does not decompress)"):
        read(tmp_path / "d.npz", "y")


def test_changed_missing_marker_restarts_ingest(tmp_path: Path) -> None:
    def hdf5(X: Any, y: Any) -> Path:
        return write_hdf5(tmp_path / "a.h5", X=X, y=y)

    def group(X: Any, y: Any) -> Path:
        made = zarr.open_group(tmp_path / "a.zarr", mode="w")
        made["X"], made["y"] = X, y
        return tmp_path / "a.zarr"

    X = np.random.default_rng(0).normal(size=(12, 2))
    for k, write in enumerate((hdf5, group)):
        data, store = write(X, X[:, 0]), tmp_path / f"s{k}.zarr"
        first = ingest(data, store, missing="fill")
        if write is not group:  # of which only the metadata are compared
            assert ingest(data, store, missing="fill").fingerprint == first.fingerprint
        with pytest.raises(DataError, match="already holds a store"):
            ingest(data, store)
        assert append(data, store, missing="fill").n_rows == 24
        assert append(data, store).n_rows == 36
