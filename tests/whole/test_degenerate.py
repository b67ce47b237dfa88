"""Check that invalid settings are named, and that unusual data are trained correctly."""

from __future__ import annotations

import re
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

# ----------------------------------------------------------------------------------- refusals

AT_LEAST = r'must be "auto" or a whole number, at least 1'
# Name of a setting, other settings, value, the range as in the message.
RANGES: list[tuple[str, dict[str, Any], Any, str]] = [
    *(
        (name, {}, value, AT_LEAST)
        for name in ("batch_size", "block_size", "n_nystrom", "level", "period", "n_centers")
        for value in (0, -3, 2.5)
    ),
    ("batch_size", {}, N + 1, rf"must lie between 1 and n_rows={N}; lower it"),
    ("block_size", {}, P + 1, rf"must lie between 1 and n_centers={P}; lower it"),
    ("n_nystrom", {"solver": "eigenpro4"}, N + 1, rf"must lie between 2 and n_rows={N}; lower it"),
    ("n_nystrom", {"solver": "eigenpro3"}, 1, rf"must lie between 2 and n_rows={N}; raise it"),
    ("level", {"solver": "eigenpro4"}, 96, r"must lie between 1 and n_nystrom - 1 = 95; lower it"),
    ("level", {"solver": "eigenpro2", "n_nystrom": 50, "n_centers": "auto"}, 50,
     r"must lie between 1 and .*n_nystrom - 1 = 49.*; lower level or raise n_nystrom"),
    ("period", {"solver": "eigenpro4", "batch_size": 20, "epochs": 2}, 13,
     r"must lie between 1 and the steps of the run, 12; lower it"),
    ("period", {"solver": "eigenpro3"}, 2, r"must be 1 with (solver|name)"),
    ("epochs", {}, 0, AT_LEAST),
    ("ridge", {}, -1.0, r'must be "auto" or a number, 0 or above'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "other_settings", "value", "message"), RANGES)
def test_estimator_names_the_allowed_range(
    name: str, other_settings: dict[str, Any], value: Any, message: str
) -> None:
    estimator = KernelRegressor(**(FIT | {"epochs": 2} | other_settings | {name: value}))
    with pytest.raises(ConfigError, match=rf"^{name}={value} {message}") as caught:
        estimator.fit(X, Y)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "s.zarr"
    ingest(X, path, y=Y)
    return path


SECTIONS = {"batch_size": "data", "epochs": "data", "n_centers": "model", "bandwidth": "model"}


@pytest.mark.parametrize(
    ("name", "other_settings", "value", "message"),
    [case for case in RANGES if case[2] not in (-3, 2.5)],
)
def test_command_names_the_allowed_range(
    store: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    other_settings: dict[str, Any],
    value: Any,
    message: str,
) -> None:
    run_settings = {"n_centers": P, "bandwidth": 2.0, "epochs": 2} | other_settings | {name: value}
    arguments = ["plan", "--train", str(store)]
    for key, setting in run_settings.items():
        key = "name" if key == "solver" else key
        arguments += ["--set", f"{SECTIONS.get(key, 'solver')}.{key}={setting}"]
    assert run_command(arguments) == 2
    command_line = " ".join(capsys.readouterr().err.split())
    for option, parameter in (("--epochs ", "epochs="), ("--solver ", "solver=")):
        command_line = command_line.replace(option, parameter)  # whoever typed --set sees --set
    assert re.search(rf"{name}={value} {message}", re.sub(r"--set \w+\.", "", command_line))


# ------------------------------------------------------------------------------ degenerate rows


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
    truth = least_squares(Z, np.float64(X), Y)
    np.testing.assert_allclose(model.predict(np.float64(X)), truth, atol=1e-3)


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


def test_constant_feature_is_ignored(tmp_path: Path) -> None:
    """Check the constant 0.1, which is no binary number: its mean over 50 000 rows is inexact, and
    its standard deviation not 0."""
    wide = np.full((50_000, 3), 0.1)
    wide[:, 1] = np.random.default_rng(1).normal(size=50_000)
    source = ArraySource(wide, wide[:, 1])
    bound = Scale("feature").bind(source)
    deviation = source.statistics()[3]
    assert deviation is not None
    np.testing.assert_array_equal(bound.scale[[0, 2]], 1.0)
    np.testing.assert_allclose(bound.scale[1], deviation[1])
    transforms = [{"kind": "scale", "mode": "feature"}]
    padded = np.column_stack([X, np.full(N, 0.1), np.zeros(N)]).astype(np.float32)
    make = KernelRegressor(transforms=transforms, epochs=3, **FIT)
    plain, constant = (make.fit(rows, Y).predict(rows) for rows in (X, padded))
    np.testing.assert_allclose(constant, plain, rtol=1e-3, atol=1e-3)
    ingest(padded, tmp_path / "s", y=Y)
    assert describe_store(open_store(tmp_path / "s"))["constant_features"] == 2


def test_identical_rows_give_the_mean() -> None:
    """Check that the model is the mean of the targets, because such rows determine no bandwidth."""
    equal_rows = np.full((N, 4), 3.0, np.float32)
    make = KernelRegressor(n_centers=P, bandwidth=2.0, threads=1, epochs=50, batch_size=N)
    np.testing.assert_allclose(
        make.fit(equal_rows, Y).predict(equal_rows[:1])[0], Y.mean(axis=0), rtol=1e-3
    )
    scaled = make.set_params(transforms=[{"kind": "scale", "mode": "feature"}]).fit(equal_rows, Y)
    np.testing.assert_allclose(scaled.predict(equal_rows[:1])[0], Y.mean(axis=0), rtol=1e-3)
    with pytest.warns(UserWarning, match="explains nothing of its training rows"):
        make.set_params(bandwidth="auto").fit(equal_rows, Y)
    np.testing.assert_allclose(make.predict(equal_rows[:1])[0], Y.mean(axis=0), rtol=1e-3)
    with pytest.raises(ConfigError, match="has rank 1 to working precision"):
        make.set_params(bandwidth=2.0, solver="eigenpro4").fit(equal_rows, Y)


@pytest.mark.parametrize("kernel", ["linear", "relu_ntk"])
def test_equal_rows_give_the_mean_with_vanishing_kernel(kernel: str) -> None:
    """Check kernels that are 0 between such rows, which are 0 without their mean."""
    equal_rows, make = np.full((N, 4), 3.0), KernelRegressor(kernel=kernel, threads=1)
    with pytest.warns(UserWarning, match="explains nothing of its training rows"):
        make.fit(equal_rows, Y)
    np.testing.assert_allclose(make.predict(equal_rows[:1] + 1)[0], Y.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(("seed", "power"), [(0, 5), (0, 6), (2, 6), (0, 7), (3, 8)])
@pytest.mark.filterwarnings("ignore:nine tenths of the values", "ignore:the model explains nothing")
def test_heavy_tailed_features_raise_no_error(seed: int, power: int) -> None:
    """Check a bandwidth for most rows that is so far below the largest distance that rounding hides
    the others."""
    rows = np.random.default_rng(seed).normal(size=(200, 3))
    values = 2 * rows[:, 0] + np.sin(3 * rows[:, 1])
    X = np.exp(power * rows)
    make = KernelRegressor(threads=1).fit(X, values)
    assert make.score(X, values) > -1e-6


@pytest.mark.parametrize("weight", [0.0, 1e-30])
@pytest.mark.parametrize("solver", ["direct", "block"])
def test_zero_weight_row_has_no_effect(solver: str, weight: float, tmp_path: Path) -> None:
    """Check the scaling, too: a far row with a weight would move all others to one point."""
    rows, values = np.concatenate([X, 1e6 + X]), np.concatenate([Y, 7 - Y])
    w = np.repeat([1.0, weight], N)
    make = KernelRegressor(n_centers=P, solver=solver, threads=1, random_state=0)
    plain = make.fit(X, Y, np.ones(N)).predict(X)
    np.testing.assert_array_equal(make.fit(rows, values, w).predict(X), plain)
    ingest(rows, tmp_path / "s", y=values, sample_weight=w)
    store_predictions = make.fit(tmp_path / "s").predict(X)
    assert np.mean((store_predictions - Y) ** 2) < 1.3 * np.mean((plain - Y) ** 2) + 0.02
    if not weight:  # all rows that count are centers, and no other
        everything = KernelRegressor(threads=1, random_state=0).fit(tmp_path / "s")
        assert everything.centers_.shape == (N, 4)
        assert np.abs(everything.centers_).max() < 100


def test_zero_weight_rows_do_not_affect_encoding() -> None:
    frame = pd.DataFrame({"word": np.where(LABELS, "in", "of"), "x": X[:, 0]})
    unseen_words = pd.DataFrame({"word": ["never seen"] * 9, "x": [1e9] * 9})
    y, w = np.append(Y[:, 0], [1e9] * 9), np.append(np.ones(N), np.zeros(9))
    make = KernelRegressor(threads=1, random_state=0)
    plain = make.fit(frame, Y[:, 0], np.ones(N)).predict(frame)
    all_rows = pd.concat([frame, unseen_words], ignore_index=True)
    np.testing.assert_array_equal(make.fit(all_rows, y, w).predict(frame), plain)


def test_zero_weight_class_does_not_affect_scaling() -> None:
    rows, labels = np.concatenate([X, 1e6 + X]), np.repeat(["a", "b", "far"], [N // 2, N // 2, N])
    model = KernelClassifier(
        class_weight={"far": 0}, n_centers=P, threads=1, metric="none", random_state=0
    ).fit(rows, labels)
    assert set(model.predict(X)) == {"a", "b"}
    assert model.bandwidth_ < 100


# ----------------------------------------------------------------------- degenerate classes


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
