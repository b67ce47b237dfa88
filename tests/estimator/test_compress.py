"""Compare compressed models with least squares solved by NumPy in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import streamkern as sk
from streamkern.basics.errors import ConfigError, DataError, MemoryBudgetError
from tests import reference as ref
from tests.traced_memory import traced_memory

RNG = np.random.default_rng(0)
X = RNG.standard_normal((900, 3))
Y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2]
LABELS = np.where(Y > 0, "up", "down")


def regressor(**settings: Any) -> sk.KernelRegressor:
    """Return a model of 400 centers, fitted to the first 400 rows."""
    defaults = {"kernel": "gaussian", "bandwidth": 2.0, "metric": "none", "random_state": 0}
    return sk.KernelRegressor(**defaults | settings).fit(X[:400], Y[:400])


def test_compressed_weights_solve_least_squares() -> None:
    model = regressor(scale="none", ridge=1e-6, precision="float64")
    rows = X[400:]
    small = sk.compress(model, rows, n_centers=40)
    fitting = np.arange(len(rows)) % 4 > 0  # every fourth row is held out
    K = ref.gaussian(rows, small.centers_, 2.0)
    f = model.predict(rows)
    outputs = f - model.intercept_
    w = np.linalg.lstsq(K[fitting], outputs[fitting], rcond=None)[0]
    expected = np.sqrt(((K[~fitting] @ w - outputs[~fitting]) ** 2).mean()) / f.std()
    report = small.report_["compressed"]
    assert small.predict(rows) == pytest.approx(
        K @ w + model.intercept_, abs=2 * expected * f.std()
    )
    assert report["difference"] == pytest.approx(expected, rel=0.2)
    differences = small.predict(rows)[~fitting] - f[~fitting]
    assert report["difference"] == pytest.approx(
        np.sqrt((differences**2).mean()) / f.std(), rel=1e-3
    )
    assert (small.n_centers_, len(small.centers_), model.n_centers_) == (40, 40, 400)
    assert {tuple(z) for z in small.centers_} <= {tuple(z) for z in model.centers_}


@pytest.mark.parametrize("tolerance", [0.1, 0.01])
def test_compress_keeps_fewest_centers_within_tolerance(tolerance: float) -> None:
    model = regressor()
    small = sk.compress(model, X[400:], tolerance=tolerance)
    report = small.report_["compressed"]
    assert report["difference"] <= tolerance
    assert report["n_centers"] == 400
    fewer = [n for n, error in report["curve"] if n < small.n_centers_]
    difference_of = dict(map(tuple, report["curve"]))
    assert all(difference_of[n] > tolerance for n in fewer)
    assert small.n_centers_ - max(fewer) <= max(1, small.n_centers_ // 20)  # found to 5 %


def test_compress_accepts_store(tmp_path: Path) -> None:
    model = regressor()
    sk.ingest_store(X[400:], tmp_path / "rows", y=Y[400:], shuffle=False)
    from_array, from_store = (
        sk.compress(model, rows, n_centers=30) for rows in (X[400:], tmp_path / "rows")
    )
    assert from_array.predict(X) == pytest.approx(from_store.predict(X), abs=1e-5)


def test_compressed_classifier_keeps_calibration_and_can_be_saved(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kernel": "laplace", "metric": "none", "random_state": 0}
    model = sk.KernelClassifier(calibrate=True, **settings).fit(X[:600], LABELS[:600])
    small = sk.compress(model, X[600:], n_centers=100)
    assert np.abs(small.predict_proba(X) - model.predict_proba(X)).mean() < 0.1
    small.save(tmp_path / "small")
    loaded = sk.load(tmp_path / "small")
    assert np.array_equal(loaded.predict_proba(X), small.predict_proba(X))
    assert loaded.n_centers_ == 100
    assert small.score(X, LABELS) > model.score(X, LABELS) - 0.05


def test_compress_accepts_sparse_models() -> None:
    wide = sp.csr_array((600, 9000), dtype=np.float32).tolil()
    wide[:, 7::3000] = X[:600]  # 3 of the 9000 columns
    rows = sp.csr_array(wide)
    model = sk.KernelRegressor(random_state=0, kernel="gaussian").fit(rows[:300], Y[:300])
    small = sk.compress(model, rows[300:], n_centers=60)
    assert sp.issparse(small.centers_)
    assert np.corrcoef(small.predict(rows), model.predict(rows))[0, 1] > 0.99


def test_compress_accepts_log_scale_models() -> None:
    model = sk.KernelRegressor(random_state=0, target_transform="log", kernel="gaussian")
    model.fit(X[:400], np.exp(Y[:400]))
    small = sk.compress(model, X[400:], n_centers=100)
    assert np.corrcoef(small.predict(X), model.predict(X))[0, 1] > 0.99


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compress_respects_memory_budget(dtype: str) -> None:
    model = regressor(precision=dtype if dtype == "float64" else "exact")
    model.set_params(memory="8 MB")
    with pytest.raises(
        MemoryBudgetError, match=r"lower n_centers to 21., or raise memory="
    ) as caught:
        sk.compress(model, X[400:], n_centers=390)
    largest = int(str(caught.value).partition("lower n_centers to ")[2].partition(",")[0])
    with traced_memory() as traced:
        sk.compress(model, X[400:], n_centers=largest)
    assert 3e6 < traced.peak < 8e6  # the budget is used, and not exceeded
    small = sk.compress(model, X[400:], tolerance=0.01)
    assert max(n for n, _ in small.report_["compressed"]["curve"]) == largest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_centers": 10, "tolerance": 0.1}, "are both given; give one of them"),
        ({"n_centers": 400}, "must be smaller than the number of centers of the model, 400"),
        ({"tolerance": 2.0}, "must lie between 0 and 1"),
        ({"tolerance": "small"}, "must lie between 0 and 1"),
        ({"tolerance": 1e-9}, "raise tolerance="),
    ],
    ids=["both", "all centers", "tolerance above 1", "tolerance of text", "tiny tolerance"],
)
def test_compress_refuses_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sk.compress(regressor(), X[400:], **arguments)


def test_compress_refuses_unsuitable_models_and_rows() -> None:
    model = regressor()
    with pytest.raises(ConfigError, match=r"as many as X has rows.*more rows"):
        sk.compress(model, X[400:440], tolerance=1e-6)
    with pytest.raises(ConfigError, match="model is a str"):
        sk.compress("runs/first", X[400:])
    with pytest.raises(DataError, match="twice as many rows"):
        sk.compress(model, X[400:450], n_centers=100)
    with pytest.raises(DataError, match="are the same for all rows of X; give more rows"):
        sk.compress(model, np.tile(X[:1], (50, 1)), n_centers=10)
