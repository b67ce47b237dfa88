"""Check fits on degenerate rows, weights and classes: equal, constant, rare or without weight."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.spatial.distance import cdist

from streamkern import ConfigError, DataError, KernelClassifier, KernelRegressor
from streamkern.cli.main import run_command
from streamkern.ingest.ingest import ingest
from streamkern.store.describe import describe_store
from streamkern.store.store import open_store
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import Scale
from streamkern.train.train import train
from tests.runs import settings

N, P = 120, 30
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.stack([np.sin(X[:, 0]) + X[:, 1], X[:, 2] ** 2], axis=1)
LABELS = np.arange(N) % 3
FIT: dict[str, Any] = {"threads": 1, "n_centers": P, "bandwidth": 2.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "s.zarr"
    ingest(X, path, y=Y)
    return path


# -- degenerate rows -------------------------------------------------------------------------------


def least_squares(Z: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values at `rows` of the mean plus the least-squares function of the centers, in
    float64."""
    K, mean = np.exp(-cdist(rows, Z) / 2.0), values.mean(axis=0)
    return np.asarray(mean + K @ np.linalg.lstsq(K, values - mean, rcond=1e-10)[0])


EXACT: dict[str, Any] = {
    "kernel": "laplace", "bandwidth": 2.0, "threads": 1, "precision": "float64", "epochs": 600,
    "batch_size": N, "scale": "none",
}  # fmt: skip


def test_duplicate_centers_are_trained() -> None:
    Z = np.repeat(X[:10], 3, axis=0).astype(np.float64)
    model = KernelRegressor(centers=Z, block_size=30, **EXACT).fit(X.astype(np.float64), Y)
    assert np.isfinite(model.dual_coef_).all()
    expected = least_squares(Z, np.float64(X), Y)
    np.testing.assert_allclose(model.predict(np.float64(X)), expected, atol=1e-3)


@pytest.mark.filterwarnings("ignore:batch_size=")  # lowered, as EigenPro says
@pytest.mark.parametrize("solver", ["block", "eigenpro2", "eigenpro3", "eigenpro4"])
def test_repeated_rows_are_trained(solver: str) -> None:
    """Check rows with ten copies of each, so that random centers coincide."""
    rows, values = np.repeat(X[:12], 10, axis=0), np.repeat(Y[:12], 10, axis=0)
    options = {"n_centers": "auto"} if solver == "eigenpro2" else {"n_centers": 60}
    model = KernelRegressor(
        solver=solver, bandwidth=2.0, threads=1, epochs=40, batch_size=20, **options
    ).fit(rows, values)
    error = np.mean((model.predict(X[:12]) - Y[:12]) ** 2) / np.mean(Y[:12] ** 2)
    assert error < 0.05


def test_rounded_mean_of_constant_feature_gives_no_scale() -> None:
    """Check 0.1, which is no binary number: the rounded mean of 50 000 rows differs from it."""
    X = np.full((50_000, 2), 0.1)
    X[:, 1] = np.random.default_rng(1).normal(size=50_000)
    scale = Scale("feature").bind(ArraySource(X, X[:, 1])).scale
    np.testing.assert_allclose(scale, [1.0, X[:, 1].std()])


def test_constant_features_are_ignored_and_counted(tmp_path: Path) -> None:
    with_constants = np.column_stack([X, np.full(N, 0.1), np.zeros(N)]).astype(np.float32)
    model = KernelRegressor(transforms=[{"kind": "scale", "mode": "feature"}], epochs=3, **FIT)
    expected = model.fit(X, Y).predict(X)
    predictions = model.fit(with_constants, Y).predict(with_constants)
    np.testing.assert_allclose(predictions, expected, rtol=1e-3, atol=1e-3)
    ingest(with_constants, tmp_path / "s", y=Y)
    assert describe_store(open_store(tmp_path / "s"))["constant_features"] == 2


EQUAL_ROWS = np.full((N, 4), 3.0, np.float32)


@pytest.mark.parametrize(
    "transforms", [[], [{"kind": "scale", "mode": "feature"}]], ids=["unscaled", "scaled"]
)
def test_equal_rows_give_mean_target(transforms: Any) -> None:
    model = KernelRegressor(transforms=transforms, epochs=50, batch_size=N, **FIT)
    prediction = model.fit(EQUAL_ROWS, Y).predict(EQUAL_ROWS[:1])
    np.testing.assert_allclose(prediction, Y.mean(axis=0)[None], rtol=1e-3)


def test_equal_rows_without_given_bandwidth_warn() -> None:
    """Check that the model predicts the mean, although no distance determines its bandwidth."""
    model = KernelRegressor(n_centers=P, threads=1, epochs=50, batch_size=N)
    with pytest.warns(UserWarning, match="explains nothing of its training rows"):
        model.fit(EQUAL_ROWS, Y)
    np.testing.assert_allclose(model.predict(EQUAL_ROWS[:1]), Y.mean(axis=0)[None], rtol=1e-3)


def test_equal_rows_are_refused_by_eigenpro() -> None:
    with pytest.raises(ConfigError, match="has rank 1 to working precision"):
        KernelRegressor(solver="eigenpro4", batch_size=N, **FIT).fit(EQUAL_ROWS, Y)


@pytest.mark.parametrize("kernel", ["linear", "relu_ntk"])
def test_equal_rows_give_the_mean_with_vanishing_kernel(kernel: str) -> None:
    """Check kernels of inner products: equal rows are 0 after centring, and so is the kernel."""
    model = KernelRegressor(kernel=kernel, threads=1)
    with pytest.warns(UserWarning, match="explains nothing of its training rows"):
        model.fit(EQUAL_ROWS, Y)
    np.testing.assert_allclose(model.predict(EQUAL_ROWS[:1] + 1)[0], Y.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(("seed", "power"), [(0, 5), (0, 6), (2, 6), (0, 7), (3, 8)])
@pytest.mark.filterwarnings("ignore:nine tenths of the values", "ignore:the model explains nothing")
def test_heavy_tailed_features_raise_no_error(seed: int, power: int) -> None:
    """Check features exp(power * normal): float32 rounds most distances to 0 beside the largest."""
    normal = np.random.default_rng(seed).normal(size=(200, 3))
    y = 2 * normal[:, 0] + np.sin(3 * normal[:, 1])
    X = np.exp(power * normal)
    # The mean of the targets has the score 0.
    assert KernelRegressor(threads=1).fit(X, y).score(X, y) > -1e-6


# As many rows again, at a distance of 1e6, with other targets.
WITH_FAR_ROWS, FAR_TARGETS = np.concatenate([X, 1e6 + X]), np.concatenate([Y, 7 - Y])


@pytest.mark.parametrize("weight", [0.0, 1e-30])
@pytest.mark.parametrize("solver", ["direct", "block"])
def test_zero_weight_row_has_no_effect(solver: str, weight: float, tmp_path: Path) -> None:
    """Check also that such rows do not affect the scaling, which would move all others together."""
    model = KernelRegressor(n_centers=P, solver=solver, threads=1, random_state=0)
    expected = model.fit(X, Y, np.ones(N)).predict(X)
    w = np.repeat([1.0, weight], N)
    np.testing.assert_array_equal(model.fit(WITH_FAR_ROWS, FAR_TARGETS, w).predict(X), expected)
    ingest(WITH_FAR_ROWS, tmp_path / "s", y=FAR_TARGETS, sample_weight=w)
    from_store = model.fit(tmp_path / "s").predict(X)
    # The store has another order of rows, so the model has other centers.
    assert np.mean((from_store - Y) ** 2) < 1.3 * np.mean((expected - Y) ** 2) + 0.02


def test_zero_weight_rows_are_no_centers(tmp_path: Path) -> None:
    ingest(WITH_FAR_ROWS, tmp_path / "s", y=FAR_TARGETS, sample_weight=np.repeat([1.0, 0.0], N))
    centers = KernelRegressor(threads=1, random_state=0).fit(tmp_path / "s").centers_
    assert centers.shape == (N, 4)
    assert np.abs(centers).max() < 100


def test_zero_weight_rows_do_not_affect_encoding() -> None:
    frame = pd.DataFrame({"word": np.where(LABELS, "in", "of"), "x": X[:, 0]})
    unseen_words = pd.DataFrame({"word": ["never seen"] * 9, "x": [1e9] * 9})
    y, w = np.append(Y[:, 0], [1e9] * 9), np.append(np.ones(N), np.zeros(9))
    model = KernelRegressor(threads=1, random_state=0)
    expected = model.fit(frame, Y[:, 0], np.ones(N)).predict(frame)
    all_rows = pd.concat([frame, unseen_words], ignore_index=True)
    np.testing.assert_array_equal(model.fit(all_rows, y, w).predict(frame), expected)


def test_zero_weight_class_does_not_affect_scaling() -> None:
    rows, labels = np.concatenate([X, 1e6 + X]), np.repeat(["a", "b", "far"], [N // 2, N // 2, N])
    model = KernelClassifier(
        class_weight={"far": 0}, n_centers=P, threads=1, metric="none", random_state=0
    ).fit(rows, labels)
    assert set(model.predict(X)) == {"a", "b"}
    assert model.bandwidth_ < 100


# -- degenerate classes ----------------------------------------------------------------------------


def labels_with_counts(counts: tuple[int, ...]) -> np.ndarray:
    """Return labels 0, 1, ..., each as often as its count."""
    return np.repeat(np.arange(len(counts)), counts)


def test_single_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "all rows are of class '0', so there is nothing to learn; add rows of another class"
    ingest(X, tmp_path / "s", y=np.zeros(N, int))
    assert message in describe_store(open_store(tmp_path / "s"))["warnings"]
    assert run_command(["info", str(tmp_path / "s")]) == 0
    assert message in capsys.readouterr().out
    with pytest.raises(DataError, match=message):
        train(settings(**{"data.train": str(tmp_path / "s")}))
    with pytest.raises(DataError, match="all rows are of class 'b'"):
        KernelClassifier(**FIT).fit(X, np.full(N, "b"))
    weights = (LABELS == 1).astype(float)
    with pytest.raises(DataError, match="all weight is of class '1'"):
        KernelClassifier(**FIT).fit(X, LABELS, weights)


def test_rare_classes_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, y = np.random.default_rng(2).normal(size=(1010, 3)), labels_with_counts((1000, 5, 5))
    message = "class '1' has 0.5% of the rows and class '0' 99%; set class_weight"
    small: dict[str, Any] = {"n_centers": 20, "epochs": 1, "threads": 1, "bandwidth": 2.0}
    with pytest.warns(UserWarning, match=message):
        KernelClassifier(**small).fit(rows, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KernelClassifier(class_weight="balanced", **small).fit(rows, y)
    ingest(rows, tmp_path / "s", y=y)
    assert run_command(["plan", "--train", str(tmp_path / "s")]) == 0
    assert message in capsys.readouterr().out


def test_classes_without_rows_are_reported() -> None:
    rows = np.random.default_rng(2).normal(size=(60, 3))
    source = ArraySource(rows, np.arange(60) % 2, classes=("a", "b", "c", "d"))
    overrides: dict[str, Any] = {"model.n_centers": 10, "data.epochs": 1}
    with pytest.warns(UserWarning, match="class 'c' and 1 more have no rows, and will not"):
        train(settings(**overrides), source=source).model.backend.close()


def test_class_weight_refuses_regression_targets(store: Path) -> None:
    assert ZarrSource(store).totals is None
    with pytest.raises(ConfigError, match="needs classes, but the targets are values"):
        train(settings(**{"data.train": str(store), "data.class_weight": "balanced"}))
