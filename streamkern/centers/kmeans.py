"""Means of a stream of rows as centers: mini-batch k-means by scikit-learn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from streamkern.planning.center_costs import KMEANS_BATCH

KMEANS_STAGE = 22


def kmeans(
    first: npt.NDArray[Any], batches: Iterable[npt.NDArray[Any]], seed: int, threads: int
) -> npt.NDArray[Any]:
    """Means (p, d) that rows of `batches` are near to (Sculley 2010, as in scikit-learn).

    first : (p, d) float32 or float64 rows that the means begin as. batches : (m, d), any m each.

    A mean moves by 1 / (rows it has taken so far) towards each row that is nearest to it. From
    time to time scikit-learn puts those that take hardly any rows on rows of the batch instead, so
    that none is wasted on an outlier or on a copy of another. Labels of a batch come from products
    of fixed size, each on one thread, and a mean is moved by one thread: no number of threads
    changes a bit.

    Cost: 2 p d FLOPs a row; memory: the means, and 256 distances to all of them on each thread.
    """
    from sklearn.cluster import MiniBatchKMeans  # a second that other methods need not wait

    state = int(np.random.default_rng([seed, KMEANS_STAGE]).integers(1 << 32))
    model = MiniBatchKMeans(
        len(first), init=first, n_init=1, batch_size=KMEANS_BATCH, compute_labels=False,
        random_state=state,
    )  # fmt: skip
    with ThreadpoolController().limit(limits=threads, user_api="openmp"):
        # Each of them counts as a row of its own; no mean is empty but those of copies.
        model.partial_fit(first)
        for X in batches:
            model.partial_fit(X)
    means: npt.NDArray[Any] = model.cluster_centers_
    return means
