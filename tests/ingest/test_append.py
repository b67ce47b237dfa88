"""Check that `append_store` adds all rows in one step, or none."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import streamkern as sk
from streamkern.basics.errors import (
    ConfigError,
    DataError,
    MemoryBudgetError,
    NonFiniteError,
    StreamkernError,
)
from streamkern.filesystem.scratch import Scratch, scratch_folder
from streamkern.ingest.append import append
from streamkern.ingest.ingest import ingest
from streamkern.store import zarr_json
from streamkern.store.appender import StoreAppender, complete_append
from streamkern.store.layout import StoreSpec
from streamkern.store.store import Store, open_store
from tests.power_loss import ROWS, SMALL, Command, data, replay, store_of, void

D = 4
NAMES = np.array(["Lima", "Oslo", "Rome"])


def rows(n: int, seed: int, *, classes: bool = True, weighted: bool = False) -> dict[str, Any]:
    """Return X, y and perhaps sample weights of n rows, as `ingest` takes them."""
    rng = np.random.default_rng(seed)
    arguments: dict[str, Any] = {"inputs": rng.standard_normal((n, D)).astype(np.float32)}
    arguments["y"] = NAMES[rng.integers(0, 3, n)] if classes else rng.standard_normal((n, 2))
    if weighted:
        arguments["sample_weight"] = rng.random(n).astype(np.float32)
    return arguments


def make_store(location: Path, parts: dict[str, Any], chunk_rows: int = 8) -> Path:
    """Write a store of these rows, with all three classes."""
    if parts["y"].dtype.kind == "U":
        parts["y"][:3] = NAMES[: len(parts["y"])]
    ingest(
        parts["inputs"],
        location,
        **arguments_besides_rows(parts),
        chunk_mb=chunk_rows * D * 4 / 2**20,
    )
    return location


def store_and_new_rows(tmp_path: Path) -> tuple[tuple[dict[str, Any], ...], Path]:
    """Return rows to store and rows to append, and a store of the first."""
    parts = rows(21, 0), rows(30, 1)
    return parts, make_store(tmp_path / "s", parts[0])


def arguments_besides_rows(parts: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `ingest` without the rows."""
    return {name: argument for name, argument in parts.items() if name != "inputs"}


def append_rows(location: Path, parts: dict[str, Any], **options: Any) -> StoreSpec:
    """Append rows to a store; return its spec."""
    return append(parts["inputs"], location, **arguments_besides_rows(parts), **options)


def check_rows(store: Store, *parts: dict[str, Any]) -> None:
    """Check that every row occurs once, and that its recorded number leads to its origin."""
    X = np.concatenate([part["inputs"] for part in parts])
    y = np.concatenate([part["y"] for part in parts])
    seen: list[int] = []
    for i in range(store.n_chunks):
        numbers = store.source_rows(i)
        X_of_chunk, targets, w = store.read_weighted_chunk(i)
        np.testing.assert_array_equal(X_of_chunk, X[numbers])
        if store.spec.classes is not None:
            targets = np.array(store.spec.classes)[targets]
        np.testing.assert_array_equal(targets, y[numbers])
        if w is not None:
            weights = np.concatenate([part["sample_weight"] for part in parts])
            np.testing.assert_array_equal(w, weights[numbers])
        seen += numbers.tolist()
    assert sorted(seen) == list(range(len(X)))
    store.verify()


def check_statistics(spec: StoreSpec, *parts: dict[str, Any]) -> None:
    """Compare the statistics with NumPy's of all rows."""
    X = np.concatenate([part["inputs"] for part in parts]).astype(np.float64)
    y = np.concatenate([part["y"] for part in parts])
    close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)  # float64, merged by parts
    close(spec.mean, X.mean(axis=0))
    close(spec.scale, X.std(axis=0))
    close([spec.global_mean, spec.global_scale], [X.mean(), X.std()])
    weighted = "sample_weight" in parts[0]
    w = np.ones(len(X))
    if weighted:
        w = np.concatenate([part["sample_weight"] for part in parts]).astype(np.float64)
    if spec.classes is not None:
        Y = (y[:, None] == np.array(spec.classes)).astype(np.float64)
        assert spec.class_counts == tuple(Y.sum(axis=0).astype(int))
        totals = w @ Y
    else:
        Y, totals = y, np.array([w.sum()])
    if weighted:
        close(spec.weight_totals, totals)
    mean = w @ Y / w.sum()
    close(spec.target_mean, mean)
    close(spec.target_scale, np.sqrt(w @ (Y - mean) ** 2 / w.sum()))


def files_of(root: Path) -> dict[str, str]:
    """Return the content of all files of a folder, and the names of its neighbours."""
    neighbours = {p.name: "" for p in root.parent.iterdir()}
    files = (p for p in root.rglob("*") if p.is_file())
    return neighbours | {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# ------------------------------------------------------------------------------- all rows are there


@pytest.mark.slow
@given(
    st.integers(3, 40), st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(1, 12),
    st.booleans(), st.booleans(), st.sampled_from([1 << 16, 1 << 30]),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_appended_rows_are_complete_and_traceable(
    n: int, more: list[int], chunk_rows: int, classes: bool, weighted: bool, memory: int
) -> None:
    """Check old rows that end within a chunk or with it, with and without scratch files."""
    parts = [rows(k, i, classes=classes, weighted=weighted) for i, k in enumerate([n, *more])]
    with tempfile.TemporaryDirectory() as folder:
        location = make_store(Path(folder) / "s", parts[0], chunk_rows)
        for part in parts[1:]:
            before = open_store(location).spec
            spec = append_rows(location, part, memory=memory)
            assert spec.fingerprint != before.fingerprint
            assert spec.chunk_rows == before.chunk_rows
        check_rows(open_store(location), *parts)
        check_statistics(spec, *parts)
        assert spec.files == tuple(("memory", len(part["inputs"])) for part in parts)
        assert [p.name for p in Path(folder).iterdir()] == ["s"]


def test_zarr_reads_appended_rows(tmp_path: Path) -> None:
    parts = rows(20, 0), rows(9, 1)
    location = make_store(tmp_path / "s", parts[0])
    append_rows(location, parts[1])
    store, group = open_store(location), zarr.open_group(location, mode="r")
    unconsolidated = zarr.open_group(location, mode="r", use_consolidated=False)
    X = np.concatenate([store.read_chunk(i)[0] for i in range(store.n_chunks)])
    for array_of_rows in (
        group["X"],
        unconsolidated["X"],
        zarr.open_array(location / "X", mode="r"),
    ):
        np.testing.assert_array_equal(array_of_rows[:], X)  # type: ignore[index]
    assert {name: array.shape[0] for name, array in group.arrays()} == {
        "X": 29, "y": 29, "row": 29, "digests-1": 4, "crc-1": 4,
    }  # fmt: skip


def test_appended_rows_are_shuffled_by_seed(tmp_path: Path) -> None:
    old_rows, new_rows = rows(16, 0), rows(40, 1)
    orders = []
    for seed in (0, 0, 1, None):
        location = make_store(tmp_path / f"s{len(orders)}", old_rows)
        append_rows(location, new_rows, seed=seed or 0, shuffle=seed is not None)
        store = open_store(location)
        orders.append(np.concatenate([store.source_rows(i) for i in range(store.n_chunks)])[16:])
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert np.array_equal(orders[3], np.arange(16, 56))
    assert not np.array_equal(np.sort(orders[0]), orders[0])


def test_appended_tables_use_column_names_of_store(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,label\n1,2,x\n3,4,y\n5,6.5,x\n")
    (tmp_path / "b.csv").write_text("label,b,a\ny,8,7\n")
    path = tmp_path / "s"
    ingest(tmp_path / "a.csv", path, y="label", shuffle=False)
    spec = append(tmp_path / "b.csv", path)
    assert [Path(name).name for name, _ in spec.files] == ["a.csv", "b.csv"]
    X, y = open_store(path).read_rows(np.array([3]))
    assert (X.tolist(), y.tolist(), spec.columns) == ([[7.0, 8.0]], [1], ("a", "b"))


def test_store_is_appended_with_its_weights(tmp_path: Path) -> None:
    parts = rows(20, 0, weighted=True), rows(9, 1, weighted=True)
    location, new_store = make_store(tmp_path / "s", parts[0]), make_store(tmp_path / "o", parts[1])
    spec = append(new_store, location)
    assert spec.n_rows == 29
    assert spec.weight_totals is not None
    total = sum(part["sample_weight"].sum() for part in parts)
    np.testing.assert_allclose(sum(spec.weight_totals), total, rtol=1e-6)


def table_and_dask_frame(n: int, seed: int) -> tuple[pd.DataFrame, Any]:
    """Return a table with targets t and weights w, and the same table as a data frame of Dask."""
    table = pd.DataFrame(np.random.default_rng(seed).random((n, 4)), columns=["a", "b", "t", "w"])
    return table, dd.from_pandas(table, npartitions=3)


def rows_as_table(location: Path) -> Any:
    """Return all rows of a store with its targets and weights, sorted, (n, 4)."""
    store = open_store(location)
    chunks = [store.read_weighted_chunk(i) for i in range(store.spec.n_chunks)]
    table = np.concatenate([np.column_stack([X, y, w]) for X, y, w in chunks])
    return table[np.argsort(table[:, 0])]


def test_targets_and_weights_of_dask_frame_have_names_of_store(tmp_path: Path) -> None:
    """Append to a store, ingest like a store, and name the weights but not the targets."""
    (table, _), (more, dask_frame) = table_and_dask_frame(30, 0), table_and_dask_frame(20, 1)
    ingest(table, tmp_path / "s", y="t", sample_weight="w", dtype="float64")
    append(dask_frame, tmp_path / "s")
    ingest(dask_frame, tmp_path / "like", like=tmp_path / "s", dtype="float64")
    features = dask_frame[["a", "b", "w"]]
    ingest(features, tmp_path / "y", y=dask_frame["t"], sample_weight="w", dtype="float64")
    for name, expected in (("s", pd.concat([table, more])), ("like", more), ("y", more)):
        actual = rows_as_table(tmp_path / name)
        np.testing.assert_allclose(actual, expected.sort_values("a"), rtol=1e-6)


def test_columns_of_dask_frame_can_be_dropped_but_not_encoded(tmp_path: Path) -> None:
    table, dask_frame = table_and_dask_frame(30, 0)
    assert ingest(dask_frame, tmp_path / "s", y="t", drop=["w"]).columns == ("a", "b")
    ingest(table, tmp_path / "encoded", y="t", categorical=["w"])
    message = "of Dask, whose columns cannot be encoded; give a frame in memory"
    for call in (
        partial(ingest, dask_frame, tmp_path / "c", y="t", categorical=["a"]),
        partial(ingest, dask_frame, tmp_path / "l", like=tmp_path / "encoded"),
        partial(append, dask_frame, tmp_path / "encoded"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


# ----------------------------------------------------------------------------- who reads meanwhile


def test_open_store_keeps_its_rows_after_append(tmp_path: Path) -> None:
    """Check stores that were read before a second append, and a store that was not."""
    parts = rows(21, 0), rows(30, 1), rows(5, 2)
    location = make_store(tmp_path / "s", parts[0])
    old_store = open_store(location)
    append_rows(location, parts[1])
    newer = open_store(location)
    check_rows(old_store, parts[0])
    old_store.check_unchanged()
    append_rows(location, parts[2])
    check_rows(newer, *parts[:2])
    for store in (old_store, newer):
        store.check_unchanged()
    check_rows(open_store(location), *parts)
    make_store(tmp_path / "o", rows(21, 7))
    shutil.copy(tmp_path / "o/zarr.json", location / "zarr.json")
    with pytest.raises(DataError, match="was changed while it was in use"):
        old_store.check_unchanged()


def test_store_opened_during_append_is_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a reader that read the old attribute and then the new metadata of the arrays."""
    parts, location = store_and_new_rows(tmp_path)
    read, n_reads = zarr_json._array_documents, itertools.count()

    def append_before_first_read(*arguments: Any) -> Any:
        if next(n_reads) == 0:
            append_rows(location, parts[1])
        return read(*arguments)

    monkeypatch.setattr(zarr_json, "_array_documents", append_before_first_read)
    check_rows(open_store(location), *parts)


def test_last_chunk_without_old_store_is_refused(tmp_path: Path) -> None:
    location, new_store = (
        make_store(tmp_path / "s", rows(21, 0)),
        make_store(tmp_path / "o", rows(24, 1)),
    )
    old_store = open_store(location)
    shutil.copy(new_store / "X/c/2/0", location / "X/c/2/0")
    with pytest.raises(StreamkernError, match="not the chunk that was written there"):
        old_store.read_chunk(2)


def test_pickled_store_reopens_unchanged_or_is_refused(tmp_path: Path) -> None:
    location = make_store(tmp_path / "s", rows(20, 0))
    pickled_store = pickle.dumps(open_store(location))
    assert pickle.loads(pickled_store).spec.n_rows == 20
    append_rows(location, rows(9, 1))
    with pytest.raises(DataError, match=r"rows were appended .* with 20 rows, .* --continue"):
        pickle.loads(pickled_store)
    shutil.rmtree(location)
    make_store(location, rows(20, 5))
    with pytest.raises(DataError, match="was changed while it was in use"):
        pickle.loads(pickled_store)


def test_unread_store_after_two_appends_is_refused(tmp_path: Path) -> None:
    """Check a reader whose tables no longer exist."""
    location = make_store(tmp_path / "s", rows(21, 0))
    old_store, unread_store = open_store(location), open_store(location)
    for k in range(1, 3):
        append_rows(location, rows(9, k))
    for call in (partial(old_store.read_chunk, 0), old_store.verify, unread_store.verify):
        with pytest.raises(
            DataError, match=r"rows were appended .* with 21 rows, .* open it again"
        ):
            call()


def test_training_continues_with_its_original_rows(tmp_path: Path) -> None:
    """Append during one of two runs: both models are equal, and resuming the run is refused."""
    parts, weights = (rows(60, 0), rows(30, 1)), []
    for name in ("s", "t"):
        location = make_store(tmp_path / name, parts[0])

        def grow(record: dict[str, Any], location: Path = location) -> None:
            if record["step"] == 3 and location.name == "t":
                append_rows(location, parts[1])

        config = sk.RunConfig.from_tables(
            {
                "data": {
                    "train": str(location), "test": str(location), "batch_size": 10, "epochs": 2,
                },
                "model": {"n_centers": 12, "bandwidth": 2.0},
                "solver": {"name": "block"},
                "run": {
                    "run_dir": str(tmp_path / f"run-{name}"), "evaluate_every": 1, "device": "cpu",
                    "threads": 1, "accelerator": "none",
                    "checkpoint_every": 2,
                },
            }
        )  # fmt: skip
        result = sk.train_model(config, on_evaluation=grow)
        weights.append(result.model.backend.to_host(result.model.weights))
        result.model.backend.close()
    assert open_store(tmp_path / "t").spec.n_rows == 90
    np.testing.assert_array_equal(*weights)
    with pytest.raises(sk.ResumeMismatchError, match=r"n_rows: was 60, now 90.*train --continue"):
        sk.train_model(config)


# ------------------------------------------------------------------------------- kills and repeats


def check_all_readers(root: Path) -> Any:
    """Check that zarr, for the group and for each array, reads the rows of the store.

    Returns what identifies these rows.
    """
    store = open_store(root / "o.zarr")
    group: Any = zarr.open_group(root / "o.zarr", mode="r")
    store.verify()
    for name in ("X", "y", "row"):
        single_array: Any = zarr.open_array(root / "o.zarr" / name, mode="r")
        assert len(group[name][:]) == store.spec.n_rows
        assert single_array.shape[0] in (ROWS, store.spec.n_rows)
        np.testing.assert_array_equal(single_array[:], group[name][: single_array.shape[0]])
    digest = hashlib.sha256(group["X"][:].tobytes()).digest()
    return store.spec.fingerprint, store.spec.files, str(store.spec.mean), digest


APPEND = Command(
    lambda root: void(shutil.copytree(store_of(root, 0), root / "o.zarr")),
    lambda root: void(append(data(root, 1), root / "o.zarr", memory=SMALL["memory"])),
    check_all_readers,
)


@pytest.mark.slow
def test_killed_append_leaves_old_or_new_store(tmp_path: Path) -> None:
    """Replay SIGKILL and power failures; the same command then completes the new store."""
    instants, counts = replay(APPEND, tmp_path / "d", sample=12)
    assert instants > 50
    assert counts["refused"] == 0
    assert counts.total() == 12


@pytest.mark.full
def test_every_instant_leaves_old_or_new_store(tmp_path: Path) -> None:
    _, counts = replay(APPEND, tmp_path / "d")
    assert counts["refused"] == 0


def kill_in(monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[], object]) -> None:
    """Make the call, and end it as soon as it reaches the method `name` of the appender."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreAppender, name, end)
        with pytest.raises(KeyboardInterrupt):
            call()


@pytest.mark.parametrize("name", ["_write_crcs", "_check_unchanged", "_begin", "write_chunk"])
def test_other_rows_may_be_appended_after_a_kill(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that nothing of the interrupted rows remains, and that the other rows occur once."""
    parts = rows(21, 0), rows(30, 1), rows(17, 2)
    location = make_store(tmp_path / "s", parts[0])
    kill_in(monkeypatch, name, lambda: append_rows(location, parts[1]))
    check_rows(open_store(location), parts[0])
    append_rows(location, parts[2])
    check_rows(open_store(location), parts[0], parts[2])
    append_rows(location, parts[1])
    append_rows(location, parts[1])
    check_rows(open_store(location), parts[0], parts[2], parts[1])


def test_chunks_written_by_killed_append_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, location = store_and_new_rows(tmp_path)
    kill_in(monkeypatch, "_write_crcs", lambda: append_rows(location, parts[1]))
    written = (location / "X/c/4/0").stat().st_ino
    append_rows(location, parts[1])
    assert (location / "X/c/4/0").stat().st_ino == written
    check_rows(open_store(location), *parts)


def test_repeated_append_completes_remaining_work(tmp_path: Path) -> None:
    parts, location = store_and_new_rows(tmp_path)
    old_metadata = {
        name: (location / name / "zarr.json").read_bytes() for name in ("X", "y", "row")
    }
    append_rows(location, parts[1])
    for name, text in old_metadata.items():
        (location / name / "zarr.json").write_bytes(text)
    check_rows(open_store(location), *parts)
    assert append_rows(location, parts[1]).n_rows == 51
    assert zarr.open_array(location / "X", mode="r").shape == (51, D)
    complete_append(location)


def test_same_rows_twice_in_a_row_need_another_seed(tmp_path: Path) -> None:
    parts, location = store_and_new_rows(tmp_path)
    assert append_rows(location, parts[1]).n_rows == 51
    assert append_rows(location, parts[1]).n_rows == 51
    assert append_rows(location, parts[1], seed=1).n_rows == 81
    check_rows(open_store(location), *parts, parts[1])


def test_iterator_that_resembles_appended_rows_is_refused(tmp_path: Path) -> None:
    """Check an iterator, of which only the beginning is known."""
    parts, location = store_and_new_rows(tmp_path)
    blocks = [(parts[1]["inputs"], parts[1]["y"])]
    append(iter(blocks), location)
    with pytest.raises(DataError, match=r"the same first and last row.*give another seed="):
        append(iter([*blocks, *blocks]), location)
    assert append(iter([*blocks, *blocks]), location, seed=1).n_rows == 111


def test_concurrent_append_is_refused(tmp_path: Path) -> None:
    location = make_store(tmp_path / "s", rows(21, 0))
    with Scratch(scratch_folder(location, ending=".append")) as other:
        other.claim()
        with pytest.raises(DataError, match="in use by another call for the same output"):
            append_rows(location, rows(9, 1))
        other.discard()
    assert append_rows(location, rows(9, 1)).n_rows == 30


def test_store_replaced_during_append_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, replacement = make_store(tmp_path / "s", rows(21, 0)), rows(21, 5)
    check = StoreAppender._check_unchanged

    def replace_store_before_check(self: StoreAppender) -> None:
        ingest(
            replacement["inputs"],
            location,
            y=replacement["y"],
            overwrite=True,
            chunk_mb=128 / 2**20,
        )
        check(self)

    monkeypatch.setattr(StoreAppender, "_check_unchanged", replace_store_before_check)
    with pytest.raises(DataError, match="it was replaced while they were written"):
        append_rows(location, rows(9, 1))
    check_rows(open_store(location), replacement)


# ------------------------------------------------------------------------- tables, and replacing it


def test_tables_of_old_store_are_deleted_when_unused(tmp_path: Path) -> None:
    location = make_store(tmp_path / "s", rows(21, 0))
    for k in range(1, 4):
        append_rows(location, rows(9, k))
    names = {p.name for p in location.iterdir()}
    assert names == {"zarr.json", "X", "y", "row", "digests-2", "crc-2", "digests-3", "crc-3"}
    mark = json.loads((location / "zarr.json").read_text())["attributes"]["streamkern"]
    assert [n for n, _ in mark["before"]] == [21, 30, 39]


def test_reader_keeps_its_rows_after_several_appends(tmp_path: Path) -> None:
    location = make_store(tmp_path / "s", rows(21, 0))
    old_store = open_store(location)
    copies = [
        part.copy()
        for i in range(old_store.spec.n_chunks)
        for part in old_store.stored_chunks.read(i)
    ]
    for k in range(1, 4):
        append_rows(location, rows(9, k))
        now = [
            part for i in range(old_store.spec.n_chunks) for part in old_store.stored_chunks.read(i)
        ]
        assert all(np.array_equal(a, b) for a, b in zip(now, copies, strict=True))


def test_foreign_attributes_are_kept_by_append(tmp_path: Path) -> None:
    location = make_store(tmp_path / "s", rows(21, 0))
    for path in (location, location / "X"):
        node: Any = zarr.open(path, mode="r+")
        node.attrs["mine"] = 1
    append_rows(location, rows(9, 1))
    for path in (location, location / "X"):
        assert zarr.open(path, mode="r").attrs["mine"] == 1
    check_rows(open_store(location), *(rows(21, 0) | {"y": open_labels(location, 21)}, rows(9, 1)))


def open_labels(location: Path, n: int) -> Any:
    """Return the labels of the first n rows, of which `make_store` sets some."""
    store = open_store(location)
    numbers = np.concatenate([store.source_rows(i) for i in range(store.n_chunks)])
    ids = np.concatenate([store.read_targets(i) for i in range(store.n_chunks)])
    return NAMES[ids[np.argsort(numbers)]][:n]


def test_appended_store_can_be_overwritten(tmp_path: Path) -> None:
    location, new = make_store(tmp_path / "s", rows(21, 0)), rows(12, 3)
    append_rows(location, rows(9, 1))
    with pytest.raises(DataError, match=r"already holds a store.*append_store"):
        ingest(new["inputs"], location, y=new["y"])
    ingest(new["inputs"], location, y=new["y"], overwrite=True)
    check_rows(open_store(location), new)
    assert {p.name for p in location.iterdir()} == {"zarr.json", "X", "y", "row", "digests", "crc"}
    assert "consolidated_metadata" not in json.loads((location / "zarr.json").read_text())


def test_repeated_ingest_does_not_resume_appended_store(tmp_path: Path) -> None:
    parts = rows(21, 0)
    location = make_store(tmp_path / "s", parts)
    append_rows(location, rows(9, 1))
    with pytest.raises(DataError, match="already holds a store"):
        make_store(location, parts)


# --------------------------------------------------------------------------------------- refusals


def test_append_to_read_only_folder_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the error of `ingest` for such a folder, before any file is made."""
    location = make_store(tmp_path / "s", rows(21, 0))

    def fail(**options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(ConfigError, match=r"s cannot be written to .*read-only.*give another path"):
        append_rows(location, rows(9, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


X9 = rows(9, 1)["inputs"]
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "class": (DataError, "row 2 is 'Bern', which is none of the classes",
              {"inputs": X9, "y": np.array(["Lima", "Rome", "Bern"] * 3)}),
    "shape": (DataError, r"shape \(3,\), but those of the store have \(4,\)",
              {"inputs": X9[:, :3], "y": NAMES[[0] * 9]}),
    "dtype": (DataError, "float64, .* stored as float32, .*pass dtype='float32' if the store",
              {"inputs": X9.astype(np.float64), "y": NAMES[[0] * 9]}),
    "weights": (DataError, "no sample weights, but the rows of the array have some; leave",
                {"inputs": X9, "y": NAMES[[0] * 9], "sample_weight": np.ones(9)}),
    "nan": (NonFiniteError, "nan", {"inputs": X9 * np.nan, "y": NAMES[[0] * 9]}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_incompatible_rows_are_refused_without_traces(name: str, tmp_path: Path) -> None:
    kind, text, given = REFUSED[name]
    location = make_store(tmp_path / "s", rows(21, 0))
    before = files_of(location)
    with pytest.raises(kind, match=text):
        append_rows(location, given)
    assert files_of(location) == before


def test_numeric_text_is_rounded_only_without_loss(tmp_path: Path) -> None:
    location, more = tmp_path / "s", tmp_path / "m.csv"
    ingest(X9, location, y=NAMES[[0, 1, 2] * 3])
    lines = ["a,b,c,d,city", *(f"{1e9 + k},1,2,3,Oslo" for k in range(4))]
    more.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="is rounded by up to"):
        append(more, location, y="city")
    assert append(more, location, y="city", dtype="float32").n_rows == 13


def test_wider_rows_are_rounded_on_request(tmp_path: Path) -> None:
    location, wide = make_store(tmp_path / "s", rows(21, 0)), X9.astype(np.float64) + 1e-9
    append(wide, location, y=NAMES[[0] * 9], dtype="float32")
    actual = open_store(location).read_rows(np.arange(21, 30))[0]
    np.testing.assert_array_equal(np.sort(actual, axis=0), np.sort(np.float32(wide), axis=0))


def test_memory_bounds_the_conversion_of_sparse_columns(tmp_path: Path) -> None:
    columns = scipy.sparse.csc_array(np.ones((4000, 50), np.float32))  # 1.6 MB with its indices
    scipy.sparse.save_npz(tmp_path / "X.npz", columns)
    location = tmp_path / "s.zarr"
    ingest(np.ones((10, 50), np.float32), location, y=np.arange(10.0), targets="values")
    with pytest.raises(MemoryBudgetError, match="raise memory="):
        append(tmp_path / "X.npz", location, y=np.arange(4000.0), memory="4 MB")
    assert append(tmp_path / "X.npz", location, y=np.arange(4000.0)).n_rows == 4010


@pytest.mark.parametrize("words", [False, True])
def test_unused_column_is_not_appended_as_the_target(tmp_path: Path, words: bool) -> None:
    """Check columns by name, with and without an encoder, and by position."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((20, 4)), columns=["p", "q", "y", "u"])
    if words:
        frame["q"] = np.where(frame["q"] > 0, "up", "down")
    store = tmp_path / "s.zarr"
    ingest(frame, store, y="y", drop=["u"])
    with pytest.raises(DataError, match=r"the targets are 'u', but .* of the store are 'y'"):
        append(frame.drop(columns="y"), store, y="u")
    renamed = frame.rename(columns={"y": "z"})
    assert append(renamed, store, y="z").n_rows == 40  # one target may have another name
    if words:
        return
    unnamed, store = tmp_path / "unnamed.csv", tmp_path / "unnamed.zarr"
    frame.to_csv(unnamed, index=False, header=False)
    ingest(str(unnamed), store, x=[0, 1], y=2)
    with pytest.raises(DataError, match=r"the targets are '3', but .* of the store are '2'"):
        append(str(unnamed), store, y=3)
    assert append(str(unnamed), store, y=-2).n_rows == 40
    assert append(str(unnamed), store, x=[0, 1], y=3).n_rows == 60  # a file with other positions
