"""Compare the CuPy backend with the CPU, for every operation, kernel, precision and solver.

On a GPU where there is one, and everywhere on the `fake_cupy`, which tries the glue alone.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import streamkern as sk
from streamkern.backend.base import Backend
from streamkern.backend.cupy_backend import CUBLAS_VARIABLES
from streamkern.backend.devices import get_backend
from streamkern.basics.errors import DeviceMemoryError
from streamkern.basics.randomness import RowRandom
from streamkern.centers.rpcholesky import rpcholesky
from streamkern.kernels.agop import GradientSum
from streamkern.kernels.builtin import (
    Dispersal,
    Gaussian,
    Kernel,
    Laplace,
    LaplaceL1,
    Polynomial,
    ReluNTK,
    get_kernel,
)
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.sparse import for_sparse_rows
from streamkern.rundir import checkpoint_format
from streamkern.rundir.run_log import read_log
from streamkern.solver.method import Setup
from streamkern.store.sparse_rows import pack_rows
from streamkern.stream.sources.transforms import GaussianNoise, RandomFlip, Scale
from streamkern.train.differences import backend_changes
from streamkern.train.saved_model import load_model
from tests import fake_cupy, numpy_cublas
from tests.host_cuda import COMPILER
from tests.images import IMAGES, augmented
from tests.plans import solver_settings
from tests.runs import CLASSES, METHODS, array_source, arrays, finished, settings, stopped, stream
from tests.solver_problems import (
    GRID,
    RADIAL,
    RIDGED,
    SOLVERS,
    Array,
    Case,
    Quartic,
    both,
    close,
    make_case,
    operator,
    rows,
)

TOLERANCE = {"float64": 1e-10, "exact": 2e-4, "high": 2e-4, "fast": 2e-4, "integer": 2e-5}


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(
    params=[
        pytest.param("device", marks=pytest.mark.gpu),
        pytest.param("stand-in", marks=needs_compiler),
    ]
)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    if request.param == "stand-in":
        fake_cupy.install(monkeypatch)
    with get_backend("gpu") as backend, backend.active():
        yield backend


def test_rpcholesky_pivots_on_gpu_equal_cpu(gpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare pivots in float64, in which no draw is so near a boundary that rounding decides."""
    monkeypatch.setattr("streamkern.centers.rpcholesky.PIVOT_BLOCK", 16)
    X, results = rows(0, 130, 9), []
    for backend in (Backend(1), gpu):
        op = KernelOperator(get_kernel("laplace", 4.0), backend, "float64")
        results.append(rpcholesky(op, backend.asarray(X, op.dtype), 40, 0))
    np.testing.assert_array_equal(results[0].rows, results[1].rows)
    assert results[0].residual == pytest.approx(results[1].residual, rel=1e-9)


@pytest.mark.parametrize("precision", ["exact", "float64"])
@pytest.mark.parametrize("name", ["laplace", "gaussian", "polynomial"])
def test_sparse_kernel_products_on_gpu_equal_cpu(name: str, precision: str, gpu: Backend) -> None:
    X, Z = (
        scipy.sparse.random_array(
            (n, 400), density=0.03, rng=np.random.default_rng(n), format="csr"
        )
        for n in (130, 90)
    )
    W, results = rows(2, 90, 3), []
    for backend in (Backend(1), gpu):
        op = KernelOperator(for_sparse_rows(get_kernel(name, 2.0)), backend, precision)
        A, B = (backend.asarray(pack_rows(k).reshape(k.shape[0], -1)) for k in (X, Z))
        keep = backend.xp.empty((130, 90), op.dtype)
        left, right = op.points(A, left=True), op.points(B, right=True)
        out = op.product(left, right, backend.asarray(W, op.dtype), keep=keep)
        results.append([backend.to_host(a) for a in (out, keep)])
    for a, b in zip(*results, strict=True):
        assert np.abs(a - b).max() <= TOLERANCE[precision] * np.abs(b).max()


@pytest.mark.parametrize("precision", sorted(TOLERANCE))
@pytest.mark.parametrize("name", [*RADIAL, "own"])
def test_kernel_products_on_gpu_equal_cpu(name: str, precision: str, gpu: Backend) -> None:
    kernel: Kernel = Quartic(2.0) if name == "own" else get_kernel(name, 2.0)
    A, B, W = rows(0, 130, 9), rows(1, 90, 9), rows(2, 90, 3)
    if precision == "integer":
        A, B = (GRID.offset + GRID.step * np.rint(40 * X) for X in (A, B))
    equal_pairs = (np.array([0, 5, 129]), np.array([7, 7, 89]))
    results = []
    for backend in (Backend(1), gpu):
        backend.tile_rows, backend.tile_cols = 64, 32
        grid = GRID if precision == "integer" else None
        op = KernelOperator(kernel, backend, precision, rows(3, 9), grid)
        keep = backend.xp.empty((130, 90), op.dtype)
        out = op.product(
            both(op, A),
            both(op, B),
            backend.asarray(W, op.dtype),
            keep=keep,
            equal_pairs=equal_pairs,
        )
        gram = op.gram(both(op, A))
        results.append([backend.to_host(a) for a in (out, keep, gram)])
    for cpu, device in zip(*results, strict=True):
        close(device, cpu, TOLERANCE[precision])
    np.testing.assert_array_equal(results[1][2].diagonal(), 1.0)
    np.testing.assert_array_equal(results[1][1][equal_pairs], 1.0)


@pytest.mark.parametrize("precision", ["exact", "float64"])
@pytest.mark.parametrize(
    "kernel",
    [
        LaplaceL1(3.0),
        Polynomial(3, 0.2),
        ReluNTK(2),
        0.5 * Laplace(3.0) + Gaussian(2.0) * Polynomial(2, 0.2),
        Quartic(2.0) * ReluNTK(),
        Dispersal(2.0, 1.3, metric=rows(5, 9, 4)),
    ],
    ids=repr,
)
def test_further_kernels_on_gpu_equal_cpu(kernel: Kernel, precision: str, gpu: Backend) -> None:
    """Check also kernels without CUDA source, which are evaluated in parts of a tile."""
    A, B, W = rows(0, 130, 9), rows(1, 90, 9), rows(2, 90, 3)
    results = []
    for backend in (Backend(1), gpu):
        backend.tile_rows, backend.tile_cols, backend.l1_entries = 64, 32, 500
        op = KernelOperator(kernel, backend, precision, rows(3, 9))
        x, z = both(op, A), both(op, B)
        out, gram = op.product(x, z, backend.asarray(W, op.dtype)), op.gram(x)
        results.append([backend.to_host(a) for a in (out, gram)])
    for cpu, device in zip(*results, strict=True):
        close(device, cpu, TOLERANCE[precision])


@pytest.mark.parametrize("name", RADIAL)
def test_nan_row_gives_nan_kernel_values(name: str, gpu: Backend) -> None:
    op = KernelOperator(get_kernel(name, 2.0), gpu, "exact")
    A = rows(0, 5, 3)
    A[2, 1] = np.nan
    K = gpu.to_host(op.matrix(both(op, A), both(op, rows(1, 4, 3))))
    assert np.isnan(K[2]).all()
    assert np.isfinite(np.delete(K, 2, axis=0)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dense_algebra_on_gpu_equals_cpu(dtype: Any, gpu: Backend) -> None:
    R, B = rows(0, 60, 120), rows(1, 60, 4).astype(dtype)
    A = (R @ R.T / 60 + np.eye(60)).astype(dtype)
    results = []
    for backend in (Backend(1), gpu):
        L = backend.asarray(A.copy())
        assert backend.cholesky(L)
        C = backend.xp.zeros((60, 60), dtype)
        backend.add_gram(C, backend.asarray(A), 0.5)
        backend.mirror_lower(C)
        b, out, out_t = backend.asarray(B), backend.asarray(B.copy()), backend.asarray(B.copy())
        lam, E = backend.top_eigh(backend.asarray(A), 5)
        results.append(
            [
                backend.to_host(a)
                for a in (
                    L,
                    C,
                    backend.solve_lower(L, backend.asarray(B.copy())),
                    backend.solve_lower(L, backend.asarray(B.copy()), transposed=True),
                    backend.solve_lower_right(L, backend.asarray(B.T.copy())),
                    backend.matmul(L, b, out, lower=True),
                    backend.matmul_t(L, b, out_t, lower=True),
                    lam,
                    (E * lam) @ E.T,
                )
            ]
        )
    for cpu, device in zip(*results, strict=True):
        close(device, cpu, 1e-4 if dtype == np.float32 else 1e-11)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocked_cholesky_equals_reference(
    dtype: Any, gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check sizes that blocks do not divide, and arbitrary values above the diagonal."""
    monkeypatch.setattr("streamkern.backend.device_algebra.CHOLESKY_BLOCK", 16)
    R = rows(0, 60, 120)
    A = (R @ R.T / 60 + np.eye(60)).astype(dtype)
    matrix = gpu.asarray(np.tril(A) + np.triu(np.full_like(A, 7), 1))
    kept = matrix.copy()
    assert gpu.cholesky(matrix)
    assert gpu.cholesky(kept, keep_upper=True)
    squares = np.arange(60) // gpu.diagonal_square(60)
    above = squares[:, None] < squares
    np.testing.assert_array_equal(gpu.to_host(kept)[above], 7)
    np.testing.assert_array_equal(np.tril(gpu.to_host(kept)), np.tril(gpu.to_host(matrix)))
    L = np.linalg.cholesky(A.astype(np.float64))
    tolerance = 1e-4 if dtype == np.float32 else 1e-11
    close(gpu.to_host(matrix), L, tolerance)
    np.testing.assert_array_equal(np.triu(gpu.to_host(matrix), 1), 0.0)
    inverse = gpu.xp.eye(60, dtype=dtype)
    gpu.solve_lower_triangular(matrix, inverse)
    close(gpu.to_host(inverse), np.linalg.inv(L), tolerance)
    indefinite = gpu.asarray(np.diag(np.r_[np.ones(40), -1, np.ones(19)]).astype(dtype))
    assert not gpu.cholesky(indefinite)


@pytest.mark.parametrize(("i", "j", "value"), [(20, 20, -1.0), (0, 0, np.nan), (29, 3, np.nan)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cholesky_reports_failure_on_gpu(
    i: int, j: int, value: Any, dtype: Any, gpu: Backend
) -> None:
    A = np.eye(30, dtype=dtype)
    A[i, j] = A[j, i] = value
    assert not gpu.cholesky(gpu.asarray(A))


def test_uploads_keep_their_order(gpu: Backend) -> None:
    uploader, memory = gpu.uploader(3), gpu.host_memory
    batches = [rows(i, 20 + i % 5, 7).astype(np.float32) for i in range(20)]
    totals = []
    host = memory.empty((24, 7), np.float32)
    for batch in batches:
        memory.last_copy().synchronize()
        host[: len(batch)] = batch
        totals.append(uploader.upload(host[: len(batch)]) * 2)
    for batch, total in zip(batches, totals, strict=True):
        np.testing.assert_array_equal(gpu.to_host(total), 2 * batch)
    uploader.close()


@pytest.mark.parametrize("n", [1, 4, 30])
def test_random_draws_on_gpu_equal_cpu(n: int, gpu: Backend) -> None:
    """Compare words bit by bit, and normals up to rounding.

    Some row numbers are above 2^32, and some draws are from a second call.
    """
    ids = np.array([0, 7, 7, 2**33 + 5, 2**45 - 1, 3], np.int64)
    draws = []
    for xp, fills in ((np, None), (gpu.xp, gpu.fills)):
        rng = RowRandom(xp, 3, 1, 7, xp.asarray(ids), fills=fills)
        draws.append([gpu.to_host(a) for a in (rng._words(n), rng.normal((n,)), rng.uniform((n,)))])
    np.testing.assert_array_equal(draws[1][0], draws[0][0])
    np.testing.assert_allclose(draws[1][1], draws[0][1], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(draws[1][2], draws[0][2])


@pytest.mark.parametrize("shape", [(8, 4), (30,), (1,)])
def test_noise_is_added_with_the_bits_of_two_operations(
    shape: tuple[int, ...], gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check several tiles of rows, and that later draws are the same as after `normal`."""
    monkeypatch.setattr("streamkern.basics.randomness.DEVICE_TILE", 16)
    ids = np.array([0, 7, 7, 2**33 + 5, 2**45 - 1, 3], np.int64)
    X = gpu.asarray(100 * rows(0, 6, int(np.prod(shape))).reshape(6, *shape), np.float32)
    rng, reference_rng = (
        RowRandom(gpu.xp, 3, 1, 7, gpu.asarray(ids), fills=fills)
        for fills in (gpu.fills, gpu.fills._replace(noise=None))
    )
    draws = [rng.normal((1,)), rng.noisy(X, 0.3), rng.normal((2,))]
    noisy = reference_rng.normal((1,)), reference_rng.normal(shape) * np.float32(0.3) + X
    expected = [*noisy, reference_rng.normal((2,))]
    for a, b in zip(draws, expected, strict=True):
        np.testing.assert_array_equal(gpu.to_host(a), gpu.to_host(b))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mode", ["global", "feature"])
def test_scaled_rows_are_those_of_a_processor(mode: str, dtype: Any, gpu: Backend) -> None:
    """Compare bits, also of rows with a large offset: both compute in float64 and round once."""
    X = (1e6 + 3 * rows(0, 9, 6)).reshape(9, 2, 3, 1).astype(dtype)
    size = 6 if mode == "feature" else 1
    mean, scale = 1e6 + rows(1, size), 1 + rows(2, size) ** 2
    transform = Scale(mode, mean, scale).bind(sk.ArraySource(X, rows(3, 9)))
    scaled = []
    for backend in (Backend(1), gpu):
        ids = backend.asarray(np.arange(9))
        rng = RowRandom(backend.xp, 0, 0, 0, ids, dtype, fills=backend.fills)
        Y = backend.xp.zeros((9, 1), dtype)
        scaled.append(backend.to_host(transform(backend.asarray(X), Y, rng)[0]))
    assert scaled[1].dtype == dtype
    np.testing.assert_array_equal(*scaled)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ones_and_zeros_of_classes(dtype: Any, gpu: Backend) -> None:
    ids = np.array([2, 0, 6, 6, 1])
    out = gpu.asarray(np.full((5, 7), np.nan, dtype))
    gpu.one_hot(gpu.asarray(ids), out)
    np.testing.assert_array_equal(gpu.to_host(out), np.eye(7)[ids])


@pytest.mark.parametrize("precision", ["float64", "exact"])
@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_solver_steps_on_gpu_equal_cpu(name: str, precision: str, gpu: Backend) -> None:
    """Compare the steps from one setup, so that only the steps can differ."""
    options = solver_settings(damping=1e-3, ridge=0.01 if name in RIDGED else 0.0)
    on_cpu = make_case(operator(precision=precision), name, options=options)
    op = operator(precision=precision, backend=gpu)
    arrays = {key: gpu.asarray(a) for key, a in on_cpu.setup.arrays.items()}
    on_gpu = Case(**{**vars(on_cpu), "op": op, "setup": Setup(arrays, on_cpu.setup.meta)})
    weights = []
    for case in (on_cpu, on_gpu):
        solver = case.solver()
        state = solver.init()
        for t in range(10):
            case.step(solver, state, t)
            if t % 5 == 4:
                solver.end_epoch(state)
        solver.finish(state)
        weights.append(case.op.backend.to_host(solver.weights(state)))
    close(weights[1], weights[0], 1e-8 if precision == "float64" else 2e-3)


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_setups_on_gpu_equal_cpu(name: str, gpu: Backend) -> None:
    """Compare the measured quantities of two setups; factors and eigenvectors are not unique."""
    metas = [make_case(operator(backend=backend), name).setup.meta for backend in (Backend(1), gpu)]
    assert metas[0].keys() == metas[1].keys()
    for cpu, device in zip(*(meta["rules"] for meta in metas), strict=True):
        assert device["leverage"] == pytest.approx(cpu["leverage"], rel=1e-6)
        assert device["lambda_1"] == pytest.approx(cpu["lambda_1"], rel=1e-6)


def test_gpu_batch_is_critical_batch_and_survives_resume(
    gpu: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the setup lowers the planned batch, and that a resumed run has the same bits."""
    monkeypatch.setattr("streamkern.planning.sizes.MIN_BATCH", 4)
    monkeypatch.setattr("streamkern.planning.sizes.MAX_BATCH", 8)
    options = {
        "run.device": "gpu", "data.batch_size": "auto", "model.n_centers": 130,
        "model.bandwidth": 12.0, "solver.ridge": 0.0, "solver.damping": 0.01,
    }  # fmt: skip
    X, ids = arrays(150)
    source = sk.AugmentedSource(
        sk.ArraySource(X, ids, classes=CLASSES, unit_rows=16), 1, [GaussianNoise(0.1)]
    )
    weights = []
    for name in ("whole", "stopped"):
        config = settings(tmp_path / name, **options)
        if name == "stopped":
            stopped(config, 3, source=source)
        model = finished(config, source=source).model
        weights.append(model.backend.to_host(model.weights))
        (lowered,) = [e for e in read_log(tmp_path / name / "log.jsonl") if e["event"] == "batch"]
        assert (lowered["planned"], 8 <= lowered["batch_size"] < 32) == (32, True)
    np.testing.assert_array_equal(*weights)


def test_rounded_noise_selects_integer_precision(gpu: Backend) -> None:
    """Check that "auto" chooses "integer" on a GPU, with the draws of a CPU."""
    source = augmented(RandomFlip(), GaussianNoise(9.0, round=True))
    values = []
    for device, precision in (("cpu", "integer"), ("gpu", "auto")):
        config = settings(
            **{"run.device": device, "run.precision": precision, "data.scale": "global"},
            **{"model.n_centers": 30, "solver.name": "direct", "solver.ridge": 1e-3},
        )
        model = finished(config, source=source).model
        assert (model.op.precision, model.op.operand_dtype) == (
            "integer", np.float16 if device == "gpu" else np.float32,
        )  # fmt: skip
        values.append(model.values(IMAGES[:50]))
    close(values[1], values[0], 1e-5)


# -- several users of a device ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["block", "eigenpro4", "falkon", "direct"])
def test_run_keeps_its_stream_while_another_backend_is_used(method: str, gpu: Backend) -> None:
    """Check that a run stays on its own stream when another backend was opened, used and closed."""
    held_out = array_source()
    config = settings(**METHODS[method] | {"run.device": "gpu", "data.epochs": 3})
    plain = finished(config, source=stream(), test=held_out)
    X = arrays()[0]
    other_model = sk.KernelRegressor(n_centers=20, device="gpu").fit(X, X[:, :1])
    answers: list[Array] = []
    stream_before = gpu.xp.cuda.get_current_stream()

    def predict(record: dict[str, Any]) -> None:
        answers.append(other_model.predict(arrays()[0][:5]))

    with_predictions = finished(config, source=stream(), test=held_out, on_evaluation=predict)
    assert answers
    assert all(np.array_equal(a, answers[0]) for a in answers)
    weights = [r.model.backend.to_host(r.model.weights) for r in (plain, with_predictions)]
    np.testing.assert_array_equal(*weights)
    assert gpu.xp.cuda.get_current_stream() is stream_before


def test_model_predicts_on_another_thread(gpu: Backend) -> None:
    """Check predictions on another thread, whose current stream is the default stream."""
    model = finished(settings(**{"run.device": "gpu"}), source=stream()).model
    X = arrays()[0][:7]
    expected, results = model.values(X), list[Array]()
    thread = threading.Thread(target=lambda: results.append(model.values(X)))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(expected, results[0])


# -- operands, memory and libraries ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "width"), [("fast", 16), ("high", 32), ("integer", 16), ("exact", 9)]
)
def test_half_precision_points_are_padded_with_zeros(
    precision: str, width: int, gpu: Backend
) -> None:
    """Check that the padding is 0 even if the columns had other contents."""
    X = gpu.asarray(rows(0, 40, 9).astype(np.float32))
    grid = GRID if precision == "integer" else None
    op = KernelOperator(Laplace(2.0), gpu, precision, None, grid)
    room = op.empty_points(40, 9, left=True, right=True)
    for side in (room.left, room.right):
        side[:, : op.columns(9)] = np.nan
    points = op.points(X, out=room)
    assert points.width == width
    for side in (points.left, points.right):
        padding = gpu.to_host(side)[:, op.columns(9) :]
        np.testing.assert_array_equal(padding, np.zeros_like(padding))


@pytest.mark.parametrize("precision", ["exact", "high", "fast", "integer"])
def test_right_operands_can_serve_as_left_operands(gpu: Backend, precision: str) -> None:
    """Check that products have the same bits as with a left side, with padded rows."""
    op = KernelOperator(
        Laplace(2.0), gpu, precision, None, GRID if precision == "integer" else None
    )
    A, Z = (gpu.asarray(rows(seed, 40, 9).astype(np.float32)) for seed in (0, 1))
    points = op.points(Z, right=True)
    from_left = op.matrix(op.points(A, left=True), points)
    from_right = op.matrix(op.points(A, right=True), points)
    np.testing.assert_array_equal(gpu.to_host(from_right), gpu.to_host(from_left))


@needs_compiler
@pytest.mark.parametrize("precision", ["high", "fast", "integer"])
def test_agop_of_padded_points_equals_cpu(gpu: Backend, precision: str) -> None:
    """Compare the average gradient outer product of points that are padded to 16 or 32 columns."""
    X, Z, w = rows(0, 40, 9), rows(1, 30, 9), rows(2, 30, 2)
    results = []
    for backend, mode in ((gpu, precision), (Backend(1), "float64")):
        grid = GRID if mode == "integer" else None
        op = KernelOperator(Laplace(9.0), backend, mode, None, grid)
        arrays = (backend.asarray(a, op.dtype) for a in (X, Z, w))
        x, z, alpha = arrays
        total = GradientSum(op, op.points(z, right=True), alpha)
        total.add(x)
        results.append(total.mean())
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=0.02 * np.abs(results[1]).max())


@needs_compiler
def test_full_device_memory_error_names_settings_to_lower(cupy: Any) -> None:
    """Check the message for any allocation, and that other errors pass unchanged."""
    with get_backend("gpu") as backend:
        with (
            pytest.raises(
                DeviceMemoryError, match=r"memory of gpu:0 is full .*see streamkern plan"
            ),
            backend.active(),
        ):
            raise fake_cupy.OutOfMemoryError("Out of memory allocating 1,000 bytes")
        with pytest.raises(KeyError), backend.active():
            raise KeyError


@needs_compiler
def test_host_memory_that_cannot_be_pinned_is_pageable(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a warning says so, and that other errors of the driver pass unchanged."""
    with get_backend("gpu") as backend:
        pinned = backend.host_memory.empty((3, 5), np.dtype(np.uint16))
        assert isinstance(pinned.base, bytearray)
        assert (pinned.shape, pinned.dtype, pinned.flags.writeable) == ((3, 5), np.uint16, True)
        assert backend.host_memory.empty((3, 0), np.uint8).shape == (3, 0)
        monkeypatch.setattr(fake_cupy.PinnedMemory, "limit", 1 << 19)
        monkeypatch.setattr(fake_cupy.PinnedMemory, "status", 999)
        with pytest.raises(fake_cupy.CUDARuntimeError):
            backend.host_memory.empty((1 << 20,), np.uint8)
        monkeypatch.setattr(fake_cupy.PinnedMemory, "status", 2)
        with pytest.warns(UserWarning, match=r"could not pin 1 MiB of host memory, .* pageable"):
            pageable = backend.host_memory.empty((1 << 20,), np.uint8)
        assert pageable.flags.owndata
        assert len(pageable) == 1 << 20


@needs_compiler
def test_waiting_thread_chooses_the_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a thread of the loader, whose current device is GPU 0 until it chooses one."""
    depth = threading.local()

    def enter(device: Any) -> Any:
        depth.value = getattr(depth, "value", 0) + 1
        return device

    def leave(*args: Any) -> None:
        depth.value -= 1

    depths: list[int] = []
    monkeypatch.setattr(fake_cupy.Device, "__enter__", enter)
    monkeypatch.setattr(fake_cupy.Device, "__exit__", leave)

    def synchronize(event: Any) -> None:
        depths.append(getattr(depth, "value", 0))

    monkeypatch.setattr(fake_cupy.Event, "synchronize", synchronize, raising=False)
    with get_backend("gpu") as backend:
        last_copy = backend.host_memory.last_copy()
        thread = threading.Thread(target=last_copy.synchronize)
        thread.start()
        thread.join()
    assert depths == [1]


@needs_compiler
@pytest.mark.parametrize(
    "case",
    ["cublas", "cusolver", "driver", "nvrtc", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"],
)
def test_resume_with_different_libraries_is_reported(
    case: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the libraries are recorded, because bits depend on them."""
    for name in CUBLAS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with get_backend("gpu") as backend:
        description = backend.describe()
        if case == "cublas":
            monkeypatch.setattr(numpy_cublas, "getVersion", lambda handle: 130100)
        elif case == "driver":
            cupy.cuda.runtime.driverGetVersion = lambda: 13010
        elif case == "nvrtc":
            cupy.cuda.nvrtc.getVersion = lambda: (13, 1)
        elif case in CUBLAS_VARIABLES:  # a run that was recorded without it is no different
            assert case not in description
            monkeypatch.setenv(case, ":4096:8")
        else:
            cupy.cuda.cusolver._getVersion = lambda: (12, 1, 0)
        changed = backend_changes(description, backend.describe())
    assert len(changed) == 1
    assert changed[0].startswith(f"{case}: was ")


@needs_compiler
def test_pool_memory_is_freed_before_free_memory_is_read(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check free parts of used blocks, which do not fit a large array."""
    monkeypatch.setattr(fake_cupy.Device, "mem_info", (1 << 20, 1 << 33))
    pool = cupy.get_default_memory_pool()
    pool.free_bytes = lambda: 1 << 32
    pool.free_all_blocks = lambda: setattr(fake_cupy.Device, "mem_info", (1 << 30, 1 << 33))
    with get_backend("gpu") as backend:
        assert backend.memory_available() == 1 << 30


@needs_compiler
def test_growing_scratch_memory_empties_the_pool(cupy: Any) -> None:
    emptied = [0]
    with get_backend("gpu") as backend, backend.active():
        cupy.get_default_memory_pool().free_all_blocks = lambda: emptied.append(1)
        for mebibytes in (40, 50, 30, 50):
            with backend.workspace((mebibytes << 20,), np.uint8):
                pass
        assert sum(emptied) == 2  # once in the pool of device memory, once in that of the host


@needs_compiler
def test_mirror_needs_few_kernel_launches(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that there is one launch for each pair of large blocks."""
    launches, assign = [0], fake_cupy.Array.__setitem__

    def count_and_assign(self: Any, key: Any, value: Any) -> None:
        launches[0] += 1
        assign(self, key, value)

    with get_backend("gpu") as backend, backend.active():
        C = backend.asarray(np.tril(rows(0, 2500, 2500)).astype(np.float32))
        monkeypatch.setattr(fake_cupy.Array, "__setitem__", count_and_assign)
        backend.mirror_lower(C)
        host = backend.to_host(C)
    assert launches[0] == 3
    np.testing.assert_array_equal(host, host.T)


@needs_compiler
@pytest.mark.parametrize(("reads_host_memory", "waits"), [(0, 0), (1, 1)])
def test_upload_waits_for_device_that_reads_host_memory(
    reads_host_memory: int, waits: int, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the copy has ended before the caller may free the array.

    A driver that copies by its own buffer has read the array already.
    """
    monkeypatch.setitem(fake_cupy.Device.attributes, "PageableMemoryAccess", reads_host_memory)
    with get_backend("gpu") as backend:
        waited: list[int] = []
        monkeypatch.setattr(backend, "synchronize", lambda: waited.append(1))
        backend.asarray([1.0, 2.0])
        assert len(waited) == waits


@needs_compiler
def test_switch_interval_is_short_during_device_steps(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the switch interval is restored at the end."""
    default_interval, intervals = sys.getswitchinterval(), list[float]()
    monkeypatch.setattr(
        "streamkern.solver.block_step.BlockSolver._average",
        lambda *of: intervals.append(sys.getswitchinterval()),
    )
    for device, expected in (("gpu", 5e-4), ("cpu", default_interval)):
        finished(settings(**METHODS["block"] | {"run.device": device}), source=stream())
        assert {round(interval, 9) for interval in intervals} == {expected}
        assert sys.getswitchinterval() == default_interval
        intervals.clear()


@pytest.mark.parametrize(("value", "expected"), [("0", "0"), (None, "1")])
@needs_compiler
def test_cupy_compiles_with_precompiled_headers(
    value: Any, expected: str, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an environment variable of the user has priority."""
    if value is None:
        monkeypatch.delenv("CUPY_NVRTC_USE_PCH")
    else:
        monkeypatch.setenv("CUPY_NVRTC_USE_PCH", value)
    with get_backend("gpu"):
        assert os.environ["CUPY_NVRTC_USE_PCH"] == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_triangles_are_multiplied_blockwise(
    dtype: Any, gpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with NumPy, for operands with contiguous columns and any size."""
    monkeypatch.setattr("streamkern.backend.device_algebra.TRIANGLE_BLOCK", 16)
    row_bytes = 60 * np.dtype(dtype).itemsize
    monkeypatch.setattr("streamkern.backend.device_algebra.TRIANGLE_BYTES", 16 * row_bytes)
    L, B = np.tril(rows(0, 60, 60)).astype(dtype), rows(1, 7, 60).astype(dtype).T
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    for transposed in (False, True):
        multiply = gpu.matmul_t if transposed else gpu.matmul
        for lower in (False, True):
            out = gpu.xp.empty((60, 7), dtype)
            multiply(gpu.asarray(L), gpu.asarray(B.T).T, out, lower=lower)
            close(gpu.to_host(out), (L.T if transposed else L) @ B, tolerance)
    factor = (np.eye(60) + L / 60).astype(dtype)
    inverse, triangle = gpu.xp.eye(60, dtype=dtype), gpu.asarray(factor)
    gpu.solve_lower_triangular(triangle, inverse)
    close(gpu.to_host(inverse), np.linalg.inv(factor.astype(np.float64)), tolerance)
    C = gpu.xp.ones((60, 60), dtype)
    gpu.add_gram(C, gpu.asarray(L), 0.5, lower=True)
    close(np.tril(gpu.to_host(C)), np.tril(1 + L.T @ L / 2), tolerance)


# -- transfers between disk and device -------------------------------------------------------------

PART = 4096  # bytes, where a p x p array has 14 400


@needs_compiler
@pytest.mark.parametrize(
    ("method", "max_bytes"),
    [
        *((method, PART) for method in ("block", "block, ridge", "falkon")),
        ("direct", 8 * 60 * (60 + 3)),  # its equations, which it solves on the host
    ],
)
def test_setup_and_checkpoints_transfer_in_parts(
    method: str, max_bytes: int, cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a first start, a resume and predictions, in which no p x p array is on the host."""
    largest = 0
    monkeypatch.setattr(checkpoint_format, "_CHUNK_BYTES", (1024, PART))
    asnumpy, set_array = cupy.asnumpy, fake_cupy.Array.set

    def record_and_copy(a: Any) -> Array:
        nonlocal largest
        largest = max(largest, a.nbytes)
        return np.asarray(asnumpy(a))

    def record_and_set(self: Any, host: Array, stream: Any = None) -> None:
        nonlocal largest
        largest = max(largest, host.nbytes)
        set_array(self, host, stream)

    options = METHODS[method] | {"run.device": "gpu"}
    plain = finished(settings(**options), source=stream())
    weights = plain.model.backend.to_host(plain.model.weights)
    config = settings(tmp_path, **options)
    cupy.asnumpy = record_and_copy
    monkeypatch.setattr(fake_cupy.Array, "set", record_and_set)
    stopped(config, 5, source=stream())
    result = finished(config, source=stream())
    with load_model(tmp_path, device="gpu").backend:
        pass
    assert largest <= max_bytes
    np.testing.assert_array_equal(result.model.backend.to_host(result.model.weights), weights)
