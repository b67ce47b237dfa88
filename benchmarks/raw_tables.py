"""Tables as they are, words, dates and gaps included, with defaults, beside gradient boosting.

    python -m benchmarks.raw_tables --data FOLDER                 # of .csv files
    python -m benchmarks.raw_tables --data FOLDER --json raw_tables.json

A figure is the mean over the seeds of the error on a fifth of the rows, which is drawn anew for
each: root mean squared error over the standard deviation of the target, or the share that is wrong.
Nothing is tuned. "encoded" is our estimator on the data frame; "one-hot" is it on numbers made by
scikit-learn: one-hot words (the 40 most frequent of each column), mean for gaps, days for dates,
all standardised. "boosting" is `HistGradientBoosting` with its own handling of categories and gaps.
The tables are those of github.com/mwaskom/seaborn-data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import streamkern as sk
from benchmarks.harness import environment, write_results
from streamkern.basics.text import text_table


class Task(NamedTuple):
    """target : its column. dropped : what tells it. dates : columns of text that are some."""

    target: str
    dropped: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    classes: bool = False


TASKS = {
    "diamonds": Task("price"),
    "taxis": Task("fare", ("total", "tip", "tolls"), ("pickup", "dropoff")),
    "mpg": Task("mpg", ("name",)),
    "tips": Task("tip"),
    "titanic": Task("survived", ("alive",), classes=True),
    "penguins": Task("species", classes=True),
}


def in_days(X: pd.DataFrame) -> pd.DataFrame:
    """Dates as days."""
    dates = {
        name: (X[name] - pd.Timestamp(0)) / pd.Timedelta(days=1)
        for name in X.select_dtypes("datetime")
    }
    return X.assign(**dates)


def boosted(task: Task) -> Any:
    """Boosting on the frame, words as categories."""
    kind = HistGradientBoostingClassifier if task.classes else HistGradientBoostingRegressor
    return kind(categorical_features="from_dtype", random_state=0)


def ours(task: Task) -> Any:
    """Our estimator with its defaults."""
    return sk.KernelClassifier() if task.classes else sk.KernelRegressor()


def by_hand(task: Task) -> Any:
    """The same behind scikit-learn's encoders."""
    words = OneHotEncoder(max_categories=40, handle_unknown="ignore", sparse_output=False)
    each = make_column_transformer(
        (words, make_column_selector(dtype_exclude="number")), remainder=SimpleImputer()
    )
    return make_pipeline(each, StandardScaler(), ours(task))


def frames(X: pd.DataFrame) -> dict[str, tuple[Callable[[Task], Any], pd.DataFrame]]:
    """What is fitted, and to which form of the rows."""
    words = {n: X[n].astype("category") for n in X.select_dtypes(["object", "str", "bool"])}
    return {
        "encoded": (ours, X),
        "one-hot": (by_hand, in_days(X)),
        "boosting": (boosted, in_days(X).assign(**words)),
    }


def run(data: Path, name: str, seeds: int) -> dict[str, dict[str, float]]:
    """Error and seconds of every method on a table."""
    task = TASKS[name]
    rows = pd.read_csv(data / f"{name}.csv", parse_dates=list(task.dates))
    rows = rows.dropna(subset=[task.target])
    y, X = rows[task.target], rows.drop(columns=[task.target, *task.dropped])
    found: dict[str, dict[str, float]] = {}
    for method, (make, form) in frames(X).items():
        errors, began = [], time.perf_counter()
        for seed in range(seeds):
            split = train_test_split(form, y, test_size=0.2, random_state=seed)
            model = make(task).fit(split[0], split[2])
            score = model.score(split[1], split[3])
            errors.append(1 - score if task.classes else float(np.sqrt(max(0.0, 1 - score))))
        seconds = (time.perf_counter() - began) / seeds
        found[method] = {"error": float(np.mean(errors)), "seconds": seconds}
        print(name, method, found[method], flush=True)
    return found


def main() -> None:
    """Print the table of errors; write all of it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--names", nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {name: run(given.data, name, given.seeds) for name in given.names}
    lines = [{"table": n} | {m: k["error"] for m, k in found[n].items()} for n in found]
    print(text_table(lines, list(lines[0])))
    if given.json is not None:
        record = {"environment": environment(), "seeds": given.seeds, "tables": found}
        write_results(given.json, record)


if __name__ == "__main__":
    main()
