"""Other methods for tables, with their defaults and what a search of theirs would try.

Each is made by `make(name, classes, seed)`, has `fit(X, y)` and `predict(X)`, X (n, d) float32,
standardised, y values (n,) or class numbers. What does not scale to the table gets a sample of its
rows, `Peer.most`. LightGBM, XGBoost and xRFM are there where they are installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import streamkern as sk

Array = npt.NDArray[Any]
CENTERS = 2000


class Peer(NamedTuple):
    """make : (classes, seed, **parameters) -> estimator. grid : values of parameters that a search
    draws from. most : rows it is fitted on. package : that has to be installed."""

    make: Callable[..., Any]
    grid: Mapping[str, Sequence[Any]] = {}
    most: int | None = None
    package: str | None = None


class OneHot:
    """Classes by least squares: the largest of as many outputs."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def fit(self, X: Array, y: Array) -> OneHot:
        """y : class numbers."""
        self.inner.fit(X, np.eye(int(y.max()) + 1, dtype=np.float32)[y])
        return self

    def predict(self, X: Array) -> Array:
        """Class numbers."""
        return np.asarray(self.inner.predict(X)).argmax(axis=1)


class WithValidation:
    """xRFM, which wants rows of its own to stop by: a fifth, as its authors take."""

    def __init__(self, inner: Any, seed: int) -> None:
        self.inner, self.seed = inner, seed

    def fit(self, X: Array, y: Array) -> WithValidation:
        """See `Peer`."""
        order = np.random.default_rng(self.seed).permutation(len(X))
        held, rest = order[: len(X) // 5], order[len(X) // 5 :]
        self.inner.fit(X[rest], y[rest], X[held], y[held])
        return self

    def predict(self, X: Array) -> Array:
        """Values, or class numbers."""
        return np.asarray(self.inner.predict(X)).reshape(len(X))


class Ours:
    """This package, with 2000 centers as far as there are rows, and all else default."""

    def __init__(self, classes: bool, seed: int, metric: str) -> None:
        self.kind = sk.KernelClassifier if classes else sk.KernelRegressor
        self.given = {"random_state": seed, "metric": metric}

    def fit(self, X: Array, y: Array) -> Any:
        """See `Peer`."""
        return self.kind(n_centers=min(CENTERS, len(X)), **self.given).fit(X, y)


def _boosting(classes: bool, seed: int, **given: Any) -> Any:
    from sklearn import ensemble

    name = "HistGradientBoostingClassifier" if classes else "HistGradientBoostingRegressor"
    return getattr(ensemble, name)(random_state=seed, **given)


def _lightgbm(classes: bool, seed: int, **given: Any) -> Any:
    import lightgbm

    kind = lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor
    return kind(random_state=seed, verbose=-1, **given)


def _xgboost(classes: bool, seed: int, **given: Any) -> Any:
    import xgboost

    kind = xgboost.XGBClassifier if classes else xgboost.XGBRegressor
    return kind(random_state=seed, **given)


def _svm(classes: bool, seed: int, **given: Any) -> Any:
    from sklearn import svm

    return (svm.SVC if classes else svm.SVR)(cache_size=1000, **given)


def _kernel_ridge(classes: bool, seed: int, **given: Any) -> Any:
    from sklearn.kernel_ridge import KernelRidge

    made = KernelRidge(**{"kernel": "rbf"} | given)
    return OneHot(made) if classes else made


def _nystroem(classes: bool, seed: int, *, gamma: float | None = None, **given: Any) -> Any:
    from sklearn.kernel_approximation import Nystroem
    from sklearn.linear_model import SGDClassifier, SGDRegressor
    from sklearn.pipeline import make_pipeline

    linear = (SGDClassifier if classes else SGDRegressor)(random_state=seed, **given)
    return make_pipeline(Nystroem(n_components=CENTERS, gamma=gamma, random_state=seed), linear)


def _gaussian_process(classes: bool, seed: int, **given: Any) -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel() * Matern(nu=1.5, length_scale=3.0) + WhiteKernel(0.1)
    made = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed, **given)
    return OneHot(made) if classes else made


def _xrfm(classes: bool, seed: int, **given: Any) -> Any:
    import xrfm

    found = xrfm.xRFM(device="cpu", random_state=seed, verbose=False, **given)
    return WithValidation(found, seed)


_POWERS = tuple(float(x) for x in np.logspace(-3, 3, 7))
_BOOSTED = {"learning_rate": (0.03, 0.05, 0.1, 0.2), "max_leaf_nodes": (15, 31, 63, 127)}
PEERS: dict[str, Peer] = {
    "streamkern": Peer(partial(Ours, metric="none")),
    "streamkern, metric": Peer(partial(Ours, metric="learn")),
    "boosting": Peer(
        _boosting,
        _BOOSTED | {"max_iter": (100, 300, 1000), "min_samples_leaf": (5, 20, 50)},
    ),
    "lightgbm": Peer(
        _lightgbm,
        {"learning_rate": (0.03, 0.05, 0.1, 0.2), "num_leaves": (15, 31, 63, 127),
         "n_estimators": (100, 300, 1000), "min_child_samples": (5, 20, 50)},
        package="lightgbm",
    ),
    "xgboost": Peer(
        _xgboost,
        {"learning_rate": (0.03, 0.1, 0.3), "max_depth": (4, 6, 8, 10),
         "n_estimators": (100, 300, 1000), "subsample": (0.7, 1.0)},
        package="xgboost",
    ),
    "svm": Peer(_svm, {"C": _POWERS, "gamma": (0.003, 0.01, 0.03, 0.1, 0.3)}, 20_000),
    "kernel ridge": Peer(
        _kernel_ridge,
        {"kernel": ("rbf", "laplacian"), "alpha": (1e-4, 1e-3, 1e-2, 0.1, 1.0),
         "gamma": (0.003, 0.01, 0.03, 0.1, 0.3)},
        8_000,
    ),
    "nystroem + sgd": Peer(
        _nystroem, {"gamma": (0.003, 0.01, 0.03, 0.1), "alpha": (1e-7, 1e-6, 1e-5, 1e-4)}
    ),
    "gaussian process": Peer(_gaussian_process, {}, 1_500),
    "xrfm": Peer(_xrfm, {}, 6_000, "xrfm"),
}  # fmt: skip


def installed() -> list[str]:
    """Names of those that can be made here."""
    there = importlib.util.find_spec
    return [name for name, p in PEERS.items() if p.package is None or there(p.package) is not None]
