"""Whole fits of the estimators on a GPU: as good as the same fits on the CPU.

Automatic choices differ by rounding, so predictions are close rather than equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from tests import fake_cupy
from tests.host_cuda import COMPILER

N, N_MANY, D = 160, 600, 11
"""Rows; rows of a fit that learns a metric; features, whose half-precision rows are padded."""
rng = np.random.default_rng(5)
X = rng.standard_normal((N_MANY + 100, D)).astype(np.float32)
F = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]
Y = F + 0.1 * rng.standard_normal(len(X))
CLASSES = (Y > 0).astype(int) + (Y > 1)
WORDS = pd.DataFrame(X).rename(columns=str).assign(word=rng.choice(["u", "v", "w"], len(X)))
TRAIN, FRESH = slice(N), slice(N_MANY, None)


@pytest.fixture(
    params=[
        pytest.param("device", marks=pytest.mark.gpu),
        pytest.param(
            "stand-in", marks=pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
        ),
    ]
)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process a GPU."""
    if request.param == "stand-in":
        fake_cupy.install(monkeypatch)


def value_predictor(**options: Any) -> Callable[[str], Any]:
    """Return a function that predicts values with a model that is trained on a device."""
    return lambda device: (
        sk.KernelRegressor(device=device, **options).fit(X[TRAIN], Y[TRAIN]).predict(X[FRESH])
    )


def probability_predictor(**options: Any) -> Callable[[str], Any]:
    """Return a function that predicts probabilities with a model that is trained on a device."""
    return lambda device: (
        sk.KernelClassifier(device=device, **options)
        .fit(X[TRAIN], CLASSES[TRAIN])
        .predict_proba(X[FRESH])
    )


def predict_with_metric(device: str) -> Any:
    """Return the predictions of a model that learned a metric."""
    model = sk.KernelRegressor(n_centers=60, device=device).fit(X[:N_MANY], Y[:N_MANY])
    assert model.kernel_.metric is not None
    return model.predict(X[FRESH])


def predict_from_words(device: str) -> Any:
    """Return the predictions of a model of a table with words."""
    return sk.KernelRegressor(device=device).fit(WORDS[TRAIN], Y[TRAIN]).predict(WORDS[FRESH])


def predict_deviations(device: str) -> Any:
    """Return the standard deviations of predictions."""
    model = sk.KernelRegressor(solver="direct", posterior=True, device=device)
    return model.fit(X[TRAIN], Y[TRAIN]).predict(X[FRESH], return_std=True)[1]


FITS = {
    "default": value_predictor(),
    "metric": predict_with_metric,
    "classes": probability_predictor(),
    "words": predict_from_words,
    "posterior": predict_deviations,
    "inner products": value_predictor(kernel="polynomial"),
    "quantiles": value_predictor(loss="quantile", quantile=[0.1, 0.9], n_centers=80),
    "log loss": probability_predictor(loss="log_loss", n_centers=80),
    "blocks": value_predictor(n_centers=80, solver="block", block_size=40),
}


@pytest.mark.parametrize("name", FITS)
def test_gpu_fits_equal_cpu_fits(name: str, gpu: None) -> None:
    on_cpu, on_gpu = (np.asarray(FITS[name](device)) for device in ("cpu", "gpu"))
    assert on_gpu.shape == on_cpu.shape
    assert np.square(on_gpu - on_cpu).mean() < 0.01 * np.square(on_cpu - on_cpu.mean(0)).mean()
