"""Choose the categorical features of the kernel, which it also compares for equality.

Numeric features may be identifiers: numbers of shops, households or schools, codes, years. The
target may then depend on the value itself, and not smoothly. A kernel of distances cannot represent
this, and the gradients of a smooth model do not show it, so a learned metric does not help either.

If the values themselves matter, the leave-one-out residuals of rows with equal values tend to have
the same sign. Let r_i be the residual of row i, times the square root of its sample weight, and let
rows with equal values form a group. If the groups have no effect, the sum

    T = sum over pairs i < j of one group of r_i r_j

has mean 0, and a variance of about the same sum of r_i^2 r_j^2. The feature with the largest T, in
standard deviations, is made categorical if the rows then predict each other significantly better.
After that, the next feature is examined, with the residuals of the new kernel. Features that are
the mean targets of words are left out, because the mean of a word differs between training rows and
rows to predict.

docs/explanation/categorical-features.md has errors with and without categorical features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats, HostArray, Ints
from streamkern.ingest.tables.columns import TargetMeans
from streamkern.ingest.tables.encoder import Encoder
from streamkern.kernels.base import Kernel
from streamkern.kernels.categorical import MAX_CATEGORICAL
from streamkern.kernels.products import KernelOperator
from streamkern.solver.method import Report
from streamkern.solver.precondition.held_out import geometric_search
from streamkern.solver.precondition.noise import (
    Noise,
    find_noise,
    left_out_values,
    mean_difference_in_se,
    row_errors,
)
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.sources.base import BaseSource
from streamkern.train.resolve.metric_mode import looks_for_categorical
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_kernel import median_distances, search_operator

MIN_EXAMINED_ROWS, MAX_EXAMINED_ROWS, ROWS_PER_EXAMINED_ROW = 1024, 1536, 8
"""Smallest and largest number of rows that are examined. Between these bounds, one row is examined
for this many rows of the run."""
MIN_CATEGORICAL_ROWS = 200
"""Smallest number of rows from which categorical features are chosen."""
MIN_DISTINCT_VALUES, MIN_REPEATED_SHARE = 3, 0.1
"""Smallest number of distinct values of a feature, and smallest share of rows whose value occurs in
another row, too. With two values, the distance already tells whether values are equal."""
MIN_SCORE = 3.0
"""Smallest T, in standard deviations, for which a feature is tried as categorical."""
CATEGORICAL_GAIN_SE, CATEGORICAL_GAIN = 2.0, 0.01
"""Smallest gain for which a feature is made categorical: in standard errors, and as a share of the
error."""
FIRST_WEIGHT_EXPONENT, MIN_WEIGHT_EXPONENT, MAX_WEIGHT_EXPONENT = -1, -3, 2
"""First, smallest and largest power of 4 that is tried as the weight of a categorical feature,
relative to the squared median distance."""
TINY_DENOMINATOR = 1e-300
"""Smallest denominator, which replaces 0."""


class _Fit(NamedTuple):
    """A kernel, and the noise and ridge that are estimated with it."""

    kernel: Kernel
    noise: Noise


def find_categorical(run: ResolvedRun, rows: SampleRows, kernel: Kernel, report: Report) -> Kernel:
    """Return the kernel with the categorical features that improve leave-one-out predictions.

    The kernel is returned unchanged if the run does not look for any, or if none helps.

    rows : sample rows, no two of them made from the same stored row
    """
    if not looks_for_categorical(run.config, run.data, run.precision, run.centers_from):
        return kernel
    n = max(run.problem.n_rows // ROWS_PER_EXAMINED_ROW, MIN_EXAMINED_ROWS)
    rows = rows.first_rows(min(n, MAX_EXAMINED_ROWS), run.backend)
    host = np.asarray(run.backend.to_host(rows.X))
    groups = groups_by_feature(host)
    for j in _target_mean_features(run.data.source):
        groups.pop(j, None)
    if len(host) < MIN_CATEGORICAL_ROWS or not groups or kernel.geometry != "distance":
        return kernel
    median_squared = median_distances(run, host, kernel.metric)("distance") ** 2

    def fit_kernel(kernel: Kernel, start: Noise | None) -> _Fit | None:
        noise = find_noise(operator(kernel), None, rows, start, run.method.min_penalty)
        return _Fit(kernel, noise) if noise.trials and math.isfinite(noise.error) else None

    def operator(kernel: Kernel) -> KernelOperator:
        return search_operator(run, kernel, host, run.grid)

    def errors(fit: _Fit) -> Floats:
        return row_errors(operator(fit.kernel), None, rows, fit.noise)[0]

    def highest_score(fit: _Fit) -> tuple[float, int]:
        values = left_out_values(operator(fit.kernel), None, rows, fit.noise)
        residuals = values - run.backend.to_host(rows.Y)
        if rows.root is not None:
            residuals *= run.backend.to_host(rows.root)[:, None]
        return max((group_score(residuals, group), j) for j, group in groups.items())

    # Each turn of the loop tries one feature, and removes it from the candidates in `groups`.
    current = fit_kernel(kernel, None)
    while current is not None and groups and len(current.kernel.categorical) < MAX_CATEGORICAL:
        score, column = highest_score(current)
        if score < MIN_SCORE:
            break
        candidate = _with_categorical(
            current, column, groups.pop(column), median_squared, fit_kernel
        )
        fields: dict[str, Any] = {"feature": column, "score": score, "taken": False}
        if candidate is not None:
            old_errors, new_errors = errors(current), errors(candidate)
            gain = mean_difference_in_se(old_errors, new_errors)
            error_ratio = float(new_errors.mean() / old_errors.mean())
            improves = gain >= CATEGORICAL_GAIN_SE and error_ratio <= 1 - CATEGORICAL_GAIN
            fields |= {"taken": improves, "standard_errors": gain, "error": error_ratio}
            current = candidate if improves else current
        report("categorical", fields)
    return kernel if current is None else current.kernel


def _with_categorical(
    current: _Fit,
    column: int,
    group: Ints,
    median_squared: float,
    fit_kernel: Callable[[Kernel, Noise | None], _Fit | None],
) -> _Fit | None:
    """Return the best fit in which the feature is categorical, or None if no fit is finite.

    Unequal values increase the squared distances. The bandwidth is increased by the mean of this
    increase, so that about the same rows stay near each other.

    column : index of the feature
    group : (n,) number of the group of each row
    median_squared : squared median distance, which weights are relative to
    fit_kernel : returns the fit of a kernel from a noise to start with; None if it is not finite
    """
    n, kernel, fits = len(group), current.kernel, dict[float, _Fit]()
    unequal_share = 1 - float((np.bincount(group) ** 2).sum()) / n**2  # share of pairs of rows
    last_noise = current.noise

    def error(factor: float) -> float:
        nonlocal last_noise
        wider = kernel.with_bandwidth(kernel.bandwidth * math.sqrt(1 + factor * unequal_share))
        categorical = [*kernel.categorical, (column, factor * median_squared)]
        fit = fit_kernel(wider.with_categorical(categorical), last_noise)
        if fit is None:
            return math.inf
        fits[factor], last_noise = fit, fit.noise
        return fit.noise.error

    geometric_search(
        error, FIRST_WEIGHT_EXPONENT, MIN_WEIGHT_EXPONENT, MAX_WEIGHT_EXPONENT, base=4.0, stride=1
    )
    return min(fits.values(), key=lambda fit: fit.noise.error, default=None)


def _target_mean_features(source: BaseSource) -> list[int]:
    """Return the indices of the features that are mean targets of words.

    A training row has the mean over the other folds, and a row to predict the mean over all
    training rows. Equal words therefore do not have equal values.
    """
    if source.encoder is None:
        return []
    encoder = Encoder.from_json(source.encoder, "the training data")
    pairs = zip(encoder.codes, encoder.groups, strict=True)
    return [
        j
        for code, (_, features) in pairs
        if isinstance(code, TargetMeans)
        for j in range(features.start, features.stop)
    ]


def groups_by_feature(X: HostArray) -> dict[int, Ints]:
    """Return the groups of rows with equal values, (n,) group numbers, for each candidate feature.

    A candidate has enough distinct and enough repeated values. If several features group the rows
    in the same way, only the first of them is a candidate.

    X : (n, d)
    """
    candidates, known_groupings = dict[int, Ints](), set[bytes]()
    for j in range(X.shape[1]):
        _, first_row, group, counts = np.unique(
            X[:, j], return_index=True, return_inverse=True, return_counts=True
        )
        n_repeated = counts[counts > 1].sum()
        if len(counts) < MIN_DISTINCT_VALUES or n_repeated < MIN_REPEATED_SHARE * len(X):
            continue
        # The first row of each row's group is the same for equal groupings.
        grouping = first_row[group].astype(np.int64).tobytes()
        if grouping not in known_groupings:
            known_groupings.add(grouping)
            candidates[j] = group
    return candidates


def group_score(residuals: Floats, group: Ints) -> float:
    """Return T of the module docstring in standard deviations.

    With several outputs, r_i r_j is the inner product of two rows of residuals. Its variance is
    smaller by the mean squared cosine between rows (`alignment`).

    residuals : (n, c)
    group : (n,) number of the group of each row
    """
    squares = (residuals**2).sum(axis=1)
    sums = np.stack([np.bincount(group, r) for r in residuals.T])
    total = float((sums**2).sum() - squares.sum())
    pairs = float((np.bincount(group, squares) ** 2).sum() - (squares**2).sum())
    covariance = residuals.T @ residuals
    alignment = float((covariance**2).sum() / max(np.trace(covariance) ** 2, TINY_DENOMINATOR))
    return total / math.sqrt(max(2 * pairs * alignment, TINY_DENOMINATOR))
