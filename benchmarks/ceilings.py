"""Measure the limits of this machine: matrix products, memory copies, exponentials."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import ThreadpoolController

from benchmarks.harness import Figure, check, figure, in_turns, installed, rates
from streamkern.backend.base import tiles
from streamkern.basics.machine import available_cpus

REPEATS = 7
SMALL = {"sizes": (512,), "copy_bytes": 2**24, "entries": 2**18}
IN_CACHE = 2**16  # float32 entries of a tile: 256 KiB


def measure(
    repeats: int,
    *,
    sizes: tuple[int, ...] = (2048, 4096),
    copy_bytes: int = 2**28,
    entries: int = 2**24,
) -> list[Figure]:
    """Return GFLOP/s, GB/s (bytes read plus bytes written) and entries/s."""
    figures = [f for n in sizes for f in _sgemm(repeats, n)]
    with ThreadPoolExecutor(available_cpus()) as pool:
        return [*figures, *_copy(repeats, pool, copy_bytes), *_exp(repeats, pool, entries)]


def _sgemm(repeats: int, n: int) -> list[Figure]:
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    out = np.empty((n, n), np.float32)

    blas = ThreadpoolController()  # finding the libraries takes longer than a small product

    def on_one_thread() -> None:
        with blas.limit(limits=1, user_api="blas"):
            np.matmul(A, B, out=out)

    calls = {
        "NumPy, all threads": lambda: np.matmul(A, B, out=out),
        "NumPy, one thread": on_one_thread,
    }
    torch = installed("torch")
    if torch is not None:
        tensors = [torch.from_numpy(a) for a in (A, B, np.empty_like(out))]
        calls["PyTorch, all threads"] = lambda: torch.mm(*tensors[:2], out=tensors[2])
    times = in_turns(calls, repeats)
    truth = A[:4].astype(np.float64) @ B
    check(np.allclose(out[:4], truth, atol=1e-5 * n), f"SGEMM {n}")
    work = 2 * n**3 / 1e9
    return [figure(f"SGEMM {n}", v, "GFLOP/s", rates(work, t)) for v, t in times.items()]


def _copy(repeats: int, pool: ThreadPoolExecutor, n_bytes: int) -> list[Figure]:
    source = np.arange(n_bytes // 4, dtype=np.float32)
    target = np.empty_like(source)
    parts = tiles(len(source), -(-len(source) // available_cpus()))

    def copy() -> None:
        list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

    times = in_turns({"NumPy, all threads": copy}, repeats)
    check(np.array_equal(source, target), "the copy")
    work = 2 * source.nbytes / 1e9
    case = f"copy {n_bytes >> 20} MiB"
    return [figure(case, v, "GB/s", rates(work, t)) for v, t in times.items()]


def _exp(repeats: int, pool: ThreadPoolExecutor, entries: int) -> list[Figure]:
    x = np.linspace(-20, 0, IN_CACHE, dtype=np.float32)
    results = [np.empty_like(x) for _ in range(available_cpus())]
    rounds = max(1, entries // (len(x) * len(results)))

    def work(out: np.ndarray) -> None:
        for _ in range(rounds):
            np.exp(x, out=out)

    times = in_turns({"NumPy, all threads": lambda: list(pool.map(work, results))}, repeats)
    check(np.allclose(results[0], np.exp(x.astype(np.float64)), rtol=1e-5, atol=0), "exp")
    done = rounds * len(x) * len(results) / 1e9
    return [figure("exp, in cache", v, "Gentries/s", rates(done, t)) for v, t in times.items()]
