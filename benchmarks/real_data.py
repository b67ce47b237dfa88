"""Compare errors, seconds and memory of methods on real tables, with defaults and tuned.

    python -m benchmarks.real_data --data FOLDER
    python -m benchmarks.real_data --data FOLDER --names bike --methods streamkern LightGBM
    python -m benchmarks.real_data --data FOLDER --rows 4000 --json real.json --plot real.png
    python -m benchmarks.real_data --data FOLDER --rows 4000 --json real.json --seeds 1 --tuned 3

A table is a file: .npz with X (n, d), y (n,), `task`, "regression" or another word for classes,
and optionally `test_mask` (n,); or .csv or .parquet with names of columns, whose target is the
last column (--target NAME) and whose words become a column for each value. Unless the file has a
mask, a fifth of the rows, at most 8000, is drawn for testing, for each seed. At most --rows others
are fitted. Features and values are standardised with the training rows.

The error is the RMSE in standard deviations of the target, or for classes the share of wrong rows;
their log loss is shown as well. Figures are medians over the seeds. "behind" is the median over
the tables of the ratio to the least error of the table, "worst" the largest such ratio, and "best"
the number of tables on which it is at most 1.02. The methods are the ones of `benchmarks.peers`,
each fit in a process of its own on --threads threads. "CPU s" are processor seconds of `fit`, and
"s" wall-clock seconds, after a fit to a few rows for imports and compilers. "us" is the processor
time to predict a row, in microseconds. The memory is the peak of the process.

--tuned F gives the methods with a `Peer.grid` a random search with five folds, for F times the CPU
seconds of "streamkern", and then a fit with the best parameters; its CPU seconds include both.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fits import (
    TEST_ROWS,
    Array,
    Record,
    Records,
    Split,
    behind,
    error_of,
    fit_all,
    measured,
    medians,
    options,
)  # fmt: skip
from benchmarks.frontier import plot
from benchmarks.peers import PEERS, Peer, installed
from benchmarks.tables import load_tables
from streamkern.basics.text import text_table

FOLDS = 5
OURS, TUNED = "streamkern", ", tuned"
NEAR = 1.02
HOPELESS = 1.05
"""A search gives up parameters whose error on the first folds is as much above the best's."""


# -- tables ------------------------------------------------------------------------------------


def load(folder: Path | None, target: str | None) -> dict[str, dict[str, Any]]:
    """Return X, y and task, and possibly test_mask, of each table by name."""
    files = [] if folder is None else sorted([*folder.glob("*.csv"), *folder.glob("*.parquet")])
    results = {path.stem: _of_columns(path, target) for path in files}
    if folder is None or not files or any(folder.glob("*.npz")):
        results |= load_tables(folder)
    return results


def _of_columns(path: Path, target: str | None) -> dict[str, Any]:
    import pandas as pd

    frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    name = target or frame.columns[-1]
    if name not in frame:
        raise SystemExit(f"--target {name} is not a column of {path}")
    y = frame.pop(name).to_numpy()
    X = pd.get_dummies(frame, dtype=float).to_numpy(np.float64)
    values = y.dtype.kind == "f" or (y.dtype.kind in "iu" and len(np.unique(y)) > 50)
    return {"X": X, "y": y, "task": "regression" if values else "classes"}


def split(data: Mapping[str, Any], seed: int, rows: int | None = None) -> Split:
    """Training rows, at most `rows`, and test rows; float32, standardised."""
    rng = np.random.default_rng(seed)
    X, y, n = np.asarray(data["X"], np.float64), np.asarray(data["y"]), len(data["X"])
    test = np.zeros(n, bool)
    test[rng.permutation(n)[: n // 5]] = True
    if "test_mask" in data:
        test = data["test_mask"].astype(bool)
    first = rng.permutation(np.flatnonzero(~test))[:rows]
    held = rng.permutation(np.flatnonzero(test))[:TEST_ROWS]
    spread = X[first].std(axis=0)
    X = ((X - X[first].mean(axis=0)) / np.where(spread > 0, spread, 1)).astype(np.float32)
    classes = str(data["task"]) != "regression"
    if classes:
        y = np.unique(y, return_inverse=True)[1].astype(np.int64)
    else:
        y = ((y - y[first].mean()) / y[first].std()).astype(np.float32)
    return Split(X[first], y[first], X[held], y[held], classes)


# -- one fit -----------------------------------------------------------------------------------


def tuned(peer: Peer, X: Array, y: Array, classes: bool, seed: int, budget: float) -> Any:
    """Return the parameters with the least error over the folds, of as many as there is time for.

    budget : CPU seconds
    """
    from sklearn.model_selection import KFold, ParameterSampler, StratifiedKFold

    folds = [*(StratifiedKFold if classes else KFold)(FOLDS).split(X, y)]
    total = int(np.prod([len(values) for values in peer.grid.values()]))
    best, least, began = dict[str, Any](), list[float](), time.process_time()
    for given in [{}, *ParameterSampler(peer.grid, total, random_state=seed)]:
        errors = list[float]()
        for fit, held in folds:
            if least and time.process_time() - began > budget:
                return best
            model = peer.make(classes, seed, **given).fit(X[fit], y[fit])
            errors.append(error_of(model, X[held], y[held], classes))
            if least and sum(errors) > HOPELESS * sum(least[: len(errors)]):
                break
        else:
            if not least or sum(errors) < sum(least):
                best, least = given, errors
    return best


def fit(
    data: Mapping[str, Any], method: str, seed: int, records: Sequence[Record],
    args: argparse.Namespace,
) -> Record:  # fmt: skip
    """Return the figures of a fit. records : give the time of a search."""
    warnings.simplefilter("ignore")
    name, is_tuned = method.removesuffix(TUNED), method.endswith(TUNED)
    peer, rows = PEERS[name], split(data, seed, args.rows)
    rows = rows._replace(X=rows.X[: peer.most], y=rows.y[: peer.most])
    few = np.random.default_rng(seed).normal(size=(60, rows.X.shape[1])).astype(np.float32)
    peer.make(rows.classes, seed).fit(few, np.resize(np.arange(2), 60).astype(rows.y.dtype))
    began, found = time.process_time(), dict[str, Any]()
    if is_tuned:
        ours = [r["cpu_s"] for r in records if (r["method"], r["seed"]) == (OURS, seed)]
        budget = args.tuned * ours[0]
        found = tuned(peer, rows.X, rows.y, rows.classes, seed, budget)
    searched = time.process_time() - began
    record = measured(peer.make(rows.classes, seed, **found), rows)
    if is_tuned:
        record |= {"searched_s": searched, "parameters": found}
        record["cpu_s"] += searched
    return record


# -- all of them -------------------------------------------------------------------------------


def summary(records: Records) -> str:
    """Return a line for each method with its errors by table, and one with its log losses."""
    tables = []
    for figure, columns in (
        ("error", {"cpu_s": "CPU s", "seconds": "s", "predict_us": "us", "peak_mib": "MiB"}),
        ("log_loss", {}),
    ):
        results = {n: by for n, of_one in records.items() if (by := medians(of_one, figure))}
        lines = list[dict[str, str]]()
        for method, ratios in behind(records, figure).items():
            line = {figure: method}
            line |= {n: f"{by[method]:.4f}" if method in by else "-" for n, by in results.items()}
            line |= {"behind": f"{np.median(ratios):.3g}", "worst": f"{max(ratios):.3g}"}
            line["best"] = f"{sum(ratio <= NEAR for ratio in ratios)} of {len(ratios)}"
            line |= {head: f"{typical(records, method, of):.3g}" for of, head in columns.items()}
            lines.append(line)
        tables.append(text_table(lines, list(lines[0])) if lines else "")
    return "\n\n".join(tables).rstrip()


def typical(records: Records, method: str, figure: str) -> float:
    """Return the median over the tables."""
    by_table = [medians(of_one, figure).get(method, np.nan) for of_one in records.values()]
    return float(np.nanmedian(by_table))


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder of tables (default: what scikit-learn brings)")
    add("--target", help="column of .csv and .parquet files (default: the last one)")
    add("--tuned", type=float, default=0.0, help=f"times the CPU seconds of {OURS!r}")
    add("--plot", type=Path, help="draw errors and CPU seconds here, as a PNG")
    options(parser, installed(), rows=None)
    args = parser.parse_args()
    tables, methods = load(args.data, args.target), list(args.methods)
    if args.tuned:
        methods += [f"{method}{TUNED}" for method in methods if PEERS[method].grid]
    if args.tuned and OURS not in methods:
        parser.error(f"--tuned needs {OURS!r} among --methods, whose seconds it is told in")
    chosen = {name: tables[name] for name in args.names or tables}
    records = fit_all(args, chosen, methods, fit, summary)
    print(summary(records))
    if args.plot is not None:
        points = {
            method if len(ratios) == len(records) else f"{method} ({len(ratios)} tables)": (
                typical(records, method, "cpu_s"), float(np.median(ratios)),
            )
            for method, ratios in behind(records, "error").items()
        }  # fmt: skip
        behind_best = "error, relative to the best of the table (median of tables)"
        plot(args.plot, points, "CPU seconds of a fit (median of tables)", behind_best)


if __name__ == "__main__":
    sys.exit(main())
