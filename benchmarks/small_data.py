"""Measure the seconds of a fit on small tables without a metric, from the call of `fit` to its end.

"warm" is a fit like an earlier one in the same process. "first" is the first fit in a process of
its own, including imports and compilation, but without the import of NumPy, scikit-learn's data
sets and `streamkern` itself.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, make_friedman1, make_moons

import streamkern as sk
from benchmarks.harness import REPOSITORY, Figure, check, figure

REPEATS = 5
SMALL = {"tables": ("426 x 30",), "first": False}


def _breast_cancer() -> tuple[Any, Any, Any]:
    X, y = load_breast_cancer(return_X_y=True)
    return sk.KernelClassifier(metric="none"), X[:426], y[:426]


def _moons() -> tuple[Any, Any, Any]:
    return sk.KernelClassifier(metric="none"), *make_moons(3750, noise=0.2, random_state=0)


def _friedman() -> tuple[Any, Any, Any]:
    X, y = make_friedman1(20_000, 16, noise=1.0, random_state=0)
    return sk.KernelRegressor(metric="none"), X, y


TABLES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "426 x 30": _breast_cancer, "3750 x 2": _moons, "20000 x 16": _friedman,
}  # fmt: skip
SCORES = {"426 x 30": 0.97, "3750 x 2": 0.96, "20000 x 16": 0.8}
"""On the rows themselves, that a fit has to reach to count as one."""


def measure(
    repeats: int, *, tables: tuple[str, ...] = tuple(TABLES), first: bool = True
) -> list[Figure]:
    """Return the figures of each table, with the default number of centers."""
    figures = []
    for name in tables:
        if first:
            times = [_in_its_own_process(name) for _ in range(repeats)]
            figures.append(figure(name, "first", "s", times))
        seconds(name)
        figures.append(figure(name, "warm", "s", [seconds(name) for _ in range(repeats)]))
    return figures


def seconds(name: str) -> float:
    """Return the seconds of one fit."""
    model, X, y = TABLES[name]()
    began = time.perf_counter()
    model.fit(X, y)
    elapsed_s = time.perf_counter() - began
    some = np.random.default_rng(0).permutation(len(X))[:2000]
    score = model.score(X[some], y[some])
    check(score >= SCORES[name], f"the fit of {name} (score {score:.3f})")
    return elapsed_s


def _in_its_own_process(name: str) -> float:
    code = f"from benchmarks.small_data import seconds; print(seconds({name!r}))"
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return float(completed.stdout)
