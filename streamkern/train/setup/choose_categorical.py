"""Choose the categorical features of the kernel, compared for equality beside their distance.

Numbers of shops, households and schools, codes, years and ages: the target may depend on the value
itself, and not smoothly on it. A kernel of distances does not see that, and the gradients of a
smooth model neither, so no metric is learned from it.

If the values themselves matter, the leave-one-out residuals of rows with equal values have the same
sign. With residuals r_i of the rows, times the roots of their weights, rows grouped by value, and
no effect of the group, the sum

    T = sum over pairs i < j of one group of r_i r_j

has mean 0 and a variance of about the same sum of r_i^2 r_j^2. The feature with the largest T, in
standard deviations, is given a weight; it is kept if the rows predict each other significantly
better. Then the next feature is examined, with the residuals of the new kernel. Mean targets of
words are left out: those of a word differ between training rows and rows to predict.

Default, up to 6000 rows, one split, test RMSE (or error of classes) without and with them: wages of
a panel, number of the person, .8075 .7073; choice of a brand, number of the household, .339 .239;
grades, number of the school, .648 .613; prices of computers, size of the disk, .2513 .2413;
expenses, number of the village, .707 .669. On 14 other tables none was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.centers.random_rows import median_bandwidth
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
    row_errors,
    surplus,
)
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.sources.base import BaseSource
from streamkern.train.resolve.metric_mode import looks_for_categorical
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_kernel import moved

CATEGORICAL_ROWS, EXAMINED_SHARE = (1024, 1536), 8
"""Rows that are examined, of runs of up to 8192 rows and of 12 288 or more: an eighth between."""
MIN_CATEGORICAL_ROWS = 200
"""Smallest number of rows for a choice."""
MIN_VALUES, MIN_REPEATED = 3, 0.1
"""Smallest number of values of a feature, and share of rows that have the value of another row.
Equality of one of two values is the distance of the feature itself."""
MIN_SCORE = 3.0
"""Smallest T, in standard deviations, for which a weight is tried."""
CATEGORICAL_GAIN_SE, CATEGORICAL_GAIN = 2.0, 0.01
"""Smallest gain for which a weight is kept: in standard errors, and relative to the error."""
FIRST_WEIGHT, LEAST_WEIGHT, LARGEST_WEIGHT = -1, -3, 2
"""Exponents of four that are tried: weights relative to the squared median distance."""
TINY = 1e-300


class _Fit(NamedTuple):
    """A kernel, and the noise of the rows with it."""

    kernel: Kernel
    noise: Noise


def find_categorical(run: ResolvedRun, rows: SampleRows, kernel: Kernel, report: Report) -> Kernel:
    """Return the kernel with the categorical features with which rows predict each other better.

    The kernel itself is returned if the run does not look for any.

    rows : sample rows, no two made from one stored row
    """
    if not looks_for_categorical(run.config, run.data, run.precision, run.centers_from):
        return kernel
    few, most = CATEGORICAL_ROWS
    n = min(max(run.problem.n_rows // EXAMINED_SHARE, few), most)
    rows = rows.first(n, run.backend)
    host = np.asarray(run.backend.to_host(rows.X))
    groups = groupings(host)
    for j in _of_target_means(run.data.source):
        groups.pop(j, None)
    if len(host) < MIN_CATEGORICAL_ROWS or not groups or kernel.geometry != "distance":
        return kernel
    shift = host.mean(axis=0, dtype=np.float64).astype(host.dtype)
    with run.backend.single_threaded_blas():
        unit = median_bandwidth(moved(host, kernel.metric), "euclidean") ** 2

    def fitted(kernel: Kernel, near: Noise | None) -> _Fit | None:
        noise = find_noise(operator(kernel), None, rows, near, run.method.min_penalty)
        return _Fit(kernel, noise) if noise.tried and math.isfinite(noise.error) else None

    def operator(kernel: Kernel) -> KernelOperator:
        return KernelOperator(kernel, run.backend, run.search_precision, shift, run.grid)

    def errors(fit: _Fit) -> Floats:
        return row_errors(operator(fit.kernel), None, rows, fit.noise)[0]

    def highest(fit: _Fit) -> tuple[float, int]:
        values = left_out_values(operator(fit.kernel), None, rows, fit.noise)
        residuals = run.backend.to_host(rows.Y) - values
        if rows.root is not None:
            residuals *= run.backend.to_host(rows.root)[:, None]
        return max((score(residuals, group), j) for j, group in groups.items())

    now = fitted(kernel, None)
    while now is not None and groups and len(now.kernel.categorical) < MAX_CATEGORICAL:
        best, column = highest(now)
        if best < MIN_SCORE:
            break
        found = _weighted(now, column, groups.pop(column), unit, fitted)
        fields: dict[str, Any] = {"feature": column, "score": best, "taken": False}
        if found is not None:
            before, after = errors(now), errors(found)
            gain, share = surplus(before, after), float(after.mean() / before.mean())
            taken = gain >= CATEGORICAL_GAIN_SE and share <= 1 - CATEGORICAL_GAIN
            fields |= {"taken": taken, "standard_errors": gain, "error": share}
            now = found if taken else now
        report("categorical", fields)
    return kernel if now is None else now.kernel


def _weighted(
    now: _Fit,
    column: int,
    group: npt.NDArray[np.int64],
    unit: float,
    fitted: Callable[[Kernel, Noise | None], _Fit | None],
) -> _Fit | None:
    """Return the best fit with a weight for the feature, or None.

    The bandwidth grows with the distances, so that about the same rows are near each other.
    """
    n, kernel, tried = len(group), now.kernel, dict[float, _Fit]()
    unequal = 1 - float((np.bincount(group) ** 2).sum()) / n**2
    last = now.noise

    def error(factor: float) -> float:
        nonlocal last
        wider = kernel.with_bandwidth(kernel.bandwidth * math.sqrt(1 + factor * unequal))
        fit = fitted(wider.with_categorical([*kernel.categorical, (column, factor * unit)]), last)
        if fit is None:
            return math.inf
        tried[factor], last = fit, fit.noise
        return fit.noise.error

    geometric_search(error, FIRST_WEIGHT, LEAST_WEIGHT, LARGEST_WEIGHT, base=4.0, stride=1)
    return min(tried.values(), key=lambda fit: fit.noise.error, default=None)


def _of_target_means(source: BaseSource) -> list[int]:
    """Return the features that are mean targets of words.

    A row of the training set has the mean over other folds, and a row to predict that over all
    rows: equal words do not have equal values.
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


def groupings(X: npt.NDArray[Any]) -> dict[int, npt.NDArray[np.int64]]:
    """Return the number of the group of each row (n,), by feature, of features with equal values.

    Of features that group the rows alike the first one is returned.
    """
    found, known = dict[int, npt.NDArray[np.int64]](), set[bytes]()
    for j in range(X.shape[1]):
        _, first, group, counts = np.unique(
            X[:, j], return_index=True, return_inverse=True, return_counts=True
        )
        if len(counts) < MIN_VALUES or counts[counts > 1].sum() < MIN_REPEATED * len(X):
            continue
        by_first = first[group].astype(np.int64)
        if by_first.tobytes() not in known:
            known.add(by_first.tobytes())
            found[j] = group
    return found


def score(residuals: Floats, group: npt.NDArray[np.int64]) -> float:
    """Return T in standard deviations, see the module. residuals : (n, c). group : (n,).

    Of several outputs, r_i r_j is the inner product.
    """
    squares = (residuals**2).sum(axis=1)
    sums = np.stack([np.bincount(group, r) for r in residuals.T])
    total = float((sums**2).sum() - squares.sum())
    pairs = float((np.bincount(group, squares) ** 2).sum() - (squares**2).sum())
    covariance = residuals.T @ residuals
    aligned = float((covariance**2).sum() / max(np.trace(covariance) ** 2, TINY))
    return total / math.sqrt(max(2 * pairs * aligned, TINY))
