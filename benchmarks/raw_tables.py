"""Raw tables, words and gaps included, with defaults, beside gradient boosting.

    python -m benchmarks.raw_tables                               # of installed packages
    python -m benchmarks.raw_tables --data FOLDER --json raw.json # of .csv and .parquet files
    python -m benchmarks.raw_tables --names computers --methods streamkern catboost

The target of a file is its last column; one of words has classes. A fifth of the rows, at most
8000, which are drawn anew for each seed, are for testing; at most --rows others are fitted. Nothing
is tuned. Ours get the data frame as it is, boosting gets words of the type `category`.

The error is the RMSE in standard deviations of the target, or the share of wrong classes; of
classes the log loss is shown as well. Each is the median over the seeds; "best" is the best
boosting's median. The last columns are medians of CPU seconds of `fit`, on --threads threads.
`benchmarks.package_tables` has the tables of packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

import streamkern as sk
from benchmarks.harness import environment, write_results
from benchmarks.package_tables import shipped
from streamkern.basics.text import text_table

OURS, QUICK = "streamkern", "streamkern, quick"
PACKAGES = {
    OURS: "sklearn", QUICK: "sklearn", "boosting": "sklearn", "lightgbm": "lightgbm",
    "xgboost": "xgboost", "catboost": "catboost",
}  # fmt: skip
TEST_ROWS = 8000
LEAST = 1e-4
"""Smallest error that a ratio is taken of."""
Records = dict[str, list[dict[str, Any]]]


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


def made(method: str, classes: bool, seed: int, words: list[str]) -> Any:
    """Return an estimator with its defaults. words : names of the columns of words."""
    if method in (OURS, QUICK):
        kind: Any = sk.KernelClassifier if classes else sk.KernelRegressor
        return kind(random_state=seed, effort="quick" if method == QUICK else "default")
    module = importlib.import_module("sklearn.ensemble" if method == "boosting" else method)
    task = "Classifier" if classes else "Regressor"
    if method == "boosting":
        kind = getattr(module, f"HistGradientBoosting{task}")
        return kind(random_state=seed, categorical_features="from_dtype")
    if method == "lightgbm":
        return getattr(module, f"LGBM{task}")(random_state=seed, verbose=-1)
    if method == "xgboost":
        return getattr(module, f"XGB{task}")(random_state=seed, enable_categorical=True)
    return getattr(module, f"CatBoost{task}")(
        random_seed=seed, verbose=0, allow_writing_files=False, cat_features=words
    )


def form_for(method: str, X: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the frame as the method takes it, and the names of the columns of words."""
    words = [str(name) for name in X if not pd.api.types.is_numeric_dtype(X[name])]
    if method in (OURS, QUICK):
        return X, words
    form = X.copy()
    for name in words:
        texts = X[name].astype(object).fillna("nan").astype(str)  # CatBoost takes no gaps of words
        form[name] = texts if method == "catboost" else X[name].astype("category")
    return form, words


def fit(frame: pd.DataFrame, method: str, seed: int, rows: int) -> dict[str, Any]:
    """Return the record of one fit."""
    y, X = frame.iloc[:, -1], frame.iloc[:, :-1]
    classes = not pd.api.types.is_numeric_dtype(y)
    order, n = np.random.default_rng(seed).permutation(len(y)), len(y)
    first, test = order[: min(n * 4 // 5, rows)], order[n * 4 // 5 :][:TEST_ROWS]
    labels, ids = np.unique(y.astype(str), return_inverse=True) if classes else (None, None)
    values = ids if ids is not None else (y - y.iloc[first].mean()) / y.iloc[first].std()
    target: npt.NDArray[Any] = np.asarray(values, np.int64 if classes else np.float64)
    form, words = form_for(method, X)
    model = made(method, classes, seed, words)
    began = time.process_time()
    model.fit(form.iloc[first], target[first])
    record = {"method": method, "seed": seed, "cpu_s": time.process_time() - began}
    held, truth = form.iloc[test], target[test]
    if labels is None:
        error = np.sqrt(np.mean((np.ravel(model.predict(held)) - truth) ** 2))
        return record | {"error": float(error)}
    shares = np.asarray(model.predict_proba(held), np.float64)
    place = {int(label): k for k, label in enumerate(model.classes_)}
    at = np.array([place.get(int(label), -1) for label in truth])
    likely = np.where(at < 0, 0.0, shares[np.arange(len(at)), at])
    record["log_loss"] = float(-np.log(np.maximum(likely, 1e-12)).mean())
    return record | {"error": float(np.mean(shares.argmax(axis=1) != at))}


def in_a_process(given: argparse.Namespace, name: str, method: str, seed: int) -> dict[str, Any]:
    """Return the record of a fit in a process of its own, or {} if it failed."""
    threads = {f"{library}_NUM_THREADS": str(given.threads) for library in ("OMP", "OPENBLAS")}
    command = [sys.executable, "-m", "benchmarks.raw_tables", "--one", method, "--seed", str(seed)]
    command += ["--names", name, "--rows", str(given.rows)]
    command += [] if given.data is None else ["--data", str(given.data)]
    done = subprocess.run(command, env=os.environ | threads, stdout=subprocess.PIPE, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def medians(records: Sequence[Mapping[str, Any]], figure: str) -> dict[str, float]:
    """Return the median of a figure over the seeds, by method."""
    found: dict[str, list[float]] = {}
    for record in records:
        if figure in record:
            found.setdefault(record["method"], []).append(record[figure])
    return {method: float(np.median(values)) for method, values in found.items()}


def summary(records: Records) -> str:
    """Return a line for each table, and the ratios to the best boosting over all of them."""
    lines, ratios = list[dict[str, Any]](), dict[str, list[float]]()
    for name, of_one in records.items():
        for figure in ("error", "log_loss"):
            found = medians(of_one, figure)
            others = [value for method, value in found.items() if method not in (OURS, QUICK)]
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
    there = [m for m, p in PACKAGES.items() if importlib.util.find_spec(p) is not None]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, help="folder of tables (default: those of installed packages)")
    add("--names", nargs="*", help="of tables")
    add("--methods", nargs="*", default=there, choices=there)
    add("--seeds", type=int, default=3)
    add("--rows", type=int, default=16_000, help="largest number of rows to fit")
    add("--threads", type=int, default=1)
    add("--json", type=Path, help="write all records here")
    add("--one", choices=there, help="fit this method alone, and print its record")
    add("--seed", type=int, default=0, help="seed of --one")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    tables = tables_of(given.data, given.names)
    if given.one is not None:
        print(json.dumps(fit(next(iter(tables.values())), given.one, given.seed, given.rows)))
        return
    records: Records = {}
    for name in tables:
        records[name] = []
        for seed in range(given.seeds):
            for method in given.methods:
                if record := in_a_process(given, name, method, seed):
                    records[name].append(record)
        print(f"{summary({name: records[name]})}\n", flush=True)
        if given.json is not None:
            circumstances = {"environment": environment(), "threads": given.threads}
            write_results(given.json, circumstances | {"tables": records})
    print(summary(records))


if __name__ == "__main__":
    main()
