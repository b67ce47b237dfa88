"""Check early stopping and partial_fit of the estimators."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits

from streamkern import ConfigError, KernelClassifier, KernelRegressor, compress, load
from streamkern.train.placement.rank_cluster import local_cluster

EARLY_STOPPING: dict[str, Any] = {
    "threads": 1, "n_centers": 100, "early_stopping": True, "kernel": "laplace",
    "bandwidth": 3.0, "metric": "none",
}  # fmt: skip


def test_early_stopping_classifier_has_validation_scores_and_history() -> None:
    X, y = load_digits(return_X_y=True)
    model = KernelClassifier(**EARLY_STOPPING).fit(X, y)
    assert model.validation_scores_ is not None
    assert model.n_iter_ == len(model.validation_scores_) == len(model.history_)
    assert model.report_["validation_accuracy"] == max(model.validation_scores_)
    assert 0.8 < max(model.validation_scores_) <= 1
    assert len(model.loss_curve_) >= 1
    # A tenth of the 1797 rows is for validation.
    assert model.report_["samples"] == model.n_iter_ * (len(X) - 180)


@pytest.mark.slow
def test_early_stopping_regressor_has_validation_scores_and_history() -> None:
    X, y = load_diabetes(return_X_y=True)
    frame = pd.DataFrame(X).rename(columns=str)
    for transforms in ((), ({"kind": "noise", "sigma": 0.1},)):
        settings = EARLY_STOPPING | {"transforms": transforms, "validation_fraction": 0.2}
        model = KernelRegressor(**settings).fit(frame, y)
        assert model.validation_scores_ is not None
        assert max(model.validation_scores_) > 0.2
        assert set(model.history_[0]) == {"step", "samples", "validation_mse", "validation_r2"}
    assert KernelRegressor(threads=1, n_centers=50).fit(X, y).validation_scores_ is None


def test_loaded_run_has_validation_scores_and_history(tmp_path: Path) -> None:
    X, y = load_diabetes(return_X_y=True)
    model = KernelRegressor(**EARLY_STOPPING, run_dir=tmp_path / "run").fit(X, y)
    model.save(tmp_path / "saved")
    for location in ("run", "saved"):
        loaded = load(tmp_path / location)
        assert loaded.validation_scores_ == model.validation_scores_
        assert loaded.report_ == model.report_
        assert loaded.early_stopping is True
        np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    with pytest.raises(ConfigError, match="early_stopping cannot be used with partial_fit"):
        load(tmp_path / "run").partial_fit(X, y)


def test_partial_fit_after_fit_warns_and_restarts() -> None:
    """Check that the model equals a model of the block without the earlier fit."""
    X, y = load_diabetes(return_X_y=True)
    options: dict[str, Any] = {"threads": 1, "kernel": "gaussian", "metric": "none"}
    model = KernelRegressor(**options, random_state=0).fit(X[:300], y[:300])
    message = (
        r"discards the model of 300 centers and starts a new one from this block of 50 rows; to"
    )
    with pytest.warns(UserWarning, match=message):
        model.partial_fit(X[:50], y[:50])
    block = KernelRegressor(**options, random_state=0).partial_fit(X[:50], y[:50])
    np.testing.assert_array_equal(model.predict(X), block.predict(X))
    model.partial_fit(X[50:100], y[50:100])  # continues without a warning


def test_partial_fit_refuses_compressed_model() -> None:
    """Check models that were fitted, and models of partial_fit, whose solver state is lost."""
    X, y = load_diabetes(return_X_y=True)
    model = KernelRegressor(threads=1, kernel="gaussian", metric="none", random_state=0)
    for restarted in (
        clone(model).fit(X[:300], y[:300]),
        clone(model).partial_fit(X[:300], y[:300]),
    ):
        small = compress(restarted, X, n_centers=40)
        predictions = small.predict(X)
        with pytest.raises(ConfigError, match="cannot continue a compressed model"):
            small.partial_fit(X[:50], y[:50])
        np.testing.assert_array_equal(small.predict(X), predictions)


def test_partial_fit_continues_from_best_weights(tmp_path: Path) -> None:
    X, y = load_diabetes(return_X_y=True)
    model = KernelRegressor(**EARLY_STOPPING, run_dir=tmp_path, solver="block").fit(X, y)
    loaded = load(tmp_path).set_params(early_stopping=False, epochs=1)
    loaded.partial_fit(X, y)
    assert loaded.n_iter_ == model.n_iter_ + 1
    assert loaded.score(X, y) > 0.3


def test_early_stopping_refuses_incompatible_settings() -> None:
    X, y = load_diabetes(return_X_y=True)
    warm = KernelRegressor(**EARLY_STOPPING | {"early_stopping": False}, solver="block").fit(X, y)
    for model, message in (
        (KernelRegressor(**EARLY_STOPPING, solver="direct"), "cannot be used with solver='direct'"),
        (
            warm.set_params(early_stopping=True, warm_start=True),
            "cannot be used with initial weights",
        ),
        (
            KernelRegressor(**EARLY_STOPPING, validation_fraction=1.0),
            "validation_fraction=1.0 must be",
        ),
        (KernelRegressor(**EARLY_STOPPING, n_iter_no_change=0), "n_iter_no_change=0 must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.fit(X, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Dask's cluster issues warnings
def test_fit_uses_cluster_of_callers_client(tmp_path: Path) -> None:
    """Check that the client stays open and is not a part of the model."""
    pytest.importorskip("xgboost")
    X, y = load_diabetes(return_X_y=True)
    held_out = X[:50], y[:50]
    settings: dict[str, Any] = {"n_centers": 100, "epochs": 3, "solver": "block"}
    single = KernelRegressor(device="cpu", **settings).fit(X, y, test=held_out)
    ranks = KernelRegressor(device="cpu", ranks=2, run_dir=str(tmp_path / "run"), **settings)
    with local_cluster(2) as client:
        ranks.fit(X, y, test=held_out, client=client)
        assert client.status == "running"
    np.testing.assert_allclose(ranks.predict(X), single.predict(X), rtol=1e-3)
    assert [figures["samples"] for figures in ranks.history_] == [442, 884, 1326]
    copy = clone(pickle.loads(pickle.dumps(ranks)))
    assert copy.get_params()["ranks"] == 2
    assert "client" not in copy.get_params()
