"""Check that threads and workers, changed at any resume, give the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.cluster import connect
from streamkern.stream.feed import Feed
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, MixUp, RandomCrop, RandomFlip
from tests import clusters
from tests.clusters import Cluster
from tests.runs import (
    STEPS,
    array_source,
    assert_same_bits,
    final,
    finished,
    stopped,
    stream,
)
from tests.runs import settings as run_settings

ROWS, BATCH, EPOCHS = 90, 16, 2
IMAGES = np.random.default_rng(0).integers(0, 255, (ROWS, 6, 6, 1)).astype(np.uint8)
LABELS = np.random.default_rng(1).integers(0, 3, ROWS)


def zarr_store(folder: Path) -> Path:
    """Write the images as another program would; return the path."""
    group = zarr.create_group(str(folder / "images.zarr"))
    group.create_array("X", data=IMAGES, chunks=(7, 6, 6, 1))
    group.create_array("y", data=LABELS, chunks=(7,))
    return folder / "images.zarr"


def augmented_source(base: Source) -> AugmentedSource:
    """Return replicas with host transforms at two levels and with feed transforms."""
    copies = AugmentedSource(base, 3, [RandomFlip(), RandomCrop(1), GaussianNoise(0.3), MixUp(0.4)])
    copies._replicas_per_unit = 0
    return copies


SOURCES: dict[str, Callable[[Path], Source]] = {
    "zarr": lambda path: ZarrSource(path, [RandomFlip()]),
    "augmented": lambda path: augmented_source(ZarrSource(path)),
    "arrays": lambda path: augmented_source(
        ArraySource(IMAGES, LABELS, classes=("a", "b", "c"), unit_rows=11)
    ),
    "generator": lambda path: clusters.source(n_rows=ROWS, transforms=[GaussianNoise(0.2)]),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zarr_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with get_backend("cpu", accelerator="none") as cpu_backend:
        yield cpu_backend


class BatchHashes:
    """Hashes of every batch of a source, before and after the feed.

    uninterrupted : hashes of all batches of both epochs, read at once
    """

    def __init__(self, source: Source, backend: Backend) -> None:
        self.source, self.backend = source, backend
        sizes = (source.unit_bounds(u) for u in range(source.n_units))
        unit_rows = max(stop - start for start, stop in sizes)
        self.block_bytes = 3 * unit_rows * (source.read_unit(0, 0, 0).X[0].nbytes + 8 + 16)
        with self.loader() as loader:
            self.n_batches = loader.n_batches
        self.uninterrupted = self.read(0)

    def loader(self, **options: Any) -> BatchReader:
        return BatchReader(
            self.source, batch_size=BATCH, seed=5, block_bytes=self.block_bytes, **options
        )

    def read(self, first_batch: int, n: int | None = None, **options: Any) -> list[str]:
        """Return the hashes of at most n batches of both epochs, from `first_batch` on."""
        epoch, start = divmod(first_batch, self.n_batches)
        with (
            self.loader(**options) as loader,
            Feed(loader, self.backend, dtype=np.float32, seed=5) as feed,
        ):
            host_batches = take_first(loader.epochs(epoch, EPOCHS, start), n)
            host_digests = [digest(*batch.arrays) for batch in host_batches]
            fed_batches = take_first(feed.epochs(epoch, EPOCHS, start), n)
            fed_digests = [digest(b.X, b.Y, b.row_ids, b.epoch, b.index) for b in fed_batches]
        return [host + fed for host, fed in zip(host_digests, fed_digests, strict=True)]


def take_first(batches: Iterator[Any], n: int | None) -> Iterator[Any]:
    """Yield the first n batches, or all of them."""
    for i, batch in enumerate(batches):
        if i == n:
            break
        yield batch


def digest(*values: Any) -> str:
    """Return the SHA-256 of arrays and numbers."""
    sha256 = hashlib.sha256()
    for value in values:
        array = np.ascontiguousarray(value)
        sha256.update(f"{array.dtype.str}{array.shape}".encode())
        sha256.update(array.tobytes())
    return sha256.hexdigest()


@cache
def batch_hashes(name: str, path: Path, backend: Backend) -> BatchHashes:
    return BatchHashes(SOURCES[name](path), backend)


def stages() -> Any:
    """Draw the stages of a run: the number of batches of each, and its number of threads."""
    return st.lists(st.tuples(st.integers(1, 30), st.integers(1, 16)), max_size=5)


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stages=stages())
def test_threads_change_nothing_at_any_resume(
    name: str, store: Path, backend: Backend, stages: list[tuple[int, int]]
) -> None:
    resumable = batch_hashes(name, store, backend)
    digests: list[str] = []
    for n, threads in stages:
        digests += resumable.read(len(digests), n, threads=threads)
    digests += resumable.read(len(digests), threads=2)
    assert digests == resumable.uninterrupted


def test_hashes_cover_every_byte(store: Path, backend: Backend) -> None:
    """Check the hashes, on which the test above depends."""
    resumable = batch_hashes("augmented", store, backend)
    digests = resumable.uninterrupted
    assert len(set(digests)) == len(digests) == EPOCHS * resumable.n_batches
    with resumable.loader() as loader:
        batch = next(loader.epoch(0))
        parts = [a.copy() for a in batch.arrays]
    plain = digest(*parts)
    for a in parts:
        a.reshape(-1).view(np.uint8)[-1] ^= 1
        assert digest(*parts) != plain
        a.reshape(-1).view(np.uint8)[-1] ^= 1


@pytest.mark.full
def test_workers_change_nothing_at_any_resume(
    store: Path, backend: Backend, tmp_path: Path
) -> None:
    """Resume with threads, one worker, three workers of which one is killed, and threads."""
    pytest.importorskip("distributed")
    with Cluster(tmp_path) as cluster:
        cluster.worker()
        with connect(cluster.address) as client:
            client.wait_for_workers(1)
            for workers in (1, 2, 3):
                for name in SOURCES:
                    resumable = batch_hashes(name, store, backend)
                    for first_batch in (0, resumable.n_batches - 1, 2 * resumable.n_batches - 1):
                        part = resumable.read(
                            first_batch, 4, client=client, in_flight_bytes=1 << (10 + first_batch)
                        )
                        assert part == resumable.uninterrupted[first_batch : first_batch + 4]
                if workers < 3:
                    cluster.worker()
                    client.wait_for_workers(workers + 1)
            resumable = batch_hashes("augmented", store, backend)
            digests = resumable.read(0, 5, threads=3)
            digests += resumable.read(len(digests), 4, client=client)
            cluster.processes[-1].kill()
            digests += resumable.read(len(digests), 4, client=client)
            digests += resumable.read(len(digests), threads=1)
            assert digests == resumable.uninterrupted


@pytest.mark.parametrize("threads", [(1, 16, 3), (7, 1, 2)])
def test_run_with_changing_threads_ends_with_same_weights(
    threads: tuple[int, ...], tmp_path: Path
) -> None:
    """Stop twice within an epoch and once in the next, each time with another number of threads."""
    config = run_settings(tmp_path / "run")
    steps = (2, 5, STEPS - 3)
    for step, n in zip(steps, threads, strict=True):
        changed = config.with_overrides({"data.prefetch_threads": n})
        stopped(changed, step, source=stream())
    finished(config, source=stream())
    finished(run_settings(tmp_path / "plain"), source=stream())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))


@pytest.mark.full
def test_run_on_cluster_ends_with_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    folder = tmp_path / "cluster"
    folder.mkdir()
    config = run_settings(tmp_path / "run")
    with Cluster(folder) as cluster:
        cluster.worker()
        on_cluster = config.with_overrides({"data.dask": cluster.address})
        stopped(on_cluster, 2, source=stream())
        stopped(config, 4, source=stream())
        cluster.worker()
        stopped(on_cluster, STEPS - 2, source=stream())
    finished(config, source=stream(), test=array_source(10, 5))
    finished(run_settings(tmp_path / "plain"), source=stream())
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))
