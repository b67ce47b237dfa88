"""Compare the default solver with EigenPro 4 and FALKON on tables; only the two others are tuned.

    python -m benchmarks.public_codes --data FOLDER --json public_codes.json
    python -m benchmarks.public_codes --data FOLDER --names bike texture --seeds 1
    python -m benchmarks.public_codes --check        # the renderings against public figures

`benchmarks.renderings` implements the two methods. Tables, rows, centers, kernel and the exact
model are the ones of `benchmarks.tables`. All methods get the same float32 kernel matrices from
this package, so that seconds compare the methods and not the evaluation of exp. Because the
default solver fits an intercept, the others get targets minus their mean. Seconds include setup
and epochs, but not predictions. They are processor seconds of all threads together, which other
work on the machine affects least (wall clock: `wall_s`). Pin the process to one core to read them
as time.

auto              `solver="auto"`, a run for each number of epochs
eigenpro4         public defaults, with T = 1 where they end with an error (m* > p)
eigenpro4, q=40   the setting with which the public code ran on the digits
falkon, e - 1     penalty 1e-6, jitter 1e-5. The first epoch computes the right-hand side, so that e
                  epochs are e - 1 iterations (after one epoch the model predicts the mean)
falkon, e         the same, without counting the first epoch
falkon, best      e iterations with the one of ten pairs of penalty and jitter that is best on the
                  test rows

FALKON keeps K(X, Z) in memory; this package's solver and EigenPro 4 evaluate it in every epoch.
"ahead" compares with the best line of each method: its least error and, separately, its fewest
seconds. A ratio is the test MSE divided by the test MSE of the exact model with its best ridge,
the median over the seeds. "diverged" means not finite, or ten times the MSE of the mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import environment, write_results
from benchmarks.public_curves import PUBLIC, PUBLIC_EXACT, ROWS
from benchmarks.renderings import Array, EigenPro4, Falkon, Kernel, Matrices
from benchmarks.tables import Problem, exact_error, load_tables, make_problem, settings
from examples.digits import BANDWIDTH, N_CLASSES, exact_values, make_task, noisy_rows
from streamkern.backend.devices import get_backend
from streamkern.basics.text import text_table
from streamkern.kernels.products import KernelOperator

EPOCHS = (1, 2, 5)
PENALTY, PENALTIES = 1e-6, (1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
JITTER, JITTERS = 1e-5, (1e-5, 1e-7)
FAMILIES = {
    "eigenpro4": ("eigenpro4", "eigenpro4, q=40"),
    "falkon": ("falkon, e - 1", "falkon, e", "falkon, best"),
}
METHODS = ("auto", *(name for names in FAMILIES.values() for name in names))
DIVERGED = 10.0
CRITICAL_BATCHES = {150: 2618, 40: 675}
"""Of the public EigenPro 4 on the digits, by q."""
CHECK_PENALTY = 1e-7
"""On the digits. Which one the public run had is not on record; its error after 20 iterations is
1.008 of the exact model's, here 1.018 with 1e-6, 1.006 with this and 1.005 with 1e-8."""
TOLERANCES = {"m*": 0.05, "mse/exact": 0.02, "accuracy": 0.003}
"""The first relative. Another split of the digits, other noise: 22 of the 7200 images."""

Record = dict[str, Any]


def laplace(bandwidth: float, shift: Array) -> Kernel:
    """Return the function K(A, B) in float32, as the solvers of this package evaluate it."""
    op = KernelOperator(sk.Laplace(bandwidth), get_backend("cpu"), shift=shift)

    def matrix(A: Array, B: Array) -> Array:
        if A is B:
            return np.asarray(op.gram(op.points(A, right=True)))
        return np.asarray(op.matrix(op.points(A, left=True), op.points(B, right=True)))

    return matrix


class Clock:
    """Seconds in calls, of the processor and of the wall clock."""

    def __init__(self, seconds: float = 0.0, wall_s: float = 0.0) -> None:
        self.seconds, self.wall_s = seconds, wall_s

    def __call__(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        began, wall = time.process_time(), time.perf_counter()
        found = call(*given, **named)
        self.seconds += time.process_time() - began
        self.wall_s += time.perf_counter() - wall
        return found


class Trial:
    """The inputs of all methods for one table and seed, and their results."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.seed = problem, seed
        self.mean = problem.Y.mean(axis=0)
        self.targets = problem.Y - self.mean
        self.kernel = laplace(problem.bandwidth, problem.Z.mean(axis=0))
        self.K_test = self.kernel(problem.X_test, problem.Z)
        self.exact = exact_error(problem)
        self.constant = float(np.mean((problem.Y_test - self.mean) ** 2))
        self.records: list[Record] = []

    def record(self, method: str, epochs: int, clock: Clock, values: Array, **more: Any) -> Record:
        """Return the record of values on the test rows."""
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(np.mean((np.float64(values) - self.problem.Y_test) ** 2))
        diverged = not error <= DIVERGED * self.constant
        return {
            "method": method, "epochs": epochs, "seed": self.seed, "rows": len(self.problem.X),
            "exact": self.exact, "error": None if diverged else error,
            "ratio": None if diverged else error / self.exact, "diverged": diverged,
            "seconds": clock.seconds, "wall_s": clock.wall_s, **more,
        }  # fmt: skip

    def values(self, alpha: Array) -> Array:
        """Return the values of the test rows."""
        return np.asarray(self.K_test @ alpha.astype(self.K_test.dtype) + self.mean)

    def auto(self) -> None:
        """Fit a model for each number of epochs."""
        problem = self.problem
        Y = problem.Y if problem.Y.shape[1] > 1 else problem.Y[:, 0]
        for epochs in EPOCHS:
            clock = Clock()
            model = sk.KernelRegressor(
                centers=problem.Z, epochs=epochs, random_state=self.seed, scale="none",
                **settings("auto", problem),
            )  # fmt: skip
            clock(model.fit, problem.X, Y)
            values = model.predict(problem.X_test).reshape(problem.Y_test.shape)
            self.records.append(
                self.record("auto", epochs, clock, values, solver=model.report_["solver"])
            )

    def eigenpro4(self, method: str, **given: Any) -> None:
        """Train one run, with evaluations on the way."""
        problem, clock = self.problem, Clock()
        solver = clock(
            EigenPro4, self.kernel, problem.X, self.targets, problem.Z, seed=self.seed, **given
        )
        sizes = {"batch": solver.batch, "period": solver.period}
        for epoch in range(1, max(EPOCHS) + 1):
            clock(solver.epoch)
            if epoch in EPOCHS:
                values = self.values(solver.alpha)
                self.records.append(self.record(method, epoch, clock, values, **sizes))

    def falkon(self) -> None:
        """Solve for all penalties with the same matrices; each time includes the time of the
        matrices."""
        runs = []
        for jitter in JITTERS:
            clock = Clock()
            matrices = clock(Matrices.of, self.kernel, self.problem.X, self.problem.Z, jitter)
            for penalty in PENALTIES:
                run = self._one_falkon(matrices, penalty, jitter, clock)
                if (penalty, jitter) == (PENALTY, JITTER):
                    self.records += [run[e - 1] | _named("falkon, e - 1", e) for e in EPOCHS]
                    self.records += [run[e] | _named("falkon, e", e) for e in EPOCHS]
                runs.append(run)
        for e in EPOCHS:
            best = min((run[e] for run in runs), key=_order)
            self.records.append(best | _named("falkon, best", e))

    def _one_falkon(
        self, matrices: Matrices, penalty: float, jitter: float, setup: Clock
    ) -> list[Record]:
        """Return a record for each number of iterations, beginning with 0."""
        clock, found = Clock(setup.seconds, setup.wall_s), []
        solver = clock(Falkon, matrices, self.targets, penalty)
        for done in range(max(EPOCHS) + 1):
            if done:
                clock(solver.iterate)
            # Once in a run, at its end.
            end = Clock(clock.seconds, clock.wall_s)
            values = self.values(end(solver.weights))
            found.append(self.record("falkon", done, end, values, penalty=penalty, jitter=jitter))
        return found


def _named(method: str, epochs: int) -> Record:
    return {"method": method, "epochs": epochs}


def _order(record: Record) -> float:
    return np.inf if record["diverged"] else float(record["ratio"])


def measure(data: dict[str, Any], centers: int, seeds: list[int]) -> list[Record]:
    """Return a record for each seed, method and number of epochs, for one table."""
    records = []
    for seed in seeds:
        trial = Trial(make_problem(data, centers, seed), seed)
        trial.auto()
        trial.eigenpro4("eigenpro4")
        trial.eigenpro4("eigenpro4, q=40", level=40)
        trial.falkon()
        records += trial.records
    return records


# ------------------------------------------------------------------------------------- in words


def medians(records: list[Record], method: str, epochs: int) -> tuple[float, float]:
    """Ratio and seconds over the seeds; a run that diverged counts as infinity."""
    found = [r for r in records if (r["method"], r["epochs"]) == (method, epochs)]
    ratio = float(np.median([_order(r) for r in found]))
    return ratio, float(np.median([r["seconds"] for r in found]))


def _shown(x: float, digits: int = 3) -> str:
    return f"{x:.{digits}f}" if np.isfinite(x) else "diverged"


def of_one(name: str, records: list[Record]) -> str:
    """Return the table of a data set, with a row for each method."""
    rows = []
    for method in METHODS:
        found = [medians(records, method, epochs) for epochs in EPOCHS]
        row = {name: method}
        row |= {f"after {e}": _shown(r) for e, (r, _) in zip(EPOCHS, found, strict=True)}
        row |= {f"{e}, s": f"{s:.2f}" for e, (_, s) in zip(EPOCHS, found, strict=True)}
        rows.append(row)
    return text_table(rows, list(rows[0]))


def summary(tables: dict[str, list[Record]]) -> list[dict[str, str]]:
    """Median and worst ratio over the tables, and the median of the seconds."""
    rows = []
    for method in METHODS:
        row = {"method": method}
        for epochs in EPOCHS:
            found = np.array([medians(records, method, epochs) for records in tables.values()])
            row[f"after {epochs}: median"] = _shown(float(np.median(found[:, 0])))
            row["worst " + "." * epochs] = _shown(float(found[:, 0].max()))
            row["s " + "." * epochs] = f"{np.median(found[:, 1]):.2f}"
        rows.append(row)
    return rows


def verdict(tables: dict[str, list[Record]], family: str) -> str:
    """Return one line: at how many points auto is ahead of the best figures of the other method."""
    behind: dict[str, list[str]] = {"error": [], "seconds": []}
    n = both = neither = 0
    for name, records in tables.items():
        for epochs in EPOCHS:
            ours = medians(records, "auto", epochs)
            lines = [medians(records, method, epochs) for method in FAMILIES[family]]
            ahead = [a < min(b) for a, b in zip(ours, zip(*lines, strict=True), strict=True)]
            n, both, neither = n + 1, both + all(ahead), neither + (not any(ahead))
            for what, good in zip(behind, ahead, strict=True):
                behind[what] += [] if good else [f"{name} after {epochs}"]
    counts = ", ".join(f"in {what} at {n - len(found)}" for what, found in behind.items())
    said = f"auto is ahead of {family} {counts} of {n} points, in both at {both}, "
    said += f"in neither at {neither}"
    said += f"; not in error: {', '.join(behind['error'])}" if behind["error"] else ""
    # Which the median over the seeds does not show.
    off = {
        f"{name} ({r['method']}, seed {r['seed']})": None
        for name, records in tables.items()
        for r in records
        if r["diverged"] and r["method"] in FAMILIES[family]
    }
    return said + (f"; diverged: {', '.join(off)}" if off else "")


# ------------------------------------------------------------------------------------ the check


def check() -> list[dict[str, Any]]:
    """Compare the renderings with the public codes, as in `benchmarks.public_curves`."""
    task = make_task()
    F = exact_values(task, ROWS)
    exact = _figures(F, task.y_test)
    X, y = (np.concatenate(part) for part in zip(*noisy_rows(task, ROWS), strict=True))
    X, Y = X.astype(np.float32), np.eye(N_CLASSES, dtype=np.float32)[y]
    Z = task.scaled(task.X).astype(np.float32)
    kernel = laplace(BANDWIDTH, Z.mean(axis=0))
    K_test = kernel(task.scaled(task.X_test).astype(np.float32), Z)

    def found(name: str, alphas: dict[int, Array]) -> list[dict[str, Any]]:
        public, rows = PUBLIC[name], []
        for at, alpha in alphas.items():
            ours = _figures(K_test @ alpha.astype(np.float32), task.y_test)
            if at in public.accuracy:
                rows.append(_compared(
                    f"{name} after {at}: accuracy less exact", "accuracy",
                    public.accuracy[at] - PUBLIC_EXACT.accuracy[1],
                    ours["accuracy"] - exact["accuracy"],
                ))  # fmt: skip
            if at in public.mse:
                rows.append(_compared(
                    f"{name} after {at}: MSE over exact", "mse/exact",
                    public.mse[at] / PUBLIC_EXACT.mse[1], ours["mse"] / exact["mse"],
                ))  # fmt: skip
        return rows

    return _check_eigenpro4(kernel, X, Y, Z, found) + _check_falkon(kernel, X, Y, Z, found)


def _check_eigenpro4(kernel: Kernel, X: Array, Y: Array, Z: Array, found: Any) -> list[Any]:
    solver, alphas = EigenPro4(kernel, X, Y, Z, level=40), {}
    for epoch in range(1, 5):
        solver.epoch()
        alphas[epoch] = solver.alpha.copy()
    wide = EigenPro4(kernel, X, Y, Z)
    batches = {40: solver, 150: wide}
    return [
        _compared(f"eigenpro4: m* with q = {q}", "m*", 1.0, s.of_rows.critical_batch / m)
        for q, m in CRITICAL_BATCHES.items()
        for s in [batches[q]]
    ] + [_compared("eigenpro4: T", "m*", 2, solver.period), *found("eigenpro4", alphas)]


def _check_falkon(kernel: Kernel, X: Array, Y: Array, Z: Array, found: Any) -> list[Any]:
    solver, alphas = Falkon(Matrices.of(kernel, X, Z), Y, CHECK_PENALTY), {}
    for iteration in range(1, max(PUBLIC["falkon"].accuracy) + 1):
        solver.iterate()
        alphas[iteration] = solver.weights()
    return list(found("falkon", alphas))


def _figures(F: Array, y: Array) -> dict[str, float]:
    return {
        "accuracy": float((F.argmax(axis=1) == y).mean()),
        "mse": float(((F - np.eye(N_CLASSES)[y]) ** 2).mean()),
    }


def _compared(figure: str, kind: str, public: float, ours: float) -> dict[str, Any]:
    within = abs(ours - public) <= TOLERANCES[kind]
    return {"figure": figure, "public": public, "here": ours, "tolerance": TOLERANCES[kind],
            "within": "yes" if within else "NO"}  # fmt: skip


def main() -> int:
    """See the module's first lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder of .npz files (default: what scikit-learn brings)")
    add("--names", nargs="*", help="of tables")
    add("--centers", type=int, default=2000)
    add("--seeds", type=int, default=3)
    add("--check", action="store_true", help="hold the renderings against public figures, alone")
    add("--json", type=Path, help="write all records here")
    add("--go-on", action="store_true", help="keep the seeds that --json holds, run the others")
    args = parser.parse_args()
    if args.check:
        rows = check()
        print(text_table(rows, list(rows[0])))
        return 0 if all(row["within"] == "yes" for row in rows) else 1
    data = load_tables(args.data)
    tables = json.loads(args.json.read_text())["tables"] if args.go_on else {}
    circumstances = {"environment": environment(), "centers": args.centers}
    names = args.names or list(data)
    Trial(make_problem(data[names[0]], 50, 0), 0).auto()  # whatever the first call takes
    for name in names:
        kept = tables.get(name, [])
        seeds = sorted(set(range(args.seeds)) - {r["seed"] for r in kept})
        tables[name] = kept + measure(data[name], args.centers, seeds)
        print(of_one(name, tables[name]), end="\n\n", flush=True)
        rows, verdicts = summary(tables), [verdict(tables, family) for family in FAMILIES]
        results = {"summary": rows, "verdicts": verdicts, "tables": tables}
        write_results(args.json, circumstances | results)
    print(text_table(rows, list(rows[0])), *verdicts, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
