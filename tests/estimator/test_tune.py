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
from streamkern.tuning.metrics import CLASS_METRICS, REGRESSION_METRICS, clipped_probabilities

Array = npt.NDArray[Any]
# A search of few trainings.
FEW_TRAININGS: dict[str, Any] = {
    "bandwidths": [1.0, 4.0], "ridges": [1e-4], "refine": 0, "epochs": 2, "centers": 40,
}  # fmt: skip
MACHINE: dict[str, Any] = {"threads": 1, "device": "cpu", "memory": "1 GiB"}


def random_rows(n: int = 200) -> Array:
    """Return n normal rows of 4 features."""
    return np.random.default_rng(0).standard_normal((n, 4)).astype(np.float32)


def labels_of(X: Array) -> Array:
    """Return labels of three words with unequal frequencies and some noise."""
    noise = np.random.default_rng(1).standard_normal(len(X))
    return np.array(["ant", "bee", "cat"])[np.digitize(X[:, 0] + 0.3 * noise, [0.5, 1.2])]


def values_of(X: Array) -> Array:
    """Return two targets without noise."""
    return np.stack([np.sin(X[:, 0]), 10 * X[:, 1] ** 2], axis=1)


def split_rows(config: Any, source: Any) -> tuple[Any, Any]:
    """Return the rows that a search trains on, and the rows that it holds out."""
    candidates = Candidates(config, open_data(config, source), folds=1, centers=40, epochs=2)
    return candidates.split(0)


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        *((sk.KernelClassifier, k) for k in CLASS_METRICS),
        *((sk.KernelRegressor, k) for k in REGRESSION_METRICS),
    ],
)
def test_tune_scores_equal_held_out_predictions(kind: Any, metric: str) -> None:
    """Compare with scikit-learn's metric for an estimator that is fitted to the other rows."""
    X = random_rows()
    model = kind("laplace", bandwidth=4.0, ridge=1e-4, scale="none", solver="block", **MACHINE)
    classes = kind is sk.KernelClassifier
    y = labels_of(X) if classes else values_of(X)
    tuned = sk.tune(X, y, estimator=model, metric=metric, **FEW_TRAININGS)
    if classes:
        source = sk.ArraySource(
            X, np.unique(y, return_inverse=True)[1], classes=("ant", "bee", "cat")
        )
    else:
        source = sk.ArraySource(X, y)
    # Scores of a model that is trained as in the search, by scikit-learn
    fit, out = (part.read_unit(0, 0, 0) for part in split_rows(tuned.config, source))
    row = next(row for row in tuned.table if row["bandwidth"] == 4.0)
    refitted = clone(model).set_params(n_centers=40, epochs=2).fit(fit.X, fit.y)
    if classes:
        F = refitted.predict_values(out.X)
        expected = {
            "accuracy": truth.accuracy_score(out.y, F.argmax(axis=1)),
            "balanced_accuracy": truth.balanced_accuracy_score(out.y, F.argmax(axis=1)),
            "log_loss": truth.log_loss(out.y, clipped_probabilities(F)),
            "mse": truth.mean_squared_error(np.eye(3)[out.y], F),
        }
    else:
        F = refitted.predict(out.X)
        expected = {
            "mse": truth.mean_squared_error(out.y, F), "mae": truth.mean_absolute_error(out.y, F),
            "r2": truth.r2_score(out.y, F),
        }  # fmt: skip
    for name, value in expected.items():
        assert row[f"held_out_{name}"] == pytest.approx(value, rel=1e-5), name
    # The best candidate has the best figure, unless no candidate is significantly better.
    choose = max if metric.endswith("accuracy") or metric == "r2" else min
    figures = {r["bandwidth"]: r[f"held_out_{metric}"] for r in tuned.table}
    assert tuned.metric == metric
    assert tuned.best["as_given"] or figures[tuned.best["bandwidth"]] == choose(figures.values())


def test_tune_returns_fitted_estimator_and_keeps_the_given_one() -> None:
    X = random_rows(400)
    template = sk.KernelClassifier("laplace", bandwidth=0.01, ridge=0.0, n_centers=100, **MACHINE)
    parameters = template.get_params()
    tuned = sk.tune(X, labels_of(X), estimator=template, metric="mse", **FEW_TRAININGS)
    assert template.get_params() == parameters
    assert not hasattr(template, "centers_")
    best_estimator = tuned.estimator
    assert type(best_estimator) is sk.KernelClassifier
    assert (
        (best_estimator.bandwidth, best_estimator.ridge)
        == (tuned.best["bandwidth"], 1e-4)
        != (0.01, 0.0)
    )
    changed = {
        name for name, value in best_estimator.get_params().items() if value != parameters[name]
    }
    assert changed == {"bandwidth", "ridge", "metric"}
    assert best_estimator.metric == "none"  # as it was in the trainings
    with pytest.raises(NotFittedError):
        best_estimator.predict(X)
    fitted = sk.tune(
        X, labels_of(X), estimator=template, metric="mse", refit=True, **FEW_TRAININGS
    ).estimator
    F = clone(best_estimator).fit(X, labels_of(X)).predict_values(X)
    np.testing.assert_array_equal(fitted.predict_values(X), F)


def test_tune_leaves_insignificant_settings_auto() -> None:
    """Check that they stay "auto", so that a fit to all data finds its own."""
    X = random_rows()
    noise = np.random.default_rng(2).standard_normal(len(X))
    tuned = sk.tune(X, noise, estimator=sk.KernelRegressor("laplace", **MACHINE), **FEW_TRAININGS)
    assert tuned.best["as_given"]
    assert tuned.best == tuned.table[0]
    assert isinstance(tuned.best["bandwidth"], float)  # as it was found
    assert tuned.estimator.get_params() == sk.KernelRegressor("laplace", **MACHINE).get_params()
    assert (tuned.config.model.bandwidth, tuned.config.solver.ridge) == ("auto", "auto")
    assert 'ridge = "auto"' in tuned.toml


@pytest.mark.full
def test_tune_learns_open_metric_in_every_trial() -> None:
    """Check that the found settings contain it, so that the fit to all rows learns one as well."""
    X = random_rows(2000)
    y = np.sin(3 * X[:, 0])
    template = sk.KernelRegressor("laplace", ridge=0.1, scale="none", solver="block", **MACHINE)
    tuned = sk.tune(X, y, estimator=template, **FEW_TRAININGS)
    assert not tuned.best["as_given"]
    assert (tuned.config.model.metric, tuned.estimator.metric) == ("learn", "learn")
    assert 'metric = "learn"' in tuned.toml
    fit, out = (p.read_unit(0, 0, 0) for p in split_rows(tuned.config, sk.ArraySource(X, y)))
    refitted = clone(tuned.estimator).set_params(n_centers=40, epochs=2).fit(fit.X, fit.y)
    assert refitted.kernel_.metric is not None
    error = np.mean((refitted.predict(out.X).ravel() - out.y.ravel()) ** 2)
    assert tuned.best["held_out_mse"] == pytest.approx(error, rel=1e-4)


def test_candidates_learn_metric_if_useful() -> None:
    X = random_rows(2000)
    source = sk.ArraySource(X, X[:, 0])

    def chosen_metrics(config: sk.RunConfig, distances: Array | None = None) -> list[str]:
        data = open_data(config, source)
        candidates = Candidates(config, data, 1, distances=distances, centers=40, epochs=2)
        requested = [("laplace", 3.0, 0.0), ("laplace_l1", 3.0, 0.0), ("gaussian", None, 0.0)]
        return [
            candidates.with_chosen_metric(candidates.trial).model.metric,
            *(
                candidates.config(*bandwidth_and_ridge).model.metric
                for bandwidth_and_ridge in requested
            ),
        ]

    config = sk.RunConfig()
    assert chosen_metrics(config) == ["learn", "learn", "none", "learn"]
    fixed_kernel = config.with_overrides({"model.kernel": "laplace", "model.bandwidth": 3.0})
    assert chosen_metrics(fixed_kernel) == ["none"] * 4
    full_metric = config.with_overrides({"model.metric": "learn-full"})
    assert chosen_metrics(full_metric) == ["learn-full"] * 4
    assert chosen_metrics(config, np.ones(4)) == ["auto"] * 4


def test_trials_without_memory_for_metric_learn_none() -> None:
    X = random_rows(2000)
    config = sk.RunConfig().with_overrides({"run.threads": 1, "run.accelerator": "none"})
    source = sk.ArraySource(X, X[:, 0])
    words = []
    for memory in (1 << 30, 100 << 20):
        limited = config.with_overrides({"run.memory": memory})
        candidates = Candidates(limited, open_data(limited, source), 1, centers=40, epochs=2)
        words.append(candidates.config("laplace", 3.0, 0.0).model.metric)
        assert candidates.ridges([0.0], ["laplace"], None) == [0.0]  # it fits
    assert words == ["learn", "none"]


def rows_without_time(tuned: Any) -> list[dict[str, Any]]:
    """Return the table of a search without the figures that differ between equal searches."""
    names = ("seconds", "se")
    return [{k: v for k, v in row.items() if k not in names} for row in tuned.table]


@pytest.mark.slow
def test_tune_accepts_data_frames_and_stores(tmp_path: Path) -> None:
    X = random_rows()
    y = labels_of(X)
    frame = pd.DataFrame(X, columns=list("abcd"))
    plain = sk.tune(X, y, estimator=sk.KernelClassifier(**MACHINE), **FEW_TRAININGS)
    named = sk.tune(
        frame,
        pd.Series(y, name="insect"),
        estimator=sk.KernelClassifier(**MACHINE),
        **FEW_TRAININGS,
    )
    assert rows_without_time(named) == rows_without_time(plain)
    sk.ingest_store(X, tmp_path / "a.zarr", y=y)
    from_store = sk.tune(str(tmp_path / "a.zarr"), **FEW_TRAININGS, refit=True)
    assert from_store.search["rows"] == 200
    assert from_store.metric == "accuracy"
    assert set(from_store.estimator.predict(X)) <= {"ant", "bee", "cat"}
    source = sk.tune(sk.ArraySource(X, values_of(X)), **FEW_TRAININGS)
    assert (type(source.estimator), source.metric) == (sk.KernelRegressor, "mse")


@pytest.mark.parametrize(
    ("y", "metric", "kind"),
    [
        ([0, 1] * 20, "auto", sk.KernelClassifier),
        (["a", "b"] * 20, "auto", sk.KernelClassifier),
        ([True, False] * 20, "mse", sk.KernelClassifier),
        ([0.0, 1.0] * 20, "auto", sk.KernelRegressor),
        ([0.0, 1.0] * 20, "accuracy", sk.KernelClassifier),
        ([0, 1] * 20, "mae", sk.KernelRegressor),
        ([[0, 1]] * 20 + [[1, 0]] * 20, "auto", sk.KernelRegressor),
        (pd.Series(["a", "b"] * 20, dtype="category"), "auto", sk.KernelClassifier),
    ],
)
def test_tune_infers_estimator_from_metric_or_targets(y: Any, metric: str, kind: Any) -> None:
    quick = FEW_TRAININGS | {"centers": 10, "kernels": ["laplace"]}
    assert type(sk.tune(random_rows(40), y, metric=metric, **quick).estimator) is kind


def test_tune_uses_weights_class_weights_and_transforms() -> None:
    X = random_rows()
    y, w = labels_of(X), np.tile([1.0, 3.0], 100)
    template = sk.KernelClassifier(
        "laplace", bandwidth=1.0, ridge=1e-4, class_weight="balanced",
        transforms=[{"kind": "noise", "sigma": 0.1}], **MACHINE,
    )  # fmt: skip
    tables = [
        rows_without_time(sk.tune(X, y, weights, estimator=estimator, **FEW_TRAININGS))
        for estimator in (template, clone(template).set_params(class_weight=None, transforms=()))
        for weights in (None, w)
    ]
    assert all(a != b for i, a in enumerate(tables) for b in tables[:i])


def test_tune_accepts_given_centers_and_metric() -> None:
    X = random_rows()
    X[:, 1:] *= 100  # which a metric undoes
    metric = np.array([1, 0.01, 0.01, 0.01])
    with_metric = sk.KernelRegressor(
        "laplace", bandwidth=1.0, scale="none", centers=X[:50], metric=metric, **MACHINE
    )
    y = np.sin(X[:, 0])
    without_metric = sk.KernelRegressor("laplace", bandwidth=1.0, scale="none", **MACHINE)
    errors = [
        sk.tune(X, y, estimator=estimator, **FEW_TRAININGS).best["held_out_mse"]
        for estimator in (with_metric, without_metric)
    ]
    assert errors[0] < 0.5 * errors[1]


def test_tune_scales_bandwidths_of_kernel_objects() -> None:
    """Check that their bandwidths change by one factor."""
    X = random_rows()
    kernel = 0.5 * sk.Laplace(0.01) + sk.Gaussian(0.02)
    template = sk.KernelRegressor(kernel, ridge=1e-4, **MACHINE)
    tuned = sk.tune(X, np.sin(X[:, 0]), estimator=template, **FEW_TRAININGS)
    assert tuned.best["bandwidth"] == 4.0
    assert notation.bandwidths(tuned.estimator.kernel) == [2.0, 4.0]
    assert tuned.estimator.fit(X, np.sin(X[:, 0])).bandwidth_ == 4.0


def test_tune_with_another_metric_reuses_trials(tmp_path: Path) -> None:
    X, trained = random_rows(), list[Any]()
    y = labels_of(X)

    def search(metric: str, **more: Any) -> Any:
        def on_event(event: str, fields: Any) -> None:
            trained.extend([fields] if event == "trial" else [])

        return sk.tune(
            X, y, metric=metric, out=tmp_path / "t", report=on_event, **FEW_TRAININGS | more
        )

    first_search = search("accuracy", kernels=["laplace"])
    assert len(trained) == 3
    assert all("losses" not in record for record in trained)
    for metric in CLASS_METRICS:
        repeated = search(metric, kernels=["laplace"])
        assert json.loads((tmp_path / "t" / "result.json").read_text())["metric"] == metric
        fresh = sk.tune(X, y, metric=metric, kernels=["laplace"], **FEW_TRAININGS)
        assert [{**r, "seconds": 0} for r in repeated.table] == [
            {**r, "seconds": 0} for r in fresh.table
        ]
    assert len(trained) == 3
    assert search("accuracy", kernels=["laplace"]).table == first_search.table


@pytest.mark.slow
@pytest.mark.full  # as given: tested above
@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_tune_does_not_worsen_readme_example(metric: str) -> None:
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, random_state=0)
    plain = sk.KernelClassifier(bandwidth=4.0, **MACHINE)
    tuned = sk.tune(
        X, y, estimator=plain, metric=metric, kernels=["laplace", "gaussian"],
        ridges=[0.0, 1e-6], refine=0, epochs=5, refit=True,
    )  # fmt: skip
    assert tuned.estimator.score(X_test, y_test) >= plain.fit(X, y).score(X_test, y_test) > 0.99


REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("run.toml", [1]), {}, "y cannot be given with settings as X, which determine it"),
        (("run.toml",), {"estimator": sk.KernelClassifier()}, "estimator cannot be given with"),
        (("run.toml",), {"refit": True}, r"refit=True needs an estimator .*; train .*train_model"),
        ((random_rows(), [0, 1] * 100), {"source": 1}, "source= is only for settings as X"),
        ((random_rows(), [0, 1] * 100), {"estimator": "svm"}, "estimator='svm' is no estimator"),
        ((random_rows(),), {}, "requires y to be passed"),
        ((random_rows(), [0, 1] * 100), {"rows": 4}, "rows=4 cannot be split"),
        # A refit would go into a run of other settings.
        ((random_rows(), [0.5] * 200),
         {"refit": True, "estimator": sk.KernelRegressor(run_dir="run")}, "leave refit out"),
        ((random_rows(), [0.5] * 200),
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
    searches = [
        sk.tune(rows, np.sin(9 * rows[:, 0]), estimator=estimator, **options)
        for estimator in (
            sk.KernelRegressor(kernel=sk.Laplace(metric=np.array(scales)), n_centers=60),
            sk.KernelRegressor(kernel=sk.Laplace(), metric=np.array(scales), n_centers=60),
        )
    ]
    first_errors, second_errors = (
        [row["held_out_mse"] for row in tuned.table] for tuned in searches
    )
    assert first_errors == second_errors
    np.testing.assert_array_equal(searches[0].estimator.metric, np.array(scales))
    with pytest.raises(sk.ConfigError, match=r"a search uses one metric for all kernels"):
        sk.tune(rows, rows[:, 0], kernels=[sk.Laplace(metric=np.array(scales))])
    two_metrics = sk.KernelRegressor(kernel=sk.Laplace(metric=np.array(scales)), metric=[1.0, 1.0])
    with pytest.raises(sk.ConfigError, match="leave metric= out of the estimator"):
        sk.tune(rows, rows[:, 0], estimator=two_metrics)
