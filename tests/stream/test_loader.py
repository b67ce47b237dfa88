"""Compare the public loader with the rows of the store."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import streamkern as sk

N = 1000
X = np.random.default_rng(0).standard_normal((N, 5)).astype(np.float32)
LABELS = np.arange(N) % 3


@pytest.fixture(autouse=True)
def _check_threads_ended() -> Iterator[None]:
    """Wait for the threads of loaders that were left to the garbage collector."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("streamkern-prefetch"):
            thread.join(10)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of 1000 rows in 32 chunks, in another order than X."""
    url = tmp_path_factory.mktemp("loader") / "rows.zarr"
    sk.ingest_store(X, url, y=LABELS, sample_weight=np.arange(1.0, N + 1), chunk_mb=0.0007)
    return url


def order(loader: Any) -> list[list[int]]:
    """Return the row numbers of each batch."""
    return [np.asarray(rows).tolist() for rows in loader]


def row_loader(source: Any, **options: Any) -> sk.Loader:
    """Return a loader of row numbers."""
    options = {"fields": "row_ids", "seed": 3} | options
    return sk.Loader(source, options.pop("batch_size", 64), **options)


def many_units() -> sk.ArraySource:
    return sk.ArraySource(X, LABELS, unit_rows=20)


def test_every_epoch_has_every_stored_row_once(url: Path) -> None:
    store = sk.open_store(url)
    stored_X, stored_y = store.read_rows(np.arange(N))
    with sk.Loader(url, 64, fields=("X", "y", "w", "row_ids"), seed=1) as loader:
        assert len(loader) == 16
        orders = []
        for epoch in range(2):
            assert loader.epoch == epoch
            batches = list(loader)
            assert [len(X) for X, *_ in batches] == [64] * 15 + [40]
            found_X, found_y, w, rows = (
                np.concatenate(parts) for parts in zip(*batches, strict=True)
            )
            assert sorted(rows.tolist()) == list(range(N))
            np.testing.assert_array_equal(found_X, stored_X[rows])
            np.testing.assert_array_equal(found_y, stored_y[rows])
            np.testing.assert_array_equal(w, store.rows["w"][:][rows])
            assert (found_X.dtype, found_y.dtype) == (np.float32, np.int64)
            orders.append(rows.tolist())
    assert orders[0] != orders[1]


def test_loader_shows_its_source_without_secrets(url: Path) -> None:
    with sk.Loader(url, 100) as loader:
        assert (
            repr(loader) == f"Loader(Store('{url}', 1000x5 float32), batch_size=100, n_rows=1000)"
        )
        loader.source.store.stored_chunks.url = "s3://key:secret@bucket/rows.zarr"
        assert "secret" not in repr(loader)
    source = sk.ArraySource(X, LABELS)
    assert repr(sk.Loader(source, 7)) == "Loader(ArraySource, batch_size=7, n_rows=1000)"


def test_delivered_batches_are_not_overwritten(url: Path) -> None:
    with sk.Loader(url, 64) as loader:
        batches = list(loader)
        copies = [(X.copy(), y.copy()) for X, y in sk.Loader(url, 64)]
    for (X, y), (X_then, y_then) in zip(batches, copies, strict=True):
        np.testing.assert_array_equal(X, X_then)
        np.testing.assert_array_equal(y, y_then)
        X[:] = 0  # may be written to


def test_drop_last_omits_only_a_partial_batch() -> None:
    assert len(row_loader(many_units(), drop_last=True)) == 15
    assert order(row_loader(many_units(), drop_last=True)) == order(row_loader(many_units()))[:15]
    assert len(order(row_loader(many_units(), drop_last=True, batch_size=100))) == 10


def test_unshuffled_order_equals_source() -> None:
    assert [*chain(*order(row_loader(many_units(), shuffle=False)))] == list(range(N))


@settings(max_examples=25, deadline=None)
@given(
    n_done=st.integers(0, 16), epoch=st.integers(0, 2), threads=st.sampled_from([1, 3]),
    units=st.sampled_from([1, 4, 50]), drop_last=st.booleans(),
)  # fmt: skip
def test_state_resumes_with_same_bits(
    n_done: int, epoch: int, threads: int, units: int, drop_last: bool
) -> None:
    def make_loader(threads: int) -> sk.Loader:
        block_bytes = units * 20 * (5 * 4 + 8 + 16)
        return sk.Loader(
            sk.ArraySource(X, LABELS, [sk.GaussianNoise(1.0)], unit_rows=20), 64, seed=5,
            threads=threads, block_bytes=block_bytes, drop_last=drop_last,
            fields=("X", "y", "row_ids"),
        )  # fmt: skip

    with (
        make_loader(1) as uninterrupted,
        make_loader(threads) as interrupted,
        make_loader(2) as second,
    ):
        passes = [list(uninterrupted) for _ in range(epoch + 2)]
        n_done = min(n_done, len(uninterrupted))
        for _ in range(epoch):
            list(interrupted)
        iterator = iter(interrupted)
        got = [next(iterator) for _ in range(n_done)]
        second.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
        assert second.epoch == epoch
        got += list(second)
        assert second.epoch == epoch + 1
        got += list(second)
    for ours, theirs in zip(got, passes[epoch] + passes[epoch + 1], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_abandoned_epoch_is_followed_by_the_next() -> None:
    passes = [order(loader) for loader in [row_loader(many_units())] for _ in range(2)]
    loader = row_loader(many_units())
    next(iter(loader))
    assert order(loader) == passes[1]


def test_rank_shares_form_the_whole_batch() -> None:
    full = order(row_loader(many_units()))
    shares = [order(row_loader(many_units(), rank=rank, n_ranks=3)) for rank in range(3)]
    assert {len(share) for share in shares} == {len(full)}
    for batch, *parts in zip(full, *shares, strict=True):
        assert sorted(batch) == sorted(chain(*parts))
    resumed = row_loader(many_units())  # by another number of ranks
    iterator = iter(rank := row_loader(many_units(), rank=1, n_ranks=2))
    for _ in range(4):
        next(iterator)
    resumed.load_state_dict(rank.state_dict())
    assert order(resumed) == full[4:]


def test_transforms_equal_those_of_training(url: Path, tmp_path: Path) -> None:
    noisy = sk.AugmentedSource(sk.ZarrSource(url), 2, [sk.GaussianNoise(0.5)])
    sk.materialise_store(noisy, tmp_path / "made.zarr", seed=4, shuffle=False)
    store = sk.open_store(tmp_path / "made.zarr")
    loader = sk.Loader(noisy, 300, seed=4, shuffle=False)
    columns = [np.concatenate(parts) for parts in zip(*loader, strict=True)]
    for ours, theirs in zip(columns, store.read_rows(np.arange(2 * N)), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_mixed_targets_are_class_shares(url: Path) -> None:
    for _, y in sk.Loader(url, 64, transforms=[sk.MixUp(0.3)]):
        assert y.shape[1] == 3
        np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-6)


def test_sparse_rows_are_yielded_as_sparse_arrays(tmp_path: Path) -> None:
    rows = sp.random_array((300, 9000), density=0.002, format="csr", dtype=np.float32, rng=0)
    sk.ingest_store(rows, tmp_path / "sparse.zarr", y=np.arange(300) % 2, shuffle=False)
    for X, ids in sk.Loader(tmp_path / "sparse.zarr", 64, fields=("X", "row_ids")):
        assert isinstance(X, sp.csr_array)
        assert X.shape[1] == 9000
        np.testing.assert_array_equal(X.toarray(), rows[ids].toarray())


def test_pickled_loader_continues_from_its_position(url: Path) -> None:
    loader = row_loader(url)
    iterator = iter(loader)
    next(iterator)
    unpickled = pickle.loads(pickle.dumps(loader))
    assert unpickled.state_dict() == loader.state_dict()
    unpickled.load_state_dict(loader.state_dict())
    assert order(unpickled) == list(map(list, (r.tolist() for r in iterator)))
    assert copy.copy(loader).epoch == 1


def test_state_of_other_rows_or_order_is_refused(url: Path) -> None:
    state = row_loader(url).state_dict()
    for other_loader, word in (
        (row_loader(many_units()), "other rows"),
        (row_loader(sk.ZarrSource(url, [sk.GaussianNoise(1.0)])), "other rows or transforms"),
        (row_loader(url, seed=4), "seed is 3"),
        (row_loader(url, batch_size=65), "batch_size is 64"),
        (row_loader(url, shuffle=False), "in_order is 0"),
    ):
        state_before = other_loader.state_dict()
        with pytest.raises(sk.ResumeMismatchError, match=word):
            other_loader.load_state_dict(state)
        assert other_loader.state_dict() == state_before


def test_older_iterator_raises() -> None:
    loader = row_loader(many_units())
    state = loader.state_dict()
    for act in (lambda: next(iter(loader)), lambda: loader.load_state_dict(state), loader.close):
        iterator = iter(loader)
        next(iterator)
        act()
        with pytest.raises(sk.RunError, match="has ended"):
            next(iterator)


def test_killed_process_resumes(url: Path, tmp_path: Path) -> None:
    """Kill a process that stores its state after each batch; read the remaining batches."""
    text = """
import json, os, sys, streamkern as sk
loader = sk.Loader(sys.argv[1], 64, fields="row_ids", seed=3)
if os.path.exists("state.json"):
    loader.load_state_dict(json.load(open("state.json")))
for k, rows in enumerate(loader):
    with open("seen", "a") as file:
        print(json.dumps(rows.tolist()), file=file)
    json.dump(loader.state_dict(), open("next.json", "w"))
    os.replace("next.json", "state.json")
    if k == 6:
        os.kill(os.getpid(), 9)
"""
    codes = [
        subprocess.run([sys.executable, "-c", text, url], cwd=tmp_path, check=False).returncode
        for _ in range(3)
    ]
    assert codes == [-9, -9, 0]
    records = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert records == order(row_loader(url))


def test_failed_batch_is_not_counted() -> None:
    calls = []

    @sk.deterministic
    def fail(X: Any, y: Any, rng: Any) -> Any:
        calls.append(len(X))
        if len(calls) == 5:  # one call tries the transform
            raise KeyboardInterrupt
        return X, y

    source = sk.AugmentedSource(many_units(), 1, [fail])
    with row_loader(source) as loader, pytest.raises(KeyboardInterrupt):
        list(loader)
    assert loader.state_dict()["batch"] == 3
    loader.load_state_dict(loader.state_dict())
    with loader, row_loader(source) as full:
        assert order(loader) == order(full)[3:]


def test_unused_iterators_change_nothing() -> None:
    loader = row_loader(many_units())
    loader.begin_at(0, 5)
    iter(loader)
    assert order(loader) == order(row_loader(many_units()))[5:]


def test_sparse_rows_are_converted_to_dtype(tmp_path: Path) -> None:
    rows = sp.random_array((300, 50_000), density=0.001, format="csr", dtype=np.float32, rng=0)
    sk.ingest_store(rows, tmp_path / "sparse.zarr", y=np.arange(300) % 2, shuffle=False)
    options = {"fields": "X", "shuffle": False}
    with sk.Loader(tmp_path / "sparse.zarr", 300, dtype="float64", **options) as loader:
        (batch,) = loader
    assert batch.dtype == np.float64
    np.testing.assert_array_equal(batch.toarray(), rows.toarray())


def test_batch_may_be_larger_than_the_source() -> None:
    assert [len(rows) for rows in row_loader(many_units(), batch_size=2**63)] == [N]


@pytest.mark.parametrize(("data", "settings", "message"), [
    (None, {}, "a NoneType is not supported as data; give the path or URL of a store"),
    ("train.zarr", {"transforms": sk.GaussianNoise(0.1)}, r"transforms=Gauss.* must be a list"),
    ("train.zarr", {"batch_size": 10.0}, r"batch_size=10\.0 must be a whole number"),
])  # fmt: skip
def test_invalid_argument_is_named(
    data: Any,
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    sk.ingest_store(np.zeros((20, 2)), "train.zarr", y=np.arange(20.0), targets="values")
    with pytest.raises(sk.ConfigError, match=message):
        sk.Loader(data, **{"batch_size": 10} | settings)


@pytest.mark.parametrize("module", ["collections", "os", "warnings"])
def test_loader_is_silent_at_the_end_of_the_interpreter(module: str) -> None:
    """Check a loader that lives until modules lose their names, within an iteration."""
    text = (
        f"import {module}, numpy, streamkern\n"
        "source = streamkern.ArraySource(numpy.zeros((100, 2)), numpy.zeros(100))\n"
        "loader = streamkern.Loader(source, batch_size=10)\n"
        f"iterator = iter(loader); next(iterator); {module}.loader = loader\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
