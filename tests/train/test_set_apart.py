"""Which runs set rows aside to be calibrated, and what the others say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern import KernelClassifier, KernelRegressor, load
from streamkern.basics.errors import ConfigError, DataError, ResumeMismatchError
from streamkern.config.run_config import RunConfig
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.generator import GeneratorSource
from streamkern.train.set_apart import apart

QUICK: dict[str, Any] = {
    "threads": 1, "accelerator": "none", "n_centers": 40, "kernel": "laplace", "bandwidth": 2.0,
    "solver": "direct",
}  # fmt: skip
X = np.random.default_rng(0).normal(size=(5500, 2)).astype(np.float32)
y = (X[:, 0] > 0).astype(int)


def aside(n: int, asked: Any, *, classes: bool = True, copies: int = 1) -> int:
    targets = (y[:n], ("a", "b")) if classes else (X[:n, 0], None)
    source = ArraySource(X[:n], targets[0], classes=targets[1])
    config = RunConfig().with_overrides({"run.calibrate": asked})
    left, held = apart(config, AugmentedSource(source, copies) if copies > 1 else source)
    rows = 0 if held is None else held.n_rows
    assert left.n_rows == copies * (n - rows)
    return rows


def test_how_many() -> None:
    assert apart(RunConfig(), ArraySource(X, y, classes=("a", "b")))[1] is None
    assert aside(5500, "auto") == 550
    assert aside(5500, "auto", copies=3) == 550
    assert aside(4999, "auto") == aside(5500, "auto", classes=False) == aside(5500, False) == 0
    assert aside(300, True) == 30
    with pytest.raises(DataError, match="calibrate=True sets 1 of 10 rows aside"):
        aside(10, True)
    large = ArraySource(
        np.zeros((50_000, 1), np.float32), np.arange(50_000) % 2, classes=("a", "b")
    )
    held = apart(RunConfig().with_overrides({"run.calibrate": "auto"}), large)[1]
    assert held is not None
    assert held.n_rows == 2000


def test_rows_that_can_not_be_told_apart() -> None:
    def made(*_: int) -> Any:
        raise NotImplementedError

    source = GeneratorSource(made, 5000, (2,), "float32", 2, classes=("a", "b"))
    assert apart(RunConfig().with_overrides({"run.calibrate": "auto"}), source)[1] is None
    with pytest.raises(ConfigError, match="calibrate can not be used with rows that a function"):
        apart(RunConfig().with_overrides({"run.calibrate": True}), source)


def test_weights_that_were_there_before() -> None:
    model = KernelClassifier(**QUICK | {"solver": "block"}, warm_start=True, epochs=1)
    for _ in range(2):
        assert not hasattr(model.fit(X, y), "predict_proba")
    with pytest.raises(ConfigError, match="calibrate can not be used with weights to go on from"):
        model.set_params(calibrate=True).fit(X, y)
    with pytest.raises(ConfigError, match="calibrate can not be used with partial_fit"):
        KernelClassifier(**QUICK, calibrate=True).partial_fit(X, y)
    assert not hasattr(KernelClassifier(**QUICK).partial_fit(X, y), "predict_proba")


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    """What "auto" meant is recorded; and a run without rows aside is as it was before."""
    begun = KernelClassifier(**QUICK, run_dir=tmp_path / "a", calibrate="auto").fit(X, y)
    again = KernelClassifier(**QUICK, run_dir=tmp_path / "a", calibrate=True).fit(X, y)
    np.testing.assert_array_equal(again.predict_proba(X[:5]), begun.predict_proba(X[:5]))
    assert load(tmp_path / "a").calibrate is True
    with pytest.raises(ResumeMismatchError, match="calibrate"):
        KernelClassifier(**QUICK, run_dir=tmp_path / "a", calibrate=False).fit(X, y)
    without = KernelClassifier(**QUICK, run_dir=tmp_path / "b", calibrate=False).fit(X, y)
    auto = KernelClassifier(**QUICK, run_dir=tmp_path / "b").fit(X, y)
    np.testing.assert_array_equal(auto.dual_coef_, without.dual_coef_)
    assert not hasattr(auto, "predict_proba")
    values = KernelRegressor(**QUICK).fit(X[:500], X[:500, 0])
    other = KernelRegressor(**QUICK, calibrate=False).fit(X[:500], X[:500, 0])
    np.testing.assert_array_equal(values.dual_coef_, other.dual_coef_)
