"""Files that are named otherwise than they are: their content tells, and the sentence names it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from scipy.io import netcdf_file, savemat

import streamkern as sk
from streamkern.basics.errors import DataError, StreamkernError
from streamkern.ingest.content import content_of
from streamkern.ingest.formats import ENDINGS
from tests.rawfiles import memory_url

RNG = np.random.default_rng(0)
N = 40
X, Y = (
    RNG.normal(size=(N, 2)).astype("f2").astype("f4"),
    RNG.normal(size=N).astype("f2").astype("f4"),
)
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})
TABLE = pa.Table.from_pandas(FRAME, preserve_index=False)


def as_stream(path: Path) -> None:
    with ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


def as_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["X"], file["y"] = X, Y


def as_netcdf(path: Path) -> None:
    with netcdf_file(path, "w") as file:
        file.createDimension("n", N)
        file.createDimension("d", 2)
        for name, dimensions, values in (("X", ("n", "d"), X), ("y", ("n",), Y)):
            file.createVariable(name, "f", dimensions)[:] = values


def as_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, X=X, y=Y)


def as_svmlight(path: Path) -> None:
    rows = (f"{y!r} 1:{a!r} 2:{b!r}\n" for y, (a, b) in zip(Y.tolist(), X.tolist(), strict=True))
    path.write_text("".join(rows))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda path: pq.write_table(TABLE, path),
    "arrow": as_stream,
    "jsonl": lambda path: FRAME.to_json(path, orient="records", lines=True, double_precision=15),
    "hdf5": as_hdf5,
    "netcdf": as_netcdf,
    "npz": as_npz,
    "svmlight": as_svmlight,
}
TABLES = ("parquet", "arrow", "jsonl")


def y_of(kind: str) -> dict[str, Any]:
    return {"y": "y"} if kind in TABLES else {}


def stored(path: Path, **asked: Any) -> tuple[Any, Any]:
    """Return the rows and targets of the store that is made of a file."""
    url = memory_url()
    sk.ingest_store(path, url, shuffle=False, dtype="float32", **asked)
    X, y, *_ = sk.open_store(url).read_chunk(0)
    return X, y[:, 0]


def test_a_name_that_says_nothing_leaves_it_to_the_content(tmp_path: Path) -> None:
    for kind, write in WRITERS.items():
        for name in ("file", "file.bin", "file.json", "table.2024", "x.v1"):
            write(tmp_path / name)
            rows, targets = stored(tmp_path / name, **y_of(kind))
            np.testing.assert_array_equal(rows, X)
            np.testing.assert_array_equal(targets, Y)


def test_an_arrow_stream_is_read_under_every_name_of_arrow(tmp_path: Path) -> None:
    for ending in (".arrows", ".arrow", ".feather", ".ipc", ".ARROWS"):
        as_stream(tmp_path / f"d{ending}")
        np.testing.assert_array_equal(stored(tmp_path / f"d{ending}", y="y")[0], X)


def test_another_format_than_the_name_says_is_named_and_can_be_given(tmp_path: Path) -> None:
    endings = [e for e, kind in ENDINGS.items() if kind not in ("zarr", "idx")]
    for kind, write in WRITERS.items():
        write(tmp_path / "made")
        for ending in endings:
            named = ENDINGS[ending]
            if (
                named == kind
                or {named, kind} == {"hdf5", "netcdf"}
                or (named, kind) == ("npz", "npy")
            ):
                continue
            path = tmp_path / f"d{ending}"
            shutil.copy(tmp_path / "made", path)
            asked = y_of(kind) if named in ("csv", *TABLES) else {}
            with pytest.raises(StreamkernError, match=f'format="{kind}"'):
                sk.ingest_store(path, memory_url(), **asked)
        np.testing.assert_array_equal(stored(path, format=kind, **y_of(kind))[0], X)


def test_a_compression_that_the_name_hides_or_claims_is_named(tmp_path: Path) -> None:
    text = FRAME.to_csv(index=False).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("d.csv", text)
    packed = {
        ".gz": gzip.compress(text), ".bz2": bz2.compress(text), ".xz": lzma.compress(text),
        ".zip": archive.getvalue(), ".zst": pa.compress(text, "zstd", asbytes=True), "": text,
    }  # fmt: skip
    for real, data in packed.items():
        for claimed in packed:
            path = tmp_path / f"d.csv{claimed}"
            path.write_bytes(data)
            if claimed == real:
                stored(path, y="y")
                continue
            with pytest.raises(DataError, match=f"rename it to d.csv{real}$") as caught:
                sk.ingest_store(path, memory_url(), y="y")
            path.rename(tmp_path / str(caught.value).rpartition(" ")[2])
            stored(tmp_path / f"d.csv{real}", y="y")


def test_files_of_other_programs_are_named(tmp_path: Path) -> None:
    page, pointer = b"<!DOCTYPE html>\n<html>", b"version https://git-lfs.github.com/spec/v1\noid"
    orc.write_table(TABLE, tmp_path / "o")
    savemat(tmp_path / "m", {"X": X})
    files = {
        "HTML": page, "Git LFS": pointer, "ARFF": b"% x\n@RELATION t\n@attribute a numeric\n",
        "read_orc": (tmp_path / "o").read_bytes(), "MATLAB": (tmp_path / "m").read_bytes(),
        "SQLite": b"SQLite format 3\0" + b"\0" * 50, "PDF": b"%PDF-1.4\n\0\1\2",
        "read_pickle": b"\x80\x04\x95\0",
        "read_excel": b"PK\x03\x04" + b"\0" * 26 + b"[Content_Types].xml",
        "array of JSON": json.dumps(FRAME.to_dict("records")).encode(), "is empty": b"",
    }  # fmt: skip
    for said, data in files.items():
        for name in ("d.csv", "d.parquet", "d.npz", "d.jsonl", "d.svm", "d.h5", "d.unknown"):
            if (said, name) == ("is empty", "d.unknown"):
                continue
            (tmp_path / name).write_bytes(data)
            with pytest.raises(DataError, match=said):
                sk.ingest_store(tmp_path / name, memory_url())


def test_plain_text_is_taken_for_nothing_else() -> None:
    for text in (
        "ORCID,y\n1,2\n", "PAR1,y\n1,2\n", "BZh,y\n", "PK,y\n", "CDF,y\n1,2\n", "html,y\n",
        "1,2,3\n4,5,6\n", "1 2:3,4\n", "12:30 5\n", "version,y\n1,2\n", "relation,y\n", "{a},y\n",
        "a;b\n[1;2]\n", "größe,y\n1,2\n", "MATLAB 5.0,y\n",
    ):  # fmt: skip
        assert content_of(text.encode(), "d.csv", "csv") is None, text


def test_vectors_behind_their_lengths_are_written_as_rows_by_the_words_of_the_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.arange(60).reshape(20, 3)
    for ending, dtype in ((".fvecs", "<f4"), (".ivecs", "<i4"), (".bvecs", "u1")):
        lengths = np.full((20, 1), 3, "<i4").view("u1")
        held = rows.astype(dtype).view("u1").reshape(20, -1)
        np.hstack([lengths, held]).tofile(f"v{ending}")
        with pytest.raises(DataError, match="as an array: ") as caught:
            sk.ingest_store(f"v{ending}", tmp_path / "s.zarr", y=rows[:, 0])
        first, _, second = str(caught.value).partition("as an array: ")[2].partition(", numpy.save")
        known = {"numpy": np}
        exec(f"{first}\nnumpy.save{second}", known)
        assert np.array_equal(np.load("v.npy"), rows)


def test_an_archive_of_one_file_is_read_by_the_ending_of_that_file(tmp_path: Path) -> None:
    table = pd.DataFrame({"a": np.arange(20.0) ** 2, "b": np.arange(20.0) ** 3, "y": range(20)})
    store, path = tmp_path / "s.zarr", tmp_path / "t.zip"
    for name, written in (
        ("inner.csv", table.to_csv(index=False).encode()),
        ("folder/inner.tsv", table.to_csv(index=False, sep="\t").encode()),
        ("inner.jsonl", table.to_json(orient="records", lines=True).encode()),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, written)
        spec = sk.ingest_store(path, store, y="y", targets="values", overwrite=True)
        assert (spec.n_rows, spec.columns) == (20, ("a", "b"))
        model = sk.KernelRegressor(n_centers=9, epochs=1).fit(str(path), "y")
        assert np.array_equal(model.predict(str(path)), model.predict(table[["a", "b"]]))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("README", "hello")
    with pytest.raises(DataError, match="unpack it"):
        sk.ingest_store(path, store, y="y", overwrite=True)
