"""Compare k-means in the metric of the kernel with scikit-learn, and its memory with the plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import MiniBatchKMeans

from streamkern.backend.base import Backend
from streamkern.centers.kmeans import KMEANS_BATCH, KMEANS_STAGE, SKLEARN_CHUNK, KMeans
from streamkern.centers.selector import CenterWork
from streamkern.kernels.builtin import Gaussian
from tests.plans import PLAIN

rng = np.random.default_rng(0)
D, P, N, SEED = 5, 20, 2000, 3
X = (rng.standard_normal((N, D)) + 5 * rng.standard_normal((8, D))[rng.integers(8, size=N)] + 30
     ).astype(np.float32)  # fmt: skip
Q = np.linalg.qr(rng.standard_normal((D, D)))[0]
METRICS: dict[str, Any] = {
    "none": None,
    "scales": np.array([1.0, 0.5, 3.0, 0.0, 2.0]),
    # Scales and singular values below the rounding errors of float32 are taken for 0.
    "tiny scale": np.array([1.0, 0.5, 3.0, 1e-9, 2.0]),
    "matrix": rng.standard_normal((D, D)),
    "singular": Q * [2.0, 1.0, 1.0, 0.5, 1e-9] @ Q.T,
    "narrow": rng.standard_normal((D, 2)),
}


@pytest.mark.parametrize("name", METRICS)
def test_kmeans_centers_equal_means_in_metric(name: str) -> None:
    A = np.eye(D) if METRICS[name] is None else METRICS[name]
    A = np.diag(A) if A.ndim == 1 else A
    batches = [X[i : i + 500] for i in range(0, N, 500)]

    def stream(n_rows: int, batch_size: int) -> Iterator[Any]:
        assert (n_rows, batch_size) == (N, KMEANS_BATCH)
        return iter(batches)

    plan = KMeans().plan(replace(PLAIN, d=D, p=P), N, 1 << 30)
    kernel = Gaussian(1.0).with_metric(METRICS[name])
    with Backend(threads=1) as backend:
        work = CenterWork(P, SEED, kernel, backend, "float32", None, stream)
        Z, fields = KMeans().refine(X[:P], replace(plan, rows=N), work)
    assert fields == {"rows": P + N}
    origin = X[:P].mean(axis=0, dtype=np.float64)
    state = int(np.random.default_rng([SEED, KMEANS_STAGE]).integers(1 << 32))
    initial_means, *transformed = ((rows - origin) @ A for rows in (X[:P], *batches))
    model = MiniBatchKMeans(
        P, init=initial_means, n_init=1, batch_size=KMEANS_BATCH, random_state=state
    )
    for rows in (initial_means, *transformed):
        model.partial_fit(rows)
    # The tolerance is a few rounding errors in float32 of values up to 50.
    np.testing.assert_allclose((Z - origin) @ A, model.cluster_centers_, atol=1e-3)
    # The centers have no component in directions that the metric maps to 0.
    np.testing.assert_allclose(
        (Z - origin) @ A @ np.linalg.pinv(A, rcond=1e-6), Z - origin, atol=1e-3
    )


@pytest.mark.parametrize("metric", [0, 8 * 784, 8 * 784**2])
def test_kmeans_plan_counts_its_arrays(metric: int) -> None:
    """Check 10 000 centers with 784 features, for no metric, scales and a matrix."""
    plan = KMeans().plan(replace(PLAIN, metric_bytes=metric, threads=3), 60_000, 1 << 30)
    centers, batch = (np.empty((n, 784), np.float32).nbytes for n in (10_000, KMEANS_BATCH))
    column = np.empty(KMEANS_BATCH, np.float32).nbytes
    assert dict(plan.buffers) == {
        "first rows": 10_000 * 785 + centers,
        "means, copies": centers + centers,
        "batch, cast and transformed": batch + batch + column + column,
        "distances to all means": np.empty((3, SKLEARN_CHUNK, 10_000), np.float32).nbytes,
        "rows and means in the metric": centers + centers + batch if metric else 0,
        "the metric and its inverse": 9 * metric,  # see test_inverse_metric_uses_planned_memory
    }


@pytest.mark.parametrize(
    ("p", "n_rows", "expected"),
    [(10_000, 60_000, 50 * 10_000), (100, 10**9, 1 << 16), (10_000, 20_000, 10 * 20_000)],
    ids=["50 rows per center", "at least 65536 rows", "at most ten passes"],
)
def test_kmeans_reads_planned_number_of_rows(p: int, n_rows: int, expected: int) -> None:
    plan = KMeans().plan(replace(PLAIN, p=p), n_rows, 1 << 30)
    assert (plan.first, plan.rows, plan.streamed) == (p, expected, True)
    # A multiplication and an addition for each feature of each distance.
    assert plan.flops == expected * p * 2 * 784


# A process of its own measures how far its largest memory grows, in units of the metric's size.
INVERSE = """
import numpy as np
from streamkern.centers.kmeans import _inverse

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

A = np.random.default_rng(0).standard_normal((1000, 1000))
_inverse(A[:50, :50], A.dtype)  # loads everything
before = peak()
both = A.copy(), _inverse(A, A.dtype)
print((peak() - before) / A.nbytes)
"""


def test_inverse_metric_uses_planned_memory() -> None:
    one_thread = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    size_ratio = float(subprocess.check_output([sys.executable, "-c", INVERSE], env=one_thread))
    assert 0.85 * 9 < size_ratio < 1.05 * 9  # the allocator rounds
