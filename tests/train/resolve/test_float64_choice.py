"""Check which runs are solved in float64 by default, and that models made from them keep it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import streamkern as sk
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver.direct import Direct
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve import resolved_run
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


def noise_free_source(n: int = N, seed: int = 0) -> ArraySource:
    """Return rows of a function without noise."""
    X, _ = arrays(n, seed)
    return ArraySource(X, np.sin(2 * X[:, 0]) + X[:, 1])


# All rows are centers of solver "direct". With so small a ridge, float32 shows its rounding.
FEW = {"model.n_centers": "auto", "solver.name": "auto", "solver.ridge": 1e-9}


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
    run = opened(noise_free_source(), **(FEW | changes))
    assert run.precision == precision
    chosen = precision == "float64" and "run.precision" not in changes
    assert run.search_precision == ("exact" if chosen else precision)
    assert run.problem.itemsize == (8 if precision == "float64" else 4)


def test_classes_are_solved_in_float32() -> None:
    assert opened(array_source(), **FEW).precision == "exact"


def test_rows_above_the_limit_are_solved_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamkern.solver.direct.MAX_WIDE_ROWS", N - 1)
    assert opened(noise_free_source(), **FEW).precision == "exact"


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_targets_without_noise_are_solved_in_float64(
    noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also that the factor stays in float32, and that a resumed run does not choose again.

    From 300 rows on, as patched, the factor is in float32, and the weights are refined.
    """
    rng = np.random.default_rng(1)
    monkeypatch.setattr("streamkern.solver.direct.NARROW_ROWS", 300)
    X = rng.uniform(size=(300, 5))
    y = np.sin(3 * X[:, 0]) + X[:, 1] + noise * rng.standard_normal(300)
    source, test = ArraySource(X, y), ArraySource(X[:10], y[:10])
    changes = FEW | {"run.checkpoint_every": 1, "solver.ridge": "auto"}
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
    """Check kernel values up to 1e9 at a ridge of 1e-3; with values near 1, float32 suffices."""
    monkeypatch.setattr("streamkern.solver.direct.NARROW_ROWS", 300)
    rng = np.random.default_rng(1)
    X = rng.standard_normal((300, 6))
    source = ArraySource(X, X[:, 0] * X[:, 1] + 0.3 * rng.standard_normal(300))
    for gamma, precision in ((1.0, "float64"), (1e-3, "exact")):
        changes = FEW | {"solver.ridge": 1e-3} | {
            "model.kernel": {"kind": "polynomial", "degree": 6, "gamma": gamma},
            "model.bandwidth": "auto", "model.metric": "none",
        }  # fmt: skip
        result = finished(settings(tmp_path / str(gamma), **changes), source=source)
        assert result.model.op.precision == precision


@pytest.mark.parametrize("started_wide", [True, False])
def test_resumed_run_keeps_its_precision(
    started_wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a run that was begun by a version with another rule.

    A run that began in float32 has no record of the choice, as runs of earlier versions.
    """
    may_use_float64 = resolved_run._may_use_float64
    config = settings(tmp_path / "run", **(FEW | {"run.checkpoint_every": 1}))
    uninterrupted = settings(tmp_path / "whole", **FEW)
    monkeypatch.setattr(
        resolved_run, "_may_use_float64", may_use_float64 if started_wide else lambda run: False
    )
    finished(uninterrupted, source=noise_free_source(), test=noise_free_source(10, 5))
    stopped(config, 1, source=noise_free_source(), test=noise_free_source(10, 5))
    monkeypatch.setattr(resolved_run, "_may_use_float64", lambda run: not started_wide)
    record = (tmp_path / "run" / "run.json").read_text()
    assert ("widened" in record) == started_wide
    result = finished(config, source=noise_free_source(), test=noise_free_source(10, 5))
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


def test_continued_run_and_warm_start_keep_float64(tmp_path: Path) -> None:
    """Check solver "block", which would otherwise train in float32."""
    source = noise_free_source()
    finished(settings(tmp_path / "first", **FEW), source=source)
    block = FEW | {"solver.name": "block", "data.epochs": 2}
    continued = finished(
        settings(tmp_path / "continued", **block),
        source=noise_free_source(N, 1),
        continues=tmp_path / "first",
    )
    warm = finished(
        settings(tmp_path / "warm", **block, **{"solver.warm_start": str(tmp_path / "first")}),
        source=source,
    )
    assert continued.model.op.precision == warm.model.op.precision == "float64"


def test_warm_start_of_estimator_keeps_float64() -> None:
    """Check a second fit, and a third with solver "block" to targets that are 0.1 higher."""
    X, _ = arrays(N)
    model = sk.KernelRegressor(random_state=0, warm_start=True, epochs=1)
    for _ in range(2):
        assert model.fit(X, X[:, 0])._state.precision == "float64"
    model.set_params(solver="block").fit(X, X[:, 0] + 0.1)
    assert model._state.precision == "float64"
    assert abs(float((model.predict(X) - X[:, 0]).mean()) - 0.1) < 0.02
