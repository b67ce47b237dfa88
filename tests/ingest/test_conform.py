"""Check that raw rows are converted, and that a column that loses its information is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern import KernelRegressor
from streamkern.basics.errors import DataError
from streamkern.cli import main
from streamkern.ingest.conform import RoundingTracker
from streamkern.ingest.ingest import ingest
from streamkern.store.store import open_store
from tests.ingest.ingested import ingest_and_read
from tests.raw_files import memory_url

FLOAT32 = np.dtype(np.float32)
NARROW, WIDE = np.array([[1.5], [2.5]], np.float16), np.array([[637.0851], [0.1]])


def blocks_of(*parts: Any) -> Iterator[tuple[Any, Any]]:
    """Return an iterator of blocks (X, y) with the targets 0.5 and 1.5."""
    return iter([(part, np.array([0.5, 1.5])[: len(part)]) for part in parts])


@pytest.mark.parametrize("kind", ["npy", "npz", "parquet"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (NARROW, WIDE),
        (np.array([[1], [2]], np.int16), np.array([[2**31 - 1], [7]], np.int32)),
        (np.array([[1], [2]], np.uint8), np.array([[-1], [300]], np.int16)),
    ],
    ids=["floats", "integers", "signs"],
)
def test_several_files_are_stored_in_common_dtype(
    tmp_path: Path, kind: str, first: Any, second: Any
) -> None:
    paths = [tmp_path / f"{k}.{kind}" for k in range(2)]
    y = np.array([0.5, 1.5])
    for path, X in zip(paths, (first, second), strict=True):
        if kind == "npy":
            np.save(path, X)
            np.save(path.with_suffix(".y.npy"), y)
        elif kind == "npz":
            np.savez(path, X=X, y=y)
        else:
            pq.write_table(pa.table({"a": X[:, 0], "y": y}), path)
    targets = [path.with_suffix(".y.npy") for path in paths] if kind == "npy" else None
    X = ingest_and_read(paths, y=targets).X
    np.testing.assert_array_equal(X, np.concatenate([first.astype(float), second]))


def test_fitting_blocks_and_requested_dtype_are_accepted() -> None:
    small = np.array([[1], [2]], np.uint8)
    np.testing.assert_array_equal(
        ingest_and_read(blocks_of(WIDE, NARROW, small)).X[:, 0], [637.0851, 0.1, 1.5, 2.5, 1, 2]
    )
    np.testing.assert_array_equal(
        ingest_and_read(blocks_of(NARROW, small, np.empty((0, 1)))).X[:, 0], [1.5, 2.5, 1, 2]
    )
    np.testing.assert_array_equal(
        ingest_and_read(blocks_of(NARROW, WIDE), dtype="float64").X[2:], WIDE
    )


def write_rows(path: Path, X: Any) -> Path:
    """Write a CSV with the columns a, b, ... and values y; return its path."""
    names = [chr(ord("a") + k) for k in range(len(X[0]))]
    lines = [",".join([*names, "y"]), *(",".join([*map(str, row), f"{row[0]}.5"]) for row in X)]
    path.write_text("\n".join(lines) + "\n")
    return path


def rows_with_unix_seconds(n: int = 400) -> list[tuple[int, int]]:
    """Return rows of a small number and UNIX seconds, 128 of which are one number in float32."""
    return [(k % 7, 1_700_000_000 + k) for k in range(n)]


def loses_digits(X: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether rounding changes a column by more than 0.001 of its standard deviation, from
    all rows at once."""
    error = np.abs(X - X.astype(dtype)).max(axis=0)
    return bool(((error > 1e-3 * X.std(axis=0)) & (np.ptp(X, axis=0) > 0)).any())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), offset=st.sampled_from([0, 1e3, 3e4, 1e6, 1.7e9]),
    d=st.integers(1, 300), cuts=st.lists(st.integers(0, 500), max_size=4),
)  # fmt: skip
def test_tracked_rounding_equals_rounding_of_all_rows(
    seed: int, offset: float, d: int, cuts: list[int]
) -> None:
    """Check that neither the division into blocks nor a resumed pass changes the result."""
    X = offset + np.random.default_rng(seed).normal(size=(500, d))
    rounding = RoundingTracker(d, FLOAT32)
    for part in np.split(X, sorted(cuts)):
        rounding.add(part, part.astype(FLOAT32))
        rounding = RoundingTracker(d, FLOAT32, rounding.state)
    refused = False
    try:
        rounding.check(None, ["x.csv"])
    except DataError:
        refused = True
    assert refused == loses_digits(X, FLOAT32)


def test_constant_columns_lose_no_information() -> None:
    """Check that a rounded constant column is accepted, and refused if the column has one other
    value."""
    X = np.full((1000, 2), [0.1, 1_700_000_001.0])
    rounding = RoundingTracker(2, FLOAT32)
    rounding.add(X, X.astype(FLOAT32))
    rounding.check(None, ["x.csv"])
    *_, largest_errors = rounding.state["columns"]
    np.testing.assert_array_equal(largest_errors, np.abs(X - X.astype(FLOAT32))[0])
    X[500, 1] += 1
    rounding = RoundingTracker(2, FLOAT32)
    rounding.add(X, X.astype(FLOAT32))
    with pytest.raises(DataError, match=r"column 1 of x\.csv is rounded by up to"):
        rounding.check(None, ["x.csv"])


def test_csv_column_beyond_float32_is_refused_before_publishing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write_rows(tmp_path / "t.csv", rows_with_unix_seconds()), tmp_path / "o.zarr"
    arguments = ["ingest", str(path), str(out), "--y", "y", "--targets", "values"]
    assert main.run_command(arguments) == 2
    message = capsys.readouterr().err
    assert "column 'b' of" in message
    assert str(path) in message
    assert "--dtype float64" in message
    assert sorted(k.name for k in tmp_path.iterdir()) == ["t.csv"]
    assert main.run_command([*arguments, "--dtype", "float64", "--no-shuffle"]) == 0
    np.testing.assert_array_equal(
        open_store(out).read_rows(np.arange(400))[0], rows_with_unix_seconds()
    )


@pytest.mark.slow
@pytest.mark.parametrize("memory", [1 << 20, 1 << 30], ids=["many blocks", "one block"])
def test_rounding_is_judged_by_all_blocks(tmp_path: Path, memory: int) -> None:
    """Column b of narrow.csv varies too little for float32, and that of wide.csv enough: single
    blocks of both look alike."""
    near_zero = [(k, k) for k in range(60_000)]
    wide = write_rows(tmp_path / "wide.csv", near_zero + [(k, 2**40 + k) for k in range(60_000)])
    narrow = write_rows(tmp_path / "narrow.csv", [(k, 2**40 + k) for k in range(120_000)])
    options: dict[str, Any] = {"y": "y", "memory": memory, "chunk_mb": 1 / 16}
    assert ingest(wide, memory_url(), **options).x_dtype == FLOAT32
    with pytest.raises(DataError, match="column 'b' of"):
        ingest(narrow, memory_url(), **options)


LONG = np.random.default_rng(0).normal(size=(30, 2)).astype(np.longdouble)
"""Rows of long double that float64 holds exactly."""
THIRDS = LONG + np.longdouble(1) / 3
Y = LONG[:, 0].astype(float)


@pytest.fixture(scope="module")
def fitted() -> KernelRegressor:
    """Return a model that was fitted to `LONG`."""
    return KernelRegressor(n_centers=5, epochs=1).fit(LONG, Y)


def test_long_doubles_are_rounded_to_float64_with_a_warning(
    tmp_path: Path, fitted: KernelRegressor
) -> None:
    np.save(tmp_path / "x.npy", THIRDS)
    np.save(tmp_path / "y.npy", Y)
    rounding_calls = (
        lambda: ingest(THIRDS, tmp_path / "s.zarr", y=Y),
        lambda: ingest(tmp_path / "x.npy", tmp_path / "f.zarr", y=tmp_path / "y.npy"),
        lambda: KernelRegressor(n_centers=5, epochs=1).fit(THIRDS, Y),
        lambda: KernelRegressor(n_centers=5, epochs=1).fit(LONG.astype(float), THIRDS[:, 0]),
        lambda: fitted.predict(THIRDS),
    )
    for call in rounding_calls:
        with pytest.warns(UserWarning, match="rounded to 16 digits"):
            call()
    rows = open_store(tmp_path / "s.zarr").read_rows(np.arange(30))[0]
    np.testing.assert_array_equal(np.sort(rows, 0), np.sort(THIRDS.astype(float), 0))
    assert ingest(LONG, tmp_path / "exact.zarr", y=LONG[:, 0]).x_dtype == np.float64


def test_long_doubles_beyond_float64_are_refused(tmp_path: Path, fitted: KernelRegressor) -> None:
    too_large = np.longdouble("1e400")
    for X in (LONG * too_large, np.where(LONG > 0, too_large, LONG)):
        with pytest.raises(DataError, match="too large for float64"):
            ingest(X, tmp_path / "s.zarr", y=Y)
        with pytest.raises(DataError, match="too large for float64"):
            fitted.predict(X)
