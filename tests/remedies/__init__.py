"""Mistakes of users, the message that each must raise, and the remedies that it names.

An error message names a remedy; the tests apply each remedy literally and check that it works. Each
module of this package holds the cases of one kind, in the functions listed in `TABLES`. `COVERED`
names the packages or modules of streamkern of which the cases reach every error, except those in
`NOT_TRIED`. If `DO_ALL` is true, all remedies are applied before a merge, and not every fourth.
"""

from __future__ import annotations

import shlex
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse

import streamkern as sk
from streamkern.cli.main import run_command
from streamkern.config.run_config import RunConfig

N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3))
Y = X[:, 0] + 0.1 * X[:, 1]
LABELS = np.where(X[:, 0] > 0, "up", "down")
FRAME = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "w": RNG.choice(list("xyz"), N)})
SEVERAL = (X[:, :2] > 0).astype(int)
QUICK: dict[str, Any] = {
    "n_centers": 20, "kernel": "gaussian", "bandwidth": 2.0, "ridge": 1e-3, "metric": "none",
    "epochs": 2,
}  # fmt: skip
TRAIN = "train --train data.zarr --epochs 2 --set model.n_centers=20 --set model.metric=none"

Do = Callable[[], Any]
Case = tuple[Any, ...]
"""The pattern of an answer, a call that makes the mistake, and a call for each remedy in it."""


def long_rows(max_entries: int = 2, n: int = N, d: int = 9000) -> Any:
    """Return sparse rows (n, d) with at most `max_entries` entries each, in few of the features."""
    columns = np.arange(min(d, 9000)) % 100 == 7  # of rows that differ in few features
    rows = np.zeros((n, columns.sum()), np.float32)
    for k in range(max_entries):
        rows[np.arange(n), (np.arange(n) + k) % rows.shape[1]] = k + 1
    entries = scipy.sparse.csr_array(rows)
    places = np.flatnonzero(columns)[entries.indices]
    return scipy.sparse.csr_array((entries.data, places, entries.indptr), shape=(n, d))


def regressor(**parameters: Any) -> sk.KernelRegressor:
    return sk.KernelRegressor(**QUICK | parameters)


def classifier(**parameters: Any) -> sk.KernelClassifier:
    return sk.KernelClassifier(**QUICK | parameters)


def fit_values(*data: Any, **parameters: Any) -> Do:
    """Return a call that fits a regressor with these parameters."""
    return lambda: regressor(**parameters).fit(*data)


def fit_classes(*data: Any, **parameters: Any) -> Do:
    """Return a call that fits a classifier with these parameters."""
    return lambda: classifier(**parameters).fit(*data)


def cases_of(make: Callable[[Any], Do], rows: Iterable[tuple[Any, ...]]) -> list[Case]:
    """Return the cases of rows (words, mistake, remedy, ...) that `make` makes calls of."""
    return [(message, *map(make, given)) for message, *given in rows]


def settings(**given: Any) -> RunConfig:
    """Return a setting in the form of an estimator, such as `model__kernel="laplace"`."""
    return RunConfig().with_overrides({k.replace("__", "."): v for k, v in given.items()})


def ingested(data: Any, **given: Any) -> Any:
    """Make a store, in the place of the one before."""
    return sk.ingest_store(data, "made.zarr", overwrite=True, **given)


def command(line: str) -> None:
    """Run a command, which must end well."""
    code = run_command(shlex.split(line))
    if code:
        raise SystemExit(code)


def prepare() -> None:
    """Make stores and runs in the current folder."""
    sk.ingest_store(X, "data.zarr", y=Y)
    sk.ingest_store(X, "labels.zarr", y=LABELS)
    FRAME.assign(fare=Y).to_csv("rides.csv", index=False)
    np.savez("rows.npz", X=X, y=Y)
    np.save("array.npy", np.ones(3))
    regressor(run_dir="run").fit("data.zarr")
    regressor(run_dir="calibrated", calibrate=True).fit("data.zarr")
    classifier(run_dir="classes").fit("labels.zarr")
    Path("parts").mkdir()
    np.savez("parts/one.npz", X=X, y=Y)
    with tarfile.open("rows.tar", "w") as archive:
        archive.add("rows.npz")
    FRAME.assign(fare=Y).to_pickle("rides.pkl")
    Path("empty.toml").write_text('[model]\nmetric = "none"\n')
    Path("run.toml").write_text('[data]\ntrain = "data.zarr"\n')
