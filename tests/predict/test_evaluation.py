"""Compare metrics with scikit-learn, and with each other in all places that show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, mean_squared_error, r2_score

import streamkern as sk
from streamkern.backend.devices import get_backend
from streamkern.cli.run_info import run_overview, run_text
from streamkern.predict.calibration import Calibration
from streamkern.predict.evaluation import (
    CalibratedFigures,
    EvaluationMetrics,
    format_metrics,
    with_data_prefix,
)
from streamkern.rundir.run_log import read_log
from streamkern.stream.sources.arrays import ArraySource
from tests.runs import array_source, finished, settings, stream

rng = np.random.default_rng(2)


def metrics_of(F: Any, Y: Any, w: Any = None, *, classes: bool = False, parts: int = 3) -> Any:
    """Return the metrics of outputs F, which are added in several parts."""
    with get_backend("cpu", 1) as backend:
        sums = EvaluationMetrics(backend, Y.shape[1], classes)
        for rows in np.array_split(np.arange(len(Y)), parts):
            sums.add(F[rows], Y[rows], None if w is None else w[rows])
        return sums.result()


@pytest.mark.parametrize("offset", [0.0, 1e6, -1e9])
@pytest.mark.parametrize("weighted", [False, True])
def test_r2_and_mse_equal_scikit_learn(offset: float, weighted: bool) -> None:
    """Check the mean over the outputs, with weights, and for targets far from 0."""
    Y = rng.standard_normal((200, 3)) * [1, 10, 0.1] + offset
    F = Y + rng.standard_normal(Y.shape) * [0.3, 5, 0.02]
    w = rng.uniform(0, 2, 200).astype(np.float32) if weighted else None
    metrics = metrics_of(F, Y, w)
    assert metrics["mse"] == pytest.approx(mean_squared_error(Y, F, sample_weight=w), rel=1e-9)
    assert metrics["r2"] == pytest.approx(r2_score(Y, F, sample_weight=w), rel=1e-7)


def test_r2_of_constant_output_equals_scikit_learn() -> None:
    Y = np.column_stack([np.full(20, 7.0), rng.standard_normal(20)])
    F = Y + np.array([0, 0.1])
    assert metrics_of(F, Y)["r2"] == pytest.approx(r2_score(Y, F))
    F = Y + np.array([1, 0.1])
    assert metrics_of(F, Y)["r2"] == pytest.approx(r2_score(Y, F))


@pytest.mark.parametrize("weighted", [False, True])
def test_accuracy_equals_scikit_learn(weighted: bool) -> None:
    y, F = rng.integers(0, 4, 300), rng.standard_normal((300, 4))
    w = rng.uniform(0, 2, 300).astype(np.float32) if weighted else None
    metrics = metrics_of(F, np.eye(4)[y], w, classes=True)
    expected = accuracy_score(y, F.argmax(axis=1), sample_weight=w)
    assert metrics["accuracy"] == pytest.approx(expected, rel=1e-6)


def test_formatted_metrics_name_the_data_once() -> None:
    assert (
        format_metrics(with_data_prefix("test", {"mse": 0.25, "r2": 0.5}))
        == "test mse 0.25, R2 0.5"
    )
    assert format_metrics({"held_out_mse": 1.0}) == "held out mse 1"


def test_metrics_of_test_data_agree_in_every_output(tmp_path: Path) -> None:
    """Compare history, report, log, info and evaluate, for values and for classes."""
    X = rng.standard_normal((120, 3))
    Y = np.column_stack([X[:, 0] ** 2, 100 * X[:, 1]])
    test = (X[80:], Y[80:])
    model = sk.KernelRegressor(epochs=2, threads=1, run_dir=tmp_path / "run")
    model.fit(X[:80], Y[:80], test=test)
    F = model.predict(test[0])
    expected = {"test_mse": mean_squared_error(test[1], F), "test_r2": r2_score(test[1], F)}
    logged = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "evaluation"]
    for figures in (model.report_, model.history_[-1], logged[-1]):
        assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    shown = run_overview(tmp_path / "run")
    assert shown["metrics"] == pytest.approx(expected, rel=1e-5)
    assert "test_r2" in run_text(shown)
    assert model.score(*test) == pytest.approx(expected["test_r2"], rel=1e-6)
    assert model.score(ArraySource(*test)) == pytest.approx(expected["test_r2"], rel=1e-5)


def test_history_of_classifier_has_accuracy() -> None:
    result = finished(settings(), source=stream(), test=array_source(30, 5))
    assert result.metrics.keys() == {"test_mse", "test_accuracy"}


def random_classes(m: int, c: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random outputs (m, c), labels (m,) that agree with many of them, and weights (m,)."""
    F = rng.normal(0.3, 0.4, (m, c)).astype(np.float32)
    labels = (F + rng.normal(0, 0.3, (m, c))).argmax(axis=1)
    return F, labels, rng.uniform(0, 2, m)


@pytest.mark.parametrize("c", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_calibrated_class_figures_equal_reference(c: int, weighted: bool) -> None:
    F, labels, w = random_classes(600, c)
    calibration = Calibration.fit_to_classes(F[:300], labels[:300], w[:300] if weighted else None)
    assert calibration.probabilities is not None
    figures = CalibratedFigures(calibration)
    for part in (slice(300, 450), slice(450, 600)):
        figures.add(F[part], np.eye(c)[labels[part]], w[part] if weighted else None)
    metrics, labels = figures.result(), labels[300:]
    w = w[300:] if weighted else np.ones(300)
    p = calibration.probabilities(F[300:])
    assert metrics["log_loss"] == pytest.approx(
        log_loss(labels, p, sample_weight=w, labels=range(c))
    )
    squares = ((p - np.eye(c)[labels]) ** 2).sum(axis=1)
    expected = float(np.average(squares, weights=w))
    if c == 2:
        expected = brier_score_loss(labels, p[:, 1], sample_weight=w)
    assert metrics["brier"] == pytest.approx(expected)
    largest, is_correct = p.max(axis=1), p.argmax(axis=1) == labels
    bins = [(largest >= k / 15) & (largest < (k + 1) / 15 + (k == 14)) for k in range(15)]
    ece = sum(abs((w * (largest - is_correct))[in_bin].sum()) for in_bin in bins) / w.sum()
    assert metrics["ece"] == pytest.approx(ece)
    sets = calibration.intervals.prediction_sets(F[300:], 0.9)
    assert metrics["set_size"] == pytest.approx(np.average(sets.sum(axis=1), weights=w))
    assert 0.8 < metrics["coverage"] <= 1


def test_calibrated_value_figures_equal_reference() -> None:
    F = rng.normal(size=(4000, 2))
    Y = F + rng.normal(size=(4000, 2)) * [1, 3]
    calibration = Calibration.fit_to_values(F[:2000], Y[:2000], None)
    figures = CalibratedFigures(calibration)
    figures.add(F[2000:], Y[2000:], None)
    metrics = figures.result()
    assert metrics["coverage"] == pytest.approx(0.9, abs=0.02)
    assert metrics["width"] == pytest.approx(2 * 1.645 * 2, rel=0.05)  # of normal noise
    of_five_rows = CalibratedFigures(Calibration.fit_to_values(F[:5], Y[:5], None))
    of_five_rows.add(F, Y, None)
    assert of_five_rows.result() == {}  # five rows are too few for intervals of 90 %
