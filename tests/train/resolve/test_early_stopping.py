"""Test early stopping: its epoch, the weights of this epoch, and runs that are interrupted."""

from __future__ import annotations

import math
import re
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, r2_score

from streamkern.basics.errors import ConfigError, DataError, RunError
from streamkern.config.run_config import ExecutionConfig, RunConfig
from streamkern.planning.memory import Buffers
from streamkern.rundir.run_directory import RunDirectory
from streamkern.store.row_block import concatenate_blocks
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.split import split_rows
from streamkern.stream.sources.transforms import GaussianNoise
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train import trainer
from streamkern.train.loop import progress
from streamkern.train.loop.callbacks import Callback, EpochEnd
from streamkern.train.online import Online
from streamkern.train.resolve.early_stopping import EarlyStopping, scores_as_json, scores_from_json
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.saved_model import load_result
from streamkern.train.train import Result, train
from tests.runs import N, assert_same_bits, final, finished, latest_step, settings

STOPS = {"run.early_stopping": True, "run.validation_fraction": 0.25, "run.n_iter_no_change": 2}
EPOCHS = 12


def noisy_rows(values: bool = True) -> ArraySource:
    """Return rows with so much noise that a model soon overfits; values or classes."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(N, 3)).astype(np.float32)
    y = np.sin(X[:, 0]) + rng.normal(size=N)
    if values:
        return ArraySource(X, y, unit_rows=16)
    return ArraySource(X, np.where(y > 0, "up", "down"), unit_rows=16)


def early_settings(run_dir: Path | None = None, **overrides: Any) -> RunConfig:
    """Return settings with which a run is stopped early."""
    overfitting = {"data.epochs": EPOCHS, "solver.ridge": 0.0, "model.bandwidth": 1.0}
    return settings(run_dir, **(overfitting | STOPS | overrides))


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """Return the result and the directory of a run that was stopped early; tests only read them."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return finished(early_settings(path), source=noisy_rows()), path


def best_of(scores: list[float]) -> int:
    """Return the epoch with the best score, the first one of several."""
    return scores.index(max(scores)) + 1


def best_and_end(scores: list[float], patience: int) -> tuple[list[bool], list[bool]]:
    """Return whether each score was the best until then, and whether training ended after it."""
    stopping = EarlyStopping(ExecutionConfig(early_stopping=True, n_iter_no_change=patience))
    best, end = [], []
    for i, score in enumerate(scores):
        kept_epochs: list[int] = []
        stopping.add_score({"validation_r2": score}, partial(kept_epochs.append, i))
        best.append(kept_epochs == [i])
        end.append(stopping.stop_reason() is not None)
    return best, end


def test_score_is_added_only_with_its_weights() -> None:
    def no_room() -> None:
        raise MemoryError

    stopping = EarlyStopping(ExecutionConfig(early_stopping=True))
    with pytest.raises(MemoryError):
        stopping.add_score({"validation_r2": 0.5}, no_room)
    assert stopping.scores == []


def test_training_ends_after_epochs_without_improvement() -> None:
    best, end = best_and_end([0.1, 0.3, 0.2, 0.3, 0.4, 0.4, 0.3], 2)
    assert best == [True, True, False, False, True, False, False]
    assert end == [False, False, False, True, False, False, True]


def test_non_finite_score_is_never_the_best() -> None:
    best, end = best_and_end([math.nan, math.inf, -5.0], 2)
    assert (best, end) == ([False, False, True], [False, False, False])
    assert best_and_end([math.nan] * 3, 2)[1] == [False, False, True]
    assert scores_from_json(scores_as_json([0.5, -math.inf])) == [0.5, -math.inf]


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([0.5, 0.1, 0.2], "not improved for 2 epochs; the model keeps the weights of epoch 1"),
        (
            [math.nan] * 3,
            r"no score .* is finite; the model keeps the weights of the last epoch, 3",
        ),
    ],
)
def test_stop_reason_names_epoch_of_the_weights(scores: list[float], reason: str) -> None:
    stopping = EarlyStopping(ExecutionConfig(early_stopping=True, n_iter_no_change=2))
    for score in scores:
        stopping.add_score({"validation_r2": score}, lambda: None)
    assert re.search(reason, stopping.stop_reason() or "")


def test_epochs_that_leave_the_weights_do_not_count() -> None:
    """Check equal losses, as after undone steps; equal accuracies count."""
    settings = ExecutionConfig(early_stopping=True, n_iter_no_change=1)
    by_loss, by_accuracy = EarlyStopping(settings, "poisson_deviance"), EarlyStopping(settings)
    by_loss.scores, by_accuracy.scores = [-3.0, -3.0, -3.0], [0.5, 0.5]
    assert by_loss.stop_reason() is None
    assert "not improved for 1 epochs" in str(by_accuracy.stop_reason())
    by_loss.scores.append(-3.5)
    assert "keeps the weights of epoch 1" in str(by_loss.stop_reason())


def test_run_without_early_stopping_has_no_scores() -> None:
    assert not EarlyStopping(ExecutionConfig()).is_active
    assert finished(settings(), source=noisy_rows()).validation_scores == []


@pytest.mark.parametrize("method", ["block", "eigenpro2", "eigenpro3", "falkon"])
def test_weights_are_those_of_the_best_epoch(method: str) -> None:
    method_settings: dict[str, Any] = {"solver.name": method}
    if method == "eigenpro2":
        method_settings["model.n_centers"] = "auto"
    config = early_settings(**method_settings)
    result = finished(config, source=noisy_rows())
    best = best_of(result.validation_scores)
    assert len(result.validation_scores) == result.epochs < EPOCHS
    assert result.epochs == best + 2
    assert result.ended is not None
    assert f"epoch {best}" in result.ended
    # A run without early stopping over the same rows, until the best epoch.
    left, _ = split_rows(noisy_rows(), 0.25, 0)
    plain = settings(
        **{"solver.ridge": 0.0, "model.bandwidth": 1.0, "data.epochs": best}, **method_settings
    )
    other = finished(plain, source=left)
    np.testing.assert_array_equal(np.asarray(result.model.weights), np.asarray(other.model.weights))
    np.testing.assert_array_equal(result.Z, other.Z)


@pytest.mark.parametrize("values", [True, False])
def test_scores_are_computed_on_validation_rows(values: bool) -> None:
    result = train(early_settings(), source=noisy_rows(values))
    with result.model.backend:
        _, held_out = split_rows(noisy_rows(values), 0.25, 0)
        rows = concatenate_blocks([held_out.read_unit(u, 0, 0) for u in range(held_out.n_units)])
        F = result.model.values(rows.X)
    truth = r2_score(rows.y, F) if values else accuracy_score(rows.y, F.argmax(axis=1))
    assert max(result.validation_scores) == pytest.approx(truth, abs=1e-12)
    figures = result.history[-1]
    assert figures["validation_r2" if values else "validation_accuracy"] == pytest.approx(truth)
    assert result.metrics["validation_mse"] == figures["validation_mse"]
    steps = [record["step"] for record in result.history]
    assert len(steps) == len(set(steps)) == result.epochs


def test_last_epoch_restores_best_weights() -> None:
    result = finished(early_settings(**{"run.n_iter_no_change": 50}), source=noisy_rows())
    assert result.epochs == EPOCHS == len(result.validation_scores)
    assert result.ended is None
    best = best_of(result.validation_scores)
    assert best < EPOCHS
    score = max(result.validation_scores)
    assert result.metrics["validation_r2"] == pytest.approx(score, abs=1e-12)


def test_validation_rows_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that changed targets of these rows do not change a weight."""
    source = AugmentedSource(noisy_rows(), 2, [GaussianNoise(0.1)])
    result = finished(early_settings(**{"run.n_iter_no_change": 50}), source=source)
    left, held_out = split_rows(noisy_rows(), 0.25, 0)
    X, y = np.array(noisy_rows()._X), np.array(noisy_rows()._y)
    out = np.concatenate([held_out.source_rows(u) for u in range(held_out.n_units)]).astype(int)
    assert len(out) + left.n_rows == N
    # Mean and variance of all targets, on which the scale of the model depends, stay the same.
    y[out] = y[out][::-1]
    changed = AugmentedSource(ArraySource(X, y, unit_rows=16), 2, [GaussianNoise(0.1)])
    epoch_figures: list[Any] = []
    monkeypatch.setattr(
        trainer.EarlyStopping,
        "add_score",
        lambda self, figures, keep: epoch_figures.append(figures),
    )
    first = finished(early_settings(**{"run.n_iter_no_change": 50}), source=source)
    other = finished(early_settings(**{"run.n_iter_no_change": 50}), source=changed)
    np.testing.assert_array_equal(np.asarray(first.model.weights), np.asarray(other.model.weights))
    assert epoch_figures[0] != epoch_figures[EPOCHS]
    assert result.epochs == EPOCHS


def test_interrupted_evaluation_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = finished(early_settings(tmp_path / "whole"), source=noisy_rows())
    for number in (1, 3, uninterrupted.epochs):
        location, calls = tmp_path / str(number), []
        evaluate = trainer.EvaluationSchedule.evaluate

        def evaluate_interrupted(
            self: Any, model: Any, *arguments: Any, number: int = number
        ) -> None:
            def interrupt_and_return() -> Any:
                calls.append(1)  # noqa: B023
                if len(calls) == number:  # noqa: B023
                    signal.raise_signal(signal.SIGTERM)
                return model()

            evaluate(self, interrupt_and_return, *arguments)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(trainer.EvaluationSchedule, "evaluate", evaluate_interrupted)
            with pytest.raises(Exception, match="run the same command again"):
                finished(early_settings(location), source=noisy_rows())
        resumed = finished(early_settings(location), source=noisy_rows())
        assert_same_bits(final(location), final(tmp_path / "whole"))
        assert resumed.validation_scores == uninterrupted.validation_scores


@pytest.mark.slow
def test_killed_run_resumes_from_any_checkpoint(tmp_path: Path) -> None:
    often = {"run.checkpoint_every": 1, "run.keep_checkpoints": 500}
    uninterrupted = finished(early_settings(tmp_path / "whole", **often), source=noisy_rows())
    expected = final(tmp_path / "whole")
    with RunDirectory(tmp_path / "whole", writable=False) as run:
        steps = sorted(run.steps())
    for newest in steps[:: len(steps) // 4] + steps[-2:-1]:
        path = tmp_path / str(newest)
        copy_until(tmp_path / "whole", path, newest)
        resumed = finished(early_settings(path, **often), source=noisy_rows())
        assert_same_bits(final(path), expected)
        assert resumed.validation_scores == uninterrupted.validation_scores


def copy_until(old: Path, new: Path, newest: int) -> None:
    """Copy a run directory as a kill right after the checkpoint `newest` leaves it."""
    shutil.copytree(old, new)
    for path in (new / "checkpoints").iterdir():
        if int(path.name[:12]) > newest:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_changed_validation_fraction_is_another_run(tmp_path: Path) -> None:
    finished(early_settings(tmp_path), source=noisy_rows())
    with pytest.raises(RunError, match=r"run\.validation_fraction: was 0.25, now 0.3"):
        train(early_settings(tmp_path, **{"run.validation_fraction": 0.3}), source=noisy_rows())


def test_identity_omits_unused_early_stopping() -> None:
    assert not [k for k in settings().identity()["run"] if "validation" in k or "early" in k]
    assert early_settings().identity()["run"]["validation_fraction"] == 0.25


def test_loaded_run_has_scores(tmp_path: Path) -> None:
    result = finished(early_settings(tmp_path), source=noisy_rows())
    loaded = load_result(tmp_path)[1]
    loaded.model.backend.close()
    assert loaded.validation_scores == result.validation_scores
    assert loaded.metrics == result.metrics
    np.testing.assert_array_equal(
        np.asarray(loaded.model.weights), np.asarray(result.model.weights)
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"solver.name": "direct"}, "early_stopping cannot be used with solver='direct'"),
        ({"data.epochs": 1}, "early_stopping has nothing to stop"),
        ({"solver.warm_start": "runs/old"}, "early_stopping cannot be used with initial weights"),
    ],
)
def test_unsupported_early_stopping_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(early_settings(**overrides), source=noisy_rows())


def test_generated_rows_are_refused() -> None:
    def make(seed: int, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        return np.zeros((stop - start, 2), np.float32), np.zeros(stop - start)

    with pytest.raises(ConfigError, match="early_stopping cannot be used with rows that"):
        train(early_settings(), source=GeneratorSource(make, 100, (2,), np.float32, 1))


def test_class_without_training_rows_gives_warning() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    few = {"model.n_centers": 5}
    labels = np.array(["rare", *np.where(X[1:, 0] > 0, "up", "down")])
    with pytest.warns(UserWarning, match="'rare' has no rows that are not set aside, and will not"):
        train(
            early_settings(**few, **{"run.validation_fraction": 0.9}), source=ArraySource(X, labels)
        )


def test_validation_rows_need_positive_weights() -> None:
    X, weights = np.random.default_rng(0).normal(size=(60, 2)), np.zeros(60)
    source = ArraySource(X, X[:, 0], sample_weight=weights)
    held_out = split_rows(source, 0.25, 0)[1]
    rows = np.concatenate([held_out.source_rows(u) for u in range(held_out.n_units)])
    weights[np.setdiff1d(np.arange(60), rows)] = 1
    with pytest.raises(DataError, match=r"^all rows to evaluate have sample weight 0"):
        train(
            early_settings(**{"model.n_centers": 5}),
            source=ArraySource(X, X[:, 0], sample_weight=weights),
        )


def test_partial_fit_refuses_early_stopping() -> None:
    with pytest.raises(ConfigError, match="cannot be used with partial_fit"):
        Online(early_settings()).advance(noisy_rows())


def test_auto_chooses_solver_that_supports_early_stopping() -> None:
    config = early_settings(
        **{"solver.name": "auto", "solver.ridge": "auto", "data.epochs": "auto"}
    )
    run = open_run(config, RunInputs(noisy_rows()))
    run.backend.close()
    assert run.sizes.solver == "block"
    assert run.config.data.epochs == 20
    assert run.data.validation_rows is not None
    assert run.problem.n_rows == N - run.data.validation_rows.n_rows


def bytes_by_name(buffers: Buffers) -> dict[str, int]:
    """Return the bytes of each buffer by its name."""
    return {buffer_name: size for _, buffer_name, size in buffers.lines}


def test_memory_of_best_weights_is_counted() -> None:
    runs = [open_run(config, RunInputs(noisy_rows())) for config in (settings(), early_settings())]
    for run in runs:
        run.backend.close()
    plain, stops = (bytes_by_name(run.buffers) for run in runs)
    assert set(stops) - set(plain) == {
        "validation and calibration rows being read", "best weights, and their checkpoint copy",
    }  # fmt: skip
    assert stops["best weights, and their checkpoint copy"] == 2 * runs[1].problem.p * 4
    assert runs[1].problem.read_rows == 16


class FailingCallback(Callback):
    """Callback that fails at an event, or at the end of an epoch, after a number of steps."""

    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step

    def record(self, record: Mapping[str, Any]) -> None:
        if record["event"] == self.event and record["step"] == self.step:
            raise ZeroDivisionError(self.event)

    def pass_ended(self, passed: EpochEnd) -> None:
        self.record({"event": "pass ended", "step": passed.step})


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("event", ["train", "evaluation", "pass ended", "finished"])
def test_failing_epoch_callback_keeps_scores(
    event: str, uninterrupted_run: tuple[Result, Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "MIN_LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(progress, "MAX_LOG_INTERVAL_S", 0.0)
    full, ended = uninterrupted_run
    steps = latest_step(ended)
    best = best_of(full.validation_scores)
    for epoch in [full.epochs] if event == "finished" else [1, best, full.epochs]:
        location, step = tmp_path / str(epoch), steps // full.epochs * epoch
        with pytest.raises(ZeroDivisionError, match=event):
            train(
                early_settings(location),
                source=noisy_rows(),
                callbacks=[FailingCallback(event, step)],
            )
        assert latest_step(location) == step
        resumed = finished(early_settings(location), source=noisy_rows())
        assert_same_bits(final(location), final(ended))
        assert resumed.validation_scores == full.validation_scores
        assert resumed.ended == full.ended
