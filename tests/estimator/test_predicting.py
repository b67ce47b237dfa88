"""Check the output formats of `predict`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import streamkern
from streamkern import ConfigError, KernelClassifier, KernelRegressor

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
INDEX = pd.Index([f"row {k}" for k in range(200)], name="id")
FRAME = pd.DataFrame(rng.normal(size=(200, 3)), columns=["a", "b", "c"], index=INDEX)
VALUES = pd.DataFrame({"u": FRAME["a"] ** 2, "v": FRAME["b"]}, index=INDEX)
LABELS = pd.Series(np.where(FRAME["a"] > 0, "up", "down"), index=INDEX, name="way")
SMALL: dict[str, Any] = {
    "threads": 1, "epochs": 2,
    "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
}  # fmt: skip


def test_predict_keeps_data_frame_index() -> None:
    model = KernelRegressor(**SMALL).fit(FRAME, VALUES)
    plain = model.predict(FRAME)
    assert isinstance(plain, np.ndarray)
    assert plain.dtype == np.float64
    framed = model.set_output(predict="pandas").predict(FRAME)
    pd.testing.assert_frame_equal(framed, pd.DataFrame(plain, INDEX, ["u", "v"]))
    assert model.score(FRAME, VALUES) == clone(model).fit(FRAME, VALUES).score(FRAME, VALUES)
    rows = model.predict(FRAME.iloc[5:9])
    assert list(rows.index) == ["row 5", "row 6", "row 7", "row 8"]
    series = model.fit(FRAME, VALUES["v"]).predict(FRAME)
    pd.testing.assert_series_equal(series, pd.Series(series.to_numpy(), INDEX, name="v"))
    array = model.set_output(predict="default").predict(FRAME)
    np.testing.assert_array_equal(array, series.to_numpy())


def test_intervals_std_and_sets_keep_index() -> None:
    options: dict[str, Any] = {"solver": "direct", "posterior": True, "calibrate": True}
    model = KernelRegressor(**SMALL | options).fit(FRAME, VALUES)
    y, ends = model.predict(FRAME, interval=0.5)
    _, std = model.predict(FRAME, return_std=True)
    model.set_output(predict="pandas")
    columns = pd.MultiIndex.from_tuples([(k, side) for k in "uv" for side in ("lower", "upper")])
    framed = model.predict(FRAME, interval=0.5)
    pd.testing.assert_frame_equal(framed[0], pd.DataFrame(y, INDEX, ["u", "v"]))
    pd.testing.assert_frame_equal(framed[1], pd.DataFrame(ends.reshape(200, 4), INDEX, columns))
    framed = model.predict(FRAME, return_std=True)
    pd.testing.assert_frame_equal(framed[1], pd.DataFrame(std, INDEX, ["u", "v"]))
    values, ends = model.fit(FRAME, VALUES["v"]).predict(FRAME, interval=0.5, normalised=True)
    assert list(ends.columns) == ["lower", "upper"]
    assert (ends["lower"] < values).all()
    several = KernelClassifier(**SMALL, calibrate=True).fit(FRAME, LABELS)
    labels, sets = several.set_output(predict="pandas").predict(FRAME, interval=0.9)
    assert (list(sets.columns), list(sets.index)) == (["down", "up"], list(INDEX))
    assert (labels.name, list(labels.index)) == ("way", list(INDEX))


def test_float32_and_float64_rows_have_equal_predictions() -> None:
    """Check rows that float32 represents exactly; others are rounded, and large weights magnify the
    difference."""
    X = FRAME.to_numpy().astype(np.float32)
    model = KernelRegressor(threads=1, epochs=2, ridge=1e-8).fit(X, VALUES["u"])
    np.testing.assert_array_equal(model.predict(X), model.predict(X.astype(np.float64)))
    rounded = model.predict(FRAME.to_numpy()) - model.predict(X)
    weights = np.abs(model.dual_coef_).sum()
    assert np.abs(rounded).max() < 10 * np.finfo(np.float32).eps * weights


def test_rows_without_index_are_numbered() -> None:
    X, y = FRAME.to_numpy(), VALUES["u"].to_numpy()
    model = KernelRegressor(**SMALL).fit(X, y).set_output(predict="pandas")
    answer = model.predict(X[:7])
    pd.testing.assert_series_equal(answer, pd.Series(answer.to_numpy()))


def test_labels_and_scores_keep_index() -> None:
    model = KernelClassifier(**SMALL).fit(FRAME, LABELS)
    scores, values = model.decision_function(FRAME), model.predict_values(FRAME)
    copied = clone(model).fit(FRAME, LABELS)
    assert isinstance(copied.predict(FRAME), np.ndarray)
    copied = clone(model.set_output(predict="pandas")).fit(FRAME, LABELS)
    labels = copied.predict(FRAME)
    assert (labels.name, list(labels.index)) == ("way", list(INDEX))
    pd.testing.assert_series_equal(
        copied.decision_function(FRAME), pd.Series(scores, INDEX, name="up")
    )
    pd.testing.assert_frame_equal(
        copied.predict_values(FRAME), pd.DataFrame(values, INDEX, ["down", "up"])
    )
    assert copied.score(FRAME, LABELS) > 0.9


def test_dask_data_frame_keeps_index() -> None:
    table = dd.from_pandas(FRAME, npartitions=3, sort=False)
    # In float64, the number of rows in a block changes only the last bits.
    model = KernelClassifier(precision="float64", **SMALL).fit(FRAME, LABELS)
    model.set_output(predict="pandas")
    for method in ("predict", "decision_function", "predict_values"):
        lazy, expected = getattr(model, method)(table), getattr(model, method)(FRAME)
        assert isinstance(lazy, dd.Series | dd.DataFrame)
        equal_frames = (
            pd.testing.assert_series_equal if expected.ndim == 1 else pd.testing.assert_frame_equal
        )
        equal_frames(lazy.compute(), expected, check_dtype=False, check_index_type=False)
    reordered = model.predict(table[["c", "b", "a"]]).compute()
    np.testing.assert_array_equal(reordered, model.predict(FRAME))


def test_target_names_are_saved(tmp_path: Path) -> None:
    KernelRegressor(**SMALL).fit(FRAME, VALUES).save(tmp_path / "model")
    loaded = streamkern.load(tmp_path / "model").set_output(predict="pandas")
    assert list(loaded.predict(FRAME).columns) == ["u", "v"]


def test_set_output_of_pipeline_keeps_predictor_output() -> None:
    """Check that `set_output` of a pipeline applies to its transformers only, as with other
    predictors."""
    unfitted = KernelRegressor(**SMALL).set_output(predict="pandas")
    pipeline = make_pipeline(StandardScaler(), unfitted).set_output(transform="pandas")
    answer = pipeline.fit(FRAME, VALUES["u"]).predict(FRAME)
    assert list(answer.index) == list(INDEX)


def test_unsupported_output_formats_are_refused() -> None:
    model = KernelRegressor()
    with pytest.raises(ConfigError, match=r"^transform='pandas' is for transformers, .* predict="):
        model.set_output(transform="pandas")
    with pytest.raises(ConfigError, match=r"^predict='polars' must be one of 'default', 'pandas'"):
        model.set_output(predict="polars")
    assert model.set_output(transform="default") is model


@pytest.mark.parametrize("kind", ["plain", "float64", "classes"])
def test_few_rows_use_one_thread_with_same_bits(kind: str) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(700, 3))
    y = np.sin(X[:, 0]) + X[:, 1]
    options: dict[str, Any] = {"threads": 2, "n_centers": 600, "random_state": 0, "epochs": 2}
    if kind == "classes":
        model: Any = KernelClassifier(calibrate=True, **options).fit(X, y > 0)
        method = "predict_proba"
    else:
        precision = "exact" if kind == "plain" else kind
        model = KernelRegressor(precision=precision, solver="block", **options).fit(X, y)
        method = "predict"
    values = []
    for n_rows, n_threads in ((None, 2), (700, 2), (3, 1), (3, 1)):
        with model._model(n_rows) as kernel_model:
            assert kernel_model.backend.threads == n_threads
            values.append(kernel_model.values(X[5:8]))
    assert all(np.array_equal(F, values[0]) for F in values)
    result = getattr(model, method)(X[5:8])
    np.testing.assert_allclose(result, getattr(model, method)(X)[5:8], rtol=1e-4)
    size = len(pickle.dumps(clone(model).fit(X[:700], y > 0 if kind == "classes" else y)))
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(getattr(copy, method)(X[5:8]), result)
    assert len(pickle.dumps(copy)) == pytest.approx(size, rel=0.1)


def test_single_row_predictions_follow_refit() -> None:
    X = np.random.default_rng(0).normal(size=(80, 2))
    model = KernelRegressor(random_state=0, n_centers=40, ridge=1e-3)
    first_prediction = model.fit(X, X[:, 0]).predict(X[:1])
    assert model.fit(X, -X[:, 0]).predict(X[:1]) == pytest.approx(-first_prediction, rel=1e-3)
    small = streamkern.compress(model, X, n_centers=20)
    assert small.predict(X[:1]) != model.predict(X[:1])
    with pytest.raises(ConfigError, match="device='here' is not known"):
        model.set_params(device="here").predict(X[:1])
