"""Mistakes in how rows are streamed: by the loader, on a cluster, into a new store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import distributed
import numpy as np
import scipy.sparse as sp

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.cluster import check_cluster, connect
from streamkern.stream.feed import Feed
from streamkern.stream.order import EpochPlan
from streamkern.stream.unit_readers import Recipe
from streamkern.stream.unit_readers import open_recipe as unpack
from tests.remedies import Case, N, X, Y, command, regressor

COVERED = (
    "stream/buffers.py", "stream/cluster.py", "stream/unit_readers.py", "stream/feed.py",
    "stream/batch_reader.py", "stream/loader.py", "stream/loader_arguments.py",
    "stream/materialise.py", "stream/meter.py",
    "stream/order.py", "stream/read_speed.py", "stream/row_maker.py", "stream/target_scale.py",
    "stream/torch_rows.py", "store/lazy_arrays.py",
)  # fmt: skip

NOT_TRIED = {
    "stream/cluster.py:check_versions:1": "needs an older worker: tests/stream/test_cluster.py",
    "stream/unit_readers.py:ClusterReader.read:1":
        "needs a worker of other packages: tests/stream/test_cluster.py",
    "stream/unit_readers.py:ClusterReader._check_cluster:1":
        "needs a worker that is killed: tests/stream/test_elastic.py",
    "stream/torch_rows.py:_dataset_class.TorchRows.state_dict:1":
        "needs PyTorch: tests/stream/test_torch_rows.py",
}  # fmt: skip

SOURCE = sk.ArraySource(X, Y, unit_rows=20)


def batches(first: int = 0, start: int = 0, **given: Any) -> Callable[[], int]:
    """Read an epoch of rows."""

    def streamed() -> int:
        with BatchReader(SOURCE, **{"batch_size": 10, "seed": 0} | given) as loader:
            return sum(1 for _ in loader.epochs(first, first + 1, start))

    return streamed


def planned(sizes: Any = (20, 40), batch: int = 0, **given: Any) -> Callable[[], Any]:
    """Take a batch of the plan of an epoch."""
    given = {"seed": 0, "epoch": 0, "batch_size": 10, "mix_units": 2} | given
    return lambda: EpochPlan(np.array(sizes), **given).batch(batch)


def loader_cases() -> list[Case]:
    """Return mistakes in the order and the reading of rows."""

    def fed(dtype: Any) -> None:
        with BatchReader(SOURCE, batch_size=10, seed=0) as loader, Feed(
            loader, Backend(threads=1), dtype=dtype, seed=0):  # fmt: skip
            pass

    def around_zero(targets: float) -> None:
        regressor(fit_intercept=False).fit(X, np.full(N, targets))

    def weighted(w: float) -> None:
        regressor().fit(sk.GeneratorSource(
            lambda seed, epoch, a, b: (X[a:b], Y[a:b], np.full(b - a, w)), N, (3,), "f8", 1,
            weight_totals=[N]))  # fmt: skip

    def closed(again: bool) -> None:
        loader = BatchReader(SOURCE, batch_size=10, seed=0)
        loader.close()
        if again:
            loader = BatchReader(SOURCE, batch_size=10, seed=0)
        with loader:
            list(loader.epochs(0, 1))

    def two_at_once(first_to_its_end: bool) -> None:
        with BatchReader(SOURCE, batch_size=10, seed=0) as loader:
            one = loader.epochs(0, 1)
            next(one)
            if first_to_its_end:
                list(one)
            next(loader.epochs(1, 2))
            list(one)

    return [
        ("in_flight_bytes=0 must be at least 1", batches(in_flight_bytes=0),
         batches(in_flight_bytes=1 << 20)),
        ("a batch from 0 to 6", batches(start=9), batches(start=6)),
        ('threads=0 must be "auto" or a whole number', batches(threads=0), batches(threads="auto")),
        ("this loader is closed; make a new one", lambda: closed(False), lambda: closed(True)),
        ("finish an iterator before you start another one", lambda: two_at_once(False),
         lambda: two_at_once(True)),
        ("use float32 or float64", lambda: fed("f2"), lambda: fed("f4")),
        ("mix_units=0 must be at least 1", planned(mix_units=0), planned(mix_units=1)),
        ("epoch=-1 must be at least 0", planned(epoch=-1), planned(epoch=0)),
        ("give a source with rows", planned(sizes=[0]), planned()),
        ("give one entry for each unit", planned(strata=np.zeros(3)),
         planned(strata=np.zeros(2, np.int64))),
        ("does not exist; give 0 to 5", planned(batch=6), planned(batch=5)),
        ("--seconds 0 must be finite and above 0",
         lambda: command("bench-read data.zarr --seconds 0"),
         lambda: command("bench-read data.zarr --seconds 0.01")),
        ("give some rows a weight above 0", lambda: weighted(0), lambda: weighted(1)),
        ("give the targets in a larger unit", lambda: around_zero(1e160), lambda: around_zero(1.0)),
        ("give the targets in a smaller unit", lambda: around_zero(1e-170),
         lambda: around_zero(1.0)),
    ]  # fmt: skip


def public_loader_cases() -> list[Case]:
    """Return mistakes in the loader for training loops of others."""

    def made(source: Any = SOURCE, batch_size: int = 10, **given: Any) -> Callable[[], None]:
        return lambda: sk.Loader(source, batch_size, **given).close()

    def loaded(**changes: Any) -> Callable[[], None]:
        def load() -> None:
            with sk.Loader(SOURCE, 10) as loader:
                loader.load_state_dict(loader.state_dict() | changes)

        return load

    def two_at_once(first_to_its_end: bool) -> None:
        with sk.Loader(SOURCE, 10) as loader:
            one = iter(loader)
            next(one)
            if first_to_its_end:
                list(one)
            next(iter(loader))
            list(one)

    def lazy(n_features: int) -> None:
        rows = sp.eye_array(N, n_features, format="csr", dtype=np.float32)
        sk.ingest_store(rows, "lazy.zarr", y=Y, overwrite=True)
        sk.open_store("lazy.zarr").to_dask()

    def sparse_rows(dtype: str) -> None:
        rows = sp.eye_array(N, 5000, format="csr", dtype=np.float32)
        sk.ingest_store(rows, "few.zarr", y=Y, overwrite=True)
        sk.Loader("few.zarr", 10, dtype=dtype).close()

    noise = (sk.GaussianNoise(1.0),)
    mixed = sk.AugmentedSource(SOURCE, 1, [sk.MixUp(0.3)])
    large = sk.ArraySource(X.astype(np.float32) * 0 + 1e6, Y, unit_rows=20)
    return [
        ("arrays as streamkern.ArraySource", made(X), made(sk.ArraySource(X, Y))),
        ("batch_size=0 must be a whole number", made(batch_size=0), made(batch_size=1)),
        ("rank=2 must be below n_ranks=2", made(rank=2, n_ranks=2), made(rank=1, n_ranks=2)),
        ("give transforms to the source", made(transforms=noise),
         made(sk.AugmentedSource(SOURCE, 1, noise))),
        ("give some of X, y, w, row_ids, each once", made(fields=("X", "z")), made(fields="X")),
        ("or other arrays that it has", made(fields=("X", "w")), made(fields=("X", "y"))),
        ("pass the result of Loader.state_dict", loaded(epoch="one"), loaded(epoch=1)),
        ("create the loader with the same rows", loaded(source="0"), loaded()),
        ("create the loader with the settings of the state", loaded(order={}), loaded()),
        ("give 0 to 6", loaded(batch=7), loaded(batch=6)),
        ("finish an iterator before you start another one", lambda: two_at_once(False),
         lambda: two_at_once(True)),
        ("shuffle=.no. must be True or False", made(shuffle="no"), made(shuffle=False)),
        ("or give a smaller batch_size", made(batch_size=90, drop_last=True),
         made(batch_size=60, drop_last=True)),
        ("leave n_ranks out", made(mixed, n_ranks=2), made(mixed)),
        ("give a wider one", lambda: list(sk.Loader(large, 60, dtype="float16")),
         lambda: list(sk.Loader(large, 60, dtype="float32"))),
        ("use float32 or float64", lambda: sparse_rows("float16"),
         lambda: sparse_rows("float64")),
        ("read them with streamkern.Loader", lambda: lazy(5000), lambda: lazy(50)),
    ]  # fmt: skip


def new_store_cases() -> list[Case]:
    """Return mistakes in what is written as one epoch would have it."""

    def written(rows: Any, *transforms: Any, y: Any = Y, **given: Any) -> Callable[[], Any]:
        source = sk.AugmentedSource(sk.ArraySource(rows, y), 1, transforms)
        return lambda: sk.materialise_store(source, "made.zarr", overwrite=True, **given)

    def some_targets(X: Any, y: Any, rng: Any) -> Any:
        return X, y if rng.integers(0, 9).size < 50 else -y

    def all_targets(X: Any, y: Any, rng: Any) -> Any:
        return X, -y

    halves = sk.keeps_integers(lambda X, y, rng: (X + np.asarray(0.5, X.dtype), y))
    ones = sk.keeps_integers(lambda X, y, rng: (X + np.asarray(1, X.dtype), y))
    full = np.zeros((N, 3), np.uint8)
    return [
        ("leave dtype= out", written(X, dtype="uint8"), written(X)),
        ("return a new array in every call", written(X, some_targets),
         written(X, all_targets)),
        ("return integers in the range of this dtype",
         written(full, halves), written(full, ones)),
        ("add targets, because a store needs them", written(X, y=None), written(X)),
    ]  # fmt: skip


def cluster_cases() -> list[Case]:
    """Return mistakes about a cluster of Dask, which is here a scheduler in this process."""

    def reached(address: str) -> None:
        with connect(address, wait_s=0.5):
            pass

    def on_one(act: Callable[[str], Any]) -> None:
        with distributed.LocalCluster(
            n_workers=0, processes=False, dashboard_address=None, protocol="tcp", host="127.0.0.1"
        ) as cluster:
            act(cluster.scheduler_address)

    def loaded(address: str, source: Any = SOURCE, closed: bool = False) -> None:
        with distributed.Client(address, set_as_default=False) as client:
            check_cluster(client, source)
            with BatchReader(source, batch_size=10, seed=0, client=client) as loader:
                if closed:
                    client.close()
                    next(loader.epochs(0, 1))

    def asynchronous(address: str) -> None:
        async def connected() -> None:
            async with distributed.Client(address, asynchronous=True) as client:
                check_cluster(client, SOURCE)

        asyncio.run(connected())

    def unpacked(ours: str) -> None:
        recipe = Recipe(SOURCE)
        recipe.versions["streamkern"] = ours
        unpack(recipe)

    def locked(held: Any) -> sk.GeneratorSource:
        def rows(seed: int, epoch: int, start: int, stop: int) -> Any:
            return (X[start:stop], Y[start:stop]) if held else None

        return sk.GeneratorSource(rows, N, (3,), "f8", 1)

    return [
        ("must look like tcp://host:8786", lambda: reached("localhost"), lambda: on_one(reached)),
        ("start one with `dask scheduler`", lambda: reached("tcp://127.0.0.1:9"),
         lambda: on_one(reached)),
        ("install streamkern 0.0.1 there, the version of this process", lambda: unpacked("0.0.1"),
         lambda: unpacked(sk.__version__)),
        ("made without asynchronous=True", lambda: on_one(asynchronous), lambda: on_one(loaded)),
        ("use only objects that can be pickled",
         lambda: on_one(lambda address: loaded(address, locked(threading.Lock()))),
         lambda: on_one(lambda address: loaded(address, locked("a word")))),
        ("start it again, then run the same command again",
         lambda: on_one(lambda address: loaded(address, closed=True)), lambda: on_one(loaded)),
    ]  # fmt: skip


TABLES = (loader_cases, public_loader_cases, new_store_cases, cluster_cases)
