"""Real tables: quality, seconds and memory beside other methods, with defaults and tuned.

    python -m benchmarks.real_data --data FOLDER
    python -m benchmarks.real_data --data FOLDER --names bike --methods streamkern lightgbm
    python -m benchmarks.real_data --data FOLDER --tuned 10 --json real.json --plot real.png

A table is a file: .npz with X (n, d), y (n,), `task`, "regression" or another word for classes, and
maybe `test_mask` (n,); or .csv or .parquet with a row of names, whose target is the last column
(--target NAME), words becoming a column for each value. A fifth of the rows, drawn anew for each
seed, are for testing, unless the file says which. Features and values are standardised with the
training rows.

The error is the RMSE in standard deviations of the target, of classes the share that is wrong. The
figure is the median over the seeds; "behind" is its ratio to the least of the row. The methods are
`benchmarks.peers`, each fit a process of its own on --threads threads: seconds are those of `fit`
after one of a few rows, for imports and compilers; memory is the most that the process had.
--tuned F gives those that have parameters a random search, five folds, for F times the seconds of
"streamkern, metric", then a fit with the best.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness import environment, write_results
from benchmarks.peers import PEERS, Peer, installed
from benchmarks.tables import load_tables
from streamkern.basics.text import text_table

Array = npt.NDArray[Any]
Records = dict[str, list[dict[str, Any]]]
FOLDS = 5
OURS = "streamkern, metric"
NEAR = 1.02
LEAST = 1e-4
"""Error that smaller ones count as, so that there is a ratio to no wrong row at all."""


class Split(NamedTuple):
    """X (n, d) float32; y (n,), values over their spread, or class numbers."""

    X: Array
    y: Array
    X_test: Array
    y_test: Array
    classes: bool


# -- tables ------------------------------------------------------------------------------------


def load(folder: Path | None, target: str | None) -> dict[str, dict[str, Any]]:
    """By name: X, y, task, and maybe test_mask."""
    files = [] if folder is None else sorted([*folder.glob("*.csv"), *folder.glob("*.parquet")])
    found = {path.stem: _of_columns(path, target) for path in files}
    if folder is None or not files or any(folder.glob("*.npz")):
        found |= load_tables(folder)
    return found


def _of_columns(path: Path, target: str | None) -> dict[str, Any]:
    import pandas as pd

    frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    name = target or frame.columns[-1]
    if name not in frame:
        raise SystemExit(f"--target {name} is no column of {path}")
    y = frame.pop(name).to_numpy()
    X = pd.get_dummies(frame, dtype=float).to_numpy(np.float64)
    values = y.dtype.kind == "f" or (y.dtype.kind in "iu" and len(np.unique(y)) > 50)
    return {"X": X, "y": y, "task": "regression" if values else "classes"}


def split(data: Mapping[str, Any], seed: int) -> Split:
    """Training and test rows, standardised."""
    rng = np.random.default_rng(seed)
    X, y, n = np.asarray(data["X"], np.float64), np.asarray(data["y"]), len(data["X"])
    test = np.zeros(n, bool)
    test[rng.permutation(n)[: n // 5]] = True
    if "test_mask" in data:
        test = data["test_mask"].astype(bool)
    rows = rng.permutation(np.flatnonzero(~test))
    spread = X[rows].std(axis=0)
    X = ((X - X[rows].mean(axis=0)) / np.where(spread > 0, spread, 1)).astype(np.float32)
    classes = str(data["task"]) != "regression"
    if classes:
        y = np.unique(y, return_inverse=True)[1].astype(np.int64)
    else:
        y = ((y - y[rows].mean()) / y[rows].std()).astype(np.float32)
    return Split(X[rows], y[rows], X[test], y[test], classes)


# -- one fit -----------------------------------------------------------------------------------


def error_of(model: Any, X: Array, y: Array, classes: bool) -> float:
    """RMSE, or the share of wrong classes."""
    found = np.asarray(model.predict(X)).reshape(len(X))
    if classes:
        return float(np.mean(found.astype(np.int64) != y))
    return float(np.sqrt(np.mean((found.astype(np.float64) - y) ** 2)))


def tuned(peer: Peer, X: Array, y: Array, classes: bool, seed: int, budget: float) -> Any:
    """Parameters with the least error over the folds, of as many as there is time for."""
    from sklearn.model_selection import KFold, ParameterSampler, StratifiedKFold

    folds = [*(StratifiedKFold if classes else KFold)(FOLDS).split(X, y)]
    total = int(np.prod([len(values) for values in peer.grid.values()]))
    began, found = time.perf_counter(), list[tuple[float, dict[str, Any]]]()
    for given in [{}, *ParameterSampler(peer.grid, total, random_state=seed)]:
        errors = []
        for fit, held in folds:
            if found and time.perf_counter() - began > budget:
                return min(found, key=lambda each: each[0])[1]
            model = peer.make(classes, seed, **given).fit(X[fit], y[fit])
            errors.append(error_of(model, X[held], y[held], classes))
        found.append((float(np.mean(errors)), given))
    return min(found, key=lambda each: each[0])[1]


def _fit(
    name: str, data: Mapping[str, Any], seed: int, budget: float | None, to: Connection
) -> None:
    """In a process of its own: sends a record."""
    import resource

    warnings.simplefilter("ignore")
    peer, rows = PEERS[name], split(data, seed)
    X, y, given = rows.X[: peer.most], rows.y[: peer.most], {}
    few = np.random.default_rng(seed).normal(size=(60, X.shape[1])).astype(np.float32)
    peer.make(rows.classes, seed).fit(few, np.resize(np.arange(2), 60).astype(y.dtype))
    began = time.perf_counter()
    if budget is not None:
        given = tuned(peer, X, y, rows.classes, seed, budget)
    searched = time.perf_counter() - began
    began = time.perf_counter()
    model = peer.make(rows.classes, seed, **given).fit(X, y)
    seconds = time.perf_counter() - began
    record = {
        "error": error_of(model, rows.X_test, rows.y_test, rows.classes), "seconds": seconds,
        "searched_s": searched if budget is not None else None, "parameters": given,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "rows": len(X),
    }  # fmt: skip
    to.send(record | {"classes": rows.classes})


def fit(
    name: str, data: Mapping[str, Any], seed: int, budget: float | None, limit: float
) -> dict[str, Any]:
    """The record of a fit; without an error where it did not end, or not in time."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_fit, args=(name, data, seed, budget, there))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(limit + (budget or 0)) else {"failed": f"> {limit:g} s"}
    except EOFError:
        found = {"failed": "an error"}
    process.kill()
    process.join()
    return {"method": name, "tuned": budget is not None, "seed": seed, **found}


# -- all of them -------------------------------------------------------------------------------


def measure(data: Mapping[str, Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of one table."""
    records = []
    for seed in range(given.seeds):
        for name in given.methods:
            records.append(fit(name, data, seed, None, given.limit))
        if given.tuned:
            ours = [r for r in records if (r["method"], r["seed"]) == (OURS, seed)]
            budget = given.tuned * ours[0]["seconds"]
            for name in given.methods:
                if PEERS[name].grid:
                    records.append(fit(name, data, seed, budget, given.limit))
    return records


def medians(records: Sequence[dict[str, Any]], what: str) -> dict[str, float]:
    """Over the seeds, by method; without those that did not end."""
    found: dict[str, list[float]] = {}
    for record in records:
        if what in record:
            found.setdefault(_name(record), []).append(record[what])
    return {name: float(np.median(values)) for name, values in found.items()}


def _name(record: Mapping[str, Any]) -> str:
    return f"{record['method']}, tuned" if record["tuned"] else str(record["method"])


def summary(records: Records) -> str:
    """A line for each method: errors by table, how far it is behind, seconds and memory."""
    errors = {name: medians(of_one, "error") for name, of_one in records.items()}
    methods = list(dict.fromkeys(_name(r) for of_one in records.values() for r in of_one))
    lines, best = [], {name: min(found.values()) for name, found in errors.items()}
    for method in methods:
        line: dict[str, str] = {"method": method}
        behind = []
        for name, found in errors.items():
            line[name] = f"{found[method]:.4f}" if method in found else "-"
            least = max(best[name], LEAST)
            behind.append(max(found[method], LEAST) / least if method in found else np.inf)
        line["behind"] = f"{np.median(behind):.2f}"
        line["best"] = f"{sum(x <= NEAR for x in behind)} of {len(behind)}"
        for what, head in (("seconds", "s"), ("peak_mib", "MiB")):
            each = [medians(of_one, what).get(method, np.nan) for of_one in records.values()]
            line[head] = f"{np.nanmedian(each):.3g}"
        lines.append(line)
    return text_table(lines, ["method", *errors, "behind", "best", "s", "MiB"])


def plot(path: Path, records: Records) -> None:
    """Errors over the least of each table, a row for each method."""
    from matplotlib.figure import Figure

    errors = {name: medians(of_one, "error") for name, of_one in records.items()}
    methods = list(dict.fromkeys(_name(r) for of_one in records.values() for r in of_one))
    figure = Figure(figsize=(8, 0.4 * len(methods) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    for name, found in errors.items():
        least = max(min(found.values()), LEAST)
        at = [m for m in methods if m in found]
        axes.plot(
            [max(found[m], LEAST) / least for m in at], [methods.index(m) for m in at], "o",
            ms=6, alpha=0.8, label=name,
        )  # fmt: skip
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("error over the least of the table")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="folder of tables (default: what scikit-learn brings)")
    add("--names", nargs="*", help="of tables")
    add("--target", help="column of .csv and .parquet files (default: the last one)")
    add("--methods", nargs="*", default=installed(), choices=list(PEERS))
    add("--seeds", type=int, default=3)
    add("--threads", type=int, default=1)
    add("--limit", type=float, default=600.0, help="seconds of a fit")
    add("--tuned", type=float, default=0.0, help=f"times the seconds of {OURS!r}")
    add("--json", type=Path, help="write all records here")
    add("--plot", type=Path, help="draw the errors here, as a PNG")
    given = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(given.threads)
    if given.tuned and OURS not in given.methods:
        parser.error(f"--tuned needs {OURS!r} among --methods, whose seconds it is told in")
    tables = load(given.data, given.target)
    records: Records = {}
    for name in given.names or tables:
        records[name] = measure(tables[name], given)
        print(summary({name: records[name]}), flush=True)
        if given.json is not None:
            circumstances = {"environment": environment(), "threads": given.threads}
            write_results(given.json, circumstances | {"tables": records})
    print(summary(records))
    if given.plot is not None:
        plot(given.plot, records)


if __name__ == "__main__":
    sys.exit(main())
