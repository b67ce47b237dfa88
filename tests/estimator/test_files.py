"""Check that all entry points accept several files, and files without column names."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.filesystem.abandoned import FIT_PREFIX

N = 40
R = np.random.default_rng(0)
X, W = R.normal(size=(N, 3)), R.random(N) + 0.5
Y = 2 * X[:, 0]


def test_predict_and_score_accept_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(X, columns=list("pqr"))
    frame.to_csv("x.csv", index=False)
    frame.assign(y=Y).to_csv("xy.csv", index=False)
    model = sk.KernelRegressor(n_centers=9, run_dir="run").fit(["xy.csv", "xy.csv"], "y")
    for fitted in (model, sk.load("run")):
        for files in (["x.csv", "xy.csv"], ("x.csv", Path("xy.csv"))):
            assert np.allclose(fitted.predict(files), np.tile(fitted.predict(frame), 2))
        assert fitted.score(["xy.csv", "xy.csv"]) == pytest.approx(fitted.score(frame, Y))
        assert sk.evaluate(fitted, ["xy.csv"] * 2)["r2"] == pytest.approx(fitted.score(frame, Y))
    classes = sk.KernelClassifier(n_centers=9).fit(frame, Y > 0)
    assert np.array_equal(classes.predict(["x.csv"]), classes.predict(frame))


@pytest.mark.slow
def test_target_position_of_headerless_file_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savetxt("x.csv", X, delimiter=",")
    cases = [  # columns of the file, positions of the target and of the weights
        ((X, Y), 3, None), ((X, Y), -1, None), ((Y, X), 0, None), ((Y, X, W), 0, 4),
    ]  # fmt: skip
    for k, (columns, y, w) in enumerate(cases):
        np.savetxt("t.csv", np.column_stack(columns), delimiter=",")
        store = f"{k}.zarr"
        sk.ingest_store("t.csv", store, y=y, sample_weight=w)
        assert sk.append_store("t.csv", store).n_rows == 2 * N
        model = sk.KernelRegressor(n_centers=9, run_dir=f"run{k}").fit("t.csv", y, sample_weight=w)
        for fitted in (model, sk.load(f"run{k}")):
            assert np.allclose(fitted.predict("t.csv"), fitted.predict("x.csv"))
            assert np.allclose(fitted.predict("t.csv"), fitted.predict(X))
            weights = None if w is None else W
            assert sk.evaluate(fitted, "t.csv")["r2"] == pytest.approx(fitted.score(X, Y, weights))


def test_temporary_stores_are_deleted_after_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rng = np.random.default_rng(0)
    path, stores = tmp_path / "rows.csv", f"{FIT_PREFIX}*"
    table = pd.DataFrame(rng.normal(size=(200, 2)), columns=["a", "b"])
    table.assign(y=rng.integers(0, 2, 200)).to_csv(path, index=False)
    counts: list[int] = []

    class StoreCounter(sk.Callback):
        def record(self, record: Mapping[str, Any]) -> None:
            counts.append(len(list(tmp_path.glob(stores))))

    gc.collect()
    gc.disable()  # so that the stores are not deleted by the garbage collector
    try:
        model = sk.KernelClassifier(callbacks=[StoreCounter()], n_centers=20, epochs=1).fit(
            path, "y", test=path
        )
        assert max(counts) == 2  # of the training rows and of the test rows
        assert not list(tmp_path.glob(stores))
        model.permutation_importances(path, "y", n_repeats=1)
        sk.KernelClassifier(n_centers=20, epochs=1).partial_fit(path, "y").partial_fit(path, "y")
        sk.tune(path, "y", kernels=["gaussian"], bandwidths=[1.0], ridges=[1e-3], epochs=1)
        table.to_csv(tmp_path / "no-y.csv", index=False)
        with pytest.raises(sk.StreamkernError, match="'y'"):
            model.fit(path, "y", test=tmp_path / "no-y.csv")
        assert not list(tmp_path.glob(stores))
    finally:
        gc.enable()
