"""Test when all rows become centers and when float64 is used, also in resumed runs."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

import streamkern as sk
from streamkern.planning.sizes import EffortLevel
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver.direct import Direct
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.random_transforms import GaussianNoise
from streamkern.train.resolve import given_arrays, resolved_run
from tests import reference as ref
from tests.runs import (
    N,
    array_source,
    arrays,
    assert_same_bits,
    final,
    finished,
    opened,
    settings,
    stopped,
)

OPEN = {"model.n_centers": "auto", "solver.name": "auto", "solver.ridge": 1e-3}


def set_limits(patch: pytest.MonkeyPatch, n_centers: int, all_rows: int) -> None:
    """Give effort "default" these limits."""
    levels = MappingProxyType({"default": EffortLevel(n_centers, all_rows, 100)})
    for module in (given_arrays, resolved_run):
        patch.setattr(module, "EFFORT_LEVELS", levels)


def test_effort_allows_all_rows_as_centers(monkeypatch: pytest.MonkeyPatch) -> None:
    for n_centers, all_rows, p in ((N, 0, N), (20, N, N), (20, N - 1, 20)):
        set_limits(monkeypatch, n_centers, all_rows)
        run = opened(array_source(), **OPEN)
        assert (run.problem.p, run.in_order) == (p, p == N)


@pytest.mark.parametrize(
    "changes",
    [{"run.memory": "120 MiB"}, {"run.early_stopping": True}, {"solver.ridge": 0.0}],
)
def test_fewer_centers_without_single_equation(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a kernel matrix that does not fit the memory, and settings that need another solver."""
    set_limits(monkeypatch, 20, 3000)
    source = array_source(3000)
    for more, p in (({}, 3000), (changes, 20)):
        run = opened(source, **(OPEN | more))
        assert (run.problem.p, run.in_order) == (p, p == 3000)


def test_augmented_rows_use_fewer_centers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 20, N)
    run = opened(AugmentedSource(array_source(), 1, [GaussianNoise(0.1)]), **OPEN)
    assert run.problem.p == 20


def test_resumed_run_keeps_number_of_centers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a run whose limits differ from those of this version."""
    for name, before, after, p in (("few", 0, N, 20), ("all", N, 0, N)):
        set_limits(monkeypatch, 20, before)
        config = settings(tmp_path / name, **(OPEN | {"run.checkpoint_every": 1}))
        stopped(config, 1, source=array_source(), test=array_source(10, 5))
        set_limits(monkeypatch, 20, after)
        result = finished(config, source=array_source(), test=array_source(10, 5))
        assert len(result.Z) == p
        uninterrupted = settings(tmp_path / f"{name} whole", **OPEN)
        set_limits(monkeypatch, 20, before)
        finished(uninterrupted, source=array_source(), test=array_source(10, 5))
        assert_same_bits(final(tmp_path / name), final(tmp_path / f"{name} whole"))


def test_all_rows_solve_one_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 20, N)
    X, y = arrays()
    result = finished(settings(**OPEN), source=array_source())
    K, Y = ref.laplace(X, X, 3.0), np.eye(3)[y]
    alpha = np.linalg.solve(K + N * 1e-3 * np.eye(N), Y - Y.mean(axis=0))
    fresh = arrays(seed=1)[0]
    expected = ref.laplace(fresh, X, 3.0) @ alpha + Y.mean(axis=0)
    np.testing.assert_allclose(result.model.predict(array_source(seed=1)), expected, atol=1e-4)


# -- float64 for few rows -------------------------------------------------------------------------


def values(n: int = N, seed: int = 0) -> ArraySource:
    """Return rows of a function without noise."""
    X, _ = arrays(n, seed)
    return ArraySource(X, np.sin(2 * X[:, 0]) + X[:, 1])


FEW = OPEN | {"solver.ridge": 1e-9}


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "float64"),
        ({"run.precision": "exact"}, "exact"),
        ({"run.precision": "float64"}, "float64"),
        ({"solver.name": "block"}, "exact"),
        ({"model.n_centers": 20}, "exact"),
        ({"model.loss": "huber"}, "exact"),
        ({"run.memory": "4 GiB"}, "float64"),
    ],
    ids=str,
)
def test_few_rows_are_solved_in_float64(changes: dict[str, object], precision: str) -> None:
    run = opened(values(), **(FEW | changes))
    assert run.precision == precision
    chosen = precision == "float64" and "run.precision" not in changes
    assert run.search_precision == ("exact" if chosen else precision)
    assert run.problem.itemsize == (8 if precision == "float64" else 4)


def test_classes_and_many_rows_are_solved_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamkern.solver.direct.MAX_WIDE_ROWS", N - 1)
    for source in (values(), array_source()):
        run = opened(source, **FEW)
        assert run.precision == "exact"


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_low_noise_rows_are_solved_in_float64(
    noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the factor stays in float32, and that a resumed run does not choose again."""
    rng = np.random.default_rng(1)
    monkeypatch.setattr("streamkern.solver.direct.NARROW_ROWS", 300)
    X = rng.uniform(size=(300, 5))
    y = np.sin(3 * X[:, 0]) + X[:, 1] + noise * rng.standard_normal(300)
    source, test = ArraySource(X, y), ArraySource(X[:10], y[:10])
    changes = OPEN | {"run.checkpoint_every": 1, "solver.ridge": "auto"}
    config, full = (settings(tmp_path / name, **changes) for name in ("run", "whole"))
    expected = finished(full, source=source)
    assert expected.model.op.precision == ("exact" if noise else "float64")
    stopped(config, 1, source=source, test=test)
    with monkeypatch.context() as patch:
        patch.setattr(Direct, "rounding_shows", lambda *arguments: not noise)
        result = finished(config, source=source, test=test)
    assert result.model.op.precision == expected.model.op.precision
    with RunDirectory(tmp_path / "whole", writable=False) as saved:
        setup = saved.load_setup()
    assert setup is not None
    assert setup.meta["setup"]["factor"] == "float32"
    assert setup.arrays["Z"].dtype == (np.float32 if noise else np.float64)
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))


def test_large_kernel_values_use_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a kernel with values near 1 and the same ridge stays in float32."""
    monkeypatch.setattr("streamkern.solver.direct.NARROW_ROWS", 300)
    rng = np.random.default_rng(1)
    X = rng.standard_normal((300, 6))
    source = ArraySource(X, X[:, 0] * X[:, 1] + 0.3 * rng.standard_normal(300))
    for gamma, precision in ((1.0, "float64"), (1e-3, "exact")):
        changes = OPEN | {
            "model.kernel": {"kind": "polynomial", "degree": 6, "gamma": gamma},
            "model.bandwidth": "auto", "model.metric": "none",
        }  # fmt: skip
        result = finished(settings(tmp_path / str(gamma), **changes), source=source)
        assert result.model.op.precision == precision


@pytest.mark.parametrize("started_wide", [True, False])
def test_resumed_run_keeps_its_precision(
    started_wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a run of an earlier version, which began in float32 without a record of the choice."""
    may_use_float64 = resolved_run._may_use_float64
    config = settings(tmp_path / "run", **(FEW | {"run.checkpoint_every": 1}))
    uninterrupted = settings(tmp_path / "whole", **FEW)
    monkeypatch.setattr(
        resolved_run, "_may_use_float64", may_use_float64 if started_wide else lambda run: False
    )
    finished(uninterrupted, source=values(), test=values(10, 5))
    stopped(config, 1, source=values(), test=values(10, 5))
    monkeypatch.setattr(resolved_run, "_may_use_float64", lambda run: not started_wide)
    record = (tmp_path / "run" / "run.json").read_text()
    assert ("widened" in record) == started_wide
    result = finished(config, source=values(), test=values(10, 5))
    assert result.model.op.precision == ("float64" if started_wide else "exact")
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))


@pytest.mark.slow
def test_noise_free_functions_exceed_float32_accuracy() -> None:
    """Check with the kernel that float32 finds, because the searches stay in float32."""
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(900, 4))
    y = np.sin(3 * X[:, 0] * X[:, 1]) + (X[:, 2] - 0.5) ** 2 + X[:, 3]
    fitted = {
        precision: sk.KernelRegressor(random_state=0, precision=precision).fit(X[:500], y[:500])
        for precision in ("auto", "exact")
    }
    errors = {
        name: float(np.sqrt(((model.predict(X[500:]) - y[500:]) ** 2).mean()))
        for name, model in fitted.items()
    }
    assert errors["auto"] < 0.8 * errors["exact"]
    assert repr(fitted["auto"].kernel_) == repr(fitted["exact"].kernel_)


def test_float64_run_can_be_continued_and_warm_started(tmp_path: Path) -> None:
    """Check that another solver takes its weights and its precision."""
    source = values()
    first = settings(tmp_path / "first", **FEW)
    finished(first, source=source)
    second = settings(tmp_path / "second", **(FEW | {"solver.name": "block", "data.epochs": 2}))
    result = finished(second, source=values(N, 1), continues=tmp_path / "first")
    assert result.model.op.precision == "float64"
    third = settings(
        tmp_path / "third",
        **FEW | {"solver.name": "block", "solver.warm_start": str(tmp_path / "first")},
    )
    result = finished(third, source=source)
    assert result.model.op.precision == "float64"
    X, _ = arrays(N)
    model = sk.KernelRegressor(random_state=0, warm_start=True, epochs=1).fit(X, X[:, 0])
    assert model._state.precision == "float64"
    model.fit(X, X[:, 0])
    assert model._state.precision == "float64"
    model.set_params(solver="block").fit(X, X[:, 0] + 0.1)
    assert model._state.precision == "float64"
    assert abs(float((model.predict(X) - X[:, 0]).mean()) - 0.1) < 0.02
