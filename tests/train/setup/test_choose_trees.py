"""Test that a run takes trees for targets with steps only, and from which rows they are grown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingRegressor

import streamkern as sk
from streamkern.kernels.categorical import MAX_CATEGORICAL
from streamkern.kernels.points import point_bytes, point_width
from streamkern.kernels.tree_partitions import N_TREES, TreePartitions
from streamkern.rundir.run_log import read_log
from streamkern.train.resolve.metric_mode import (
    MAX_TREE_FEATURES,
    MAX_TREE_OUTPUTS,
    MIN_ROWS_FOR_TREES,
    with_placeholders,
)
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup import assemble, choose_trees, kernel_and_metric
from streamkern.train.setup.choose_metric import metric_row_counts
from streamkern.train.setup.choose_trees import (
    LEARNING_RATE,
    MAX_LEAVES,
    MAX_TREE_ENTRIES,
    MIN_LEAF_ROWS,
    TREES_GAIN,
    TREES_GAIN_SE,
    boosted_trees,
)
from tests.solver_problems import Array

N = 500


def stepped(n: int, seed: int = 0, noise: float = 0.1) -> tuple[Array, Array, Array]:
    """Return uniform X (n, 8) float32, y (n,) with noise, and y without noise, which has steps."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 8)).astype(np.float32)
    steps = (X[:, 0] > 0) * (X[:, 1] > 0.3) * 2.0 + (X[:, 2] > -0.5) * (X[:, 3] < 0.2)
    return X, steps + noise * rng.normal(size=n), steps


def error_of(model: Any) -> float:
    """Return the mean squared error of a model on other rows, without noise."""
    fresh, _, truth = stepped(1000, 1)
    return float(np.mean((model.predict(fresh) - truth) ** 2))


def nodes_of(model: Any) -> Array:
    """Return the nodes of the trees of a model."""
    nodes: Array = model.kernel_.trees.nodes
    return nodes


class Fit(NamedTuple):
    """A model, and what its search for trees read.

    grown : the rows (n, d) from which trees were grown, of each search for trees
    run : the resolved run
    centers, held_out, judged : the input and the output of `assemble._judged_rows`
    log : the entries of the log about trees
    """

    model: Any
    grown: list[Array]
    run: ResolvedRun
    centers: Array
    held_out: Array
    judged: Array
    log: list[dict[str, Any]]


def recorded_fit(folder: Path, *rows: Array, **parameters: Any) -> Fit:
    """Return a model of the rows, and what its search for trees read."""
    grown: list[Array] = []
    judged: list[Any] = []
    original_growth, original_judged = choose_trees.boosted_trees, assemble._judged_rows

    def growth(X: Array, *others: Any) -> list[Any]:
        grown.append(X.copy())
        return original_growth(X, *others)

    def judged_rows(run: Any, centers: Array, held_out: Array) -> dict[str, Array]:
        arrays = original_judged(run, centers, held_out)
        judged.extend([run, centers, held_out, arrays["judged"]])
        return arrays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_trees, "boosted_trees", growth)
        patch.setattr(assemble, "_judged_rows", judged_rows)
        model = sk.KernelRegressor(random_state=0, run_dir=folder / "run", **parameters).fit(*rows)
    log = [r for r in read_log(folder / "run" / "log.jsonl") if r["event"] == "trees"]
    return Fit(model, grown, *judged, log)


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Return a model of targets with steps."""
    return recorded_fit(tmp_path_factory.mktemp("steps"), *stepped(N)[:2])


def recorder(calls: list[Any]) -> Any:
    """Return a replacement of `refine_kernel` that keeps its kernel and counts its calls."""

    def keep(run: Any, rows: Any, targets: Any, kernel: Any, report: Any) -> Any:
        calls.append(kernel)
        return kernel

    return keep


@pytest.fixture
def without_search() -> Iterator[pytest.MonkeyPatch]:
    """Turn the search for trees off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_and_metric, "looks_for_trees", lambda run: False)
        yield patch


def equal_rows(A: Array, B: Array) -> Array:
    """Return whether each row of A (n, d) equals a row of B (m, d), (n,)."""
    return np.asarray((A.astype(np.float32)[:, None] == B.astype(np.float32)).all(2).any(1))


@pytest.mark.slow
def test_trees_lower_the_error_for_steps(fit: Fit, without_search: pytest.MonkeyPatch) -> None:
    """Compare with the model that the same settings give without trees, and without a metric."""
    X, y, _ = stepped(N)
    plain = sk.KernelRegressor(random_state=0).fit(X, y)
    no_metric = sk.KernelRegressor(random_state=0, metric="none").fit(X, y)
    assert plain.kernel_.trees is no_metric.kernel_.trees is None
    assert len(fit.model.kernel_.trees) == N_TREES
    assert error_of(fit.model) < 0.5 * error_of(plain)
    assert error_of(fit.model) < 0.25 * error_of(no_metric)
    (line,) = fit.log
    assert line["taken"]
    assert line["standard_errors"] > TREES_GAIN_SE
    assert line["loss"] < 0.7 * line["loss_without"]


@pytest.mark.slow
def test_held_out_rows_grow_no_tree_and_are_judged(fit: Fit) -> None:
    """Check each row: either trees were grown from it, or its leave-one-out error is used."""
    assert len(fit.grown) >= 1
    n_held_out = metric_row_counts(N)[1]
    assert fit.centers.shape == (N, 8)
    assert len(fit.held_out) == n_held_out
    for rows in fit.grown:
        assert not equal_rows(rows, fit.held_out).any()
    np.testing.assert_array_equal(fit.judged, equal_rows(fit.centers, fit.held_out))
    np.testing.assert_array_equal(~fit.judged, equal_rows(fit.centers, fit.grown[-1]))
    assert fit.judged.sum() == n_held_out


@pytest.mark.slow
def test_plan_has_the_memory_of_trees(fit: Fit) -> None:
    """Compare a planned row with a row of the model."""
    run, kernel = fit.run, fit.model.kernel_
    planned, actual = run.problem, (8, run.precision, run.backend, kernel)
    assert point_width(*actual) <= planned.width <= point_width(*actual) + MAX_CATEGORICAL
    assert planned.point_bytes is not None
    assert point_bytes(*actual) <= planned.point_bytes
    for trees in (True, False):
        kernel = with_placeholders(sk.Laplace(1.0), 2, trees=trees)
        assert kernel.n_compared == 2 + N_TREES * trees


@pytest.mark.slow
def test_final_trees_are_those_of_all_other_rows(fit: Fit) -> None:
    """Check that equal rows and targets give the nodes of the model."""
    X, y, _ = stepped(N)
    scaled = (X - X.mean(axis=0, dtype=np.float64)) / X.std(axis=0, dtype=np.float64)
    order = np.array([np.abs(scaled - row).sum(axis=1).argmin() for row in fit.grown[-1]])
    np.testing.assert_allclose(scaled[order], fit.grown[-1], atol=1e-5)
    targets = ((y - y.mean()) / y.std())[order, None]
    trees = boosted_trees(fit.grown[-1], targets, None, 0)
    np.testing.assert_array_equal(TreePartitions.of_trees(trees, 1.0).nodes, nodes_of(fit.model))


@pytest.mark.slow
def test_threads_do_not_change_trees(fit: Fit) -> None:
    X, y, _ = stepped(N)
    fresh = stepped(50, 2)[0]
    models = [sk.KernelRegressor(random_state=0, threads=k).fit(X, y) for k in (1, 2)]
    for model in models:
        np.testing.assert_array_equal(nodes_of(model), nodes_of(fit.model))
        assert model.kernel_.describe() == fit.model.kernel_.describe()
        np.testing.assert_array_equal(model.predict(fresh), models[0].predict(fresh))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["noise", "smooth"])
def test_no_trees_are_taken_without_steps(
    kind: str, tmp_path: Path, without_search: pytest.MonkeyPatch
) -> None:
    """Check that the model has the same bits as if there had been no search."""
    rng = np.random.default_rng(3)
    X, noise = rng.normal(size=(N, 4)).astype(np.float32), rng.normal(size=N)
    y = noise if kind == "noise" else np.sin(X[:, 0]) + 0.5 * X[:, 1] * X[:, 2] + 0.1 * noise
    plain = sk.KernelRegressor(random_state=0).fit(X, y)
    without_search.undo()
    model = sk.KernelRegressor(random_state=0, run_dir=tmp_path / "run").fit(X, y)
    (line,) = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "trees"]
    assert not line["taken"]
    gain = 1 - line["loss"] / line["loss_without"]
    assert line["standard_errors"] <= TREES_GAIN_SE or gain <= TREES_GAIN
    assert model.kernel_.trees is None
    assert model.kernel_.describe() == plain.kernel_.describe()
    fresh = rng.normal(size=(200, 4)).astype(np.float32)
    np.testing.assert_array_equal(model.predict(fresh), plain.predict(fresh))


@pytest.mark.slow
def test_copies_of_rows_are_judged_together(tmp_path: Path) -> None:
    """Check that no copy of a held-out row grows a tree."""
    X, y, _ = stepped(350)
    copies = np.random.default_rng(0).permutation(np.concatenate([np.arange(350), np.arange(150)]))
    fit = recorded_fit(tmp_path, X[copies], y[copies])
    assert fit.model.kernel_.trees is not None
    assert not equal_rows(fit.grown[-1], fit.held_out).any()
    np.testing.assert_array_equal(fit.judged, equal_rows(fit.centers, fit.held_out))
    np.testing.assert_array_equal(~fit.judged, equal_rows(fit.centers, fit.grown[-1]))


@pytest.mark.slow
def test_rows_count_by_weight(tmp_path: Path) -> None:
    """Check that rows of weight 0 or small weight, with other targets, hide no step."""
    X, y, _ = stepped(N + 300)
    w = np.ones(len(X))
    w[N:], w[N + 150 :] = 1e-6, 0
    y[N:] = np.random.default_rng(5).normal(0, 5, 300)
    fit = recorded_fit(tmp_path, X, y, w)
    assert fit.model.kernel_.trees is not None
    assert error_of(fit.model) < 0.12
    assert not equal_rows(fit.grown[-1], fit.held_out).any()


@pytest.mark.parametrize(
    ("n_rows", "d", "n_outputs", "searches"),
    [
        (MIN_ROWS_FOR_TREES, 3, 1, True), (MIN_ROWS_FOR_TREES - 1, 3, 1, False),
        (300, 3, MAX_TREE_OUTPUTS, True), (300, 3, MAX_TREE_OUTPUTS + 1, False),
        (300, 1, 1, True), (300, 400, 1, True), (300, MAX_TREE_FEATURES + 1, 1, False),
    ],
)  # fmt: skip
def test_search_depends_on_sizes(
    n_rows: int, d: int, n_outputs: int, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(kernel_and_metric, "refine_kernel", recorder(calls))
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(n_rows, d)).astype(np.float32), rng.normal(size=(n_rows, n_outputs))
    sk.KernelRegressor(random_state=0).fit(X, Y)
    assert bool(calls) == searches


@pytest.mark.parametrize(("factor", "is_changed"), [(8.0, True), (1.0, False)])
def test_bandwidth_is_refined_on_held_out_rows(
    factor: float, is_changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give the search a kernel that is narrower by a factor than the one of the run."""
    narrow: list[Any] = []

    def refine(run: Any, rows: Any, targets: Any, kernel: Any, report: Any) -> Any:
        narrow.append(kernel.with_bandwidth(kernel.bandwidth / factor))
        return choose_trees.refine_kernel(run, rows, targets, narrow[-1], report)

    monkeypatch.setattr(kernel_and_metric, "refine_kernel", refine)
    X = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    y = np.sin(X[:, 0]) + X[:, 1]
    model = sk.KernelRegressor(random_state=0, run_dir=tmp_path / "run").fit(X, y)
    assert model.kernel_.trees is None
    entries = [r for r in read_log(tmp_path / "run" / "log.jsonl") if r["event"] == "trees"]
    assert not entries[0]["taken"]
    if is_changed:
        assert model.kernel_.bandwidth > 2 * narrow[0].bandwidth
        assert entries[0]["bandwidth"] == model.kernel_.bandwidth
    else:
        assert model.kernel_.bandwidth == narrow[0].bandwidth
        assert "bandwidth" not in entries[0]


def test_few_rows_get_trees_but_no_metric() -> None:
    X, y, _ = stepped(250)
    model = sk.KernelRegressor(random_state=0).fit(X, y)
    assert model.kernel_.metric is None
    assert len(model.kernel_.trees) == N_TREES
    assert error_of(model) < 0.7 * error_of(sk.KernelRegressor(metric="none").fit(X, y))


def test_few_rows_of_classes_get_trees() -> None:
    X, _, steps = stepped(500)
    fresh, _, truth = stepped(1000, 1)
    model = sk.KernelClassifier(random_state=0).fit(X, steps > 1)
    assert len(model.kernel_.trees) == N_TREES
    assert model.score(fresh, truth > 1) > 0.95


def test_trees_of_wide_tables_examine_as_many_entries_as_others() -> None:
    """Check that trees find the first of 1500 features, though a split examines a tenth of them."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 1500)).astype(np.float32)
    y = np.where(X[:, :1] > 0, 1.0, -1.0)
    trees = boosted_trees(X, y, None, 0)
    assert 0.99 * MAX_TREE_ENTRIES <= 420 * trees[0].max_features * 1500 <= 1.01 * MAX_TREE_ENTRIES
    assert sum(bool((tree.tree_.feature == 0).any()) for tree in trees) > 10


@pytest.mark.parametrize(
    "parameters",
    [
        {"kernel": "laplace"}, {"bandwidth": 3.0}, {"metric": "none"}, {"bandwidth": "median"},
        {"kernel": "gaussian", "features": "fourier", "n_features": 100},
    ],
)  # fmt: skip
def test_given_settings_disable_search(
    parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(kernel_and_metric, "refine_kernel", recorder(calls))
    X, y, _ = stepped(300)
    assert sk.KernelRegressor(random_state=0, **parameters).fit(X, y).kernel_.trees is None
    assert not calls


# --- gradient boosting --------------------------------------------------------------------------


def boosted_values(trees: list[Any], X: Array, start: Array) -> Array:
    """Return the predictions (n, c) of gradient boosting. start : (c,) mean of the targets."""
    values = [tree.predict(X).reshape(len(X), -1) for tree in trees]
    return np.asarray(start + LEARNING_RATE * sum(values))


def test_trees_predict_as_well_as_those_of_scikit_learn() -> None:
    """Compare the errors on other rows for one output, and for two that are multiples of it."""
    (X, y, _), (fresh, _, truth) = stepped(2000), stepped(1000, 1)
    reference = GradientBoostingRegressor(
        n_estimators=N_TREES, learning_rate=LEARNING_RATE, max_leaf_nodes=MAX_LEAVES,
        max_depth=None, min_samples_leaf=MIN_LEAF_ROWS, subsample=0.7, max_features=0.7,
        random_state=0,
    ).fit(X, y)  # fmt: skip
    expected = np.mean((reference.predict(fresh) - truth) ** 2)
    assert expected < 0.01
    for factors in ([1.0], [1.0, -2.0]):
        Y = y[:, None] * factors
        trees = boosted_trees(X, Y, None, 0)
        assert len(trees) == N_TREES
        assert max(tree.get_n_leaves() for tree in trees) == MAX_LEAVES
        F = boosted_values(trees, fresh, Y.mean(axis=0))
        errors = ((F / factors - truth[:, None]) ** 2).mean(axis=0)
        assert (errors < 1.3 * expected).all()


def test_trees_depend_on_seed_and_weights_only() -> None:
    """Check that a factor of all weights, and targets of rows of weight 0, have no effect."""
    X, y, _ = stepped(400)
    w = np.random.default_rng(1).integers(0, 3, 400).astype(np.float64)
    other = np.where(w > 0, y, 50 + y)

    def nodes(y: Array, w: Array | None, seed: int = 0) -> Array:
        return TreePartitions.of_trees(boosted_trees(X, y[:, None], w, seed), 1.0).nodes

    first = nodes(y, w)
    np.testing.assert_array_equal(nodes(y, w), first)
    np.testing.assert_array_equal(nodes(other, w), first)
    np.testing.assert_array_equal(nodes(y, 4 * w), first)
    np.testing.assert_array_equal(nodes(y, np.ones(400)), nodes(y, None))
    for changed in (nodes(y, w, 1), nodes(y, None)):
        assert changed.shape != first.shape or (changed != first).any()
