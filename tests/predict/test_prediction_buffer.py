"""Check the buffer of predictions: it sorts rows, and detects altered or unfinished files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.basics.errors import CorruptChunkError
from streamkern.filesystem.scratch import Scratch
from streamkern.predict import prediction_buffer
from streamkern.predict.prediction_buffer import PredictionBuffer
from tests.traced_memory import traced_memory


def open_buffer(scratch: Scratch) -> PredictionBuffer:
    """Return the buffer of predictions with one value for each row."""
    return PredictionBuffer(scratch, {}, np.dtype(np.float32), 1, numbered=False, chunk_rows=10)


def test_predictions_are_sorted_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check 40 MB of predictions in random order with slabs of 1 MB."""
    monkeypatch.setattr(prediction_buffer, "BUFFER_SLAB_BYTES", 1 << 20)
    monkeypatch.setattr(prediction_buffer, "PENDING_BYTES", 1 << 20)
    n, step = 1_000_000, 20_000
    order = np.random.default_rng(0).permutation(n)
    with traced_memory() as traced, Scratch(tmp_path / "s") as scratch:
        buffer = PredictionBuffer(
            scratch, {}, np.dtype(np.float64), 4, numbered=False, chunk_rows=1000
        )
        for start in range(0, n, step):
            rows = order[start : start + step]
            buffer.add(rows, rows, np.repeat(rows[:, None], 4, axis=1).astype(np.float64))
        buffer.save("computed")
        n_read = 0
        for first, rows, values in buffer.slabs():
            assert first == n_read == rows[0]
            assert (np.diff(rows) == 1).all()
            np.testing.assert_array_equal(values[:, 3], rows)
            n_read += len(rows)
    assert n_read == n
    assert traced.peak < 12 << 20  # 1 MB pending, and a slab with copies to sort it


def test_altered_scratch_is_detected(tmp_path: Path) -> None:
    with Scratch(tmp_path / "s") as scratch:
        buffer = open_buffer(scratch)
        buffer.add(np.arange(9), np.arange(9), np.ones((9, 1), np.float32))
        buffer.save("computed")
    (path,) = (tmp_path / "s").glob("*.rows")
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    with Scratch(tmp_path / "s") as scratch:
        reopened = open_buffer(scratch)
        assert (reopened.n_rows, reopened.stage) == (9, "computed")
        with pytest.raises(CorruptChunkError, match=r"was altered.*run the same command again"):
            list(reopened.slabs())
    with Scratch(tmp_path / "s") as scratch:
        assert open_buffer(scratch).n_rows == 0


def test_restarted_predictions_are_empty_after_a_kill(tmp_path: Path) -> None:
    """Check a call that starts again because its output is gone, and is then killed."""
    with Scratch(tmp_path / "s") as scratch:
        buffer = open_buffer(scratch)
        buffer.add(np.arange(9), np.arange(9), np.ones((9, 1), np.float32))
        buffer.save("computed")
        buffer.finish("done")
    with Scratch(tmp_path / "s") as scratch:
        buffer = open_buffer(scratch)
        assert (buffer.n_rows, buffer.stage) == (9, "done")
        buffer.restart()
    with Scratch(tmp_path / "s") as scratch:
        buffer = open_buffer(scratch)
        assert (buffer.n_rows, buffer.stage, list(buffer.slabs())) == (0, "", [])
