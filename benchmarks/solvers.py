"""Compare all solvers on the same rows and centers: loss relative to the exact model, and seconds.

    python -m benchmarks.solvers                              # p = 500 and 2000, minutes
    python -m benchmarks.solvers --centers 8000 --memory-share 8 --json solvers.json --plot folder
    python -m benchmarks.solvers --problems smooth --solvers block eigenpro4 --epochs 2

The problems are the ones of `benchmarks.problems`, with ten rows for each center, at least 20 000,
over which every solver cycles. Losses are measured on test rows, and divided by the loss of the
exact model. Seconds include setup and loop, and the solution for the evaluated weights, but not
the evaluations. A method with a ridge uses the ridge of the exact model. With more than 10 000
centers, the exact model would take hours; losses are then divided by the loss of f = 0, and
nothing has a ridge. `--memory-share 8` gives the preconditioners p^2 / 8 numbers: blocks of p / 8,
and a projection without a matrix for EigenPro. There are p Fourier features. EigenPro 1 and 2 and
SGD on a kernel have the training rows as centers: they are measured in `examples` and
`public_curves`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import environment, json_parser, write_results
from benchmarks.problems import PROBLEMS, KernelProblem, exact_loss
from streamkern.basics.errors import StreamkernError
from streamkern.basics.text import text_table

ROWS_PER_CENTER, MIN_ROWS = 10, 20_000
# Every eighth of the first pass, quarters of the next two, then halves and wholes.
FRACTIONS = (
    *(k / 8 for k in range(1, 8)), *(k / 4 for k in range(4, 12)),
    *(3, 3.5, 4, 4.5), *range(5, 21),
)  # fmt: skip
TARGET, WITHIN = 1.05, 1.3
EXACT_CENTERS = 10_000


@dataclass
class Curve:
    """Loss over the exact model's, after so many epochs and seconds."""

    solver: str
    setup_s: float = 0.0
    epochs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    note: str = ""

    def after(self, epochs: float) -> float | None:
        """Return the ratio after a number of epochs."""
        found = [r for e, r in zip(self.epochs, self.ratios, strict=True) if abs(e - epochs) < 0.01]
        return found[-1] if found else None

    def seconds_to(self, ratio: float) -> float | None:
        """Return the seconds until an evaluation has at most this ratio."""
        pairs = zip(self.seconds, self.ratios, strict=True)
        return next((s for s, r in pairs if r <= ratio), None)

    def epochs_to(self, ratio: float) -> float | None:
        """Return the number of epochs after which the ratio is reached."""
        pairs = zip(self.epochs, self.ratios, strict=True)
        return next((e for e, r in pairs if r <= ratio), None)


def methods(
    p: int, memory_share: int | None, epochs: int, ridge: float
) -> dict[str, dict[str, Any]]:
    """Return the settings of each method by name. epochs : number of epochs; ridge : ridge of the
    methods that take one."""
    if memory_share is not None:
        b = -(-p // memory_share)
        return {
            f"block, p/{memory_share}": {"name": "block", "block_size": b, "ridge": ridge},
            "eigenpro4": {"name": "eigenpro4", "projection": "inexact"},
            "eigenpro3": {"name": "eigenpro3", "projection": "inexact"},
        }
    return {
        "auto": {"name": "auto", "ridge": ridge},
        "block, full": {"name": "block", "block_size": p, "ridge": ridge},
        "block, p/2": {"name": "block", "block_size": -(-p // 2), "ridge": ridge},
        "block, p/4": {"name": "block", "block_size": -(-p // 4), "ridge": ridge},
        "block, p/16": {"name": "block", "block_size": -(-p // 16), "ridge": ridge},
        "direct": {"name": "direct", "epochs": 1, "ridge": ridge},
        "falkon": {"name": "falkon", "epochs": max(epochs, 21), "ridge": ridge},
        "eigenpro4": {"name": "eigenpro4"},
        "eigenpro3": {"name": "eigenpro3"},
        **{
            f"{features} features": {"name": "eigenpro1", "features": features, "ridge": ridge}
            for features in ("nystrom", "fourier")
        },
    }


def run(problem: KernelProblem, name: str, settings: dict[str, Any], epochs: int) -> Curve:
    """Train one run. Its ratios are losses until they are divided by the reference."""
    settings = dict(settings)
    epochs, features = settings.pop("epochs", epochs), settings.pop("features", "kernel")
    fourier = {"n_features": len(problem.Z)} if features == "fourier" else {}
    n, curve = len(problem.X), Curve(name)
    config = sk.RunConfig.from_tables(
        {
            "data": {"train": "memory", "epochs": epochs, "scale": "none"},
            "model": {
                "kernel": problem.kernel, "bandwidth": problem.bandwidth,
                "features": features, "fit_intercept": False, **fourier,
            },
            "solver": settings,
            "run": {
                "device": "cpu",
                "evaluate_every": 0,
                "evaluate_at": [round(f * n) for f in FRACTIONS if f < epochs],
            },
        }
    )  # fmt: skip
    test = sk.ArraySource(problem.X_test, problem.Y_test)
    marks: list[float] = []
    began = time.perf_counter()
    result = sk.train_model(
        config,
        source=sk.ArraySource(problem.X, problem.Y),
        test=test,
        centers=None if fourier else problem.Z,
        on_evaluation=lambda record: marks.append(time.perf_counter()),
    )
    evaluation = time.perf_counter()
    result.model.evaluate(test)
    evaluation_s = time.perf_counter() - evaluation
    result.model.backend.close()
    curve.setup_s = evaluation - began - result.timing["loop_s"] - evaluation_s
    for k, (record, mark) in enumerate(zip(result.history, marks, strict=True)):
        curve.epochs.append(record["samples"] / n)
        curve.seconds.append(mark - began - (k + 1) * evaluation_s)
        curve.ratios.append(record["test_mse"])
    return curve


def measure(
    problem: KernelProblem,
    memory_share: int | None,
    epochs: int,
    only: list[str] | None,
    repeats: int,
) -> list[Curve]:
    """Measure every method on one problem, in turns."""
    n, p = len(problem.X), len(problem.Z)
    loss, ridge, what = reference(problem)
    print(f"\n{problem.name}, p={p}, n={n}: {what} {loss:.5g} (ridge {ridge:g})", flush=True)
    chosen = {
        name: settings
        for name, settings in methods(p, memory_share, epochs, ridge).items()
        if not only or name in only
    }
    names = list(chosen)
    turns = [  # each begins with another one
        {name: attempt(problem, name, chosen[name], epochs) for name in (*names[k:], *names[:k])}
        for k in (turn % len(names) for turn in range(repeats))
    ]
    curves = [middle([turn[name] for turn in turns]) for name in chosen]
    for curve in curves:
        curve.ratios = [r / loss for r in curve.ratios]
        points = zip(curve.epochs, curve.seconds, curve.ratios, strict=True)
        shown = "  ".join(f"{e:.3g}: {r:.3f} ({s:.2f} s)" for e, s, r in points)
        print(f"{curve.solver}: {shown or curve.note}", flush=True)
    return curves


def reference(problem: KernelProblem) -> tuple[float, float, str]:
    """Return the reference loss, its ridge, and a name for both."""
    if len(problem.Z) > EXACT_CENTERS:
        return float((problem.Y_test.astype(np.float64) ** 2).mean()), 0.0, "f = 0"
    return *exact_loss(problem), "exact"


def attempt(problem: KernelProblem, name: str, settings: dict[str, Any], epochs: int) -> Curve:
    """Train one run, or record why it failed."""
    try:
        return run(problem, name, settings, epochs)
    except StreamkernError as error:
        return Curve(name, note=str(error))


def middle(curves: list[Curve]) -> Curve:
    """Median seconds of runs that differ in nothing else."""
    seconds = zip(*(curve.seconds for curve in curves), strict=True)
    return replace(
        curves[0],
        setup_s=median(curve.setup_s for curve in curves),
        seconds=[median(each) for each in seconds],
    )


def rows_of(curves: list[Curve], epochs: int, exact: bool) -> list[dict[str, Any]]:
    """Return one row for each solver, with the time to the target if the reference is the exact
    model."""
    rows = [
        {
            "solver": curve.solver,
            "1 epoch": curve.after(1),
            f"{epochs} epochs": curve.after(epochs),
            "setup s": curve.setup_s,
            "1 epoch s": next(
                (s for e, s in zip(curve.epochs, curve.seconds, strict=True) if e >= 0.99), None
            ),
        }
        for curve in curves
    ]
    for row, curve in zip(rows, curves, strict=True) if exact else ():
        row[f"epochs to {TARGET}"] = curve.epochs_to(TARGET)
        row[f"s to {TARGET}"] = curve.seconds_to(TARGET)
    return rows


def verdict(curves: list[Curve]) -> str:
    """Compare the time of "auto" to the target, setup included, with the best solver."""
    times = {c.solver: s for c in curves if (s := c.seconds_to(TARGET)) is not None}
    if "auto" not in times:
        return ""
    best = min(times, key=lambda name: times[name])
    ratio = times["auto"] / times[best]
    met = "met" if ratio <= WITHIN else "NOT met"
    return f"auto: {ratio:.2f} x the time of the best ({best}) to {TARGET}; at most {WITHIN}: {met}"


def plot(path: Path, title: str, curves: list[Curve]) -> None:
    """Ratio against epochs and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for panel, what in zip(panels, ("epochs", "seconds"), strict=True):
        for curve in curves:
            if curve.ratios:
                panel.plot(getattr(curve, what), curve.ratios, marker="o", ms=3, label=curve.solver)
        panel.axhline(1, color="0.6", lw=0.8)
        panel.set(xlabel=what, xscale="log", yscale="log")
    panels[0].set(ylabel="test loss over that of the reference", title=title)
    panels[1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    """Measure, print, write."""
    parser = json_parser(__doc__)
    parser.add_argument("--problems", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--centers", nargs="*", type=int, default=[500, 2000])
    parser.add_argument("--solvers", nargs="*", help="names as in the table; default: all")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, for median seconds")
    parser.add_argument("--memory-share", type=int, help="of p^2 numbers for the preconditioner")
    parser.add_argument("--plot", type=Path, help="a folder for the curves")
    options = parser.parse_args()
    environment_before, results = environment(), []
    for name in options.problems:  # compiles the kernels
        run(PROBLEMS[name](MIN_ROWS, 500), "warm", {"name": "block"}, 1)
    for p in options.centers:
        for name in options.problems:
            problem = PROBLEMS[name](max(MIN_ROWS, ROWS_PER_CENTER * p), p)
            curves = measure(
                problem, options.memory_share, options.epochs, options.solvers, options.repeats
            )
            exact = p <= EXACT_CENTERS
            rows = rows_of(curves, options.epochs, exact)
            print(text_table(rows, list(rows[0])))
            if exact:
                print(verdict(curves))
            results.append(
                {"problem": name, "p": p, "n": len(problem.X),
                 "memory_share": options.memory_share, "curves": [asdict(c) for c in curves]}
            )  # fmt: skip
            if options.plot is not None:
                options.plot.mkdir(parents=True, exist_ok=True)
                plot(options.plot / f"solvers-{name}-{p}.png", f"{name}, p = {p}", curves)
    found = {"before": environment_before, "after": environment(), "results": results}
    write_results(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
