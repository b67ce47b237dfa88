"""Test runs whose kernel gets trees: resumes, copies of models, continued runs, ranks, searches."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import streamkern as sk
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.setup import assemble, choose_trees, kernel_and_metric
from tests.interruptions import Killed
from tests.rank_runs import on_ranks
from tests.runs import assert_same_bits, final, finished, open_settings, stopped
from tests.solver_problems import Array
from tests.trees import step_table

N, N_TREES = 900, 96
NEW, TRUTH = step_table(400, 1)
CLASSES = ("low", "middle", "high")
SOLVERS: dict[str, dict[str, Any]] = {
    "block": {"solver.name": "block", "solver.block_size": 100},
    "falkon": {"solver.name": "falkon"},
    "direct": {"solver.name": "direct", "model.n_centers": "auto"},
    "float64": {"solver.name": "block", "run.precision": "float64"},
}

TRAINED_ELSEWHERE = """
import pickle, sys, numpy as np
from pathlib import Path
folder = Path(sys.argv[1])
rows = np.load(folder / "rows.npz")
pickle.loads((folder / "estimator.pickle").read_bytes()).fit(rows["X"], rows["y"])
"""


def settings(run_dir: Path | None = None, **changes: Any) -> RunConfig:
    """Return settings that leave kernel and metric open, with 300 centers."""
    return open_settings(run_dir, **{"model.n_centers": 300, "run.evaluate_every": 0} | changes)


def source(n: int = N, seed: int = 0) -> ArraySource:
    """Return a source of rows of the table of steps."""
    return ArraySource(*step_table(n, seed), unit_rows=100)


def labels(y: Array) -> Array:
    """Return class ids, which change where the targets make large steps."""
    return np.digitize(y, [0.5, 1.5])


def n_trees(meta: dict[str, Any]) -> int:
    """Return the number of trees of a kernel, from the description of a run."""
    return int(meta["kernel"].get("trees", {"n": 0})["n"])


def error(model: Any) -> float:
    """Return the mean squared error on new rows, as a share of the variance of their targets."""
    return float(np.mean((model.predict(NEW) - TRUTH) ** 2) / TRUTH.var())


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of this name in the log of a run."""
    lines = (run_dir / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event.get("event") == name]


@contextmanager
def no_growth() -> Iterator[None]:
    """Let an attempt to grow trees fail."""
    failing = AssertionError("trees were grown again")
    with patch.object(choose_trees, "boosted_trees", side_effect=failing):
        yield


def fit(**parameters: Any) -> sk.KernelRegressor:
    """Return a model of the table of steps, which has trees."""
    model = sk.KernelRegressor(random_state=0, threads=1, **parameters).fit(*step_table(N))
    assert model.kernel_.trees is not None
    return model


@pytest.fixture(scope="module")
def model() -> sk.KernelRegressor:
    """Return a fitted model with trees, of features as they are; not to be changed."""
    return fit(scale="none")


@pytest.fixture(scope="module")
def block_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of an undisturbed run of solver "block" with trees."""
    folder = tmp_path_factory.mktemp("block") / "run"
    finished(settings(folder, **SOLVERS["block"]), source=source())
    return folder


# -- the function ---------------------------------------------------------------------------------


def leaves(nodes: Array, x: Array) -> list[int]:
    """Return the leaf of each tree that a row is in, one split after the other."""
    found = []
    for tree in nodes:
        node = 0
        while int(tree[node, 2]) != node:
            feature, value, left, right = tree[node]
            node = int(left) if np.float32(x[int(feature)]) <= np.float32(value) else int(right)
        found.append(node)
    return found


@pytest.mark.parametrize("is_loaded", [False, True])
def test_predictions_equal_brute_force(
    is_loaded: bool, model: sk.KernelRegressor, tmp_path: Path
) -> None:
    """Sum weights times kernel values in float64, with the leaves from a walk through each tree."""
    if is_loaded:
        model.save(tmp_path / "model")
    own: Any = sk.load(tmp_path / "model") if is_loaded else model
    kernel, trees = own.kernel_, own.kernel_.trees
    rows, centers = NEW[:40], np.asarray(own.centers_, np.float64)
    A, B = (np.array([leaves(trees.nodes, row) for row in side]) for side in (rows, centers))
    n_unequal = (A[:, None] != B).sum(axis=2)
    differences = (rows[:, None] - centers) * kernel.metric
    squares = (differences**2).sum(axis=2) + trees.weight / len(trees) * n_unequal
    values = np.exp(-np.sqrt(squares) / kernel.bandwidth) @ np.asarray(own.dual_coef_)
    expected = values + np.asarray(own.intercept_)
    # The model computes in float32: kernel values have errors of about 1e-6, and the weights are
    # of order 10.
    np.testing.assert_allclose(own.predict(NEW[:40]), expected.reshape(-1), atol=1e-3)


# -- kills and resumes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOLVERS)
def test_stopped_run_resumes_with_same_bits(name: str, tmp_path: Path) -> None:
    """Check also that trees are not grown again, and that the number of threads does not matter."""
    whole = finished(settings(tmp_path / "whole", **SOLVERS[name]), source=source())
    assert n_trees(whole.meta) == N_TREES
    config, test = settings(tmp_path / "run", **SOLVERS[name]), source(50, 5)
    stopped(config, 3, source=source(), test=test)
    with no_growth():
        stopped(config, 7, source=source(), test=test)
        finished(config.with_overrides({"run.threads": 2}), source=source(), test=test)
    assert_same_bits(final(tmp_path / "run"), final(tmp_path / "whole"))
    for run in ("run", "whole"):
        assert [event["taken"] for event in events(tmp_path / run, "trees")] == [True]


@pytest.mark.parametrize("after", ["refine_kernel", "compute_setup"])
def test_run_killed_in_setup_starts_again_with_same_bits(
    after: str, block_run: Path, tmp_path: Path
) -> None:
    """End the setup after the trees were found, or before they are stored."""
    module: Any = kernel_and_metric if after == "refine_kernel" else assemble
    work = getattr(module, after)

    def killed(*arguments: Any, **options: Any) -> None:
        work(*arguments, **options)
        raise Killed

    run_dir = tmp_path / "run"
    config = settings(run_dir, **SOLVERS["block"])
    with patch.object(module, after, killed), pytest.raises(Killed):
        finished(config, source=source())
    finished(config, source=source())
    assert_same_bits(final(run_dir), final(block_run))
    assert {event["taken"] for event in events(run_dir, "trees")} == {True}


# -- continued and partial fits -------------------------------------------------------------------


def test_continued_run_keeps_trees_after_a_stop(block_run: Path, tmp_path: Path) -> None:
    """Check that it keeps the kernel of the first run for new rows, and grows no trees."""
    rows, options = source(N, 3), {"continues": block_run}
    with no_growth():
        then = finished(settings(tmp_path / "whole", **SOLVERS["block"]), source=rows, **options)
        assert n_trees(then.meta) == N_TREES
        config = settings(tmp_path / "parts", **SOLVERS["block"])
        stopped(config, 5, source=rows, test=source(50, 5), **options)
        finished(config, source=rows, test=source(50, 5), **options)
    assert_same_bits(final(tmp_path / "parts"), final(tmp_path / "whole"))
    loaded, before = sk.load(tmp_path / "whole"), sk.load(block_run)
    assert loaded.kernel_.describe() == before.kernel_.describe()
    assert error(loaded) < 1.2 * error(before)


def test_partial_fit_keeps_trees(block_run: Path) -> None:
    """Check that later blocks use the trees of the first block, or of the loaded model."""
    (X, y), first = step_table(3 * N), sk.KernelRegressor(random_state=0, threads=1)
    first.partial_fit(X[:N], y[:N])
    loaded = sk.load(block_run)
    for own in (first, loaded):
        kernel, before = own.kernel_, error(own)
        assert kernel.trees is not None
        with no_growth():
            for start in (N, 2 * N):
                own.partial_fit(X[start : start + N], y[start : start + N])
        assert own.kernel_.describe() == kernel.describe()
        assert error(own) < 1.2 * before


def test_warm_start_from_fitted_model_keeps_trees() -> None:
    own = fit(solver="block", warm_start=True)
    kernel, (X, y) = own.kernel_, step_table(N)
    with no_growth():
        own.fit(X, y + 0.1 * X[:, 0])
    assert own.kernel_.describe() == kernel.describe()
    assert error(own) < 0.1


# -- copies ---------------------------------------------------------------------------------------


def test_pickled_copies_predict_the_same(model: sk.KernelRegressor) -> None:
    copied = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copied.predict(NEW), model.predict(NEW))
    assert copied.kernel_.describe() == model.kernel_.describe()
    np.testing.assert_array_equal(copied.kernel_.trees.nodes, model.kernel_.trees.nodes)


def test_kernel_with_trees_is_trained_in_another_process(
    model: sk.KernelRegressor, tmp_path: Path
) -> None:
    """Load the run directory of an estimator that was pickled and fitted elsewhere."""
    own = sk.KernelRegressor(
        model.kernel_, ridge=1e-5, scale="none", threads=1, run_dir=str(tmp_path / "run")
    )
    (tmp_path / "estimator.pickle").write_bytes(pickle.dumps(own))
    np.savez(tmp_path / "rows.npz", X=step_table(N)[0], y=step_table(N)[1])
    subprocess.run(
        [sys.executable, "-c", TRAINED_ELSEWHERE, str(tmp_path)], check=True, capture_output=True
    )
    loaded = sk.load(tmp_path / "run")
    assert loaded.kernel_.describe() == model.kernel_.describe()
    here = sk.KernelRegressor(model.kernel_, ridge=1e-5, scale="none", threads=1)
    expected = here.fit(*step_table(N)).predict(NEW)
    np.testing.assert_array_equal(loaded.predict(NEW), expected)


# -- ranks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 2])
def test_ranks_share_trees(columns: int, tmp_path: Path) -> None:
    """Compare two ranks, which partition rows or centers, with one."""
    X, y = step_table(N)
    store = str(tmp_path / "train.zarr")
    ingest(X.astype(np.float32), store, y=y, chunk_mb=100 * 32 / 2**20)
    own = {"data.train": store, "run.precision": "float64", "run.accelerator": "none"}
    own |= SOLVERS["block"]
    config = settings(tmp_path / "one", **own)
    assert n_trees(finished(config).meta) == N_TREES
    ranks = {"run.ranks": 2, "run.center_ranks": columns}
    on_ranks(2, settings(tmp_path / "two", **own, **ranks))
    one, two = sk.load(tmp_path / "one"), sk.load(tmp_path / "two")
    assert two.kernel_.trees is not None
    np.testing.assert_array_equal(two.kernel_.trees.nodes, one.kernel_.trees.nodes)
    # The ranks add the same float64 numbers in another order.
    np.testing.assert_allclose(two.predict(NEW), one.predict(NEW), rtol=0, atol=1e-6)


# -- other rows -----------------------------------------------------------------------------------


def test_lazy_rows_give_same_model_as_arrays(tmp_path: Path) -> None:
    X, y = step_table(N)
    expected = fit().predict(NEW)
    for rows, targets in (
        (da.from_array(X, chunks=(300, -1)), da.from_array(y, chunks=300)),
        (zarr.create_array(str(tmp_path / "x.zarr"), data=X, chunks=(300, 8)), y),
    ):
        own = sk.KernelRegressor(random_state=0, threads=1).fit(rows, targets)
        assert own.kernel_.trees is not None
        # Mean and deviation of the columns are summed in another order.
        np.testing.assert_allclose(own.predict(NEW), expected, rtol=0, atol=1e-3)


def test_store_in_memory_gives_trees() -> None:
    location = "memory://trees-in-runs.zarr"
    ingest(*step_table(N)[:1], location, y=step_table(N)[1])
    own = sk.KernelRegressor(random_state=0, threads=1).fit(location)
    assert own.kernel_.trees is not None
    assert error(own) < 0.1


def test_sparse_rows_and_images_get_no_trees() -> None:
    random = np.random.default_rng(0)
    rows = sp.random_array((600, 20_000), density=1e-3, format="csr", rng=random)
    images = random.integers(0, 256, (600, 4, 4, 1), np.uint8)
    with no_growth():
        sparse = sk.KernelRegressor(random_state=0, threads=1).fit(rows, rows.sum(axis=1))
        assert sparse.kernel_.sparse
        sk.KernelClassifier(random_state=0, threads=1).fit(images, images[:, 1, 1, 0] > 128)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_targets_get_no_trees(value: float) -> None:
    """Check targets whose loss without trees is 0."""
    X = step_table(600)[0]
    own = sk.KernelRegressor(random_state=0, threads=1).fit(X, np.full(600, value))
    assert own.kernel_.trees is None
    np.testing.assert_allclose(own.predict(NEW), value, atol=1e-6)


# -- searches and settings ------------------------------------------------------------------------


def test_search_grows_trees_only_for_open_kernels(model: sk.KernelRegressor) -> None:
    X, y = step_table(N)
    tuned = sk.tune(
        X, y, estimator=sk.KernelRegressor(random_state=0, threads=1), kernels=["gaussian"],
        bandwidths=[1.0], ridges=[1e-4], refine=0, refit=True,
    )  # fmt: skip
    assert tuned.best["as_given"]
    assert tuned.estimator.kernel_.trees is not None
    assert error(tuned.estimator) < 0.1
    with pytest.raises(sk.ConfigError, match="give the kernel without trees, or the kernel 'auto'"):
        sk.tune(X, y, estimator=sk.KernelRegressor(model.kernel_), refine=0)


def test_small_memory_gets_no_trees_or_an_error() -> None:
    X, y = step_table(N)
    with pytest.raises(sk.MemoryBudgetError, match="the smallest plan needs"):
        sk.KernelRegressor(threads=1, memory="20 MiB").fit(X, y)
    assert fit(memory="1 GiB").kernel_.trees is not None
