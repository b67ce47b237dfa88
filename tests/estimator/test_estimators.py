"""Check the estimators with scikit-learn's checks and float64 formulas."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import unittest
from functools import cache
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from scipy.spatial.distance import cdist
from sklearn.base import clone
from sklearn.datasets import load_digits, make_friedman1
from sklearn.exceptions import NotFittedError
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

import streamkern
from streamkern import (
    ArraySource,
    ConfigError,
    DataError,
    GaussianNoise,
    KernelClassifier,
    KernelRegressor,
    Laplace,
    ResumeMismatchError,
    Scale,
)
from streamkern.backend import devices
from streamkern.backend.devices import get_backend
from streamkern.basics.errors import DivergenceError, RunError, TrainingInterrupted
from streamkern.basics.progress import ProgressLine
from streamkern.kernels.builtin import Kernel
from streamkern.rundir.run_log import read_log
from streamkern.train.resolve import resolved_run

pytestmark = pytest.mark.usefixtures("one_blas_thread")

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4))
Y = np.stack([np.sin(X[:, 0]) + X[:, 1] ** 2, X[:, 2] * X[:, 3]], axis=1)
LABELS = np.array(["low", "mid", "high"])[np.digitize(X[:, 0] + X[:, 1], [-0.7, 0.7])]
SMALL: dict[str, Any] = {"threads": 1}
# To search for these settings takes ten times as long as the rest of a fit.
GIVEN: dict[str, Any] = {"kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3, "metric": "none"}
QUICK = SMALL | GIVEN


def laplace_kernel(A: np.ndarray, B: np.ndarray, bandwidth: float) -> np.ndarray:
    """Return the kernel values exp(-distance / bandwidth) between two sets of points."""
    return np.exp(-cdist(A, B) / bandwidth)


# ------------------------------------------------------------------------- scikit-learn's checks

STREAMED = "centers, bandwidth and batches come from the rows, and repeated rows are other rows"
WEIGHTED = [f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")]


def expected_failures(estimator: Any) -> dict[str, str]:
    """Return the reasons of expected failures, by check; a check that passes is a failure."""
    return dict.fromkeys(WEIGHTED, STREAMED)


CHECKED = [
    KernelRegressor(epochs=5, **SMALL),
    KernelRegressor(epochs=5, precision="float64", **QUICK),
    KernelRegressor(solver="direct", precision="float64", **QUICK),
    KernelClassifier(epochs=5, **SMALL),
]


@pytest.mark.slow
@pytest.mark.full(all_but_every=5)
@parametrize_with_checks(CHECKED, expected_failed_checks=expected_failures)
def test_estimator_passes_scikit_learn_checks(estimator: Any, check: Any) -> None:
    try:
        check(estimator)
    except unittest.SkipTest as skipped:
        if "does not have a predict_proba method" in str(skipped):
            return  # least squares has no probabilities
        if "SCIPY_ARRAY_API" in os.environ or "SCIPY_ARRAY_API" not in str(skipped):
            raise
        output = checks_of_array_libraries()
        assert f"\n{len(CHECKED)} passed, " in output, output


@cache
def checks_of_array_libraries() -> str:
    """Return the output of pytest for the checks of array libraries.

    They run in a process of their own, because SciPy reads the environment variable on import.
    """
    options = ["-q", "-p", "no:xdist", "--full", "-k", "array_api"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__],
        env={**os.environ, "SCIPY_ARRAY_API": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return process.stdout


@pytest.mark.slow
def test_small_fit_does_not_import_numba() -> None:
    code = """
import sys
import numpy as np
from streamkern import KernelRegressor
X = np.random.default_rng(0).standard_normal((300, 4))
KernelRegressor().fit(X, X[:, 0]).predict(X)
print("numba" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "False\n"


# ------------------------------------------------------------------------------------ solutions


def test_fitted_attributes_reproduce_predictions() -> None:
    model = KernelRegressor(
        "laplace", n_centers=50, bandwidth=2.0, solver="block", epochs=2, scale="none", **SMALL
    ).fit(X, Y)
    assert (model.centers_.shape, model.dual_coef_.shape) == ((50, 4), (50, 2))
    assert (model.bandwidth_, model.n_features_in_, model.report_["samples"]) == (2.0, 4, 600)
    assert model.report_["step_size"] > 0
    # New rows, because in float32 the distance of a row from itself has a large relative error.
    X_new = rng.normal(size=(100, 4))
    F = laplace_kernel(X_new, model.centers_, 2.0) @ model.dual_coef_ + model.intercept_
    np.testing.assert_allclose(model.predict(X_new), F, atol=1e-4)


def test_fit_converges_to_least_squares() -> None:
    centers = X[::5]
    model = KernelRegressor(
        kernel="laplace", centers=centers, bandwidth=2.0, epochs=200, scale="none", **SMALL
    ).fit(X, Y)
    np.testing.assert_array_equal(model.centers_, centers.astype(np.float32))
    mean = Y.mean(axis=0)
    exact = np.linalg.lstsq(laplace_kernel(X, centers, 2.0), Y - mean, rcond=None)[0]
    X_new = rng.normal(size=(100, 4))
    F = mean + laplace_kernel(X_new, centers, 2.0) @ exact
    # After 200 epochs, a thousandth of the spread of Y is left.
    np.testing.assert_allclose(model.predict(X_new), F, atol=5e-3 * np.ptp(Y))


def test_ridge_equals_kernel_ridge_regression() -> None:
    exact = KernelRidge(alpha=0.01 * len(X), kernel="rbf", gamma=0.5 / 1.5**2)
    exact.fit(X, Y - Y.mean(axis=0))
    model = KernelRegressor(
        "gaussian", bandwidth=1.5, centers="all", ridge=0.01, epochs=100, scale="none", **SMALL
    ).fit(X, Y)
    expected = exact.predict(X) + Y.mean(axis=0)
    np.testing.assert_allclose(model.predict(X), expected, atol=0.02 * np.ptp(Y))


@pytest.mark.parametrize(
    "solver", ["block", "sgd", "eigenpro1", "eigenpro2", "eigenpro3", "eigenpro4"]
)
def test_every_solver_learns(solver: str) -> None:
    model = KernelRegressor(solver=solver, epochs=20, **SMALL).fit(X[:200], Y[:200])
    assert model.score(X[200:], Y[200:]) > 0.7
    assert model.report_["solver"] == solver


def test_defaults_reach_exact_least_squares_on_digits() -> None:
    digits, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    digits, labels = digits[order], labels[order]
    model = KernelClassifier(n_centers=500).fit(digits[:1300], labels[:1300])
    onehot = np.eye(10)[labels[:1300]]
    Z = model.centers_.astype(np.float64)
    K = laplace_kernel(digits, Z, model.bandwidth_)
    exact = (K[1300:] @ np.linalg.lstsq(K[:1300], onehot, rcond=None)[0]).argmax(axis=1)
    # two of 497 rows
    assert model.score(digits[1300:], labels[1300:]) > accuracy_score(labels[1300:], exact) - 0.005


def test_user_defined_kernel_is_fitted() -> None:
    class Lorentz(Kernel):
        def profile(self, sq: Any, xp: Any) -> Any:
            return 1 / (1 + sq) ** 2

    model = KernelRegressor(Lorentz(3.0), epochs=5, scale="none", **SMALL).fit(X, Y)
    assert (model.bandwidth_, model.kernel.bandwidth) == (3.0, 3.0)
    F = (1 + (cdist(X, model.centers_) / 3) ** 2) ** -2 @ model.dual_coef_ + model.intercept_
    np.testing.assert_allclose(model.predict(X), F, atol=2e-3)


def test_second_bandwidth_of_kernel_is_refused() -> None:
    message = r"bandwidth=2 is not used by any part of kernel=Laplace\(bandwidth=1\); leave it out"
    with pytest.raises(ConfigError, match=message):
        KernelRegressor(Laplace(1.0), bandwidth=2).fit(X, Y)


@pytest.mark.slow
def test_equal_seeds_give_equal_bits() -> None:
    def fit(seed: Any) -> KernelRegressor:
        """Return a model of a seed."""
        return KernelRegressor(epochs=1, random_state=seed, n_centers=200, **QUICK).fit(X, Y)

    np.testing.assert_array_equal(fit(3).dual_coef_, fit(3).dual_coef_)
    assert not np.array_equal(fit(3).centers_, fit(4).centers_)
    weights = [fit(np.random.RandomState(5)).dual_coef_ for _ in range(2)]
    np.testing.assert_array_equal(*weights)
    assert fit(None).dual_coef_.shape == (200, 2)


# -------------------------------------------------------------------- early ends and warm starts


def test_direct_solver_takes_one_epoch_unless_epochs_differ() -> None:
    model = KernelRegressor(solver="direct", ridge=1e-3, n_centers=60, **SMALL).fit(X, Y)
    assert model.report_["samples"] == 300
    assert "another epoch would change nothing" in model.report_["ended"]
    exact = clone(model).set_params(epochs=1).fit(X, Y)
    np.testing.assert_array_equal(model.dual_coef_, exact.dual_coef_)
    assert "ended" not in exact.report_
    noisy = clone(model).set_params(epochs=2, transforms=[GaussianNoise(0.1)]).fit(X, Y)
    assert noisy.report_["samples"] == 600


def test_falkon_stops_at_tolerance() -> None:
    epochs = []
    for tolerance in (0.1, None, 1e-6):
        model = KernelRegressor(
            solver="falkon", ridge=1e-4, n_centers=60, tolerance=tolerance, kernel="laplace",
            bandwidth=2.0, scale="none", **SMALL,
        ).fit(X, Y)  # fmt: skip
        epochs.append(model.report_["samples"] // 300)
        assert "converged" in model.report_["ended"]
    assert epochs[0] < epochs[1] < epochs[2] < 20
    Z = model.centers_.astype(np.float64)
    K, K_zz = laplace_kernel(X, Z, 2.0), laplace_kernel(Z, Z, 2.0)
    mean = Y.mean(axis=0)
    truth = np.linalg.solve(K.T @ K / 300 + 1e-4 * K_zz, K.T @ (Y - mean) / 300)
    np.testing.assert_allclose(model.predict(X), mean + K @ truth, atol=2e-4 * np.ptp(Y))


@pytest.mark.parametrize("solver", ["block", "eigenpro3", "eigenpro4", "falkon"])
def test_warm_start_continues_from_previous_fit(solver: str) -> None:
    """Check that the first evaluation of a warm start is nearly the last one of the first fit.

    The block solver starts near its solution even without a warm start, from a fit to its sample.
    """
    options: dict[str, Any] = {"solver": solver, "n_centers": 60, "epochs": 6, **SMALL}
    options |= {"kernel": "laplace", "bandwidth": "median"}
    ridge = {"ridge": 1e-3} if solver in ("block", "falkon") else {}
    model = KernelRegressor(warm_start=True, transforms=({"kind": "scale"},), **options, **ridge)
    cold = model.fit(X, Y, test=(X, Y)).history_
    centers = model.centers_
    warm = model.fit(X, Y, test=(X, Y)).history_
    np.testing.assert_array_equal(model.centers_, centers)
    if solver != "block":
        assert abs(warm[0]["test_mse"] - cold[-1]["test_mse"]) < 0.3 * abs(
            cold[0]["test_mse"] - cold[-1]["test_mse"]
        )
    assert warm[0]["test_mse"] < 1.05 * cold[-1]["test_mse"]
    fresh = clone(model).fit(X, Y, test=(X, Y))
    assert fresh.history_[0]["test_mse"] == cold[0]["test_mse"]
    assert fresh.set_params(warm_start=False).fit(X, Y, test=(X, Y)).history_ == cold


def test_warm_start_of_converged_falkon_stops_at_once() -> None:
    model = KernelClassifier(solver="falkon", ridge=1e-3, centers=X[:50], warm_start=True, **SMALL)
    model.fit(X, LABELS)
    n_samples = model.report_["samples"]
    values = model.predict_values(X)
    refitted = pickle.loads(pickle.dumps(model)).fit(X, LABELS)
    assert refitted.report_["samples"] <= 600 < n_samples
    np.testing.assert_allclose(refitted.predict_values(X), values, atol=1e-4)
    # The same centers with other rows, other classes and other centers.
    assert model.fit(X[100:], LABELS[100:]).report_["samples"] < n_samples
    with pytest.raises(DataError, match="none of the 3 classes of the training data"):
        model.fit(X, np.where(LABELS == "mid", "medium", LABELS))
    with pytest.raises(ConfigError, match=r"^warm_start=True has other centers than this run"):
        model.set_params(centers=X[:40]).fit(X, LABELS)


def test_warm_start_reads_run_directory(tmp_path: Path) -> None:
    model = KernelRegressor(n_centers=60, solver="block", run_dir=tmp_path / "a", **SMALL)
    model.fit(X, Y, test=(X, Y))
    restarted = clone(model).set_params(
        run_dir=tmp_path / "b", warm_start=tmp_path / "a", epochs=1, step_scale=1e-9
    )
    restarted.fit(X, Y)
    np.testing.assert_allclose(restarted.dual_coef_, model.dual_coef_, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"warm_start=True cannot be used with run_dir, .* set"):
        clone(model).set_params(warm_start=True).fit(X, Y)
    with pytest.raises(RunError, match=r"there is no run in .*/c"):
        KernelRegressor(warm_start=tmp_path / "c", **SMALL).fit(X, Y)


# --------------------------------------------------------------------------------------- inputs


def test_images_equal_flat_rows() -> None:
    images = rng.integers(0, 256, (120, 3, 4, 2)).astype(np.uint8)
    labels = images[:, 0, 0, 0] > 127
    by_image = KernelClassifier(epochs=2, **QUICK).fit(images, labels)
    flat = KernelClassifier(epochs=2, **QUICK).fit(images.reshape(120, -1), labels)
    np.testing.assert_array_equal(by_image.dual_coef_, flat.dual_coef_)
    np.testing.assert_array_equal(
        by_image.predict(images), by_image.predict(images.reshape(120, -1))
    )
    assert by_image.classes_.dtype == bool
    with pytest.raises(DataError, match="X has 12 features, but KernelClassifier is expecting 24"):
        by_image.predict(images[:, :, :, :1][:, :, :, [0]])


def input_forms(X: Any, y: Any, make_zarr: Any, name: str) -> dict[str, tuple[Any, Any]]:
    """Return X and y as the arguments of `fit`, by the name of their form."""
    path = make_zarr({"X": X, "y": y}, chunk_rows=50, name=name)
    group = zarr.open_group(path, mode="r")
    return {
        "dask": (da.from_array(X, chunks=(70, -1)), da.from_array(y, chunks=70)),
        "zarr arrays": (group["X"], group["y"]),
        "group": (group, None),
        "url": (str(path), None),
        "path": (path, None),
        "store": (streamkern.open_store(path), None),
        "source": (ArraySource(X, y), None),
    }


def test_fit_accepts_every_data_format(make_zarr: Any) -> None:
    classes = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0)
    # In float32, where the order in which moments are summed up changes no scaled feature.
    small = SMALL | {"epochs": 2, "kernel": "laplace", "bandwidth": 2.0, "ridge": 1e-3}
    small |= {"precision": "exact"}
    for kind, y in ((KernelRegressor, Y[:, 0]), (KernelClassifier, classes)):
        expected: Any = kind(**small).fit(X, y)
        score = (r2_score if kind is KernelRegressor else accuracy_score)(y, expected.predict(X))
        for name, (data, targets) in input_forms(X, y, make_zarr, f"{kind.__name__}.zarr").items():
            model: Any = kind(**small).fit(data, targets)
            np.testing.assert_array_equal(model.dual_coef_, expected.dual_coef_, err_msg=name)
            np.testing.assert_array_equal(model.predict(data), expected.predict(X), err_msg=name)
            assert model.score(data, targets) == pytest.approx(score, abs=1e-6), name
            assert model.score(X, y) == pytest.approx(score, abs=1e-6), name
            if kind is KernelClassifier:
                np.testing.assert_array_equal(model.classes_, [0, 1, 2], err_msg=name)


def test_streamed_labels_may_be_any_integers() -> None:
    y = np.where(X[:, 0] > 0, 7, -3)
    lazy = da.from_array(X, chunks=100), da.from_array(y, chunks=100)
    model = KernelClassifier(epochs=2, **SMALL).fit(*lazy)
    np.testing.assert_array_equal(model.classes_, [-3, 7])
    positive = X[:, 0] > 0
    assert model.score(lazy[0][positive], lazy[1][positive]) > 0.9
    with pytest.raises(DataError, match="label 8 of row 0 is none of the 2 classes"):
        model.score(lazy[0], lazy[1] * 0 + 8)
    integers = KernelRegressor(epochs=5, **SMALL).fit(lazy[0], lazy[1])
    assert integers.predict(lazy[0]).shape == (300,)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("1", "9223372036854775811"), "u"),
        (("1", "18446744073709551617"), "O"),
        (("1", "007"), "O"),
        (("-3", "7"), "i"),
    ],
)
def test_csv_classes_are_integers_if_64_bits_hold_them(
    names: tuple[str, str], kind: str, tmp_path: Path
) -> None:
    X = np.float32([[0, 0], [1, 1]] * 10)
    rows = [f"{a:g},{b:g},{names[int(a)]}" for a, b in X.tolist()]
    (tmp_path / "a.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    streamkern.ingest_store(tmp_path / "a.csv", tmp_path / "a.zarr", y="y", targets="classes")
    model = KernelClassifier(bandwidth=1.0, solver="direct", ridge=1e-3).fit(tmp_path / "a.zarr")
    assert model.classes_.dtype.kind == kind
    assert sorted(map(str, model.classes_.tolist())) == sorted(names)
    assert [str(label) for label in model.predict(X[:2])] == list(names)


def test_predict_writes_zarr(tmp_path: Path) -> None:
    model = KernelClassifier(epochs=2, **QUICK).fit(X, LABELS)
    assert model.predict(X, out=tmp_path / "p.zarr") is None
    group = zarr.open_group(tmp_path / "p.zarr", mode="r")
    np.testing.assert_array_equal(group["values"][:], model.predict_values(X))
    np.testing.assert_array_equal(group["labels"][:], model.predict(X))
    with pytest.raises(ConfigError, match="already exists"):
        model.predict(X, out=tmp_path / "p.zarr")
    regressor = KernelRegressor(epochs=2, **QUICK).fit(X, Y)
    regressor.predict(ArraySource(X), out=str(tmp_path / "q.zarr"))
    written = zarr.open_group(tmp_path / "q.zarr", mode="r")["values"]
    np.testing.assert_array_equal(written[:], regressor.predict(X))


@pytest.mark.slow
def test_scaling_is_saved_with_model_but_noise_is_not() -> None:
    raw = X * [1, 10, 100, 1000] + 5
    scaled = (raw - raw.mean(axis=0)) / raw.std(axis=0)
    small = SMALL | {"solver": "block"}
    transforms = [{"kind": "scale", "mode": "feature"}, {"kind": "noise", "sigma": 0}]
    tables = KernelRegressor(transforms=transforms, epochs=2, **small).fit(raw, Y)
    objects = KernelRegressor(transforms=[Scale("feature"), GaussianNoise(0)], epochs=2, **small)
    objects.fit(raw, Y)
    np.testing.assert_array_equal(tables.dual_coef_, objects.dual_coef_)
    bare = {"scale": "none", **small}
    random_transforms = {"transforms": [GaussianNoise(0)]}  # no row comes as it is stored
    plain = KernelRegressor(epochs=2, **random_transforms, **bare).fit(scaled.astype(np.float32), Y)
    np.testing.assert_allclose(tables.centers_, plain.centers_, atol=1e-5)
    np.testing.assert_allclose(tables.predict(raw), plain.predict(scaled), atol=1e-2)
    noisy = KernelRegressor(transforms=[GaussianNoise(0.3)], epochs=4, **bare).fit(X, Y)
    np.testing.assert_array_equal(noisy.predict(X), noisy.predict(X))
    assert not np.array_equal(noisy.dual_coef_, plain.dual_coef_)
    assert set(noisy.centers_.ravel()) <= set(X.astype(np.float32).ravel())


def test_test_set_is_evaluated_every_epoch() -> None:
    model = KernelClassifier(epochs=3, solver="block", **SMALL).fit(
        X[:200], LABELS[:200], test=(X[200:], LABELS[200:])
    )
    assert [record["samples"] for record in model.history_] == [200, 400, 600]
    assert model.history_[-1]["test_accuracy"] == model.score(X[200:], LABELS[200:])
    assert model.report_["test_accuracy"] == model.history_[-1]["test_accuracy"]


# ---------------------------------------------------------------------------------- partial_fit


def test_partial_fit_warns_if_first_block_has_one_class() -> None:
    model = KernelClassifier(**QUICK, n_centers=20)
    low = LABELS == "low"
    with pytest.warns(UserWarning, match="all rows of the first block .* are of class 'low', but"):
        model.partial_fit(X[low], LABELS[low], classes=["low", "mid", "high"])
    model.partial_fit(X[~low], LABELS[~low])  # without a warning


def test_partial_fit_of_one_block_equals_fit() -> None:
    """Check centers that are no rows, because `fit` knows the share of these in all rows."""
    # In 90 steps, the guard against divergence checks the loss twice. The noise makes the rows of
    # every epoch differ, as the rows of later blocks do.
    noise = (GaussianNoise(1e-3),)
    options = {"centers": X[::5] + 0.1, "solver": "block", "ridge": 0.0, "transforms": noise}
    options |= SMALL
    fit = KernelRegressor(epochs=3, batch_size=10, **options).fit(X, Y)
    partial = KernelRegressor(epochs=3, batch_size=10, **options).partial_fit(X, Y)
    np.testing.assert_array_equal(fit.dual_coef_, partial.dual_coef_)
    np.testing.assert_array_equal(fit.predict(X), partial.predict(X))


def test_later_blocks_use_accelerator_of_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators: list[str] = []

    def record_backend(*requested: Any) -> Any:
        backend = get_backend(*requested)
        accelerators.append(backend.accelerator)
        return backend

    monkeypatch.setattr(resolved_run, "get_backend", record_backend)
    model = KernelRegressor(**SMALL).partial_fit(X, Y)
    monkeypatch.setattr(devices, "WORTH_COMPILING", 0.0)
    model.partial_fit(X, Y)
    assert accelerators == ["none", "none"]


def test_partial_fit_score_improves_with_blocks() -> None:
    features, y = make_friedman1(4500, n_features=5, noise=0.5, random_state=0)
    y -= y.mean()
    model = KernelRegressor(n_centers=200, scale="none", **SMALL)
    scores = []
    for start in range(0, 4000, 500):
        block = slice(start, start + 500)
        model.partial_fit(features[block], y[block])
        scores.append(model.score(features[4000:], y[4000:]))
    assert model.report_["samples"] == 4000
    assert scores[-1] > scores[0]
    Z = model.centers_.astype(np.float64)
    K = laplace_kernel(features, Z, model.bandwidth_)
    exact = r2_score(y[4000:], K[4000:] @ np.linalg.lstsq(K[:4000], y[:4000], rcond=None)[0])
    assert scores[-1] > exact - 0.02


@pytest.mark.parametrize("solver", ["block", "eigenpro4"])
def test_partial_fit_continues_after_pickling(solver: str) -> None:
    model, pickled_model = (KernelRegressor(solver=solver, **SMALL) for _ in range(2))
    for block in (slice(0, 100), slice(100, 200), slice(200, 300)):
        model.partial_fit(X[block], Y[block])
        pickled_model = pickle.loads(pickle.dumps(pickled_model)).partial_fit(X[block], Y[block])
    np.testing.assert_array_equal(model.dual_coef_, pickled_model.dual_coef_)


def test_diverged_block_leaves_model_unchanged() -> None:
    model = KernelRegressor(**SMALL).partial_fit(X, Y)
    weights, n_samples = model.dual_coef_, model.report_["samples"]
    with pytest.raises(DivergenceError, match="diverged on this block"), np.errstate(all="ignore"):
        model.partial_fit(X, np.full_like(Y, 3e38))
    model.partial_fit(X[:50], Y[:50])
    assert model.report_["samples"] == n_samples + 50
    assert np.isfinite(model.dual_coef_).all()
    assert model.dual_coef_ is not weights


def test_partial_fit_keeps_scaling_of_first_block() -> None:
    model = KernelRegressor(transforms=[{"kind": "scale", "mode": "feature"}], **SMALL)
    model.partial_fit(X[:150], Y[:150])
    mean = model._state.fixed[0].mean
    model.partial_fit(X[150:] * 3 + 9, Y[150:])
    np.testing.assert_array_equal(model._state.fixed[0].mean, mean)


def test_partial_fit_accepts_smaller_blocks_and_streams() -> None:
    model = KernelClassifier(**SMALL).partial_fit(X, LABELS)
    model.partial_fit(X[:3], LABELS[:3])
    model.partial_fit(ArraySource(X, LABELS))
    assert model.report_["samples"] == 603


def test_partial_fit_after_fit_discards_the_model() -> None:
    model = KernelClassifier(**SMALL).fit(X[:100], LABELS[:100])
    with pytest.warns(UserWarning, match="discards the model"):
        model.partial_fit(X[:100], LABELS[:100])
    assert model.report_["samples"] == 100


def test_partial_fit_refuses_invalid_input(tmp_path: Path) -> None:
    two, three = np.arange(50) % 2, np.arange(50) % 3
    classifier = KernelClassifier(**SMALL).partial_fit(X[:50], two)
    fitted = classifier._fitted_
    regressor = KernelRegressor(**SMALL).partial_fit(X, Y)
    for call, message in (
        (lambda: classifier.partial_fit(X[:50], three), "label 2 of row 2 is none of"),
        (lambda: classifier.partial_fit(X[:50], two, classes=[0, 1, 2]), "differ from"),
        (lambda: classifier.partial_fit(X[:50, :3], two), "X has 3 features, but KernelCl"),
        (lambda: KernelRegressor(run_dir=tmp_path / "run").partial_fit(X, Y), "run_dir=.* cannot"),
        (lambda: KernelRegressor(solver="eigenpro2").partial_fit(X, Y), "needs all rows at once"),
        (lambda: regressor.partial_fit(X, Y[:, 0]), "y has 1 outputs, but the model was trained"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=message):
            call()
    assert classifier._fitted_ is fitted


def test_partial_fit_accepts_classes_that_later_blocks_have() -> None:
    model = KernelClassifier(**SMALL).partial_fit(X[:50], np.arange(50) % 2, classes=[0, 1, 2])
    model.partial_fit(X[:50], np.arange(50) % 3, classes=[2, 1, 0])
    np.testing.assert_array_equal(model.classes_, [0, 1, 2])


# ------------------------------------------------------------------------- persistence and errors


def test_run_directory_makes_fit_resumable(tmp_path: Path) -> None:
    model = KernelClassifier(run_dir=tmp_path / "run", epochs=3)
    many_threads = clone(model).fit(X, LABELS)
    one_thread = clone(model).set_params(threads=1).fit(X, LABELS)
    np.testing.assert_array_equal(many_threads.dual_coef_, one_thread.dual_coef_)
    with pytest.raises(ResumeMismatchError, match=r"ridge: was 'auto', now 1.0"):
        clone(model).set_params(ridge=1.0).fit(X, LABELS)
    with pytest.raises(ResumeMismatchError, match="other rows or targets"):
        clone(model).fit(X + 1, LABELS)
    with pytest.raises(ConfigError, match="random_state=None must be a whole number with run_dir"):
        clone(model).set_params(random_state=None).fit(X, LABELS)


def test_interrupted_fit_resumes(tmp_path: Path) -> None:
    calls = 0

    def interrupt_once(X: Any, Y: Any, rng: Any) -> Any:
        """Return the rows; the eighth call sends SIGINT."""
        nonlocal calls
        calls += 1
        if calls == 8:
            signal.raise_signal(signal.SIGINT)
        return X, Y

    model = KernelRegressor(
        epochs=5, batch_size=100, transforms=[interrupt_once], run_dir=tmp_path / "run", **QUICK
    )
    with pytest.raises(TrainingInterrupted, match=r"stopped by SIGINT after \d+ samples"):
        model.fit(X, Y)
    model.fit(X, Y)
    uninterrupted = clone(model).set_params(run_dir=None).fit(X, Y)
    np.testing.assert_array_equal(model.dual_coef_, uninterrupted.dual_coef_)
    assert model.report_["samples"] == 1500


INVALID_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"bandwidth": -1.0}, '^bandwidth=-1.0 must be "auto", "median" or a number above 0'),
    ({"kernel": "rbv"}, '^kernel=\'rbv\' must be "auto", one of "laplace"'),
    ({"solver": "adam"}, "^solver='adam' must be one of"),
    ({"precision": "half"}, "^precision='half' must be one of"),
    ({"device": "tpu"}, "^device='tpu' must be"),
    ({"memory": "much"}, "^memory='much' must be"),
    ({"memory": "1 MiB"}, "^memory=1 MiB is not enough"),
    ({"ridge": -1.0}, "^ridge=-1.0 must be"),
    ({"tolerance": 0.0, "solver": "falkon"}, "^tolerance=0.0 must be"),
    ({"warm_start": True, "solver": "direct"}, "^warm_start=True is not defined for solver 'd"),
    ({"centers": np.ones((5, 3))}, r"centers have rows of shape \(3,\)"),
    ({"centers": np.ones(4)}, r"centers have shape \(4,\)"),
    ({"centers": X[:5], "n_centers": 6}, "n_centers=6 differs from the 5 rows in centers"),
    ({"centers": "all", "n_centers": 6}, "n_centers=6 contradicts centers='all'"),
    ({"centers": "nowhere.npy"}, "no array of centers at nowhere.npy; correct centers, or set"),
    ({"transforms": [{"kind": "blur"}]}, "kind='blur'; use one of"),
    ({"transforms": [3]}, "transform 3 is not callable"),
    ({"transforms": [GaussianNoise]}, "transform .*GaussianNoise.* is a class; give an object"),
]


@pytest.mark.parametrize(("settings", "message"), INVALID_SETTINGS)
def test_invalid_settings_give_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as raised:
        KernelRegressor(**SMALL, **settings).fit(X, Y)
    assert "\n" not in str(raised.value)


def test_invalid_data_gives_one_sentence(make_zarr: Any) -> None:
    with pytest.raises(NotFittedError):
        KernelRegressor().score(ArraySource(X, Y))
    model = KernelRegressor(epochs=1, **QUICK).fit(X, Y)
    classifier = KernelClassifier(epochs=1, **QUICK).fit(X, LABELS)
    two = np.arange(300) % 2
    class_store = make_zarr({"X": X, "y": two}, 50, "classes.zarr")
    value_store = make_zarr({"X": X, "y": Y}, name="values.zarr")
    for call, message in (
        (lambda: KernelRegressor().fit(X, Y[:299]), "X has 300 rows, but y has 299; give"),
        (lambda: KernelClassifier().fit(X, LABELS[:299]), "X has 300 rows, but y has 299"),
        (lambda: KernelClassifier().fit(X), "requires y to be passed"),
        (lambda: model.predict(X[:, :3]), "X has 3 features, but KernelRegressor is expecting 4"),
        (lambda: model.predict(ArraySource(X[:, :3])), r"\(3,\), the model was trained on \(4"),
        (lambda: model.score(ArraySource(X, Y), sample_weight=np.ones(300)), "sample_weight"),
        (lambda: model.score(ArraySource(X, Y[:, :1])), "y has 1 outputs, but the model"),
        (lambda: classifier.score(ArraySource(X, np.array(["a", "b"])[two])), "classes 'a', 'b'"),
        (lambda: KernelRegressor().fit(class_store), "2 classes, not values; use KernelClassifier"),
        (lambda: KernelClassifier().fit(value_store), "use KernelRegressor"),
        (lambda: KernelRegressor().fit(value_store, Y), "leave y out"),
    ):  # fmt: skip
        with pytest.raises((ConfigError, DataError), match=message):
            call()


def test_r2_of_stream_with_constant_output() -> None:
    constant = np.stack([Y[:, 0], np.ones(300)], axis=1)
    model = KernelRegressor(epochs=1, **QUICK).fit(X, constant)
    expected = r2_score(constant, model.predict(X))
    assert model.score(ArraySource(X, constant)) == pytest.approx(expected)


# -------------------------------------------------------------------- loss curve and progress


def model_with_curve(solver: str, **more: Any) -> KernelRegressor:
    """Return a small model, whose loss curve is tested."""
    settings = {"n_centers": 40, "batch_size": 10, "epochs": 3, **SMALL, **more}
    return KernelRegressor("laplace", bandwidth=3.0, solver=solver, **settings)


def test_loss_curve_is_in_squared_units_of_y() -> None:
    """Check that the curve is the variance for tiny steps, and the remaining error for a
    solution."""
    y, options = 1e3 * Y[:256] + 7e5, {"batch_size": 8, "epochs": 1, "n_centers": "auto"}
    still = model_with_curve("sgd", step_scale=1e-12, ridge=0, **options).fit(X[:256], y)
    model = model_with_curve("direct", **options).fit(X[:256], y)
    for fitted, error in ((still, y - y.mean(axis=0)), (model, y - model.predict(X[:256]))):
        assert fitted.n_iter_ == 1
        np.testing.assert_allclose(fitted.loss_curve_, [np.mean(error**2)], rtol=1e-3)


def test_partial_fit_extends_loss_curve() -> None:
    full, parts = (
        model_with_curve("eigenpro3").fit(X, Y),
        model_with_curve("eigenpro3").partial_fit(X, Y),
    )
    assert (
        (full.n_iter_, len(full.loss_curve_)) == (parts.n_iter_, len(parts.loss_curve_)) == (3, 3)
    )
    assert full.loss_curve_[-1] < full.loss_curve_[0]
    first_losses = parts.loss_curve_
    pickle.loads(pickle.dumps(parts)).partial_fit(X[:50], Y[:50])
    parts.partial_fit(X[:50], Y[:50])
    assert (parts.n_iter_, len(parts.loss_curve_)) == (6, 6)
    assert parts.loss_curve_[:3] == first_losses
    direct, curve = model_with_curve("direct", ridge=1e-4, epochs=1), []
    for rows in (slice(0, 100), slice(100, 250)):
        direct.partial_fit(X[rows], Y[rows, 0])
        curve.append(np.mean((direct.predict(X[rows]) - Y[rows, 0]) ** 2))
    np.testing.assert_allclose(direct.loss_curve_, curve, rtol=1e-3)


@pytest.mark.parametrize("solver", ["direct", "falkon", "eigenpro3", "block", "eigenpro4"])
def test_loss_curve_is_loss_after_every_epoch(solver: str, tmp_path: Path) -> None:
    """Check the curve after a fit, after save and load, and in the log of the run."""
    y = Y[:, 0]
    ridge = 1e-4 if solver in ("direct", "falkon") else "auto"
    model = model_with_curve(solver, batch_size=32, epochs=7, ridge=ridge).fit(X, y)
    curve, error = model.loss_curve_, np.mean((model.predict(X) - y) ** 2)
    assert len(curve) == model.n_iter_
    if solver in ("direct", "falkon"):
        np.testing.assert_allclose(curve[-1], error, rtol=1e-3)
    else:  # the loss before each step, which is a little larger
        assert 0.9 * error < curve[-1] < 2 * error < y.var()
    model.save(tmp_path / "saved")
    assert streamkern.load(tmp_path / "saved").loss_curve_ == curve
    logged = [r for r in read_log(tmp_path / "saved" / "log.jsonl") if r["event"] == "train"]
    assert [r["train_mse"] for r in logged] == curve


def test_repeated_fit_restores_loss_curve(tmp_path: Path) -> None:
    first_fit = model_with_curve("block", run_dir=tmp_path).fit(X, Y)
    assert len(first_fit.loss_curve_) == 3
    for repeated in (
        model_with_curve("block", run_dir=tmp_path).fit(X, Y),
        streamkern.load(tmp_path),
    ):
        assert (repeated.loss_curve_, repeated.n_iter_) == (first_fit.loss_curve_, 3)


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [0, False, "auto"])
def test_small_fits_print_nothing(verbose: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = KernelRegressor(n_centers=20, epochs=1, verbose=verbose, **QUICK)
    model.fit(X, Y)
    clone(model).partial_fit(X, Y)
    assert capfd.readouterr() == ("", "")


def test_verbose_fits_print_progress(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressLine, "PERIODS_S", dict.fromkeys(ProgressLine.PERIODS_S, 0.0))
    model = KernelRegressor(
        solver="block", n_centers=20, batch_size=1, epochs=2, verbose=True, **QUICK
    )
    in_blocks = clone(model)
    for train in (model.fit, in_blocks.partial_fit, in_blocks.partial_fit):
        train(X, Y)
        out, err = capfd.readouterr()
        assert out == ""
        assert "epoch 1 of 2" in err
        assert "epoch 2 of 2" in err
        assert "streamkern: setup: " in err


@pytest.mark.parametrize("verbose", [2, -1, "loud", None])
def test_invalid_verbose_is_refused(verbose: Any) -> None:
    with pytest.raises(ConfigError, match=r'verbose=.* must be 0, 1 or "auto"'):
        KernelRegressor(verbose=verbose).fit(X, Y)


def test_folds_with_fewer_rows_than_centers_are_scored() -> None:
    """Check that a learning curve has no NaN for small folds, as with scikit-learn's Nystroem."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3))
    model = KernelRegressor(n_centers=70, kernel="gaussian", bandwidth=2.0, ridge=1e-3)
    with pytest.warns(UserWarning, match="is more than the 60 training rows"):
        scores = cross_val_score(model, X, X[:, 0], cv=3)
    assert (scores > 0.5).all()
    few = KernelRegressor(n_centers="auto", kernel="gaussian", bandwidth=2.0, ridge=1e-3)
    with pytest.warns(UserWarning, match="is more than the 40 training rows"):
        predictions = model.fit(X[:40], X[:40, 0]).predict(X)
    assert len(model.centers_) == 40
    np.testing.assert_allclose(predictions, few.fit(X[:40], X[:40, 0]).predict(X), atol=1e-5)
