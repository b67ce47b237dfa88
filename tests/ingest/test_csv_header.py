"""Check that numeric column names are distinguished from a first row of numbers."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.basics.errors import DataError
from streamkern.ingest.csv_layout import csv_layout
from streamkern.ingest.formats import FileForm

N = 60


def decide_header(text: str, required: tuple[str, ...] = ()) -> str:
    """Return "header" or "row", "refused", or "warned" for a row with a warning."""
    lines = [line for line in enumerate(text.split("\n"), 1) if line[1].strip()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            header = csv_layout(lines, FileForm(), "t.csv", (), required).has_header
        except DataError as error:
            names_both = "header=True" in str(error) and "header=False" in str(error)
            return "refused" if names_both else str(error)
    assert all("header=True" in str(k.message) for k in caught)
    return "header" if header else "warned" if caught else "row"


def tables(r: np.random.Generator, d: int) -> dict[str, Any]:
    """Return rows (N, d) of several kinds."""
    full = r.integers(0, 256, (N, d))
    return {
        "normal": r.normal(size=(N, d)), "cauchy": r.standard_cauchy((N, d)), "bytes": full,
        "rounded": np.round(r.normal(size=(N, d)) * 5, 1), "float bytes": full.astype(float),
        "small": r.integers(0, 10, (N, d)), "large": r.integers(0, 10**6, (N, d)),
        "one-hot": np.eye(d, dtype=int)[r.integers(0, d, N)], "bits": r.integers(0, 2, (N, d)),
        "mixed": np.c_[r.normal(size=(N, d - 1)), r.integers(0, 3, N)],
        "times": np.c_[np.arange(N), r.normal(size=(N, d - 1))],
        "range": np.arange(N * d).reshape(N, d), "years": r.integers(1950, 2025, (N, d)),
    }  # fmt: skip


def test_numeric_column_names_are_a_header_or_refused() -> None:
    r = np.random.default_rng(0)
    names: dict[str, Callable[[int], Any]] = {
        "from 0": range, "from 1": lambda d: range(1, d + 1),
        "years": lambda d: range(1990, 1990 + d),
    }  # fmt: skip
    actual: Counter[str] = Counter()
    for d in (3, 4, 8, 20):
        for kind, rows in tables(r, d).items():
            for called, columns in names.items():
                frame = pd.DataFrame(rows, columns=columns(d))
                for index in (False, True):
                    if kind in ("range", "years") and called == "years":
                        continue  # names like the rows themselves
                    decision = decide_header(frame.to_csv(index=index))
                    assert decision in ("header", "refused"), (kind, called, d, index)
                    actual[decision] += 1
    assert actual["header"] > 10 * actual["refused"]
    spectrum = pd.DataFrame(r.normal(size=(N, 9)), columns=np.arange(400, 418, 2))
    assert decide_header(spectrum.to_csv(index=False)) == "header"
    for columns in ([0.1, 0.2], [0.1, 0.2, 0.5], [0.5, 0.25]):
        for rows in (r.normal(size=(N, 3)), r.integers(0, 99, (N, 3))):
            frame = pd.DataFrame(rows[:, : len(columns)], columns=columns)
            assert decide_header(frame.to_csv(index=False)) == "refused"
    assert decide_header('"7","3"\n1.5,2\n3,4\n') == "header"
    assert decide_header("7,3\n1,2\n3,4\n") == "row"
    assert decide_header("7,3\n1,2\n3,4\n", required=("3", "7")) == "header"
    assert decide_header("0,1,target\n5,2,3\n6,1,4\n8,9,1\n7,4,5\n5,6,8\n") == "header"


def test_numeric_rows_without_header_are_not_refused() -> None:
    r = np.random.default_rng(1)
    actual: Counter[str] = Counter()
    for _ in range(4):
        for d in (1, 3, 5, 20):
            for rows in tables(r, d).values():
                written = [pd.DataFrame(rows).to_csv(index=False, header=False)]
                for form in ("%g", "%.18e", "%.3f"):
                    file = io.StringIO()
                    np.savetxt(file, rows, delimiter=",", fmt=form)
                    written.append(file.getvalue())
                actual.update(map(decide_header, written))
    assert actual["header"] == 0
    assert actual["row"] >= 0.99 * actual.total()
    assert decide_header("0,1\n1,0\n0,1\n1,1\n") == "warned"


def test_large_rising_numbers_are_not_silently_a_header() -> None:
    r = np.random.default_rng(2)
    digits = r.integers(0, 10, (N, 8))
    for first in ([100, 200, 300, 400, 500], [100, 250, 300, 420, 500], range(100, 900, 100)):
        rows = np.vstack([first, digits[:, : len(first)]])
        assert decide_header(pd.DataFrame(rows).to_csv(index=False, header=False)) == "refused"
    text = "".join(f"{','.join(map(str, row))}\n" for row in r.normal(size=(N, 5)))
    lines = [*enumerate(("100,200,300,400,500\n" + text).split("\n")[:-1], 1)]
    with pytest.warns(UserWarning, match="header=False if it is a row"):
        assert csv_layout(lines, FileForm(), "t.csv").has_header


def test_later_files_have_a_header_like_the_first(tmp_path: Path) -> None:
    r = np.random.default_rng(0)
    train, rows, more = (tmp_path / f"{name}.csv" for name in ("train", "rows", "more"))
    X = r.normal(size=(N, 3)).round(3)
    np.savetxt(train, X, delimiter=",")
    X[0] = [0, 1, 2]
    np.savetxt(rows, X[:, :2], delimiter=",", fmt="%g")
    np.savetxt(more, X, delimiter=",", fmt="%g")
    model = sk.KernelRegressor(n_centers=9).fit(str(train), 2)
    store = tmp_path / "plain.zarr"
    sk.ingest_store(train, store, y=2)
    warns = partial(pytest.warns, UserWarning, match="the files before it have no header")
    of_arrays = sk.KernelRegressor(n_centers=9).fit(X[:, :2], X[:, 2])
    of_integer_names = sk.KernelRegressor(n_centers=9).fit(pd.DataFrame(X[:, :2]), X[:, 2])
    for nameless in (of_arrays, of_integer_names):
        with pytest.warns(UserWarning, match=r"header=False .* into a data frame"):
            assert len(nameless.predict(rows)) == N - 1
        with pytest.warns(UserWarning, match="header=False if it is a row"):
            nameless.score(more, 2)
        frame = pd.read_csv(rows, header=None)
        assert np.allclose(nameless.predict(frame), nameless.predict(X[:, :2]))
    for path in (rows, more):
        with warns():
            assert np.allclose(model.predict(path), model.predict(X[:, :2]))
    with warns():
        assert np.isclose(model.score(more), model.score(X[:, :2], X[:, 2]))
    with warns():
        assert sk.append_store(more, store).n_rows == 2 * N
    with warns():
        assert sk.ingest_store([train, more], tmp_path / "both.zarr", y=2).n_rows == 2 * N
    frame = pd.DataFrame(r.integers(0, 10, (N, 4)))
    frame.to_csv(train, index=False)
    frame[[3, 2, 1, 0]].to_csv(more, index=False)
    frame[[2, 0, 1]].to_csv(rows, index=False)
    form: dict[str, Any] = {"header": True, "targets": "values"}
    sk.ingest_store(train, tmp_path / "named.zarr", y="3", **form)
    named = sk.KernelRegressor(n_centers=9).fit(str(tmp_path / "named.zarr"))
    for path in (rows, more):
        assert np.array_equal(named.predict(path), named.predict(train))
    assert sk.append_store(more, tmp_path / "named.zarr").n_rows == 2 * N


@pytest.mark.filterwarnings("ignore:the first line of .* is read as the names of its columns")
def test_every_entry_point_reads_numeric_names(tmp_path: Path) -> None:
    r = np.random.default_rng(0)
    frame = pd.DataFrame(np.c_[r.integers(0, 255, (N, 4)), np.arange(N) % 3])
    table, rows = tmp_path / "t.csv", tmp_path / "x.csv"
    frame.to_csv(table, index=False)
    frame[[0, 1, 2, 3]].to_csv(rows, index=False)
    spec = sk.ingest_store(table, tmp_path / "t.zarr", y="4")
    assert (spec.n_rows, spec.classes, spec.columns) == (N, ("0", "1", "2"), tuple("0123"))
    assert sk.append_store(table, tmp_path / "t.zarr").n_rows == 2 * N
    required = sk.KernelClassifier(n_centers=9).fit(frame[[0, 1, 2, 3]], frame[4])
    assert np.array_equal(required.predict(rows), required.predict(frame[[0, 1, 2, 3]]))
    named = sk.KernelClassifier(n_centers=9).fit(str(table), "4")
    assert np.array_equal(named.predict(rows), named.predict(table))
    X = r.normal(size=(N, 3))
    pd.DataFrame(np.c_[X, X[:, 0]]).to_csv(table, index=False)
    assert sk.ingest_store(table, tmp_path / "v.zarr", y=3).n_rows == N


@pytest.mark.parametrize("header", [True, False])
def test_named_options_settle_doubtful_first_line(tmp_path: Path, header: bool) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0.1,0.2,0.5\n" + "".join(f"{k},{k * k % 7},{k % 3}\n" for k in range(9)))
    with pytest.raises(DataError, match="header=True if it is a header"):
        sk.ingest_store(path, tmp_path / "t.zarr", y=-1)
    form: dict[str, Any] = {"header": header, "targets": "values"}
    assert sk.ingest_store(path, tmp_path / "t.zarr", y=-1, **form).n_rows == 10 - header
