"""Parameters as grid searches and scripts give them: NumPy's numbers, and paths."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import GridSearchCV

import streamkern
from streamkern import (
    ConfigError,
    GaussianNoise,
    KernelClassifier,
    KernelRegressor,
    Laplace,
    Polynomial,
)
from streamkern.config.names import PARAMETER_SETTINGS

# Of every parameter that a number or a path may be; words stand for themselves.
PLAIN: dict[str, list[Any]] = {
    "kernel": [{"kind": "polynomial", "degree": 3, "c0": 0.5}], "bandwidth": [2, 2.5],
    "metric": ["learn", "none", "m.npy"], "n_centers": [30], "centers": ["kmeans", "c.npy"],
    "features": ["kernel"], "n_features": [20], "fit_intercept": [False], "loss": ["squared_error"],
    "quantile": [0.5, (0.25, 0.75)], "effort": ["quick"],
    "patch_features": [20], "patch_size": [5], "patch_grid": [3], "solver": ["block"],
    "block_size": [10], "ridge": [0, 0.5], "n_nystrom": [50], "level": [5], "period": [2],
    "projection": ["exact"], "damping": [0.5], "average": [False], "step_scale": [1, 0.5],
    "tolerance": [0.25], "epochs": [3], "batch_size": [10],
    "transforms": [({"kind": "noise", "sigma": 0.5},)], "scale": ["global"],
    "precision": ["exact"], "device": ["cpu"], "accelerator": ["none"], "memory": [10**9, "1 GiB"],
    "threads": [2], "ranks": [2], "random_state": [3], "warm_start": [False, "runs/a"],
    "run_dir": ["runs/b"], "checkpoint_every": [5, "5 min"], "verbose": [0, 1],
    "class_weight": [{0: 2, 1: 0.5}], "class_sampling": ["balanced"], "early_stopping": [True],
    "validation_fraction": [0.25], "n_iter_no_change": [3], "calibrate": [True, "auto"],
    "callbacks": [()],
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "n_nystrom": {"solver": "eigenpro3"}, "level": {"solver": "eigenpro3"},
    "n_features": {"features": "fourier"}, "metric": {"kernel": "laplace"},
    "period": {"solver": "eigenpro4"}, "projection": {"solver": "eigenpro3"},
    "tolerance": {"solver": "falkon"}, "block_size": {"solver": "block"},
    "quantile": {"loss": "quantile"},
    "patch_size": {"patch_features": 20}, "patch_grid": {"patch_features": 20},
    "damping": {"solver": "block"}, "warm_start": {"solver": "block"},
    "validation_fraction": {"early_stopping": True}, "n_iter_no_change": {"early_stopping": True},
}  # fmt: skip
PATHS = {"metric", "centers", "warm_start", "run_dir"}


def twins(name: str, value: Any) -> list[Any]:
    """Return the same value as a scalar of NumPy, or as a path; float32 and int16 hold the values
    above."""
    if isinstance(value, dict):
        return [{k: twins(name, v)[0] for k, v in value.items()}]
    if isinstance(value, tuple):
        return [tuple(twins(name, v)[0] for v in value)]
    if isinstance(value, str):
        return [np.str_(value), *([Path(value)] if name in PATHS else [])]
    if isinstance(value, bool):
        return [np.bool_(value)]
    if isinstance(value, int):
        return [np.int64(value), np.uint32(value)]
    return [np.float64(value), np.float32(value), np.float16(value)]


def test_numpy_scalars_and_paths_give_same_settings() -> None:
    assert set(PLAIN) == set(KernelClassifier().get_params()) >= set(PARAMETER_SETTINGS)
    for name, value in ((name, value) for name, values in PLAIN.items() for value in values):
        made = [
            KernelClassifier(**BESIDE.get(name, {}) | {name: given})
            for given in (value, *twins(name, value))
        ]
        configs = [model._config(model.epochs).model_dump_json() for model in made]
        assert configs == configs[:1] * len(configs)
        transforms = [[t["sigma"] for t in model.transforms] for model in made]
        assert transforms == transforms[:1] * len(transforms)
        assert len({model._progress() for model in made}) == 1


@pytest.mark.parametrize("twin", [np.float32, np.float64])
def test_run_resumes_with_equal_numpy_scalars(twin: Any, tmp_path: Path) -> None:
    """Check that the identity of a run depends on the numbers, and not on their types."""
    X = np.random.default_rng(0).normal(size=(100, 3))
    kernels = [
        (0.5 * Laplace(2.5), twin(0.5) * Laplace(twin(2.5))),
        (Polynomial(2, c0=0.5), Polynomial(np.int64(2), c0=twin(0.5))),
    ]
    for k, (kernel, same) in enumerate(kernels):
        location, few = tmp_path / str(k), {"epochs": 1, "threads": 1}
        plain = KernelRegressor(kernel, transforms=[GaussianNoise(0.5)], run_dir=location, **few)
        plain.fit(X, X[:, 0])
        other = KernelRegressor(
            same, transforms=[GaussianNoise(twin(0.5))], run_dir=location, **few
        )
        np.testing.assert_array_equal(other.fit(X, X[:, 0]).dual_coef_, plain.dual_coef_)


class Indefinite(streamkern.Kernel):
    def profile(self, sq: Any, xp: Any) -> Any:
        return 1 - sq / 4  # its matrix has negative eigenvalues


class Own(streamkern.Kernel):
    def profile(self, sq: Any, xp: Any) -> Any:
        return (1 + sq / 2) ** -2.0


def test_kernel_that_is_not_positive_definite_gives_warning() -> None:
    with pytest.warns(UserWarning, match="is not positive definite on a few random points"):
        streamkern.KernelRegressor(Indefinite())._config(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in (Own(3.0), streamkern.Laplace(0.1), streamkern.Gaussian(10.0)):
            streamkern.KernelRegressor(kernel)._config(1)


def test_invalid_kernels_suggest_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"is a class; give a kernel, such as Laplace\(2.0\)"):
        streamkern.KernelRegressor(streamkern.Laplace)._config(1)
    with pytest.raises(ConfigError, match=r"of scikit-learn; give Gaussian\(length_scale\)"):
        streamkern.KernelRegressor(RBF(2.0))._config(1)


def test_partial_fit_refuses_changed_parameters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = X[:, 0]
    block: dict[str, Any] = {
        "n_centers": 20, "solver": "block", "kernel": "laplace", "bandwidth": 2.0, "metric": "none",
        "random_state": 0,
    }  # fmt: skip

    def started_model() -> KernelRegressor:
        return KernelRegressor(**block).partial_fit(X, y)

    def loaded() -> Any:
        started_model().save(tmp_path / "saved")
        return streamkern.load(tmp_path / "saved")

    changes: dict[str, Any] = {
        "kernel": "gaussian", "bandwidth": 3.0, "ridge": 0.1, "n_centers": 30, "centers": X[:20],
        "metric": np.ones(2), "random_state": 1, "scale": "none", "solver": "eigenpro2",
        "transforms": [GaussianNoise(0.1)],
    }  # fmt: skip
    saved = loaded()
    for name, value in changes.items():
        model = started_model().set_params(**{name: value})
        before = model.predict(X)
        with pytest.raises(ConfigError, match=f"{name}=.*trained with {name}=.*set it back"):
            model.partial_fit(X, y)
        np.testing.assert_array_equal(model.predict(X), before)
        assert model.set_params(**{name: block.get(name, getattr(started_model(), name))}) is model
        model.partial_fit(X, y)
    with pytest.raises(ConfigError, match=r"bandwidth=3 is set"):
        saved.set_params(bandwidth=3.0).partial_fit(X, y)
    saved.set_params(bandwidth=2.0).partial_fit(X, y).partial_fit(X, y)
    with pytest.raises(ConfigError, match=r"ridge=0\.5 is set"):
        saved.set_params(ridge=0.5).partial_fit(X, y)


class Shift:
    """A transform whose text does not tell by how much."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, xp: Any, X: Any, Y: Any, rng: Any) -> tuple[Any, Any]:
        return X + self.by, Y


def test_partial_fit_compares_parameters_by_value() -> None:
    """Check values whose text is the same, and equal values with another text."""
    kernel, shift = streamkern.Gaussian(2.0, metric=[1.0, 2.0]), Shift(1.0)
    functions = [lambda xp, X, Y, rng: (X, Y), lambda xp, X, Y, rng: (2 * X, Y)]
    rows = np.arange(8.0).reshape(4, 2)
    cases: list[tuple[str, Any, list[Any], list[Any]]] = [
        ("kernel", kernel, [streamkern.Gaussian(2, metric=np.array([1.0, 2.0]))],
         [streamkern.Gaussian(2.0, metric=[1.0, 3.0]), streamkern.Gaussian(2.0)]),
        ("transforms", [functions[0]], [(functions[0],)], [[functions[1]], []]),
        ("transforms", [shift], [(shift,)], [[Shift(2.0)]]),
        ("transforms", [shift.__call__], [[shift.__call__]], [[Shift(2.0).__call__]]),
        ("transforms", [GaussianNoise(0.1)], [[GaussianNoise(0.1)]], [[GaussianNoise(0.2)]]),
        ("transforms", [{"kind": "noise", "sigma": 1}], [[{"sigma": 1.0, "kind": "noise"}]],
         [[{"kind": "noise", "sigma": 2}]]),
        ("n_centers", 40, [np.int64(40), 40.0], [41]),
        ("bandwidth", 2, [2.0, np.float32(2)], [2.5, "auto"]),
        ("centers", rows, [rows.astype(np.float32)], [rows + 1]),
        ("centers", Path("a"), ["a"], ["b"]),
    ]  # fmt: skip
    for name, value, equal, others in cases:
        started = KernelRegressor(**{name: value})._model_parameters()
        for same in equal:
            KernelRegressor(**{name: same})._check_unchanged(started)
        for other in others:
            with pytest.raises(ConfigError, match=f"{name}=.*trained with {name}="):
                KernelRegressor(**{name: other})._check_unchanged(started)
    model = KernelRegressor(transforms=[shift])
    model.begun = model._model_parameters()  # type: ignore[attr-defined]
    copied = pickle.loads(pickle.dumps(model))
    copied._check_unchanged(copied.begun)


def test_partial_fit_accepts_changed_machine_parameters() -> None:
    X = np.random.default_rng(0).normal(size=(60, 2))
    model = KernelRegressor(n_centers=20, solver="block", metric="none").partial_fit(X, X[:, 0])
    model.set_params(epochs=3, threads=1, verbose=0, memory="1 GiB").partial_fit(X, X[:, 0])
    assert model.n_iter_ == 4


def test_bandwidth_of_user_kernel_is_chosen_or_given(tmp_path: Path) -> None:
    """Check "auto" and a given bandwidth; the model is resumed and loaded if the class is
    imported."""
    X = np.random.default_rng(0).normal(size=(80, 3))
    kernel, y = Own("auto"), np.sin(X).sum(axis=1)
    location: dict[str, Any] = {"run_dir": tmp_path / "run", "threads": 1}
    model = KernelRegressor(kernel, **location).fit(X, y)
    found = KernelRegressor(Own(model.bandwidth_), threads=1).fit(X, y)
    np.testing.assert_allclose(found.predict(X), model.predict(X), rtol=1e-4, atol=1e-4)
    again, loaded = KernelRegressor(kernel, **location).fit(X, y), streamkern.load(tmp_path / "run")
    for same in (again, loaded):
        np.testing.assert_array_equal(same.predict(X), model.predict(X))
    assert (loaded.kernel.bandwidth, loaded.bandwidth_) == ("auto", model.bandwidth_)
    assert KernelRegressor(kernel, bandwidth=3.0, threads=1).fit(X, y).bandwidth_ == 3.0
    median = KernelRegressor(kernel, bandwidth="median", threads=1).fit(X, y)
    plain = KernelRegressor("laplace", bandwidth="median", threads=1).fit(X, y)
    assert median.bandwidth_ == plain.bandwidth_


def test_n_centers_all_takes_all_rows() -> None:
    requested = KernelRegressor(n_centers="all")._config(1).model
    assert (requested.centers, requested.n_centers) == ("all", "auto")
    for centers in ("kmeans", np.zeros((2, 3))):
        with pytest.raises(ConfigError, match=r"n_centers=.all"):
            KernelRegressor(n_centers="all", centers=centers)._config(1)


def test_foreign_parameter_names_suggest_bandwidth() -> None:
    for wrong, message in (("gamma", "mean 'bandwidth'"), ("kernel__bandwidth", "by its name")):
        with pytest.raises(ConfigError, match=message):
            GridSearchCV(KernelRegressor(), {wrong: [1.0]}).fit(np.eye(9), np.arange(9.0))
