"""Test when metric "auto" learns a metric, and its effect on a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

import streamkern as sk
from streamkern.kernels.builtin import Laplace
from streamkern.stream.sources.transforms import Scale
from streamkern.train.resolve import metric_mode
from streamkern.train.resolve.metric_mode import (
    CHOSEN_TO_LEARN,
    MAX_METRIC_OUTPUTS,
    MIN_METRIC_ROWS,
    MIN_METRIC_ROWS_OF_CLASSES,
    requested_metric_mode,
)
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import open_data
from streamkern.train.train import train
from tests.runs import Array, assert_same_bits, final

D = 5


def rows(n: int = MIN_METRIC_ROWS, d: int = D, dtype: Any = np.float32) -> Array:
    """Return normally distributed rows."""
    return np.random.default_rng(3).normal(size=(n, d)).astype(dtype)


def targets_of(X: Array) -> Array:
    """Return targets that depend on two features only."""
    return np.asarray(np.sin(3 * X[:, 0]) + X[:, 1] / 2, np.float32)


def mode_for(source: Any = None, *, has_initial_weights: bool = False, **overrides: Any) -> str:
    """Return the mode of the metric for a source and settings, whose dots are written `__`."""
    X = rows()
    source = sk.ArraySource(X, targets_of(X)) if source is None else source
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    config = sk.RunConfig().with_overrides(names)
    mode = requested_metric_mode(
        config, open_data(config, source), has_initial_weights=has_initial_weights
    )
    assert (mode is CHOSEN_TO_LEARN) == (config.model.metric == "auto" and mode.learns)
    assert mode.reason.startswith("chosen, as" if config.model.metric == "auto" else "as set")
    return mode.mode


def test_table_learns_a_metric() -> None:
    assert mode_for() == "learn"
    X = (1000 + 100 * rows()).astype(np.uint16)
    assert mode_for(sk.ArraySource(X, targets_of(rows()))) == "learn"


@pytest.mark.parametrize("kernel", ["laplace", "matern32", "matern52", "gaussian"])
@pytest.mark.parametrize("solver", ["block", "direct", "falkon"])
def test_supported_kernels_and_solvers_learn_a_metric(kernel: str, solver: str) -> None:
    assert mode_for(model__kernel=kernel, solver__name=solver) == "learn"
    assert mode_for(model__kernel=kernel, model__bandwidth=2.0, solver__name=solver) == "none"


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__bandwidth": 3.0},
        {"model__bandwidth": "median"},
        {"model__kernel": "laplace_l1"},
        {"model__kernel": {"kind": "laplace"}},
        {"model__kernel": Laplace(2.0)},
        {"model__kernel": Laplace(2.0, metric=np.ones(D))},
        {"model__features": "nystrom"},
        {"model__features": "fourier"},
        {"solver__name": "sgd"},
        {"solver__name": "eigenpro4"},
        {"run__precision": "integer"},
        {"has_initial_weights": True},
        {"model__metric": "none"},
    ],
)
def test_other_settings_learn_no_metric(overrides: dict[str, Any]) -> None:
    assert mode_for(**overrides) == "none"


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("learn", "learn"), ("learn-diagonal", "learn-diagonal"), ("learn-full", "learn-full"),
        ("m.npy", "given"),
    ],
)  # fmt: skip
def test_explicit_setting_is_followed(metric: str, expected: str) -> None:
    few = sk.ArraySource(rows(50), targets_of(rows(50)))
    bandwidth = "auto" if expected == "given" else 2.0
    assert mode_for(few, model__metric=metric, model__bandwidth=bandwidth) == expected


def source_of(X: Array) -> sk.ArraySource:
    """Return rows whose target is their first feature."""
    return sk.ArraySource(X, X.reshape(len(X), -1)[:, 0])


def class_source(n: int) -> sk.ArraySource:
    """Return a source of n rows of two classes."""
    return sk.ArraySource(rows(n), np.arange(n) % 2, classes=("a", "b"))


def source_with_outputs(c: int) -> sk.ArraySource:
    """Return a source of rows with c constant targets."""
    return sk.ArraySource(rows(), np.broadcast_to(np.float32(1), (MIN_METRIC_ROWS, c)))


def digit_pixels() -> Array:
    """Return the pixels of the digits, twice."""
    return np.tile(load_digits().data, (2, 1)).astype(np.float32)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (lambda: source_of(rows(MIN_METRIC_ROWS - 1)), "none"),
        (lambda: source_of(rows(MIN_METRIC_ROWS)), "learn"),
        (lambda: class_source(MIN_METRIC_ROWS_OF_CLASSES - 1), "none"),
        (lambda: class_source(MIN_METRIC_ROWS_OF_CLASSES), "learn"),
        (lambda: source_of(rows(d=1)), "none"),
        (lambda: source_of(rows(d=2)), "learn"),
        (lambda: source_of(rows(d=256)), "learn"),
        (lambda: source_of(rows(d=257)), "none"),
        (lambda: source_with_outputs(MAX_METRIC_OUTPUTS), "learn"),
        (lambda: source_with_outputs(MAX_METRIC_OUTPUTS + 1), "none"),
        (lambda: source_of(rows(d=16).reshape(-1, 4, 4, 1)), "none"),
        (lambda: source_of(rows(dtype=np.uint8)), "none"),
        (lambda: source_of(digit_pixels()), "none"),
    ],
    ids=[
        "too few rows", "enough rows", "too few rows of classes", "enough rows of classes",
        "1 feature", "2 features", "256 features", "257 features", "most outputs",
        "too many outputs", "images", "bytes", "sparse pixels",
    ],
)  # fmt: skip
def test_rows_determine_whether_a_metric_is_learned(
    source: Callable[[], sk.ArraySource], expected: str
) -> None:
    assert mode_for(source()) == expected


def test_scaled_pixels_learn_a_metric() -> None:
    assert mode_for(source_of(digit_pixels()), data__scale="feature") == "learn"


def test_copies_of_a_row_count_once() -> None:
    X = rows(MIN_METRIC_ROWS // 2)
    base = sk.ArraySource(X, targets_of(X))
    assert mode_for(sk.AugmentedSource(base, 4, [Scale("feature")])) == "none"


FEW = 500


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits, so that a metric is learned in a second."""
    monkeypatch.setattr(metric_mode, "MIN_METRIC_ROWS", FEW)


def fit_regressor(metric: str = "auto", **parameters: Any) -> sk.KernelRegressor:
    """Return a regressor of a few rows."""
    X = rows(FEW)
    settings = {"n_centers": 200, "epochs": 1, "solver": "block"} | parameters
    return sk.KernelRegressor(metric=metric, **settings).fit(X, targets_of(X))


@pytest.mark.usefixtures("low_limits")
def test_auto_gives_same_bits_as_explicit_mode() -> None:
    learned, plain = fit_regressor(), fit_regressor(bandwidth=2.0)
    assert learned.kernel_.metric is not None
    assert plain.kernel_.metric is None
    assert "learned_metric" not in plain.report_
    for one, other in (
        (learned, fit_regressor("learn")),
        (plain, fit_regressor("none", bandwidth=2.0)),
    ):
        np.testing.assert_array_equal(one.dual_coef_, other.dual_coef_)
        np.testing.assert_array_equal(one.predict(rows(50)), other.predict(rows(50)))


def test_insufficient_memory_disables_metric() -> None:
    """Check a memory that suffices for a run with "none"."""
    X = rows(4000, 32)
    inputs = RunInputs(sk.ArraySource(X, targets_of(X)))
    config = sk.RunConfig().with_overrides({"model.n_centers": 50, "run.threads": 1})

    def opened(metric: str, memory: int) -> Any:
        run = open_run(
            config.with_overrides({"model.metric": metric, "run.memory": memory}), inputs
        )
        run.backend.close()
        return run

    plain_peak = opened("none", 1 << 30).buffers.peak
    assert opened("auto", 1 << 30).metric_mode.mode == "learn"
    assert opened("auto", 1 << 30).buffers.peak > plain_peak
    tight = opened("auto", plain_peak)
    assert tight.metric_mode.mode == "none"
    assert "memory" in tight.metric_mode.reason
    with pytest.raises(sk.MemoryBudgetError):
        opened("learn", plain_peak)


@pytest.mark.usefixtures("low_limits")
def test_run_records_auto_and_resumes(tmp_path: Path) -> None:
    """Check that a resume keeps the bits, and that a warm start and a continued run use the metric
    of the run."""
    X = rows(FEW)
    source, location = sk.ArraySource(X, targets_of(X)), str(tmp_path / "run")
    config = sk.RunConfig().with_overrides(
        {
            "model.n_centers": 200, "data.epochs": 1, "solver.name": "block",
            "run.run_dir": location, "run.device": "cpu",
        }
    )  # fmt: skip
    for _ in range(2):  # the second is a resume
        train(config, source=source).model.backend.close()
    before = final(Path(location))
    assert sk.load(location).metric == "auto"
    metric = sk.load(location).kernel_.metric
    assert metric is not None
    for name, settings, more in (
        ("warm", {"solver.warm_start": location}, {}), ("continued", {}, {"continues": location}),
    ):  # fmt: skip
        resumed = config.with_overrides({"run.run_dir": str(tmp_path / name), **settings})
        result = train(resumed, source=source, **more)
        np.testing.assert_array_equal(result.model.op.kernel.metric, metric)
        assert "learned_metric" not in result.meta["setup"]
        result.model.backend.close()
    assert_same_bits(before, final(Path(location)))


@pytest.mark.usefixtures("low_limits")
def test_first_block_determines_metric() -> None:
    X = rows(FEW + 200)
    model = sk.KernelRegressor(n_centers=150, solver="block")
    model.partial_fit(X[:FEW], targets_of(X[:FEW]))
    metric = model.kernel_.metric
    assert metric is not None
    model.partial_fit(X[FEW:], targets_of(X[FEW:]))
    np.testing.assert_array_equal(model.kernel_.metric, metric)
    few = sk.KernelRegressor(n_centers=150, solver="block").partial_fit(
        X[:300], targets_of(X[:300])
    )
    assert few.partial_fit(X, targets_of(X)).kernel_.metric is None


def test_kernel_keeps_its_metric_over_blocks() -> None:
    X, metric = rows(1500), np.arange(1.0, D + 1)
    model = sk.KernelRegressor(Laplace(3.0, metric=metric), n_centers=150, solver="block")
    for part in (slice(1200), slice(1200, None)):
        model.partial_fit(X[part], targets_of(X[part]))
        np.testing.assert_array_equal(model.kernel_.metric, metric)
