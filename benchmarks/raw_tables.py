"""Compare the defaults with gradient boosting on raw tables with words and missing values.

    python -m benchmarks.raw_tables                               # of installed packages
    python -m benchmarks.raw_tables --data FOLDER --json raw.json # of .csv and .parquet files
    python -m benchmarks.raw_tables --names computers --methods streamkern CatBoost

The target of a file is its last column; a target of words has classes. For each seed, a fifth of
the rows, at most 8000, is drawn for testing; at most --rows others are fitted. Nothing is tuned.
streamkern gets the data frame unchanged, and boosting gets words of the type `category`.

The error is the RMSE in standard deviations of the target, or the share of wrong classes; for
classes, the log loss is shown as well. Figures are medians over the seeds; "best" is the median of
the best boosting method. The last columns are medians of the CPU seconds of `fit`, on --threads
threads. `benchmarks.package_tables` has the tables of packages.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmarks.fits import (
    LEAST,
    TEST_ROWS,
    Record,
    Records,
    Split,
    fit_all,
    measured,
    medians,
    options,
)  # fmt: skip
from benchmarks.package_tables import shipped
from benchmarks.peers import PEERS, installed
from streamkern.basics.text import text_table

OURS = ("streamkern", "streamkern, quick")
METHODS = (*OURS, "HistGradientBoosting", "LightGBM", "XGBoost", "CatBoost")


def tables_of(folder: Path | None, names: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    """Return the tables by name, with the target as last column."""
    if folder is None:
        return shipped(names)
    files = sorted([*folder.glob("*.csv"), *folder.glob("*.parquet")])
    return {
        path.stem: pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
        for path in files
        if not names or path.stem in names
    }


def form_for(method: str, X: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the frame as the method takes it, and parameters that name the columns of words."""
    words = [str(name) for name in X if not pd.api.types.is_numeric_dtype(X[name])]
    if method in OURS:
        return X, {}
    form = X.copy()
    for name in words:
        texts = X[name].astype(object).fillna("nan").astype(str)  # CatBoost takes no gaps of words
        form[name] = texts if method == "CatBoost" else X[name].astype("category")
    return form, {"cat_features": words} if method == "CatBoost" else {}


def fit(
    frame: pd.DataFrame, method: str, seed: int, _: Sequence[Record], args: argparse.Namespace
) -> Record:
    """Return the figures of one fit."""
    warnings.simplefilter("ignore")
    y, X = frame.iloc[:, -1], frame.iloc[:, :-1]
    classes = not pd.api.types.is_numeric_dtype(y)
    order, n = np.random.default_rng(seed).permutation(len(y)), len(y)
    first, test = order[: min(n * 4 // 5, args.rows)], order[n * 4 // 5 :][:TEST_ROWS]
    ids = np.unique(y.astype(str), return_inverse=True)[1] if classes else None
    values = ids if ids is not None else (y - y.iloc[first].mean()) / y.iloc[first].std()
    target: npt.NDArray[Any] = np.asarray(values, np.int64 if classes else np.float64)
    form, parameters = form_for(method, X)
    model = PEERS[method].make(classes, seed, **parameters)
    rows = Split(form.iloc[first], target[first], form.iloc[test], target[test], classes)
    return measured(model, rows)


def summary(records: Records) -> str:
    """Return a line for each table, and the ratios to the best boosting over all of them."""
    lines, ratios = list[dict[str, Any]](), dict[str, list[float]]()
    for name, of_one in records.items():
        for figure in ("error", "log_loss"):
            found = medians(of_one, figure)
            others = [value for method, value in found.items() if method not in OURS]
            if not others:
                continue
            best, seconds = min(others), medians(of_one, "cpu_s")
            line = {"table": name, "figure": figure}
            for method, value in found.items():
                line[method] = f"{value:.4f}"
                ratio = max(value, LEAST) / max(best, LEAST)
                ratios.setdefault(f"{method}, {figure}", []).append(ratio)
            line |= {f"{method} s": f"{seconds[method]:.3g}" for method in found}
            lines.append(line)
    heads = list(dict.fromkeys(head for line in lines for head in line))
    means = [
        {"ratio to the best boosting": name, "median": np.median(r), "worst": max(r)}
        for name, r in ratios.items()
    ]
    return f"{text_table(lines, heads)}\n\n{text_table(means, list(means[0])) if means else ''}"


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder of tables (default: those of installed packages)")
    options(parser, [name for name in METHODS if name in installed()], rows=16_000)
    args = parser.parse_args()
    tables = tables_of(args.data, args.names)
    print(summary(fit_all(args, tables, args.methods, fit, summary)))


if __name__ == "__main__":
    main()
