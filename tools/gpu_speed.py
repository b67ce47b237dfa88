"""Speed of one GPU: its ceilings first, then products and steps as shares of what they allow.

`measure` is called by `gpu_check`; it takes any backend, so that its report can be tested without a
GPU. Every part is guarded: one that fails says so in the report and does not stop the others.

The floor of the two products of a step, K W and K^T r with K kept, is the larger of GEMM and the
writing of K, plus 16 bytes an entry: one element-wise pass in place, and K read by either product.
Rates are those measured here, at the run's own shapes.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from tools.gpu_clock import LEAST, WARM, Clock, Figures, guarded
from tools.gpu_solver import distances, made_rows, step

# (batch m, centers p, features d, outputs c); the last needs 80 GB of device memory.
SHAPES = ((4096, 100_000, 784, 10), (2048, 60_000, 784, 10), (8192, 1_000_000, 64, 1))
MODES = ("exact", "high", "fast", "integer")
EIGH = (2000, 5000, 10_000)
COPY_BYTES = 1 << 30


def measure(
    backend: Any, seconds: float, *, shapes: Any = SHAPES, eigh: Any = EIGH,
    copy_bytes: int = COPY_BYTES,
) -> Figures:  # fmt: skip
    """Ceilings and one entry per shape and mode, until the time is over."""
    deadline = time.perf_counter() + seconds
    clock = Clock(backend)
    report: Figures = {
        "copy": guarded(lambda: copy_rate(clock, copy_bytes)),
        "upload": guarded(lambda: upload_rate(clock, copy_bytes // 16)),
        "shapes": [],
    }
    for shape in shapes:
        entry: Figures = {"shape": list(shape), "modes": {}}
        report["shapes"].append(entry)
        entry["torch"] = guarded(lambda shape=shape: torch_products(backend, *shape))  # type: ignore[misc]
        for mode in MODES:
            if time.perf_counter() > deadline:
                entry["modes"][mode] = {"left_out": "the time was over"}
                continue
            entry["modes"][mode] = guarded(
                lambda mode=mode, shape=shape, entry=entry: _mode(clock, mode, shape, report, entry)  # type: ignore[misc]
            )
            backend.release()
    report["eigh"] = {}
    for size in eigh:
        late = time.perf_counter() > deadline
        report["eigh"][size] = (
            {"left_out": "the time was over"} if late else guarded(lambda s=size: _eigh(clock, s))  # type: ignore[misc]
        )
    return report


def copy_rate(clock: Clock, nbytes: int) -> Figures:
    """Return the bytes that a copy on the device reads and writes per second."""
    xp = clock.backend.xp
    a, b = (xp.ones(nbytes // 4, np.float32) for _ in range(2))

    def copy() -> None:
        b[...] = a

    return {"gb_per_s": 2 * nbytes / clock.median_ms(copy) / 1e6}


def upload_rate(clock: Clock, nbytes: int) -> Figures:
    """Return bytes per second through the ring, from pinned and from ordinary host memory."""
    backend, repeats = clock.backend, 30
    host = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    pinned = backend.host_memory.empty((nbytes,), np.uint8)
    pinned[...] = host
    ring, figures = backend.uploader(), Figures()
    for name, array in (("pinned", pinned), ("pageable", host)):
        for _ in range(6):
            ring.upload(array)
        backend.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            ring.upload(array)
        backend.synchronize()
        figures[f"{name}_gb_per_s"] = repeats * nbytes / (time.perf_counter() - began) / 1e9
    ring.close()
    return figures


def _eigh(clock: Clock, size: int) -> Figures:
    backend = clock.backend
    B = backend.asarray(np.random.default_rng(0).standard_normal((size, size), np.float32))
    A = B @ B.T / size
    backend.synchronize()
    began = time.perf_counter()
    backend.top_eigh(A, size // 20)
    backend.synchronize()
    return {"seconds": time.perf_counter() - began}


# --- the products and the step --------------------------------------------------------------------


def _mode(
    clock: Clock, mode: str, shape: tuple[int, ...], report: Figures, entry: Figures
) -> Figures:
    """Products and step of one shape in one mode."""
    (m, p, d, c), backend = shape, clock.backend
    op = distances(backend, mode, d)
    host_X, host_Z = made_rows(mode, m, d, 1), made_rows(mode, p, d, 2)
    z = op.points(backend.asarray(host_Z), right=True)
    x = op.points(backend.asarray(host_X), left=True)
    figures = _products(clock, op, x, z, c)
    figures["largest_error"] = largest_error(op, x, z, host_X, host_Z)
    gb = m * p / 1e9
    rate = report["copy"].get("gb_per_s")
    if rate:
        gemm, write = figures["gemm_ms"], 4 * gb / rate * 1e3
        floor = max(gemm, write) + 16 * gb / rate * 1e3
        figures["products_floor_ms"] = floor
        figures["products_fraction_of_floor"] = floor / figures["products_ms"]
    if "products_ms" in entry["torch"]:
        figures["ratio_to_torch"] = entry["torch"]["products_ms"] / figures["products_ms"]
    figures["step"] = guarded(lambda: step(clock, op, z, host_X, c))
    return figures


def _products(clock: Clock, op: KernelOperator, x: Points, z: Points, c: int) -> Figures:
    """Time GEMM alone, then K W and K^T r with K kept, by the backend."""
    backend, (m, p) = clock.backend, (len(x), len(z))
    rng = np.random.default_rng(3)
    W = backend.asarray(rng.standard_normal((p, c), np.float32))
    K, f, g = (backend.xp.empty(shape, np.float32) for shape in ((m, p), (m, c), (p, c)))

    def products() -> None:
        op.product(x, z, W, out=f, keep=K)
        backend.matmul_t(K, f, g)

    def gemm() -> None:
        backend.gemm(x.left, z.right, K)

    gemm_ms = clock.median_ms(gemm)
    flops = 2 * m * p * x.width
    figures = {"gemm_ms": gemm_ms, "gemm_tflops": flops / gemm_ms / 1e9}
    figures["products_ms"] = clock.median_ms(products)
    return figures


def largest_error(op: KernelOperator, x: Points, z: Points, X: np.ndarray, Z: np.ndarray) -> float:
    """Return the largest error of some entries of K, against float64."""
    K = op.backend.to_host(op.matrix(x[:16], z[:256])).astype(np.float64)
    a, b = X[:16].astype(np.float64), Z[:256].astype(np.float64)
    distance = np.sqrt(((a[:, None] - b) ** 2).sum(axis=2))
    return float(np.abs(K - np.exp(-distance / op.kernel.bandwidth)).max())


def torch_products(backend: Any, m: int, p: int, d: int, c: int) -> Figures:
    """Time the two products in a plain PyTorch rendering, float32."""
    try:
        import torch
    except ImportError:
        return {"left_out": "PyTorch is not installed"}
    on_gpu = backend.name.startswith("gpu")
    if on_gpu and not torch.cuda.is_available():
        return {"left_out": "PyTorch sees no GPU"}
    torch.backends.cuda.matmul.allow_tf32 = False
    X, Z, W = (
        torch.from_numpy(a).to("cuda" if on_gpu else "cpu")
        for a in (
            made_rows("exact", m, d, 1),
            made_rows("exact", p, d, 2),
            made_rows("exact", p, c, 3),
        )
    )
    x2, z2, scale = (X * X).sum(1, keepdim=True), (Z * Z).sum(1), -1 / (1.4 * d**0.5)

    def products() -> None:
        K = torch.addmm(z2, X, Z.T, alpha=-2).add_(x2).clamp_(min=0).sqrt_().mul_(scale).exp_()
        K.T @ (K @ W)

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    times = []
    for _ in range(WARM + LEAST):
        wait()
        began = time.perf_counter()
        products()
        wait()
        times.append((time.perf_counter() - began) * 1e3)
    if on_gpu:
        torch.cuda.empty_cache()
    return {"products_ms": median(times[WARM:]), "version": torch.__version__}
