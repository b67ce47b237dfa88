"""Check calibration in runs: its rows, its leave-one-out predictions, and resumed runs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import DataError, TrainingInterrupted
from streamkern.config.run_config import RunConfig
from streamkern.predict.calibration import Calibration
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.split import TO_CALIBRATE, split_rows
from streamkern.train.loop import step_loop
from streamkern.train.model.calibrating import calibrate, leave_one_out_predictions
from streamkern.train.resolve import problem_shape
from streamkern.train.saved_model import load_model
from streamkern.train.train import train
from tests import reference as ref
from tests.runs import newest

rng = np.random.default_rng(0)
X = rng.normal(size=(600, 3)).astype(np.float32)
LABELS = (X[:, 0] * X[:, 1] + 0.3 * rng.normal(size=600) > 0).astype(np.int64)
Y = np.stack((X[:, 0] * 50 + 300, np.sin(X[:, 1])), axis=1) + 0.1 * rng.normal(size=(600, 2))
SETTINGS: dict[str, Any] = {
    "run.calibrate": True, "run.threads": 1, "run.accelerator": "none", "model.n_centers": 60,
    "model.kernel": "laplace", "model.bandwidth": 2.0, "data.epochs": 2, "data.batch_size": 50,
    "solver.name": "block",
}  # fmt: skip


def settings(run_dir: Path | None = None, **changes: Any) -> RunConfig:
    """Return the settings of a run with calibration."""
    location = {} if run_dir is None else {"run.run_dir": str(run_dir)}
    return RunConfig().with_overrides(SETTINGS | location | changes)


def rows(part: slice, *, classes: bool = True, w: Any = None) -> ArraySource:
    """Return a part of the rows, with classes or values."""
    if classes:
        return ArraySource(X[part], LABELS[part], classes=("a", "b"), sample_weight=w)
    return ArraySource(X[part], Y[part], sample_weight=w)


def arrays(run_dir: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the newest checkpoint."""
    return {name: np.asarray(a) for name, a in newest(run_dir).arrays.items()}


@pytest.mark.parametrize("classes", [True, False])
def test_run_killed_during_calibration_resumes(
    classes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_source = rows(slice(500), classes=classes)
    test_source = rows(slice(500, 600), classes=classes)
    uninterrupted = train(settings(tmp_path / "a"), source=training_source, test=test_source)

    def interrupt_and_calibrate(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return calibrate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(step_loop, "calibrate", interrupt_and_calibrate)
        with pytest.raises(TrainingInterrupted):
            train(settings(tmp_path / "b"), source=training_source, test=test_source)
    assert not [name for name in arrays(tmp_path / "b") if name.startswith("calibration")]
    resumed = train(settings(tmp_path / "b"), source=training_source, test=test_source)
    assert resumed.metrics == uninterrupted.metrics
    expected, actual = arrays(tmp_path / "a"), arrays(tmp_path / "b")
    assert expected.keys() == actual.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)
    model = load_model(tmp_path / "b", device="cpu")
    with model.backend:
        assert model.evaluate(test_source) == {k[5:]: v for k, v in uninterrupted.metrics.items()}
        assert model.calibration is not None
        half_width = model.calibration.intervals.score_quantile(0.9)
    if not classes:  # intervals have the unit of the targets; the first has a deviation of 50
        assert 0.1 < half_width[0] / 50 < 1
    for result in (uninterrupted, resumed):
        result.model.backend.close()


def test_calibration_rows_are_not_used_for_training_or_stopping() -> None:
    """Check that other targets of these rows change the calibration, and not the weights."""
    early_stopping = {"run.early_stopping": True, "data.epochs": 3}
    training_source = rows(slice(600), classes=False)
    _, held_out = split_rows(training_source, 0.1, 0, TO_CALIBRATE)
    held_out_rows = np.concatenate([block.X for block in held_out.blocks()])
    is_held_out = (X[:, None] == held_out_rows).all(axis=2).any(axis=1)
    assert is_held_out.sum() == 60
    exchanged = Y.copy()
    exchanged[is_held_out] = exchanged[is_held_out][::-1]  # so that the mean target stays
    results = [train(settings(), source=ArraySource(X, targets)) for targets in (Y, exchanged)]
    weights = [result.model.weights for result in results]
    np.testing.assert_allclose(weights[0], weights[1], atol=1e-5)
    calibrations = [result.model.calibration for result in results]
    assert calibrations[0] is not None
    assert calibrations[1] is not None
    assert (
        calibrations[1].intervals.score_quantile(0.9)[0]
        > 3 * calibrations[0].intervals.score_quantile(0.9)[0]
    )
    stopped_early = train(settings(**early_stopping), source=training_source)
    # Of 600 rows, 60 calibrate, and a tenth of the others decides when to stop.
    assert stopped_early.samples == 3 * (600 - 60 - 54)
    for result in (*results, stopped_early):
        result.model.backend.close()


def test_zero_weight_rows_are_ignored() -> None:
    w = np.ones(600)
    w[::2] = 0
    result = train(settings(), source=rows(slice(600), w=w))
    assert result.model.calibration is not None
    assert 0 < len(result.model.calibration.intervals.scores) < 60
    with pytest.raises(DataError, match="set aside by calibrate have sample weight 0"):
        calibrate(result.model, rows(slice(600), w=np.zeros(600)))
    result.model.backend.close()


@pytest.mark.parametrize("solver", ["direct", "falkon", "block"])
@pytest.mark.parametrize("weighted", [False, True])
def test_few_rows_are_calibrated_by_leave_one_out(solver: str, weighted: bool) -> None:
    """Compare with a dense fit without each row, at the minimum; "block" only approaches it."""
    n = 90
    w = np.random.default_rng(1).integers(1, 4, n).astype(float) if weighted else None
    few = {"run.calibrate": "auto", "run.precision": "float64", "data.scale": "none"}
    ridge, balanced = {"solver.ridge": 1e-3}, {"data.class_weight": "balanced"}
    run_settings = settings(**SETTINGS | few | ridge | (balanced if weighted else {}))
    run_settings = run_settings.with_overrides(
        {"solver.name": solver, "data.epochs": 60, "model.n_centers": 30}
    )
    result = train(run_settings, source=rows(slice(n), w=w))
    actual, targets = result.model.calibration, result.model.targets
    assert actual is not None
    Y = (np.eye(2)[LABELS[:n]] - targets.mean) / targets.scale
    row_weights = np.ones(n)
    if w is not None:  # times the balanced class weights
        sums = np.bincount(LABELS[:n], w)
        row_weights = w * (sums.sum() / 2 / sums)[LABELS[:n]]
        row_weights = row_weights / row_weights.mean()
    K, norm = ref.laplace(X[:n], result.Z, 2.0), ref.laplace(result.Z, result.Z, 2.0)
    F = np.empty((n, 2))
    for i in range(n):
        other_rows = np.delete(np.arange(n), i)
        centers = (X[i] != result.Z).any(axis=1)  # without row i, if it is one
        G, v = K[np.ix_(other_rows, centers)], row_weights[other_rows, None]
        A = G.T @ (v * G) / n + 1e-3 * norm[np.ix_(centers, centers)]
        F[i] = K[i, centers] @ np.linalg.solve(A, G.T @ (v * Y[other_rows]) / n)
    F = F * targets.scale + targets.mean
    expected = Calibration.fit_to_classes(F, LABELS[:n], w, np.arange(n))
    np.testing.assert_allclose(actual.intervals.scores, expected.intervals.scores, atol=1e-5)
    np.testing.assert_allclose(actual.probabilities(F), expected.probabilities(F), atol=1e-5)
    result.model.backend.close()


@pytest.mark.parametrize("has_record", [True, False])
def test_setup_without_leave_one_out_record_has_no_probabilities(
    has_record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a run of an earlier version without this record, which ends without probabilities."""
    auto = {"run.calibrate": "auto"}

    def interrupt_and_predict(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return leave_one_out_predictions(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(step_loop, "leave_one_out_predictions", interrupt_and_predict)
        if not has_record:
            patch.setattr(problem_shape, "plans_left_out", lambda *_: False)
        ends = pytest.raises(TrainingInterrupted) if has_record else contextlib.nullcontext()
        with ends:
            train(settings(tmp_path / "a", **auto), source=rows(slice(500)))
    resumed = train(settings(tmp_path / "a", **auto), source=rows(slice(500)))
    assert (resumed.model.calibration is not None) == has_record
    if has_record:
        full = train(settings(**auto), source=rows(slice(500)))
        assert resumed.model.calibration is not None
        assert full.model.calibration is not None
        np.testing.assert_array_equal(
            resumed.model.calibration.intervals.scores, full.model.calibration.intervals.scores
        )
        full.model.backend.close()
    resumed.model.backend.close()
