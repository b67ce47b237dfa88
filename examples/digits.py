"""Train on a million noisy digits that are never stored, stop half-way, resume, compare.

    tools/demo                        all of it, in less than three minutes on two idle cores
    python examples/digits.py --quick                a short stream, some seconds
    python examples/digits.py --samples 200000       another length
    python examples/digits.py --folder runs/mine     another place; --fresh starts over

The script, in the folder `runs/digits`,

1. writes scikit-learn's digits to Zarr stores: 1437 training images, as uint8 pixels, and 20 noisy
   copies of each of the other 360 images as test rows;
2. solves the problem exactly, in float64, for comparison;
3. trains with the default solver on new noisy copies of the 1437 images, which are drawn while they
   are streamed. The process is interrupted by a SIGTERM and ends with exit code 75; the same
   command resumes it;
4. trains with EigenPro 3.0 on the same kind of stream, a quarter as long, because its steps take
   more time;
5. draws the test error of both solvers against the number of samples, and prints a table.

If the script is called again, it continues where it was interrupted, or shows the results again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist

import streamkern as sk
from streamkern.basics.text import text_table
from streamkern.rundir.run_log import read_log

N_TRAIN, N_CLASSES, NOISE, BANDWIDTH, TEST_COPIES = 1437, 10, 0.5, 8.0, 20
SOLVERS = {"block": "block preconditioner (default)", "eigenpro3": "EigenPro 3.0 (this package's)"}
TRY_AGAIN = 75
MARKER = "demo.json"
OURS = (
    *("train.zarr", "test.zarr", "exact.json", "curves.png", "table.json", MARKER),
    *(name + suffix for name in SOLVERS for suffix in ("", ".toml", ".out")),
)


# ------------------------------------------------------------------------------------- the task


@dataclass(frozen=True)
class Task:
    """The digits, split into training and test images in a fixed way.

    X, y : (1437, 64) uint8 and (1437,), the training rows.
    X_test, y_test : (7200, 64) float32, in pixel units, and (7200,): 20 noisy copies of each of 360
        other digits.
    mean, std : mean and standard deviation of all training pixels.
    """

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    mean: float
    std: float

    def scaled(self, X: np.ndarray) -> np.ndarray:
        """Return float64 pixels, standardised by the mean and deviation of the training pixels."""
        return (X.astype(np.float64) - self.mean) / self.std


def make_task() -> Task:
    """Return the split and the noisy test set, the same in every call."""
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order].astype(np.uint8), y[order]
    mean, std = float(X[:N_TRAIN].mean()), float(X[:N_TRAIN].std())
    clean = np.tile(X[N_TRAIN:].astype(np.float64), (TEST_COPIES, 1))
    noise = np.random.default_rng([0, 1]).standard_normal(clean.shape)
    X_test = (clean + NOISE * std * noise).astype(np.float32)
    return Task(X[:N_TRAIN], y[:N_TRAIN], X_test, np.tile(y[N_TRAIN:], TEST_COPIES), mean, std)


def noisy_rows(
    task: Task, n_samples: int, draw: int = 0, block_rows: int = 20_000
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of scaled digits with noise, (rows, 64) float64, and labels. draw : seed."""
    rng = np.random.default_rng([0, 2, draw])
    Z = task.scaled(task.X)
    # Every digit equally often, as in the stream; in the last round some are left out.
    rows = np.concatenate([rng.permutation(len(Z)) for _ in range(-(-n_samples // len(Z)))])
    for start in range(0, n_samples, block_rows):
        part = rows[start : min(start + block_rows, n_samples)]
        yield Z[part] + NOISE * rng.standard_normal((len(part), Z.shape[1])), task.y[part]


def exact_values(task: Task, n_samples: int, draw: int = 0) -> np.ndarray:
    """Return the values (7200, 10) of least squares on the test set, with all digits as centers.

    The computation uses NumPy and SciPy in float64, and nothing of streamkern: K^T K and K^T Y are
    summed over `n_samples` of the `noisy_rows`, with distances from differences. Cost n p^2.
    """
    one_hot, Z = np.eye(N_CLASSES), task.scaled(task.X)

    def kernel(X: np.ndarray) -> np.ndarray:
        D = cdist(X, Z)
        D *= -1 / BANDWIDTH
        return np.exp(D, out=D)

    A, B = np.zeros((len(Z), len(Z))), np.zeros((len(Z), N_CLASSES))
    for X, y in noisy_rows(task, n_samples, draw):
        K = kernel(X)
        A += K.T @ K
        B += K.T @ one_hot[y]
    return np.asarray(kernel(task.scaled(task.X_test)) @ cho_solve(cho_factor(A), B))


def exact_error(task: Task, n_samples: int, draw: int = 0) -> float:
    """Return the test MSE of `exact_values`; draws of 200 000 samples differ by about 0.3 %."""
    F = exact_values(task, n_samples, draw)
    return float(((F - np.eye(N_CLASSES)[task.y_test]) ** 2).mean())


# ----------------------------------------------------------------------------------- the folder


class Stop(Exception):
    """The end of the demo, with a sentence and an exit code."""

    def __init__(self, sentence: str, code: int = 2) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class Plan:
    """The lengths of the runs: samples of each solver, and steps between evaluations.

    quick : whether the preconditioners are smaller, so that their setup takes hardly any time.
    """

    samples: dict[str, int]
    exact_samples: int
    evaluate_every: int
    quick: bool

    def copies(self, solver: str) -> int:
        """Return the number of complete copies of the training set in the stream."""
        return -(-self.samples[solver] // N_TRAIN)

    def as_json(self) -> dict[str, Any]:
        """Return the values that must be the same when the demo is called again."""
        return {"samples": self.samples, "quick": self.quick}


def make_plan(samples: int | None, quick: bool) -> Plan:
    """Return the plan for the options of the command line."""
    n = samples or (20_000 if quick else 1_000_000)
    short = max(n // 4, min(n, 10_000))
    return Plan(
        {"block": n, "eigenpro3": short},
        10_000 if quick else 200_000,
        max(1, n // 256 // (20 if quick else 200)),  # a step is 256 samples by default
        quick,
    )


def open_folder(folder: Path, plan: Plan, fresh: bool) -> None:
    """Create the folder, or check that it holds a demo of this length; change no other files."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise Stop(f"{folder} is not a folder; give another --folder")
    ours = marker.exists()
    if not ours and folder.exists() and any(folder.iterdir()):
        raise Stop(f"{folder} holds files that are not this demo's; give another --folder")
    if ours and fresh:
        for name in OURS:  # by name, the marker last: what else is in there stays
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        ours = False
    if not ours:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps(plan.as_json(), indent=1))
    elif json.loads(marker.read_text()) != plan.as_json():
        raise Stop(
            f"{folder} holds a demo of another length; use --fresh to start over, or another "
            "--folder"
        )


def write_stores(folder: Path, task: Task) -> None:
    """Write the two stores, unless they are complete."""
    for name, X, y in (("train", task.X, task.y), ("test", task.X_test, task.y_test)):
        url = folder / f"{name}.zarr"
        try:
            sk.open_store(url)
        except sk.DataError:  # missing, or unfinished: `ingest_store` goes on with it
            spec = sk.ingest_store(X, url, y=y)
            print(f"  {url}: {spec.n_rows} rows of {spec.row_shape[0]} {spec.x_dtype} values")


RUN_FILE = """\
# streamkern train {folder}/{solver}.toml
[data]
train = {train}
test = {test}
copies = {copies}
epochs = 1
transforms = [{{kind = "scale", mode = "global"}}, {{kind = "noise", sigma = {noise}}}]

[model]
kernel = "laplace"
bandwidth = {bandwidth}
centers = "all"
fit_intercept = false

[solver]
name = "{solver}"
{smaller}
[run]
run_dir = {run_dir}
evaluate_every = {evaluate_every}
checkpoint_every = "5 s"
"""


SMALLER = {"block": "block_size = 360\n", "eigenpro3": "n_nystrom = 500\n"}


def write_run_file(folder: Path, solver: str, plan: Plan) -> Path:
    """Write the run file of a solver; only the name of the solver and the length differ."""
    path = folder / f"{solver}.toml"
    path.write_text(
        RUN_FILE.format(
            folder=folder,
            solver=solver,
            train=json.dumps(str(folder / "train.zarr")),
            test=json.dumps(str(folder / "test.zarr")),
            run_dir=json.dumps(str(folder / solver)),
            copies=plan.copies(solver),
            noise=NOISE,
            bandwidth=BANDWIDTH,
            evaluate_every=plan.evaluate_every,
            smaller=SMALLER[solver] if plan.quick else "",
        )
    )
    return path


# ------------------------------------------------------------------------------------- the runs


def evaluations(folder: Path, solver: str) -> list[dict[str, Any]]:
    """Return the evaluations in the log of a run, one per step, by samples."""
    records = read_log(folder / solver / "log.jsonl")
    seen = {r["step"]: r for r in records if r.get("event") == "evaluation"}
    return [seen[step] for step in sorted(seen)]


def seconds(folder: Path, solver: str) -> float:
    """Return the seconds in the training loop, evaluations included, over all resumes of a run."""
    total, began, last = 0.0, None, 0.0
    for record in read_log(folder / solver / "log.jsonl"):
        now = datetime.fromisoformat(record["time"]).timestamp()
        if record["event"] in ("start", "resume"):
            total += 0.0 if began is None else last - began
            began = now
        last = now
    return total + (0.0 if began is None else last - began)


def was_resumed(folder: Path, solver: str) -> bool:
    """Return whether a run was interrupted and resumed."""
    return any(r["event"] == "resume" for r in read_log(folder / solver / "log.jsonl"))


def train(folder: Path, solver: str, plan: Plan, *, interrupt_at: int | None = None) -> int:
    """Run `streamkern train` in a new process, and return its exit code.

    interrupt_at : number of samples after which the process gets a SIGTERM; None: it gets none.
    """
    command = [sys.executable, "-m", "streamkern", "train", str(folder / f"{solver}.toml")]
    total = plan.copies(solver) * N_TRAIN
    with (folder / f"{solver}.out").open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            while process.poll() is None:
                time.sleep(0.1)
                done = evaluations(folder, solver)
                samples = done[-1]["samples"] if done else 0
                if interrupt_at is not None and samples >= interrupt_at:
                    process.send_signal(signal.SIGTERM)
                    interrupt_at = None
                if sys.stdout.isatty():
                    print(f"\r  {samples:,} of {total:,} samples", end="", flush=True)
        except KeyboardInterrupt:
            process.wait()  # it got the same signal, and saves
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            if sys.stdout.isatty():
                print("\r\x1b[K", end="")
    return process.returncode


def train_to_end(folder: Path, solver: str, plan: Plan, *, interrupt: bool = False) -> None:
    """Train with one solver to the end; interrupt the run once if requested and not done yet."""
    total = plan.copies(solver) * N_TRAIN
    write_run_file(folder, solver, plan)
    done = evaluations(folder, solver)
    if interrupt and not done:
        code = train(folder, solver, plan, interrupt_at=total * 2 // 5)
        done = evaluations(folder, solver)
        if code not in (0, TRY_AGAIN):
            raise Stop(f"training failed with exit code {code}; see {folder / solver}.out", code)
        if code == TRY_AGAIN:
            print(f"  SIGTERM past {done[-1]['samples']:,} samples: saved, exit code {code}")
            print("  the same command again:")
    if not done or done[-1]["samples"] < total:
        code = train(folder, solver, plan)
        if code != 0:
            raise Stop(f"training failed with exit code {code}; see {folder / solver}.out", code)
    print(f"  {total:,} samples in {seconds(folder, solver):.0f} s, evaluations included")


def exact(folder: Path, task: Task, plan: Plan) -> float:
    """Return the error of the exact model, which is computed once."""
    path = folder / "exact.json"
    if not path.exists():
        began = time.perf_counter()
        mse = exact_error(task, plan.exact_samples)
        path.write_text(json.dumps({"mse": mse, "seconds": time.perf_counter() - began}))
    found = json.loads(path.read_text())
    print(f"  test MSE {found['mse']:.6f}, {found['seconds']:.0f} s")
    return float(found["mse"])


# ---------------------------------------------------------------------------------- the results


def draw(folder: Path, reference: float, plan: Plan) -> Path:
    """Draw the curves of both solvers into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    for (solver, name), colour, marker in zip(
        SOLVERS.items(), ("#0b5fa5", "#d1622b"), ("o", "s"), strict=True
    ):
        records = evaluations(folder, solver)
        samples = np.array([r["samples"] for r in records])
        excess = np.array([r["test_mse"] for r in records]) / reference
        axes.plot(samples, excess, color=colour, lw=1.6, label=name)
        axes.plot(samples[-1], excess[-1], marker, color=colour, ms=6)
        axes.annotate(
            f"{excess[-1]:.3f}", (samples[-1], excess[-1]), xytext=(0, 8),
            textcoords="offset points", ha="center", color=colour, fontsize=9,
        )  # fmt: skip
    axes.axhline(1, color="0.25", lw=1, ls="--")
    axes.annotate(
        f"exact least squares (float64, {plan.exact_samples:,} samples)", (0.01, 1),
        xycoords=("axes fraction", "data"), xytext=(0, -4), textcoords="offset points",
        va="top", fontsize=9, color="0.25",
    )  # fmt: skip
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="training samples seen (noisy images, each one new)",
        ylabel="test MSE / test MSE of the exact model",
        title="Digits with Gaussian noise: 1437 centers, Laplace kernel",
    )
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.97), high)
    ticks = [t for t in (1, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10) if t <= high]
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(which="major", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = folder / "curves.png"
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path


def rows_of_table(folder: Path, reference: float) -> list[dict[str, Any]]:
    """Return one row per solver: its samples, its error and its time."""
    rows, shortest = [], min(evaluations(folder, solver)[-1]["samples"] for solver in SOLVERS)
    for solver, name in SOLVERS.items():
        records = evaluations(folder, solver)
        last = records[-1]
        common = next(r for r in records if r["samples"] >= shortest)  # at most a few steps later
        near = [r["samples"] for r in records if r["test_mse"] <= 1.05 * reference]
        rows.append(
            {
                "solver": name,
                "samples": last["samples"],
                "test MSE": f"{last['test_mse']:.6f}",
                "/ exact": f"{last['test_mse'] / reference:.4f}",
                f"at {shortest}": f"{common['test_mse'] / reference:.4f}",
                "accuracy": f"{last['test_accuracy']:.4f}",
                "samples to 1.05": f"{near[0]}" if near else "not reached",
                "seconds": f"{seconds(folder, solver):.0f}",
                "resumed": "yes" if was_resumed(folder, solver) else "no",
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0 at its end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, help="length of the stream (default 1000000)")
    parser.add_argument("--quick", action="store_true", help="a short stream")
    parser.add_argument("--folder", type=Path, default=Path("runs/digits"))
    parser.add_argument("--fresh", action="store_true", help="start over")
    options = parser.parse_args(arguments)
    if options.samples is not None and options.samples < N_TRAIN:
        parser.error(f"--samples must be at least {N_TRAIN}, one noisy copy of every digit")
    plan = make_plan(options.samples, options.quick)
    began = time.perf_counter()
    try:
        show(options.folder, plan, options.fresh)
    except Stop as stop:
        print(f"digits: {stop}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print("digits: stopped; the same command goes on from here", file=sys.stderr)
        return TRY_AGAIN
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def show(folder: Path, plan: Plan, fresh: bool) -> None:
    """Run the five parts of the demo."""
    open_folder(folder, plan, fresh)
    print("1. stores")
    task = make_task()
    write_stores(folder, task)
    print(f"2. exact least squares on {plan.exact_samples:,} samples, float64")
    reference = exact(folder, task, plan)
    for number, solver in enumerate(SOLVERS, start=3):
        print(f"{number}. {SOLVERS[solver]}: streamkern train {folder}/{solver}.toml")
        train_to_end(folder, solver, plan, interrupt=solver == "block")
    rows = rows_of_table(folder, reference)
    (folder / "table.json").write_text(json.dumps({"exact": reference, "runs": rows}, indent=1))
    print(f"5. curves: {draw(folder, reference, plan)}")
    print(f"\nnoisy test, 7200 images; exact model: test MSE {reference:.6f}\n")
    print(text_table(rows, list(rows[0])))
    print()


if __name__ == "__main__":
    sys.exit(main())
