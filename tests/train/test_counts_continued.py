"""Check continued runs, partial_fit and warm starts with losses that have a log link."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.train.log_reader import read_history
from tests.counts import DEVIANCES, LOSSES, TARGETS, N, P, X, excess_over_minimum, of_loss
from tests.runs import assert_resume_gives_same_bits, finished, lost, settings

OPTIONS: dict[str, Any] = {
    "n_centers": P, "kernel": "laplace", "bandwidth": 3.0, "metric": "none", "scale": "none",
    "precision": "float64", "threads": 1, "solver": "block",
}  # fmt: skip


# The last steps of so few rows are discarded, in both runs.
@pytest.mark.filterwarnings("ignore:training diverged in its last")
@pytest.mark.parametrize("name", LOSSES)
def test_killed_continuation_ends_with_same_bits(name: str, tmp_path: Path) -> None:
    rows, options = sk.ArraySource(X, TARGETS[name]), {"continues": tmp_path / "old"}
    run = of_loss(name)
    finished(settings(tmp_path / "old", **run), source=rows)
    assert_resume_gives_same_bits(tmp_path, (5,), run, rows, **options)


@pytest.mark.parametrize("name", LOSSES)
def test_continued_run_starts_with_old_function_and_unit(name: str, tmp_path: Path) -> None:
    """Check rows whose mean target is 100 times as large, which the run then learns."""
    run = of_loss(name, **{"data.epochs": 20})
    rows = sk.ArraySource(X[:60], 100 * TARGETS[name][:60])
    source = sk.ArraySource(X, TARGETS[name])
    before = finished(settings(tmp_path / "old", **run), source=source)
    predictions = before.model.predict(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamkern.train.loop.step_loop.StepLoop.take", lost)
        with pytest.raises(ValueError, match="the process is gone"):
            finished(settings(tmp_path / "new", **run), source=rows, continues=tmp_path / "old")
    np.testing.assert_array_equal(sk.load(tmp_path / "new").predict(X)[:, None], predictions)
    after = finished(settings(tmp_path / "new", **run), source=rows, continues=tmp_path / "old")
    assert after.meta["setup"]["loss"] == before.meta["setup"]["loss"]
    ratio = after.model.predict(rows).mean() / before.model.predict(rows).mean()
    assert 10 < ratio < 200  # the targets are 100 times as large; the run has 20 epochs


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_partial_fit_approaches_minimum_of_penalised_loss(name: str) -> None:
    """Check the loss of all rows, which arrive in four parts again and again."""
    model = sk.KernelRegressor(loss=name, ridge=1e-2, batch_size=50, average=False, **OPTIONS)
    for part in 20 * [slice(k, None, 4) for k in range(4)]:
        model.partial_fit(X[part], TARGETS[name][part])
    with model._model() as kernel_model:
        Z, alpha = np.float64(model.centers_), model.dual_coef_
        assert -1e-7 <= excess_over_minimum(kernel_model, Z, alpha, TARGETS[name][:, None]) <= 0.05


def test_zero_block_is_refused_first_and_learned_later() -> None:
    counts = TARGETS["poisson"]
    model = sk.KernelRegressor(loss="poisson", **OPTIONS)
    with pytest.raises(sk.DataError, match="the mean of target 0 is 0"):
        model.partial_fit(X, np.zeros(N))
    model.partial_fit(X, counts)
    before = model.predict(X)
    for _ in range(5):
        model.partial_fit(X, np.zeros(N))
    assert model.predict(X).mean() < 0.5 * before.mean()
    with pytest.raises(sk.DataError, match="row 3 has -1"):
        model.partial_fit(X, np.where(np.arange(N) == 3, -1.0, counts))


def test_partial_fit_continues_saved_run(tmp_path: Path) -> None:
    y = TARGETS["poisson"]
    finished(settings(tmp_path / "run", **of_loss("poisson")), source=sk.ArraySource(X, y))
    model = sk.load(tmp_path / "run")
    before = model.predict(X)
    after = model.partial_fit(X, y).predict(X)
    assert 0 < np.abs(np.log(after / before)).max() < 0.5


@pytest.mark.parametrize("name", LOSSES)
def test_warm_start_continues_previous_fit(name: str) -> None:
    y, model = TARGETS[name], sk.KernelRegressor(loss=name, warm_start=True, ridge=1e-2, **OPTIONS)
    deviances = [DEVIANCES[name](y, model.fit(X, y).predict(X)) for _ in range(4)]
    assert max(deviances[1:]) < 1.01 * deviances[0]


def test_weights_of_squared_error_are_refused(tmp_path: Path) -> None:
    y = TARGETS["poisson"]
    model = sk.KernelRegressor(target_transform="none", warm_start=True, **OPTIONS)
    before = model.fit(X, y).predict(X)
    with pytest.raises(sk.ConfigError, match="minimised squares, whose weights predict values"):
        model.set_params(loss="poisson").fit(X, y)
    np.testing.assert_array_equal(model.predict(X), before)


@pytest.mark.parametrize("outliers", [False, True])
def test_fit_with_two_kernel_choices_logs_one_process(outliers: bool, tmp_path: Path) -> None:
    y = TARGETS["poisson"] + 300.0 * outliers * (np.arange(N) % 20 == 0)
    model = sk.KernelRegressor(loss="huber" if outliers else "poisson", metric="learn", epochs=1)
    model.set_params(n_centers=P, run_dir=tmp_path / "run", solver="block").fit(X, y)
    records = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    repeated_stages = [record["doing"] for record in records if record.get("again")]
    assert repeated_stages == ["metric", "kernel", "trees"]
    history = read_history(records)
    assert len(history.processes) == 1
    assert {record["event"] for record in history.setup} >= {"bandwidth", "metric", "noise", "loss"}
    chosen = [record for record in history.setup if "chosen" in record]
    if chosen[-1]["chosen"]["kind"] != "none":
        assert chosen[-1]["kernel"] == model.kernel_.describe()
