"""Check scores of models with other losses: R2 or accuracy, and scorers of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, make_scorer, mean_pinball_loss, r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score

import streamkern as sk

N = 300
RNG = np.random.default_rng(5)
X = RNG.standard_normal((N, 2)).astype(np.float32)
Y = np.sin(2 * X[:, 0]) + RNG.exponential(size=N)
LABELS = np.where(X[:, 0] + 0.5 * RNG.standard_normal(N) > 0, "up", "down")
SETTINGS: dict[str, Any] = {
    "kernel": "laplace", "metric": "none", "bandwidth": 2.0, "n_centers": 40, "epochs": 2,
}  # fmt: skip
PINBALL = make_scorer(mean_pinball_loss, alpha=0.9, greater_is_better=False)


def test_score_is_r2_or_accuracy_for_every_loss() -> None:
    for loss in ("quantile", "absolute_error"):
        model = sk.KernelRegressor(loss=loss, **SETTINGS).fit(X, Y)
        assert model.score(X, Y) == pytest.approx(r2_score(Y, model.predict(X)))
        assert "R2 for every loss" in " ".join((model.score.__doc__ or "").split())
    for loss in ("log_loss", "squared_hinge"):
        classifier = sk.KernelClassifier(loss=loss, **SETTINGS).fit(X, LABELS)
        assert classifier.score(X, LABELS) == accuracy_score(LABELS, classifier.predict(X))


@pytest.mark.slow
def test_minimised_loss_has_best_score() -> None:
    def scores(scoring: Any, **parameters: Any) -> float:
        model = sk.KernelRegressor(**SETTINGS, **parameters)
        return float(cross_val_score(model, X, Y, cv=3, scoring=scoring).mean())

    assert scores(PINBALL, loss="quantile", quantile=0.9) > scores(PINBALL)
    absolute = "neg_mean_absolute_error"
    assert scores(absolute, loss="absolute_error") > scores(absolute)
    assert scores("r2") > scores("r2", loss="quantile", quantile=0.9)


def test_log_loss_probabilities_are_scored() -> None:
    model = sk.KernelClassifier(loss="log_loss", **SETTINGS)
    scores = cross_val_score(model, X, LABELS, cv=3, scoring="neg_log_loss")
    assert (scores > -np.log(2)).all()


def test_grid_search_ranks_by_scorer() -> None:
    model = sk.KernelRegressor(loss="quantile", **SETTINGS)
    search = GridSearchCV(model, {"quantile": [0.1, 0.5, 0.9]}, scoring=PINBALL, cv=2).fit(X, Y)
    assert search.best_params_ == {"quantile": 0.9}
