"""Fits of methods to tables: options, measured figures, a process for each, records in a file."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.harness import environment, write_results

Array = npt.NDArray[Any]
Record = dict[str, Any]
Records = dict[str, list[Record]]
TEST_ROWS = 8000
"""Largest number of test rows."""
LEAST = 1e-4
"""Smallest error that a ratio is taken of."""


class Split(NamedTuple):
    """Rows to fit and rows to test: X as the method takes it, y values or class numbers."""

    X: Any
    y: Array
    X_test: Any
    y_test: Array
    classes: bool


def options(parser: argparse.ArgumentParser, methods: Sequence[str], rows: int | None) -> None:
    """Add the options that all comparisons have. rows : the default of --rows."""
    add = parser.add_argument
    add("--names", nargs="*", help="of tables")
    add("--methods", nargs="*", default=methods, choices=methods)
    add("--seeds", type=int, default=3)
    add("--rows", type=int, default=rows, help="largest number of rows to fit")
    add("--threads", type=int, default=1)
    add("--limit", type=float, default=600.0, help="seconds of a fit, with its search")
    add("--json", type=Path, help="write all records here; those that it has are not made again")


# -- one fit -----------------------------------------------------------------------------------


def error_of(model: Any, X: Any, y: Array, classes: bool) -> float:
    """Return the RMSE, or the share of wrong classes."""
    predictions = np.asarray(model.predict(X)).reshape(len(y))
    if classes:
        return float(np.mean(predictions.astype(np.int64) != y))
    return float(np.sqrt(np.mean((predictions.astype(np.float64) - y) ** 2)))


def log_loss(model: Any, X: Any, y: Array) -> float:
    """Return the log loss of class numbers, some of which the model may not know."""
    shares = np.asarray(model.predict_proba(X), np.float64)
    place = {int(label): k for k, label in enumerate(model.classes_)}
    at = np.array([place.get(int(label), -1) for label in y])
    likely = np.where(at < 0, 0.0, shares[np.arange(len(at)), at])
    return float(-np.log(np.maximum(likely, 1e-12)).mean())


def measured(model: Any, rows: Split) -> Record:
    """Fit a model, and return its figures: errors, seconds, microseconds to predict, memory."""
    cpu, began = time.process_time(), time.perf_counter()
    model.fit(rows.X, rows.y)
    record = {"cpu_s": time.process_time() - cpu, "seconds": time.perf_counter() - began}
    cpu = time.process_time()
    record["error"] = error_of(model, rows.X_test, rows.y_test, rows.classes)
    record["predict_us"] = 1e6 * (time.process_time() - cpu) / len(rows.y_test)
    if rows.classes and hasattr(model, "predict_proba"):
        record["log_loss"] = log_loss(model, rows.X_test, rows.y_test)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return record | {"peak_mib": peak, "rows": len(rows.y)}


def in_a_process(call: Callable[..., Record], *given: Any, limit: float) -> Record:
    """Return the result of a call in a process of its own, or its error."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(sender, call, given))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(limit) else {"failed": f"> {limit:g} s"}
    except EOFError:
        result = {"failed": "an error"}
    process.kill()
    process.join()
    return dict(result)


def _send(sender: Connection, call: Callable[..., Record], arguments: Sequence[Any]) -> None:
    sender.send(call(*arguments))


# -- all of them -------------------------------------------------------------------------------


def fit_all(
    args: argparse.Namespace, tables: Mapping[str, Any], methods: Sequence[str],
    fit: Callable[..., Record], summary: Callable[[Records], str],
) -> Records:  # fmt: skip
    """Return all records, with those of the file; each table's summary is printed.

    fit : (table, method, seed, records of the table, given) -> figures, in a process of its own
    """
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = str(args.threads)
    circumstances = {"threads": args.threads, "most_rows": args.rows}
    records = _kept(args.json, circumstances)
    for name, table in tables.items():
        of_one = records.setdefault(name, [])
        done = {(r["method"], r["seed"]) for r in of_one}
        for seed, method in ((s, m) for s in range(args.seeds) for m in methods):
            if (method, seed) in done:
                continue
            result = in_a_process(fit, table, method, seed, of_one, args, limit=args.limit)
            of_one.append({"method": method, "seed": seed} | result)
            record = {"environment": environment()} | circumstances | {"tables": records}
            write_results(args.json, record)
        print(f"{name}\n{summary({name: of_one})}\n", flush=True)
    return records


def _kept(path: Path | None, circumstances: Record) -> Records:
    if path is None or not path.exists():
        return {}
    output = json.loads(path.read_text())
    for key, value in circumstances.items():
        if output.get(key) != value:
            raise SystemExit(f"{path} has {key} {output.get(key)}, not {value}: name another file")
    return dict(output["tables"])


def medians(records: Sequence[Mapping[str, Any]], figure: str) -> dict[str, float]:
    """Return the median of a figure over the seeds, by method, for the methods that have it."""
    results: dict[str, list[float]] = {}
    for record in records:
        if figure in record:
            results.setdefault(record["method"], []).append(record[figure])
    return {method: float(np.median(values)) for method, values in results.items()}


def behind(records: Records, figure: str) -> dict[str, list[float]]:
    """Return the ratios of a figure to the least of each table that has it, by method."""
    ratios: dict[str, list[float]] = {}
    for of_one in records.values():
        found = medians(of_one, figure)
        for method, value in found.items():
            ratio = max(value, LEAST) / max(min(found.values()), LEAST)
            ratios.setdefault(method, []).append(ratio)
    return ratios
