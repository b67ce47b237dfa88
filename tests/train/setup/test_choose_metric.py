"""Test learned metrics: the directions that they find, when none is learned, and resumes."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_friedman1

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.planning.sizes import EFFORT_LEVELS
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.saved_model import load_model
from streamkern.train.setup import choose_metric
from streamkern.train.setup.choose_metric import (
    MAX_COMPARED_ROWS,
    metric_row_counts,
    n_compared_rows,
)
from streamkern.train.setup.metric_rounds import (
    COMPARISON_ROUNDS,
    MAX_ROUNDS,
    METRIC_VARIANTS,
    MetricVariant,
    metric_root,
)
from streamkern.train.setup.metric_steps import STAGES, stages
from tests.runs import Array, assert_same_bits, final, stopped

ROWS, D = 600, 6


def numbers(seed: int, n: int = ROWS, d: int = D) -> Array:
    """Return normally distributed rows."""
    return np.random.default_rng([seed, 17]).normal(size=(n, d)).astype(np.float32)


def two_feature_targets(X: Array) -> Array:
    """Return targets of two features, with noise of a hundredth of the variance."""
    noise = 0.1 * np.random.default_rng(len(X)).normal(size=len(X))
    return np.asarray(np.sin(2 * X[:, 0]) + X[:, 1] ** 2 / 2 + noise, np.float32)


def one_direction_targets(X: Array) -> Array:
    """Return targets of one direction, to which all features contribute."""
    return np.asarray(np.sin(1.2 * X.sum(axis=1)), np.float32)


def fit(truth: Any, metric: str = "learn", **parameters: Any) -> tuple[sk.KernelRegressor, float]:
    """Return a model for targets `truth(X)`, and its test error divided by their variance."""
    X, T = numbers(0), numbers(1, 1500)
    settings = {"n_centers": 300, "epochs": 3, "scale": "none", "random_state": 0} | parameters
    model = sk.KernelRegressor(metric=metric, **settings).fit(X, truth(X))
    expected = truth(T)
    error = np.mean((model.predict(T).reshape(expected.shape) - expected) ** 2) / np.var(expected)
    return model, float(error)


def test_relevant_features_get_the_weight() -> None:
    model, error = fit(two_feature_targets)
    assert error < 0.5 * fit(two_feature_targets, "none")[1]
    assert model.report_["learned_metric"]["kind"] in ("diagonal", "full")
    importances = model.feature_importances_
    assert importances.shape == (D,)
    assert importances.sum() == pytest.approx(1)
    assert importances[:2].sum() > 0.9


@pytest.mark.parametrize("metric", ["learn", "learn-full"])
def test_relevant_direction_is_found(metric: str) -> None:
    model, error = fit(one_direction_targets, metric)
    assert error < 0.2 * fit(one_direction_targets, "none")[1]
    assert model.report_["learned_metric"]["kind"] == "full"
    A = model.kernel_.metric
    assert A is not None
    top = np.linalg.svd(A)[0][:, 0]
    assert abs(top @ np.ones(D)) / D**0.5 > 0.95


def test_diagonal_metric_has_scales_only() -> None:
    model, _ = fit(two_feature_targets, "learn-diagonal")
    metric = model.kernel_.metric
    assert metric is not None
    assert metric.shape == (D,)
    assert np.sum(metric**2) == pytest.approx(D)


def test_isotropic_function_gets_no_metric() -> None:
    """Check equal directions, for which a metric of few rows would fit noise."""
    model, error = fit(lambda X: np.cos(np.sqrt((X**2).sum(axis=1))))
    assert model.report_["learned_metric"]["kind"] == "none"
    assert model.kernel_.metric is None
    assert error == fit(lambda X: np.cos(np.sqrt((X**2).sum(axis=1))), "none")[1]
    with pytest.raises(AttributeError, match="no metric"):
        _ = model.feature_importances_


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize(("n", "noise"), [(300, 0.1), (800, 1.0)])
def test_noise_and_few_rows_do_not_hide_a_gain(n: int, noise: float) -> None:
    """Check that the error without a metric falls with more rows, but not below the noise."""
    X, y = make_friedman1(n + 2000, n_features=10, noise=noise, random_state=0)
    errors = []
    for metric in ("none", "auto"):
        model = sk.KernelRegressor(metric=metric, random_state=0).fit(X[:n], y[:n])
        errors.append(np.mean((model.predict(X[n:]) - y[n:]) ** 2) - noise**2)
    assert model.report_["learned_metric"]["kind"] in ("diagonal", "full")
    assert errors[1] < 0.7 * errors[0]


def test_rejected_metric_keeps_kernel_of_plain_run() -> None:
    X = numbers(0)
    y = np.random.default_rng(1).normal(size=ROWS)
    none, learned = (
        sk.KernelRegressor(metric=metric, random_state=0).fit(X, y) for metric in ("none", "learn")
    )
    assert learned.report_["learned_metric"]["kind"] == "none"
    assert learned.kernel_.describe() == none.kernel_.describe()
    np.testing.assert_array_equal(learned.dual_coef_, none.dual_coef_)


def test_classes_and_sample_weights_are_supported() -> None:
    X, T = numbers(0), numbers(1, 1500)
    y, expected = (np.where(two_feature_targets(A) > 0.5, "yes", "no") for A in (X, T))
    scores = []
    for metric in ("none", "learn"):
        model = sk.KernelClassifier(metric=metric, n_centers=300, epochs=3, random_state=0)
        # Rows of weight 0 have labels that would mislead.
        w = np.ones(ROWS)
        w[::5] = 0
        mislabelled = np.where(w > 0, y, np.where(X[:, 5] > 0, "yes", "no"))
        scores.append(model.fit(X, mislabelled, sample_weight=w).score(T, expected))
    assert scores[1] > scores[0] + 0.03
    assert model.feature_importances_[:2].sum() > 0.8


@pytest.mark.slow
def test_weights_act_as_repeated_rows() -> None:
    """Check weights in the fit, the error and the gradients: doubled weights give the same
    model."""
    X, w = numbers(0), np.random.default_rng(0).uniform(0.5, 2, ROWS)
    actual = [
        sk.KernelRegressor(metric="learn", n_centers=200, epochs=1, random_state=0)
        .fit(X, two_feature_targets(X), sample_weight=factor * w).kernel_.metric
        for factor in (1, 2)
    ]  # fmt: skip
    np.testing.assert_allclose(actual[1], actual[0], rtol=1e-3, atol=1e-3)


def test_several_targets_share_a_metric() -> None:
    model, error = fit(lambda X: np.stack([np.sin(2 * X[:, 0]), X[:, 1] ** 3 / 4], axis=1))
    assert error < 0.3
    assert model.feature_importances_[:2].sum() > 0.9


@pytest.mark.parametrize("kernel", ["gaussian", {"kind": "sum", "parts": ["laplace", "matern52"]}])
def test_any_kernel_accepts_metric(kernel: Any) -> None:
    error = fit(two_feature_targets, kernel=kernel)[1]
    assert error < 0.5 * fit(two_feature_targets, "none", kernel=kernel)[1]


@pytest.mark.parametrize("bandwidth", ["median", 3.0])
def test_given_bandwidth_applies_within_metric(bandwidth: Any) -> None:
    model, error = fit(two_feature_targets, kernel="matern32", bandwidth=bandwidth)
    assert error < 0.7 * fit(two_feature_targets, "none", kernel="matern32", bandwidth=bandwidth)[1]
    if bandwidth == 3.0:
        assert model.bandwidth_ == 3.0


def test_too_few_rows_learn_no_metric() -> None:
    X = numbers(0, 40)
    model = sk.KernelRegressor(metric="learn", random_state=0).fit(X, two_feature_targets(X))
    assert model.report_["learned_metric"] == {"kind": "none"}
    assert np.isfinite(model.predict(X)).all()


def test_constant_and_equal_columns_are_accepted() -> None:
    X = numbers(0)
    X = np.concatenate([X, X[:, :1], np.full((ROWS, 1), 3.0, np.float32)], axis=1)
    model = sk.KernelRegressor(metric="learn", n_centers=200, epochs=2, random_state=0)
    model.fit(X, two_feature_targets(X))
    assert model.score(X, two_feature_targets(X)) > 0.9
    assert np.isfinite(model.feature_importances_).all()
    assert model.feature_importances_[-1] == 0.0


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("solver", ["direct", "falkon", "eigenpro4", "block"])
def test_every_solver_benefits_from_metric(solver: str) -> None:
    error = fit(two_feature_targets, solver=solver, epochs=1 if solver == "direct" else 10)[1]
    assert error < 0.9 * fit(two_feature_targets, "none", solver=solver, epochs=10)[1]


# -- bits and records -----------------------------------------------------------------------------


def config(run_dir: Path | None, **changes: Any) -> sk.RunConfig:
    """Return the settings of a run that learns a metric."""
    tables = sk.RunConfig.from_tables(
        {
            "data": {"epochs": 2, "batch_size": 50, "scale": "none"},
            "model": {"metric": "learn", "n_centers": 120},
            "solver": {"name": "block"},
            "run": {"device": "cpu", "run_dir": run_dir, "checkpoint_every": 7},
        }
    )
    return tables.with_overrides(changes)


def source() -> sk.ArraySource:
    """Return a source whose targets depend on two features."""
    return sk.ArraySource(numbers(0), two_feature_targets(numbers(0)))


@pytest.mark.slow
def test_stopped_run_resumes_with_same_bits(tmp_path: Path) -> None:
    sk.train_model(config(tmp_path / "whole"), source=source()).model.backend.close()
    for step in (1, 12, 20):
        held_out = sk.ArraySource(numbers(3, 20), two_feature_targets(numbers(3, 20)))
        stopped(config(tmp_path / "run"), step, source=source(), test=held_out)
    actual = sk.train_model(config(tmp_path / "run"), source=source()).model
    assert actual.op.kernel.metric is not None
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))
    loaded = load_model(tmp_path / "run", device="cpu")
    np.testing.assert_array_equal(loaded.values(numbers(2)), actual.values(numbers(2)))
    for model in (actual, loaded):
        model.backend.close()


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("accelerator", ["none", "auto"])
def test_metric_does_not_depend_on_threads(accelerator: str) -> None:
    actual = []
    for threads in (1, 2, 3):
        run_config = config(None, **{"run.threads": threads, "run.accelerator": accelerator})
        model = sk.train_model(run_config, source=source()).model
        with model.backend as backend:
            assert backend.threads == threads
            actual.append((model.op.kernel.metric, model.values(numbers(2))))
    for metric, values in actual[1:]:
        np.testing.assert_array_equal(metric, actual[0][0])
        np.testing.assert_array_equal(values, actual[0][1])


def test_log_contains_every_round(tmp_path: Path) -> None:
    sk.train_model(config(tmp_path / "run"), source=source()).model.backend.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    *variants, rerun, round_, steps, decision = [
        line for line in lines if line["event"] == "metric"
    ]
    assert [(line["kind"], line["exponent"]) for line in variants] == [
        (variant.kind, variant.exponent) for variant in METRIC_VARIANTS
    ]
    assert len({line["errors"][0] for line in variants}) == 1  # all begin without a metric
    best, chosen = min(variants, key=lambda line: min(line["errors"])), decision["chosen"]
    for line in (rerun, round_):
        assert (line["kind"], line["exponent"]) == (best["kind"], best["exponent"])
    assert [len(line["errors"]) - 1 for line in variants] == [COMPARISON_ROUNDS] * len(variants)
    assert len(rerun["errors"]) - 1 <= MAX_ROUNDS
    assert (steps["kind"], steps["steps"]) == ("full", STAGES[0].n_steps)
    assert round_["error_without"] == steps["error_without"] > max(round_["error"], steps["error"])
    method = {name: chosen.get(name) for name in ("kind", "exponent", "steps")}
    assert method in [{name: line.get(name) for name in method} for line in (round_, steps)]
    assert chosen["error"] < chosen["error_without"]
    assert chosen["standard_errors"] > choose_metric.METRIC_GAIN_SE


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize(
    "parameters",
    [{}, {"kernel": "laplace"}, {"kernel": "laplace", "bandwidth": 3.0}, {"bandwidth": "median"}],
)
@pytest.mark.parametrize("second_metric", ["learn", "none"])
def test_second_fit_keeps_metric_of_first(parameters: dict[str, Any], second_metric: str) -> None:
    """Check a second fit to other rows, from which another metric would be learned."""
    X, T = numbers(0), numbers(1, 1500)
    model = sk.KernelRegressor(
        metric="learn", centers=X[:200], scale="none", warm_start=True, epochs=3, **parameters
    ).fit(X, two_feature_targets(X))
    metric, first = model.kernel_.metric, model.score(T, two_feature_targets(T))
    assert metric is not None
    more = numbers(5)
    model.set_params(metric=second_metric, epochs=1).fit(more, two_feature_targets(more))
    np.testing.assert_array_equal(model.kernel_.metric, metric)
    assert model.score(T, two_feature_targets(T)) > first - 0.02


def test_plan_and_info_show_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, run = str(tmp_path / "train.zarr"), str(tmp_path / "run")
    sk.ingest_store(numbers(0), store, y=two_feature_targets(numbers(0)))
    parameters = ["--train", store, "--run-dir", run, "--set", "model.metric=learn"]
    assert run_command(["plan", *parameters, "--all", "--no-measure"]) == 0
    plan = capsys.readouterr().out
    assert "rows to learn the metric" in plan
    assert re.search(r"FLOPs: metric \d\d?%", plan)
    assert run_command(["train", *parameters, "--epochs", "1"]) == 0
    capsys.readouterr()
    assert run_command(["info", run]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "learned_metric" in x]
    assert re.search(r"(full|diagonal), (120 steps|exponent \S+), error 0\.0\d+", line)
    assert "error without" in line


# -- refusals and memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"features": "fourier"}, "cannot be used with features='fourier'"),
        ({"kernel": sk.Laplace(1.0, metric=np.ones(D))}, "cannot be combined with the metric"),
    ],
)
def test_unsupported_settings_are_refused_in_one_sentence(
    parameters: dict[str, Any], text: str
) -> None:
    model = sk.KernelRegressor(**({"metric": "learn"} | parameters))
    with pytest.raises(sk.StreamkernError, match=text):
        model.fit(numbers(0), two_feature_targets(numbers(0)))


def test_memory_plan_includes_metric_phase() -> None:
    phases = []
    for metric in ("none", "learn"):
        run = open_run(config(None, **{"model.metric": metric}), RunInputs(source=source()))
        phases.append(run.buffers.phases)
        run.backend.close()
    assert "metric" not in phases[0]
    assert "metric" in phases[1]


# -- roots and numbers of rows --------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_metric_root_equals_matrix_power(exponent: float) -> None:
    B = numbers(0, 5, 5).astype(np.float64)
    G = B @ B.T
    lam, U = np.linalg.eigh(G)
    M = (U * lam**exponent) @ U.T
    A = metric_root(G, MetricVariant("full", exponent))
    assert A is not None
    np.testing.assert_allclose(A @ A.T, M * 5 / np.trace(M), atol=1e-10)
    diagonal = metric_root(G, MetricVariant("diagonal", exponent))
    assert diagonal is not None
    truth = np.diag(G) ** exponent
    np.testing.assert_allclose(diagonal**2, truth * 5 / truth.sum(), rtol=1e-12)


def test_negligible_directions_are_dropped() -> None:
    G = np.diag([1.0, 1e-3, 1e-30, 0.0])
    A = metric_root(G, MetricVariant("full", 1.0))
    assert A is not None
    assert A.shape == (4, 2)


@pytest.mark.parametrize("G", [np.zeros((3, 3)), np.full((3, 3), np.nan)])
def test_vanishing_gradients_give_no_metric(G: Array) -> None:
    assert metric_root(G, MetricVariant("full", 1.0)) is None


def test_second_stage_needs_more_rows() -> None:
    assert stages(metric_row_counts(9218)[0]) == [STAGES[0]]
    assert stages(metric_row_counts(9219)[0]) == list(STAGES[:2])
    for effort, n in (("quick", 1), ("default", 2), ("best", 3)):
        assert stages(metric_row_counts(EFFORT_LEVELS[effort].metric_rows)[0]) == list(STAGES[:n])


@pytest.mark.parametrize(
    "n", [48, 300, 5000, *(level.metric_rows for level in EFFORT_LEVELS.values())]
)
def test_fitted_and_held_out_rows_are_disjoint(n: int) -> None:
    n_pool, n_held_out = metric_row_counts(n)
    assert n_pool > 0
    assert n_pool <= n - n_pool - n_held_out  # the gradient steps hold rows out
    assert 0 < n_held_out <= n - 2 * n_pool
    n_fitted = n_compared_rows(n)
    assert 0 < n_fitted <= n - n_held_out
    assert n_fitted in (n - n_held_out, MAX_COMPARED_ROWS, n - n_pool - n_held_out)


@pytest.mark.slow
@pytest.mark.full
def test_pure_noise_rarely_gets_a_metric() -> None:
    """Check that no round and no variant uses the targets of the held-out rows.

    A gain of two standard errors occurs by chance in a few cases of a hundred.
    """
    T, kinds = numbers(1, 4000), []
    fresh = np.random.default_rng(99).normal(size=len(T))
    for seed in range(4):
        noise = np.random.default_rng(seed).normal(size=ROWS).astype(np.float32)
        errors = []
        for metric in ("none", "learn"):
            model = sk.KernelRegressor(metric=metric, n_centers=100, epochs=1, random_state=seed)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the model explains nothing", UserWarning)
                model.fit(numbers(0), noise)
                errors.append(np.mean((model.predict(T) - fresh) ** 2))
        kinds.append(model.report_["learned_metric"]["kind"])
        assert errors[1] == pytest.approx(errors[0], rel=0.01)
    assert kinds.count("none") >= 3
