"""Check units that cannot be read: transient faults are retried, others name the unit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import CorruptChunkError, DataError, StorageError
from streamkern.store.row_block import RowBlock
from streamkern.stream import unit_readers
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.sources.base import BaseSource
from tests.streams import array_source, assert_same, block_bytes_of, copies_of


class Faulty(BaseSource):
    """A source whose reads of some units raise an error a number of times."""

    kind = "faulty"

    def __init__(self, error: Callable[[], Exception], units: set[int], times: int) -> None:
        self.base = array_source()
        self.error, self.left = error, dict.fromkeys(units, times)
        for name in ("n_rows", "row_shape", "dtype", "n_outputs", "classes", "y_dtype", "_edges"):
            setattr(self, name, getattr(self.base, name))

    @property
    def fingerprint(self) -> str:
        return "faulty"

    def _read(self, u: int, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self.left.get(u, 0):
            self.left[u] -= 1
            raise self.error()
        return self.base._read(u, seed, epoch)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_readers, "FIRST_RETRY_S", 0.001)


@pytest.mark.parametrize("error", [OSError, TimeoutError, ConnectionResetError])
def test_transient_faults_are_retried(error: Any) -> None:
    with BatchReader(Faulty(error, {0, 5, 12}, 3), batch_size=10, seed=0) as reader:
        batches = copies_of(reader.epoch(0))
        assert reader.stats.retries == 9
    with BatchReader(array_source(), batch_size=10, seed=0) as plain:
        assert_same(batches, copies_of(plain.epoch(0)))


def test_persistent_fault_is_raised_unchanged() -> None:
    source = Faulty(lambda: OSError(5, "the disk"), {4}, 10**9)
    with BatchReader(source, batch_size=10, seed=0, retry_s=0.05) as reader:
        with pytest.raises(OSError, match="the disk") as caught:
            copies_of(reader.epoch(3))
        (note,) = caught.value.__notes__
        assert "unit 4 (rows 32 to 39) of epoch 3, " in note
        stats = reader.stats
        assert (
            f", {stats.retries + 1} tries" in note
        )  # retries are counted although all of them failed
        assert stats.retries > 0
        assert stats.bytes_in_flight == 0
        assert stats.bytes_read <= 93 * (3 * 4 + 2 * 8 + 8)  # all units but that one


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        PermissionError("closed"),
        CorruptChunkError("chunk X/c/4/0"),
        StorageError("tried for a minute"),
        KeyError("a bug"),
    ],
)
def test_permanent_faults_are_not_retried(error: Exception) -> None:
    source = Faulty(lambda: error, {4}, 1)
    with BatchReader(source, batch_size=10, seed=0) as reader:
        with pytest.raises(type(error)) as caught:
            copies_of(reader.epoch(0))
        assert caught.value is error
        assert "unit 4 (rows 32 to 39) of epoch 0" in error.__notes__[0]
        assert source.left == {4: 0}
        assert len(copies_of(reader.epoch(0))) == reader.n_batches  # the reader still works


def test_first_failure_in_plan_order_is_raised_at_its_batch() -> None:
    """Check one thread and four, whose reads may fail in any order."""
    source = Faulty(lambda: KeyError("a bug"), {1, 6, 11}, 10**9)
    options: dict[str, Any] = {
        "batch_size": 4, "seed": 2, "block_bytes": block_bytes_of(source, 3),
    }  # fmt: skip
    with BatchReader(array_source(), **options) as reader:
        order = np.concatenate([b.row_ids for b in copies_of(reader.epoch(0))])
    notes = set()
    for threads in (1, 4):
        with BatchReader(source, threads=threads, **options) as reader:
            seen_ids: list[np.ndarray] = []
            with pytest.raises(KeyError) as caught:
                seen_ids.extend(b.row_ids.copy() for b in reader.epoch(0))
            notes.add(caught.value.__notes__[0])
            rows = np.concatenate(seen_ids) if seen_ids else np.array([], int)
            np.testing.assert_array_equal(rows, order[: len(rows)])
    assert len(notes) == 1


def test_close_interrupts_a_retry() -> None:
    source = Faulty(OSError, set(range(13)), 10**9)
    reader = BatchReader(source, batch_size=10, seed=0, retry_s=3600)
    caught: list[BaseException] = []

    def consume() -> None:
        try:
            next(reader.epoch(0))
        except BaseException as error:
            caught.append(error)

    consumer = threading.Thread(target=consume, name="streamkern-test")
    consumer.start()
    while not any(n_left < 10**9 for n_left in source.left.values()):
        time.sleep(0.001)
    reader.close()
    consumer.join(10)
    assert not consumer.is_alive()
    assert len(caught) == 1


class WrongDtype(Faulty):
    """A source that declares float32 and returns float64."""

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block = super().read_unit(u, seed, epoch)
        return block._replace(X=block.X.astype(np.float64))


def test_source_that_returns_wrong_blocks_is_named() -> None:
    with (
        BatchReader(WrongDtype(OSError, set(), 0), batch_size=10, seed=0) as reader,
        pytest.raises(DataError, match=r"has X of shape \(8, 3\) and dtype float64; .* float32"),
    ):
        copies_of(reader.epoch(0))
