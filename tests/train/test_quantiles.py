"""Test several quantiles of one target: their fit, order, calibration and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import mean_pinball_loss

import streamkern as sk
from streamkern.basics.errors import ConfigError
from tests.runs import assert_resume_gives_same_bits

LEVELS = [0.05, 0.5, 0.95]
RNG = np.random.default_rng(7)
X = RNG.uniform(-2, 2, (3000, 2)).astype(np.float32)
Y = np.sin(2 * X[:, 0]) + np.exp(0.5 * X[:, 1]) * RNG.standard_normal(len(X))
FIT, HELD_OUT = slice(2000), slice(2000, 3000)
OPTIONS: dict[str, Any] = {
    "loss": "quantile", "n_centers": 100, "kernel": "gaussian", "bandwidth": 1.0, "metric": "none",
}  # fmt: skip


def model(**options: Any) -> sk.KernelRegressor:
    """Return an estimator of the three quantiles."""
    return sk.KernelRegressor(**OPTIONS | {"quantile": LEVELS} | options)


@pytest.fixture(scope="module")
def fitted() -> sk.KernelRegressor:
    """Return a model of the three quantiles."""
    return model().fit(X[FIT], Y[FIT])


@pytest.fixture(scope="module")
def calibrated() -> sk.KernelRegressor:
    """Return a calibrated model of the three quantiles."""
    return model(calibrate=True, epochs=3).fit(X[FIT], Y[FIT])


def pinball(F: Any, q: float) -> float:
    """Return the mean pinball loss of the held-out rows, by scikit-learn."""
    return float(mean_pinball_loss(Y[HELD_OUT], F, alpha=q))


@pytest.mark.slow
def test_each_quantile_equals_separate_model(fitted: sk.KernelRegressor) -> None:
    F = fitted.predict(X[HELD_OUT])
    assert F.shape == (1000, 3)
    for k, q in enumerate(LEVELS):
        single_model = sk.KernelRegressor(**OPTIONS, quantile=q).fit(X[FIT], Y[FIT])
        assert pinball(F[:, k], q) < 1.03 * pinball(single_model.predict(X[HELD_OUT]), q)


def test_quantiles_never_cross(fitted: sk.KernelRegressor) -> None:
    """Check also rows far away from the data."""
    everywhere = RNG.uniform(-9, 9, (5000, 2)).astype(np.float32)
    assert (np.diff(fitted.predict(everywhere), axis=1) >= 0).all()


def test_calibrated_interval_has_coverage(calibrated: sk.KernelRegressor) -> None:
    values, ends = calibrated.predict(X[HELD_OUT], interval=0.9)
    assert values.shape == (1000, 3)
    assert np.array_equal(ends, values[:, [0, 2]])
    is_inside = (ends[:, 0] <= Y[HELD_OUT]) & (Y[HELD_OUT] <= ends[:, 1])
    assert is_inside.mean() == pytest.approx(0.9, abs=0.05)  # 200 rows were set aside
    figures = calibrated._evaluate(X[HELD_OUT], Y[HELD_OUT])
    assert figures["coverage"] == pytest.approx(is_inside.mean())
    assert figures["width"] == pytest.approx((ends[:, 1] - ends[:, 0]).mean())
    losses = [pinball(values[:, k], q) for k, q in enumerate(LEVELS)]
    assert figures["pinball_loss"] == pytest.approx(np.mean(losses))


def test_intercept_includes_shifts(calibrated: sk.KernelRegressor) -> None:
    with calibrated._model() as kernel_model:
        kernel_model.calibration = kernel_model.loss = None  # they shift and sort the outputs
        plain = kernel_model.values(X) - kernel_model.targets.mean
    assert calibrated.predict(X) == pytest.approx(np.sort(plain + calibrated.intercept_, axis=1))


def test_single_quantile_is_calibrated() -> None:
    single_model = model(
        quantile=0.9, calibrate=True, epochs=1, n_centers=20, bandwidth="auto"
    ).fit(X[FIT], Y[FIT])
    assert (Y[HELD_OUT] <= single_model.predict(X[HELD_OUT])).mean() == pytest.approx(0.9, abs=0.05)
    with pytest.raises(ConfigError, match=r"the model was trained for 0\.9; train it with both"):
        single_model.predict(X, interval=0.9)


def test_too_few_rows_leave_quantile_uncalibrated() -> None:
    few = model(quantile=[0.01, 0.5], calibrate=True, epochs=1)
    with pytest.warns(
        UserWarning, match="quantile 0.01 is not calibrated, because 30 calibration rows"
    ):
        few.fit(X[:300], Y[:300])
    shifts = few.report_["calibration"]["shifts"]
    assert shifts[0] == 0
    assert shifts[1] != 0


@pytest.mark.parametrize("location", ["fitted", "calibrated"])
def test_saved_model_predicts_the_same(
    location: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    trained = request.getfixturevalue(location)
    trained.save(tmp_path / "model")
    loaded = sk.load(tmp_path / "model")
    assert np.array_equal(loaded.predict(X), trained.predict(X))
    assert np.array_equal(loaded.predict(X, interval=0.9)[1], trained.predict(X, interval=0.9)[1])


def test_tables_name_the_quantiles(fitted: sk.KernelRegressor, tmp_path: Path) -> None:
    fitted.predict(X[:5], out=tmp_path / "answers.csv", interval=0.9)
    head = (tmp_path / "answers.csv").read_text().splitlines()[0]
    assert head == "row,value_q0.05,value_q0.5,value_q0.95,interval_low,interval_high"
    frame = sk.KernelRegressor().set_output(predict="pandas")
    frame._fitted_ = fitted._fitted_
    assert list(frame.predict(X[:2]).columns) == ["value_q0.05", "value_q0.5", "value_q0.95"]


def test_subset_of_quantiles_can_be_predicted(fitted: sk.KernelRegressor) -> None:
    F = fitted.predict(X[:5])
    assert np.array_equal(fitted.predict(X[:5], quantiles=[0.95, 0.5]), F[:, [2, 1]])
    with pytest.raises(ConfigError, match="must be among the quantiles that the model was"):
        fitted.predict(X, quantiles=[0.9])


def test_list_of_one_quantile_is_one_column() -> None:
    one = model(quantile=[0.5], epochs=1, n_centers=20).fit(X[FIT], Y[FIT])
    assert one.predict(X).shape == (3000, 1)


@pytest.mark.slow
def test_rows_may_come_from_a_store(tmp_path: Path) -> None:
    store = str(tmp_path / "rows.zarr")
    sk.ingest_store(X[FIT], store, y=Y[FIT])
    trained = model(epochs=1, n_centers=20).fit(store)
    assert trained.predict(store).shape == (2000, 3)
    assert trained._evaluate(store)["coverage"] > 0.7


def test_killed_run_ends_with_same_bits(tmp_path: Path) -> None:
    overrides = {"solver.name": "block", "model.loss": "quantile", "model.quantile": LEVELS}
    assert_resume_gives_same_bits(tmp_path, (3,), overrides, sk.ArraySource(X[:200], Y[:200]))


@pytest.mark.slow
def test_continued_run_keeps_quantiles(tmp_path: Path) -> None:
    """Check that a continued run and a warm start begin with the same outputs, and improve them."""
    path = str(tmp_path / "run")
    first = model(epochs=1, n_centers=50, run_dir=path).fit(X[FIT], Y[FIT])
    warm = model(epochs=2, n_centers=50, warm_start=path).fit(X[FIT], Y[FIT])
    before, after = (fit._evaluate(X[FIT], Y[FIT])["pinball_loss"] for fit in (first, warm))
    assert after < before
    blocks = model(epochs=1, n_centers=50, ridge=1e-6).partial_fit(X[:1000], Y[:1000])
    assert blocks.partial_fit(X[1000:2000], Y[1000:2000]).predict(X).shape == (3000, 3)


def test_several_expectiles_are_supported() -> None:
    trained = model(loss="expectile", epochs=2).fit(X[FIT], Y[FIT])
    F = trained.predict(X[HELD_OUT])
    assert (np.diff(F, axis=1) >= 0).all()
    errors = Y[HELD_OUT, None] - F
    weights = np.abs((errors < 0) - np.array(LEVELS))
    # The gradient of the expectile loss is 0 at its minimum.
    assert (weights * errors).mean(axis=0) == pytest.approx(np.zeros(3), abs=0.05)


def test_unsupported_combinations_are_refused(fitted: sk.KernelRegressor) -> None:
    with pytest.raises(ConfigError, match="several quantiles, which are for a single target"):
        model().fit(X, np.column_stack([Y, Y]))
    with pytest.raises(ConfigError, match="increasing list of such numbers"):
        model(quantile=[0.9, 0.1]).fit(X, Y)
    with pytest.raises(ConfigError, match="score is R2"):
        fitted.score(X, Y)
    with pytest.raises(ConfigError, match="whose intervals already vary in width"):
        fitted.predict(X, interval=0.9, normalised=True)
    with pytest.raises(ConfigError, match=r"needs the quantiles 0\.1 and 0\.9"):
        fitted.predict(X, interval=0.8)
