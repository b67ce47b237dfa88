"""Test runs with targets on a log scale: fits, intervals, resumes, ranks, searches, refusals."""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.basics.errors import ConfigError, DataError
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.restart.run_snapshot import RunSnapshot
from tests.log_scale import skewed_data
from tests.runs import Printed, assert_same_bits, final, finished, open_settings, stopped

N = 600
SOLVERS: dict[str, dict[str, Any]] = {
    "block": {"solver.name": "block", "solver.block_size": 100},
    "falkon": {"solver.name": "falkon"},
    "eigenpro4": {"solver.name": "eigenpro4"},
    "direct": {"solver.name": "direct"},
    "all rows": {"solver.name": "auto", "model.n_centers": "auto"},
}


def settings(run_dir: Path | None = None, **changes: Any) -> RunConfig:
    """Return settings that leave kernel and metric open, with 200 centers."""
    return open_settings(run_dir, **{"model.n_centers": 200} | changes)


def source(n: int = N, seed: int = 0, kind: str = "exponential") -> ArraySource:
    """Return a source of rows with skewed targets."""
    return ArraySource(*skewed_data(kind, n, seed), unit_rows=100)


def fit(kind: str = "exponential", n: int = N, **parameters: Any) -> sk.KernelRegressor:
    """Return a regressor of rows with skewed targets."""
    parameters = {"random_state": 0, "calibrate": False} | parameters
    return sk.KernelRegressor(**parameters).fit(*skewed_data(kind, n))


@cache
def cached_fit(**parameters: Any) -> sk.KernelRegressor:
    """Return the model of `fit`, fitted once for equal parameters; tests do not change it."""
    return fit(**parameters)


def error(model: Any, kind: str = "exponential") -> float:
    """Return the mean squared error divided by the variance of new targets."""
    X, y = skewed_data(kind, 1000, 1)
    return float(np.mean((model.predict(X) - y) ** 2) / y.var())


def transform_of(model: sk.KernelRegressor) -> dict[str, Any] | None:
    """Return the facts of the log scale that a model has chosen, or None."""
    actual: dict[str, Any] | None = model.report_.get("target_transform")
    return actual


# -- fits -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_log_scale_predicts_better() -> None:
    model, plain = cached_fit(), cached_fit(target_transform="none")
    assert transform_of(model) is not None
    assert transform_of(plain) is None
    assert error(model) < 0.9 * error(plain)
    assert fit("additive").report_.get("target_transform") is None


def test_predictions_invert_the_log_scale() -> None:
    model = fit(scale="none", n_centers=100, solver="block", target_transform="log")
    X, facts = skewed_data("exponential", 50, 1)[0], transform_of(model)
    assert facts is not None
    Z = model.centers_
    K = np.exp(-np.linalg.norm(X[:, None] - Z[None], axis=2) / model.bandwidth_)
    if model.kernel_.describe()["kernel"] == "laplace":
        z = K @ model.dual_coef_ + model.intercept_
        y = np.array(facts["gain"]) * facts["unit"] * np.expm1(z)
        np.testing.assert_allclose(model.predict(X), y[:, 0], rtol=1e-4)
    assert (model.predict(X) > 0).all()


def test_counts_with_zeros_and_several_outputs_are_learned() -> None:
    X, y = skewed_data("counts", N)
    assert (y == 0).any()
    model = sk.KernelRegressor(target_transform="log", calibrate=False).fit(
        X, np.column_stack([y, 1000 * skewed_data("exponential", N)[1]])
    )
    fresh = skewed_data("counts", 1000, 1)
    actual = model.predict(fresh[0])
    assert actual.shape == (1000, 2)
    other = skewed_data("exponential", 1000, 1)[1] * 1000
    assert np.mean((actual[:, 1] - other) ** 2) < 0.1 * other.var()
    assert abs(actual[:, 0].mean() / fresh[1].mean() - 1) < 0.1


@pytest.mark.slow
def test_metrics_are_in_target_units() -> None:
    X, y = skewed_data("exponential", 300, 1)
    test = ArraySource(X, y)
    result = finished(settings(), source=source(), test=test)
    F = result.model.values(X)[:, 0]
    assert result.metrics["test_mse"] == pytest.approx(np.mean((F - y) ** 2))
    assert result.metrics["test_r2"] == pytest.approx(1 - np.mean((F - y) ** 2) / y.var())
    assert max(result.losses) < 2  # losses of the logarithms; y is of the size of 1e4
    early = fit(early_stopping=True, solver="block", epochs=3)
    assert early.validation_scores_[-1] > 0.9


@pytest.mark.parametrize("solver", ["direct", "falkon", "block"])
def test_training_losses_are_those_of_logarithms(solver: str) -> None:
    model = fit(solver=solver, n_centers=200, target_transform="log")
    assert model.loss_curve_[-1] < 1


# -- standard deviations and intervals ------------------------------------------------------------


def test_standard_deviations_use_delta_method() -> None:
    given = {"solver": "direct", "posterior": True, "kernel": sk.Laplace(2.0)}
    model = fit(**given, target_transform="log")
    facts = transform_of(model)
    assert facts is not None
    X, y = skewed_data("exponential", N)
    unit, gain = facts["unit"][0], facts["gain"][0]
    logs = sk.KernelRegressor(
        **given, random_state=0, calibrate=False, target_transform="none", ridge=model.ridge_
    ).fit(X, np.log1p(y / unit))
    fresh = skewed_data("exponential", 100, 1)[0]
    z, z_std = logs.predict(fresh, return_std=True)
    values, std = model.predict(fresh, return_std=True)
    np.testing.assert_allclose(values, gain * unit * np.expm1(z), rtol=1e-3)
    step = 1e-4
    difference = gain * unit * (np.expm1(z + step * z_std) - np.expm1(z)) / step
    np.testing.assert_allclose(std, difference, rtol=2e-2)


@cache
def calibrated_figures() -> Any:
    """Return the figures of a run with calibration on fresh rows."""
    config = settings(**{"run.calibrate": True})
    return finished(config, source=source(2000), test=source(2000, 1)).metrics


@pytest.mark.slow
def test_intervals_cover_the_targets() -> None:
    """Check the average over models, because the intervals of one depend on the 200 rows that
    calibrate it."""
    coverages: dict[bool, list[float]] = {False: [], True: []}
    X, y = skewed_data("exponential", 2000, 100)
    for seed in range(4):
        model = sk.KernelRegressor(calibrate=True, metric="none", random_state=seed)
        model.fit(*skewed_data("exponential", 2000, seed))
        assert transform_of(model) is not None
        for normalised, shares in coverages.items():
            ends = model.predict(X, interval=0.9, normalised=normalised)[1]
            shares.append(float(np.mean((y >= ends[:, 0]) & (y <= ends[:, 1]))))
    for shares in coverages.values():
        assert 0.87 < np.mean(shares) < 0.93


@pytest.mark.slow
@pytest.mark.parametrize("normalised", [False, True])
def test_intervals_widen_with_predictions(normalised: bool, tmp_path: Path) -> None:
    """Check proportional noise: large and small predictions have the same coverage."""
    model = cached_fit(n=2000, calibrate=True)
    X, y = skewed_data("exponential", 2000, 1)
    values, ends = model.predict(X, interval=0.9, normalised=normalised)
    is_inside = (y >= ends[:, 0]) & (y <= ends[:, 1])
    for part in np.array_split(np.argsort(values), 4):
        assert 0.8 < is_inside[part].mean() <= 0.99
    assert (ends[:, 0] > 0).all()
    model.save(tmp_path / "saved")
    reloaded = sk.load(tmp_path / "saved")
    np.testing.assert_array_equal(reloaded.predict(X, interval=0.9, normalised=normalised)[1], ends)
    figures = calibrated_figures()
    prefix = "test_normalised_" if normalised else "test_"
    assert 0.85 < figures[f"{prefix}coverage"] < 0.95
    assert figures[f"{prefix}width"] == pytest.approx(np.ptp(ends, axis=1).mean(), rel=0.3)


# -- stopped, saved and continued runs ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("name", SOLVERS)
def test_stopped_run_resumes_with_same_bits(name: str, tmp_path: Path) -> None:
    changes = SOLVERS[name] | {"run.evaluate_every": 0}
    uninterrupted = finished(settings(tmp_path / "whole", **changes), source=source())
    assert "target_transform" in uninterrupted.meta["setup"]
    config, test = settings(tmp_path / "run", **changes), source(50, 5)
    stopped(config, 3, source=source(), test=test)
    resumed = finished(config, source=source(), test=test)
    assert resumed.meta["setup"] == uninterrupted.meta["setup"]
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))


@pytest.mark.slow
def test_model_is_saved_loaded_and_pickled(tmp_path: Path) -> None:
    model, fresh = fit(run_dir=tmp_path / "run"), skewed_data("exponential", 100, 1)[0]
    model.save(tmp_path / "saved")
    expected = model.predict(fresh)
    for reloaded in (
        sk.load(tmp_path / "run"), sk.load(tmp_path / "saved"), pickle.loads(pickle.dumps(model))
    ):  # fmt: skip
        np.testing.assert_array_equal(reloaded.predict(fresh), expected)
        assert transform_of(reloaded) == transform_of(model)
        assert reloaded.target_transform == "auto"
    requested = fit(run_dir=tmp_path / "asked", target_transform="log")
    assert sk.load(tmp_path / "asked").target_transform == requested.target_transform


def test_digest_includes_target_scale() -> None:
    result = finished(settings(), source=source())
    before, targets = result.model.digest(), result.model.targets
    assert targets.gain is not None
    object.__setattr__(targets, "gain", 2 * targets.gain)
    assert result.model.digest() != before


@pytest.mark.slow
def test_continued_run_keeps_log_scale(tmp_path: Path) -> None:
    first = finished(settings(tmp_path / "a"), source=source())
    then = finished(
        settings(tmp_path / "b"), source=source(N, 3, "additive"), continues=tmp_path / "a"
    )
    assert then.meta["setup"]["target_transform"] == first.meta["setup"]["target_transform"]
    np.testing.assert_array_equal(then.model.targets.unit, first.model.targets.unit)
    config = settings(tmp_path / "c")
    test = source(50, 5)
    arguments = {"source": source(N, 3, "additive"), "continues": tmp_path / "a", "test": test}
    stopped(config, 5, **arguments)
    finished(config, **arguments)
    assert_same_bits(final(tmp_path / "c"), final(tmp_path / "b"))


@pytest.mark.slow
def test_warm_start_keeps_log_scale(tmp_path: Path) -> None:
    fit(solver="block", run_dir=tmp_path / "a")
    model = fit(solver="block", warm_start=True)
    facts, before = transform_of(model), error(model)
    X, y = skewed_data("exponential", N)
    model.fit(X, y)
    assert transform_of(model) == facts
    assert error(model) < 1.5 * before
    other = sk.KernelRegressor(solver="block", warm_start=str(tmp_path / "a")).fit(X, y)
    assert transform_of(other) == facts


@pytest.mark.slow
def test_partial_fit_keeps_log_scale(tmp_path: Path) -> None:
    fit(solver="block", run_dir=tmp_path / "run")
    loaded = sk.load(tmp_path / "run")
    facts, before = transform_of(loaded), error(loaded)
    loaded.partial_fit(*skewed_data("exponential", N, 7))
    assert transform_of(loaded) == facts
    assert error(loaded) < 1.5 * before
    blocks = sk.KernelRegressor()
    for seed in range(2):
        blocks.partial_fit(*skewed_data("exponential", N, seed))
    assert transform_of(blocks) is None
    requested = sk.KernelRegressor(target_transform="log")
    for seed in range(2):
        requested.partial_fit(*skewed_data("exponential", N, seed))
    assert error(requested) < error(blocks)
    with pytest.raises(DataError, match="targets of at least 0"):
        requested.partial_fit(skewed_data("exponential", N)[0], -skewed_data("exponential", N)[1])


def test_run_of_older_version_is_loaded(tmp_path: Path) -> None:
    """Check a record without the setting, and a setup without the arrays."""
    config = settings(tmp_path, **{"model.target_transform": "none"})
    finished(config, source=source())
    setup = RunSnapshot.open(tmp_path).setup
    assert not {"target_unit", "target_gain"} & set(setup.arrays)
    assert "target_transform" not in setup.meta["setup"]
    assert "target_transform" not in settings().identity()["model"]


# -- ranks, search and command line ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize("columns", [2, 1])
def test_ranks_share_log_scale(columns: int, tmp_path: Path) -> None:
    X, y = skewed_data("exponential", N)
    store = str(tmp_path / "train.zarr")
    ingest(X, store, y=y, chunk_mb=100 * 12 / 2**20)
    changes = {"data.train": store, "run.precision": "float64", "solver.block_size": 100}
    one = finished(settings(tmp_path / "one", **changes))
    grid = {"run.ranks": 2, "run.center_ranks": columns}
    two = finished(settings(tmp_path / "two", **changes, **grid))
    assert two.meta["setup"]["target_transform"] == one.meta["setup"]["target_transform"]
    fresh = skewed_data("exponential", 200, 1)[0].astype(np.float64)
    actual = [sk.load(tmp_path / name).predict(fresh) for name in ("one", "two")]
    np.testing.assert_allclose(actual[1], actual[0], rtol=1e-6)


@pytest.mark.slow
def test_search_chooses_log_scale_once() -> None:
    X, y = skewed_data("exponential", N)
    tuned = sk.tune(
        X, y, estimator=sk.KernelRegressor(random_state=0), kernels=["laplace"],
        ridges=[1e-4, 1e-2], refine=0, refit=True,
    )  # fmt: skip
    assert transform_of(tuned.estimator) is not None
    if not tuned.best["as_given"]:
        assert tuned.estimator.target_transform == "log"
        assert 'target_transform = "log"' in tuned.toml
    assert error(tuned.estimator) < error(cached_fit(target_transform="none"))


@pytest.mark.slow
def test_commands_show_log_scale(tmp_path: Path, printed: Printed) -> None:
    X, y = skewed_data("exponential", N)
    ingest(X, str(tmp_path / "train.zarr"), y=y)
    fresh = skewed_data("exponential", 100, 1)[0]
    pd.DataFrame(fresh).to_csv(tmp_path / "new.csv", index=False)
    run = tmp_path / "run"
    printed("train", "--train", tmp_path / "train.zarr", "--run-dir", run)
    facts = json.loads(printed("info", run, "--json"))["solver"]["target_transform"]
    assert set(facts) == {"unit", "gain", "error_ratio"}
    assert "log scale (unit " in printed("info", run)
    printed("report", run, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "squared error of left-out rows" in page
    assert "squared errors of the logarithms" in page  # in the note of the training loss
    printed("predict", run, tmp_path / "new.csv", tmp_path / "out.csv")
    values = pd.read_csv(tmp_path / "out.csv").iloc[:, -1].to_numpy()
    np.testing.assert_allclose(values, sk.load(run).predict(fresh), rtol=1e-2)


# -- refusals -------------------------------------------------------------------------------------


def test_negative_targets_are_refused() -> None:
    X, y = skewed_data("exponential", N)
    y[7] = -3
    with pytest.raises(DataError, match=r"targets of at least 0, but row 7 has -3"):
        sk.KernelRegressor(target_transform="log").fit(X, y)
    y[7] = 0
    assert np.isfinite(sk.KernelRegressor(target_transform="log").fit(X, y).predict(X)).all()


@pytest.mark.parametrize("targets", [{"target_transform": "log"}, {"loss": "poisson"}])
@pytest.mark.parametrize("split", ["calibrate", "early_stopping"])
def test_refused_row_has_the_users_number(targets: dict[str, Any], split: str) -> None:
    """Check that rows which are set aside do not change the row number in the message."""
    X, y = skewed_data("exponential", N)
    y[577] = -3
    with pytest.raises(DataError, match=r"row 577 has -3"):
        sk.KernelRegressor(**targets, random_state=0, **{split: True}).fit(X, y)


def test_refused_row_of_a_store_has_its_input_number(tmp_path: Path) -> None:
    X, y = skewed_data("exponential", N)
    y[577] = -3
    ingest(X, str(tmp_path / "train.zarr"), y=y)
    with pytest.raises(DataError, match=r"row 577 has -3"):
        sk.KernelRegressor(target_transform="log").fit(str(tmp_path / "train.zarr"))


@pytest.mark.slow
def test_negative_target_outside_sample_disables_log_scale_silently() -> None:
    X, y = skewed_data("exponential", 3000)
    y[1234] = -3
    model = sk.KernelRegressor(
        "laplace", bandwidth=2.0, n_centers=200, solver="block", calibrate=False
    ).fit(X, y)
    assert np.isfinite(model.predict(X)).all()


def test_other_losses_and_classes_are_refused(tmp_path: Path) -> None:
    X, y = skewed_data("exponential", N)
    with pytest.raises(ConfigError, match=r"needs the squared error, not loss='huber'"):
        sk.KernelRegressor(target_transform="log", loss="huber").fit(X, y)
    labels = ArraySource(X, np.arange(N) % 2, classes=("a", "b"))
    with pytest.raises(ConfigError, match="is for values, but the targets are classes"):
        finished(settings(**{"model.target_transform": "log"}), source=labels)


@pytest.mark.slow
def test_weights_on_another_scale_are_refused(tmp_path: Path) -> None:
    X, y = skewed_data("exponential", N)
    for transform in ("log", "none"):
        fit(solver="block", run_dir=tmp_path / transform, target_transform=transform)
    for start, given, match in (
        ("log", {"target_transform": "none"}, "trained on a log scale of the targets"),
        ("none", {"target_transform": "log"}, "trained on the scale of the targets"),
        ("log", {"loss": "huber"}, "from which only squares can be continued"),
    ):
        with pytest.raises(ConfigError, match=match):
            sk.KernelRegressor(solver="block", warm_start=str(tmp_path / start), **given).fit(X, y)


def test_continued_run_cannot_change_log_scale(tmp_path: Path) -> None:
    finished(settings(tmp_path / "a"), source=source())
    given = {"source": source(), "continues": tmp_path / "a"}
    for changes, match in (
        ({"model.loss": "huber"}, "from which only squares can be continued"),
        ({"model.target_transform": "none"}, "keeps the model of that run"),
    ):
        with pytest.raises(ConfigError, match=match):
            finished(settings(tmp_path / "b", **changes), **given)


def test_predictions_are_bounded_by_the_largest_target() -> None:
    """Check a few rows with the largest targets, which are not among the sampled rows."""
    X, y = skewed_data("exponential", 3000)
    y = y.copy()
    X[:5], y[:5] = X[:5] + 8, 300 * y.max()
    model = sk.KernelRegressor(target_transform="log", metric="none", random_state=0).fit(X, y)
    assert model.predict(X[:5]).max() > 100 * np.median(y)
    assert model.predict(X[:5] * 3).max() < 30 * y.max()
    growing = sk.KernelRegressor(target_transform="log", n_centers=100, random_state=0)
    for factor in (1, *[100] * 6):
        growing.partial_fit(X[100:900], factor * y[100:900])
    assert growing.predict(X[100:900]).max() > 10 * y[100:900].max()
