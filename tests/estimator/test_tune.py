"""Check `tune`: its data, metric and settings, and the estimator that it returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from sklearn import metrics as truth
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import train_test_split

import streamkern as sk
from streamkern.kernels import notation
from streamkern.train.resolve.training_data import open_data
from streamkern.tuning.candidates import Candidates
from streamkern.tuning.metrics import CLASS_METRICS, REGRESSION_METRICS, probabilities

Array = npt.NDArray[Any]
# A search of few trainings.
QUICK: dict[str, Any] = {
    "bandwidths": [1.0, 4.0], "ridges": [1e-4], "refine": 0, "epochs": 2, "centers": 40,
}  # fmt: skip
PLAIN: dict[str, Any] = {"threads": 1, "device": "cpu", "memory": "1 GiB"}


def some_rows(n: int = 200) -> Array:
    return np.random.default_rng(0).standard_normal((n, 4)).astype(np.float32)


def labels_of(X: Array) -> Array:
    """Return labels of three words with unequal frequencies and some noise."""
    noise = np.random.default_rng(1).standard_normal(len(X))
    return np.array(["ant", "bee", "cat"])[np.digitize(X[:, 0] + 0.3 * noise, [0.5, 1.2])]


def values_of(X: Array) -> Array:
    return np.stack([np.sin(X[:, 0]), 10 * X[:, 1] ** 2], axis=1)


def held_out(config: Any, source: Any) -> tuple[Any, Any]:
    made = Candidates(config, open_data(config, source), folds=1, centers=40, epochs=2)
    return made.split(0)


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        *((sk.KernelClassifier, k) for k in CLASS_METRICS),
        *((sk.KernelRegressor, k) for k in REGRESSION_METRICS),
    ],
)
def test_tune_scores_equal_held_out_predictions(kind: Any, metric: str) -> None:
    """Compare with scikit-learn's metric for an estimator that is fitted to the other rows."""
    X = some_rows()
    model = kind("laplace", bandwidth=4.0, ridge=1e-4, scale="none", solver="block", **PLAIN)
    classes = kind is sk.KernelClassifier
    y = labels_of(X) if classes else values_of(X)
    tuned = sk.tune(X, y, estimator=model, metric=metric, **QUICK)
    if classes:
        source = sk.ArraySource(
            X, np.unique(y, return_inverse=True)[1], classes=("ant", "bee", "cat")
        )
    else:
        source = sk.ArraySource(X, y)
    fit, out = (part.read_unit(0, 0, 0) for part in held_out(tuned.config, source))
    row = next(row for row in tuned.table if row["bandwidth"] == 4.0)
    one = clone(model).set_params(n_centers=40, epochs=2).fit(fit.X, fit.y)
    if classes:
        F = one.predict_values(out.X)
        expected = {
            "accuracy": truth.accuracy_score(out.y, F.argmax(axis=1)),
            "balanced_accuracy": truth.balanced_accuracy_score(out.y, F.argmax(axis=1)),
            "log_loss": truth.log_loss(out.y, probabilities(F)),
            "mse": truth.mean_squared_error(np.eye(3)[out.y], F),
        }
    else:
        F = one.predict(out.X)
        expected = {
            "mse": truth.mean_squared_error(out.y, F), "mae": truth.mean_absolute_error(out.y, F),
            "r2": truth.r2_score(out.y, F),
        }  # fmt: skip
    for name, value in expected.items():
        assert row[f"held_out_{name}"] == pytest.approx(value, rel=1e-5), name
    best = max if metric.endswith("accuracy") or metric == "r2" else min
    figures = {r["bandwidth"]: r[f"held_out_{metric}"] for r in tuned.table}
    assert tuned.metric == metric
    assert tuned.best["as_given"] or figures[tuned.best["bandwidth"]] == best(figures.values())


def test_tune_returns_fitted_estimator_and_keeps_the_given_one() -> None:
    X = some_rows(400)
    given = sk.KernelClassifier("laplace", bandwidth=0.01, ridge=0.0, n_centers=100, **PLAIN)
    before = given.get_params()
    found = sk.tune(X, labels_of(X), estimator=given, metric="mse", **QUICK)
    assert given.get_params() == before
    assert not hasattr(given, "centers_")
    best = found.estimator
    assert type(best) is sk.KernelClassifier
    assert (best.bandwidth, best.ridge) == (found.best["bandwidth"], 1e-4) != (0.01, 0.0)
    changed = {name for name, value in best.get_params().items() if value != before[name]}
    assert changed == {"bandwidth", "ridge", "metric"}
    assert best.metric == "none"  # as it was in the trainings
    with pytest.raises(NotFittedError):
        best.predict(X)
    fitted = sk.tune(X, labels_of(X), estimator=given, metric="mse", refit=True, **QUICK).estimator
    F = clone(best).fit(X, labels_of(X)).predict_values(X)
    np.testing.assert_array_equal(fitted.predict_values(X), F)


def test_tune_leaves_insignificant_settings_auto() -> None:
    """Check that they stay "auto", so that a fit to all data finds its own."""
    X = some_rows()
    noise = np.random.default_rng(2).standard_normal(len(X))
    found = sk.tune(X, noise, estimator=sk.KernelRegressor("laplace", **PLAIN), **QUICK)
    assert found.best["as_given"]
    assert found.best == found.table[0]
    assert isinstance(found.best["bandwidth"], float)  # as it was found
    assert found.estimator.get_params() == sk.KernelRegressor("laplace", **PLAIN).get_params()
    assert (found.config.model.bandwidth, found.config.solver.ridge) == ("auto", "auto")
    assert 'ridge = "auto"' in found.toml


@pytest.mark.full
def test_tune_learns_open_metric_in_every_trial() -> None:
    """Check that the found settings contain it, so that the fit to all rows learns one as well."""
    X = some_rows(2000)
    y = np.sin(3 * X[:, 0])
    given = sk.KernelRegressor("laplace", ridge=0.1, scale="none", solver="block", **PLAIN)
    found = sk.tune(X, y, estimator=given, **QUICK)
    assert not found.best["as_given"]
    assert (found.config.model.metric, found.estimator.metric) == ("learn", "learn")
    assert 'metric = "learn"' in found.toml
    fit, out = (p.read_unit(0, 0, 0) for p in held_out(found.config, sk.ArraySource(X, y)))
    once = clone(found.estimator).set_params(n_centers=40, epochs=2).fit(fit.X, fit.y)
    assert once.kernel_.metric is not None
    error = np.mean((once.predict(out.X).ravel() - out.y.ravel()) ** 2)
    assert found.best["held_out_mse"] == pytest.approx(error, rel=1e-4)


def test_candidates_learn_metric_if_useful() -> None:
    X = some_rows(2000)
    source = sk.ArraySource(X, X[:, 0])

    def words(config: sk.RunConfig, distances: Array | None = None) -> list[str]:
        data = open_data(config, source)
        made = Candidates(config, data, 1, distances=distances, centers=40, epochs=2)
        requested = [("laplace", 3.0, 0.0), ("laplace_l1", 3.0, 0.0), ("gaussian", None, 0.0)]
        return [
            made.with_chosen_metric(made.trial).model.metric,
            *(made.config(*each).model.metric for each in requested),
        ]

    config = sk.RunConfig()
    assert words(config) == ["learn", "learn", "none", "learn"]
    given = config.with_overrides({"model.kernel": "laplace", "model.bandwidth": 3.0})
    assert words(given) == ["none"] * 4
    message = config.with_overrides({"model.metric": "learn-full"})
    assert words(message) == ["learn-full"] * 4
    assert words(config, np.ones(4)) == ["auto"] * 4


def test_trials_without_memory_for_metric_learn_none() -> None:
    X = some_rows(2000)
    config = sk.RunConfig().with_overrides({"run.threads": 1, "run.accelerator": "none"})
    source = sk.ArraySource(X, X[:, 0])
    words = []
    for memory in (1 << 30, 100 << 20):
        given = config.with_overrides({"run.memory": memory})
        made = Candidates(given, open_data(given, source), 1, centers=40, epochs=2)
        words.append(made.config("laplace", 3.0, 0.0).model.metric)
        assert made.ridges([0.0], ["laplace"], None) == [0.0]  # it fits
    assert words == ["learn", "none"]


def essence(found: Any) -> list[dict[str, Any]]:
    drop = ("seconds", "se")
    return [{k: v for k, v in row.items() if k not in drop} for row in found.table]


@pytest.mark.slow
def test_tune_accepts_data_frames_and_stores(tmp_path: Path) -> None:
    X = some_rows()
    y = labels_of(X)
    frame = pd.DataFrame(X, columns=list("abcd"))
    plain = sk.tune(X, y, estimator=sk.KernelClassifier(**PLAIN), **QUICK)
    named = sk.tune(
        frame, pd.Series(y, name="insect"), estimator=sk.KernelClassifier(**PLAIN), **QUICK
    )
    assert essence(named) == essence(plain)
    sk.ingest_store(X, tmp_path / "a.zarr", y=y)
    stored = sk.tune(str(tmp_path / "a.zarr"), **QUICK, refit=True)
    assert stored.search["rows"] == 200
    assert stored.metric == "accuracy"
    assert set(stored.estimator.predict(X)) <= {"ant", "bee", "cat"}
    source = sk.tune(sk.ArraySource(X, values_of(X)), **QUICK)
    assert (type(source.estimator), source.metric) == (sk.KernelRegressor, "mse")


def test_tune_infers_estimator_from_metric_or_targets() -> None:
    quick = QUICK | {"centers": 10, "kernels": ["laplace"]}
    for y, metric, kind in (
        ([0, 1] * 20, "auto", sk.KernelClassifier),
        (["a", "b"] * 20, "auto", sk.KernelClassifier),
        ([True, False] * 20, "mse", sk.KernelClassifier),
        ([0.0, 1.0] * 20, "auto", sk.KernelRegressor),
        ([0.0, 1.0] * 20, "accuracy", sk.KernelClassifier),
        ([0, 1] * 20, "mae", sk.KernelRegressor),
        ([[0, 1]] * 20 + [[1, 0]] * 20, "auto", sk.KernelRegressor),
        (pd.Series(["a", "b"] * 20, dtype="category"), "auto", sk.KernelClassifier),
    ):
        assert type(sk.tune(some_rows(40), y, metric=metric, **quick).estimator) is kind


def test_tune_uses_weights_class_weights_and_transforms() -> None:
    X = some_rows()
    y, w = labels_of(X), np.tile([1.0, 3.0], 100)
    given = sk.KernelClassifier(
        "laplace", bandwidth=1.0, ridge=1e-4, class_weight="balanced",
        transforms=[{"kind": "noise", "sigma": 0.1}], **PLAIN,
    )  # fmt: skip
    tables = [
        essence(sk.tune(X, y, weights, estimator=estimator, **QUICK))
        for estimator in (given, clone(given).set_params(class_weight=None, transforms=()))
        for weights in (None, w)
    ]
    assert all(a != b for i, a in enumerate(tables) for b in tables[:i])


def test_tune_accepts_given_centers_and_metric() -> None:
    X = some_rows()
    X[:, 1:] *= 100  # which a metric undoes
    metric = np.array([1, 0.01, 0.01, 0.01])
    own = sk.KernelRegressor(
        "laplace", bandwidth=1.0, scale="none", centers=X[:50], metric=metric, **PLAIN
    )
    y = np.sin(X[:, 0])
    without = sk.KernelRegressor("laplace", bandwidth=1.0, scale="none", **PLAIN)
    errors = [
        sk.tune(X, y, estimator=estimator, **QUICK).best["held_out_mse"]
        for estimator in (own, without)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_tune_scales_bandwidths_of_kernel_objects() -> None:
    """Check that their bandwidths change by one factor."""
    X = some_rows()
    kernel = 0.5 * sk.Laplace(0.01) + sk.Gaussian(0.02)
    given = sk.KernelRegressor(kernel, ridge=1e-4, **PLAIN)
    found = sk.tune(X, np.sin(X[:, 0]), estimator=given, **QUICK)
    assert found.best["bandwidth"] == 4.0
    assert notation.bandwidths(found.estimator.kernel) == [2.0, 4.0]
    assert found.estimator.fit(X, np.sin(X[:, 0])).bandwidth_ == 4.0


def test_tune_with_another_metric_reuses_trials(tmp_path: Path) -> None:
    X, trained = some_rows(), list[Any]()
    y = labels_of(X)

    def search(metric: str, **more: Any) -> Any:
        def on_event(event: str, fields: Any) -> None:
            trained.extend([fields] if event == "trial" else [])

        return sk.tune(X, y, metric=metric, out=tmp_path / "t", report=on_event, **QUICK | more)

    first = search("accuracy", kernels=["laplace"])
    assert len(trained) == 3
    assert all("losses" not in record for record in trained)
    for metric in CLASS_METRICS:
        again = search(metric, kernels=["laplace"])
        assert json.loads((tmp_path / "t" / "result.json").read_text())["metric"] == metric
        fresh = sk.tune(X, y, metric=metric, kernels=["laplace"], **QUICK)
        assert [{**r, "seconds": 0} for r in again.table] == [
            {**r, "seconds": 0} for r in fresh.table
        ]
    assert len(trained) == 3
    assert search("accuracy", kernels=["laplace"]).table == first.table


@pytest.mark.slow
@pytest.mark.full  # as given: tested above
@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_tune_does_not_worsen_readme_example(metric: str) -> None:
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, random_state=0)
    plain = sk.KernelClassifier(bandwidth=4.0, **PLAIN)
    found = sk.tune(
        X, y, estimator=plain, metric=metric, kernels=["laplace", "gaussian"],
        ridges=[0.0, 1e-6], refine=0, epochs=5, refit=True,
    )  # fmt: skip
    assert found.estimator.score(X_test, y_test) >= plain.fit(X, y).score(X_test, y_test) > 0.99


REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("run.toml", [1]), {}, "y cannot be given with settings as X, which determine it"),
        (("run.toml",), {"estimator": sk.KernelClassifier()}, "estimator cannot be given with"),
        (("run.toml",), {"refit": True}, r"refit=True needs an estimator .*; train .*train_model"),
        ((some_rows(), [0, 1] * 100), {"source": 1}, "source= is only for settings as X; give the"),
        ((some_rows(), [0, 1] * 100), {"estimator": "svm"}, "estimator='svm' is no estimator"),
        ((some_rows(),), {}, "requires y to be passed"),
        ((some_rows(), [0, 1] * 100), {"rows": 4}, "rows=4 cannot be split"),
        # A refit would go into a run of other settings.
        ((some_rows(), [0.5] * 200),
         {"refit": True, "estimator": sk.KernelRegressor(run_dir="run")}, "leave refit out"),
        ((some_rows(), [0.5] * 200),
         {"refit": True, "estimator": sk.KernelRegressor(warm_start="run")}, "leave refit out"),
]  # fmt: skip


def test_tune_refuses_invalid_calls(tmp_path: Path) -> None:
    for words, more, sentence in REFUSED:
        with pytest.raises((sk.ConfigError, sk.DataError), match=sentence) as caught:
            sk.tune(*words, out=tmp_path / "t", **more)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("scales", [(1.0, 0.0), ((1.0, 0.5), (0.0, 0.2))])
def test_tune_keeps_metric_of_kernel(scales: Any) -> None:
    """Check that the results equal those with the metric as a separate setting."""
    rows = np.random.default_rng(0).random((300, 2))
    options: dict[str, Any] = {"bandwidths": [0.3, 1.0], "ridges": [1e-4], "refine": 0}
    found = [
        sk.tune(rows, np.sin(9 * rows[:, 0]), estimator=estimator, **options)
        for estimator in (
            sk.KernelRegressor(kernel=sk.Laplace(metric=np.array(scales)), n_centers=60),
            sk.KernelRegressor(kernel=sk.Laplace(), metric=np.array(scales), n_centers=60),
        )
    ]
    one, other = ([row["held_out_mse"] for row in tuned.table] for tuned in found)
    assert one == other
    np.testing.assert_array_equal(found[0].estimator.metric, np.array(scales))
    with pytest.raises(sk.ConfigError, match=r"a search uses one metric for all kernels"):
        sk.tune(rows, rows[:, 0], kernels=[sk.Laplace(metric=np.array(scales))])
    both = sk.KernelRegressor(kernel=sk.Laplace(metric=np.array(scales)), metric=[1.0, 1.0])
    with pytest.raises(sk.ConfigError, match="leave metric= out of the estimator"):
        sk.tune(rows, rows[:, 0], estimator=both)
