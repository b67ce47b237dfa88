"""Check the benchmark of 10^8 rows on fewer rows: its figures, memory and errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import hundred_million as subject

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/status"),
]


def measured(folder: Path, *rows: str) -> dict:
    """Return the results of the benchmark for augmented rows, with one process for each size."""
    path = folder / "hundred_million.json"
    assert subject.main(["--rows", *rows, "--kinds", "augmented", "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.full
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    results = measured(tmp_path, "1200000", "12000000")
    assert [f["rows"] for f in results["figures"]] == [1_200_000, 12_000_000]
    # Peaks of processes that do the same differ by up to a few percent.
    assert results["peak_spread"]["augmented"] < 0.05


def test_every_figure_is_measured(tmp_path: Path) -> None:
    results = measured(tmp_path, "1200000")
    assert results["wrong"] == []
    for f in results["figures"]:
        assert all(f[name] > 0 for name in subject.COLUMNS if name not in ("kind", "stall"))
        assert f["plan_mib"] * 2**20 < 64 * f["units"]


def test_generated_rows_depend_on_their_number_only() -> None:
    X, y = subject.generated(1, 2, 0, 100)
    repeated, _ = subject.generated(1, 2, 40, 60)
    np.testing.assert_array_equal(repeated, X[40:60])
    assert y.tolist() == [i % 10 for i in range(100)]


def test_failing_size_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert subject.main(["--rows", "0", "--kinds", "generator"]) == 1
    assert "WRONG: generator, 0" in capsys.readouterr().out
