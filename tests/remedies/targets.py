"""Mistakes in targets and weights, and in rows that are added to a store."""

from __future__ import annotations

from decimal import Decimal
from functools import partial as Do
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import zarr

import streamkern as sk
from tests.remedies import FRAME, LABELS, Case, N, X, Y, ingested, long_rows, regressor

COVERED = tuple(
    f"ingest/{name}.py"
    for name in ("raw_targets", "targets", "append", "first_pass", "ingest", "shuffle")
)
NOT_TRIED = {
    "ingest/first_pass.py:_read_all:1": "a reader that does not keep its word is a bug",
    "ingest/append.py:_check_store:3": "every store that this version writes has statistics",
}


def targets(y: Any, **given: Any) -> Any:
    """Ingest rows with these targets, made when they are asked for."""
    return Do(ingested, X, y=y, **given)


def objects(*labels: Any) -> Any:
    """Return labels (N,) as objects, the last one in all rows but the first."""
    made = np.empty(N, object)
    made[:] = labels[-1]
    made[: len(labels)] = labels
    return made


def csv_targets(*texts: str, **given: Any) -> Any:
    """Ingest a CSV with these targets, repeated to many rows."""

    def do() -> Any:
        rows = "".join(f"{k}.5,{texts[k % len(texts)]}\n" for k in range(N))
        Path("targets.csv").write_text(f"a,fare\n{rows}")
        return ingested("targets.csv", y="fare", **given)

    return do


def label_cases() -> list[Case]:
    """Return mistakes in targets that are labels, or look like labels."""
    days = np.full(N, "2020-01-01", "M8[D]") + np.arange(N)
    many_labels = np.arange(1200)
    shifted = np.array([[k, -k] for k in range(1200)], float)
    units, names = [f"{k} kg" for k in range(N)], [f"name {k}" for k in range(N)]
    commas = [f"{k},5" for k in range(N)]
    empty = np.where(np.arange(N) == 3, "", LABELS)
    unknown = np.where(np.arange(N) == 3, "NA", LABELS)
    words = np.where(np.arange(N) == 3, "up", "1")
    return [
        ("drop_missing_targets=True leaves such rows out", targets(empty),
         targets(empty, drop_missing_targets=True)),
        ("targets=.classes. takes 'NA' for a label", targets(unknown),
         targets(unknown, targets="classes")),
        ("which contains a null character.*correct it", targets(objects("a\0", "b")),
         targets(objects("a", "b"))),
        ("elsewhere give numbers; targets='classes' takes such text for labels", targets(commas),
         targets(commas, targets="classes"), targets([float(k.replace(",", ".")) for k in commas])),
        ("write it as a number.*targets='classes' if such text is a label", targets(["5 %"] * N),
         targets(["5 %"] * N, targets="classes"), targets([5.0] * N)),
        ("convert them, for example to days", targets(days),
         targets((days - days[0]) / np.timedelta64(1, "D"))),
        ("numbers or labels; convert them", targets(Y + 1j, targets="classes"),
         targets((Y > 0).astype(int), targets="classes")),
        ("numbers or labels; convert them", targets(Y + 1j), targets(np.c_[Y, np.ones(N)])),
        ("not a number; correct it", targets(words, targets="values"),
         targets(np.where(words == "up", "1", words), targets="values")),
        ("pass targets='classes' if all targets are labels", targets(LABELS, targets="values"),
         targets(LABELS, targets="classes")),
        ("write all of them as true or false, or all as numbers",
         csv_targets("true", "0", targets="values"), csv_targets("true", "false", targets="values"),
         csv_targets("1", "0", targets="values")),
        ("are numbers with fractions, such as 1.5.*or ingest with targets='values'",
         csv_targets("1.5", "2", targets="classes"), csv_targets("1.5", "2", targets="values")),
        ("pass targets='values' for regression", targets(Y, targets="classes"),
         targets(Y, targets="values")),
        (r"convert an array with list.map.str, y..",
         targets(objects(("a",), "b"), targets="classes"),
         targets(list(map(str, objects(("a",), "b"))), targets="classes")),
        (r"use one kind, for example list.map.str, y..",
         targets(objects("a", 1), targets="classes"),
         targets(list(map(str, objects("a", 1))), targets="classes")),
        ("use one kind", Do(ingested, blocks(LABELS, np.arange(N) % 2), targets="classes"),
         Do(ingested, blocks(LABELS, (np.arange(N) % 2).astype(str)), targets="classes")),
        ("write labels as text or integers", targets(objects(b"\xff", b"a")),
         targets(objects("\xff", "a"))),
        ("at most 64 bits: write larger ones as text",
         targets(objects(2**70, 3), targets="classes"),
         targets(list(map(str, objects(2**70, 3))), targets="classes")),
        ("256 are allowed; shorten the label", targets(["a" * 300] * N), targets(["a" * 256] * N)),
        ('use "auto", "classes" or "values"', targets(Y, targets="labels"),
         targets(Y, targets="values")),
        (r"give .n,. or .n, c.", targets(np.ones((N, 2, 2))), targets(np.ones((N, 2)))),
        ("use targets='values' for a matrix", targets(np.ones((N, 2), int), targets="classes"),
         targets(np.ones((N, 2), int), targets="values")),
        ("write them without the unit if they are numbers", targets(units),
         targets([float(k.removesuffix(" kg")) for k in units])),
        ("choose another column with y= if they are names",
         Do(ingested, FRAME.assign(name=names, fare=Y), y="name"),
         Do(ingested, FRAME.assign(name=names, fare=Y), y="fare", drop=["name"])),
        ("targets='classes' if they are classes", targets(names),
         targets(names, targets="classes")),
        ("pass targets='values' if they are numbers", Do(ingested, shifted, y=many_labels // 6),
         Do(ingested, shifted, y=many_labels // 6, targets="values")),
        ("give all rows the same number of targets", Do(ingested, blocks(np.c_[Y, Y], Y)),
         Do(ingested, blocks(np.c_[Y, Y], np.c_[Y, Y]))),
        ("correct such rows, or leave them out", targets(np.where(np.arange(N) == 3, np.inf, Y)),
         Do(ingested, X[4:], y=Y[4:])),
        ("targets='values' if all are numbers.*targets='classes' if all are labels", targets(words),
         targets(np.where(words == "up", "1", words), targets="values"),
         targets(words, targets="classes")),
        ("targets='values' for regression or.*targets='classes' to keep them as labels",
         Do(ingested, shifted, y=many_labels),
         Do(ingested, shifted, y=many_labels, targets="values"),
         Do(ingested, shifted, y=many_labels, targets="classes")),
        ("pass targets='values' if they are numbers",
         Do(ingested, np.zeros((70000, 1)), y=np.arange(70000), targets="classes"),
         Do(ingested, np.zeros((70000, 1)), y=np.arange(70000), targets="values")),
        ("numbers or labels; convert them",
         targets([Decimal(1)] * (N - 1) + ["up"], targets="values"),
         targets([Decimal(1)] * N, targets="values")),
        ("give sample weights with all blocks, or with none",
         Do(ingested, iter([(X, Y, np.ones(N)), (X, Y)])),
         Do(ingested, iter([(X, Y, np.ones(N)), (X, Y, np.ones(N))]))),
        ("has no rows; give at least one", Do(ingested, X[:0], y=Y[:0]),
         Do(ingested, X[:1], y=Y[:1])),
    ]  # fmt: skip


def blocks(first: Any, second: Any) -> Any:
    """Return two blocks of rows with these targets, which are given once."""
    return iter([(X, first), (X, second)])


def append_cases() -> list[Case]:
    """Return mistakes in what is appended to a store, and in where a store is made."""
    table = FRAME[["a", "b"]].assign(fare=Y, tip=Y * 2)
    sk.ingest_store(table, "fares.zarr", y=["fare", "tip"])
    sk.ingest_store(table, "fare.zarr", y="fare", drop=["tip"])
    table.to_csv("bare.csv", index=False, header=False)
    table.to_csv("table.csv", index=False)
    sk.ingest_store(X, "weighted.zarr", y=Y, sample_weight=np.ones(N))
    sk.ingest_store(X, "float32.zarr", y=Y.astype("f4"), dtype="float32")
    sk.ingest_store(long_rows(), "sparse.zarr", y=Y)
    foreign = zarr.open_group("foreign.zarr", mode="w")
    foreign.create_array("X", data=X)
    foreign.create_array("y", data=Y)
    noise = {"kind": "noise", "sigma": 1.0}
    sk.augment_store("data.zarr", "augmented.zarr", copies=1, transforms=[noise])
    with open("a.svm", "w") as file:
        file.write("1 1:2 2:3\n2 1:4 2:1\n")
    lazy, lazy_y = da.from_array(X), da.from_array(Y)

    def append(store: str, x: Any = X, y: Any = Y, **given: Any) -> Any:
        return Do(sk.append_store, x, store, y=y, **given)

    def halted(phase: str, done: int, rows: int | None) -> None:
        if phase == "write":
            raise KeyboardInterrupt

    def resumed_ingest(**given: Any) -> Any:
        try:
            sk.ingest_store(X, "begun.zarr", y=Y, progress=halted, overwrite=True)
        except KeyboardInterrupt:
            return sk.ingest_store(X, "begun.zarr", **given)
        raise AssertionError("the ingest was to be interrupted")

    def both() -> Any:
        sk.ingest_store(X, "more.zarr", y=Y)
        return regressor().fit(["data.zarr", "more.zarr"])

    def again() -> Any:
        ingested(X, y=Y)
        return sk.append_store(X, "made.zarr", y=Y)

    sk.ingest_store(X, "lazy.zarr", y=Y)
    sk.append_store(lazy, "lazy.zarr", y=lazy_y)
    labels = append("labels.zarr", y=LABELS)
    names = ["tip", "fare"]
    return [
        ("give it after the rows: append_store.inputs, store.",
         Do(sk.append_store, "data.zarr", ["rows.npz"]),
         Do(sk.append_store, ["rows.npz"], "data.zarr")),
        ("ingest all files together, to a new store", Do(sk.append_store, "a.svm", "data.zarr"),
         Do(ingested, ["a.svm", "a.svm"])),
        ("to a second store, and list both stores in data.train",
         append("memory://x/y.zarr"), both),
        ("ingest it, and append to the store that this makes", append("foreign.zarr"),
         lambda: (ingested("foreign.zarr"), sk.append_store(X, "made.zarr", y=Y))),
        ("append to the store that the copies were made from, and augment that store again",
         append("augmented.zarr"),
         lambda: (again(), sk.augment_store("made.zarr", "second.zarr", copies=1,
                                            transforms=[noise]))),
        ("leave it out, or", append("float32.zarr", dtype="float64"),
         append("float32.zarr", X.astype("f4"), Y.astype("f4"))),
        ("pass dtype='float32' if the store holds only such numbers",
         append("float32.zarr", y=Y.astype("f4")),
         append("float32.zarr", y=Y.astype("f4"), dtype="float32", seed=1)),
        ("ingest all rows to a new store", append("float32.zarr", dtype="float64"),
         Do(ingested, np.concatenate([X, X]), y=np.concatenate([Y, Y]), dtype="float64")),
        ("has no header line, .*add one.*give the positions of these columns with x=",
         Do(sk.append_store, "bare.csv", "fares.zarr", y=[2, 3]),
         Do(sk.append_store, "table.csv", "fares.zarr"),
         Do(sk.append_store, "bare.csv", "fares.zarr", y=[2, 3], x=[0, 1])),
        ("give the same in the same order with y=",
         Do(sk.append_store, table, "fares.zarr", y=names),
         Do(sk.append_store, table, "fares.zarr", y=names[::-1])),
        ("the targets are 'tip', .*give the same in the same order with y=",
         Do(sk.append_store, table.drop(columns="fare"), "fare.zarr", y="tip"),
         Do(sk.append_store, table, "fare.zarr", y="fare")),
        ("give another seed=", append("lazy.zarr", lazy, lazy_y),
         append("lazy.zarr", lazy, lazy_y, seed=1)),
        ("like= names have .*give rows with the same features",
         Do(ingested, X[:, :2], y=Y, like="data.zarr"), Do(ingested, X, y=Y, like="data.zarr")),
        ("append rows with the same features", append("data.zarr", X[:, :2]), append("data.zarr")),
        ("give sparse rows with the same features .scipy", append("sparse.zarr"),
         append("sparse.zarr", long_rows())),
        ("weights of .* are 0, .*give some rows a weight above 0",
         Do(ingested, X, y=Y, sample_weight=np.zeros(N)),
         Do(ingested, X, y=Y, sample_weight=np.arange(N))),
        ("give the sample weights with sample_weight=", append("weighted.zarr"),
         append("weighted.zarr", sample_weight=np.ones(N))),
        ("leave sample_weight= out", append("data.zarr", sample_weight=np.ones(N)),
         append("data.zarr", seed=2)),
        ("append rows with the same targets", append("data.zarr", y=np.c_[Y, Y]),
         append("data.zarr", seed=3)),
        ("which would round them; convert the targets first", append("float32.zarr", seed=2),
         append("float32.zarr", X.astype("f4"), Y.astype("f4"), seed=2)),
        ("none of the classes of the store.*correct it.*or ingest all rows to a new store",
         append("labels.zarr", y=np.full(N, "new")), labels,
         targets(np.where(np.arange(N) < 9, "new", LABELS))),
        ("pass overwrite=True to replace it", Do(sk.ingest_store, X, "data.zarr", y=Y),
         Do(sk.ingest_store, X, "data.zarr", y=Y, overwrite=True)),
        ("or append the rows to it", Do(sk.ingest_store, X[:9], "data.zarr", y=Y[:9]),
         append("data.zarr", X[:9], Y[:9])),
        ("made from other data or settings .*repeat the call with the same.*or pass overwrite=True",
         Do(resumed_ingest, y=Y, seed=3), Do(resumed_ingest, y=Y),
         Do(resumed_ingest, y=Y, seed=3, overwrite=True)),
    ]  # fmt: skip


TABLES = (label_cases, append_cases)
