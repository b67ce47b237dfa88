"""Check batches that are read ahead: their order, memory and threads, and invalid arguments."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import ConfigError, RunError, StreamkernError
from streamkern.ingest.ingest import ingest
from streamkern.store.row_block import RowBlock
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.order import EpochPlan
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import RandomCrop, RandomFlip, host_transform
from streamkern.stream.sources.unit_edges import unit_sizes
from streamkern.stream.sources.user import GeneratorSource
from tests.streams import X, Y, array_source, assert_same, block_bytes_of, copies_of
from tests.traced_memory import traced_memory


def expected_rows(reader: BatchReader, epoch: int) -> np.ndarray:
    """Return the order of an epoch by simple reference code."""
    sizes = unit_sizes(reader.source)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    key = reader.order_key()
    plan = EpochPlan(sizes, seed=key["seed"], epoch=epoch, batch_size=1, mix_units=key["mix_units"])
    order = []
    for k in range(plan.n_blocks):
        rows_in_order = np.concatenate(
            [np.arange(starts[u], starts[u + 1]) for u in plan.block_units(k)[0]]
        )
        places = np.empty(len(rows_in_order), np.int64)
        plan.shuffle(k, places)
        shuffled = np.empty_like(rows_in_order)
        shuffled[places] = rows_in_order
        order.append(shuffled)
    return np.concatenate(order)


@settings(max_examples=40)
@given(
    unit_rows=st.integers(1, 120),
    mix=st.integers(1, 6),
    batch_size=st.integers(1, 130),
    threads=st.integers(1, 4),
    epoch=st.integers(0, 5),
)
def test_batches_follow_the_plan(
    unit_rows: int, mix: int, batch_size: int, threads: int, epoch: int
) -> None:
    source = array_source(unit_rows)
    with BatchReader(
        source,
        batch_size=batch_size,
        seed=7,
        threads=threads,
        block_bytes=block_bytes_of(source, mix),
    ) as reader:
        assert reader.mix_units == min(mix, source.n_units)
        batches = copies_of(reader.epoch(epoch))
        rows = np.concatenate([b.row_ids for b in batches])
        np.testing.assert_array_equal(rows, expected_rows(reader, epoch))
    np.testing.assert_array_equal(np.sort(rows), np.arange(101))
    assert len(batches) == reader.n_batches == len([*reader.positions(epoch, epoch + 1)])
    assert {len(b.row_ids) for b in batches[:-1]} <= {batch_size}
    for b in batches:
        np.testing.assert_array_equal(b.X, X[b.row_ids])
        np.testing.assert_array_equal(b.y, Y[b.row_ids])


@pytest.mark.parametrize("batch_size", [3, 16, 40])
def test_resuming_anywhere_gives_the_rest(batch_size: int) -> None:
    source = array_source()
    with BatchReader(
        source, batch_size=batch_size, seed=1, block_bytes=block_bytes_of(source, 3)
    ) as reader:
        uninterrupted = copies_of(reader.epochs(2, 4))
        assert_same(uninterrupted, copies_of(reader.epoch(2)) + copies_of(reader.epoch(3)))
        for start in range(reader.n_batches + 1):
            assert_same(copies_of(reader.epoch(2, start)), uninterrupted[start : reader.n_batches])
            assert_same(copies_of(reader.epochs(2, 4, start)), uninterrupted[start:])


def test_threads_delays_and_budgets_change_no_bit() -> None:
    delays = np.random.default_rng(3)

    def slow(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(delays.uniform(0, 0.004))
        rows = np.arange(start, stop)
        return (rows[:, None] * (epoch + 1) + np.zeros(4)).astype(np.uint16), rows % 3

    source = AugmentedSource(
        GeneratorSource(slow, 60, (4,), np.uint16, 3, ("a", "b", "c"), block_rows=6), 3
    )
    source._replicas_per_unit = 0  # a unit of a replica, as for large bases
    results = []
    for threads, in_flight in [(1, 1 << 20), (2, 1 << 20), (8, 1 << 20), (8, 1)]:
        with BatchReader(
            source,
            batch_size=25,
            seed=1,
            threads=threads,
            in_flight_bytes=in_flight,
            block_bytes=block_bytes_of(source, 4),
        ) as reader:
            assert reader.threads == (1 if in_flight == 1 else threads)
            results.append(copies_of(reader.epochs(0, 2)))
    for other_result in results[1:]:
        assert_same(results[0], other_result)


@pytest.mark.parametrize(
    "change", [{"batch_size": 8}, {"seed": 2}, {"block_bytes": 500}, {"unit_rows": 9}]
)
def test_order_key_names_all_that_determines_the_order(change: Any) -> None:
    def key(**changes: Any) -> dict[str, int]:
        source = array_source(changes.pop("unit_rows", 8))
        with BatchReader(source, **{"batch_size": 9, "seed": 1, **changes}) as reader:
            return reader.order_key()

    assert key() == key(threads=3, in_flight_bytes=1)
    assert key(**change) != key()


# --------------------------------------------------------------------------------- resources


def reader_threads() -> list[threading.Thread]:
    """Return the threads that read ahead."""
    return [t for t in threading.enumerate() if t.name.startswith("streamkern-prefetch")]


def test_close_ends_all_threads() -> None:
    with BatchReader(array_source(), batch_size=10, seed=0, threads=4) as reader:
        next(reader.epoch(0))
        assert reader_threads()
    assert not reader_threads()
    reader.close()
    with pytest.raises(RunError, match="closed"):
        next(reader.epoch(0))


def test_deleted_reader_leaves_no_thread() -> None:
    reader = BatchReader(array_source(), batch_size=10, seed=0, threads=4)
    next(reader.epoch(0))
    del reader
    gc.collect()
    give_up = time.monotonic() + 10
    while reader_threads() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not reader_threads()


def test_abandoned_iterator_stops_reading() -> None:
    gate, reads = threading.Event(), []
    first_block: set[int] = set()

    def fn(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if stop - start == 10:  # a unit, not the few rows that are requested to check the function
            reads.append(start)
            assert start // 10 in first_block or gate.wait(60)
        return np.zeros((stop - start, 3), np.float32), np.zeros(stop - start)

    source = GeneratorSource(fn, 1000, (3,), np.float32, 1, block_rows=10)
    with BatchReader(
        source, batch_size=10, seed=0, threads=2, block_bytes=5 * 10 * (12 + 4 + 16)
    ) as reader:
        first_block.update(reader._plan(0).block_units(0)[0].tolist())
        assert len(first_block) == 5
        batches = reader.epoch(0)
        next(batches)
        threading.Timer(0.05, gate.set).start()
        del batches  # waits for the reads under way, and drops the queued reads
        assert reader.stats.bytes_in_flight == 0
        assert len(set(reads)) <= 5 + 2
        assert len(copies_of(reader.epoch(0))) == reader.n_batches


def test_iterator_ends_when_another_starts_or_reader_closes() -> None:
    with BatchReader(array_source(), batch_size=10, seed=0) as reader:
        first_iterator = reader.epoch(0)
        next(first_iterator)
        second = reader.epoch(1)
        next(second)
        with pytest.raises(RunError, match="another one was started"):
            next(first_iterator)
        next(second)
    with pytest.raises(RunError, match="closed"):
        next(second)


def chunked_source(path: Path, n_rows: int) -> ZarrSource:
    """Write images of two transforms to a store; return its source."""
    rng = np.random.default_rng(0)
    group = zarr.create_group(str(path))
    images = rng.integers(0, 60, (n_rows, 16, 16, 3)).astype(np.uint8)
    group.create_array("X", data=images, chunks=(1500, 16, 16, 3))
    group.create_array("y", data=rng.integers(0, 9, n_rows), chunks=(1500,))
    return ZarrSource(path, [RandomCrop(2), RandomFlip()])


def traced_peak(run: Callable[[], None]) -> int:
    """Return the largest memory that a call allocates, in bytes."""
    gc.collect()
    with traced_memory() as traced:
        run()
    return traced.peak


def planned_bytes(reader: BatchReader) -> int:
    """Return the planned bytes of block buffers, straddle buffer, units in flight and plan.

    A thread that reads holds three copies: compressed bytes, zarr's chunk and its output, 2.99 in
    all for a chunk that does not compress.
    """
    row, unit_rows = reader._row_bytes, int(reader._sizes.max())
    in_flight = 3 * reader.threads * unit_rows * row
    units = 64 * reader.source.n_units
    return (2 * reader._block_rows + reader.batch_size) * row + in_flight + units + (1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_bounded_and_independent_of_n(tmp_path: Path, threads: int) -> None:
    with BatchReader(
        chunked_source(tmp_path / "warm.zarr", 3000), batch_size=700, seed=0
    ) as reader:
        copies_of(
            reader.epoch(0)
        )  # imports of Dask and zarr that come late are not ours to promise
    promises = []
    for n_rows in (9_000, 27_000):
        source = chunked_source(tmp_path / f"{n_rows}.zarr", n_rows)
        with BatchReader(
            source, batch_size=700, seed=0, threads=threads, block_bytes=4 << 20
        ) as reader:
            peak = traced_peak(lambda reader=reader: [None for _ in reader.epoch(0)])
            promises.append(planned_bytes(reader))
            # Below: buffers and at least one read are always there, so the promise is not idle.
            assert 0.5 * promises[-1] < peak <= promises[-1]
    assert promises[1] - promises[0] == 64 * 12  # the plan of 12 units more


def test_bytes_in_flight_are_bounded() -> None:
    source = array_source(5)
    unit = 5 * (3 * 4 + 2 * 8 + 8)
    with BatchReader(source, batch_size=10, seed=0, threads=64, in_flight_bytes=3 * unit) as reader:
        assert reader.threads == 3
        copies_of(reader.epoch(0))
        stats = reader.stats
    assert 0 < stats.bytes_in_flight_peak <= 3 * unit
    assert stats.bytes_in_flight == 0
    assert stats.bytes_read == 101 * (3 * 4 + 2 * 8 + 8)
    assert (stats.batches, stats.rows) == (11, 101)
    assert stats.stall_s >= stats.longest_wait_s >= stats.last_wait_s >= 0


def test_number_of_threads_suits_the_source() -> None:
    source = array_source(5)
    with BatchReader(source, batch_size=10, seed=0) as reader:
        local = reader.threads
    source.remote = True
    with BatchReader(source, batch_size=10, seed=0) as reader:
        assert reader.threads == 64 >= local


# ---------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"threads": "many"}, "threads='many'"),
        ({"block_bytes": 0}, "block_bytes=0"),
    ],
)
def test_invalid_settings_are_named(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchReader(array_source(), **{"batch_size": 10, "seed": 0, **changes})


def test_start_outside_the_epoch_is_refused() -> None:
    with BatchReader(array_source(), batch_size=10, seed=0) as reader:
        for epoch, start in ((0, 12), (0, -1), (-1, 0)):
            with pytest.raises(ConfigError, match=f"batch {start} of epoch {epoch}"):
                reader.epoch(epoch, start)
        assert list(reader.epochs(3, 3)) == []


# --------------------------------------------------------------- stores whose chunks are cached


@pytest.mark.parametrize("copies", [1, 3, 40])
def test_cached_store_gives_same_batches_and_is_read_once(tmp_path: Path, copies: int) -> None:
    """Delete the chunks before the second epoch."""
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 256, (600, 6, 6, 2), dtype=np.uint8)
    ingest(rows, tmp_path / "a.zarr", y=np.arange(600) % 3, chunk_mb=0.01, shuffle=False)
    changes = [RandomCrop(1), RandomFlip()]

    def batches(keep_bytes: int, *, lose_chunks: bool = False) -> list[RowBlock]:
        base = ZarrSource(tmp_path / "a.zarr")
        source = AugmentedSource(base, copies, changes)
        with BatchReader(source, batch_size=64, seed=1, threads=3, keep_bytes=keep_bytes) as reader:
            batches_read = copies_of(reader.epoch(0))
            if lose_chunks:
                shutil.rmtree(tmp_path / "a.zarr" / "X" / "c")
            return batches_read + copies_of(reader.epoch(1))

    decoded = 600 * (72 + 8)
    assert AugmentedSource(ZarrSource(tmp_path / "a.zarr"), 3).decoded_bytes == decoded
    plain = batches(0)
    assert_same(batches(decoded - 1), plain)
    assert_same(batches(decoded, lose_chunks=True), plain)
    with pytest.raises(StreamkernError, match=r"chunk|missing|gone"):
        batches(0)


def test_transforms_do_not_modify_cached_rows(tmp_path: Path) -> None:
    """Check a transform that writes to its argument, which would change all later epochs."""

    @host_transform
    def shift(X: np.ndarray, Y: np.ndarray, rng: object) -> tuple[np.ndarray, np.ndarray]:
        X += 1
        return X, Y

    ingest(X, tmp_path / "a.zarr", y=Y, chunk_mb=0.0005)
    source = ZarrSource(tmp_path / "a.zarr", [shift])
    blocks = []
    for keep_bytes in (0, source.decoded_bytes):
        with BatchReader(source, batch_size=10, seed=0, keep_bytes=keep_bytes) as reader:
            blocks.append(copies_of(reader.epochs(0, 3)))
    assert_same(*blocks)


def test_cached_rows_use_planned_memory(tmp_path: Path) -> None:
    """Check also the last chunk, which is decoded whole."""
    ingest(X, tmp_path / "a.zarr", y=Y, chunk_mb=0.0005)
    source = ZarrSource(tmp_path / "a.zarr").with_unit_cache()
    arrays = [a for u in range(source.n_units) for a in source.read_unit(u, 0, 0).contents]
    bases = [a if a.base is None else a.base for a in arrays]
    assert sum(a.nbytes for a in bases) == source.decoded_bytes
