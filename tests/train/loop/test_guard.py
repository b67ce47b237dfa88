"""Test which losses the divergence guard rejects, and that runs recover or fail."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.basics.errors import DivergenceError
from streamkern.config.solver import solver_options
from streamkern.rundir.run_log import read_log
from streamkern.solver.precondition.step_rule import StepRule
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.loop.guard import BACK_OFF_FACTOR, MAX_BACK_OFFS, WINDOW, Guard, LossCurve
from tests.counts import TARGETS, X, of_loss
from tests.runs import (
    METHODS,
    array_source,
    assert_same_bits,
    checkpoint,
    final,
    finished,
    latest_step,
    settings,
    stopped,
    stream,
)

losses = st.floats(0, 1e30)
not_finite = st.sampled_from([math.nan, math.inf, -math.inf])
LONG = {"data.epochs": 20}  # 140 steps, four windows and a rest of 12
LONGER = {"data.epochs": 26}  # 182 steps, five windows and a rest of 22


# -- losses of one window -------------------------------------------------------------------------


@given(best=losses, zero=losses, loss=not_finite)
def test_non_finite_loss_is_divergence(best: float, zero: float, loss: float) -> None:
    guard = Guard(best)
    assert guard.judge(loss, zero)
    assert (guard.best, guard.back_offs) == (math.inf, 1)


@given(best=losses, zero=losses, share=st.floats(0, 0.1))
def test_loss_well_below_zero_model_is_accepted(best: float, zero: float, share: float) -> None:
    """Check also an earlier loss that was much lower: late in a run it may come from one unusual
    batch."""
    guard = Guard(best)
    assert not guard.judge(0.99 * share * zero, zero)


@given(zero=st.floats(1e-6, 1e30), bad_loss=st.floats(2.01, 1e6), good_loss=st.floats(0, 2))
def test_initial_loss_far_above_zero_model_is_divergence(
    zero: float, bad_loss: float, good_loss: float
) -> None:
    """Check that without an earlier loss, up to twice the loss of predicting zero is accepted."""
    assert Guard().judge(bad_loss * zero, zero)
    assert not Guard().judge(good_loss * zero, zero)


@given(best=st.floats(1e-6, 1e3), times=st.floats(10.1, 1e6), share=st.floats(0.11, 2))
def test_loss_growth_is_detected_early(best: float, times: float, share: float) -> None:
    loss = times * best
    assert Guard(best, worth=loss / share).judge(loss, loss / share)


@given(best=st.floats(1e-6, 1e3), share=st.floats(2.01, 1e3), times=st.floats(1.01, 2))
def test_loss_above_zero_model_after_progress_is_divergence(
    best: float, share: float, times: float
) -> None:
    zero = share * best
    assert Guard(best, worth=zero).judge(times * zero, zero)
    assert not Guard(zero, worth=zero).judge(times * zero, zero)


def test_changing_target_size_is_not_divergence() -> None:
    """Check sizes that change, as in blocks of `partial_fit`; growth beyond them is a
    divergence."""
    guard = Guard()
    levels = [(1e4, 1e4), (5.0, 1e4), (1e4, 1.0), (100.0, 1.0), (1.0, 1.0), (1e4, 1e4), (4.0, 1e4)]
    assert not any(guard.judge(loss, zero) for loss, zero in levels)
    assert guard.judge(3e4, 1.0)


@given(st.lists(losses, min_size=1, max_size=20), losses)
def test_best_loss_is_minimum_since_last_back_off(sequence: list[float], zero: float) -> None:
    """Check that the loss to which a back-off returns does not count as growth."""
    guard, best = Guard(), math.inf
    for loss in sequence[:MAX_BACK_OFFS]:
        best = math.inf if guard.judge(loss, zero) else min(best, loss)
        assert guard.best == best


@given(st.lists(st.tuples(losses, losses), min_size=1, max_size=40))
def test_weights_are_kept_by_end_of_window(window: list[tuple[float, float]]) -> None:
    """Check the last quarter of a window, at least one step."""
    n = max(1, len(window) // 4)
    tail = np.array(window)[-n:]
    assert Guard.may_keep_weights(window) == (sum(tail[:, 0]) <= sum(tail[:, 1]))


def test_slowly_growing_weights_are_not_kept() -> None:
    """Check slow growth whose mean is accepted as a bad start, and whose weights would never
    recover."""
    window = [(1.1**k / 6, 1.0) for k in range(WINDOW)]
    assert not Guard().judge(float(np.mean(window, axis=0)[0]), 1.0)
    assert not Guard.may_keep_weights(window)
    assert Guard.may_keep_weights(window[::-1])


def test_guard_fails_after_last_back_off() -> None:
    guard = Guard()
    for count in range(MAX_BACK_OFFS):
        assert guard.judge(math.nan, 1.0)
        assert guard.back_offs == count + 1
    with pytest.raises(DivergenceError, match="did not help") as caught:
        guard.judge(math.nan, 1.0)
    assert caught.value.exit_code == 3


@given(best=losses | st.just(math.inf), back_offs=st.integers(0, MAX_BACK_OFFS))
def test_guard_roundtrips_through_json(best: float, back_offs: int) -> None:
    guard = Guard(best, back_offs)
    assert Guard.restore(json.loads(json.dumps(guard.scalars(), allow_nan=False))) == guard


# -- runs -----------------------------------------------------------------------------------------


class StepSizeFactor:
    """Factor `times` of every step size, as after a wrong measurement in the setup."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 1.0
        eta = StepRule.eta
        monkeypatch.setattr(StepRule, "eta", lambda rule, *m: self.times * eta(rule, *m))


@pytest.fixture
def step_factor(monkeypatch: pytest.MonkeyPatch) -> StepSizeFactor:
    """Return the factor of the step sizes, which a test may change."""
    return StepSizeFactor(monkeypatch)


def back_offs(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events "back-off" in the log of a run."""
    return [record for record in read_log(run_dir / "log.jsonl") if record["event"] == "back-off"]


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("times", [5.0, 10.0])
@pytest.mark.parametrize("method", ["block", "blocks"])
def test_damped_rows_tolerate_too_long_steps(
    times: float, method: str, tmp_path: Path, step_factor: StepSizeFactor
) -> None:
    """Check steps without a ridge: no row changes its own prediction by more than its residual."""
    overrides = METHODS[method] | {"data.epochs": 40, "solver.ridge": 0.0}
    test = array_source(60, 5)
    undisturbed = finished(settings(**overrides), source=stream(method), test=test)
    step_factor.times = times
    result = finished(settings(tmp_path, **overrides), source=stream(method), test=test)
    assert back_offs(tmp_path) == []
    assert result.metrics["test_mse"] <= 1.5 * undisturbed.metrics["test_mse"]


@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("method", ["eigenpro3", "eigenpro4", "eigenpro2", "eigenpro1", "sgd"])
@pytest.mark.parametrize("times", [5.0, 30.0])
def test_run_with_too_long_steps_recovers(
    times: float, method: str, tmp_path: Path, step_factor: StepSizeFactor
) -> None:
    """Check steps 5 times too long, for which the end of the first window fails, and 30 times, for
    which losses overflow float32."""
    overrides = METHODS[method] | {"data.epochs": 40}
    test = array_source(60, 5)
    undisturbed = finished(settings(**overrides), source=stream(method), test=test)
    step_factor.times = times
    # A checkpoint in every window, whatever its losses are.
    config = settings(tmp_path, **overrides, **{"run.checkpoint_every": 31})
    result = finished(config, source=stream(method), test=test)
    events = back_offs(tmp_path)
    assert events[0]["step"] in (WINDOW, 2 * WINDOW)
    assert [event["scale"] for event in events] == [
        BACK_OFF_FACTOR ** (i + 1) for i in range(len(events))
    ]
    # Losses of discarded steps, some of them infinite, are no part of the losses of epochs.
    n_known = np.isfinite(result.losses).sum()
    assert n_known >= result.epochs - len(events) * WINDOW // 7
    assert np.nanmax(result.losses) <= 10 * events[0]["zero_loss"]
    assert not float(events[0]["loss"]) <= 2 * events[0]["zero_loss"]  # also true for NaN
    assert result.metrics["test_mse"] <= 1.5 * undisturbed.metrics["test_mse"]


@pytest.mark.parametrize("method", ["eigenpro3", "eigenpro4"])
def test_back_offs_survive_a_resume(
    method: str, tmp_path: Path, step_factor: StepSizeFactor
) -> None:
    """Resume before the first judgement, with infinite losses in the window, after it, and
    later."""
    step_factor.times = 30.0
    overrides = METHODS[method] | LONGER
    late = {"run.checkpoint_every": 70}
    finished(settings(tmp_path / "plain", **overrides, **late), source=stream(method))
    config = settings(tmp_path / "run", **overrides)
    for step in (31, 33, 70):
        stopped(config, step, source=stream(method))
    finished(config, source=stream(method))
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "plain"))
    assert checkpoint(tmp_path / "run", 70)[1] == checkpoint(tmp_path / "plain", 70)[1]
    steps = [event["step"] for event in back_offs(tmp_path / "plain")]
    assert steps[0] == WINDOW
    assert [event["step"] for event in back_offs(tmp_path / "run")] == steps


def test_run_that_cannot_recover_fails(tmp_path: Path, step_factor: StepSizeFactor) -> None:
    step_factor.times = 1e12
    config = settings(tmp_path, **{"data.epochs": 60, "run.checkpoint_every": 50})
    with pytest.raises(DivergenceError, match="halving the step size 8 times") as caught:
        finished(config, source=stream())
    assert "set solver.damping, solver.ridge or a larger bandwidth" in str(caught.value)
    assert caught.value.exit_code == 3
    assert [event["step"] for event in back_offs(tmp_path)] == [
        WINDOW * (i + 1) for i in range(MAX_BACK_OFFS)
    ]
    assert latest_step(tmp_path) == 250
    with pytest.raises(DivergenceError, match="halving the step size 8 times"):  # resumed
        finished(config, source=stream())


def test_diverging_log_link_suggests_newton_solver(
    tmp_path: Path, step_factor: StepSizeFactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check counts whose steps are too long and not limited."""
    step_factor.times = 1e12
    monkeypatch.setattr("streamkern.losses.scaled.MAX_STEP_MOVE", 1e30)
    counts = of_loss("poisson", **{"data.epochs": 60})
    with pytest.raises(DivergenceError) as caught:
        finished(settings(tmp_path, **counts), source=ArraySource(X, TARGETS["poisson"]))
    assert "set solver.name='direct', solver.damping, solver.ridge or" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "times"),
    [("block", 1e12)]
    + [(m, t) for m in ("eigenpro3", "eigenpro1", "eigenpro2", "sgd") for t in (30.0, 1e12)],
)
def test_short_run_is_judged_at_its_end(
    method: str, times: float, tmp_path: Path, step_factor: StepSizeFactor
) -> None:
    step_factor.times = times
    with pytest.raises(DivergenceError, match="diverged within its 14 steps") as caught:
        finished(settings(tmp_path, **METHODS[method]), source=stream(method))
    assert caught.value.exit_code == 3
    named = set(re.findall(r"solver\.(\w+)", str(caught.value)))
    assert named <= set(solver_options(method))
    assert "step_scale" in named
    assert ("damping" in named) == (method == "block")
    assert ("ridge" in named) == (method in ("block", "sgd"))


@pytest.mark.parametrize("rest", [12, 5])
def test_divergence_after_last_window_is_detected(
    rest: int, tmp_path: Path, step_factor: StepSizeFactor
) -> None:
    """Check a divergence after the last whole window, which returns to the end of that window."""
    epochs = {12: 20, 5: 19}[rest]
    steps = 7 * epochs
    assert steps % WINDOW == rest

    def on_evaluation(record: dict[str, Any]) -> None:
        if record["step"] == steps - rest:
            step_factor.times = 1e9

    config = settings(
        tmp_path, **METHODS["eigenpro3"], **{"data.epochs": epochs, "run.evaluate_every": 1}
    )
    test = array_source(60, 5)
    with pytest.warns(UserWarning, match=f"diverged in its last {rest} steps .* discarded: lower"):
        result = finished(config, source=stream(), test=test, on_evaluation=on_evaluation)
    assert [event["step"] for event in back_offs(tmp_path)] == [steps]
    # The losses of discarded steps do not count, so that only epochs without others have none.
    n_discarded = -(-rest // 7) - (rest % 7 > 0)
    assert np.isfinite(result.losses[: epochs - n_discarded]).all()
    assert max(result.losses[: epochs - n_discarded]) <= 1.1 * result.losses[0]
    assert np.isnan(result.losses[epochs - n_discarded :]).all()
    assert np.isfinite(result.model.weights).all()
    before = next(r for r in result.history if r["step"] == steps - rest)
    assert result.metrics["test_mse"] <= 1.5 * before["test_mse"]


def test_non_finite_metrics_can_be_saved(tmp_path: Path, step_factor: StepSizeFactor) -> None:
    """Check an evaluation before the guard has judged the steps."""
    step_factor.times = 30.0
    overrides = (
        METHODS["eigenpro3"] | LONGER | {"run.evaluate_every": 15, "run.checkpoint_every": 15}
    )
    stopped(settings(tmp_path, **overrides), 31, source=stream())
    result = finished(settings(tmp_path, **overrides), source=stream(), test=array_source(60, 5))
    assert math.isfinite(result.metrics["test_mse"])


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("method", METHODS)
def test_converging_run_never_backs_off(method: str, tmp_path: Path) -> None:
    finished(settings(tmp_path, **METHODS[method], **LONG), source=stream(method))
    assert back_offs(tmp_path) == []


def test_discarded_losses_do_not_count() -> None:
    """Check means over accepted steps, and that a curve resumes within a window."""
    whole, kept = LossCurve(), [[1.0, 2.0], [np.inf, np.nan, 1e30], [3.0, 5.0], [7.0]]
    epochs = iter([0, 0, 0, 1, 1, 1, 2, 3])
    for losses, is_accepted in zip(kept, (True, False, True, False), strict=True):
        for k, loss in enumerate(losses):
            whole.record_step(next(epochs), 10)
            whole.read([loss])
            if k == 0:  # a checkpoint between the steps of a window
                saved = json.loads(json.dumps([whole.entries(), whole.accepted_entries()]))
                whole = LossCurve().continue_from(saved[0], len(saved[0]), saved[1])
        whole.end_window(is_accepted=is_accepted)
    np.testing.assert_allclose(whole.losses(5), [1.5, 3.0, 5.0, np.nan, np.nan])
