"""Test runs with categorical features: solvers, resumes, saved models, ranks and searches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import streamkern as sk
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource
from tests.categorical import LEVEL, panel
from tests.runs import Printed, assert_same_bits, final, finished, open_settings, stopped
from tests.solver_problems import Array

N = 500
SOLVERS: dict[str, dict[str, Any]] = {
    "block": {"solver.name": "block", "solver.block_size": 100},
    "falkon": {"solver.name": "falkon"},
    "eigenpro3": {"solver.name": "eigenpro3"},
    "eigenpro4": {"solver.name": "eigenpro4"},
    "direct": {"solver.name": "direct"},
    "eigenpro2": {"solver.name": "eigenpro2", "model.n_centers": "auto"},
    "sgd": {"solver.name": "sgd", "model.n_centers": "auto"},
}


def settings(run_dir: Path | None = None, **changes: Any) -> RunConfig:
    """Return settings that leave kernel and metric open, with 300 centers."""
    return open_settings(run_dir, **{"model.n_centers": 300, "run.evaluate_every": 0} | changes)


def source(n: int = N, seed: int = 0) -> ArraySource:
    """Return a source of rows of a panel."""
    X, y = panel(n, seed)
    return ArraySource(X, y, unit_rows=100)


def categorical_columns(described: Any) -> list[int]:
    """Return the columns of the categorical features of a kernel, from its description."""
    return [column for column, _ in described.get("categorical", ())]


def fit(**parameters: Any) -> sk.KernelRegressor:
    """Return a model of `panel(N)`, which has one categorical feature."""
    model = sk.KernelRegressor(random_state=0, **parameters).fit(*panel(N))
    assert [column for column, _ in model.kernel_.categorical] == [LEVEL]
    return model


def error(model: Any) -> float:
    """Return the mean squared error on new rows."""
    fresh, truth = panel(500, 1)
    return float(np.mean((model.predict(fresh) - truth) ** 2))


# -- solvers and resumes --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("name", SOLVERS)
def test_stopped_run_resumes_with_same_bits(name: str, tmp_path: Path) -> None:
    changes = SOLVERS[name]
    uninterrupted = finished(settings(tmp_path / "whole", **changes), source=source())
    assert categorical_columns(uninterrupted.meta["kernel"]) == [LEVEL]
    config, test = settings(tmp_path / "run", **changes), source(50, 5)
    if name != "direct":
        stopped(config, 3, source=source(), test=test)
    stopped(config, 9, source=source(), test=test)
    resumed = finished(config, source=source(), test=test)
    assert resumed.meta["kernel"] == uninterrupted.meta["kernel"]
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))


@pytest.mark.parametrize(
    "parameters",
    [
        {"precision": "float64"}, {"loss": "quantile", "quantile": 0.5}, {"loss": "huber"},
        {"features": "nystrom", "solver": "direct", "n_centers": 300, "kernel": sk.Laplace(8.0)},
    ],
)  # fmt: skip
def test_other_settings_find_categorical_features(parameters: dict[str, Any]) -> None:
    if "kernel" in parameters:
        parameters = parameters | {
            "kernel": parameters["kernel"].with_categorical([(LEVEL, 100.0)])
        }
    assert error(fit(**parameters)) < 0.5


@pytest.mark.slow
def test_log_loss_finds_categorical_features() -> None:
    (X, y), (fresh, truth) = panel(900), panel(500, 1)
    model = sk.KernelClassifier(random_state=0, loss="log_loss").fit(X, y > 0)
    assert [column for column, _ in model.kernel_.categorical] == [LEVEL]
    assert model.score(fresh, truth > 0) > 0.85


# -- saved and continued models -------------------------------------------------------------------


def test_saved_model_keeps_categorical_features(tmp_path: Path) -> None:
    model, fresh = fit(), panel(500, 1)[0]
    model.save(tmp_path / "model")
    reloaded = sk.load(tmp_path / "model")
    assert reloaded.kernel_.categorical == model.kernel_.categorical
    assert reloaded.kernel == model.kernel == "auto"
    np.testing.assert_array_equal(reloaded.predict(fresh), model.predict(fresh))


def test_given_categorical_kernel_is_saved_and_loaded(tmp_path: Path) -> None:
    kernel = sk.Laplace("auto").with_categorical([(LEVEL, 100.0)])
    model, fresh = fit(kernel=kernel, run_dir=tmp_path / "run"), panel(500, 1)[0]
    reloaded = sk.load(tmp_path / "run")
    assert reloaded.kernel.describe()["categorical"] == [[LEVEL, 100.0]]
    np.testing.assert_array_equal(reloaded.predict(fresh), model.predict(fresh))
    given_model = fit(kernel={"kind": "laplace", "categorical": [[LEVEL, 100.0]]})
    np.testing.assert_array_equal(given_model.predict(fresh), model.predict(fresh))


@pytest.mark.slow
def test_partial_fit_keeps_categorical_features_of_first_block(tmp_path: Path) -> None:
    (X, y), fresh = panel(3 * N), panel(500, 1)[0]
    model = sk.KernelRegressor(random_state=0)
    for part in np.split(np.arange(len(X)), 3):
        model.partial_fit(X[part], y[part])
    assert [column for column, _ in model.kernel_.categorical] == [LEVEL]
    assert error(model) < 0.4
    run = sk.KernelRegressor(random_state=0, solver="block", run_dir=tmp_path / "run").fit(X, y)
    loaded, before = sk.load(tmp_path / "run"), error(run)
    np.testing.assert_array_equal(loaded.predict(fresh), run.predict(fresh))
    loaded.partial_fit(*panel(N, 7))
    assert loaded.kernel_.categorical == run.kernel_.categorical
    assert (loaded.predict(fresh) != run.predict(fresh)).any()
    assert error(loaded) < 1.5 * before


def test_warm_start_keeps_kernel() -> None:
    model = sk.KernelRegressor(random_state=0, solver="block", warm_start=True).fit(*panel(N))
    kernel = model.kernel_
    assert [column for column, _ in kernel.categorical] == [LEVEL]
    X, y = panel(N)
    model.fit(X, y + 0.1 * X[:, 0])
    assert model.kernel_.describe() == kernel.describe()
    assert error(model) < 0.5


def test_continued_run_keeps_categorical_features(tmp_path: Path) -> None:
    first = finished(settings(tmp_path / "a"), source=source())
    then = finished(settings(tmp_path / "b"), source=source(N, 3), continues=tmp_path / "a")
    assert categorical_columns(then.meta["kernel"]) == [LEVEL]
    assert then.meta["kernel"] == first.meta["kernel"]
    config = settings(tmp_path / "c")
    stopped(config, 5, source=source(N, 3), continues=tmp_path / "a", test=source(50, 5))
    finished(config, source=source(N, 3), continues=tmp_path / "a", test=source(50, 5))
    assert_same_bits(final(tmp_path / "c"), final(tmp_path / "b"))


# -- ranks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Array]:
    """Return the settings of a run, and its predictions for `panel(200, 1)` on one rank."""
    folder, (X, y) = tmp_path_factory.mktemp("ranks"), panel(N)
    store = str(folder / "train.zarr")
    ingest(X, store, y=y, chunk_mb=100 * 16 / 2**20)
    changes = {"data.train": store, "run.precision": "float64", "solver.block_size": 100}
    finished(settings(folder / "one", **changes))
    return changes, sk.load(folder / "one").predict(panel(200, 1)[0].astype(np.float64))


@pytest.mark.slow
@pytest.mark.full  # test_broadcast shares setups, with kernels
@pytest.mark.parametrize("columns", [2, 1])
def test_ranks_find_and_share_categorical_features(
    columns: int, run_on_one_rank: tuple[dict[str, Any], Array], tmp_path: Path
) -> None:
    changes, predicted = run_on_one_rank
    config = settings(tmp_path / "two", **changes, **{"run.ranks": 2, "run.center_ranks": columns})
    result = finished(config)
    assert categorical_columns(result.meta["kernel"]) == [LEVEL]
    actual = sk.load(tmp_path / "two").predict(panel(200, 1)[0].astype(np.float64))
    np.testing.assert_allclose(actual, predicted, rtol=0, atol=1e-6)


# -- search ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_search_keeps_categorical_features() -> None:
    """Check that the given settings keep their categorical features, and that no named kernel is
    better."""
    X, y = panel(N)
    tuned = sk.tune(
        X, y, estimator=sk.KernelRegressor(random_state=0), kernels=["laplace", "gaussian"],
        refine=1, refit=True,
    )  # fmt: skip
    assert tuned.best["as_given"]
    assert [column for column, _ in tuned.estimator.kernel_.categorical] == [LEVEL]
    assert error(tuned.estimator) < 0.5


def test_search_accepts_categorical_kernel() -> None:
    X, y = panel(N)
    kernel = {"kind": "laplace", "categorical": [[LEVEL, 100.0]]}
    tuned = sk.tune(
        X, y, estimator=sk.KernelRegressor(kernel, random_state=0), refine=0, refit=True
    )
    assert tuned.estimator.kernel_.categorical == ((LEVEL, 100.0),)
    assert all(row["kernel"]["categorical"] == [[LEVEL, 100.0]] for row in tuned.table)
    assert "categorical" in tuned.toml


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_show_categorical_features(tmp_path: Path, printed: Printed) -> None:
    for name, seed in (("train", 0), ("new", 1)):
        X, y = panel(N, seed)
        frame = pd.DataFrame(X, columns=["a", "b", "c", "shop"])
        frame["shop"] = frame["shop"].astype(int)
        frame.assign(y=y).to_csv(tmp_path / f"{name}.csv", index=False)
    train, run = tmp_path / "train.csv", tmp_path / "run"
    printed("ingest", train, tmp_path / "train.zarr", "--y", "y")
    given = ("--train", tmp_path / "train.zarr")
    assert "kernel" in printed("plan", *given)
    printed("train", *given, "--run-dir", run)
    actual = json.loads(printed("info", run, "--json"))["solver"]
    assert [name for name, _ in actual["categorical"]] == ["shop"]
    assert "shop (weight " in printed("info", run)
    printed("predict", run, tmp_path / "new.csv", tmp_path / "out.csv")
    values = pd.read_csv(tmp_path / "out.csv").iloc[:, -1].to_numpy()
    truth = pd.read_csv(tmp_path / "new.csv")["y"].to_numpy()
    assert math.isfinite(values.sum())
    assert np.mean((values - truth) ** 2) < 0.5
