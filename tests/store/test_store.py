"""Check that stores are written, opened, read and resumed, and that wrong ones are refused."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.storage import LocalStore, MemoryStore

from streamkern.basics.errors import (
    ConfigError,
    CorruptChunkError,
    DataError,
    NonFiniteError,
    ResumeMismatchError,
    StoreNotFoundError,
)
from streamkern.basics.text import redact
from streamkern.filesystem import ownership
from streamkern.filesystem.durable import disk_full_hint
from streamkern.filesystem.urls import StrictStore, zarr_store
from streamkern.store.describe import describe_store
from streamkern.store.statistics import RunningStatistics
from streamkern.store.store import Store, open_store
from streamkern.store.writer import StoreWriter
from tests import bit_flips, store_damage
from tests.raw_files import memory_url
from tests.traced_memory import traced_memory

DTYPES = ["uint8", "uint16", "float16", "float32", "float64"]


def sample(
    n: int, row_shape: tuple[int, ...], dtype: str, c: int = 3, seed: int = 0
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return n random rows of a dtype and their class ids below c."""
    rng = np.random.default_rng(seed)
    X = rng.normal(100.0, 30.0, (n, *row_shape)).clip(0, 250).astype(dtype)
    return X, rng.integers(0, c, n)


def write(
    url: Any, X: NDArray[Any], y: NDArray[Any], chunk_rows: int = 7, **settings: Any
) -> Store:
    """Write a store of these rows, in chunks of `chunk_rows`, and open it."""
    c = 3 if y.ndim == 1 else y.shape[1]
    classes = ["a", "b", "c"] if y.ndim == 1 else None
    stats = RunningStatistics(int(np.prod(X.shape[1:])), 3 if y.ndim == 1 else None)
    writer = StoreWriter(
        url, X.shape[1:], X.dtype, c, classes, chunk_rows,
        n_rows=len(X), y_dtype=y.dtype, **settings,
    )  # fmt: skip
    for i in range(writer.spec.n_chunks):
        rows = slice(i * writer.spec.chunk_rows, (i + 1) * writer.spec.chunk_rows)
        writer.write_chunk(i, X[rows], y[rows])
        stats.add(X[rows], y[rows])
    writer.finish(stats.result())
    return open_store(url, storage_options=settings.get("storage_options"))


def start_writer(url: Any, n_rows: int, **settings: Any) -> StoreWriter:
    """Return a writer of rows (5,) of uint8 and three classes, in chunks of seven rows."""
    return StoreWriter(url, (5,), "u1", 3, ["a", "b", "c"], 7, n_rows=n_rows, **settings)


def write_chunks(writer: StoreWriter, X: NDArray[Any], y: NDArray[Any], *chunks: int) -> None:
    """Write the chunks with these numbers."""
    for i in chunks:
        writer.write_chunk(i, X[i * 7 : i * 7 + 7], y[i * 7 : i * 7 + 7])


# ------------------------------------------------------------------------------------ round trip


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    row_shape=st.one_of(st.tuples(st.integers(1, 9)), st.tuples(*[st.integers(1, 4)] * 3)),
    dtype=st.sampled_from(DTYPES),
    chunk_rows=st.integers(1, 50),
    values=st.booleans(),
    compress=st.sampled_from(["auto", "zstd", "none"]),
)
def test_store_returns_written_rows(
    n: int, row_shape: tuple[int, ...], dtype: str, chunk_rows: int, values: bool, compress: str
) -> None:
    X, y = sample(n, row_shape, dtype)
    targets = np.random.default_rng(1).normal(size=(n, 2)).astype(np.float32) if values else y
    store = write(memory_url(), X, targets, chunk_rows, compress=compress)
    assert (store.spec.n_rows, store.spec.row_shape) == (n, row_shape)
    assert store.spec.x_dtype == X.dtype
    chunks = [store.read_chunk(i) for i in range(store.n_chunks)]
    np.testing.assert_array_equal(np.concatenate([k[0] for k in chunks]), X)
    np.testing.assert_array_equal(np.concatenate([k[1] for k in chunks]), targets)
    assert chunks[0][0].dtype == X.dtype
    assert values or chunks[0][1].dtype == np.int64
    rows = np.random.default_rng(2).integers(0, n, 13)
    picked, labels = store.read_rows(rows)
    np.testing.assert_array_equal(picked, X[rows])
    np.testing.assert_array_equal(labels, targets[rows])
    assert store.spec.scale is not None
    # Two passes over all rows at once, against slabs merged: the same up to rounding.
    np.testing.assert_allclose(
        store.spec.scale, X.reshape(n, -1).astype(np.float64).std(axis=0), rtol=1e-9, atol=1e-9
    )
    store.verify()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_shape", [(5,), (3, 2, 1)])
def test_zarr_and_tensorstore_open_store(
    tmp_path: Path, dtype: str, row_shape: tuple[int, ...]
) -> None:
    X, y = sample(30, row_shape, dtype)
    write(tmp_path / "s", X, y)
    plain = zarr.open_group(tmp_path / "s", mode="r")
    np.testing.assert_array_equal(plain["X"][:], X)
    np.testing.assert_array_equal(plain["y"][:], y)
    assert plain["X"].metadata.dimension_names[0] == plain["y"].metadata.dimension_names[0]
    for name, expected in (("X", X), ("y", y)):
        kvstore = {"driver": "file", "path": f"{tmp_path}/s/{name}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result()
        np.testing.assert_array_equal(array.read().result(), expected)


def test_store_has_documented_codecs_and_attributes(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "uint8")
    store = write(tmp_path / "s", X, y)
    assert store.codec_names() == ["bytes", "zstd", "crc32c"]
    assert write(tmp_path / "f", X.astype("f4"), y).codec_names() == ["bytes", "crc32c"]
    state = json.loads((tmp_path / "s" / "zarr.json").read_text())["attributes"]["streamkern"]
    assert state["classes"] == ["a", "b", "c"]
    assert state["class_counts"] == np.bincount(y, minlength=3).tolist()
    np.testing.assert_allclose(state["mean"], X.mean(axis=0), rtol=1e-12)
    assert state["global_mean"] == pytest.approx(X.mean(), rel=1e-12)
    assert state["global_scale"] == pytest.approx(X.astype(float).std(), rel=1e-12)
    assert len(state["fingerprint"]) == 64
    assert not any("digests" in key for key in state)


def test_fingerprint_depends_on_content_only(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "uint8")
    reference = write(tmp_path / "a", X, y).spec.fingerprint
    assert write(memory_url(), X, y, compress="none").spec.fingerprint == reference
    changed = X.copy()
    changed[29, 4] ^= 1
    assert write(memory_url(), changed, y).spec.fingerprint != reference
    labels = y.copy()
    labels[0] = (labels[0] + 1) % 3
    assert write(memory_url(), X, labels).spec.fingerprint != reference
    assert write(memory_url(), X, y, chunk_rows=8).spec.fingerprint != reference
    # The digests are plain sha256 of the decoded chunk, for anyone to check.
    import hashlib

    digest = zarr.open_group(tmp_path / "a", mode="r")["digests"][1]
    assert bytes(digest[:32]) == hashlib.sha256(X[7:14].tobytes()).digest()
    assert bytes(digest[32:64]) == hashlib.sha256(y[7:14].astype("u1").tobytes()).digest()
    assert bytes(digest[64:]) == hashlib.sha256(np.arange(7, 14, dtype="<u8").tobytes()).digest()


def test_store_opens_by_path_url_and_group(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "float32")
    by_path = write(tmp_path / "s", X, y)
    by_url = open_store((tmp_path / "s").as_uri())
    by_group = open_store(zarr.open_group(tmp_path / "s", mode="r"))
    in_memory = write(memory_url(), X, y)
    for store in (by_path, by_url, by_group, in_memory):
        assert store.spec.fingerprint == by_path.spec.fingerprint
        np.testing.assert_array_equal(store.read_chunk(1)[0], X[7:14])


def test_renamed_attribute_gives_warning(tmp_path: Path) -> None:
    store = write(tmp_path / "s", *sample(30, (5,), "float32"))
    with pytest.warns(FutureWarning, match=r"Store\.stored was renamed to stored_chunks"):
        assert store.stored is store.stored_chunks


def test_nested_group_opens_and_names_its_keys() -> None:
    X, y = sample(20, (5,), "float32")
    root = zarr.create_group(MemoryStore())
    inner = root.create_group("data/train")
    inner.create_array("X", data=X, chunks=(7, 5), config={"write_empty_chunks": True})
    inner.create_array("y", data=y, chunks=(7,), config={"write_empty_chunks": True})
    store = open_store(inner)
    np.testing.assert_array_equal(store.read_rows(np.arange(20))[0], X)


def test_pickled_store_reopens_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = sample(30, (5,), "float32")
    write(tmp_path / "s", X, y)
    monkeypatch.chdir(tmp_path)
    travelled = pickle.dumps(open_store("s"))  # as a Dask cluster does with arguments of a task
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(pickle.loads(travelled).read_chunk(4)[0], X[28:])
    with pytest.raises(TypeError, match="open it by URL"):
        pickle.dumps(open_store(zarr.open_group(tmp_path / "s", mode="r")))


def test_store_is_read_without_targets(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "float32")
    write(tmp_path / "s", X, y)
    store = open_store(tmp_path / "s", y=None)
    assert (store.spec.n_outputs, store.spec.classes) == (0, None)
    assert store.spec.mean is not None
    assert store.read_chunk(0)[1].shape == (7, 0)
    assert store.read_rows(np.array([29, 0]))[1].shape == (2, 0)


def test_read_rows_refuses_missing_rows(tmp_path: Path) -> None:
    store = write(tmp_path / "s", *sample(30, (5,), "float32"))
    with pytest.raises(ConfigError, match=r"row -1 is not in .* give 0 to 29"):
        store.read_rows(np.array([3, -1]))
    assert store.read_rows(np.array([], dtype=np.int64))[0].shape == (0, 5)
    with pytest.raises(IndexError):
        store.read_chunk(5)


def test_reading_a_chunk_allocates_one_chunk(tmp_path: Path) -> None:
    X, y = sample(4096, (512,), "float32")
    store = write(tmp_path / "s", X, y, chunk_rows=512)
    store.read_chunk(0)
    with traced_memory() as traced:
        store.read_chunk(3)
    peak = traced.peak
    # The stored bytes, their copy without the checksum or its view, and the result.
    assert peak < 3.5 * 512 * 512 * 4


# ---------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("key", ["X/c/2/0", "y/c/2"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
@pytest.mark.parametrize("by_zarr", [False, True])
def test_damage_raises_and_names_the_key(
    tmp_path: Path, key: str, dtype: str, damage: str, by_zarr: bool
) -> None:
    store = write(tmp_path / "s", *sample(30, (5,), dtype))
    if by_zarr:
        plain = _FailingStore(LocalStore(tmp_path / "s", read_only=True))
        store = open_store(zarr.open_group(plain, mode="r"))
    match damage:
        case "flip":
            store_damage.flip_bit(tmp_path / "s", key, byte=2)
        case "truncate":
            store_damage.truncate(tmp_path / "s", key)
        case "empty":
            store_damage.truncate(tmp_path / "s", key, keep=0)
        case "remove":
            store_damage.remove(tmp_path / "s", key)
    with pytest.raises(CorruptChunkError, match=f"chunk {key} .*ingest the data again"):
        store.read_chunk(2)
    with pytest.raises(CorruptChunkError, match=key):
        store.verify()
    store.read_chunk(1)


def test_every_bit_flip_of_a_chunk_is_detected(tmp_path: Path) -> None:
    store = write(tmp_path / "s", *sample(7, (3,), "uint8"))
    path = tmp_path / "s" / "X/c/0/0"
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptChunkError, match=r"^chunk X/c/0/0 of .*s "):
            store.read_chunk(0)


def test_chunks_of_zeros_are_written(tmp_path: Path) -> None:
    X, y = np.zeros((30, 5), np.uint8), np.zeros(30, np.int64)
    store = write(tmp_path / "s", X, y)
    assert (tmp_path / "s" / "X/c/3/0").exists()
    assert (tmp_path / "s" / "y/c/3").exists()
    np.testing.assert_array_equal(store.read_chunk(3)[0], 0)


def test_nonfinite_values_and_invalid_ids_name_chunk_and_row(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "float32")
    write(tmp_path / "s", X, y)

    def alter_value(array: str, location: Any, value: float) -> Store:
        zarr.open_group(tmp_path / "s", mode="r+")[array][location] = value
        bit_flips.reseal(tmp_path / "s")
        return open_store(tmp_path / "s")

    store = alter_value("X", (9, 3), np.nan)
    with pytest.raises(NonFiniteError, match=r"nan in X/c/1/0 \(chunk 1\).*row 9, column 3"):
        store.read_chunk(1)
    store = alter_value("X", (9, 3), -np.inf)
    with pytest.raises(NonFiniteError, match="-inf"):
        store.read_rows(np.array([10]))
    store = alter_value("y", 20, 3)
    with pytest.raises(DataError, match="class id 3 in y/c/2, row 20"):
        store.read_chunk(2)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_large_finite_values_are_not_infinite(dtype: str) -> None:
    X = np.full((4, 3), np.finfo(dtype).max, dtype)
    writer = StoreWriter(memory_url(), (3,), dtype, 2, ["a", "b"], 4, n_rows=4)
    writer.write_chunk(0, X, np.zeros(4, np.int64))
    writer.finish()
    np.testing.assert_array_equal(open_store(writer.url).read_chunk(0)[0], X)


class _FailingStore(StrictStore):
    """A store whose chunks cannot be read, although its metadata can."""

    def __init__(self, inner: Any, error: Exception | None = None) -> None:
        super().__init__(inner)
        self._error = error

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        if "/c/" in key and self._error is not None:
            raise self._error
        return await self._store.get(key, prototype, byte_range)

    def with_read_only(self, read_only: bool = False) -> _FailingStore:
        return _FailingStore(self._store.with_read_only(read_only), self._error)


def test_storage_faults_remain_oserrors(tmp_path: Path) -> None:
    write(tmp_path / "s", *sample(30, (5,), "float32"))
    inner = LocalStore(tmp_path / "s", read_only=True)
    timeout = TimeoutError("no answer in 15 s")
    with pytest.raises(TimeoutError) as caught:
        open_store(zarr.open_group(_FailingStore(inner, timeout), mode="r")).read_chunk(0)
    assert caught.value is timeout
    with pytest.raises(OSError, match=r"reading crc/c/0/0 failed: RuntimeError: 503") as wrapped:
        open_store(zarr.open_group(_FailingStore(inner, RuntimeError("503")), mode="r")).read_chunk(
            0
        )
    assert not isinstance(wrapped.value, CorruptChunkError)


def test_other_content_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        with pytest.raises(StoreNotFoundError, match="there is no zarr store at"):
            open_store(tmp_path / name)
    (tmp_path / "t.npz").write_bytes(b"PK")
    with pytest.raises(StoreNotFoundError, match=r"t.npz is a file, .* streamkern ingest"):
        open_store(tmp_path / "t.npz")
    with pytest.raises(FileNotFoundError):
        open_store(memory_url())


# --------------------------------------------------------------------------------------- secrets


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    url, options = memory_url(), {"skip_instance_cache": True, "token": "hunter2"}
    store = write(url, *sample(30, (5,), "float32"), storage_options=options)
    shown = [repr(store), str(store.spec), json.dumps(describe_store(store))]
    faults_seen = []
    for bad_url in (url + "x", url):
        try:
            open_store(bad_url, x="nothing", storage_options=options)
        except DataError as error:
            faults_seen.append(str(error))
    assert len(faults_seen) == 2
    assert not [text for text in shown + faults_seen if "hunter2" in text]
    assert redact("https://me:pw@host/a.zarr?sig=abc#x") == "https://host/a.zarr"
    with pytest.raises(ConfigError, match="local path") as caught:
        zarr_store(tmp_path, storage_options={"key": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_missing_chunks_raise_in_synchronous_reads(tmp_path: Path) -> None:
    write(tmp_path / "s", *sample(30, (5,), "float32"))
    store = StrictStore(LocalStore(tmp_path / "s", read_only=True))
    assert store.get_sync("X/zarr.json") is not None
    assert store.get_sync("nothing/zarr.json") is None
    with pytest.raises(CorruptChunkError, match="X/c/9/0"):
        store.get_sync("X/c/9/0")


# ------------------------------------------------------------------------------------- statistics


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, 1e6]),
    dtype=st.sampled_from(["uint8", "float32", "float64"]),
)
def test_running_statistics_equal_two_passes(cuts: list[int], offset: float, dtype: str) -> None:
    rng = np.random.default_rng(sum(cuts))
    X = rng.uniform(0, 200, (sum(cuts), 6))
    X = (X if dtype == "uint8" else X + offset).astype(dtype)
    y = rng.integers(0, 4, len(X))
    running = RunningStatistics(6, 4)
    for part, labels in zip(
        np.split(X, np.cumsum(cuts)[:-1]), np.split(y, np.cumsum(cuts)[:-1]), strict=True
    ):
        running.add(part, labels)
    stats = running.result()
    exact = X.astype(np.longdouble)
    # Rounding of float64 sums relative to the offset; the naive sum of squares would lose 1e-4.
    np.testing.assert_allclose(stats.mean, exact.mean(axis=0).astype(float), rtol=1e-13)
    np.testing.assert_allclose(stats.scale, exact.std(axis=0).astype(float), rtol=1e-9, atol=1e-12)
    assert stats.global_mean == pytest.approx(float(exact.mean()), rel=1e-13)
    assert stats.global_scale == pytest.approx(float(exact.std()), rel=1e-9)
    assert stats.class_counts == tuple(np.bincount(y, minlength=4).tolist())


# ----------------------------------------------------------------------------------------- writer


def test_unfinished_store_is_refused_and_resumed(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "uint8")
    write(tmp_path / "whole", X, y)

    writer = start_writer(tmp_path / "s", 30, plan={"source": 1})
    write_chunks(writer, X, y, 0, 3)
    with pytest.raises(DataError, match="chunk 1 of 5 was not written"):
        writer.finish()
    with pytest.raises(DataError, match="unfinished store; run the same ingest again"):
        open_store(tmp_path / "s")
    with pytest.raises(ResumeMismatchError, match="source differ"):
        start_writer(tmp_path / "s", 30, plan={"source": 2})
    second_writer = start_writer(tmp_path / "s", 30, plan={"source": 1})
    assert second_writer.resumed
    assert second_writer.is_written.tolist() == [True, False, False, True, False]
    store_damage.flip_bit(tmp_path / "s", "X/c/3/0", byte=2)
    block = second_writer.read_back(0)
    assert block is not None
    np.testing.assert_array_equal(block[0], X[:7])
    assert second_writer.read_back(1) is None
    assert second_writer.read_back(3) is None  # damaged after it was journaled
    write_chunks(second_writer, X, y, 1, 2, 3, 4)
    stats = RunningStatistics(5, 3)
    for i in range(5):
        stats.add(X[i * 7 : i * 7 + 7], y[i * 7 : i * 7 + 7])
    second_writer.finish(stats.result())
    assert store_damage.content(tmp_path / "s") == store_damage.content(tmp_path / "whole")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("is_finished", [False, True])
def test_replaced_writer_does_not_publish(overwrite: bool, is_finished: bool) -> None:
    """Check a writer that another one has replaced or resumed, and perhaps finished."""
    url = memory_url()
    X, y = sample(14, (5,), "uint8")

    first_writer = start_writer(url, 14, plan={"seed": 1})
    write_chunks(first_writer, X, y, 0)
    second = start_writer(url, 14, plan={"seed": 1}, overwrite=overwrite)
    assert second.resumed
    write_chunks(second, X, y, 0, 1)
    write_chunks(first_writer, X, y, 1)
    if is_finished:
        spec = second.finish()
    with pytest.raises(
        DataError, match="cannot be finished: another writer has since taken it over"
    ):
        first_writer.finish()
    if not is_finished:
        spec = second.finish()
    assert open_store(url).spec.fingerprint == spec.fingerprint
    open_store(url).verify()


def test_writer_replaced_during_sync_does_not_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = sample(7, (5,), "uint8")
    first_writer = start_writer(tmp_path / "s", 7)
    write_chunks(first_writer, X, y, 0)
    monkeypatch.setattr(ownership, "sync_store", lambda store: start_writer(tmp_path / "s", 7))
    with pytest.raises(DataError, match="another writer has since taken it over"):
        first_writer.finish()
    with pytest.raises(DataError, match="unfinished store"):
        open_store(tmp_path / "s")


def test_store_never_mixes_two_writers(tmp_path: Path) -> None:
    """Check that the first writer, whose plan is gone, cannot publish."""
    X, y = sample(14, (5,), "uint8")
    first_writer = start_writer(tmp_path / "s", 7, plan={"seed": 1})
    write_chunks(first_writer, X, y, 0)
    second = start_writer(tmp_path / "s", 7, plan={"seed": 2}, overwrite=True)
    files_before = store_damage.tree(tmp_path / "s")
    with pytest.raises(DataError, match="let only one call write to it at a time"):
        first_writer.finish()
    assert store_damage.tree(tmp_path / "s") == files_before
    with pytest.raises(DataError, match="unfinished store"):
        open_store(tmp_path / "s")
    second.write_chunk(0, X[7:], y[7:])
    second.finish()
    np.testing.assert_array_equal(open_store(tmp_path / "s").read_chunk(0)[0], X[7:])


def test_store_is_overwritten_only_on_request(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "uint8")
    write(tmp_path / "s", X, y)
    files_before = store_damage.tree(tmp_path / "s")
    with pytest.raises(DataError, match="already holds a store; overwrite=True"):
        write(tmp_path / "s", X, y)
    assert store_damage.tree(tmp_path / "s") == files_before
    store = write(tmp_path / "s", X[:10, :3].copy(), y[:10], overwrite=True)
    assert store.spec.row_shape == (3,)
    assert not (tmp_path / "s" / "X/c/3").exists()
    store.verify()


def test_foreign_files_are_never_deleted(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "uint8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("three years")
    zarr.create_group(LocalStore(tmp_path / "climate")).create_array("t", data=X)
    zarr.create_array(LocalStore(tmp_path / "array"), data=X)
    files_before = store_damage.tree(tmp_path)
    for name in ("notes", "climate", "array"):
        with pytest.raises(DataError, match="did not write; choose another place"):
            write(tmp_path / name, X, y, overwrite=True)
    assert store_damage.tree(tmp_path) == files_before


def test_interrupted_overwrite_keeps_no_old_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = sample(30, (5,), "uint8")
    write(tmp_path / "s", X, y, plan={"source": 1})

    def stop(self: Path, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stop)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "s", X, y, plan={"source": 2}, overwrite=True)
    with pytest.raises(DataError, match="unfinished"):
        open_store(tmp_path / "s")
    with pytest.raises(ResumeMismatchError, match="source differ"):
        write(tmp_path / "s", X, y, plan={"source": 3})
    reversed_X = X[::-1].copy()
    store = write(tmp_path / "s", reversed_X, y, plan={"source": 2})  # continues the first call
    np.testing.assert_array_equal(store.read_chunk(0)[0], reversed_X[:7])


def test_writer_refuses_invalid_chunks() -> None:
    X, y = sample(30, (5,), "float32")
    writer = StoreWriter(memory_url(), (5,), "f4", 3, ["a", "b", "c"], 7, n_rows=30)
    bad_chunks: list[tuple[int, Any, Any, str]] = [
        (4, X[:7], y[:7], "chunk 4 has 7 rows; give 2"),
        (0, X[:7].astype("f8"), y[:7], "float64"),
        (0, X[:7], y[:7] - 3, "outside its 3 classes"),
    ]
    for i, block, labels, message in bad_chunks:
        with pytest.raises(DataError, match=message):
            writer.write_chunk(i, block, labels)
    assert not writer.is_written.any()


def test_writer_settings_are_validated_before_writing(tmp_path: Path) -> None:
    url = tmp_path / "s"
    with pytest.raises(DataError, match="dtype int64"):
        StoreWriter(url, (5,), "i8", 3, None, 7, n_rows=7)
    with pytest.raises(DataError, match="each dimension at least 1"):
        StoreWriter(url, (5, 0, 1), "u1", 3, None, 7, n_rows=7)
    with pytest.raises(ConfigError, match="there are 2 classes, but n_outputs=3"):
        StoreWriter(url, (5,), "u1", 3, ["a", "b"], 7, n_rows=7)
    with pytest.raises(ConfigError, match="zip"):
        StoreWriter(url, (5,), "u1", 1, None, 7, n_rows=7, compress="zip")
    assert not url.exists()


def test_full_disk_error_names_url_and_remedy(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"no space left.*s3://bucket/x.*again") as caught,
        disk_full_hint("s3://user:pw@bucket/x"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/data/X/c/0/0")
    assert caught.value.errno == errno.ENOSPC
    largest = pytest.raises(OSError, match=r"largest size.*bucket/x; raise the limit")
    with largest, disk_full_hint("bucket/x"):
        raise OSError(errno.EFBIG, "File too large")
    with pytest.raises(PermissionError, match=r"^denied$"), disk_full_hint("x"):
        raise PermissionError("denied")


# ---------------------------------------------------------------------------------------- foreign


def write_foreign(path: Path, X: NDArray[Any], y: NDArray[Any], **settings: Any) -> Path:
    """Write X and y to a group of zarr, as another program would."""
    group = zarr.create_group(LocalStore(path), zarr_format=settings.pop("zarr_format", 3))
    chunks = settings.pop("chunks", 7)
    group.create_array("X", data=X, chunks=(chunks, *X.shape[1:]), **settings)
    group.create_array("y", data=y, chunks=(chunks, *y.shape[1:]))
    return path


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_foreign_stores_are_read(tmp_path: Path, zarr_format: int) -> None:
    X, y = sample(30, (5,), "float32")
    store = open_store(
        write_foreign(tmp_path / "f", X, y + 1, zarr_format=zarr_format), missing="fill"
    )
    assert store.spec.classes == ("0", "1", "2", "3")
    assert store.spec.class_counts == tuple(np.bincount(y + 1).tolist())
    assert store.spec.mean is None
    assert store.spec.foreign
    assert store.spec.fingerprint.startswith("meta:")
    np.testing.assert_array_equal(store.read_rows(np.arange(30)[::-1])[0], X[::-1])
    with pytest.raises(DataError, match="no digests"):
        store.verify()


def test_store_opened_without_targets_is_not_verified(tmp_path: Path) -> None:
    write(tmp_path / "s", *sample(9, (3,), "float32"))
    with pytest.raises(DataError, match="was opened without its targets, so it cannot be verified"):
        open_store(tmp_path / "s", y=None).verify()


def test_foreign_targets_are_read(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "float32")
    values = np.linspace(0, 1, 30)
    store = open_store(write_foreign(tmp_path / "one", X, values))
    assert (store.spec.n_outputs, store.spec.classes) == (1, None)
    assert store.read_chunk(0)[1].shape == (7, 1)
    matrix = np.stack([values, -values], axis=1).astype("f4")
    assert open_store(write_foreign(tmp_path / "two", X, matrix)).spec.n_outputs == 2
    with pytest.raises(DataError, match="holds the integer -1"):
        open_store(write_foreign(tmp_path / "minus", X, y - 1))


def test_missing_foreign_chunks_raise_by_default(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "float32")
    X[7:14] = 0.0  # zarr leaves this chunk out
    path = write_foreign(tmp_path / "f", X, y + 0.5)
    assert not (path / "X/c/1").exists()
    store = open_store(path)
    with pytest.raises(CorruptChunkError, match=r"X/c/1/0 is missing.*missing='fill'"):
        store.read_chunk(1)
    assert any("1 chunks are absent" in text for text in describe_store(store)["warnings"])
    np.testing.assert_array_equal(open_store(path, missing="fill").read_chunk(1)[0], 0.0)
    own_store = write(tmp_path / "own", X, y)
    store_damage.remove(tmp_path / "own", "X/c/1/0")
    # Ours have every chunk: "fill" changes nothing.
    with pytest.raises(CorruptChunkError, match=r"X/c/1/0 .*missing"):
        open_store(tmp_path / "own", missing="fill").read_chunk(1)
    assert not own_store.spec.foreign


def test_foreign_shards_are_read_whole(tmp_path: Path) -> None:
    X, y = sample(30, (5,), "float32")
    store = open_store(write_foreign(tmp_path / "f", X, y + 0.5, chunks=2, shards=(8, 5)))
    assert store.spec.chunk_rows == 8
    np.testing.assert_array_equal(store.read_chunk(3)[0], X[24:])
    assert store.stored_chunks.absent_chunks() == 0
    store_damage.remove(tmp_path / "f", "X/c/3/0")
    with pytest.raises(CorruptChunkError, match="X/c/3/0"):
        store.read_chunk(3)


def test_foreign_column_chunks_and_byte_order_are_read(tmp_path: Path) -> None:
    X, y = sample(30, (6,), "float32")
    group = zarr.create_group(LocalStore(tmp_path / "f"))
    codec = zarr.codecs.BytesCodec(endian="big")
    group.create_array("X", shape=X.shape, dtype="f4", chunks=(7, 4), serializer=codec)[:] = X
    group.create_array("y", data=y + 0.5, chunks=(30,))
    store = open_store(tmp_path / "f")
    block, targets = store.read_chunk(2)
    np.testing.assert_array_equal(block, X[14:21])
    np.testing.assert_array_equal(targets[:, 0], y[14:21] + 0.5)
    assert block.dtype.isnative


# --------------------------------------------------------------------------------------- describe


def test_description_is_json_and_consistent(tmp_path: Path) -> None:
    X, y = sample(30, (4, 2, 1), "uint8")
    description = json.loads(json.dumps(describe_store(write(tmp_path / "s", X, y))))
    assert description["decoded_bytes"] == X.nbytes + 30
    on_disk = sum(
        len(data)
        for key, data in store_damage.tree(tmp_path / "s").items()
        if key[:2] in ("X/", "y/")
    )
    assert description["stored_bytes"] == on_disk
    assert description["compression_ratio"] == pytest.approx((X.nbytes + 30) / on_disk)
    assert description["class_counts"] == np.bincount(y, minlength=3).tolist()
    assert description["warnings"] == []
