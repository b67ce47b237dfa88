"""Check kernels of sparse rows against the same kernels of dense rows in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp

from streamkern.backend.devices import get_backend
from streamkern.basics.errors import ConfigError, DataError
from streamkern.kernels.base import Kernel
from streamkern.kernels.builtin import KERNELS, Gaussian, Laplace, Linear, get_kernel
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.slope import Slope
from streamkern.kernels.sparse import for_sparse_rows
from streamkern.store.sparse_rows import pack_rows

SPARSE_KERNELS = [name for name in KERNELS if name != "laplace_l1"]


def rows(n: int, seed: int, d: int = 300) -> Any:
    """Return random sparse rows (n, d) with 4 % nonzero entries."""
    return sp.random_array((n, d), density=0.04, rng=np.random.default_rng(seed), format="csr")


def flat(X: Any, dtype: Any = np.float64) -> npt.NDArray[Any]:
    """Return the rows packed, (n, 2 k)."""
    return pack_rows(X, dtype=dtype).reshape(X.shape[0], -1)


@pytest.mark.parametrize("accelerator", ["none", "numba"])
@pytest.mark.parametrize(
    "kernel", [*SPARSE_KERNELS, Gaussian(2.0) + 0.5 * Laplace(1.0), Linear() * Laplace()]
)
@pytest.mark.parametrize(("precision", "error"), [("float64", 1e-13), ("exact", 3e-5)])
def test_sparse_kernel_values_equal_dense(
    accelerator: str, kernel: str | Kernel, precision: str, error: float
) -> None:
    if accelerator == "numba":
        pytest.importorskip("numba")
    X, Z, W = rows(60, 0), rows(37, 1), np.random.default_rng(2).standard_normal((37, 3))
    dense = get_kernel(kernel, 1.3)
    with get_backend("cpu", 2, accelerator) as backend:
        op, sparse = KernelOperator(dense, backend, "float64"), for_sparse_rows(dense)
        right = op.points(Z.toarray(), right=True)
        K = op.matrix(op.points(X.toarray(), left=True), right)
        op = KernelOperator(sparse, backend, precision)
        A, B = op.points(flat(X), left=True), op.points(flat(Z), right=True)
        scale = np.abs(K).max()
        assert np.abs(op.matrix(A, B) - K).max() <= error * scale
        assert np.abs(op.product(A, B, W.astype(op.dtype)) - K @ W).max() <= 37 * error * scale
        # Points in a buffer have no index, and the same kernel values.
        in_buffer = op.points(flat(Z), out=op.empty_points(37, B.width, right=True))
        assert in_buffer.index is None
        assert np.array_equal(op.matrix(A, in_buffer), op.matrix(A, B))
    assert get_kernel(sparse.describe()).describe() == sparse.describe()
    assert "sparse rows" in repr(sparse)


def test_sparse_gram_has_exact_ones_on_its_diagonal() -> None:
    X = rows(40, 3)
    with get_backend("cpu", 1, "none") as backend:
        op = KernelOperator(for_sparse_rows(Laplace(0.01)), backend)
        points = op.points(flat(X), left=True, right=True)
        assert (op.gram(points).diagonal() == 1).all()


def test_sparse_bits_do_not_depend_on_threads_or_other_rows() -> None:
    X, Z = rows(50, 4), rows(5000, 5, d=60)
    X = sp.csr_array(X[:, :60])
    W = np.random.default_rng(6).standard_normal((Z.shape[0], 1)).astype(np.float32)
    results = []
    for threads in (1, 3):
        with get_backend("cpu", threads, "none") as backend:
            op = KernelOperator(for_sparse_rows(Gaussian(1.5)), backend)
            B = op.points(flat(Z), right=True)
            results.append(op.product(op.points(flat(X), left=True), B, W))
            one = op.product(op.points(flat(X[7:8]), left=True), B, W)
            assert np.array_equal(one[0], results[-1][7])
    assert np.array_equal(*results)


def test_both_cpu_backends_give_same_sparse_bits() -> None:
    pytest.importorskip("numba")
    X, Z, results = rows(30, 7), rows(40, 8), []
    for accelerator in ("none", "numba"):
        with get_backend("cpu", 1, accelerator) as backend:
            op = KernelOperator(for_sparse_rows(Linear()), backend)
            results.append(op.matrix(op.points(flat(X), left=True), op.points(flat(Z), right=True)))
    assert np.array_equal(*results)


def test_shorter_rows_are_widened_and_longer_ones_refused() -> None:
    X, Z = rows(20, 9), rows(10, 10)
    short, longer = flat(X), 2 * pack_rows(X).shape[2]
    with get_backend("cpu", 1, "none") as backend:
        op = KernelOperator(for_sparse_rows(Gaussian()), backend)
        B = op.points(flat(Z), right=True)
        out = op.empty_points(20, 2 * longer, left=True)
        A = op.points(short, out=out)
        assert np.array_equal(op.matrix(A, B), op.matrix(op.points(short, left=True), B))
        with pytest.raises(DataError, match="entries that are not 0"):
            op.points(short, out=op.empty_points(20, 2, left=True))


@pytest.mark.parametrize("accelerator", ["none", "numba"])
def test_center_blocks_keep_their_own_index(accelerator: str) -> None:
    if accelerator == "numba":
        pytest.importorskip("numba")
    X, Z = rows(30, 12), rows(50, 13)
    with get_backend("cpu", 1, accelerator) as backend:
        op = KernelOperator(for_sparse_rows(Gaussian(1.5)), backend)
        A, B = op.points(flat(X), left=True), op.points(flat(Z), left=True, right=True)
        K = op.matrix(A, B)
        ends = [(0, 50), (0, 17), (17, 50), (49, 60), (7, 7), (0, 50, 3), (5, 44, 7)]
        for block in (slice(*end) for end in ends):
            assert B[block].index is not None
            assert B[block].index is B[block].index
            assert np.array_equal(op.matrix(A, B[block]), K[:, block])
        inner = B[10:40][5:20]
        assert np.array_equal(op.matrix(A, inner), K[:, 15:30])
        assert B.each(lambda a: a).index is B.index
        assert B.each(np.copy).index is None
        assert B[np.array([3, 1])].index is None
        assert np.array_equal(op.matrix(A, B[np.array([3, 1])]), K[:, [3, 1]])


def test_empty_rows_and_centers_are_accepted() -> None:
    none, X = sp.csr_array((3, 300)), rows(5, 11)
    with get_backend("cpu", 1, "none") as backend:
        op = KernelOperator(for_sparse_rows(Gaussian(1.0)), backend, "float64")
        empty, full = op.points(flat(none), left=True, right=True), op.points(flat(X), right=True)
        assert (op.matrix(empty, empty) == 1).all()
        norms = (X.toarray() ** 2).sum(axis=1)
        assert op.matrix(empty, full)[0] == pytest.approx(np.exp(-norms / 2))


def test_features_and_slopes_of_sparse_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a function of inner products"):
        for_sparse_rows(FourierFeatures(4, Gaussian(1.0).describe()))
    with pytest.raises(ConfigError, match="dense points"):
        Slope(for_sparse_rows(Laplace()))
