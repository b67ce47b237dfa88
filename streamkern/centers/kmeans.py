"""Means of a stream of rows as centers: mini-batch k-means by scikit-learn."""

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
# Rows of k-means per center. Mean squared distance to the nearest of 2 000 centers, 50 Gaussians in
# 30 dimensions: random rows 16.3, 10 rows per center 12.4, 25: 11.8, 50: 11.6, 100: 11.5. With 500
# centers: 19.9, 13.9, 13.6, 13.4, 13.2; batches of 512 to 4096 differ by 0.2.
KMEANS_ROWS = 50
MIN_KMEANS_ROWS = 1 << 16
# More passes than this over few rows cost more than they gain.
KMEANS_PASSES = 10
KMEANS_BATCH = 2048
SKLEARN_CHUNK = 256
SKLEARN_BYTES = 20 << 20  # resident after `import sklearn.cluster`: 17 MiB


class KMeans(Random):
    """Selector of means of a stream of rows, initialised at random rows."""

    name = "kmeans"
    of_rows = False

    def plan(self, problem: ProblemShape, n_rows: int, budget_bytes: int) -> Selection:
        """Return the cost of 50 rows per center, at least 65 536, in at most 10 passes."""
        p, d, item = problem.p, problem.d, problem.itemsize
        rows = min(max(KMEANS_ROWS * p, MIN_KMEANS_ROWS), KMEANS_PASSES * n_rows)
        moved = problem.metric > 0
        buffers = (
            ("first rows", p * (problem.row_bytes + d * item)),
            ("means, copies", 2 * p * d * item),
            ("batch, cast and transformed", KMEANS_BATCH * (2 * d + 2) * item),
            ("distances to all means", problem.threads * SKLEARN_CHUNK * p * item),
            ("rows and means in the metric", moved * (2 * p + KMEANS_BATCH) * d * item),
            # Measured at d = 1000 and 1500: most of it is of the SVD in `pinv`.
            ("the metric and its inverse", 9 * problem.metric),
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
        middle = X.mean(axis=0, dtype=np.float64).astype(X.dtype)
        single = work.backend.single_threaded_blas  # the number of threads would change bits
        with single():
            A, back = metric.astype(X.dtype), _inverse(metric, X.dtype)

        def times(rows: HostArray, by: HostArray) -> HostArray:
            if by.ndim == 1:
                return np.asarray(rows * by)
            with single():
                return np.asarray(rows @ by)

        means = kmeans(times(X - middle, A), (times(x - middle, A) for x in batches), seed, threads)
        # The kernel uses a center times A: of the points with this product, take the nearest to the
        # mean.
        return times(means, back) + middle, fields


def _inverse(metric: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> HostArray:
    """Return the (pseudo-)inverse of scales or of a matrix, at the numerical rank in `dtype`."""
    least = max(metric.shape) * np.finfo(dtype).eps
    if metric.ndim == 2:
        return np.asarray(np.linalg.pinv(metric, rcond=least), dtype)
    significant = np.abs(metric) > least * np.abs(metric).max()
    return np.asarray(np.divide(1.0, metric, out=np.zeros_like(metric), where=significant), dtype)


def kmeans(
    first: npt.NDArray[Any], batches: Iterable[npt.NDArray[Any]], seed: int, threads: int
) -> npt.NDArray[Any]:
    """Return means (p, d) of the rows of `batches` (Sculley 2010, as in scikit-learn).

    first : (p, d) float32 or float64 rows, the initial means.
    batches : (m, d), any m each.

    A mean moves by 1 / (rows assigned to it so far) towards each row that is nearest to it.
    Periodically scikit-learn moves means with hardly any rows to rows of the batch, so that none is
    wasted on an outlier or on a copy of another. Labels of a batch come from products of fixed
    size, each on one thread, and a mean is moved by one thread: the number of threads does not
    change a bit.

    Cost: 2 p d FLOPs a row; memory: the means, and 256 distances to all of them on each thread.
    """
    state = int(np.random.default_rng([seed, KMEANS_STAGE]).integers(1 << 32))
    model = on_demand("sklearn.cluster").MiniBatchKMeans(
        len(first), init=first, n_init=1, batch_size=KMEANS_BATCH, compute_labels=False,
        random_state=state,
    )  # fmt: skip
    with ThreadpoolController().limit(limits=threads, user_api="openmp"):
        # Each counts as a row of its own mean; no mean is empty except those of copies.
        model.partial_fit(first)
        for X in batches:
            model.partial_fit(X)
    means: npt.NDArray[Any] = model.cluster_centers_
    return means
