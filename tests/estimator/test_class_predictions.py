"""Check probabilities, sets and intervals of fitted, saved, loaded and streamed models."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.metrics import get_scorer, log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score

from streamkern import KernelClassifier, KernelRegressor, load
from streamkern.basics.errors import ConfigError
from streamkern.basics.optional import on_demand
from streamkern.cli import main
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource

rng = np.random.default_rng(0)
X = rng.normal(size=(1500, 2))
p = 1 / (1 + np.exp(-4 * X[:, 0] * X[:, 1]))
y = np.where(rng.random(1500) < p, "yes", "no")
t = np.sin(X[:, 0]) + 0.2 * rng.normal(size=1500)
SETTINGS: dict[str, Any] = {
    "threads": 1, "accelerator": "none", "n_centers": 80, "kernel": "laplace", "bandwidth": 2.0,
    "calibrate": True, "ridge": 1e-3, "metric": "none",
}  # fmt: skip
DEFAULT_CALIBRATION: dict[str, Any] = {
    "threads": 1, "accelerator": "none", "kernel": "laplace", "metric": "none",
}  # fmt: skip
FIT, NEW = slice(1000), slice(1000, 1500)
LOG_2 = 0.69  # log loss of equal probabilities


@pytest.fixture(scope="module")
def classifier() -> KernelClassifier:
    """Return a classifier with calibrated probabilities."""
    return KernelClassifier(**SETTINGS).fit(X[FIT], y[FIT], test=(X[NEW], y[NEW]))


@pytest.fixture(scope="module")
def regressor() -> KernelRegressor:
    """Return a regressor with calibrated intervals."""
    return KernelRegressor(**SETTINGS).fit(X[FIT], t[FIT], test=(X[NEW], t[NEW]))


def test_small_tables_have_probabilities_by_default(tmp_path: Path) -> None:
    """Check that leave-one-out probabilities are near the truth, and that scorers of scikit-learn
    accept them."""
    quick = DEFAULT_CALIBRATION
    model = KernelClassifier(**quick, run_dir=tmp_path / "run").fit(X[:400], y[:400])
    assert model.report_["calibration"]["rows"] == 400
    probabilities = model.predict_proba(X[NEW])
    assert np.abs(probabilities[:, 1] - p[NEW]).mean() < 0.1
    sets = model.predict(X[NEW], interval=0.9)[1]
    assert 0.85 < np.mean(sets[np.arange(500), (y[NEW] == "yes").astype(int)]) < 0.97
    np.testing.assert_array_equal(load(tmp_path / "run").predict_proba(X[NEW]), probabilities)
    resumed = KernelClassifier(**quick, run_dir=tmp_path / "run").fit(X[:400], y[:400])
    np.testing.assert_array_equal(resumed.predict_proba(X[NEW]), probabilities)
    scores = cross_val_score(KernelClassifier(**quick), X[:300], y[:300], scoring="neg_log_loss")
    assert scores.min() > -LOG_2


def test_small_tables_calibrate_on_weighted_rows() -> None:
    """Check equal weights, and weights that leave out every fourth row, whose label is wrong."""
    quick = DEFAULT_CALIBRATION
    probabilities = KernelClassifier(**quick).fit(X[:400], y[:400]).predict_proba(X[NEW])
    equal_weights = KernelClassifier(**quick).fit(X[:400], y[:400], np.full(400, 3.0))
    np.testing.assert_allclose(equal_weights.predict_proba(X[NEW]), probabilities, rtol=1e-6)
    swapped = np.where(y[:400] == "yes", "no", "yes")
    labels, w = np.where(np.arange(400) % 4, y[:400], swapped), np.arange(400) % 4
    for class_weight in (None, "balanced"):
        weighted = KernelClassifier(**quick, class_weight=class_weight).fit(X[:400], labels, w)
        assert weighted.report_["calibration"]["rows"] == 300
        assert np.abs(weighted.predict_proba(X[NEW])[:, 1] - p[NEW]).mean() < 0.1


def test_error_without_probabilities_proposes_calibration() -> None:
    quick = DEFAULT_CALIBRATION
    for model_without in (
        KernelClassifier(**quick, calibrate=False).fit(X[:100], y[:100]),
        KernelClassifier(**quick, solver="sgd").fit(X[:150], y[:150]),
        KernelClassifier(**quick).partial_fit(X[:100], y[:100]),
    ):
        with pytest.raises(AttributeError, match=r"predict_proba needs .* calibrate=True"):
            model_without.predict_proba(X)


def test_search_over_n_centers_scores_probabilities() -> None:
    """Check the default of small tables, in which few rows are centers and all rows are for
    training."""
    quick = DEFAULT_CALIBRATION | {"bandwidth": 2.0, "ridge": 1e-3}
    search = GridSearchCV(
        KernelClassifier(**quick), {"n_centers": [10, 40, 200], "solver": ["direct", "falkon"]},
        scoring="neg_log_loss", cv=3,
    ).fit(X[:300], y[:300])  # fmt: skip
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_score_ > -LOG_2
    for settings, rows in (
        ({"n_centers": 60}, 1000), ({"n_centers": 60, "solver": "block"}, 1000),
        ({"features": "fourier", "n_features": 60}, 1000),
    ):  # fmt: skip
        model = KernelClassifier(**quick, epochs=3, **settings).fit(X[FIT], y[FIT])
        assert model.report_["calibration"]["rows"] == rows
        assert np.abs(model.predict_proba(X[NEW])[:, 1] - p[NEW]).mean() < 0.1, settings


def test_predict_proba_agrees_with_predict(classifier: KernelClassifier, tmp_path: Path) -> None:
    probabilities = classifier.predict_proba(X[NEW])
    assert probabilities.dtype == np.float64
    np.testing.assert_array_equal(
        classifier.classes_[probabilities.argmax(axis=1)], classifier.predict(X[NEW])
    )
    np.testing.assert_allclose(np.log(probabilities), classifier.predict_log_proba(X[NEW]))
    assert classifier.report_["test_log_loss"] == pytest.approx(
        log_loss(y[NEW], probabilities), rel=1e-6
    )
    assert np.abs(probabilities[:, 1] - p[NEW]).mean() < 0.1
    classifier.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    np.testing.assert_array_equal(loaded.predict_proba(X[NEW]), probabilities)
    loaded.save(tmp_path / "n")
    np.testing.assert_array_equal(load(tmp_path / "n").predict_proba(X[NEW]), probabilities)
    array = on_demand("dask.array").from_array(X[NEW], chunks=(200, 2))
    np.testing.assert_allclose(classifier.predict_proba(array).compute(), probabilities)
    scores = cross_val_score(clone(classifier), X, y, cv=2, scoring="neg_log_loss")
    assert scores.min() > -LOG_2


def test_prediction_sets_and_intervals_have_coverage(
    classifier: KernelClassifier, regressor: KernelRegressor
) -> None:
    labels, sets = classifier.predict(X[NEW], interval=0.95)
    np.testing.assert_array_equal(labels, classifier.predict(X[NEW]))
    assert sets[np.arange(500), (y[NEW] == "yes").astype(int)].mean() > 0.9
    values, ends = regressor.predict(X[NEW], interval=0.8)
    np.testing.assert_array_equal(values, regressor.predict(X[NEW]))
    is_inside = (ends[:, 0] <= t[NEW]) & (t[NEW] <= ends[:, 1])
    assert 0.7 < is_inside.mean() < 0.9
    assert 0.8 < regressor.report_["test_coverage"] < 0.97
    assert regressor.report_["calibration"] == {"rows": 100}
    two = KernelRegressor(**SETTINGS).fit(X, np.stack((t, 9 * t), axis=1))
    assert two.predict(X[:7], interval=0.9)[1].shape == (7, 2, 2)
    assert two.predict(X[:7], interval=0.9, normalised=True)[1].shape == (7, 2, 2)


def test_normalised_intervals_follow_residual_scale(tmp_path: Path) -> None:
    """Check normalised intervals in memory, from a saved model, in files, and by the command."""
    hard = np.sin(X[:, 0]) + 0.3 * np.exp(1.5 * X[:, 1]) * rng.normal(size=1500)
    model = KernelRegressor(**SETTINGS).fit(X[FIT], hard[FIT], test=(X[NEW], hard[NEW]))
    values, ends = model.predict(X[NEW], interval=0.8, normalised=True)
    np.testing.assert_array_equal(values, model.predict(X[NEW]))
    width = ends[:, 1] - ends[:, 0]
    np.testing.assert_allclose(ends.mean(axis=1), values, atol=1e-9)
    assert np.corrcoef(np.log(width), X[NEW, 1])[0, 1] > 0.5
    assert 0.65 < ((ends[:, 0] <= hard[NEW]) & (hard[NEW] <= ends[:, 1])).mean() < 0.95
    report = model.report_
    assert 0.8 < report["test_normalised_coverage"] < 0.98
    assert report["test_normalised_width"] > 0
    model.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    np.testing.assert_array_equal(loaded.predict(X[NEW], interval=0.8, normalised=True)[1], ends)
    ingest(X[NEW], tmp_path / "x.zarr", y=hard[NEW])
    full = np.column_stack((values, ends))
    loaded.predict(str(tmp_path / "x.zarr"), interval=0.8, normalised=True, out=tmp_path / "a.npy")
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), full, atol=1e-4)
    arguments = ["predict", str(tmp_path / "m"), str(tmp_path / "x.zarr"), str(tmp_path / "b.csv")]
    assert main.run_command([*arguments, "--interval", "0.8", "--normalised"]) == 0
    with open(tmp_path / "b.csv", encoding="utf-8") as file:
        rows = [[float(cell) for cell in list(row.values())[1:]] for row in csv.DictReader(file)]
    np.testing.assert_allclose(rows, full, atol=1e-4)
    with pytest.raises(ConfigError, match=r"interval=0\.99 needs more than 50 calibration rows"):
        model.predict(X, interval=0.99, normalised=True)
    with pytest.raises(ConfigError, match="normalised=True needs an interval; give interval"):
        model.predict(X, normalised=True)
    lazy = on_demand("dask.array").from_array(X)
    with pytest.raises(ConfigError, match="not available for Dask arrays"):
        model.predict(lazy, interval=0.9, normalised=True)
    fitted, calibration = model._state, model._state.calibration
    assert calibration is not None
    # As saved by a version without normalised intervals.
    model._fitted_ = replace(fitted, calibration=replace(calibration, normalised=None))
    for location in ({}, {"out": tmp_path / "c.csv"}):
        with pytest.raises(ConfigError, match="normalised=True needs a residual scale"):
            model.predict(X, interval=0.8, normalised=True, **location)
    assert model.predict(X[:3], interval=0.8)[1].shape == (3, 2)


def test_unavailable_intervals_are_refused(
    classifier: KernelClassifier, regressor: KernelRegressor
) -> None:
    with pytest.raises(ConfigError, match=r"interval=0\.999 needs more than 100 calibration rows"):
        regressor.predict(X, interval=0.999)
    with pytest.raises(ConfigError, match="interval=2 must be a number between"):
        classifier.predict(X, interval=2)
    with pytest.raises(ConfigError, match="not available with out"):
        classifier.predict(X, interval=0.9, out="sets.csv")
    with pytest.raises(ConfigError, match="not available for Dask arrays"):
        regressor.predict(on_demand("dask.array").from_array(X), interval=0.9)
    plain = KernelRegressor(**SETTINGS | {"calibrate": False}).fit(X[FIT], t[FIT])
    with pytest.raises(ConfigError, match="has none, as calibrate=False asks for; train with"):
        plain.predict(X, interval=0.9)
    labels = np.stack((y == "yes", t > 0), axis=1).astype(int)
    with pytest.raises(ConfigError, match="calibrate=True needs rows of one class each"):
        KernelClassifier(**SETTINGS | {"calibrate": True}).fit(X, labels)
    several = KernelClassifier(**SETTINGS | {"calibrate": "auto"}).fit(X, labels)
    assert not hasattr(several, "predict_proba")
    with pytest.raises(ConfigError, match="several labels"):
        several.predict(X, interval=0.9)


@pytest.fixture(scope="module")
def model_folder(
    classifier: KernelClassifier,
    regressor: KernelRegressor,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return a folder with the models c and r, and stores of new rows, c.zarr and r.zarr."""
    folder = tmp_path_factory.mktemp("saved")
    classifier.save(folder / "c")
    regressor.save(folder / "r")
    ingest(X[NEW], folder / "c.zarr", y=y[NEW])
    ingest(X[NEW], folder / "r.zarr", y=t[NEW])
    return folder


def read_probabilities(path: Path) -> np.ndarray:
    """Return the probabilities (n, 2) of a CSV file."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["row", "most_probable", "probability_no", "probability_yes"]
    return np.array([[float(row[f"probability_{k}"]) for k in ("no", "yes")] for row in rows])


def test_predict_command_writes_probabilities(
    classifier: KernelClassifier, model_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(model_folder / "c"), str(model_folder / "c.zarr"), str(out), "--proba"]
    assert main.run_command(words) == 0
    np.testing.assert_allclose(read_probabilities(out), classifier.predict_proba(X[NEW]), atol=1e-5)


def test_predict_proba_writes_probabilities(classifier: KernelClassifier, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    expected = classifier.predict_proba(X[NEW])
    assert classifier.predict_proba(X[NEW], out=out) is None
    np.testing.assert_allclose(read_probabilities(out), expected, atol=1e-5)
    with pytest.raises(ConfigError, match="already exists"):
        classifier.predict_proba(X[NEW], out=out)
    classifier.predict_proba(X[NEW][:9], out=out, overwrite=True)
    np.testing.assert_allclose(read_probabilities(out), expected[:9], atol=1e-5)


def test_predict_command_writes_intervals(
    regressor: KernelRegressor, model_folder: Path, tmp_path: Path
) -> None:
    out = str(tmp_path / "r.npy")
    words = [
        "predict",
        str(model_folder / "r"),
        str(model_folder / "r.zarr"),
        out,
        "--interval",
        "0.8",
    ]
    assert main.run_command(words) == 0
    values, ends = regressor.predict(X[NEW], interval=0.8)
    np.testing.assert_allclose(np.load(out), np.column_stack((values, ends)), atol=1e-5)


def test_evaluate_command_prints_metrics_of_calibration(
    model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        main.run_command(
            ["evaluate", str(model_folder / "c"), str(model_folder / "c.zarr"), "--json"]
        )
        == 0
    )
    metrics = capfd.readouterr().out
    for name in ("log_loss", "brier", "ece", "coverage", "set_size"):
        assert f'"{name}"' in metrics
    assert (
        main.run_command(["evaluate", str(model_folder / "r"), str(model_folder / "r.zarr")]) == 0
    )
    assert "width" in capfd.readouterr().out


@pytest.mark.parametrize(
    "options", [["--proba"], ["--interval", "1.5"]], ids=["no classes", "level above 1"]
)
def test_predict_command_of_regression_refuses(options: list[str], model_folder: Path) -> None:
    words = ["predict", str(model_folder / "r"), str(model_folder / "r.zarr"), "x.csv", *options]
    assert main.run_command(words) == 2


def test_classes_of_store_are_sorted(tmp_path: Path) -> None:
    """Check that columns of probabilities are sorted by class, as scikit-learn expects, for any
    order in the store."""
    names = np.array(["shoe", "coat", "bag"])
    class_ids = (X[:, 0] > 0) * 1 + (X[:, 0] > 1)
    labels = names[class_ids]
    source = ArraySource(X.astype(np.float32), class_ids, classes=tuple(names))
    plain = KernelClassifier(**SETTINGS).fit(X.astype(np.float32), labels)
    model = KernelClassifier(**SETTINGS).fit(source)
    assert list(model.classes_) == sorted(names)
    assert model.score(source) == np.mean(model.predict(X) == labels) > 0.9
    assert model.score(on_demand("dask.array").from_array(X), labels) == model.score(source)
    for metric in ("neg_log_loss", "roc_auc_ovr"):
        from_labels, from_store = (
            get_scorer(metric)(estimator, X, labels) for estimator in (plain, model)
        )
        assert from_store == pytest.approx(from_labels, abs=0.01)
    for method in ("predict_values", "decision_function", "predict_log_proba"):
        largest = getattr(model, method)(X).argmax(axis=1)
        assert np.mean(model.classes_[largest] == labels) > 0.9
    sets = model.predict(X, interval=0.9)[1]
    assert np.mean(sets[np.arange(len(X)), np.searchsorted(model.classes_, labels)]) > 0.85
    model.save(tmp_path / "m")
    loaded = load(tmp_path / "m")
    np.testing.assert_array_equal(loaded.classes_, model.classes_)
    for method in ("predict", "predict_proba", "predict_log_proba", "decision_function"):
        np.testing.assert_array_equal(getattr(loaded, method)(X), getattr(model, method)(X))
    more = KernelClassifier(**SETTINGS | {"calibrate": False}).partial_fit(source)
    assert np.mean(more.partial_fit(X, labels).predict(X) == labels) > 0.9


@pytest.mark.parametrize(
    "labels", [["01", "1", "002", "3"], ["-1", "+1", "1"], ["5", "123456789012345678901"]]
)
def test_numeric_text_labels_of_csv_are_sorted_classes(labels: Any, tmp_path: Path) -> None:
    class_ids = np.arange(len(X)) % len(labels)
    rows = X[:, :1] * 0.1 + class_ids[:, None]
    lines = [f"{x:.6f},{labels[k]}" for (x,), k in zip(rows, class_ids, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["x,label", *lines]) + "\n")
    ingest(tmp_path / "t.csv", store := tmp_path / f"{len(labels)}.zarr", y="label")
    model, truth = KernelClassifier(**SETTINGS).fit(str(store)), np.array(labels)[class_ids]
    assert list(model.classes_) == sorted(labels)
    assert get_scorer("neg_log_loss")(model, rows, truth) > -0.1
    assert np.mean(model.predict(rows) == truth) > 0.98
