"""Measure one subject or several; print a table, and write JSON.

    python -m benchmarks product step --json step.json
    python -m benchmarks smoke                            # all of them at tiny sizes

ceilings       SGEMM, memory copies, exponentials: the limits of this machine
product        K(A, B) @ W
step_products  K @ alpha and K^T @ r from one evaluation of K
step           a whole training step
log_cost       the cost of reporting the progress of a run
setup          the work of a run before its first step
sums           the sums of the direct solver, against float64 products
small_data     a default fit on a small table
loader         samples from a store to the device
loader_peers   shuffled epochs of other loaders, from disk and from object storage
ingest         a file into a shuffled store, against the parts of this work
pipeline       training from a store against training from memory
object_storage reading with a latency of 40 ms against raw GETs, training against local disk
cluster        units prepared by Dask workers against threads of this process
ranks          two ranks with a thread each against one process with two threads
time_to_loss   seconds and samples to within a few per cent of the exact model
serving        the latency of one row and of many by predict, onnxruntime and C
plan_times     the times that `plan` expects of a run against the measured times

A slow result is no failure. The exit code is 1 if a result is wrong. `benchmarks.harness` explains
the columns. NumPy, Numba and PyTorch (`pip install ".[bench]"`) are measured as well if they are
installed.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import SCHEMA, WrongResult, environment, json_parser, write_results
from streamkern.basics.text import text_table

SUBJECTS = (
    *("ceilings", "product", "step_products", "step", "log_cost", "setup", "sums", "small_data"),
    *("loader", "loader_peers", "ingest", "pipeline", "object_storage", "cluster", "ranks"),
    *("time_to_loss", "serving", "plan_times"),
)
COLUMNS = ("case", "variant", "median", "low", "high", "unit", "floor", "fraction", "ratio")
IN_JSON_ONLY = ("min", "max", "repeats")


def run(subjects: Sequence[str], repeats: int | None = None, small: bool = False) -> dict[str, Any]:
    """Measure `subjects`, and return their figures, the wrong results, and the state of the machine
    before and after."""
    began, environment_before = time.perf_counter(), environment()
    figures: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in subjects:
        subject = importlib.import_module(f"benchmarks.{name}")
        print(f"\n{name}: {subject.__doc__.splitlines()[0]}", flush=True)
        try:
            sizes = subject.SMALL if small else {}
            found = subject.measure(repeats or subject.REPEATS, **sizes)
        except WrongResult as error:
            failures.append(f"{name}: {error}")
            print(f"WRONG: {error}", flush=True)
            continue
        print(_table(found), flush=True)
        figures += [{"subject": name, **f} for f in found]
    return {
        "schema": SCHEMA,
        **environment_before,
        "load_after": environment()["machine"]["load"],
        "seconds": round(time.perf_counter() - began, 1),
        "small": small,
        "figures": figures,
        "wrong": failures,
    }


def _table(figures: Sequence[dict[str, Any]]) -> str:
    """Return figures as a table. Columns of the subject come last; numbers above 1000 are rounded
    to integers."""
    own = {key for f in figures for key in f if key not in (*COLUMNS, *IN_JSON_ONLY)}
    rows = [
        {k: round(v) if isinstance(v, float) and v >= 1000 else v for k, v in f.items()}
        for f in figures
    ]
    return text_table(rows, [*COLUMNS, *sorted(own)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return 0 if every result was right."""
    parser = json_parser(__doc__, "python -m benchmarks")
    parser.add_argument("subjects", nargs="+", choices=[*SUBJECTS, "smoke"], metavar="SUBJECT")
    parser.add_argument("--repeats", type=int, help="of each measurement; default: the subject's")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats must be at least 1")
    small = "smoke" in options.subjects
    results = run(SUBJECTS if small else options.subjects, options.repeats, small)
    machine, revision = results["machine"], results["revision"]
    print(
        f"\n{machine['cpu']}, {machine['cores_usable']} cores, load {machine['load'][0]}; revision "
        f"{revision['commit']}{', with changes' if revision['dirty'] else ''}; "
        f"{results['seconds']:.0f} s"
    )
    write_results(options.json, results)
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
