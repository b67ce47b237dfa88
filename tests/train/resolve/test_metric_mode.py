"""Check the meaning of "auto": every condition alone, its effect on a run, and its message."""

from __future__ import annotations

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
    return np.random.default_rng(3).normal(size=(n, d)).astype(dtype)


def truth(X: Array) -> Array:
    return np.asarray(np.sin(3 * X[:, 0]) + X[:, 1] / 2, np.float32)


def word(source: Any = None, *, has_initial_weights: bool = False, **overrides: Any) -> str:
    X = rows()
    source = sk.ArraySource(X, truth(X)) if source is None else source
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    config = sk.RunConfig().with_overrides(names)
    options = requested_metric_mode(
        config, open_data(config, source), has_initial_weights=has_initial_weights
    )
    assert (options is CHOSEN_TO_LEARN) == (config.model.metric == "auto" and options.learns)
    assert options.reason.startswith("chosen, as" if config.model.metric == "auto" else "as set")
    return options.mode


def test_table_learns_a_metric() -> None:
    assert word() == "learn"
    X = (1000 + 100 * rows()).astype(np.uint16)
    assert word(sk.ArraySource(X, truth(rows()))) == "learn"


@pytest.mark.parametrize("kernel", ["laplace", "matern32", "matern52", "gaussian"])
@pytest.mark.parametrize("solver", ["block", "direct", "falkon"])
def test_supported_kernels_and_solvers_learn_a_metric(kernel: str, solver: str) -> None:
    assert word(model__kernel=kernel, solver__name=solver) == "learn"
    assert word(model__kernel=kernel, model__bandwidth=2.0, solver__name=solver) == "none"


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
    assert word(**overrides) == "none"


def test_explicit_setting_is_followed() -> None:
    few = sk.ArraySource(rows(50), truth(rows(50)))
    for message in ("learn", "learn-diagonal", "learn-full"):
        assert word(few, model__metric=message, model__bandwidth=2.0) == message
    assert word(few, model__metric="m.npy") == "given"


def test_unsuitable_rows_learn_no_metric() -> None:
    def mode_of(X: Array, shape: tuple[int, ...] = (), **overrides: Any) -> str:
        return word(sk.ArraySource(X.reshape(-1, *shape) if shape else X, X[:, 0]), **overrides)

    assert mode_of(rows(MIN_METRIC_ROWS - 1)) == "none"
    assert mode_of(rows(MIN_METRIC_ROWS)) == "learn"
    for n, expected in (
        (MIN_METRIC_ROWS_OF_CLASSES - 1, "none"),
        (MIN_METRIC_ROWS_OF_CLASSES, "learn"),
    ):
        classes = np.arange(n) % 2
        assert word(sk.ArraySource(rows(n), classes, classes=("a", "b"))) == expected
    assert mode_of(rows(d=1)) == "none"
    assert mode_of(rows(d=2)) == mode_of(rows(d=256)) == "learn"
    assert mode_of(rows(d=257)) == "none"
    wide = np.broadcast_to(np.float32(1), (MIN_METRIC_ROWS, MAX_METRIC_OUTPUTS + 1))
    assert word(sk.ArraySource(rows(), wide)) == "none"
    assert word(sk.ArraySource(rows(), wide[:, 1:])) == "learn"
    assert mode_of(rows(d=16), (4, 4, 1)) == "none"
    assert mode_of(rows(dtype=np.uint8)) == "none"
    pixels = np.tile(load_digits().data, (2, 1)).astype(np.float32)
    assert mode_of(pixels) == "none"
    assert mode_of(pixels, data__scale="feature") == "learn"


def test_copies_of_a_row_count_once() -> None:
    X = rows(MIN_METRIC_ROWS // 2)
    base = sk.ArraySource(X, truth(X))
    assert word(sk.AugmentedSource(base, 4, [Scale("feature")])) == "none"


FEW = 500


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits, so that a metric is learned in a second."""
    monkeypatch.setattr(metric_mode, "MIN_METRIC_ROWS", FEW)


def fitted(metric: str = "auto", **parameters: Any) -> sk.KernelRegressor:
    X = rows(FEW)
    settings = {"n_centers": 200, "epochs": 1, "solver": "block"} | parameters
    return sk.KernelRegressor(metric=metric, **settings).fit(X, truth(X))


@pytest.mark.usefixtures("low_limits")
def test_auto_gives_same_bits_as_explicit_mode() -> None:
    learned, plain = fitted(), fitted(bandwidth=2.0)
    assert learned.kernel_.metric is not None
    assert plain.kernel_.metric is None
    assert "learned_metric" not in plain.report_
    for one, other in ((learned, fitted("learn")), (plain, fitted("none", bandwidth=2.0))):
        np.testing.assert_array_equal(one.dual_coef_, other.dual_coef_)
        np.testing.assert_array_equal(one.predict(rows(50)), other.predict(rows(50)))


def test_insufficient_memory_disables_metric() -> None:
    """Check a memory that suffices for a run with "none"."""
    X = rows(4000, 32)
    parameters = RunInputs(sk.ArraySource(X, truth(X)))
    config = sk.RunConfig().with_overrides({"model.n_centers": 50, "run.threads": 1})

    def opened(metric: str, memory: int) -> Any:
        run = open_run(
            config.with_overrides({"model.metric": metric, "run.memory": memory}), parameters
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
    """Check that a resumed run is the same, and that a warm start and a continued run use its
    metric."""
    X = rows(FEW)
    source, location = sk.ArraySource(X, truth(X)), str(tmp_path / "run")
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
    model.partial_fit(X[:FEW], truth(X[:FEW]))
    metric = model.kernel_.metric
    assert metric is not None
    model.partial_fit(X[FEW:], truth(X[FEW:]))
    np.testing.assert_array_equal(model.kernel_.metric, metric)
    few = sk.KernelRegressor(n_centers=150, solver="block").partial_fit(X[:300], truth(X[:300]))
    assert few.partial_fit(X, truth(X)).kernel_.metric is None


def test_kernel_keeps_its_metric_over_blocks() -> None:
    X, metric = rows(1500), np.arange(1.0, D + 1)
    model = sk.KernelRegressor(Laplace(3.0, metric=metric), n_centers=150, solver="block")
    for part in (slice(1200), slice(1200, None)):
        model.partial_fit(X[part], truth(X[part]))
        np.testing.assert_array_equal(model.kernel_.metric, metric)
