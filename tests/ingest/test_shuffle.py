"""Check the order of spooled rows, and that a spool resumes from its last save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.basics.errors import CorruptChunkError
from streamkern.filesystem.scratch import Scratch
from streamkern.ingest.shuffle import Spool, row_keys

INT32 = np.dtype(np.int32)
SPOOL: dict[str, Any] = {
    "row_shape": (1,), "x_dtype": INT32, "y_shape": (), "y_dtype": INT32,
    "limit_bytes": 1600, "seed": 3, "identity": "t",
}  # fmt: skip
"""Arguments of a spool that holds a few dozen rows in memory."""


@contextmanager
def make_spool(folder: Path, **arguments: Any) -> Iterator[Spool]:
    """Open a spool in a folder, with `SPOOL` and other arguments of `Spool`."""
    with Scratch(folder) as scratch:
        yield Spool(scratch=scratch, **SPOOL | arguments)


def numbered_rows(n: int) -> Any:
    """Return X (n, 1), whose rows are their numbers."""
    return np.arange(n, dtype=np.int32)[:, None]


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 700),
    seed=st.integers(0, 2**40),
    spill=st.booleans(),
    knows_length=st.booleans(),
    pieces=st.integers(1, 5),
)
def test_spool_order_follows_keys_for_any_memory(
    n: int, seed: int, spill: bool, knows_length: bool, pieces: int, tmp_path_factory: Any
) -> None:
    scratch = tmp_path_factory.mktemp("spool") / "s"
    X = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
    with make_spool(
        scratch, row_shape=(3,), x_dtype=X.dtype, seed=seed,
        limit_bytes=1500 if spill else 1 << 20, expected_rows=n if knows_length else None,
    ) as spool:  # fmt: skip
        for rows in np.array_split(np.arange(n), pieces):
            spool.append(X[rows], rows)
        spool.seal(None)
        # Independent truth: sort all rows by key at once.
        order = np.argsort(row_keys(seed, 0, n), kind="stable")
        parts = [spool.rows(a, b) for a, b in pairwise([0, n // 3, n // 2, n]) if a < b]
        for k, expected in enumerate((X[order], order, order)):  # X, y and row numbers
            np.testing.assert_array_equal(np.concatenate([part[k] for part in parts]), expected)
        assert spool.is_spilled == (spill and n > 1500 // (32 + 24))
        spool.discard()
        assert not scratch.exists()


@pytest.mark.slow
def test_oversized_buckets_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 3000  # 64 buckets of about 47 rows, where 40 fit
    X = numbered_rows(n)
    expected = np.argsort(row_keys(3, 0, n))
    real, written = Path.unlink, []

    def stop(self: Path, missing_ok: bool = False) -> None:
        written.append(self)
        if len(written) == 5:
            raise KeyboardInterrupt
        real(self, missing_ok)

    with make_spool(tmp_path / "s") as spool, monkeypatch.context() as patch:
        spool.append(X, X[:, 0])
        patch.setattr(Path, "unlink", stop)
        with pytest.raises(KeyboardInterrupt):
            spool.seal(["note"])
    with make_spool(tmp_path / "s") as resumed:
        assert (resumed.is_sealed, resumed.notes, resumed.n_rows) == (True, ["note"], n)
        resumed.seal(resumed.notes)
        np.testing.assert_array_equal(resumed.rows(0, n)[1], expected)
        np.testing.assert_array_equal(resumed.rows(777, 780)[0][:, 0], expected[777:780])


def test_spool_resumes_from_last_save(tmp_path: Path) -> None:
    n = 600
    X = numbered_rows(n)
    with make_spool(tmp_path / "s") as spool:
        spool.append(X[:200], X[:200, 0])
        spool.save(["a"])
        spool.append(X[200:333], X[200:333, 0])  # lost: it was not saved
    with make_spool(tmp_path / "s") as resumed:
        assert (resumed.is_sealed, resumed.notes, resumed.n_rows) == (False, ["a"], 200)
        resumed.append(X[200:], X[200:, 0])
        resumed.seal(["a", "b"])
        np.testing.assert_array_equal(resumed.rows(0, n)[1], np.argsort(row_keys(3, 0, n)))
    with make_spool(tmp_path / "s", identity="other") as other:
        assert other.n_rows == 0


def test_rows_keep_source_order_when_memory_changes(tmp_path: Path) -> None:
    n = 600
    X = numbered_rows(n)
    start = 0
    for stop, memory in ((170, 4000), (390, 1100), (n, 20000)):
        with make_spool(tmp_path / "s", limit_bytes=memory, seed=None) as spool:
            assert spool.n_rows == start
            spool.append(X[start:stop], X[start:stop, 0])
            spool.save(None)
            start = stop
            if stop == n:
                spool.seal(None)
                np.testing.assert_array_equal(spool.rows(0, n)[0], X)
                np.testing.assert_array_equal(spool.rows(150, 410)[1], X[150:410, 0])


def test_row_keys_are_uniform_and_depend_on_seed() -> None:
    keys = row_keys(7, 0, 100_000)
    assert len(np.unique(keys)) == 100_000
    counts = np.bincount((keys >> np.uint64(58)).astype(int), minlength=64)
    # Chi-square with 63 degrees of freedom: 99.99 % below 118.
    assert ((counts - 1562.5) ** 2 / 1562.5).sum() < 118
    np.testing.assert_array_equal(keys[500:600], row_keys(7, 500, 100))
    assert not np.isin(keys[:1000], row_keys(8, 0, 1000)).any()


def test_altered_bucket_is_detected_when_split(tmp_path: Path) -> None:
    X = numbered_rows(3000)
    with make_spool(tmp_path / "s") as spool:
        spool.append(X, X[:, 0])
        spool.save(["note"], is_sealed=True, wait=True)
    large = max((tmp_path / "s").glob("*.rows"), key=lambda path: path.stat().st_size)
    data = bytearray(large.read_bytes())
    data[5] ^= 1
    large.write_bytes(data)
    with (
        make_spool(tmp_path / "s") as resumed,
        pytest.raises(CorruptChunkError, match="was altered"),
    ):
        resumed.seal(resumed.notes)
