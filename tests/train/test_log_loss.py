"""Check the log loss, from the setting to the probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.special import softmax
from sklearn.metrics import log_loss

import streamkern as sk
from streamkern.config.run_config import RunConfig
from tests.runs import arrays, finished, settings

X, Y = arrays(200, 3)
LOG_LOSS = {"model.loss": "log_loss"}


def classifier(**parameters: Any) -> sk.KernelClassifier:
    """Return a small classifier of 200 rows of three classes."""
    defaults = {
        "n_centers": 60, "kernel": "laplace", "bandwidth": 3.0, "metric": "none", "scale": "none",
        "threads": 1,
    }  # fmt: skip
    return sk.KernelClassifier(**defaults | {"loss": "log_loss"} | parameters)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that was fitted to X and Y."""
    path = tmp_path_factory.mktemp("log_loss") / "run"
    classifier(run_dir=path).fit(X, Y)
    return path


def test_probabilities_are_softmax_of_values() -> None:
    model = classifier().fit(X, Y)
    P = model.predict_proba(X)
    np.testing.assert_allclose(P, softmax(model.predict_values(X), axis=1), rtol=1e-5)
    np.testing.assert_array_equal(model.predict(X), P.argmax(axis=1))
    assert model.score(X, Y) > 0.9


def test_loaded_model_has_same_probabilities(run_dir: Path) -> None:
    expected = classifier().fit(X, Y).predict_proba(X)
    np.testing.assert_array_equal(sk.load(run_dir).predict_proba(X), expected)


def test_metrics_equal_formulas(run_dir: Path, tmp_path: Path) -> None:
    sk.ingest_store(X, tmp_path / "rows.zarr", y=Y)
    metrics = sk.evaluate(run_dir, tmp_path / "rows.zarr")
    P = sk.load(run_dir).predict_proba(X)
    assert metrics["log_loss"] == pytest.approx(log_loss(Y, P), rel=1e-4)
    assert metrics["mse"] == pytest.approx(((P - np.eye(3)[Y]) ** 2).mean(), rel=1e-4)


def test_dual_coefficients_reproduce_logits() -> None:
    model = classifier().fit(X, Y)
    K = np.exp(-cdist(np.float64(X), np.float64(model.centers_)) / 3.0)
    logits = K @ np.float64(model.dual_coef_) + model.intercept_
    np.testing.assert_allclose(
        model.predict_values(X), logits, atol=0.02
    )  # logits are about 10, the weights float32


@pytest.mark.parametrize("fit_intercept", [False, True])
def test_intercept_predicts_class_shares(fit_intercept: bool) -> None:
    """Check the offset of the logits: without an intercept, all classes have equal shares."""
    rare = np.where(np.arange(200) < 6, 2, np.arange(200) % 2)
    source = sk.ArraySource(X, rare, classes=(0, 1, 2))
    overrides = LOG_LOSS | {"solver.name": "block", "model.fit_intercept": fit_intercept}
    targets = finished(settings(**overrides), source=source).model.targets
    shares = [0.485, 0.485, 0.03] if fit_intercept else [1 / 3] * 3
    np.testing.assert_allclose(softmax(targets.mean), shares, rtol=1e-6)
    assert np.log2(targets.scale[0]) % 1 == 0


@pytest.mark.parametrize("n", [60, 200])
def test_log_loss_predicts_better_than_calibrated_squares(n: int) -> None:
    """Check also all rows as centers, and classes with few rows."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((1000 + n, 2))
    Y = (X[:, 0] > 0) + 2 * (X[:, 1] > 1.6)
    fitted = [
        classifier(n_centers="auto", loss=loss, calibrate="auto").fit(X[:n], Y[:n])
        for loss in ("log_loss", "squared_error")
    ]
    losses = [
        log_loss(Y[n:], model.predict_proba(X[n:]), labels=model.classes_) for model in fitted
    ]
    assert losses[0] < losses[1]


def test_posterior_is_refused() -> None:
    with pytest.raises(sk.ConfigError, match=r"minimised with solver\.posterior=True"):
        RunConfig().with_overrides(LOG_LOSS | {"solver.posterior": True})
