"""How files were read is recorded with their rows, and is how later ones are read."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file

import streamkern as sk
from streamkern.basics.errors import DataError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).round(3)
Y = (X @ [1.0, -2.0, 0.5]).round(3)


def table(form: dict[str, Any], X: Any = X, y: Any = Y) -> bytes:
    """Return rows written in this form."""
    mark, decimal = form.get("delimiter", ";"), form.get("decimal", ".")
    lines = ["# above"] * form.get("skip_lines", 0)
    lines += [] if "names" in form else [mark.join(["a", "é", "c", "y"])]
    lines += [mark.join(map(str, row)).replace(".", decimal) for row in np.c_[X, y].tolist()]
    return ("\n".join(lines) + "\n").encode(form.get("encoding", "utf-8"))


FORMS: list[dict[str, Any]] = [
    {"decimal": ","}, {"delimiter": "~"}, {"encoding": "latin-1"}, {"encoding": "utf-16"},
    {"skip_lines": 2}, {"names": ["a", "é", "c", "y"]}, {"format": "csv"},
    {"decimal": ",", "delimiter": "|", "encoding": "latin-1", "skip_lines": 1, "format": "csv",
     "names": ["a", "é", "c", "y"]},
]  # fmt: skip


def rows_of(store: Path) -> Any:
    opened = sk.open_store(store)
    parts = [opened.read_chunk(k) for k in range(opened.n_chunks)]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])[:, 0]


def test_later_files_are_read_as_those_that_the_store_was_made_of(tmp_path: Path) -> None:
    for k, form in enumerate(FORMS):
        ending = "log" if "format" in form else "csv"
        one, two, store = (
            tmp_path / f"a{k}.{ending}",
            tmp_path / f"b{k}.{ending}",
            tmp_path / f"{k}.zarr",
        )
        one.write_bytes(table(form))
        two.write_bytes(table(form, X + 1, Y + 1))
        sk.ingest_store(one, store, y="y", shuffle=False, dtype="float64", **form)
        sk.append_store(two, store, shuffle=False)
        found, targets = rows_of(store)
        np.testing.assert_array_equal(found, np.r_[X, X + 1])
        np.testing.assert_allclose(targets, np.r_[Y, Y + 1])
    model = sk.KernelRegressor(n_centers=20, metric="none", run_dir=tmp_path / "run").fit(store)
    wanted = model.predict(X)
    for predicted in (model.predict(one), sk.load(tmp_path / "run").predict(one)):
        np.testing.assert_allclose(predicted, wanted)
    assert sk.evaluate(tmp_path / "run", one)["r2"] > 0


def test_options_that_are_given_win_over_the_recorded_ones(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(table(FORMS[-1]))
    sk.ingest_store(tmp_path / "a.csv", tmp_path / "s.zarr", y="y", **FORMS[-1])
    (tmp_path / "b.csv").write_bytes(table({}))
    plain = {"decimal": ".", "delimiter": ";", "encoding": "utf-8", "skip_lines": 0}
    for header in ({}, {"header": True}):  # the names that are recorded are those of its header
        spec = sk.append_store(
            tmp_path / "b.csv", tmp_path / "s.zarr", seed=len(header), **plain, **header
        )
    assert spec.n_rows == 180
    assert spec.columns == ("a", "é", "c")
    form = {name: value for name, value in plain.items() if name != "skip_lines"}
    (tmp_path / "c.csv").write_bytes(table({"names": [], "delimiter": ";"}))
    with pytest.raises(DataError, match="skip_lines=0"):
        sk.append_store(tmp_path / "c.csv", tmp_path / "s.zarr", **form)


def svm(path: Path, X: Any, y: Any, first: int) -> Path:
    dump_svmlight_file(X, y, str(path), zero_based=first == 0)
    return path


def test_svmlight_files_go_on_counting_features_as_the_store_does(tmp_path: Path) -> None:
    dense = np.c_[X, X]
    narrow = np.c_[np.zeros(60), X[:, 1:], np.zeros((60, 3))]  # neither a first feature nor a last
    for first in (0, 1):
        store = tmp_path / f"{first}.zarr"
        sk.ingest_store(
            svm(tmp_path / "a.svm", dense, Y, first), store, shuffle=False, dtype="float64"
        )
        later = svm(tmp_path / "b.svm", narrow, Y, first)
        sk.append_store(later, store, shuffle=False)
        np.testing.assert_array_equal(rows_of(store)[0], np.r_[dense, narrow])
        run = tmp_path / f"run{first}"
        model = sk.KernelRegressor(n_centers=20, metric="none", run_dir=run).fit(store)
        np.testing.assert_allclose(sk.load(run).predict(later), model.predict(narrow))
        truth = np.mean((model.predict(narrow) - Y) ** 2)
        np.testing.assert_allclose(sk.evaluate(run, later)["mse"], truth, rtol=1e-4)
        wide = svm(tmp_path / "c.svm", np.c_[dense, X], Y, first)
        with pytest.raises(DataError, match="features; ingest all files together"):
            sk.append_store(wide, store)
        with pytest.raises(DataError, match="features; ingest all files together"):
            model.predict(wide)
    (tmp_path / "d.svm").write_text("1 0:1\n")
    with pytest.raises(DataError, match="count from 1"):
        sk.append_store(tmp_path / "d.svm", tmp_path / "1.zarr")
    packed = tmp_path / "e.txt.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.svm").read_bytes()))
    sk.append_store(packed, tmp_path / "1.zarr", format="svmlight")
