"""Part of `gpu_step`: a plain rendering of EigenPro 4 beside this package's solvers."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import streamkern as sk
from benchmarks.renderings import EigenPro4
from streamkern.backend.base import Array
from tools.gpu_clock import Figures, guarded
from tools.gpu_solver import distances, made_problem
from tools.gpu_step_parts import LATE, Bench
from tools.gpu_step_training import BANDWIDTH, HELD_OUT


def eigenpro4(
    bench: Bench, entry: Figures, *, p: int, n: int, d: int, c: int, epochs: int, level: int,
    sample: int,
) -> None:  # fmt: skip
    """Train by a plain rendering of EigenPro 4, and by this package's solvers, on the same rows.

    All evaluate the kernel with this package's code, in "high".
    """
    entry |= {"centers": p, "rows": n, "features": d, "outputs": c, "epochs": epochs}
    X, Y = made_problem(n + min(n, HELD_OUT), d, c)
    rows, test = (X[:n], Y[:n]), (X[n:], Y[n:])
    methods = {"rendering": partial(_rendering, bench, rows, test, p, epochs, level, sample)} | {
        name: partial(_ours, bench, name, rows, test, p, epochs) for name in ("eigenpro4", "block")
    }
    for name, method in methods.items():
        entry[name] = LATE if bench.late() else guarded(method)
        bench.backend.release()


def _rendering(
    bench: Bench, rows: Any, test: Any, p: int, epochs: int, level: int, sample: int
) -> Figures:
    backend, op = (
        bench.backend,
        distances(bench.backend, "high", rows[0].shape[1], bandwidth=BANDWIDTH),
    )

    def kernel(A: Array, B: Array) -> Array:
        return op.matrix(op.points(A, left=True), op.points(B, right=True))

    X, Y, X_test, Y_test = (backend.asarray(a) for a in (*rows, *test))
    began = time.perf_counter()
    solver = EigenPro4(kernel, X, Y, X[:p], level=level, sample=sample, backend=backend)
    backend.synchronize()
    figures: Figures = {"setup_s": time.perf_counter() - began}
    began = time.perf_counter()
    for _ in range(epochs):
        solver.epoch()
    backend.synchronize()
    figures["epoch_s"] = (time.perf_counter() - began) / epochs
    residuals = kernel(X_test, X[:p]) @ solver.alpha - Y_test
    return figures | {
        "test_mse": float((residuals**2).mean()), "batch": solver.batch, "period": solver.period
    }  # fmt: skip


def _ours(bench: Bench, name: str, rows: Any, test: Any, p: int, epochs: int) -> Figures:
    X, Y = rows
    config = sk.RunConfig.from_tables({
        "data": {"train": "memory", "epochs": epochs, "scale": "none"},
        "model": {"kernel": "laplace", "bandwidth": BANDWIDTH * X.shape[1] ** 0.5,
                  "metric": "none", "fit_intercept": False},
        "solver": {"name": name},
        "run": {"device": bench.device, "precision": "high", "calibrate": False},
    })  # fmt: skip
    began = time.perf_counter()
    result = sk.train_model(config, source=sk.ArraySource(X, Y), centers=X[:p])
    took, loop_s = time.perf_counter() - began, result.timing["loop_s"]
    found = result.model.evaluate(sk.ArraySource(*test))
    result.model.backend.close()
    return {"setup_s": took - loop_s, "epoch_s": loop_s / epochs, "test_mse": found["mse"]}
