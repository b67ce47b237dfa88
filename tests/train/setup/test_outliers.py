"""Test that outliers are replaced where the setup fits squares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from streamkern import KernelRegressor, Loss, load
from streamkern.rundir.run_log import read_log
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.log_reader import read_history
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup.outliers import BoundedTargets, find_outliers
from tests.runs import settings

_Floats = npt.NDArray[Any]


def draw_rows(n: int, seed: int = 0, share: float = 0.05) -> tuple[_Floats, _Floats, _Floats, Any]:
    """Return rows, noisy targets with outliers, the same without, and a mask of the outliers.

    Two of six features matter, so that a metric helps.
    """
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 6)).astype(np.float32)
    y = np.sin(3 * X[:, 0]) + X[:, 1] ** 2 + 0.05 * rng.standard_normal(n)
    is_outlier = rng.random(n) < share
    sign = rng.choice([-1.0, 1.0], n)
    return X, np.where(is_outlier, y + sign * rng.uniform(20, 60, n), y), y, is_outlier


class SmoothAbsoluteError(Loss):
    """Loss sqrt(1 + e^2) - 1, whose gradient is below 1."""

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        return errors / xp.sqrt(1 + errors * errors)

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        e = F.astype("float64") - Y
        return (xp.sqrt(1 + e * e) - 1).sum(axis=1)


def find_bounded_targets(
    X: _Floats, Y: _Floats, root: _Floats | None = None
) -> BoundedTargets | None:
    """Return the result of `find_outliers` for rows in a run with their data."""
    run = open_run(settings(**{"model.n_centers": 10}), RunInputs(ArraySource(X, Y)))
    with run.backend, run.backend.active():
        return find_outliers(run, SampleRows(X, Y, root), None)


@pytest.mark.parametrize("case", ["plain", "weighted", "equal rows"])
def test_outliers_are_replaced_near_truth(case: str) -> None:
    X, y_with_outliers, y, is_outlier = draw_rows(400)
    root = np.random.default_rng(2).uniform(0.5, 1.5, len(X)) if case == "weighted" else None
    if case == "weighted":
        assert root is not None
        root[:30] = 0
    if case == "equal rows":
        X[1::10], is_outlier[1::10] = X[::10], False
        y_with_outliers[1::10] = y[1::10] = y[::10]
    bounded = find_bounded_targets(X, y_with_outliers[:, None], root)
    assert bounded is not None
    assert bounded.share == pytest.approx(is_outlier.mean(), abs=0.02)
    Y = bounded.in_rows(SampleRows(X, y_with_outliers[:, None])).Y[:, 0]
    np.testing.assert_array_equal(Y[~is_outlier], y_with_outliers[~is_outlier])
    assert np.abs(Y - y)[is_outlier].max() < 2
    # Targets of other rows are bounded in the same way.
    fresh, y_with_outliers, y, is_outlier = draw_rows(2000, seed=1)
    Y = bounded.in_rows(SampleRows(fresh, y_with_outliers[:, None])).Y[:, 0]
    np.testing.assert_array_equal(Y[~is_outlier], y_with_outliers[~is_outlier])
    assert np.abs(Y - y)[is_outlier].max() < 2


def test_outliers_of_one_output_keep_other_outputs() -> None:
    X, y_with_outliers, y, is_outlier = draw_rows(400)
    bounded = find_bounded_targets(X, np.stack([y_with_outliers, y], axis=1))
    assert bounded is not None
    Y = bounded.in_rows(SampleRows(X, np.stack([y_with_outliers, y], axis=1))).Y
    np.testing.assert_array_equal(Y[:, 1], y)
    assert (Y[is_outlier, 0] != y_with_outliers[is_outlier]).all()


@pytest.mark.parametrize("noise", ["normal", "Student 3", "exponential"])
@pytest.mark.parametrize("seed", range(3))
def test_tails_of_common_noise_are_not_outliers(noise: str, seed: int) -> None:
    X, _, y, _ = draw_rows(400, seed)
    rng = np.random.default_rng(seed + 10)
    if noise == "Student 3":
        y = y + 0.3 * rng.standard_t(3, len(y))
    if noise == "exponential":
        y = y + rng.exponential(0.5, len(y))
    assert find_bounded_targets(X, y[:, None]) is None


def test_group_explained_by_features_is_not_outliers() -> None:
    """Check a twentieth of the rows with quite different targets, which their neighbours
    predict."""
    X, _, y, _ = draw_rows(500)
    group = X[:, 0] > 0.9
    X[group, 0] += 8
    assert find_bounded_targets(X, np.where(group, y - 40, y)[:, None]) is None


def test_few_rows_and_constant_targets_have_no_outliers() -> None:
    X, y_with_outliers, y, _ = draw_rows(20)
    assert find_bounded_targets(X, y_with_outliers[:, None]) is None
    X, _, y, _ = draw_rows(100)
    assert find_bounded_targets(X, np.ones_like(y)[:, None]) is None


@pytest.mark.parametrize("loss", ["huber", "quantile"])
def test_robust_loss_tolerates_outliers(loss: str) -> None:
    """Check the error with outliers, which would be 15 times as large if the setup fitted them."""
    X, y_with_outliers, y, _ = draw_rows(900)
    fresh, _, truth, _ = draw_rows(2000, seed=1, share=0)
    options: dict[str, Any] = {"loss": loss, "random_state": 0, "verbose": False}
    rmse = [
        float(np.sqrt(np.mean((model.predict(fresh) - truth) ** 2)))
        for model in (KernelRegressor(**options).fit(X, t) for t in (y, y_with_outliers))
    ]
    assert rmse[1] < 1.2 * rmse[0]


def test_run_records_outliers(tmp_path: Path) -> None:
    X, y_with_outliers, y, _ = draw_rows(600)
    for name, targets in (("with", y_with_outliers), ("without", y)):
        folder = tmp_path / name
        model = KernelRegressor(loss="huber", n_centers=200, run_dir=folder, verbose=False)
        model.fit(X, targets)
        share = [r["share"] for r in read_log(folder / "log.jsonl") if r["event"] == "outliers"]
        saved_report = load(folder).report_
        assert share == ([] if name == "without" else [saved_report["outliers"]])
        assert model.report_.get("outliers") == saved_report.get("outliers")
    assert saved_report.get("outliers") is None
    reported = [
        event.text for event in read_history(read_log(tmp_path / "with" / "log.jsonl")).events
    ]
    assert any("outliers" in text for text in reported)


def test_squared_error_keeps_outliers() -> None:
    X, y_with_outliers, _, _ = draw_rows(600)
    model = KernelRegressor(n_centers=200, verbose=False).fit(X, y_with_outliers)
    assert "outliers" not in model.report_


@pytest.mark.parametrize("robust", [True, False])
def test_user_loss_declares_robustness(robust: bool) -> None:
    kind = type("Own", (SmoothAbsoluteError,), {"robust": robust, "__module__": __name__})
    X, y_with_outliers, _, _ = draw_rows(400)
    model = KernelRegressor(loss=kind(), n_centers=100, verbose=False).fit(X, y_with_outliers)
    assert ("outliers" in model.report_) is robust
