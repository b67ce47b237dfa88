"""Check that all entry points accept several files, and files without column names."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask.array
import dask.dataframe
import h5py
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest

import streamkern as sk
from streamkern.cli import main
from streamkern.filesystem.abandoned import FIT_PREFIX
from streamkern.stream.sources.mixture import open_stores

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


@pytest.mark.parametrize("choice", [{"drop": ["id"]}, {"x": ["p", "q", "r"]}])
@pytest.mark.parametrize("words", [False, True])
def test_columns_left_out_of_training_may_be_present_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: dict[str, list[str]], words: bool
) -> None:
    """Check that predict, evaluate, partial_fit and append accept the table of the training."""
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(X, columns=list("pqr"))
    if words:
        frame["r"] = np.where(X[:, 2] > 0, "up", "down")
    table = frame.assign(id=np.arange(N)[::-1] * 7, y=Y)
    table.to_csv("all.csv", index=False)
    table.to_parquet("all.parquet")
    sk.ingest_store("all.csv", "s.zarr", y="y", **choice)
    model = sk.KernelRegressor(n_centers=9, solver="block", run_dir="run").fit("s.zarr")
    expected = model.predict(frame)
    for known in (model, sk.load("run")):
        for rows in ("all.csv", "all.parquet", table, polars.from_pandas(table)):
            assert np.allclose(known.predict(rows), expected)
            assert sk.evaluate(known, rows)["r2"] == pytest.approx(known.score(frame, Y))
            assert sk.evaluate(known, rows, "id")["r2"] < 1e-3  # another target of the same table
    assert sk.load("run").partial_fit("all.csv").partial_fit(table).n_features_in_ == 3
    assert sk.append_store("all.csv", "s.zarr").n_rows == 2 * N
    assert sk.append_store(table, "s.zarr", dtype="float32").n_rows == 3 * N
    with pytest.raises(sk.DataError, match=r"unseen at fit time: other|has 'other' besides"):
        model.predict(table.assign(other=1.0))


def test_dask_frames_hold_their_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that columns of a Dask data frame are found by name, as in pandas."""
    frame = pd.DataFrame(X, columns=list("pqr")).assign(u=Y, v=Y**2, w=W)
    lazy = dask.dataframe.from_pandas(frame, npartitions=3)
    for y in ("u", ["u", "v"]):
        model = sk.KernelRegressor(n_centers=9).fit(frame.drop(columns="w"), y)
        other = sk.KernelRegressor(n_centers=9).fit(lazy.drop(columns="w"), y)
        rows = frame.drop(columns="w")
        assert np.allclose(other.predict(rows), model.predict(rows))
        assert other.score(lazy.drop(columns="w")) == pytest.approx(model.score(rows))
        assert sk.evaluate(model, lazy.drop(columns="w")) == pytest.approx(sk.evaluate(model, rows))
    weighted = sk.KernelRegressor(n_centers=9).fit(frame, "u", sample_weight="w")
    assert weighted.score(lazy) == pytest.approx(weighted.score(frame))
    with pytest.raises(sk.DataError, match="need targets y, but these have none"):
        weighted.score(lazy[["p", "q", "r", "v"]])
    with pytest.raises(sk.DataError, match="has no column 'z'"):
        weighted.fit(lazy, "z")


def test_dask_frames_of_an_encoded_table_are_refused_with_remedies() -> None:
    frame = pd.DataFrame(X, columns=list("pqr")).assign(r=np.where(X[:, 2] > 0, "up", "down"))
    model = sk.KernelRegressor(n_centers=9).fit(frame, Y)
    lazy = dask.dataframe.from_pandas(frame, npartitions=3)
    with pytest.raises(sk.DataError, match="Dask data frames must be numeric"):
        model.predict(lazy)
    with pytest.raises(sk.DataError, match="Dask data frames must be numeric"):
        model.score(lazy, Y)
    for remedy in (lazy.compute(), frame):
        assert np.array_equal(model.predict(remedy), model.predict(frame))
    parts = [model.predict(part.compute()) for part in lazy.partitions]
    assert np.allclose(np.concatenate(parts), model.predict(frame))


@pytest.mark.parametrize("choice", [{"x": [2, 0]}, {"drop": ["1"]}])
def test_positions_of_chosen_features_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savetxt("t.csv", np.column_stack([X, Y]), delimiter=",")
    columns = choice.get("x", [0, 2])
    sk.ingest_store("t.csv", "s.zarr", y=3, **choice)
    model = sk.KernelRegressor(n_centers=9, run_dir="run").fit("s.zarr")
    for known in (model, sk.load("run")):
        assert np.allclose(known.predict("t.csv"), known.predict(X[:, columns]))
        assert sk.evaluate(known, "t.csv")["r2"] == pytest.approx(known.score(X[:, columns], Y))
    assert sk.append_store("t.csv", "s.zarr").n_rows == 2 * N


def test_store_of_a_dask_frame_knows_its_targets_and_weights(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=list("pqr")).assign(y=Y, w=W)
    specs = [
        sk.ingest_store(rows, tmp_path / name, x=["p", "q"], y="y", sample_weight="w")
        for name, rows in (("p.zarr", frame), ("d.zarr", dask.dataframe.from_pandas(frame)))
    ]
    assert specs[0].target_columns == specs[1].target_columns == ("y",)
    assert specs[0].weight_column == specs[1].weight_column == "w"
    model = sk.KernelRegressor(n_centers=9).fit(tmp_path / "d.zarr")
    assert sk.evaluate(model, frame)["r2"] == pytest.approx(model.score(X[:, :2], Y, W))


def test_chosen_features_may_have_been_left_out_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `x` is not changed silently by the record of the columns left out."""
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(X, columns=list("pqr")).assign(id=W, y=Y)
    frame.to_csv("named.csv", index=False)
    frame[["id", *"pqr", "y"]].to_csv("unnamed.csv", index=False, header=False)
    # The name "3" is also the position of a feature in the file without names.
    frame.rename(columns={"id": "3"}).to_csv("digits.csv", index=False)
    for name in ("named", "digits"):
        sk.ingest_store(f"{name}.csv", f"{name}.zarr", y="y", x=["p", "q", "r"])
        sk.KernelRegressor(n_centers=9, run_dir=name).fit(f"{name}.zarr")
    with pytest.raises(sk.DataError, match="has 'id' besides"):
        sk.append_store("named.csv", "named.zarr", x=["p", "q", "r", "id"])
    assert main.run_command(["evaluate", "named", "named.csv", "--y", "y", "--x", "p,q,r,id"]) != 0
    arguments = ["unnamed.csv", "--no-header", "--x", "1,2,3", "--y", "4"]
    assert main.run_command(["evaluate", "digits", *arguments]) == 0


def test_positions_are_remembered_for_several_headerless_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("np-1.csv", "np-2.csv"):
        np.savetxt(name, np.column_stack([X, Y, W]), delimiter=",")
    for k, choice in enumerate(({}, {"x": [0, 1]})):
        columns = choice.get("x", [0, 1, 2, 4])
        sk.ingest_store("np-*.csv", f"{k}.zarr", y=3, **choice)
        model = sk.KernelRegressor(n_centers=9).fit(f"{k}.zarr")
        expected = model.predict(np.column_stack([X, Y, W])[:, columns])
        assert np.allclose(model.predict("np-*.csv"), np.tile(expected, 2))
        assert sk.append_store("np-*.csv", f"{k}.zarr").n_rows == 4 * N


def test_names_of_several_targets_may_have_any_order() -> None:
    frame = pd.DataFrame(X, columns=list("pqr")).assign(u=Y, v=X[:, 1] ** 2)
    model = sk.KernelRegressor(n_centers=9).fit(frame, ["v", "u"])
    expected = sk.evaluate(model, frame[list("pqr")], frame[["v", "u"]].to_numpy())
    lazy = dask.dataframe.from_pandas(frame, npartitions=3)
    for rows in (frame, polars.from_pandas(frame), lazy):
        for names in (["v", "u"], ["u", "v"], ("u", "v")):
            assert sk.evaluate(model, rows, names) == pytest.approx(expected)
            assert model.score(rows, names) == pytest.approx(expected["r2"])
    with pytest.raises(sk.DataError, match="'w'"):
        sk.evaluate(model, frame, ["u", "w"])


def test_target_frames_are_matched_by_name() -> None:
    """Check frames of targets in another order, at score, evaluate, fit and partial_fit."""
    Z = pd.DataFrame({"u": Y, "v": X[:, 1] ** 2})
    turned = Z[["v", "u"]]
    model = sk.KernelRegressor(n_centers=9).fit(X, Z)
    expected = sk.evaluate(model, X, Z.to_numpy())
    frames = [make(turned) for make in (polars.from_pandas, pa.Table.from_pandas)]
    lazy_X = dask.array.from_array(X, chunks=(50, 3))
    lazy = dask.dataframe.from_pandas(turned, npartitions=3)
    for rows, targets in ((X, turned), *((X, frame) for frame in frames), (lazy_X, lazy)):
        assert model.score(rows, targets) == pytest.approx(expected["r2"])
        assert sk.evaluate(model, rows, targets) == pytest.approx(expected)
    other_names = Z.rename(columns={"u": "p", "v": "q"})
    assert model.score(X, other_names) == pytest.approx(expected["r2"])  # by position
    for mixed in (turned.rename(columns={"u": "p"}), Z.assign(w=Y)):
        with pytest.raises(sk.DataError, match=r"called .* but were called 'u', 'v' in the train"):
            model.score(X, mixed)
    blocks = [sk.KernelRegressor(n_centers=9).partial_fit(X, Z) for _ in range(2)]
    for block, targets in zip(blocks, (Z, turned), strict=True):
        block.partial_fit(X, targets)
    np.testing.assert_array_equal(blocks[0].predict(X), blocks[1].predict(X))
    labels = (Z > 0.5).astype(int)
    classifier = sk.KernelClassifier(n_centers=9).fit(X, labels)
    assert classifier.score(X, labels[["v", "u"]]) == classifier.score(X, labels)


def test_unused_columns_of_all_sources_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check several files, a store like another, a store of a store, and several stores."""
    monkeypatch.chdir(tmp_path)
    plain = pd.DataFrame(X, columns=list("pqr")).assign(y=Y)
    for name, frame in (("0", plain), ("1", plain.assign(u=W)), ("2", plain.assign(v=W, z=Y))):
        frame.to_csv(f"{name}.csv", index=False)
    x = ["p", "q", "r"]
    sk.ingest_store(["0.csv", "1.csv", "2.csv"], "many.zarr", x=x, y="y")
    sk.ingest_store("1.csv", "u.zarr", x=x, y="y")
    sk.ingest_store("0.csv", "like.zarr", like="u.zarr")
    sk.ingest_store("u.zarr", "copy.zarr")
    sk.ingest_store("2.csv", "v.zarr", x=x, y="y")
    names = {
        "many.zarr": ["u", "v", "z"], "like.zarr": ["u"], "copy.zarr": ["u"],
        ("u.zarr", "v.zarr"): ["u", "v", "z"],
    }  # fmt: skip
    for stores, unused in names.items():
        source = open_stores([stores] if isinstance(stores, str) else list(stores))
        assert (source.file_form or {})["unused"] == unused
    assert "unused" not in (sk.ingest_store("0.csv", "plain.zarr", y="y").file_form or {})
    other_target = plain.assign(u=W).drop(columns="y")
    spec = sk.ingest_store(other_target, "other.zarr", y="u", like="u.zarr")
    assert "unused" not in (spec.file_form or {})


@pytest.mark.parametrize("weights", [None, "w"])
def test_columns_of_an_hdf5_table_have_the_roles_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"p": X[:, 0], "q": X[:, 1], "r": X[:, 2], "y": X[:, 1], "fare": Y, "w": W}
    table = np.zeros(N, [(name, float) for name in columns])
    for name, values in columns.items():
        table[name] = values
    for file_name, data in (("t.h5", table), ("no_w.h5", table[[*"pqr", "y", "fare"]])):
        with h5py.File(file_name, "w") as file:
            file["table"] = data
    sk.ingest_store("t.h5", "s.zarr", x=["p", "q", "r"], y="fare", sample_weight=weights)
    model = sk.KernelRegressor(n_centers=9, run_dir="run").fit("s.zarr")
    w = None if weights is None else W
    for known in (model, sk.load("run")):
        assert np.allclose(known.predict("t.h5"), known.predict(X))
        assert known.score("t.h5") == pytest.approx(known.score(X, Y, w), rel=1e-6)
        assert known.score("t.h5", "y") == pytest.approx(known.score(X, X[:, 1], w), rel=1e-6)
        assert known.score("no_w.h5") == pytest.approx(known.score(X, Y), rel=1e-6)
    sk.ingest_store("t.h5", "like.zarr", like="s.zarr")
    assert ("w" in sk.open_store("like.zarr").rows) == (weights is not None)
    assert sk.append_store("t.h5", "s.zarr").n_rows == 2 * N


def test_store_of_a_dask_frame_has_several_targets(tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=list("pqr")).assign(u=Y, v=W)
    lazy, path = dask.dataframe.from_pandas(frame, npartitions=3), tmp_path / "s.zarr"
    spec = sk.ingest_store(lazy, path, y=["v", "u"], shuffle=False)
    assert (spec.columns, spec.target_columns) == (("p", "q", "r"), ("v", "u"))
    assert sk.append_store(lazy, path, y=["v", "u"], shuffle=False).n_rows == 2 * N
    y = np.column_stack([W, Y])
    assert np.array_equal(sk.open_store(path).rows["y"][:], np.concatenate([y, y]))
