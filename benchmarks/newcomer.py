"""Plain data that a newcomer brings, in every shape: does each run give a sensible model?

    python -m benchmarks.newcomer --runs 2000
    python -m benchmarks.newcomer --only 137           # that one again

Digits, wine, breast cancer, iris, diabetes, Friedman's function, moons, heavy tails beside a
constant column, and integers with many equal rows; all of them or few, raw or scaled, 1 to 20 000
rows; 5 centers to all rows, at most 4000; a bandwidth of 0.1 to 100 times the median distance, or
found; 1 to 20 epochs; every solver with a ridge, and the default.

A run fails if it raises, warns, or gives a model that is worse than the mean (of classes: than the
commonest one) by more than 2 % on the rows it was trained on, or by half on 30 others or more.
The record (`--json`) has the worst ratios on others, of 300 or more with their number, as chance
explains more of few.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import pdist
from sklearn import datasets

import streamkern as sk
from benchmarks.harness import environment

Array = npt.NDArray[Any]
TRAINED, OTHERS, FEW = 1.02, 1.5, 30
MOST_ROWS, MOST_CENTERS = 20_000, 4000
MANY = 300
"""Rows on which a ratio is told apart from chance."""


class Case(NamedTuple):
    """name, rows X (n, d) and targets y (n,), of which the first `n_fit` are trained on."""

    name: str
    X: Array
    y: Array
    n_fit: int
    options: dict[str, Any]

    @property
    def classes(self) -> bool:
        """Whether the targets are."""
        return bool(self.y.dtype.kind in "iu")


def draw(seed: int) -> Case:
    """The case of a number."""
    rng = np.random.default_rng(seed)
    name, X, y = _data(rng)
    rows = rng.permutation(len(X))
    if rng.random() < 0.4:
        rows = rows[: int(rng.integers(min(3, len(X)), len(X) + 1))]
    X, y, n_fit = X[rows], y[rows], max(min(2, len(rows)), int(0.8 * len(rows)))
    if y.dtype.kind in "iu" and len(np.unique(y[:n_fit])) < 2:
        y = y.astype(np.float64)
    return Case(name, X, y, n_fit, _options(rng, X[:n_fit]))


def _data(rng: np.random.Generator) -> tuple[str, Array, Array]:
    n = int(np.exp(rng.uniform(0, np.log(MOST_ROWS))))
    few = int(rng.integers(10, 3000))
    makers = {
        "digits": lambda: _loaded("digits", [np.uint8, np.float32][rng.integers(2)]),
        "wine": lambda: _loaded("wine"),
        "breast cancer": lambda: _loaded("breast_cancer"),
        "iris": lambda: _loaded("iris"),
        "diabetes": lambda: _loaded("diabetes"),
        "friedman": lambda: datasets.make_friedman1(
            n, noise=rng.choice([0, 1.0]), random_state=int(rng.integers(1000))
        ),
        "moons": lambda: datasets.make_moons(
            n, noise=0.3, random_state=int(rng.integers(1000))
        ),
        "heavy tails": lambda: _heavy_tails(rng, few),
        "equal rows": lambda: _equal_rows(rng, few),
    }  # fmt: skip
    name = str(rng.choice(list(makers)))
    return (name, *makers[name]())


def _loaded(name: str, dtype: Any = np.float64) -> tuple[Array, Array]:
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    return X.astype(dtype), y


def _heavy_tails(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    X = rng.standard_t(1.5, (n, 5))
    X[:, 4] = 3.0
    return X, np.sin(X[:, 0])


def _equal_rows(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    X = rng.integers(0, 3, (n, 4)).astype(np.float64)
    return X, X[:, 0] + rng.standard_normal(n)


def _options(rng: np.random.Generator, X: Array) -> dict[str, Any]:
    n, scale = len(X), str(rng.choice(["auto", "none"]))
    solver = str(rng.choice(["auto", "block", "direct", "falkon"]))
    options: dict[str, Any] = {
        "kernel": str(rng.choice(["auto", "laplace", "gaussian", "matern52"])),
        "n_centers": int(
            np.clip(np.exp(rng.uniform(np.log(5), np.log(max(6, n)))), 1, min(n, MOST_CENTERS))
        ),
        "epochs": int(rng.choice([1, 1, 2, 5, 20])),
        "scale": scale,
        "solver": solver,
        "random_state": int(rng.integers(1000)),
    }
    if rng.random() < 0.6:
        seen = np.float64(X[:300])
        spread = seen.std(axis=0)
        if scale == "auto":
            seen = (seen - seen.mean(axis=0)) / np.where(spread > 0, spread, 1)
        distances = pdist(seen)
        median = np.median(distances[distances > 0]) if distances.any() else 1.0
        options["bandwidth"] = float(median * 10 ** rng.uniform(-1, 2))
    if solver == "falkon":
        options["epochs"] += 2
    if solver == "block" and rng.random() < 0.5 and options["n_centers"] > 8:
        options["block_size"] = options["n_centers"] // int(rng.choice([2, 4, 8]))
    return options


def judge(case: Case) -> tuple[list[str], float | None]:
    """What is wrong with the model of a case; and its error over the mean's on many other rows."""
    unseen: float | None = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            kind = sk.KernelClassifier if case.classes else sk.KernelRegressor
            model = kind(**case.options).fit(case.X[: case.n_fit], case.y[: case.n_fit])
        except sk.StreamkernError as error:
            if len(np.unique(case.X[: case.n_fit], axis=0)) < 2 and "coincide" in str(error):
                return [], None  # no bandwidth can be had of one row
            return [f"{type(error).__name__}: {error}"], None
        except ValueError as error:
            if case.n_fit < 2 and "minimum of 2" in str(error):
                return [], None  # scikit-learn's own refusal of a single row
            raise
        faults = [str(warning.message) for warning in said]
        for part, most in ((slice(case.n_fit), TRAINED), (slice(case.n_fit, None), OTHERS)):
            X, y = case.X[part], case.y[part]
            if part.start is not None and len(y) < FEW:
                continue
            ratio = _ratio(case, model.predict(X), y)
            if part.start is not None and len(y) >= MANY:
                unseen = ratio
            if not ratio <= most:
                where = "trained on" if part.start is None else "not seen"
                faults.append(f"error {ratio:.3g} times that of the mean on rows {where}")
    return faults, unseen


def _ratio(case: Case, found: Array, y: Array) -> float:
    """Of the error to that of the mean, or of the commonest class."""
    fitted = case.y[: case.n_fit]
    if case.classes:
        names, counts = np.unique(fitted, return_counts=True)
        error, plain = np.mean(found != y), np.mean(names[counts.argmax()] != y)
        return float((error + 0.02) / (plain + 0.02))
    error, plain = np.mean((found - y) ** 2), np.mean((fitted.mean() - y) ** 2)
    small = 1e-9 * max(float(np.mean(y**2)), 1e-30)
    return float((error + small) / (plain + small))


def main() -> int:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=2000)
    add("--first", type=int, default=0, help="number of the first case")
    add("--only", type=int, help="this case alone")
    add("--metric", default="none", help='such as "learn"')
    add("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.runs) if given.only is None else [given.only]
    bad, began, ratios = 0, time.perf_counter(), dict[int, float]()
    for number in numbers:
        case = draw(number)
        case.options["metric"] = given.metric
        faults, unseen = judge(case)
        if unseen is not None:
            ratios[number] = unseen
        if faults or given.only is not None:
            bad += bool(faults)
            print(f"{number}: {case.name}, {case.n_fit} rows, {case.options}: {faults}", flush=True)
        if number % 100 == 99:
            print(f"{number + 1}: {bad} failed, {time.perf_counter() - began:.0f} s", flush=True)
    print(f"{len(numbers)} runs, {bad} failed")
    worst = sorted(ratios.items(), key=lambda pair: -pair[1])[:10]
    print("worst on others:", ", ".join(f"{at}: {ratio:.3f}" for at, ratio in worst))
    if given.json is not None:
        record = {"runs": len(numbers), "first": given.first, "failed": bad, "judged": len(ratios),
                  "worst": worst, "metric": given.metric}  # fmt: skip
        text = json.dumps({"environment": environment(), **record}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
