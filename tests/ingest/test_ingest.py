"""Check stores made from arrays and files: rows, order, refusals, crashes and resumption."""

from __future__ import annotations

import gzip
import io
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from h5py._objects import phil
from numpy.typing import NDArray
from zarr.storage import LocalStore

from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    MissingDependencyError,
    NonFiniteError,
    ResumeMismatchError,
)
from streamkern.basics.optional import install_command
from streamkern.filesystem import remote_file
from streamkern.filesystem.durable import is_temporary
from streamkern.filesystem.engines import FsspecEngine
from streamkern.filesystem.scratch import scratch_folder
from streamkern.ingest import input_files
from streamkern.ingest.append import append
from streamkern.ingest.array_files import idx_array, npy_array
from streamkern.ingest.ingest import ingest
from streamkern.ingest.shuffle import row_keys
from streamkern.store import writer
from streamkern.store.chunk_output import n_writers
from streamkern.store.describe import is_sorted_by_class
from streamkern.store.store import Store, open_store
from tests import store_damage
from tests.ingest.ingested import ingest_and_read
from tests.interruptions import Stop
from tests.raw_files import memory_url, write_hdf5, write_idx
from tests.traced_memory import traced_memory

SMALL = 16 << 14  # the least memory that chunks of 16 KiB allow


def digits(n: int = 600, side: int = 8) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images that contain their row number, sorted by label."""
    rng = np.random.default_rng(n)
    X = rng.integers(0, 256, (n, side, side)).astype(np.uint8)
    X[:, 0, 0], X[:, 0, 1] = np.arange(n) % 256, np.arange(n) // 256
    return X, np.sort(rng.integers(0, 10, n))


def row_numbers(store: Store) -> NDArray[np.int64]:
    """Return the row numbers that the images of `digits` contain."""
    X = store.read_rows(np.arange(store.spec.n_rows))[0].reshape(store.spec.n_rows, -1)
    return X[:, 0].astype(np.int64) + 256 * X[:, 1].astype(np.int64)


# ------------------------------------------------------------------------------------- the order


def test_store_does_not_depend_on_memory(tmp_path: Path) -> None:
    X, y = digits()
    roomy = ingest(X, tmp_path / "roomy", y=y, chunk_mb=2**-6)
    tight = ingest(X, tmp_path / "tight", y=y, chunk_mb=2**-6, memory=SMALL)
    assert store_damage.tree(tmp_path / "roomy") == store_damage.tree(tmp_path / "tight")
    assert roomy.fingerprint == tight.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["roomy", "tight"]  # no scratch left
    store = open_store(tmp_path / "tight")
    store.verify()
    assert not is_sorted_by_class(store)
    order = row_numbers(store)
    np.testing.assert_array_equal(order, np.argsort(row_keys(0, 0, len(X))))
    actual, labels = store.read_rows(np.arange(len(X)))
    np.testing.assert_array_equal(actual[..., 0], X[order])
    np.testing.assert_array_equal(labels, y[order])


def test_seed_determines_order_and_shuffle_false_keeps_it() -> None:
    X, y = digits()
    orders = []
    for seed in (0, 1):
        url = memory_url()
        ingest(X, url, y=y, chunk_mb=2**-6, seed=seed)
        orders.append(row_numbers(open_store(url)))
    assert not np.array_equal(orders[0], orders[1])
    for memory in (SMALL, 1 << 30):
        url = memory_url()
        ingest(X, url, y=y, chunk_mb=2**-6, shuffle=False, memory=memory)
        np.testing.assert_array_equal(row_numbers(open_store(url)), np.arange(len(X)))


def test_ingest_memory_is_bounded(tmp_path: Path) -> None:
    n, d, memory = 40_000, 128, 8 << 20
    np.save(tmp_path / "X.npy", np.random.default_rng(0).normal(size=(n, d)).astype("f4"))
    np.save(tmp_path / "y.npy", np.arange(n) % 7)
    with traced_memory() as traced:
        ingest(
            tmp_path / "X.npy", tmp_path / "s", y=tmp_path / "y.npy", chunk_mb=0.5, memory=memory
        )
    peak = traced.peak
    assert n * d * 4 > 2 * memory
    assert peak < memory


# -------------------------------------------------------------------------------------- formats


@pytest.fixture(scope="module")
def table() -> tuple[NDArray[np.float32], NDArray[np.int64], str]:
    """Return rows that every format represents exactly, and the fingerprint of their store."""
    rng = np.random.default_rng(3)
    X = rng.integers(-64, 64, (200, 5)).astype(np.float32) / 8
    y = rng.integers(8, 12, 200)
    return X, y, ingest(X, memory_url(), y=y, chunk_mb=2**-10, memory=SMALL).fingerprint


def csv_text(X: NDArray[Any], y: NDArray[Any], *, header: bool = True, delimiter: str = ",") -> str:
    """Return a CSV of features and labels."""
    names = delimiter.join([*(f"x{j}" for j in range(X.shape[1])), "label"])
    rows = [
        delimiter.join([*(repr(float(v)) for v in x), str(t)]) for x, t in zip(X, y, strict=True)
    ]
    return "\n".join(([names] if header else []) + rows) + "\n"


def write_format(
    root: Path, kind: str, X: NDArray[Any], y: NDArray[Any]
) -> tuple[Any, dict[str, Any]]:
    """Write (X, y) as `kind`; return the inputs and the other arguments for `ingest`."""
    match kind:
        case "npy":
            np.save(root / "X.npy", X)
            np.save(root / "y.npy", y)
            return root / "X.npy", {"y": root / "y.npy"}
        case "npy-y-array":
            np.save(root / "X.npy", X.astype(">f4"))
            return str(root / "X.npy"), {"y": y}
        case "npz":
            np.savez(root / "d.npz", X=X, y=y)
            return root / "d.npz", {}
        case "idx":
            write_idx(root / "t-images-idx3-ubyte", X)
            write_idx(root / "t-labels-idx1-ubyte", y.astype("u1"))
            return root / "t-images-idx3-ubyte", {}
        case "idx-gz":
            write_idx(root / "t-images-idx3-ubyte.gz", X)
            write_idx(root / "labels.gz", y.astype("i4"))
            return root / "t-images-idx3-ubyte.gz", {"y": root / "labels.gz"}
        case "csv":
            (root / "d.csv").write_text(csv_text(X, y))
            return root / "d.csv", {"y": "label"}
        case "csv-crlf-bom-blank":
            text = csv_text(X, y, delimiter=";").replace("\n", "\r\n\r\n")
            (root / "d.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
            return root / "d.csv", {"y": -1}
        case "tsv-gz-no-header":
            text = csv_text(X, y, header=False, delimiter="\t")
            (root / "d.tsv.gz").write_bytes(gzip.compress(text.encode()))
            return root / "d.tsv.gz", {"y": 5}
        case "csv-parts":
            (root / "a.csv").write_text(csv_text(X[:70], y[:70]))
            (root / "b.csv").write_text(csv_text(X[70:], y[70:]))
            return [root / "a.csv", root / "b.csv"], {"y": "label"}
        case "csv-remote":
            url = memory_url() + ".csv"
            with fsspec.open(url, "w") as file:
                file.write(csv_text(X, y))
            return url, {"y": "label"}
        case "parquet":
            columns: dict[str, Any] = {f"x{j}": X[:, j] for j in range(X.shape[1])}
            pq.write_table(pa.table({**columns, "y": y}), root / "d.parquet", row_group_size=37)
            return root / "d.parquet", {}
        case "parquet-lists":
            lists = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), X.shape[1])
            pq.write_table(pa.table({"X": lists, "y": y, "note": y}), root / "d.parquet")
            return root / "d.parquet", {"x": "X"}  # without it, there is a warning about "note"
        case "hdf5":
            with h5py.File(root / "d.h5", "w") as file:
                file.create_dataset("g/pixels", data=X, chunks=(7, *X.shape[1:]))
                file["g/labels"] = y
            return root / "d.h5", {"x": "g/pixels", "y": "g/labels"}
        case "zarr":
            group = zarr.create_group(LocalStore(root / "d.zarr"))
            group.create_array("X", data=X, chunks=(30, 2), config={"write_empty_chunks": True})
            group.create_array("y", data=y, chunks=(11,), config={"write_empty_chunks": True})
            return root / "d.zarr", {}
        case "store":
            ingest(X, root / "own", y=y, shuffle=False, chunk_mb=2**-10, memory=SMALL)
            return root / "own", {}
        case "blocks":
            cuts = [0, 1, 1, 90, 200]
            return ((X[a:b], y[a:b]) for a, b in pairwise(cuts)), {}
        case _:
            raise AssertionError(kind)


FORMATS = [
    "npy", "npy-y-array", "npz", "idx", "idx-gz", "csv",
    "csv-crlf-bom-blank", "tsv-gz-no-header", "csv-parts", "csv-remote", "parquet",
    "parquet-lists", "hdf5", "zarr", "store", "blocks",
]  # fmt: skip


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("memory", [SMALL, 1 << 30], ids=["scratch", "memory"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_store(
    tmp_path: Path, table: tuple[Any, Any, str], kind: str, memory: int
) -> None:
    X, y, fingerprint = table
    inputs, arguments = write_format(tmp_path, kind, X, y)
    spec = ingest(inputs, tmp_path / "out", chunk_mb=2**-10, memory=memory, **arguments)
    assert spec.fingerprint == fingerprint
    assert spec.classes == ("8", "9", "10", "11")  # by value, not by spelling


@pytest.mark.parametrize("kind", ["idx", "idx-gz", "npy", "npz", "hdf5"])
def test_images_keep_their_bytes_and_get_a_channel(tmp_path: Path, kind: str) -> None:
    X, y = digits(50, side=4)
    inputs, arguments = write_format(tmp_path, kind, X, y)
    spec, got, labels = ingest_and_read(inputs, **arguments)
    assert (spec.row_shape, spec.x_dtype) == ((4, 4, 1), np.uint8)
    np.testing.assert_array_equal(got[..., 0], X)
    np.testing.assert_array_equal(np.array([int(k) for k in spec.classes or ()])[labels], y)


def test_text_labels_are_sorted_classes(tmp_path: Path) -> None:
    X = np.arange(12, dtype=np.float32).reshape(6, 2)
    y = np.array(["pear", "apple", "fig", "apple", "pear", "pear"])
    spec = ingest(X, tmp_path / "s", y=y, shuffle=False)
    assert spec.classes == ("apple", "fig", "pear")
    assert spec.class_counts == (2, 1, 3)
    stored = zarr.open_group(tmp_path / "s", mode="r")["y"]
    assert stored.dtype == np.uint8
    np.testing.assert_array_equal(stored[:], [2, 0, 1, 0, 2, 2])


@pytest.mark.parametrize(
    ("y", "targets", "classes", "dtype"),
    [
        (np.array([0.5, 1.5, 2.0]), "auto", None, "float64"),
        (np.array([0.5, 1.5, 2.0], np.float32), "auto", None, "float32"),
        (np.array([[1, 0], [0, 1], [1, 1]]), "auto", None, "float64"),
        (np.array([1990, 2001, 1990]), "values", None, "float64"),
        (np.array([1.0, 2.0, 1.0]), "classes", ("1", "2"), "uint8"),
        (np.array([True, False, True]), "auto", ("False", "True"), "uint8"),
        (np.array([-1, 1, -1]), "auto", ("-1", "1"), "uint8"),
        (np.array([b"n", b"y", b"n"]), "auto", ("n", "y"), "uint8"),
        (np.array(["n", "y", "n"], object), "auto", ("n", "y"), "uint8"),
        (np.array(["1.5", "2", "3"]), "auto", None, "float64"),
    ],
)
def test_targets_become_classes_or_values(
    y: NDArray[Any], targets: str, classes: tuple[str, ...] | None, dtype: str
) -> None:
    spec, _, got = ingest_and_read(np.eye(3, dtype="f4"), y=y, targets=targets)
    assert spec.classes == classes
    assert spec.y_dtype == np.dtype(dtype)
    if classes is None:
        np.testing.assert_array_equal(got, y.astype(np.float64).reshape(3, -1))


@pytest.mark.parametrize(
    ("source", "dtype", "stored"),
    [
        ("bool", None, "uint8"), ("int8", None, "float32"), ("uint32", None, "float64"),
        ("int64", None, "float64"), ("float64", None, "float64"), ("float16", None, "float16"),
        ("int64", "uint8", "uint8"), ("float64", "float32", "float32"), (">f4", None, "float32"),
    ],
)  # fmt: skip
def test_features_get_stored_dtype(source: str, dtype: str | None, stored: str) -> None:
    X = np.array([[0, 1], [1, 1], [1, 0]]).astype(source)
    spec, got, _ = ingest_and_read(X, y=[0, 1, 0], dtype=dtype)
    assert spec.x_dtype == np.dtype(stored)
    np.testing.assert_array_equal(got, X.astype(stored))


# -------------------------------------------------------------------------------------- refusals


def test_nonfinite_value_names_file_row_and_column(tmp_path: Path) -> None:
    X = np.ones((300, 4), np.float32)
    X[217, 2] = np.nan
    np.save(tmp_path / "X.npy", X)
    (tmp_path / "d.csv").write_text(csv_text(X, np.zeros(300, int)))
    columns = {f"x{j}": X[:, j] for j in range(4)} | {"y": np.zeros(300, int)}
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    targets, out = {"y": np.zeros(300, int)}, tmp_path / "out"
    for inputs, arguments, location in (
        (X, targets, "the array, row 217, column 2"),
        (tmp_path / "X.npy", targets, "X.npy, row 217, column 2"),
        (tmp_path / "d.csv", {"y": "label", "encode": "none"}, "d.csv, row 217, column 'x2'"),
        (tmp_path / "d.parquet", {"encode": "none"}, "d.parquet, row 217, column 'x2'"),
    ):
        with pytest.raises(NonFiniteError, match=f"{location} is nan"):
            ingest(inputs, out, chunk_mb=2**-10, memory=SMALL, **arguments)  # type: ignore[arg-type]
        assert not out.exists()
        assert not scratch_folder(out).exists()
    with pytest.raises(NonFiniteError, match="target of the array, row 1 is inf"):
        ingest(X[:2], tmp_path / "out", y=np.array([0.5, np.inf]))
    for large in (np.full((2, 1), 1e6), np.full((2, 1), 10**6)):
        with pytest.raises(NonFiniteError, match="row 0, column 0 is inf as float16"):
            ingest(large, tmp_path / "out", y=[0, 1], dtype="float16")


@pytest.mark.parametrize("kind", ["parquet", "h5"])
def test_remote_file_replaced_during_read_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check Parquet, whose reader begins with the end of the file, and HDF5, which is downloaded
    before a row is read."""
    monkeypatch.setattr(remote_file, "_RANGE_BYTES", 4096)
    monkeypatch.setattr(input_files, "_COPY_BYTES", 4096)
    url, rows = f"{memory_url()}/t.{kind}", 40_000
    versions = [as_file(kind, value, rows, tmp_path) for value in (1, 2)]
    assert len(versions[0]) == len(versions[1])
    memory = fsspec.filesystem("memory")
    memory.pipe_file(url, versions[0])

    def replace(phase: str, done: int, total: int | None) -> None:
        memory.pipe_file(url, versions[1])

    if kind == "h5":
        get, new = FsspecEngine.get, [versions[1]]

        async def replacing(self: Any, key: str, start: int, stop: int | None) -> Any:
            if start and new:
                memory.pipe_file(url, new.pop())
            return await get(self, key, start, stop)

        monkeypatch.setattr(FsspecEngine, "get", replacing)

    with pytest.raises(DataError, match=rf"t\.{kind} was replaced while it was read; run the same"):
        ingest(
            url, tmp_path / "out", memory=SMALL * 4, chunk_mb=1 / 64, progress=replace,
            shuffle=False,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []  # nor scratch of two versions
    ingest(url, tmp_path / "out", memory=SMALL * 4, chunk_mb=1 / 64)
    store = open_store(tmp_path / "out")
    assert store.spec.n_rows == rows
    assert {float(k) for i in range(store.n_chunks) for k in np.unique(store.read_chunk(i)[0])} == {
        2.0
    }


def test_h5py_lock_is_free_during_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that h5py's lock is free during requests to the storage: its finalisers, which may run
    on the thread that answers, need it."""
    url = f"{memory_url()}/t.h5"
    fsspec.filesystem("memory").pipe_file(url, as_file("h5", 1, 400, tmp_path))
    get, free = FsspecEngine.get, []

    async def looking(self: Any, *args: Any) -> Any:
        free.append(phil.acquire(False))
        if free[-1]:
            phil.release()
        return await get(self, *args)

    monkeypatch.setattr(FsspecEngine, "get", looking)
    ingest(url, tmp_path / "out")
    assert free
    assert all(free)


def as_file(kind: str, value: float, rows: int, folder: Path) -> bytes:
    """Write an uncompressed file of `rows` rows of `value`, with much data after the rows."""
    X, y, path = np.full((rows, 4), value), np.zeros(rows, np.int64), folder / "made"
    if kind == "h5":
        write_hdf5(path, X=X, y=y, z=np.zeros(50_000))
    else:
        table = pa.table({**{f"c{i}": X[:, i] for i in range(4)}, "y": y})
        table = table.replace_schema_metadata({"pad": "x" * 50_000})
        pq.write_table(
            table, path, compression="none", use_dictionary=False, row_group_size=rows // 8
        )
    data = path.read_bytes()
    path.unlink()
    return data


def test_ingest_refuses_to_overwrite_store_or_input(tmp_path: Path) -> None:
    X, y = digits(60)
    ingest(X, tmp_path / "s", y=y)
    n_before = store_damage.tree(tmp_path)
    with pytest.raises(DataError, match="already holds a store"):
        ingest(X[1:], tmp_path / "s", y=y[1:])
    with pytest.raises(ConfigError, match="input and output at the same time"):
        ingest(tmp_path / "s", tmp_path / "." / "s", overwrite=True)
    (tmp_path / "s2").mkdir()
    (tmp_path / "s2" / "precious").write_text("x")
    with pytest.raises(DataError, match="did not write"):
        ingest(X, tmp_path / "s2", y=y, overwrite=True)
    # A failing replacement leaves the old store as it was.
    with pytest.raises(NonFiniteError, match="row 0, column 0 is nan"):
        ingest(np.full((3, 2), np.nan), tmp_path / "s", y=[0, 1, 2], overwrite=True)
    (tmp_path / "s2" / "precious").unlink()
    (tmp_path / "s2").rmdir()
    assert store_damage.tree(tmp_path) == n_before
    assert ingest(X[:30], tmp_path / "s", y=y[:30], overwrite=True).n_rows == 30


def test_missing_package_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name in ("a.h5", "a.parquet"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(MissingDependencyError, match=re.escape(install_command("files"))):
            ingest(tmp_path / name, tmp_path / "out")


def test_streams_are_read_in_pieces(tmp_path: Path) -> None:
    np.save(tmp_path / "X.npy", np.arange(4000, dtype="f4").reshape(1000, 4))
    with (tmp_path / "X.npy").open("rb") as file:
        array = npy_array(file, "X")
        np.testing.assert_array_equal(array[10:12], [[40, 41, 42, 43], [44, 45, 46, 47]])
        np.testing.assert_array_equal(array[0:1], [[0, 1, 2, 3]])
        assert array[990:2000].shape == (10, 4)
    with pytest.raises(DataError, match="ends inside its header"):
        idx_array(io.BytesIO(b"\0\0\x08\x03\0\0"), "short")


def test_progress_reports_rows_done_and_total() -> None:
    X, y = digits(100)
    reported: list[tuple[str, int, int | None]] = []
    ingest(X, memory_url(), y=y, chunk_mb=2**-10, progress=lambda *a: reported.append(a))
    assert [k for k in reported if k[0] == "read"] == [("read", 100, 100)]
    written = [k[1] for k in reported if k[0] == "write"]
    assert written == [*range(16, 100, 16), 100]


# ------------------------------------------------------------------------------- crash and resume

CHILD = """
import os, signal, sys
import numpy as np
from streamkern.ingest import first_pass
from streamkern.ingest.ingest import ingest
first_pass._SAVE_INTERVAL_BYTES = 20_000
stage, stop_at, out, how = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
def progress(what, done, total):
    if what == stage and done >= stop_at:
        os.kill(os.getpid(), signal.SIGKILL)
data = np.load(sys.argv[5])
X, y = data["X"], data["y"]
def blocks():
    for a in range(0, len(X), 50):
        yield X[a:a + 50], y[a:a + 50]
if how == "blocks":
    inputs, target = blocks(), None
elif how == "file":
    inputs, target = sys.argv[5], None
else:
    inputs, target = X, y
ingest(inputs, out, y=target, chunk_mb=2**-6, memory=2**18 if how != "memory" else 2**28,
       progress=progress)
"""


def run_ingest_in_child(stage: str, stop_at: int, out: Path, how: str, data: Path) -> int:
    """Return the exit status of a process that kills itself after so many rows of a stage."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", CHILD, stage, str(stop_at), str(out), how, str(data)],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
        timeout=120,
    ).returncode


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "stops"),
    [
        ("blocks", [("read", 1000), ("read", 2500), ("write", 1), ("write", 1700)]),
        ("file", [("read", 2000), ("write", 900)]),
        ("memory", [("write", 1500)]),
    ],
)
def test_repeatedly_killed_ingest_gives_same_bits(
    tmp_path: Path, how: str, stops: list[tuple[str, int]]
) -> None:
    X, y = digits(3000)
    data = tmp_path / "data.npz"
    np.savez(data, X=X, y=y)
    ingest(X, tmp_path / "whole", y=y, chunk_mb=2**-6)
    out = tmp_path / "out"
    for stage, stop_at in stops:
        assert run_ingest_in_child(stage, stop_at, out, how, data) == -signal.SIGKILL
        with pytest.raises(DataError, match=r"unfinished|no zarr store"):
            open_store(out)
    chunks = [key for key in store_damage.tree(out) if "/c/" in key]
    uninterrupted = [key for key in chunks if not is_temporary(key.rpartition("/")[2])]
    mtimes = {key: (out / key).stat().st_mtime_ns for key in uninterrupted}
    assert run_ingest_in_child("never", 0, out, how, data) == 0
    assert store_damage.content(out) == store_damage.content(tmp_path / "whole")
    assert not scratch_folder(out).exists()
    # Finished chunks were kept, not written again, save for those that each writer had under way,
    # X, y and row, when it was killed, and the journal, which is one more chunk.
    unchanged_keys = [key for key, t in mtimes.items() if (out / key).stat().st_mtime_ns == t]
    assert len(unchanged_keys) >= len(mtimes) - 3 * n_writers(out, 1 << 28, 1 << 14) - 1
    assert len([key for key in unchanged_keys if key.startswith("X/")]) >= 1


def stop_after(stage: str, rows: int) -> Any:
    """Return a callback that raises `Stop` after so many rows of a stage."""

    def progress(phase: str, done: int, total: int | None) -> None:
        if phase == stage and done >= rows:
            raise Stop

    return progress


@pytest.mark.parametrize("damaged", ["chunks", "journal"])
def test_damage_between_runs_is_repaired(tmp_path: Path, damaged: str) -> None:
    X, y = digits()
    ingest(X, tmp_path / "whole", y=y, chunk_mb=2**-6)
    with pytest.raises(Stop):
        ingest(X, tmp_path / "s", y=y, chunk_mb=2**-6, progress=stop_after("write", 512))
    if damaged == "chunks":
        store_damage.flip_bit(tmp_path / "s", "X/c/0/0/0/0")
        store_damage.truncate(tmp_path / "s", "y/c/1", keep=0)
    else:
        store_damage.flip_bit(tmp_path / "s", "digests/c/0/0")
    ingest(X, tmp_path / "s", y=y, chunk_mb=2**-6)
    assert store_damage.tree(tmp_path / "s") == store_damage.tree(tmp_path / "whole")


@pytest.mark.parametrize("stage", ["read", "write"])
def test_lost_or_torn_scratch_restarts_reading(tmp_path: Path, stage: str) -> None:
    X, y = digits()
    settings: dict[str, Any] = {"chunk_mb": 2**-6, "memory": SMALL}
    ingest(X, tmp_path / "whole", y=y, **settings)
    for damage in ("lose", "tear"):
        out = tmp_path / damage
        with pytest.raises(Stop):
            ingest(X, out, y=y, progress=stop_after(stage, 300), scratch=tmp_path / "x", **settings)
        for path in (tmp_path / "x").glob("*"):
            if damage == "lose":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-3])
        ingest(X, out, y=y, scratch=tmp_path / "x", **settings)
        assert store_damage.content(out) == store_damage.content(tmp_path / "whole")


@pytest.mark.parametrize("other", ["X", "y", "seed", "dtype", "chunk_mb"])
def test_other_data_or_settings_do_not_resume(tmp_path: Path, other: str) -> None:
    X, y = digits()
    arguments: dict[str, Any] = {"y": y, "chunk_mb": 2**-6}
    with pytest.raises(Stop):
        ingest(X, tmp_path / "s", **arguments, progress=stop_after("write", 512))
    changed = X.copy()
    changed[0, 3, 3] ^= 1
    inputs = changed if other == "X" else X
    replaced = {"y": np.roll(y, 1), "seed": 5, "dtype": "float32", "chunk_mb": 2**-7}
    if other != "X":
        arguments[other] = replaced[other]
    with pytest.raises(ResumeMismatchError, match=r"differ.*or pass overwrite=True"):
        ingest(inputs, tmp_path / "s", **arguments)
    spec = ingest(inputs, tmp_path / "s", **arguments, overwrite=True)
    assert spec.fingerprint == ingest(inputs, memory_url(), **arguments).fingerprint


@pytest.mark.parametrize("fingerprint", ["name:mine", "meta:0"])
def test_source_without_digest_is_not_identified(fingerprint: str) -> None:
    plan: Any = {"source": {"kind": "mine", "fingerprint": fingerprint}}
    assert writer.source_digest(plan, "auto") is None
    plan["source"]["fingerprint"] = "c" * 64
    assert writer.source_digest(plan, "auto") is not None


def test_full_disk_is_reported_and_ingest_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = digits()
    ingest(X, tmp_path / "whole", y=y, chunk_mb=2**-6)
    written = []

    def full(*arrays: Any) -> Any:
        written.append(1)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return real(*arrays)

    real = writer.layout.chunk_digest
    monkeypatch.setattr(writer.layout, "chunk_digest", full)
    with pytest.raises(
        OSError,
        match=r"no space left while writing .*s; .*same command again, which continues where it st",
    ):
        ingest(X, tmp_path / "s", y=y, chunk_mb=2**-6)
    monkeypatch.undo()
    ingest(X, tmp_path / "s", y=y, chunk_mb=2**-6)
    assert store_damage.tree(tmp_path / "s") == store_damage.tree(tmp_path / "whole")


def test_remote_store_resumes(tmp_path: Path) -> None:
    X, y = digits()
    url = memory_url()
    settings: dict[str, Any] = {"chunk_mb": 2**-6, "memory": SMALL, "scratch": tmp_path / "x"}
    with pytest.raises(Stop):
        ingest(X, url, y=y, progress=stop_after("write", 300), **settings)
    with pytest.raises(DataError, match="unfinished"):
        open_store(url)
    with pytest.raises(DataError, match="unfinished"):
        ingest(url, memory_url())
    spec = ingest(X, url, y=y, **settings)
    assert spec.fingerprint == ingest(X, memory_url(), y=y, chunk_mb=2**-6).fingerprint
    open_store(url).verify()


# --------------------------------------------------------------------- where each row came from


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("memory", [SMALL, 1 << 30])
def test_store_keeps_row_numbers_of_source(tmp_path: Path, shuffle: bool, memory: int) -> None:
    """Check two files in one order, also if the rows pass through scratch files."""
    X, y = digits(3000)
    for name, rows in (("a", slice(0, 1100)), ("b", slice(1100, 3000))):
        np.savez(tmp_path / f"{name}.npz", X=X[rows], y=y[rows])
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    spec = ingest(files, tmp_path / "s", shuffle=shuffle, memory=memory, chunk_mb=2**-6)
    store = open_store(tmp_path / "s")
    rows = np.concatenate([store.source_rows(i) for i in range(store.n_chunks)])
    assert rows.dtype == np.uint64
    np.testing.assert_array_equal(np.sort(rows), np.arange(3000))
    assert np.array_equal(rows, np.arange(3000)) != shuffle
    for i in range(store.n_chunks):
        chunk, labels = store.read_chunk(i)
        np.testing.assert_array_equal(chunk[..., 0], X[store.source_rows(i)])
        np.testing.assert_array_equal(labels, y[store.source_rows(i)])
    assert spec.files == ((str(files[0]), 1100), (str(files[1]), 1900))
    store.verify()


def test_row_numbers_and_files_survive_a_kill(tmp_path: Path) -> None:
    """Check that a resumed ingest has counted the rows of every file, also of those read before."""
    X, y = digits(3000)
    files = []
    for k in range(3):
        files.append(tmp_path / f"{k}.npz")
        np.savez(files[k], X=X[k::3], y=y[k::3])
    settings: dict[str, Any] = {"memory": SMALL, "chunk_mb": 2**-6}
    uninterrupted = ingest(files, tmp_path / "whole", **settings)
    for stage, at in (("read", 1500), ("write", 700)):
        with pytest.raises(Stop):
            ingest(files, tmp_path / "s", **settings, progress=stop_after(stage, at))
    spec = ingest(files, tmp_path / "s", **settings)
    assert spec.files == uninterrupted.files == tuple((str(name), 1000) for name in files)
    assert store_damage.tree(tmp_path / "s") == store_damage.tree(tmp_path / "whole")


def test_row_numbers_of_foreign_store_are_positions(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "f")
    group.create_array("X", data=np.ones((10, 3), np.float32), chunks=(4, 3))
    group.create_array("y", data=np.arange(10) % 2, chunks=(4,))
    store = open_store(tmp_path / "f")
    np.testing.assert_array_equal(store.source_rows(2), [8, 9])
    assert (store.spec.columns, store.spec.files, store.spec.target_mean) == (None, (), None)


# -------------------------------------------------------------------------- target statistics


def test_statistics_of_targets_far_from_zero_are_accurate(tmp_path: Path) -> None:
    """Check a mean of 10^6 with deviations of 1, in many chunks, with sample weights."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(5000, 2)).astype(np.float32)
    Y = rng.normal(size=(5000, 2)) * [1, 1e-3] + [1e6, -1e6]
    w = rng.integers(0, 3, 5000).astype(np.float32)
    spec = ingest(X, tmp_path / "s", y=Y, sample_weight=w, chunk_mb=2**-8)
    exact = Y.astype(np.longdouble)
    share = (w / w.sum(dtype=np.longdouble))[:, None]
    mean = (share * exact).sum(axis=0)
    deviation = np.sqrt((share * (exact - mean) ** 2).sum(axis=0))
    assert spec.target_mean is not None
    assert spec.target_scale is not None
    np.testing.assert_allclose(spec.target_mean, mean.astype(float), rtol=1e-15)
    # The last digit of 10^6 in float64 is 1e-10.
    np.testing.assert_allclose(spec.target_scale, deviation.astype(float), rtol=1e-6)


def test_column_names_are_kept_through_stores(tmp_path: Path) -> None:
    """Check names from a table to its store, and from a store to the next store."""
    (tmp_path / "t.csv").write_text("b,label,a\n1,u,2\n3,v,4\n5,u,6\n")
    spec = ingest(tmp_path / "t.csv", tmp_path / "s", y="label")
    assert (spec.columns, spec.target_columns) == (("b", "a"), ("label",))
    assert open_store(tmp_path / "s").spec.columns == spec.columns
    resumed = ingest(tmp_path / "s", tmp_path / "again")
    assert (resumed.columns, resumed.target_columns) == (("b", "a"), ("label",))
    assert resumed.files == ((str(tmp_path / "s"), 3),)


def frame(changed: bool = False) -> Any:
    """Return 2000 rows; with `changed`, one in the middle differs."""
    x = np.arange(2000.0)
    x[1000] += changed
    return pa.table({"x": x, "y": np.arange(2000) % 3})


def test_changed_data_frame_is_other_data(tmp_path: Path) -> None:
    out = tmp_path / "s"
    spec = ingest(frame(), out, y="y")
    assert ingest(frame(), out, y="y").fingerprint == spec.fingerprint
    with pytest.raises(DataError, match="already holds a store"):
        ingest(frame(changed=True), out, y="y")
    spec = ingest(frame(changed=True), out, y="y", overwrite=True)
    assert spec.fingerprint == ingest(frame(changed=True), memory_url(), y="y").fingerprint


@pytest.mark.parametrize("kind", ["rows", "keys"])
def test_altered_scratch_is_detected_and_rebuilt(tmp_path: Path, kind: str) -> None:
    X = np.arange(3000 * 64, dtype=np.int32).reshape(3000, 64) % 1000
    y = np.arange(3000) % 10
    settings: dict[str, Any] = {"y": y, "chunk_mb": 2**-6, "memory": 1 << 18, "scratch": tmp_path}
    ingest(X, tmp_path / "whole", **settings)
    with pytest.raises(Stop):
        ingest(X, tmp_path / "s", progress=stop_after("write", 300), **settings)
    altered = max(scratch_folder(tmp_path / "s", tmp_path).glob(f"*.{kind}"))  # the last to be used
    data = bytearray(altered.read_bytes())
    data[5] ^= 1
    altered.write_bytes(data)
    with pytest.raises(CorruptChunkError, match=r"was altered .* run the same command"):
        ingest(X, tmp_path / "s", **settings)
    ingest(X, tmp_path / "s", **settings)
    assert store_damage.content(tmp_path / "s") == store_damage.content(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["hdf5", "zarr"])
def test_other_meaning_of_missing_chunks_is_another_ingest(tmp_path: Path, kind: str) -> None:
    X = np.random.default_rng(0).normal(size=(12, 2))
    if kind == "hdf5":
        data = write_hdf5(tmp_path / "a.h5", X=X, y=X[:, 0])
    else:
        data = tmp_path / "a.zarr"
        group = zarr.open_group(data, mode="w")
        group["X"], group["y"] = X, X[:, 0]
    store = tmp_path / "s.zarr"
    first = ingest(data, store, missing="fill")
    if kind == "hdf5":  # a group is identified by its metadata only, so its ingest is not skipped
        assert ingest(data, store, missing="fill").fingerprint == first.fingerprint
    with pytest.raises(DataError, match="already holds a store"):
        ingest(data, store)
    assert append(data, store, missing="fill").n_rows == 24
    assert append(data, store).n_rows == 36
