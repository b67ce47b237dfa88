"""Mistakes in paths, in files of arrays and archives, and in which columns are asked for."""

from __future__ import annotations

import bz2
import gzip
import http.server
import shutil
import socket
import struct
import threading
import zipfile
from functools import partial as Do
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.io import loadmat, savemat

import streamkern as sk
from tests.remedies import FRAME, Case, N, X, Y, ingested, long_rows

COVERED = tuple(
    f"ingest/{name}.py"
    for name in (
        "input_files", "path_patterns", "array_files", "decompress", "readers", "reader",
        "column_roles",
    )
)  # fmt: skip


def write_idx(name: str, array: Any) -> bytes:
    """Write bytes as MNIST's files have them, and return the file."""
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    Path(name).write_bytes(head + array.astype("u1").tobytes())
    return head


def cut(name: str, size: int, new: str) -> None:
    """Write the first bytes of a file to another one."""
    Path(new).write_bytes(Path(name).read_bytes()[:size])


def encrypted(name: str, new: str) -> None:
    """Copy an archive, and mark what is in it as encrypted."""
    data = bytearray(Path(name).read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(mark)
        while at >= 0:
            data[at + offset] |= 1
            at = data.find(mark, at + 4)
    Path(new).write_bytes(data)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing on stderr."""


def served(port: int, name: str = "rides.csv", **given: Any) -> Any:
    """Ingest a file from a server that is running, and gives files as a whole."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        return ingested(f"http://127.0.0.1:{port}/{name}", **given)
    finally:
        server.shutdown()
        server.server_close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def path_cases() -> list[Case]:
    """Return mistakes in names of files, patterns and folders."""
    frame = FRAME.assign(fare=Y)
    for folder in ("hollow", "years/y=1", "years/y=2", "mixed", "deep/one", "delta/_delta_log"):
        Path(folder).mkdir(parents=True)
    for k in (1, 2):
        frame.to_parquet(f"years/y={k}/part.parquet")
    frame.to_parquet("deep/one/a.parquet")
    frame.to_parquet("delta/a.parquet")
    frame.to_csv("mixed/a.csv", index=False)
    frame.to_parquet("mixed/b.parquet")
    for name in ("a.unknown", "loose.csv.bz2", "text.parquet"):
        frame.to_csv(name, index=False, compression=None)
    for name in ("squeezed.csv", "squeezed"):
        frame.to_csv(name, index=False, compression="gzip")
    frame.to_parquet("columns.txt")
    frame.to_json("all.json", orient="records")
    savemat("old.mat", {"X": X, "y": Y})
    numbers = frame[["a", "b", "fare"]]
    numbers.to_csv("named.csv", index=False)
    numbers.to_csv("bare.csv", index=False, header=False)
    sk.ingest_store(numbers, "named.zarr", y="fare")
    like: dict[str, Any] = {"y": 2, "like": "named.zarr"}
    port = free_port()

    counted = np.c_[np.full(N, 2, "<i4"), X[:, :2].astype("<f4").view("<i4")]
    counted.tofile("v.fvecs")

    def vectors() -> Any:
        a = np.fromfile("v.fvecs", "u1")
        np.save("v.npy", a.reshape(-1, a[:4].view("i4")[0] * 4 + 4)[:, 4:].copy().view("f4"))
        return ingested("v.npy", y=Y)

    def matlab() -> Any:
        held = loadmat("old.mat")
        np.savez("old.npz", X=held["X"], y=held["y"].ravel())
        return ingested("old.npz")

    def whole(folder: str) -> Any:
        pd.read_parquet(folder).to_parquet("whole.parquet")
        return ingested("whole.parquet", y="fare")

    return [
        ("there is no file none.npz; check its path", Do(ingested, "none.npz"),
         Do(ingested, "rows.npz")),
        ("there is no file or store at none; check the path", Do(ingested, "none"),
         Do(ingested, "parts")),
        ("check host and port, and that the server is running",
         Do(ingested, f"http://127.0.0.1:{port}/rides.csv", y="fare"), Do(served, port, y="fare")),
        ("download the file, and give its path", Do(served, free_port(), "rows.npz"),
         Do(ingested, "rows.npz")),
        ("or copy the file to a disk", Do(ingested, "simplecache::sftp://nowhere/rows.npz"),
         Do(ingested, "rows.npz")),
        ("give a path, or a URL such as s3://bucket/name", Do(ingested, "nosuch::file://rows.npz"),
         Do(ingested, "rows.npz")),
        ("write them as an array", Do(ingested, "v.fvecs", y="y"), vectors),
        ("unpack it, and give the unpacked files", Do(ingested, "rows.tar"),
         lambda: (shutil.unpack_archive("rows.tar", "out"), ingested("out/rows.npz"))),
        (r"pandas.read_pickle.'rides.pkl'..to_parquet.'rides.parquet'.", Do(ingested, "rides.pkl"),
         lambda: (pd.read_pickle("rides.pkl").to_parquet("rides.parquet"),
                  ingested("rides.parquet", y="fare"))),
        ("loadmat, and write its arrays with numpy.savez", Do(ingested, "old.mat"), matlab),
        ("it to squeezed.csv.gz", Do(ingested, "squeezed.csv", y="fare"),
         lambda: (Path("squeezed.csv").rename("squeezed.csv.gz"),
                  ingested("squeezed.csv.gz", y="fare"))),
        ("rename it to loose.csv", Do(ingested, "loose.csv.bz2", y="fare"),
         lambda: (Path("loose.csv.bz2").rename("loose.csv"), ingested("loose.csv", y="fare"))),
        ("it to squeezed.gz", Do(ingested, "squeezed", y="fare"),
         lambda: (Path("squeezed").rename("squeezed.gz"),
                  ingested("squeezed.gz", y="fare", format="csv"))),
        ("give format='parquet'", Do(ingested, "columns.txt", y="fare"),
         Do(ingested, "columns.txt", y="fare", format="parquet")),
        ("or rename it", Do(ingested, "columns.txt", y="fare"),
         lambda: (shutil.copy("columns.txt", "columns.parquet"),
                  ingested("columns.parquet", y="fare"))),
        ("give format='csv' if it is a CSV", Do(ingested, "text.parquet", y="fare"),
         Do(ingested, "text.parquet", y="fare", format="csv")),
        (r"pandas.read_json.'all.json'..to_json.'rows.jsonl', orient='records', lines=True",
         Do(ingested, "all.json", y="fare"),
         lambda: (pd.read_json("all.json").to_json("rows.jsonl", orient="records", lines=True),
                  ingested("rows.jsonl", y="fare"))),
        ("name it, as in format='csv'", Do(ingested, "a.unknown", y="fare"),
         Do(ingested, "a.unknown", y="fare", format="csv")),
        ("or of a folder with files", Do(ingested, "hollow"), Do(ingested, "parts")),
        ("no file matches .*check the pattern", Do(ingested, "parts/*.csv"),
         Do(ingested, "parts/*.npz")),
        (r"pandas.read_parquet.'years'..to_parquet.'whole.parquet'.", Do(ingested, "years"),
         Do(whole, "years")),
        (r"pandas.read_parquet.'years'..to_parquet.'whole.parquet'.",
         Do(ingested, "years/*/*.parquet"), Do(whole, "years")),
        (r"name the files with a pattern, such as deep/..*.parquet", Do(ingested, "deep", y="fare"),
         Do(ingested, "deep/**/*.parquet", y="fare")),
        (r"name the files of one format, for example .\.csv", Do(ingested, "mixed", y="fare"),
         Do(ingested, "mixed/*.csv", y="fare")),
        ("export the table to Parquet files", Do(ingested, "delta", y="fare"),
         lambda: (Path("plain").mkdir(), pd.read_parquet("delta/a.parquet")
                  .to_parquet("plain/a.parquet"), ingested("plain", y="fare"))),
        ("would read it as rows; give another output",
         lambda: sk.ingest_store("parts", "parts/new.zarr"),
         lambda: sk.ingest_store("parts", "elsewhere.zarr")),
        ("give the name of the column as y", Do(ingested, "named.csv", y=Y),
         Do(ingested, "named.csv", y="fare")),
        ("or read the table into a data frame and give this with the values",
         Do(ingested, "named.csv", y=Y), Do(ingested, frame, y=Y)),
        ("has no header line, but the columns of the store .*; add one",
         Do(ingested, "bare.csv", **like), Do(ingested, "named.csv", **like)),
        ("has no header line, but the columns of the store .*positions of these columns with x=",
         Do(ingested, "bare.csv", **like), Do(ingested, "bare.csv", x=[0, 1], **like)),
        ("cannot ingest a int; give a path, paths, arrays", Do(ingested, 3),
         Do(ingested, "rows.npz")),
    ]  # fmt: skip


def array_cases() -> list[Case]:
    """Return mistakes in files that hold arrays, and in archives."""
    np.save("x.npy", X)
    np.save("y.npy", Y)
    np.save("turned.npy", np.asfortranarray(X))
    np.save("objects.npy", X.astype(object))
    np.save("wide.npy", X[:, :2])
    images, labels = np.arange(N * 4).reshape(N, 2, 2) % 9, np.arange(N) % 2
    write_idx("images-idx3-ubyte", images)
    write_idx("labels-idx1-ubyte", labels)
    write_idx("y-idx1-ubyte", labels)
    cut("images-idx3-ubyte", 100, "short-idx3-ubyte")
    cut("images-idx3-ubyte", 9, "head-idx3-ubyte")
    shutil.copy("x.npy", "wrong.idx")
    for suffix in ("idx", "npy", "npz"):
        Path(f"odd.{suffix}").write_bytes(b"\0\1\2\3" * 50)
    shutil.copy("rows.npz", "npz.npy")
    cut("x.npy", 900, "short.npy")
    cut("turned.npy", 900, "bent.npy")
    Path("two.npy").write_bytes(Path("x.npy").read_bytes() * 2)
    sparse = sp.csr_array(X)
    sp.save_npz("sparse.npz", sparse)
    with np.load("sparse.npz") as held:
        parts = dict(held)
    np.savez("lacks.npz", **{k: v for k, v in parts.items() if k != "indptr"})
    np.savez("flat.npz", **parts | {"shape": np.array([N])})
    encrypted("rows.npz", "locked.npz")
    FRAME.assign(fare=Y).to_csv("b.csv.zip", index=False)
    encrypted("b.csv.zip", "locked.csv.zip")
    cut("b.csv.zip", 90, "no.csv.zip")
    with zipfile.ZipFile("several.csv.zip", "w") as archive:
        archive.write("rides.csv")
        archive.write("rides.csv", "again.csv")
    Path("good.csv.gz").write_bytes(gzip.compress(Path("rides.csv").read_bytes()))
    cut("good.csv.gz", 400, "short.csv.gz")
    Path("good.csv.bz2").write_bytes(bz2.compress(Path("rides.csv").read_bytes()))
    cut("good.csv.bz2", 400, "short.csv.bz2")

    def saved(made: Any, y: Any = "y.npy") -> Any:
        np.save("again.npy", made)
        return ingested("again.npy", y=y)

    def unpacked(name: str) -> Any:
        shutil.unpack_archive(name, "unpacked")
        return ingested("unpacked/rides.csv", y="fare")

    def resaved() -> Any:
        sp.save_npz("again.npz", sparse)
        return ingested("again.npz", y="y.npy")

    valid = Do(ingested, "x.npy", y="y.npy")
    pictures = Do(ingested, "images-idx3-ubyte", y="y-idx1-ubyte")
    np.savez("fields.npz", X=np.rec.fromarrays([X[:, 0], X[:, 1], Y], names="a,b,y"))
    np.save("fields.npy", np.rec.fromarrays([X[:, 0], X[:, 1], Y], names="a,b,y"))
    return [
        ("the file is truncated: copy it again", Do(ingested, "short.npy", y="y.npy"), valid),
        ("the file is truncated: copy it again", Do(ingested, "bent.npy", y="y.npy"),
         Do(ingested, "turned.npy", y="y.npy")),
        ("the file is truncated: copy it again", Do(ingested, "short-idx3-ubyte", y="y-idx1-ubyte"),
         pictures),
        ("ends inside its header", Do(ingested, "head-idx3-ubyte", y="y-idx1-ubyte"), pictures),
        ("is not a valid IDX file; copy it again", Do(ingested, "odd.idx", y="y.npy"), pictures),
        ("give format='npy'", Do(ingested, "wrong.idx", y="y.npy"),
         Do(ingested, "wrong.idx", y="y.npy", format="npy")),
        ("write it with numpy.save", Do(ingested, "odd.npy", y="y.npy"), Do(saved, X)),
        ("give format='npz'", Do(ingested, "npz.npy", y="y.npy"),
         Do(ingested, "npz.npy", format="npz")),
        ("save numbers, for example X.astype", Do(ingested, "objects.npy", y="y.npy"),
         Do(saved, X.astype(object).astype(float))),
        ("or holds several arrays: save each array to its own file",
         Do(ingested, "two.npy", y="y.npy"), valid),
        ("write it with numpy.savez", Do(ingested, "odd.npz"), Do(ingested, "rows.npz")),
        ("it has no indptr; save it again", Do(ingested, "lacks.npz", y="y.npy"), resaved),
        ("save it again with scipy.sparse.save_npz", Do(ingested, "flat.npz", y="y.npy"), resaved),
        ("cannot be read: .*save it again", Do(ingested, "locked.npz"),
         lambda: (np.savez("open.npz", X=X, y=Y), ingested("open.npz"))),
        ("give the array itself, numpy.load", Do(ingested, "fields.npy", y="y"),
         lambda: ingested(np.load("fields.npy"), y="y")),
        ("holds only X; give y=, a file or an array", Do(ingested, "x.npy"), valid),
        (r"give the array itself, numpy.load\('fields.npz'\)\['X'\]", Do(ingested, "fields.npz"),
         lambda: ingested(np.load("fields.npz")["X"], y="y")),
        ("give a .npy or IDX file, or a Zarr array", Do(ingested, "x.npy", y="rides.csv"), valid),
        ("copy the whole archive again", Do(ingested, "no.csv.zip", y="fare"),
         Do(ingested, "b.csv.zip", y="fare")),
        ("unpack it, and give the files", Do(ingested, "several.csv.zip", y="fare"),
         Do(unpacked, "several.csv.zip")),
        ("cannot be unpacked .*unpack it", Do(ingested, "locked.csv.zip", y="fare"),
         Do(unpacked, "several.csv.zip")),
        ("does not decompress .*copy it again", Do(ingested, "short.csv.gz", y="fare"),
         Do(ingested, "good.csv.gz", y="fare")),
        ("it is damaged or truncated", Do(ingested, "short.csv.bz2", y="fare"),
         Do(ingested, "good.csv.bz2", y="fare")),
        ("put patterns in quotes", Do(ingested, ["x.npy", "x.npy"], y=["y.npy"]),
         Do(ingested, ["x.npy", "x.npy"], y=["y.npy", "y.npy"])),
    ]  # fmt: skip


def column_cases() -> list[Case]:
    """Return mistakes in the columns that are asked for, and in several files together."""
    frame = FRAME.assign(fare=Y, weight=np.arange(N) % 3 + 1.0)
    frame.to_csv("full.csv", index=False)
    frame[["a", "b", "fare"]].to_csv("named.csv", index=False)
    frame[["a", "b", "fare"]].to_csv("bare.csv", index=False, header=False)
    frame[["b", "a", "fare"]].to_csv("turned.csv", index=False)
    frame[["b", "fare"]].to_csv("less.csv", index=False)
    Path("twice.csv").write_text("a,a,fare\n1,2,3\n2,3,5\n")
    Path("once.csv").write_text("a,b,fare\n1,2,3\n2,3,5\n")
    words = frame.assign(w=["u", "v"] * (N // 2))
    tables = frame[["a", "w", "fare"]], words[["a", "w", "fare"]]
    sk.ingest_store(tables[0], "one_way.zarr", y="fare")
    sk.ingest_store(tables[0][9:], "two_way.zarr", y="fare")
    sk.ingest_store(long_rows(), "long.zarr", y=Y)
    sk.ingest_store(tables[1], "other_way.zarr", y="fare")
    pair, other = ["bare.csv", "named.csv"], ["one_way.zarr", "other_way.zarr"]

    def given(data: Any, **more: Any) -> Any:
        return Do(ingested, data, y="fare", **more)

    return [
        ("name columns of the file with x= and y=", Do(ingested, frame, y="fares"), given(frame)),
        ("rename one", given("twice.csv"), given("once.csv")),
        ("is requested twice; use it once", given(frame, x=["a", "fare"]),
         given(frame, x=["a", "b"])),
        ("leave it out of drop=", given(frame, drop=["fare", "w"]), given(frame, drop=["w"])),
        ("name columns of the table with drop=",
         given(frame, drop=["q"]), given(frame, drop=["w"])),
        ("leave at least one column out of y=", given(frame[["fare"]]),
         given(frame[["a", "fare"]])),
        ("leave at least one column out of .*drop=", given(frame[["a", "fare"]], drop=["a"]),
         given(frame[["a", "fare"]])),
        ("choose these with x=", given(["named.csv", "full.csv"]),
         given(["named.csv", "full.csv"], x=["a", "b"])),
        ("lacks 'a'.*add what is missing", given(["named.csv", "less.csv"]),
         given(["named.csv", "turned.csv"])),
        ("no header line, so it has no column 'fare'; add one",
         given("bare.csv"), given("named.csv")),
        ("give the names of its 3 columns with names=", given("bare.csv"),
         given("bare.csv", names=["a", "b", "fare"])),
        ("give x= and y= as positions, counted from 0",
         given("bare.csv"), Do(ingested, "bare.csv", y=2)),
        ("give all files a header, or give none a header", Do(ingested, pair, y=-1),
         Do(ingested, ["named.csv", "turned.csv"], y=-1),
         Do(ingested, ["bare.csv", "bare.csv"], y=-1)),
        ("is a position, .*give the name", given(["full.csv", "full.csv"], sample_weight=4),
         given(["full.csv", "full.csv"], sample_weight="weight")),
        ("must be one of its arrays or columns; give its name as sample_weight=",
         given("full.csv", sample_weight=np.ones(N)),
         given("full.csv", sample_weight="weight")),
        (r"the blocks must be pairs .X, y.", Do(ingested, iter([(X, Y)]), y=Y),
         Do(ingested, iter([(X, Y)]))),
        ("name them with x= and y=", Do(ingested, "rows.npz", y="target"),
         Do(ingested, "rows.npz", y="y")),
        ("ingest the original tables together",
         Do(ingested, ["one_way.zarr", "two_way.zarr"]), given(pd.concat(tables))),
        ("give rows with the same features", Do(ingested, long_rows(d=8000), y=Y, like="long.zarr"),
         Do(ingested, long_rows(), y=Y, like="long.zarr")),
        ("ingest both tables together", Do(ingested, other), given(pd.concat(tables))),
        ("or ingest this table with like= and the other store", Do(ingested, other),
         lambda: (sk.ingest_store(tables[1], "again.zarr", like="one_way.zarr"),
                  ingested(["one_way.zarr", "again.zarr"]))),
    ]  # fmt: skip


TABLES = (path_cases, array_cases, column_cases)
