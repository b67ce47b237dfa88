"""Check formats and layouts that need an option, and files known by their first bytes."""

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

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from scipy.io import netcdf_file, savemat
from sklearn.datasets import dump_svmlight_file

import streamkern as sk
from streamkern.basics.errors import DataError, StreamkernError
from streamkern.ingest.formats import ENDINGS, detect_content
from tests.ingest.ingested import ingest_and_read, read_in_order
from tests.raw_files import memory_url, write_hdf5

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).round(3)
Y = (X @ [1.0, -2.0, 0.5]).round(3)


def table(form: dict[str, Any], X: Any = X, y: Any = Y) -> bytes:
    """Return rows written in this form."""
    mark, decimal = form.get("delimiter", ";"), form.get("decimal", ".")
    lines = ["# above"] * form.get("skip_lines", 0)
    lines += [] if "names" in form else [mark.join(["a", "é", "c", "y"])]
    lines += [mark.join(map(str, row)).replace(".", decimal) for row in np.c_[X, y].tolist()]
    return ("\n".join(lines) + "\n").encode(form.get("encoding", "utf-8"))


FORMS: list[dict[str, Any]] = [
    {"decimal": ","}, {"delimiter": "~"}, {"encoding": "latin-1"}, {"encoding": "utf-16"},
    {"skip_lines": 2}, {"names": ["a", "é", "c", "y"]}, {"format": "csv"},
    {"decimal": ",", "delimiter": "|", "encoding": "latin-1", "skip_lines": 1, "format": "csv",
     "names": ["a", "é", "c", "y"]},
]  # fmt: skip


@pytest.mark.slow
def test_later_files_are_read_with_options_of_the_store(tmp_path: Path) -> None:
    for k, form in enumerate(FORMS):
        suffix = "log" if "format" in form else "csv"
        first, later = (tmp_path / f"{name}{k}.{suffix}" for name in "ab")
        store = tmp_path / f"{k}.zarr"
        first.write_bytes(table(form))
        later.write_bytes(table(form, X + 1, Y + 1))
        sk.ingest_store(first, store, y="y", shuffle=False, dtype="float64", **form)
        sk.append_store(later, store, shuffle=False)
        actual, targets = read_in_order(store)
        np.testing.assert_array_equal(actual, np.r_[X, X + 1])
        np.testing.assert_allclose(targets[:, 0], np.r_[Y, Y + 1])
    model = sk.KernelRegressor(n_centers=20, metric="none", run_dir=tmp_path / "run").fit(store)
    expected = model.predict(X)
    for predicted in (model.predict(first), sk.load(tmp_path / "run").predict(first)):
        np.testing.assert_allclose(predicted, expected)
    assert sk.evaluate(tmp_path / "run", first)["r2"] > 0


def test_given_options_override_recorded_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(table(FORMS[-1]))
    sk.ingest_store(tmp_path / "a.csv", tmp_path / "s.zarr", y="y", **FORMS[-1])
    (tmp_path / "b.csv").write_bytes(table({}))
    plain = {"decimal": ".", "delimiter": ";", "encoding": "utf-8", "skip_lines": 0}
    for header in ({}, {"header": True}):  # the recorded names are the names in its header
        spec = sk.append_store(
            tmp_path / "b.csv", tmp_path / "s.zarr", seed=len(header), **plain, **header
        )
    assert spec.n_rows == 180
    assert spec.columns == ("a", "é", "c")
    form = {name: value for name, value in plain.items() if name != "skip_lines"}
    (tmp_path / "c.csv").write_bytes(table({"names": [], "delimiter": ";"}))
    with pytest.raises(DataError, match="skip_lines=0"):
        sk.append_store(tmp_path / "c.csv", tmp_path / "s.zarr", **form)


def write_svm(path: Path, X: Any, y: Any, first: int) -> Path:
    """Write an svmlight file whose features are counted from `first`; return its path."""
    dump_svmlight_file(X, y, str(path), zero_based=first == 0)
    return path


def test_svmlight_files_keep_feature_numbering_of_store(tmp_path: Path) -> None:
    dense = np.c_[X, X]
    narrow = np.c_[np.zeros(60), X[:, 1:], np.zeros((60, 3))]  # neither a first feature nor a last
    for first in (0, 1):
        store = tmp_path / f"{first}.zarr"
        sk.ingest_store(
            write_svm(tmp_path / "a.svm", dense, Y, first), store, shuffle=False, dtype="float64"
        )
        later_file = write_svm(tmp_path / "b.svm", narrow, Y, first)
        sk.append_store(later_file, store, shuffle=False)
        np.testing.assert_array_equal(read_in_order(store)[0], np.r_[dense, narrow])
        run = tmp_path / f"run{first}"
        model = sk.KernelRegressor(n_centers=20, metric="none", run_dir=run).fit(store)
        np.testing.assert_allclose(sk.load(run).predict(later_file), model.predict(narrow))
        truth = np.mean((model.predict(narrow) - Y) ** 2)
        np.testing.assert_allclose(sk.evaluate(run, later_file)["mse"], truth, rtol=1e-4)
        wide = write_svm(tmp_path / "c.svm", np.c_[dense, X], Y, first)
        with pytest.raises(DataError, match="features; ingest all files together"):
            sk.append_store(wide, store)
        with pytest.raises(DataError, match="features; ingest all files together"):
            model.predict(wide)
    (tmp_path / "d.svm").write_text("1 0:1\n")
    with pytest.raises(DataError, match="feature numbers begin at 1"):
        sk.append_store(tmp_path / "d.svm", tmp_path / "1.zarr")
    packed = tmp_path / "e.txt.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.svm").read_bytes()))
    sk.append_store(packed, tmp_path / "1.zarr", format="svmlight")


CONTENT_RNG = np.random.default_rng(0)
N = 40
CELLS, TARGETS = (
    CONTENT_RNG.normal(size=(N, 2)).astype("f2").astype("f4"),
    CONTENT_RNG.normal(size=N).astype("f2").astype("f4"),
)
FRAME = pd.DataFrame({"a": CELLS[:, 0], "b": CELLS[:, 1], "y": TARGETS})
TABLE = pa.Table.from_pandas(FRAME, preserve_index=False)


def write_stream(path: Path) -> None:
    """Write the rows as an Arrow IPC stream."""
    with ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


def write_netcdf(path: Path) -> None:
    """Write the rows as NetCDF 3."""
    with netcdf_file(path, "w") as file:
        file.createDimension("n", N)
        file.createDimension("d", 2)
        for name, dimensions, values in (("X", ("n", "d"), CELLS), ("y", ("n",), TARGETS)):
            file.createVariable(name, "f", dimensions)[:] = values


def write_npz(path: Path) -> None:
    """Write the rows as .npz; NumPy adds no ending to the name of an open file."""
    with path.open("wb") as file:
        np.savez(file, X=CELLS, y=TARGETS)


def write_svmlight(path: Path) -> None:
    """Write the rows as svmlight, with features numbered from 1."""
    rows = (
        f"{y!r} 1:{a!r} 2:{b!r}\n"
        for y, (a, b) in zip(TARGETS.tolist(), CELLS.tolist(), strict=True)
    )
    path.write_text("".join(rows))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda path: pq.write_table(TABLE, path),
    "arrow": write_stream,
    "jsonl": lambda path: FRAME.to_json(path, orient="records", lines=True, double_precision=15),
    "hdf5": lambda path: write_hdf5(path, X=CELLS, y=TARGETS),
    "netcdf": write_netcdf,
    "npz": write_npz,
    "svmlight": write_svmlight,
}
TABLES = ("parquet", "arrow", "jsonl")


def target_options(kind: str) -> dict[str, Any]:
    """Return the argument y of `ingest` for a format."""
    return {"y": "y"} if kind in TABLES else {}


@pytest.mark.slow
def test_content_decides_format_of_unknown_names(tmp_path: Path) -> None:
    for kind, write in WRITERS.items():
        for name in ("file", "file.bin", "file.json", "table.2024", "x.v1"):
            write(tmp_path / name)
            _, rows, targets = ingest_and_read(
                tmp_path / name, dtype="float32", **target_options(kind)
            )
            np.testing.assert_array_equal(rows, CELLS)
            np.testing.assert_array_equal(targets[:, 0], TARGETS)


def test_arrow_stream_is_read_under_every_arrow_name(tmp_path: Path) -> None:
    for suffix in (".arrows", ".arrow", ".feather", ".ipc", ".ARROWS"):
        write_stream(tmp_path / f"d{suffix}")
        X = ingest_and_read(tmp_path / f"d{suffix}", y="y").X
        np.testing.assert_array_equal(X, CELLS)


@pytest.mark.slow
def test_format_that_contradicts_name_is_named_and_can_be_given(tmp_path: Path) -> None:
    endings = [e for e, kind in ENDINGS.items() if kind not in ("zarr", "idx")]
    for kind, write in WRITERS.items():
        write(tmp_path / "made")
        for suffix in endings:
            named = ENDINGS[suffix]
            if (
                named == kind
                or {named, kind} == {"hdf5", "netcdf"}
                or (named, kind) == ("npz", "npy")
            ):
                continue
            path = tmp_path / f"d{suffix}"
            shutil.copy(tmp_path / "made", path)
            options = target_options(kind) if named in ("csv", *TABLES) else {}
            with pytest.raises(StreamkernError, match=f"format='{kind}'"):
                sk.ingest_store(path, memory_url(), **options)
        X = ingest_and_read(path, format=kind, dtype="float32", **target_options(kind)).X
        np.testing.assert_array_equal(X, CELLS)


@pytest.mark.slow
def test_hidden_or_false_compression_is_named(tmp_path: Path) -> None:
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
                ingest_and_read(path, y="y")
                continue
            with pytest.raises(DataError, match=f"rename it to d.csv{real}$") as caught:
                sk.ingest_store(path, memory_url(), y="y")
            path.rename(tmp_path / str(caught.value).rpartition(" ")[2])
            ingest_and_read(tmp_path / f"d.csv{real}", y="y")


def test_unsupported_formats_are_named(tmp_path: Path) -> None:
    page, pointer = b"<!DOCTYPE html>\n<html>", b"version https://git-lfs.github.com/spec/v1\noid"
    orc.write_table(TABLE, tmp_path / "o")
    savemat(tmp_path / "m", {"X": CELLS})
    files = {
        "HTML": page, "Git LFS": pointer, "ARFF": b"% x\n@RELATION t\n@attribute a numeric\n",
        "read_orc": (tmp_path / "o").read_bytes(), "MATLAB": (tmp_path / "m").read_bytes(),
        "SQLite": b"SQLite format 3\0" + b"\0" * 50, "PDF": b"%PDF-1.4\n\0\1\2",
        "read_pickle": b"\x80\x04\x95\0",
        "read_excel": b"PK\x03\x04" + b"\0" * 26 + b"[Content_Types].xml",
        "array of JSON": json.dumps(FRAME.to_dict("records")).encode(), "is empty": b"",
    }  # fmt: skip
    for message, data in files.items():
        for name in ("d.csv", "d.parquet", "d.npz", "d.jsonl", "d.svm", "d.h5", "d.unknown"):
            if (message, name) == ("is empty", "d.unknown"):
                continue
            (tmp_path / name).write_bytes(data)
            with pytest.raises(DataError, match=message):
                sk.ingest_store(tmp_path / name, memory_url())


def test_plain_text_is_not_mistaken_for_other_formats() -> None:
    for text in (
        "ORCID,y\n1,2\n", "PAR1,y\n1,2\n", "BZh,y\n", "PK,y\n", "CDF,y\n1,2\n", "html,y\n",
        "1,2,3\n4,5,6\n", "1 2:3,4\n", "12:30 5\n", "version,y\n1,2\n", "relation,y\n", "{a},y\n",
        "a;b\n[1;2]\n", "größe,y\n1,2\n", "MATLAB 5.0,y\n",
    ):  # fmt: skip
        assert detect_content(text.encode(), "d.csv", "csv") is None, text


def test_remedy_for_vector_files_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = np.arange(60).reshape(20, 3)
    for suffix, dtype in ((".fvecs", "<f4"), (".ivecs", "<i4"), (".bvecs", "u1")):
        lengths = np.full((20, 1), 3, "<i4").view("u1")
        held = rows.astype(dtype).view("u1").reshape(20, -1)
        np.hstack([lengths, held]).tofile(f"v{suffix}")
        with pytest.raises(DataError, match="as an array: ") as caught:
            sk.ingest_store(f"v{suffix}", tmp_path / "s.zarr", y=rows[:, 0])
        first, _, second = str(caught.value).partition("as an array: ")[2].partition(", numpy.save")
        known = {"numpy": np}
        exec(f"{first}\nnumpy.save{second}", known)
        assert np.array_equal(np.load("v.npy"), rows)


def test_archive_of_one_file_is_read_by_inner_ending(tmp_path: Path) -> None:
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
