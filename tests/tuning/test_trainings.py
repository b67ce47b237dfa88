"""Check the trainings of a search: with other losses than squares, diverging, and stopped."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern
import streamkern as sk
from streamkern.basics.stop import Stopped, StopRequest
from streamkern.config.run_config import RunConfig
from streamkern.train.train import train
from streamkern.tuning import trainings
from streamkern.tuning.search import search_settings
from tests.losses.own_losses import Distance, LogCosh
from tests.runs import array_source, settings
from tests.searches import OPEN_SETTINGS, QUICK, config

N = 240
RNG = np.random.default_rng(2)
X = RNG.standard_normal((N, 2)).astype(np.float32)
Y = np.sin(2 * X[:, 0]) + 0.3 * np.exp(X[:, 1] / 2) * RNG.standard_normal(N)
LABELS = np.where(X[:, 0] * X[:, 1] + 0.5 * RNG.standard_normal(N) > 0, "up", "down")
SMALL: dict[str, Any] = {
    "rows": 200, "centers": 30, "epochs": 1, "refine": 0, "bandwidths": [1.0, 4.0],
    "ridges": [1e-3],
}  # fmt: skip


def plain_regressor(loss: Any = "squared_error", **parameters: Any) -> sk.KernelRegressor:
    """Return a regressor with the Laplace kernel and without a metric."""
    return sk.KernelRegressor("laplace", loss=loss, metric="none", **parameters)


@pytest.mark.parametrize(
    ("estimator", "figure"),
    [
        (plain_regressor("quantile", quantile=0.9), "pinball_loss"),
        (plain_regressor("quantile", quantile=[0.1, 0.5, 0.9]), "pinball_loss"),
        (plain_regressor("absolute_error"), "mae"),
        (plain_regressor("huber"), "huber_loss"),
        (plain_regressor(Distance), "loss"),
        (plain_regressor(LogCosh(0.5)), "log_cosh"),
        (sk.KernelClassifier("laplace", loss="log_loss", metric="none"), "log_loss"),
        (sk.KernelClassifier("laplace", loss="squared_hinge", metric="none"), "squared_hinge"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loss_metric_decides(estimator: Any, figure: str) -> None:
    y = LABELS if isinstance(estimator, sk.KernelClassifier) else Y
    tuned = sk.tune(X, y, estimator=estimator, **SMALL)
    assert tuned.metric == figure
    figures = [row[f"held_out_{figure}"] for row in tuned.table]
    assert figures[1:] == sorted(figures[1:])
    assert min(figures) > 0
    assert len(figures) == 3


def test_another_metric_can_be_requested() -> None:
    for metric in ("mse", "r2", "pinball_loss"):
        tuned = sk.tune(X, Y, estimator=plain_regressor("quantile"), metric=metric, **SMALL)
        assert tuned.metric == metric
    with pytest.raises(sk.ConfigError, match=r"metric='pinball_loss' is not known; take \"auto\""):
        sk.tune(X, Y, estimator=plain_regressor(), metric="pinball_loss", **SMALL)
    assert sk.tune(X, Y, estimator=plain_regressor(), **SMALL).metric == "mse"


def test_all_trials_use_one_huber_loss(tmp_path: Path) -> None:
    """Check that delta is the same for all, because a smaller delta makes every loss smaller."""
    records: list[dict[str, Any]] = []
    options = SMALL | {
        "estimator": plain_regressor("huber"),
        "out": tmp_path / "search",
        "folds": 2,
    }

    def report(event: str, fields: dict[str, Any]) -> None:
        records.append(fields)

    pytest.importorskip("optuna")
    tuned = sk.tune(X, Y, report=report, **options)
    assert all("loss_parameters" not in fields for fields in records)
    journal = (tmp_path / "search" / "journal.log").read_text()
    widths = re.findall(r"delta\W+([\d.]+)", journal)
    assert (len(widths), len(set(widths))) == (6, 1)
    # The same search again trains nothing, and another bandwidth is judged by the same delta.
    repeated = sk.tune(X, Y, **options)
    assert repeated.table == tuned.table
    more = sk.tune(X, Y, **options | {"bandwidths": [1.0, 2.0, 4.0]})
    losses = {(row["bandwidth"], row["held_out_huber_loss"]) for row in more.table}
    assert {(row["bandwidth"], row["held_out_huber_loss"]) for row in tuned.table} <= losses


def test_search_refuses_changed_user_loss(tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    def search(factor: float) -> Any:
        class Mine(LogCosh):
            def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
                return factor * super().gradient(xp, errors, Y)

            def values(self, xp: Any, F: Any, Y: Any) -> Any:
                return factor * super().values(xp, F, Y)

        return sk.tune(X, Y, estimator=plain_regressor(Mine()), out=tmp_path / "search", **SMALL)

    assert search(0.5).table == search(0.5).table
    with pytest.raises(sk.ResumeMismatchError, match=r"loss\.values"):
        search(0.4)


def test_signal_during_a_trial_is_handled_at_next_step(tmp_path: Path) -> None:
    """Check the path from the caller's request to the loop of a run that saves nothing."""
    stop, steps = StopRequest(install=False), list[int]()

    def request_stop(record: dict[str, Any]) -> None:
        steps.append(record["step"])
        stop.requested_by = "SIGTERM" if record["step"] == 3 else None

    run = settings(**{"run.evaluate_every": 1})
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        train(
            run, source=array_source(), test=array_source(9), on_evaluation=request_stop, stop=stop
        )
    assert steps == [1, 2, 3]


def test_diverging_candidate_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a training diverge, because none does here by itself."""
    real_train = trainings.train

    def train_or_diverge(one: RunConfig, **options: Any) -> Any:
        """Train, but raise DivergenceError for the bandwidth 3."""
        if one.model.bandwidth == 3.0:
            raise streamkern.DivergenceError("made to")
        return real_train(one, **options)

    monkeypatch.setattr(trainings, "train", train_or_diverge)
    tuned = search_settings(config(), **QUICK, source=array_source())
    assert (tuned.table[-1]["bandwidth"], tuned.table[-1]["held_out_mse"]) == (3.0, None)
    with pytest.raises(streamkern.DivergenceError, match="every candidate diverged"):
        search_settings(config(), **QUICK | {"bandwidths": [3.0]}, source=array_source())


def test_non_finite_error_is_divergence_with_bandwidth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that the bandwidth is the middle one of the grid."""
    real = trainings.train

    def overflowing(one: RunConfig, **options: Any) -> Any:
        result = real(one, **options)
        if one.model.bandwidth == "median":
            result.metrics["test_mse"] = math.inf
        return result

    monkeypatch.setattr(trainings, "train", overflowing)
    options: dict[str, Any] = {"ridges": [0.0], "refine": 0, "epochs": 1}
    tuned = search_settings(config(**OPEN_SETTINGS), source=array_source(), **options)
    assert len(tuned.table) == 6
    diverged_row = tuned.table[-1]
    assert (diverged_row["held_out_mse"], diverged_row["as_given"]) == (None, False)
    widths = sorted(row["bandwidth"] for row in tuned.table if not row["as_given"])
    assert widths[2] == diverged_row["bandwidth"]
