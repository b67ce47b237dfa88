"""Mistakes in writing and reading stores, and chunks that are damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from sklearn.feature_extraction import FeatureHasher

import streamkern as sk
from streamkern.store.appender import StoreAppender
from streamkern.store.sparse_rows import pack_rows
from streamkern.store.statistics import RunningStatistics
from streamkern.store.writer import StoreWriter
from tests import bit_flips
from tests.remedies import (
    LABELS,
    TRAIN,
    Case,
    N,
    X,
    Y,
    classifier,
    command,
    fit_values,
    long_rows,
    regressor,
)

COVERED = (
    "store/appender.py", "store/row_block.py", "store/describe.py", "store/conventions.py",
    "store/fast_chunks.py",
    "store/layout.py", "store/chunk_output.py",
    "store/sample_weights.py", "store/statistics.py", "store/store.py", "store/stored_chunks.py",
    "store/writer.py", "store/sparse_rows.py",
)  # fmt: skip

NOT_TRIED = {
    "store/stored_chunks.py:StoredChunks._explain_errors:2":
        "needs bytes that decode wrongly: tests/store/test_damage.py",
}  # fmt: skip


def ingested(X: Any = X, y: Any = Y, out: str = "made.zarr", **given: Any) -> Callable[[], Any]:
    return lambda: sk.ingest_store(X, out, y=y, **{"overwrite": True} | given)


def writer(**given: Any) -> StoreWriter:
    """Return a writer of 60 rows of 3 features in chunks of 30, at a new path."""
    options = {"row_shape": (3,), "x_dtype": "f8", "n_outputs": 1, "classes": None,
               "chunk_rows": 30, "n_rows": N, "overwrite": True} | given  # fmt: skip
    return StoreWriter("written.zarr", **options)


def wrote(
    i: int = 0, X: Any = X[:30], y: Any = Y[:30], w: Any = None, **given: Any
) -> Callable[[], Any]:
    """Write a chunk."""
    return lambda: writer(**given).write_chunk(i, X, y, w)


def writer_cases() -> list[Case]:
    """Return mistakes in what is written, chunk by chunk."""
    holes, valid = np.where(np.arange(30)[:, None] == 7, np.inf, X[:30]), wrote()
    two: dict[str, Any] = {"n_outputs": 2, "classes": ["a", "b"]}
    ids = np.arange(30) % 2

    def finished(full: bool) -> None:
        new_writer = writer()
        for i in range(1 + full):
            new_writer.write_chunk(i, X[:30], Y[:30])
        new_writer.finish()

    def two_writers(at_once: bool) -> None:
        first = writer()
        if at_once:
            writer()
        for i in (0, 1):
            first.write_chunk(i, X[:30], Y[:30])
        first.finish()

    def half(**given: Any) -> None:
        shutil.rmtree("written.zarr", ignore_errors=True)
        writer(plan={"source": 1}).write_chunk(0, X[:30], Y[:30])
        writer(**{"plan": {"source": 2}, "overwrite": False} | given)

    def written_twice(**given: Any) -> None:
        finished(True)
        writer(**given)

    return [
        ("without sample weights; give sample weights with every chunk", wrote(weighted=True),
         wrote(w=np.ones(30), weighted=True)),
        ("inf in X .* correct it, or leave the row out", wrote(X=holes), valid),
        ("inf in y .* correct it, or leave the row out", wrote(y=holes[:, 0]), valid),
        ("^X is a masked array.*fill the masked entries, X.filled.value.",
         ingested(np.ma.masked_greater(X, 1.0)), ingested()),
        (r"give rows of \(3,\) float64", wrote(X=X[:30, :2]), valid),
        ("give 0 to 1", wrote(i=2), wrote(i=1)),
        ("give 30 of the 60", wrote(X=X[:9], y=Y[:9]), valid),
        ("give one target for each row", wrote(y=Y[:9]), valid),
        (r"give class ids, \(n,\) integers", wrote(**two), wrote(y=ids, **two)),
        ("give 0 to 1", wrote(y=ids + 1, **two), wrote(y=ids, **two)),
        ("2 targets; give 1", wrote(y=X[:30, :2]), valid),
        ("give one (class|name) for each", wrote(classes=["a", "b"]), wrote(y=ids, **two)),
        ("must be at least 1", wrote(n_rows=0), valid),
        ("chunk_rows=0 must be at least 1", wrote(chunk_rows=0), valid),
        ("give one name for each", wrote(columns=["a"]), wrote(columns=["a", "b", "c"])),
        ("chunk 1 of 2 was not written", lambda: finished(False), lambda: finished(True)),
        ("let only one call write to (it|the store) at a time", lambda: two_writers(True),
         lambda: two_writers(False)),
        ("repeat the call with those, or pass overwrite=True", half, lambda: half(overwrite=True),
         lambda: half(plan={"source": 1})),
        ("overwrite=True replaces it", lambda: written_twice(overwrite=False), written_twice),
        ("with each dimension at least 1", wrote(row_shape=(0,)), valid),
        ("give real numbers", wrote(x_dtype="c16"), valid),
        ("convert it to one of .* with dtype=", wrote(x_dtype="i8"), wrote(x_dtype="f8")),
    ]  # fmt: skip


def option_cases() -> list[Case]:
    """Return mistakes in the options of what makes a store, and in sample weights."""
    plain, values = ingested(), "--set data.class_weight=balanced"

    square = X[:, :1] * X[:, 0]
    turned = xr.Dataset({"X": (("f", "s"), square), "y": (("s",), Y)})

    def appended(write: bool) -> None:
        ingested(out="grows.zarr")()
        new_writer = StoreAppender("grows.zarr", N, (), "plan")
        if write:
            sk.append_store(X, "grows.zarr", y=Y)
        else:
            new_writer.finish(new_writer.statistics().result())

    def replaced(meanwhile: bool) -> None:
        ingested(out="grows.zarr")()
        head = StoreAppender("grows.zarr", N, (), "plan")
        if meanwhile:
            ingested(X + 1, out="grows.zarr")()
        head.write_chunk(1, X, Y, None, np.arange(N, 2 * N, dtype=np.uint64))
        head.finish(head.statistics().result())

    def rows(seed: int, epoch: int, start: int, stop: int) -> Any:
        return X[start:stop], np.arange(start, stop) % 2

    def of_generator(stored: bool) -> None:
        source: Any = sk.GeneratorSource(rows, N, (3,), "f8", 2, classes=["a", "b"])
        if stored:
            sk.materialise_store(source, "made.zarr", overwrite=True)
            source = sk.ZarrSource("made.zarr")
        classifier(class_weight="balanced").fit(source)

    return [
        ("append the same rows again", lambda: appended(False), lambda: appended(True)),
        ("let only one call write to", lambda: replaced(True), lambda: replaced(False)),
        ("seed=-1 must be", ingested(seed=-1), ingested(seed=0)),
        ("must be a number of MiB above 0", ingested(chunk_mb=0), ingested(chunk_mb=1)),
        ("raise memory= to .* or lower chunk_mb=", ingested(memory=1 << 20),
         ingested(memory=1 << 20, chunk_mb=0.001)),
        ("give another output", lambda: sk.ingest_store("data.zarr", "data.zarr"),
         lambda: sk.ingest_store("data.zarr", "made.zarr", overwrite=True)),
        ("use one of uint8", ingested(dtype="int3"), ingested(dtype="float32")),
        ("use one of uint8", ingested(dtype="int64"), ingested(dtype="float32")),
        ('use "auto", "zstd" or "none"', ingested(compress="zip"), ingested(compress="zstd")),
        ("give one number for each of its 60 rows", lambda: sk.ArraySource(X, Y, sample_weight=X),
         lambda: sk.ArraySource(X, Y, sample_weight=X[:, 0] ** 2)),
        ("divide all of them by their mean", ingested(sample_weight=np.full(N, 1e300)),
         ingested(sample_weight=np.full(N, 1e300) / 1e300)),
        ("write X with 's' as the first dimension, in xarray X.transpose.'s', ....",
         lambda: ingested(turned["X"], turned["y"])(),
         lambda: ingested(turned["X"].transpose("s", ...), turned["y"])()),
        ("give finite numbers, 0 or above", ingested(sample_weight=-np.ones(N)),
         ingested(sample_weight=np.ones(N))),
        ("needs classes, but the targets are values; leave it out",
         lambda: command(f"{TRAIN} {values}"), lambda: command(TRAIN)),
        ("write the rows to a store first",
         lambda: of_generator(False), lambda: of_generator(True)),
        ("give some rows a weight above 0",
         lambda: regressor().fit(sk.ArraySource(X, Y, sample_weight=np.zeros(N))),
         lambda: regressor().fit(sk.ArraySource(X, Y, sample_weight=np.ones(N)))),
        ("use its classes, ",
         lambda: classifier(class_weight={"left": 2}).fit(sk.ArraySource(X, LABELS)),
         lambda: classifier(class_weight={"up": 2}).fit(sk.ArraySource(X, LABELS))),
        ("give X in a larger unit", ingested(X * 1e200), plain),
        ("give X in a smaller unit", ingested(X * 1e-200), plain),
        ("give y in a smaller unit", ingested(y=Y * 1e-200), plain),
        ("give y in a larger unit", ingested(y=Y * 1e200), plain),
    ]  # fmt: skip


def reader_cases() -> list[Case]:
    """Return mistakes in reading a store, and stores that are damaged or replaced."""
    store = sk.open_store("data.zarr")
    plain = zarr.create_group("plain.zarr")
    for name, data in (("X", X), ("y", Y)):
        plain.create_array(name, data=data)

    def altered(change: Callable[[Path], Any], again: bool, seal: bool = False) -> None:
        """Verify a store that was changed; again : ingest the data again before."""
        root = Path("ours.zarr")
        shutil.rmtree(root, ignore_errors=True)
        sk.ingest_store(X, root, y=LABELS)
        change(root)
        if seal:
            bit_flips.reseal(root)
        if again:
            sk.ingest_store(X, root, y=LABELS, overwrite=True)
        opened = sk.open_store(root)
        opened.read_chunk(0)
        opened.verify()

    def set_to(name: str, location: Any, value: float) -> Callable[[Path], None]:
        def change(root: Path) -> None:
            group: Any = zarr.open_group(root, mode="r+")
            group[name][location] = value

        return change

    def remote(again: bool) -> None:
        import fsspec

        sk.ingest_store(X, "memory://ours.zarr", y=Y, overwrite=True)
        fsspec.filesystem("memory").rm("/ours.zarr/X/c/0/0")
        if again:
            sk.ingest_store(X, "memory://ours.zarr", y=Y, overwrite=True)
        sk.open_store("memory://ours.zarr").read_chunk(0)

    def used(how: str, restored: bool) -> None:
        ingested(out="used.zarr")()
        opened = sk.open_store("used.zarr")
        shutil.move("used.zarr", "kept.zarr")
        if how == "replaced":
            ingested(X + 1, out="used.zarr")()
        if restored:
            shutil.rmtree("used.zarr", ignore_errors=True)
            shutil.move("kept.zarr", "used.zarr")
        shutil.rmtree("kept.zarr", ignore_errors=True)
        opened.check_unchanged()

    def gone(root: Path) -> None:
        (root / "X/c/0/0").unlink()

    changes: list[tuple[str, Callable[[Path], Any], bool]] = [
        ("is missing .*ingest the data again", gone, False),
        ("the checksums in crc .*ingest the data again", set_to("crc", (0, 0), 7), False),
        ("the digests .*ingest the data again", set_to("digests", (0, 0), 7), False),
        ("does not match its digest; ingest the data again", set_to("X", (3, 1), 9.0), True),
        ("clean the data and ingest it again", set_to("X", (3, 1), np.nan), True),
        ("correct it and ingest the data again", set_to("y", 3, 9), True),
    ]

    def damaged(change: Any, seal: bool, again: bool) -> Callable[[], None]:
        return lambda: altered(change, again, seal)

    return [
        *((message, damaged(change, seal, False), damaged(change, seal, True))
          for message, change, seal in changes),
        ("ingest the data again", lambda: remote(False), lambda: remote(True)),
        ("restore it and resume", lambda: used("gone", False), lambda: used("gone", True)),
        ("restore it and resume", lambda: used("replaced", False), lambda: used("replaced", True)),
        ("give a list of integers", lambda: store.read_rows(np.ones(2)),
         lambda: store.read_rows(np.array([1, 1]))),
        ("give 0 to 59", lambda: store.read_rows(np.array([60])),
         lambda: store.read_rows(np.array([59]))),
        ("ingest the data again", lambda: sk.open_store("plain.zarr").verify(),
               lambda: (sk.ingest_store("plain.zarr", "made.zarr", overwrite=True),
                        sk.open_store("made.zarr").verify())),
    ]  # fmt: skip


def statistics_cases() -> list[Case]:
    """Return mistakes with statistics of no rows."""

    def taken(rows: int) -> None:
        statistics = RunningStatistics(3)
        if rows:
            statistics.add(X[:rows], Y[:rows, None])
        statistics.result()

    return [("there are no rows", lambda: taken(0), lambda: taken(2))]


def sparse_row_cases() -> list[Case]:
    """Return rows with more entries than those before, or too many features."""

    def hashed(n: int) -> Any:
        words = [{f"w{k}": 1} for k in range(len(Y))]
        return regressor().fit(FeatureHasher(n).transform(words), Y)

    def learned(*most: int) -> Any:
        model = regressor(epochs=1)
        for rows in map(long_rows, most):
            model.partial_fit(rows, Y)

    return [
        ("ingest all rows together, to a new store", lambda: pack_rows(long_rows(5), 2),
         lambda: pack_rows(long_rows(5))),
        ("give a row of this length among the first rows",
         lambda: learned(2, 5), lambda: learned(5, 2)),
        ("hash features to fewer .FeatureHasher of scikit-learn.",
         fit_values(long_rows(d=(1 << 31) + 1), Y), lambda: hashed(300)),
    ]  # fmt: skip


TABLES = (writer_cases, option_cases, reader_cases, statistics_cases, sparse_row_cases)
