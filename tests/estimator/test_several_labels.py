"""Check fits to several labels for each row, beside regressions and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.metrics import accuracy_score
from sklearn.multiclass import OneVsRestClassifier

import streamkern
from streamkern import ConfigError, DataError, KernelClassifier, KernelRegressor

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4))
Y = np.stack([X[:, 0] > 0, X[:, 1] + X[:, 2] > 0, X[:, 3] > 1], axis=1).astype(int)
SETTINGS: dict[str, Any] = {
    "threads": 1, "epochs": 3,
    "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> KernelClassifier:
    return KernelClassifier(**SETTINGS).fit(X, Y)


def test_each_label_equals_regression_of_its_column(model: KernelClassifier) -> None:
    values = KernelRegressor(**SETTINGS).fit(X, Y.astype(float)).predict(X)
    np.testing.assert_array_equal(model.predict_values(X), values)
    np.testing.assert_array_equal(model.decision_function(X), values - 0.5)
    np.testing.assert_array_equal(model.predict(X), (values > 0.5).astype(int))
    assert model.score(X, Y) == accuracy_score(Y, model.predict(X)) > 0.8


def test_multilabel_output_equals_one_vs_rest(model: KernelClassifier) -> None:
    one_vs_rest = OneVsRestClassifier(KernelClassifier(**SETTINGS)).fit(X, Y)
    assert one_vs_rest.multilabel_
    np.testing.assert_array_equal(model.classes_, one_vs_rest.classes_)
    for method in ("predict", "decision_function"):
        output, expected = getattr(model, method)(X), getattr(one_vs_rest, method)(X)
        assert output.shape == expected.shape
        assert output.dtype.kind == expected.dtype.kind
    assert (model.predict(X) == one_vs_rest.predict(X)).mean() > 0.95


@pytest.mark.parametrize("dtype", [bool, np.int64, np.uint8, np.float32, object])
def test_predictions_have_dtype_of_targets(dtype: Any, model: KernelClassifier) -> None:
    answer = KernelClassifier(**SETTINGS).fit(X, Y.astype(dtype)).predict(X)
    assert answer.dtype == (np.int64 if dtype is object else dtype)
    np.testing.assert_array_equal(answer, model.predict(X))


def test_multilabel_targets_of_any_dtype_are_scored(model: KernelClassifier) -> None:
    expected = (model.predict(X) == Y).all(axis=1).mean()
    frame = pd.DataFrame(Y)
    for targets in (
        Y.astype(object),
        frame.astype("boolean"),
        frame.astype("Int64"),
        sp.csr_array(Y),
    ):
        assert model.score(X, targets) == pytest.approx(expected)
    with pytest.raises(DataError, match=r"^y has shape .*; give columns of 0 or 1"):
        model.score(X, Y[:, 0])


def test_lazy_multilabel_targets_equal_arrays() -> None:
    rows, targets = da.from_array(X, chunks=(70, 4)), da.from_array(Y, chunks=(70, 2))
    # In float32, where the order in which moments are summed up changes no scaled feature.
    model = KernelClassifier(**SETTINGS, precision="exact").fit(X, Y)
    lazy = KernelClassifier(**SETTINGS, precision="exact").fit(rows, targets)
    np.testing.assert_array_equal(lazy.dual_coef_, model.dual_coef_)
    assert lazy.score(rows, targets) == model.score(X, Y)
    answer = lazy.predict(rows)
    assert (answer.shape, answer.dtype) == (Y.shape, Y.dtype)
    np.testing.assert_array_equal(answer.compute(), model.predict(X))
    with pytest.raises(DataError, match=r"^y has a column for each of 3 labels and holds 2; give"):
        KernelClassifier(**SETTINGS).fit(rows, targets * 2)


def test_partial_fit_learns_labels_from_two_blocks() -> None:
    online = KernelClassifier(threads=1).partial_fit(X[:200], Y[:200], classes=[0, 1, 2])
    assert online.partial_fit(X[200:], Y[200:]).score(X, Y) > 0.8


@pytest.mark.parametrize(
    ("y", "options", "error", "message"),
    [
        (Y[:, :2], {}, DataError, r"^y has shape \(300, 2\), but the model was trained on 3"),
        (Y[:, 0], {}, DataError, r"^y has shape \(300,\), but the model was trained on 3"),
        (Y, {"classes": [0, 1]}, ConfigError, "differ from the classes of the first"),
    ],
    ids=["two labels", "one column", "other classes"],
)
def test_partial_fit_refuses_other_labels(
    y: Any, options: Any, error: type[Exception], message: str
) -> None:
    online = KernelClassifier(threads=1).partial_fit(X, Y)
    with pytest.raises(error, match=message):
        online.partial_fit(X, y, **options)


def test_fit_replaces_several_labels_by_classes(model: KernelClassifier) -> None:
    refitted = clone(model).fit(X, Y).fit(X, Y[:, 0])
    assert refitted.predict(X).shape == (300,)
    with pytest.raises(DataError, match=r"^y has shape \(300, 3\), but the model was trained on"):
        refitted.fit(X, Y[:, 0], test=(X, Y))


def test_multilabel_model_is_saved_and_loaded(model: KernelClassifier, tmp_path: Path) -> None:
    model.save(tmp_path / "saved")
    KernelClassifier(run_dir=tmp_path / "run", **SETTINGS).fit(X, Y.astype(bool))
    for location, dtype in (("saved", int), ("run", bool)):
        loaded = streamkern.load(tmp_path / location)
        answer = loaded.predict(X)
        assert answer.dtype == dtype
        np.testing.assert_array_equal(answer, model.predict(X))
        assert loaded.score(X, Y) == model.score(X, Y)


def test_multilabel_output_has_column_names() -> None:
    named = pd.DataFrame(Y, columns=["red", "green", "blue"])
    model = KernelClassifier(**SETTINGS).fit(X, named).set_output(predict="pandas")
    assert list(model.predict(X).columns) == ["red", "green", "blue"]
    assert list(model.decision_function(X).columns) == ["red", "green", "blue"]


@pytest.mark.parametrize(
    ("options", "y", "error", "message"),
    [
        ({}, 2 * Y, DataError, r"^y has a column for each of 3 labels and holds 2; give"),
        ({}, Y[:299], DataError, r"^X has 300 rows, but y has 299"),
        (
            {"class_weight": "balanced"},
            Y,
            ConfigError,
            r"^class_weight needs rows of one class each",
        ),
        ({"centers": "balanced", "n_centers": 50}, Y, ConfigError, "balanced"),
    ],
    ids=["labels of 2", "too few rows", "class weights", "balanced centers"],
)
def test_fit_refuses_invalid_labels_and_options(
    options: Any, y: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        KernelClassifier(**SETTINGS, **options).fit(X, y)


def test_several_labels_are_not_predicted_to_a_file(
    model: KernelClassifier, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^out=.* cannot be used for several labels"):
        model.predict(X, out=tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a", "holds '.'; give 0 or 1"),
        (None, "holds None"),
        (0.5, "holds 0.5"),
        (np.nan, "NaN in"),
        (pd.NA, "no value in some row"),
        (pd.Timestamp("2020"), "give 0 or 1"),
    ],
)
def test_labels_other_than_0_and_1_are_named(value: Any, message: str) -> None:
    Y_missing = Y.astype(object)
    Y_missing[3, 1] = value
    for targets in (Y_missing, [tuple(row) for row in Y_missing.tolist()]):
        with pytest.raises(DataError, match=message):
            KernelClassifier(**SETTINGS).fit(X, targets)
