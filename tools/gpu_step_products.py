"""Parts of `gpu_step`: thin products, kernel values, points, and the phases of setup."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from streamkern.backend import device_algebra, split_products
from streamkern.backend.half_products import half_product
from streamkern.solver.precondition import block as block_module
from streamkern.solver.precondition import norm as norm_module
from streamkern.solver.precondition.block import block_slices
from streamkern.solver.precondition.block_factor import BlockInputs
from streamkern.solver.precondition.joint import Joint
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.partition import Centers
from streamkern.solver.precondition.samples import Sample
from tools.gpu_clock import Figures, Place, Spans, replaced
from tools.gpu_fused import Fused
from tools.gpu_solver import distances, made_factor, made_problem, made_rows
from tools.gpu_speed import largest_error, upload_rate
from tools.gpu_step_parts import LATE, Bench, floored
from tools.gpu_triangle import Triangle

PRODUCTS = ("H_g", False), ("Ht_g", True)
"""Names of the products of a step with H, and whether H is transposed."""


def thin(
    bench: Bench, entry: Figures, *, sizes: Any, columns: Any, triangle_blocks: Any
) -> None:  # fmt: skip
    """Time the products of a step with a triangular H, in float32 and with H in float16.

    On a GPU, time also the kernels of `gpu_triangle`, and compare their results.

    triangle_blocks : bounds of the rows of a diagonal block, see `RowMajor.lower`; None for the
        bound that the solver uses.
    """
    backend = bench.backend
    on_gpu = hasattr(backend, "blas")
    for b in sizes:
        H = made_factor(backend, b)
        results = entry[f"b={b}"] = {}
        for kind in ("float32", "half"):
            H = H.astype(np.float16) if kind == "half" else H
            for c in columns:
                for block in triangle_blocks if on_gpu else triangle_blocks[:1]:
                    name = f"{kind}, {c} columns, diagonal blocks {block or 'as in steps'}"
                    results[name] = LATE if bench.late() else _thin(bench, H, c, block)
                for packed in (False, True) if on_gpu else ():
                    name = f"{kind}, {c} columns, own kernels{', packed' * packed}"
                    results[name] = LATE if bench.late() else _own_thin(bench, H, c, packed)
        del H
        backend.release()


def _thin(bench: Bench, H: Any, c: int, block: int | None) -> Figures:
    backend, b = bench.backend, len(H)
    g = backend.asarray(made_rows("exact", b, c, 7))
    u = backend.xp.empty((b, c), np.float32)
    n_bytes = device_algebra.TRIANGLE_BYTES if block is None else block * b * H.itemsize
    figures: Figures = {}
    for name, transposed in PRODUCTS:
        product = partial(_product, backend, H, g, u, transposed)
        with replaced(device_algebra, "TRIANGLE_BYTES", n_bytes):
            figures[name] = _of_triangle(bench, H, bench.clock.median_ms(product))
    return figures


def _own_thin(bench: Bench, H: Any, c: int, packed: bool) -> Figures:
    backend, b = bench.backend, len(H)
    g = backend.asarray(made_rows("exact", b, c, 7))
    u, found = (backend.xp.empty((b, c), np.float32) for _ in range(2))
    triangle = Triangle(backend.xp, H, c, packed=packed)
    figures: Figures = {}
    for name, transposed in PRODUCTS:
        ms = bench.clock.median_ms(partial(triangle, g, found, transposed=transposed))
        _product(backend, H, g, u, transposed)
        difference = backend.to_host(abs(found - u)).max() / backend.to_host(abs(u)).max()
        figures[name] = _of_triangle(bench, H, ms) | {"largest_difference": float(difference)}
    return figures


def _product(backend: Any, H: Any, g: Any, out: Any, transposed: bool) -> None:
    """Write the product of a step with a triangle, as the solver computes it."""
    if H.dtype == np.float16:
        half_product(backend, H, g, out, transposed=transposed, lower=True)
    else:
        (backend.matmul_t if transposed else backend.matmul)(H, g, out, lower=True)


def _of_triangle(bench: Bench, H: Any, ms: float) -> Figures:
    """Return ms beside the time to read the triangle of H once."""
    n_bytes = len(H) * (len(H) + 1) / 2 * H.itemsize
    return floored(ms, bench.bytes_ms(n_bytes)) | {"tb_per_s": n_bytes / ms / 1e9}


def epilogue(
    bench: Bench, entry: Figures, *, m: int, p: int, d: int, modes: Any, c: int
) -> None:  # fmt: skip
    """Time the kernel that turns products into kernel values, and compare K with float64.

    On a GPU, time also K @ W with c columns, after that kernel and fused with it.
    """
    backend, xp = bench.backend, bench.backend.xp
    for mode in modes:
        op = distances(backend, mode, d)
        rows, centers = made_rows(mode, m, d, 1), made_rows(mode, p, d, 2)
        x = op.points(backend.asarray(rows), left=True)
        z = op.points(backend.asarray(centers), right=True)
        tile = xp.empty((m, p), np.float32)
        backend.gemm(x.left, z.right, tile)
        norms = None if op.norms_in_columns else (x.norms, z.norms)
        finish = partial(backend.finish_tile, op.kernel, tile, norms, op.scale, None, None, tile)
        ms = bench.clock.median_ms(finish)
        entry[mode] = floored(ms, bench.bytes_ms(8 * m * p)) | {
            "gb_per_s": 8 * m * p / ms / 1e6,
            "largest_error_of_K": largest_error(op, x, z, rows, centers),
        }
        if hasattr(backend, "blas") and mode == modes[0]:
            backend.gemm(x.left, z.right, tile)
            entry[f"K @ W, {c} columns"] = _with_product(bench, op, tile, norms, c)
        del x, z, tile, finish
        backend.release()


def _with_product(bench: Bench, op: Any, tile: Any, norms: Any, c: int) -> Figures:
    """Time K @ W by the package, and by the variant that also writes K in float16."""
    backend, xp, (m, p) = bench.backend, bench.backend.xp, tile.shape
    W = backend.asarray(made_rows("exact", p, c, 3), np.float32)
    transposed, out, found = W.T.copy(), xp.empty((m, c), np.float32), xp.empty((m, c), np.float32)
    fused = Fused(xp, op.kernel.expression, m, p, c)
    run = partial(fused, tile, norms, op.scale, transposed, found)
    figures = {"fused": floored(bench.clock.median_ms(run), bench.bytes_ms(6 * m * p))}
    finish = partial(backend.finish_tile, op.kernel, tile, norms, op.scale, W, out, tile)
    finish(overwrite=True)  # the first time turns products into values, and the others do not
    largest = float(backend.to_host(abs(out)).max())
    error = float(backend.to_host(abs(found - out)).max()) / largest
    ms = bench.clock.median_ms(partial(finish, overwrite=True))
    figures["apart"] = floored(ms, bench.bytes_ms(12 * m * p))
    return figures | {"largest_difference": error}


def points(bench: Bench, entry: Figures, *, m: int, d: int, modes: Any) -> None:
    """Time the preparation of a batch: the upload of bytes, the cast, and the points."""
    backend, clock = bench.backend, bench.clock
    pixels = backend.asarray(made_rows("integer", m, d, 1))
    X = backend.xp.empty((m, d), np.float32)

    def cast() -> None:
        X[...] = pixels

    entry["upload_of_bytes"] = upload_rate(clock, m * d)
    entry["cast"] = floored(clock.median_ms(cast), bench.bytes_ms(5 * m * d))
    for mode in modes:
        op = distances(backend, mode, d, pixels=True)
        x = op.empty_points(m, op.kernel.features(d), left=True)
        ms = clock.median_ms(partial(op.points, X, out=x))
        written = x.left.nbytes + (0 if x.norms is None else x.norms.nbytes)
        entry[mode] = floored(ms, bench.bytes_ms(4 * m * d + written)) | {
            "gb_per_s": (4 * m * d + written) / ms / 1e6
        }


def setup(
    bench: Bench, entry: Figures, *, b: int, n: int, d: int, c: int, sample: int, probe: int,
    sweeps: int, panels: Any,
) -> None:  # fmt: skip
    """Time the phases of the setup of n blocks. own_ms : without the phases inside.

    The first entry is in float32. The others compute W and its covariance by float16 parts, each
    with another number of terms of a sum (`split_products.SPLIT_PANEL`).
    """
    arguments = {"b": b, "n": n, "d": d, "c": c, "sample": sample, "probe": probe, "sweeps": sweeps}
    entry["float32"] = _setup(bench, **arguments)
    lambda_1 = entry["float32"]["lambda_1"]
    for panel in panels:
        name = f"float16 parts, sums of {panel} terms"
        if bench.late():
            entry[name] = LATE
            continue
        figures = entry[name] = _setup(bench, **arguments, panel=panel)
        figures["lambda_1_over_float32"] = figures["lambda_1"] / lambda_1


def _setup(
    bench: Bench, *, b: int, n: int, d: int, c: int, sample: int, probe: int, sweeps: int,
    panel: int = 0,
) -> Figures:  # fmt: skip
    """Return the times of the phases, lambda_1 and the jitter. panel : 0 for float32."""
    backend, op = bench.backend, distances(bench.backend, "high", d, bandwidth=0.7)
    X, Y = (backend.asarray(a) for a in made_problem(n * b + sample + probe, d, c))
    z = op.points(X[: n * b], right=True)
    S, P = (
        Sample(op.points(X[rows], left=True), Y[rows].copy())
        for rows in (slice(n * b, n * b + sample), slice(n * b + sample, None))
    )
    places = [
        Place(backend, "cholesky", "cholesky", lambda A: len(A) ** 3 / 3),
        Place(norm_module, "solve_split_right", "W", lambda backend, L, B: B.size * len(L)),
        Place(norm_module, "add_split_gram", "W W^T", lambda backend, C, W, scale: W.size * len(C)),
        Place(backend, "solve_lower_right", "solve_lower_right", lambda L, B: B.size * len(L)),
        Place(backend, "solve_lower_triangular", "solve_lower_triangular",
              lambda L, B: len(L) ** 3 / 3),
        Place(backend, "add_gram", "add_gram", lambda C, W, *of: len(W) * len(C) ** 2),
        Place(backend, "mirror_lower", "mirror_lower"),
        Place(backend, "matmul", "matmul"), Place(backend, "matmul_t", "matmul_t"),
        Place(op, "gram", "kernel values"), Place(op, "matrix", "kernel values"),
        Place(op, "product", "kernel products"),
        Place(block_module, "noise_on_fresh_rows", "trials of the noise"),
        Place(Joint, "learn", "sweeps"), Place(block_module, "build_block", "setup"),
    ]  # fmt: skip
    spans = Spans(bench.clock)
    noise = Noise(variance=1e-2, n_rows=1000, grows=False)
    with (
        spans.around(places),
        replaced(backend, "tensor_cores", bool(panel)),
        replaced(split_products, "SPLIT_PANEL", panel),
    ):
        inputs = BlockInputs(op, Centers.of(z, backend), S, P, batch=4096)
        pre = block_module.build_block(inputs, block_slices(n * b, b), noise=noise, sweeps=sweeps)
    entry: Figures = {
        "lambda_1": max(rule.lambda_1 for rule in pre.rules), "mu": pre.mu, "jitter": pre.jitter,
    }  # fmt: skip
    for name, figures in spans.times().items():
        flops = figures.pop("flops")
        if flops:
            figures["tflops"] = flops / figures["own_ms"] / 1e9
            figures |= floored(figures["ms"], bench.gemm_ms(flops))
        elif name == "mirror_lower":
            floor = bench.bytes_ms(4.0 * b * b) * figures["calls"]
            figures |= floored(figures["ms"], floor)
        entry[name] = figures
    del pre
    backend.release()
    return entry
