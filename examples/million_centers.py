"""Train a million centers within 16 GiB: two million rows, one epoch, and EigenPro 4 for as long.

    python examples/million_centers.py       hours on a CPU; the same command resumes
    python examples/million_centers.py --centers 10000 --rows 100000 --memory "500 MiB"

Rows are normal, with 16 features. The target is the sum of three sines along random directions,
with variance 1 and noise of standard deviation 0.5. Test targets have no noise, so the test MSE is
the excess risk. The Laplace kernel has bandwidth 6; all other settings are "auto", for both
solvers. EigenPro 4 trains until it has taken as long as the block solver, setup included. It is
then stopped by a SIGTERM, saves a checkpoint, and this checkpoint is evaluated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from streamkern.basics.text import text_table
from streamkern.rundir.run_log import read_log

D, NOISE, BLOCK = 16, 0.5, 100_000
LEAST_S = 1.0
PROGRAM = [sys.executable, "-m", "streamkern"]


def blocks(rows: int, part: int, noise: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield X (m, 16) and y (m,), float32, the same in every call. part : 0 training, 1 test."""
    directions = np.random.default_rng(33).standard_normal((D, 3)) / np.sqrt(D)

    def truth(X: np.ndarray) -> np.ndarray:
        return np.sin(1.5 * X @ directions).sum(axis=1)

    spread = truth(np.random.default_rng(34).standard_normal((BLOCK, D))).std()
    for at in range(0, rows, BLOCK):
        rng = np.random.default_rng([33, part, at])
        X = rng.standard_normal((min(BLOCK, rows - at), D), dtype=np.float32)
        y = truth(X) / spread + noise * rng.standard_normal(len(X))
        yield X, y.astype(np.float32)


def stores(folder: Path, rows: int) -> tuple[Path, Path]:
    """Return the stores of training and test rows, and write those that are not complete."""
    paths = folder / f"train-{rows}.zarr", folder / "test.zarr"
    for part, (path, n, noise) in enumerate(zip(paths, (rows, 10_000), (NOISE, 0.0), strict=True)):
        try:
            sk.open_store(path)
        except sk.DataError:  # missing, or unfinished: `ingest_store` goes on with it
            path.parent.mkdir(parents=True, exist_ok=True)
            sk.ingest_store(blocks(n, part, noise), path)
    return paths


def command(options: argparse.Namespace, solver: str, run: Path) -> list[str]:
    train, test = stores(options.folder, options.rows)
    given = {
        "data.scale": "none", "model.kernel": "laplace", "model.bandwidth": 6.0,
        "model.n_centers": options.centers, "run.checkpoint_every": "5 min",
        "run.evaluate_at": [options.rows // 4, options.rows // 2],
    }  # fmt: skip
    pairs = [f"--set={name}={json.dumps(value)}" for name, value in given.items()]
    return [
        *PROGRAM, "train", f"--train={train}", f"--test={test}", f"--run-dir={run}",
        f"--solver={solver}", f"--memory={options.memory}", *pairs,
        f"--epochs={1 if solver == 'block' else 100}",
    ]  # fmt: skip


def trained(given: list[str], run: Path, seconds: float | None) -> float:
    """Train for a limited time since the first line of the log; return the peak memory in GiB."""
    process, began, peak = subprocess.Popen(given), time.monotonic(), 0
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):  # it may just have ended
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max(peak, next(int(x.split()[1]) for x in status if x.startswith("VmHWM")))
        if not (run / "log.jsonl").exists():
            began = time.monotonic()
        elif seconds is not None and time.monotonic() - began > seconds:
            process.terminate()  # it saves first
            process.wait()
            return peak / 2**20
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak / 2**20


def seconds_of(run: Path) -> float:
    """Return the seconds of setup and steps, from the log, without the time between resumes."""
    spent, last = 0.0, None
    for record in read_log(run / "log.jsonl") if (run / "log.jsonl").exists() else []:
        now = datetime.fromisoformat(record["time"]).timestamp()
        if record["event"] == "centers":  # a setup that nothing was saved of begins again
            spent = 0.0
        elif record["event"] != "resume" and last is not None:
            spent += now - last
        last = now
    return spent


def figures(run: Path, test: Path) -> dict[str, Any]:
    """Return the test error of the saved model, and the number of its samples."""
    info = subprocess.run(
        [*PROGRAM, "info", run, "--json"], check=True, capture_output=True, text=True
    )
    state = json.loads(info.stdout)
    if not state["checkpoints"]:  # its time was over before its first step
        return {"samples": 0, "test MSE": "-"}
    found = subprocess.run(
        [*PROGRAM, "evaluate", run, test, "--json"], check=True, capture_output=True, text=True
    )
    return {"samples": state["samples"], "test MSE": f"{json.loads(found.stdout)['mse']:.5f}"}


def run(options: argparse.Namespace) -> None:
    """Train with both solvers, one after the other."""
    rows, allowed = [], None
    for solver in ("block", "eigenpro4"):
        folder = options.folder / f"{solver}-{options.centers}-{options.rows}"
        left = None if allowed is None else allowed - seconds_of(folder)
        peak = 0.0
        # One that has had its time is only shown.
        if left is None or left > LEAST_S or not folder.exists():
            least = left if left is None else max(left, LEAST_S)
            peak = trained(command(options, solver, folder), folder, least)
        spent = seconds_of(folder)
        allowed = allowed or spent
        row = {
            "solver": solver,
            "seconds": round(spent),
            "peak, GiB": f"{peak:.2f}" if peak else "-",
        }
        rows.append(row | figures(folder, options.folder / "test.zarr"))
        print(f"\n{text_table(rows, list(rows[0]))}\n", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/million"), help="for the stores and the runs")
    add("--centers", type=int, default=10**6)
    add("--rows", type=int, default=2 * 10**6)
    add("--memory", default="16 GiB")
    run(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
