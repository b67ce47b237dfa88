"""Check values of parameters: NumPy numbers, paths, and changes between partial_fit calls."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
from streamkern.basics.errors import DataError
from streamkern.config.names import PARAMETER_SETTINGS

# Name of a parameter -> values that it may have.
SAMPLE_VALUES: dict[str, list[Any]] = {
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
# Name of a parameter -> values that other parameters must have for it.
REQUIRED_PARAMETERS: dict[str, dict[str, Any]] = {
    "n_nystrom": {"solver": "eigenpro3"}, "level": {"solver": "eigenpro3"},
    "n_features": {"features": "fourier"}, "metric": {"kernel": "laplace"},
    "period": {"solver": "eigenpro4"}, "projection": {"solver": "eigenpro3"},
    "tolerance": {"solver": "falkon"}, "block_size": {"solver": "block"},
    "quantile": {"loss": "quantile"},
    "patch_size": {"patch_features": 20}, "patch_grid": {"patch_features": 20},
    "damping": {"solver": "block"}, "warm_start": {"solver": "block"},
    "validation_fraction": {"early_stopping": True}, "n_iter_no_change": {"early_stopping": True},
}  # fmt: skip
PATH_PARAMETERS = {"metric", "centers", "warm_start", "run_dir"}


def equal_variants(name: str, value: Any) -> list[Any]:
    """Return the same value as scalars of NumPy, or as a path; float16 holds the sample values."""
    if isinstance(value, dict):
        return [{k: equal_variants(name, v)[0] for k, v in value.items()}]
    if isinstance(value, tuple):
        return [tuple(equal_variants(name, v)[0] for v in value)]
    if isinstance(value, str):
        return [np.str_(value), *([Path(value)] if name in PATH_PARAMETERS else [])]
    if isinstance(value, bool):
        return [np.bool_(value)]
    if isinstance(value, int):
        return [np.int64(value), np.uint32(value)]
    return [np.float64(value), np.float32(value), np.float16(value)]


def test_numpy_scalars_and_paths_give_same_settings() -> None:
    assert set(SAMPLE_VALUES) == set(KernelClassifier().get_params()) >= set(PARAMETER_SETTINGS)
    for name, value in (
        (name, value) for name, values in SAMPLE_VALUES.items() for value in values
    ):
        models = [
            KernelClassifier(**REQUIRED_PARAMETERS.get(name, {}) | {name: variant})
            for variant in (value, *equal_variants(name, value))
        ]
        configs = [model._config(model.epochs).model_dump_json() for model in models]
        assert configs == configs[:1] * len(configs)
        transforms = [[t["sigma"] for t in model.transforms] for model in models]
        assert transforms == transforms[:1] * len(transforms)
        assert len({model._progress() for model in models}) == 1


@pytest.mark.parametrize("scalar_type", [np.float32, np.float64])
def test_run_resumes_with_equal_numpy_scalars(scalar_type: Any, tmp_path: Path) -> None:
    """Check that the identity of a run depends on the numbers, and not on their types."""
    X = np.random.default_rng(0).normal(size=(100, 3))
    kernels = [
        (0.5 * Laplace(2.5), scalar_type(0.5) * Laplace(scalar_type(2.5))),
        (Polynomial(2, c0=0.5), Polynomial(np.int64(2), c0=scalar_type(0.5))),
    ]
    settings = {"epochs": 1, "threads": 1}
    for k, (kernel, equal_kernel) in enumerate(kernels):
        weights = []
        for kernel_variant, sigma in (
            (kernel, 0.5),
            (equal_kernel, scalar_type(0.5)),
        ):  # fits, resumes
            model = KernelRegressor(
                kernel_variant,
                transforms=[GaussianNoise(sigma)],
                run_dir=tmp_path / str(k),
                **settings,
            )
            weights.append(model.fit(X, X[:, 0]).dual_coef_)
        np.testing.assert_array_equal(*weights)


class Indefinite(streamkern.Kernel):
    def profile(self, sq: Any, xp: Any) -> Any:
        return 1 - sq / 4  # its matrix has negative eigenvalues


class UserKernel(streamkern.Kernel):
    def profile(self, sq: Any, xp: Any) -> Any:
        return (1 + sq / 2) ** -2.0


def test_kernel_that_is_not_positive_definite_gives_warning() -> None:
    with pytest.warns(UserWarning, match="is not positive definite on a few random points"):
        streamkern.KernelRegressor(Indefinite())._config(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in (UserKernel(3.0), streamkern.Laplace(0.1), streamkern.Gaussian(10.0)):
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
    settings: dict[str, Any] = {
        "n_centers": 20, "solver": "block", "kernel": "laplace", "bandwidth": 2.0, "metric": "none",
        "random_state": 0,
    }  # fmt: skip

    def started_model() -> KernelRegressor:
        return KernelRegressor(**settings).partial_fit(X, y)

    changes: dict[str, Any] = {
        "kernel": "gaussian", "bandwidth": 3.0, "ridge": 0.1, "n_centers": 30, "centers": X[:20],
        "metric": np.ones(2), "random_state": 1, "scale": "none", "solver": "eigenpro2",
        "transforms": [GaussianNoise(0.1)],
    }  # fmt: skip
    for name, value in changes.items():
        model = started_model()
        first_value = getattr(model, name)
        model.set_params(**{name: value})
        predictions = model.predict(X)
        with pytest.raises(ConfigError, match=f"{name}=.*trained with {name}=.*set it back"):
            model.partial_fit(X, y)
        np.testing.assert_array_equal(model.predict(X), predictions)
        # The remedy of the error
        assert model.set_params(**{name: first_value}) is model
        model.partial_fit(X, y)
    # The parameters are also compared after a save.
    started_model().save(tmp_path / "saved")
    loaded = streamkern.load(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"bandwidth=3 is set"):
        loaded.set_params(bandwidth=3.0).partial_fit(X, y)
    loaded.set_params(bandwidth=2.0).partial_fit(X, y).partial_fit(X, y)
    with pytest.raises(ConfigError, match=r"ridge=0\.5 is set"):
        loaded.set_params(ridge=0.5).partial_fit(X, y)


class Shift:
    """A transform whose `repr` is the same for all shifts."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, xp: Any, X: Any, Y: Any, rng: Any) -> tuple[Any, Any]:
        return X + self.by, Y


def test_partial_fit_compares_parameters_by_value() -> None:
    """Check values whose text is the same, and equal values with another text."""
    kernel, shift = streamkern.Gaussian(2.0, metric=[1.0, 2.0]), Shift(1.0)
    functions = [lambda xp, X, Y, rng: (X, Y), lambda xp, X, Y, rng: (2 * X, Y)]
    rows = np.arange(8.0).reshape(4, 2)
    # (parameter, value, equal values, different values)
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
    for name, value, equal_values, other_values in cases:
        parameters = KernelRegressor(**{name: value})._model_parameters()
        for equal_value in equal_values:
            KernelRegressor(**{name: equal_value})._check_unchanged(parameters)
        for other_value in other_values:
            with pytest.raises(ConfigError, match=f"{name}=.*trained with {name}="):
                KernelRegressor(**{name: other_value})._check_unchanged(parameters)
    for kernels, texts in (
        ((streamkern.Gaussian(1.0), streamkern.Laplace(2.0)),
         (r"Gaussian\(bandwidth=1\)", r"Laplace\(bandwidth=2\)")),
        (("rbf" * 40, "rbf" * 50), ("'(rbf)+r? \\.\\.\\.", "another '(rbf)+r? \\.\\.\\.")),
    ):  # fmt: skip
        old, new = (KernelRegressor(kernel=kernel) for kernel in kernels)
        whole = f"^kernel={texts[1]} is set, .*trained with kernel={texts[0]}; set it back"
        with pytest.raises(ConfigError, match=whole):
            new._check_unchanged(old._model_parameters())
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
    """Check "auto" and a given bandwidth, also after a resume and a load."""
    X = np.random.default_rng(0).normal(size=(80, 3))
    kernel, y = UserKernel("auto"), np.sin(X).sum(axis=1)
    location: dict[str, Any] = {"run_dir": tmp_path / "run", "threads": 1}
    model = KernelRegressor(kernel, **location).fit(X, y)
    refitted = KernelRegressor(UserKernel(model.bandwidth_), threads=1).fit(X, y)
    np.testing.assert_allclose(refitted.predict(X), model.predict(X), rtol=1e-4, atol=1e-4)
    resumed, loaded = (
        KernelRegressor(kernel, **location).fit(X, y),
        streamkern.load(tmp_path / "run"),
    )
    for restored in (resumed, loaded):
        np.testing.assert_array_equal(restored.predict(X), model.predict(X))
    assert (loaded.kernel.bandwidth, loaded.bandwidth_) == ("auto", model.bandwidth_)
    assert KernelRegressor(kernel, bandwidth=3.0, threads=1).fit(X, y).bandwidth_ == 3.0
    median = KernelRegressor(kernel, bandwidth="median", threads=1).fit(X, y)
    plain = KernelRegressor("laplace", bandwidth="median", threads=1).fit(X, y)
    assert median.bandwidth_ == plain.bandwidth_


def test_n_centers_all_takes_all_rows() -> None:
    requested = KernelRegressor(n_centers="all")._config(1).model
    assert (requested.centers, requested.n_centers) == ("all", "auto")


@pytest.mark.parametrize("centers", ["kmeans", np.zeros((2, 3))])
def test_n_centers_all_refuses_other_centers(centers: Any) -> None:
    with pytest.raises(ConfigError, match=r"n_centers=.all"):
        KernelRegressor(n_centers="all", centers=centers)._config(1)


@pytest.mark.parametrize(
    ("parameter", "message"), [("gamma", "mean 'bandwidth'"), ("kernel__bandwidth", "by its name")]
)
def test_foreign_parameter_names_suggest_bandwidth(parameter: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GridSearchCV(KernelRegressor(), {parameter: [1.0]}).fit(np.eye(9), np.arange(9.0))


@pytest.mark.parametrize(
    ("labels", "table"),
    [
        (np.array([False, True]), {0: 1, 1: 3}),
        (np.array([0.0, 1.0]), {0: 1, 1: 3}),
        (np.array([0, 1]), {0.0: 1, 1.0: 3}),
        (np.array([0, 1]), {False: 1, True: 3}),
        (np.array([0, 1]), {"0": 1, "1": 3}),
        (np.array(["a", "b"]), {np.str_("a"): 1, "b": 3}),
        (
            np.array(["2020-01-01", "2021-01-01"], "M8[ns]"),
            {np.datetime64("2020-01-01"): 1, np.datetime64("2021-01-01"): 3},
        ),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_keys_of_class_weight_are_found_by_value(labels: np.ndarray, table: dict[Any, int]) -> None:
    """Compare with the weight of each row; scikit-learn finds the keys in the same way."""
    X = np.random.default_rng(0).normal(size=(60, 2))
    second = X[:, 0] + 0.5 * X[:, 1] ** 2 > 0.3
    fixed: dict[str, Any] = {"kernel": "gaussian", "bandwidth": 2.0, "ridge": 1e-2, "threads": 1}
    fixed |= {"metric": "none", "calibrate": False}
    model = KernelClassifier(class_weight=table, **fixed).fit(X, labels[second.astype(int)])
    weighted = KernelClassifier(**fixed).fit(X, second, sample_weight=np.where(second, 3, 1))
    np.testing.assert_allclose(
        model.decision_function(X), weighted.decision_function(X), rtol=1e-5, atol=1e-6
    )
    resampled = KernelClassifier(class_sampling=table, solver="block", **fixed)
    assert resampled.fit(X, labels[second.astype(int)]).n_centers_ == 60


def test_class_with_two_keys_is_refused() -> None:
    X, y = np.eye(4), np.arange(4) % 2
    for name in ("class_weight", "class_sampling"):
        with pytest.raises(ConfigError, match=rf"{name} has more than one key for the class '0'"):
            KernelClassifier(**{name: {0: 1, "0": 2, 1: 1}}).fit(X, y)


@pytest.mark.parametrize("table", ["numbers", "words", "file"])
def test_error_names_parameter_for_any_table(table: str, tmp_path: Path) -> None:
    frame: Any = pd.DataFrame({"a": np.arange(9.0), "y": np.arange(9.0)})
    if table == "words":
        frame["a"] = list("abcabcabc")
    if table == "file":
        frame.to_csv(tmp_path / "t.csv", index=False)
        frame = tmp_path / "t.csv"
    for name, path in (("n_centers", "model.n_centers"), ("ridge", "solver.ridge")):
        with pytest.raises(ConfigError, match=rf"^{name}=-1 must be") as caught:
            KernelRegressor(**{name: -1}).fit(frame, "y")
        assert path not in str(caught.value)


def test_masked_metric_is_refused() -> None:
    scales = np.ma.masked_less([1.0, 0.0], 0.5)
    with pytest.raises(DataError, match=r"^metric is a masked array, whose masked entries"):
        KernelRegressor(metric=scales).fit(np.eye(2), [0.0, 1.0])
