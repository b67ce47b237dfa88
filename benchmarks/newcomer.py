"""Check that plain data of any kind and shape give a sensible model.

    python -m benchmarks.newcomer --runs 2000
    python -m benchmarks.newcomer --only 137           # repeat one run
    python -m benchmarks.newcomer --tables --runs 2000 # few different rows, odd targets

The data are digits, wine, breast cancer, iris, diabetes, Friedman's function, moons, heavy tails
with a constant column, and integers with many equal rows. All rows are used or few, raw or scaled,
1 to 20 000; there are 5 centers to all rows, at most 4000; the bandwidth is 0.1 to 100 times the
median distance, or chosen; there are 1 to 20 epochs; the solver is the default, or one with a
ridge.

With `--tables` the data are those of `plain_tables`, mostly with defaults. The error is then also
compared with the mean target of equal rows, if this is the best answer, and with
HistGradientBoosting.

A run fails if it

- raises an error, or warns (except that the model is no better than the mean, or that a few values
  determine the standard deviation of a feature, if this is so);
- is worse than the mean (for classes, than the most frequent class) by more than 2 % on its
  training rows, or by half on 30 or more other rows;
- is worse than the mean of equal rows by more than 5 %, plus a hundredth of the error of the mean,
  on 300 or more other rows, with at least 8 training rows for each different row.

The record (`--json`) has the worst ratios on other rows, for 300 or more of them, with their
number.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import pdist
from sklearn import datasets, ensemble

import streamkern as sk
from benchmarks import plain_tables
from benchmarks.harness import environment, json_parser, write_results

Array = npt.NDArray[Any]
TRAINED, OTHERS, FEW = 1.02, 1.5, 30
MOST_ROWS, MOST_CENTERS = 20_000, 4000
MANY = 300
"""Rows on which a ratio is told apart from chance."""
CELL, WORSE, SLACK = 8, 1.05, 0.01
"""See above: rows of a cell, ratio to the mean of cells, share of the error of the mean."""


class Case(NamedTuple):
    """name, rows X (n, d) and targets y (n,), of which the first `n_fit` are trained on. cells :
    see `plain_tables.Table`."""

    name: str
    X: Any
    y: Array
    n_fit: int
    options: dict[str, Any]
    cells: Array | None = None

    @property
    def classes(self) -> bool:
        """True if the targets are classes."""
        return bool(self.y.dtype.kind in "iu")


def draw(seed: int) -> Case:
    """Return the case with a number."""
    rng = np.random.default_rng(seed)
    name, X, y = _data(rng)
    rows = rng.permutation(len(X))
    if rng.random() < 0.4:
        rows = rows[: int(rng.integers(min(3, len(X)), len(X) + 1))]
    X, y, n_fit = X[rows], y[rows], max(min(2, len(rows)), int(0.8 * len(rows)))
    if y.dtype.kind in "iu" and len(np.unique(y[:n_fit])) < 2:
        y = y.astype(np.float64)
    return Case(name, X, y, n_fit, _options(rng, X[:n_fit]))


def draw_table(seed: int) -> Case:
    """Return the case of `plain_tables` with a number, mostly with the defaults."""
    rng = np.random.default_rng([seed, 1])
    name, table = plain_tables.draw(rng)
    X, y, n = table.X, table.y, len(table.y)
    n_fit = max(min(2, n), n // 2)
    if y.dtype.kind in "iu" and len(np.unique(y[:n_fit])) < 2:
        y = y.astype(np.float64)
    options: dict[str, Any] = {"random_state": int(rng.integers(1000))}
    if rng.random() < 0.5:
        options["solver"] = str(rng.choice(["block", "direct", "falkon"]))
        options["kernel"] = str(rng.choice(["auto", "laplace", "gaussian"]))
        options["metric"] = str(rng.choice(["none", "auto"]))
    return Case(name, X, y, n_fit, options, table.cells)


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


class Verdict(NamedTuple):
    """faults : sentences. Errors on many other rows, over those of the mean (unseen), of the mean
    of equal rows (cells) and of HistGradientBoosting (boosted); None where that is not known."""

    faults: list[str]
    unseen: float | None = None
    cells: float | None = None
    boosted: float | None = None


def judge(case: Case) -> Verdict:
    """Fit the model of a case; return its faults, and errors relative to other predictions."""
    fit, others = slice(case.n_fit), slice(case.n_fit, None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            kind = sk.KernelClassifier if case.classes else sk.KernelRegressor
            model = kind(**case.options).fit(case.X[fit], case.y[fit])
        except sk.StreamkernError as error:
            if case.n_fit < 2 and "minimum of 2" in str(error):
                return Verdict([])  # scikit-learn's own refusal of a single row
            return Verdict([f"{type(error).__name__}: {error}"])
        seen = _ratio(case, model.predict(case.X[fit]), case.y[fit])
        texts = [str(warning.message) for warning in said]
        faults = [
            text for text in texts
            if "nine tenths of the values" not in text  # of heavy tails it should
            and ("explains nothing" not in text or seen < 0.95)
        ]  # fmt: skip
        if not seen <= TRAINED:
            faults.append(f"error {seen:.3g} times that of the mean on rows trained on")
        if len(case.y) - case.n_fit < FEW:
            return Verdict(faults)
        answers, y = model.predict(case.X[others]), case.y[others]
        unseen = _ratio(case, answers, y)
        if not unseen <= OTHERS:
            faults.append(f"error {unseen:.3g} times that of the mean on rows not seen")
        if len(y) < MANY:
            return Verdict(faults)
        by_cell = boosted = None
        if case.cells is not None:
            by_cell = _beside(case, answers, _of_cells(case))
            if by_cell > WORSE and case.n_fit >= CELL * len(np.unique(case.cells)):
                faults.append(f"error {by_cell:.3g} times that of the mean of equal rows")
        if case.name in plain_tables.TABLES:
            boosted = _beside(case, answers, _boosted(case))
    return Verdict(faults, unseen, by_cell, boosted)


def _of_cells(case: Case) -> Array:
    """Return the mean target, or the most frequent class, of the equal training rows."""
    assert case.cells is not None
    fit, others = slice(case.n_fit), slice(case.n_fit, None)
    found = plain_tables.cell_means(case.cells[fit], case.y[fit], case.cells[others])
    return (found > 0.5).astype(int) if case.classes else found


def _boosted(case: Case) -> Array:
    """Return the predictions of HistGradientBoosting with its defaults; text columns are
    categories."""
    X = case.X
    if hasattr(X, "columns"):
        X = X.astype({k: "category" for k in X.columns if X[k].dtype.kind not in "biuf"})
    kind = ensemble.HistGradientBoostingRegressor
    if case.classes:
        kind = ensemble.HistGradientBoostingClassifier
    model = kind(random_state=0, categorical_features="from_dtype")
    found: Array = model.fit(X[: case.n_fit], case.y[: case.n_fit]).predict(X[case.n_fit :])
    return found


def _beside(case: Case, answers: Array, others: Array) -> float:
    """Return the error divided by the error of other predictions; 0.01 of the mean's error is
    added to both."""
    y, fitted = case.y[case.n_fit :], case.y[: case.n_fit]
    if case.classes:
        errors, plain = [np.mean(found != y) for found in (answers, others)], 1.0
    else:
        errors = [np.mean((found - y) ** 2) for found in (answers, others)]
        plain = float(np.mean((fitted.mean() - y) ** 2))
    slack = SLACK * plain + 1e-300
    return float((errors[0] + slack) / (errors[1] + slack))


def _ratio(case: Case, found: Array, y: Array) -> float:
    """Return the error divided by the error of the mean, or of the most frequent class."""
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
    parser = json_parser(__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=2000)
    add("--first", type=int, default=0, help="number of the first case")
    add("--only", type=int, help="this case alone")
    add("--metric", help='such as "learn"; by default "none", with --tables as drawn')
    add("--tables", action="store_true", help="few different rows, odd targets")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.runs) if args.only is None else [args.only]
    bad, began, verdicts = 0, time.perf_counter(), dict[int, Verdict]()
    for number in numbers:
        case = draw_table(number) if args.tables else draw(number)
        if args.metric or not args.tables:
            case.options["metric"] = args.metric or "none"
        verdicts[number] = verdict = judge(case)
        if verdict.faults or args.only is not None:
            bad += bool(verdict.faults)
            report = f"{number}: {case.name}, {case.n_fit} rows, {case.options}"
            print(f"{report}: {verdict}", flush=True)
        if number % 100 == 99:
            print(f"{number + 1}: {bad} failed, {time.perf_counter() - began:.0f} s", flush=True)
    print(f"{len(numbers)} runs, {bad} failed")
    record: dict[str, Any] = {"runs": len(numbers), "first": args.first, "failed": bad}
    record |= {"metric": args.metric, "tables": args.tables}
    for name in Verdict._fields[1:]:
        results = {at: getattr(v, name) for at, v in verdicts.items()}
        ratios = sorted(
            ((at, ratio) for at, ratio in results.items() if ratio is not None),
            key=lambda pair: -pair[1],
        )
        record[name] = {"judged": len(ratios), "worst": ratios[:10]}
        if ratios:
            record[name]["median"] = float(np.median([ratio for _, ratio in ratios]))
        print(f"worst of {len(ratios)} {name}:", *(f"{at}: {r:.3f}" for at, r in ratios[:10]))
    write_results(args.json, {"environment": environment(), **record})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
