"""Centers that are means of rows, by the mini-batch k-means of scikit-learn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from streamkern.basics.array_types import HostArray
from streamkern.basics.optional import on_demand
from streamkern.centers.random_rows import Random
from streamkern.centers.selector import CenterWork
from streamkern.planning.problem import ProblemShape, Selection

KMEANS_STAGE = 22
"""Number that separates these random draws from others of the same seed."""
KMEANS_ROWS = 50
"""Number of rows per center. More of them hardly reduce the distances from rows to centers."""
MIN_KMEANS_ROWS = 1 << 16
"""Smallest number of rows, also for few centers, unless `KMEANS_PASSES` passes have fewer."""
KMEANS_PASSES = 10
"""Largest number of passes over the rows."""
KMEANS_BATCH = 2048
"""Rows of a mini-batch."""
SKLEARN_CHUNK = 256
"""Rows whose distances to all means scikit-learn computes at once."""
SKLEARN_BYTES = 20 << 20
"""Bytes that `import sklearn.cluster` takes."""


class KMeans(Random):
    """Selector of means of rows, which are initialised at random rows."""

    name = "kmeans"
    selects_rows = False

    def plan(self, problem: ProblemShape, n_rows: int, budget_bytes: int) -> Selection:
        """Return the cost of `KMEANS_ROWS` rows per center, in at most `KMEANS_PASSES` passes."""
        p, d, item = problem.p, problem.d, problem.itemsize
        rows = min(max(KMEANS_ROWS * p, MIN_KMEANS_ROWS), KMEANS_PASSES * n_rows)
        has_metric = problem.metric_bytes > 0
        buffers = (
            ("first rows", p * (problem.row_bytes + d * item)),
            ("means, copies", 2 * p * d * item),
            ("batch, cast and transformed", KMEANS_BATCH * (2 * d + 2) * item),
            ("distances to all means", problem.threads * SKLEARN_CHUNK * p * item),
            ("rows and means in the metric", has_metric * (2 * p + KMEANS_BATCH) * d * item),
            # Mostly for the SVD in `pinv`.
            ("the metric and its inverse", 9 * problem.metric_bytes),
        )
        # Distances of every row to every center.
        flops = 2 * rows * p * d
        return Selection(p, rows, flops, buffers, streamed=True, library_bytes=SKLEARN_BYTES)

    def refine(
        self, X: HostArray, selection: Selection, work: CenterWork
    ) -> tuple[HostArray, dict[str, Any]]:
        """Compute the means by `kmeans`, with distances in the metric of the kernel."""
        batches, metric = work.batches(selection.rows, KMEANS_BATCH), work.kernel.metric
        seed, threads = work.seed, work.backend.threads
        fields = {"rows": selection.first + selection.rows}
        if metric is None:
            return kmeans(X, batches, seed, threads), fields
        origin = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
        one_thread = work.backend.single_threaded_blas  # bits depend on the number of threads
        with one_thread():
            A = metric.astype(X.dtype)
            inverse = _inverse(metric, X.dtype)

        def multiply(rows: HostArray, factor: HostArray) -> HostArray:
            if factor.ndim == 1:
                return np.asarray(rows * factor)
            with one_thread():
                return np.asarray(rows @ factor)

        transformed = (multiply(x - origin, A) for x in batches)
        means = kmeans(multiply(X - origin, A), transformed, seed, threads)
        # The kernel multiplies a center by A. Of the points with the right product, the
        # pseudo-inverse gives the one nearest to the origin.
        return multiply(means, inverse) + origin, fields


def _inverse(metric: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> HostArray:
    """Return the pseudo-inverse of scales or of a matrix, at its numerical rank in `dtype`."""
    tolerance = max(metric.shape) * np.finfo(dtype).eps
    if metric.ndim == 2:
        return np.asarray(np.linalg.pinv(metric, rcond=tolerance), dtype)
    nonzero = np.abs(metric) > tolerance * np.abs(metric).max()
    return np.asarray(np.divide(1.0, metric, out=np.zeros_like(metric), where=nonzero), dtype)


def kmeans(
    initial_means: npt.NDArray[Any], batches: Iterable[npt.NDArray[Any]], seed: int, threads: int
) -> npt.NDArray[Any]:
    """Return means (p, d) of the rows of `batches` (Sculley 2010, as in scikit-learn).

    initial_means : (p, d) rows, float32 or float64.
    batches : arrays (m, d) of any m.

    Each row moves the mean nearest to it by the fraction 1 / (rows assigned to this mean so far) of
    their difference. Periodically scikit-learn replaces means with hardly any rows by rows of the
    batch, so that no mean remains at an outlier or at a copy of another mean. scikit-learn computes
    distances by products of fixed size, each on one thread, and moves a mean on one thread, so the
    bits of the result do not depend on the number of threads.

    The cost is 2 p d FLOPs a row. The memory is the means, and on each thread the distances of
    `SKLEARN_CHUNK` rows to all of them.
    """
    state = int(np.random.default_rng([seed, KMEANS_STAGE]).integers(1 << 32))
    model = on_demand("sklearn.cluster").MiniBatchKMeans(
        len(initial_means), init=initial_means, n_init=1, batch_size=KMEANS_BATCH,
        compute_labels=False, random_state=state,
    )  # fmt: skip
    with ThreadpoolController().limit(limits=threads, user_api="openmp"):
        # Each initial mean counts as its own first row, so that only copies of means have no row.
        model.partial_fit(initial_means)
        for X in batches:
            model.partial_fit(X)
    means: npt.NDArray[Any] = model.cluster_centers_
    return means
