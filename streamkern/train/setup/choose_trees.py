"""Refine the kernel on held-out rows: its bandwidth, and trees whose leaves it compares.

Some targets change in steps, or depend on combinations of thresholds. A kernel of the distance
needs many rows to learn this, and decision trees need few. Gradient boosting (Friedman 2001) with
small trees finds splits that suit the targets; the kernel then compares the leaves of all trees,
see `kernels.tree_partitions`. The values of the leaves are not used: the weights of the kernel
model, which is fitted to all rows, replace them.

The weight of the trees in the squared distance, and the bandwidth, are those of least loss on
held-out rows, to which neither the trees nor the models are fitted. The bandwidth without trees is
searched in the same way: it was chosen by leave-one-out squared errors, which for classes are not
the loss. The trees are used if these rows are predicted significantly better than without them;
they are then grown again from all rows. docs/explanation/tree-kernel.md has errors with and without
trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.array_types import HostArray
from streamkern.basics.optional import on_demand
from streamkern.kernels.base import Kernel
from streamkern.kernels.tree_partitions import N_TREES, TreePartitions
from streamkern.losses.log_link import LogLink
from streamkern.planning.memory import METRIC_FIT_ROWS
from streamkern.solver.method import Report
from streamkern.solver.precondition.held_out import geometric_search
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.metric_mode import MIN_ROWS_FOR_TREES, may_have_trees
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_kernel import median_distances
from streamkern.train.setup.choose_metric import metric_row_counts, robust_gain
from streamkern.train.setup.held_out_models import HeldOutModel, HeldOutProblem

MAX_LEAVES, LEARNING_RATE, MIN_LEAF_ROWS = 8, 0.1, 10
"""Settings of gradient boosting."""
ROW_SHARE, FEATURE_SHARE = 0.7, 0.7
"""Share of the rows from which a tree is grown, and of the features that each split examines."""
MAX_TREE_ENTRIES = 1 << 16
"""Largest number of entries (rows x features) that the first split of a tree examines. It limits
the time to about two seconds."""
MIN_TREE_ROWS = 512
"""Number of rows from which a tree is grown even if they have more entries than that. Its splits
then examine fewer features."""
MAX_COMPARED_TREE_ROWS = 4 * METRIC_FIT_ROWS
"""Largest number of rows of the models that are compared on held-out rows."""
FIRST_WEIGHT_LOG4, WEIGHTS_LOG4 = 1, (-1, 3)
"""Power of four that is tried first as the weight of the trees, relative to the squared median
distance, and the smallest and the largest one."""
WIDTHS_LOG4 = (-1, 2)
"""Smallest and largest power of four by which the squared bandwidth is multiplied."""
MAX_LOSS_RATIO = 1.05
"""Largest ratio of the losses with and without trees at which the bandwidth is searched."""
TREES_GAIN_SE, TREES_GAIN_SE_OF_FEW_ROWS, TREES_GAIN = 1.0, 1.5, 0.01
"""Smallest gain for which trees or another bandwidth are used: in standard errors of the mean loss
of held-out rows, for tables of which a metric is learned and for others, which mostly have fewer
rows, and as a share of this loss. See docs/explanation/tree-kernel.md."""


class _Scales(NamedTuple):
    """Scales of the distances of a kernel with trees, see `_kernel_at`.

    weight : exponent of four of the weight of the trees; None for no trees
    width : exponent of four of the squared bandwidth
    """

    weight: int | None
    width: int


class _Trees(NamedTuple):
    """Trees of unit weight, and the mean share of them in whose leaves two rows differ."""

    partitions: TreePartitions
    unequal_share: float


def looks_for_trees(run: ResolvedRun) -> bool:
    """Return whether a run searches for trees.

    It does if `may_have_trees`, unless its probabilities or intervals come from leave-one-out
    predictions of all rows in batches, see `calibrating.leave_one_out_predictions`.
    """
    judges_all_rows = run.problem.left_out and not run.method.takes_rows(run.sizes)
    return not judges_all_rows and may_have_trees(
        run.config, run.data, run.precision, run.centers_from, run.metric_mode
    )


class _Candidates(NamedTuple):
    """The best models of the same rows with and without trees.

    given : model with the kernel of the run
    plain : model with the best bandwidth, without trees
    with_trees : model with the best weight and bandwidth
    scales : of `with_trees`
    """

    given: HeldOutModel
    plain: HeldOutModel
    with_trees: HeldOutModel
    scales: _Scales


def refine_kernel(
    run: ResolvedRun, rows: SampleRows, targets: TargetScale, kernel: Kernel, report: Report
) -> Kernel:
    """Return the kernel with trees, or with another bandwidth, if it predicts held-out rows
    significantly better, else the same kernel.

    The held-out rows are the first ones, see `metric_row_counts`. The trees are grown from the
    others only: leave-one-out errors of rows from which trees were grown are too small.

    rows : rows in random order, no two made from one stored row
    targets : mean and scale of the targets of the run
    kernel : kernel of the run, with metric and bandwidth
    """
    if kernel.geometry != "distance" or len(rows.X) < MIN_ROWS_FOR_TREES:
        return kernel
    n_held_out = metric_row_counts(len(rows.X))[1]
    classes = None if run.data.source.classes is None else targets
    held_out, fit = rows.part(slice(n_held_out)), rows.part(slice(n_held_out, None))

    def problem(n: int) -> HeldOutProblem:
        return HeldOutProblem(run, fit.part(slice(n)), held_out, classes)

    with run.backend.single_threaded_blas():
        found = _search(problem(METRIC_FIT_ROWS), kernel, run)
        n = min(len(fit.X), MAX_COMPARED_TREE_ROWS)
        if n > METRIC_FIT_ROWS:
            found = _with_more_rows(problem(n), found, run)
        has_trees, gain = _is_better(run, found.plain, found.with_trees)
        refined = found.with_trees.op.kernel
        if has_trees and len(fit.X) > n:
            refined = _kernel_at(run, fit, kernel, _grow(run, fit), found.scales)
    # Losses with a log link have another way to choose the kernel, see `kernel_and_metric`.
    may_change = not (has_trees or isinstance(run.loss, LogLink))
    has_other_bandwidth = may_change and _is_better(run, found.given, found.plain)[0]
    if not has_trees:
        refined = found.plain.op.kernel if has_other_bandwidth else kernel
    losses = {
        "loss": float(found.with_trees.losses.mean()),
        "loss_without": float(found.plain.losses.mean()),
    }
    finite = {name: value for name, value in losses.items() if math.isfinite(value)}
    bandwidth = {"bandwidth": refined.bandwidth} if has_other_bandwidth else {}
    report("trees", {"taken": has_trees, "standard_errors": gain, **finite, **bandwidth})
    return refined


def _is_better(run: ResolvedRun, before: HeldOutModel, after: HeldOutModel) -> tuple[bool, float]:
    """Return whether a model is significantly better, and its gain in standard errors."""
    gain = robust_gain(before.losses, after.losses)
    min_gain_se = TREES_GAIN_SE if run.metric_mode.learns else TREES_GAIN_SE_OF_FEW_ROWS
    max_loss = (1 - TREES_GAIN) * before.losses.mean()  # 0 for constant targets
    return gain > min_gain_se and bool(after.losses.mean() < max_loss), gain


def _search(problem: HeldOutProblem, kernel: Kernel, run: ResolvedRun) -> _Candidates:
    """Return the best models without and with trees.

    With trees, first the weight is searched, and then the bandwidth with the best weight.
    """
    given = start = _model(problem, kernel, None)
    trees, models = _grow(run, problem.fit), {_Scales(None, 0): given}

    def error(scales: _Scales) -> float:
        if scales not in models:
            candidate = _kernel_at(run, problem.fit, kernel, trees, scales)
            models[scales] = _model(problem, candidate, start)
        return float(models[scales].losses.mean())

    def search(scales_of: Callable[[int], _Scales], first: int, limits: tuple[int, int]) -> _Scales:
        errors = geometric_search(
            lambda factor: error(scales_of(round(math.log(factor, 4)))), first, *limits, base=4.0,
            stride=1,
        )  # fmt: skip
        return scales_of(min(errors, key=lambda exponent: errors[exponent]))

    plain = models[search(lambda exponent: _Scales(None, exponent), 0, WIDTHS_LOG4)]
    scales = search(lambda exponent: _Scales(exponent, 0), FIRST_WEIGHT_LOG4, WEIGHTS_LOG4)
    start = models[scales]
    if start.losses.mean() <= MAX_LOSS_RATIO * given.losses.mean():
        weight = scales.weight
        scales = search(lambda exponent: _Scales(weight, exponent), 0, WIDTHS_LOG4)
    return _Candidates(given, plain, models[scales], scales)


def _with_more_rows(problem: HeldOutProblem, found: _Candidates, run: ResolvedRun) -> _Candidates:
    """Return models of more rows with the kernels that were found, if they predicted better."""
    kernel, plain, with_trees = found.given.op.kernel, found.plain, found.with_trees
    has_gain = robust_gain(plain.losses, with_trees.losses) > 0
    if plain is found.given and not has_gain:
        return found
    given = _model(problem, kernel, found.given)
    plain = given if plain is found.given else _model(problem, plain.op.kernel, plain)
    if has_gain:
        trees = _grow(run, problem.fit)
        candidate = _kernel_at(run, problem.fit, kernel, trees, found.scales)
        with_trees = _model(problem, candidate, with_trees)
    else:
        with_trees = plain
    return _Candidates(given, plain, with_trees, found.scales)


def _model(problem: HeldOutProblem, kernel: Kernel, previous: HeldOutModel | None) -> HeldOutModel:
    """Return the model of the problem with the best ridge, whose search starts at the ridge of the
    previous model; without one, at a medium and at the smallest ridge, because the error may have
    two minima."""
    min_ridge = problem.min_ridge_exponent
    starts = {max(min_ridge, -2), min_ridge} if previous is None else {previous.ridge_log10}
    models = [problem.with_kernel(kernel, start, min_ridge) for start in sorted(starts)]
    return problem.with_losses(min(models, key=lambda model: model.error))


def _kernel_at(
    run: ResolvedRun, rows: SampleRows, kernel: Kernel, trees: _Trees, scales: _Scales
) -> Kernel:
    """Return the kernel with trees, if `scales` has a weight for them, and a scaled bandwidth.

    Different leaves increase the squared distances. The squared bandwidth is increased by the mean
    of this increase, so that about the same rows stay near each other, and multiplied by
    4^scales.width.

    rows : rows from which the median distance is measured
    """
    if scales.weight is None:
        return kernel.with_bandwidth(kernel.bandwidth * 2.0**scales.width)
    weight, width = 4.0**scales.weight, 2.0**scales.width
    host = run.backend.to_host(rows.X[:METRIC_FIT_ROWS])
    median = median_distances(run, host, kernel.metric)("distance")
    partitions = TreePartitions(trees.partitions.nodes, weight * median**2)
    wider = kernel.bandwidth * width * math.sqrt(1 + weight * trees.unequal_share)
    return kernel.with_bandwidth(wider).with_trees(partitions)


def _grow(run: ResolvedRun, rows: SampleRows) -> _Trees:
    """Return the trees of gradient boosting of the rows, by squared error."""
    backend, seed = run.backend, run.config.run.random_state
    X = np.ascontiguousarray(backend.to_host(rows.X), np.float32)
    w = None if rows.root is None else backend.to_host(rows.root).astype(np.float64) ** 2
    nodes = boosted_trees(X, backend.to_host(rows.Y).astype(np.float64), w, seed)
    partitions = TreePartitions.of_trees(nodes, 1.0)
    leaves = np.empty((min(len(X), METRIC_FIT_ROWS), len(partitions)))
    partitions.write_leaves(np, X[: len(leaves)], leaves)
    counts = [np.unique(column, return_counts=True)[1] / len(leaves) for column in leaves.T]
    return _Trees(partitions, 1 - float(np.mean([(share**2).sum() for share in counts])))


def boosted_trees(X: HostArray, Y: HostArray, w: HostArray | None, seed: int) -> list[Any]:
    """Return the scikit-learn trees of gradient boosting.

    X : (n, d) float32
    Y : (n, c) float64 targets; each tree fits all of them
    w : (n,) sample weights, or None
    seed : of the rows of each tree, and of the features that its splits examine
    """
    random = np.random.RandomState(seed)
    n, d = X.shape
    n_rows = min(int(ROW_SHARE * n), max(MAX_TREE_ENTRIES // d, MIN_TREE_ROWS))
    feature_share = min(FEATURE_SHARE, MAX_TREE_ENTRIES / (n_rows * d))
    residuals, trees = Y - np.average(Y, axis=0, weights=w), list[Any]()
    for _ in range(N_TREES):
        chosen = random.choice(n, n_rows, replace=False)
        tree = on_demand("sklearn.tree").DecisionTreeRegressor(
            max_leaf_nodes=MAX_LEAVES, min_samples_leaf=MIN_LEAF_ROWS, max_features=feature_share,
            random_state=random,
        )  # fmt: skip
        tree.fit(X[chosen], residuals[chosen], None if w is None else w[chosen], check_input=False)
        values = tree.predict(X, check_input=False).reshape(residuals.shape)
        residuals -= LEARNING_RATE * values
        trees.append(tree)
    return trees
