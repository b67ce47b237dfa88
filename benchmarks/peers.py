"""Methods for tables, with their defaults and the grid of a random search.

`make(classes, seed)` returns an object with `fit(X, y)`, `predict(X)` and mostly
`predict_proba(X)`; y has values (n,) or class numbers. A method that does not scale to large
tables gets a sample of `Peer.most` rows. `pip install --group peers` installs the methods that
scikit-learn does not have.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Peer(NamedTuple):
    """A method.

    make : (classes, seed, **parameters) -> estimator
    grid : values of parameters that a search draws from; without any it is not tuned
    most : largest number of rows that it is fitted on
    package : package that it needs, if not one that streamkern needs
    """

    make: Callable[..., Any]
    grid: Mapping[str, Sequence[Any]] = {}
    most: int | None = None
    package: str | None = None


def threads() -> int:
    """Return the number of threads, for libraries that do not read OMP_NUM_THREADS."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def _named(module: str, stem: str, *, threads_in: str = "", **fixed: Any) -> Callable[..., Any]:
    """Return what makes a module's `stem` + "Classifier" or "Regressor".

    threads_in : the parameter that takes the number of threads
    """

    def make(classes: bool, seed: int, **given: Any) -> Any:
        kind = getattr(
            importlib.import_module(module), stem + ("Classifier" if classes else "Regressor")
        )
        counted = {threads_in: threads()} if threads_in else {}
        return kind(random_state=seed, **fixed | counted | given)

    return make


def _svm(classes: bool, seed: int, **given: Any) -> Any:
    from sklearn import svm

    return (svm.SVC if classes else svm.SVR)(cache_size=1000, **given)


class XRFM:
    """xRFM, which wants rows of its own to stop by: a fifth, as its authors take."""

    def __init__(self, classes: bool, seed: int) -> None:
        import xrfm

        self.seed = seed
        self.inner = xrfm.xRFM(device="cpu", random_state=seed, verbose=False)

    def fit(self, X: Array, y: Array) -> XRFM:
        """Fit the model. y : values or class ids."""
        order = np.random.default_rng(self.seed).permutation(len(X))
        held, rest = order[: len(X) // 5], order[len(X) // 5 :]
        self.inner.fit(X[rest], y[rest], X[held], y[held])
        self.classes_ = np.unique(y[rest])
        return self

    def predict(self, X: Array) -> Array:
        """Return values or class numbers."""
        return np.asarray(self.inner.predict(X)).reshape(len(X))

    def predict_proba(self, X: Array) -> Array:
        """Return the probabilities of the classes."""
        return np.asarray(self.inner.predict_proba(X))


_OWN = "streamkern"
_NETWORK: dict[str, Any] = {"device": "cpu", "threads_in": "n_threads"}
_RATES = (0.03, 0.05, 0.1, 0.2)
PEERS: dict[str, Peer] = {
    _OWN: Peer(_named(_OWN, "Kernel")),
    "streamkern, quick": Peer(_named(_OWN, "Kernel", effort="quick")),
    "streamkern, no metric": Peer(_named(_OWN, "Kernel", metric="none")),
    "HistGradientBoosting": Peer(
        _named("sklearn.ensemble", "HistGradientBoosting"),
        {"learning_rate": _RATES, "max_leaf_nodes": (15, 31, 63, 127),
         "max_iter": (100, 300, 1000), "min_samples_leaf": (5, 20, 50)},
    ),
    "LightGBM": Peer(
        _named("lightgbm", "LGBM", verbose=-1),
        {"learning_rate": _RATES, "num_leaves": (15, 31, 63, 127),
         "n_estimators": (100, 300, 1000), "min_child_samples": (5, 20, 50)},
        package="lightgbm",
    ),
    "XGBoost": Peer(
        _named("xgboost", "XGB", enable_categorical=True),
        {"learning_rate": (0.03, 0.1, 0.3), "max_depth": (4, 6, 8, 10),
         "n_estimators": (100, 300, 1000), "subsample": (0.7, 1.0)},
        package="xgboost",
    ),
    "CatBoost": Peer(
        _named("catboost", "CatBoost", verbose=0, allow_writing_files=False,
               threads_in="thread_count"),
        {"learning_rate": _RATES, "depth": (4, 6, 8), "iterations": (300, 1000),
         "l2_leaf_reg": (1, 3, 10)},
        package="catboost",
    ),
    "SVM": Peer(
        _svm,
        {"C": tuple(float(x) for x in np.logspace(-3, 3, 7)),
         "gamma": (0.003, 0.01, 0.03, 0.1, 0.3)},
        20_000,
    ),
    "RealMLP": Peer(_named("pytabkit", "RealMLP_TD_", **_NETWORK), package="pytabkit"),
    "TabM": Peer(_named("pytabkit", "TabM_D_", **_NETWORK), package="pytabkit"),
    "xRFM": Peer(XRFM, {}, 6_000, "xrfm"),
}  # fmt: skip


def installed() -> list[str]:
    """Return the names of the methods whose packages are installed."""
    there = importlib.util.find_spec
    return [name for name, p in PEERS.items() if p.package is None or there(p.package) is not None]
