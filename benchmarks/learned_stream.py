"""Learn a metric on 10^7 virtual rows: bounded memory, ten kills, the same bits.

    python -m benchmarks.learned_stream --json learned_stream.json
    python -m benchmarks.learned_stream --copies 2 --centers 200 --kills 3      a minute

There are 60 000 rows of 784 bytes, 12 of which determine the target, in as many noisy copies as
needed, each drawn when it is used. One run with `metric = "learn"` is not disturbed, one is killed
at random instants and resumed until it ends, and one has no metric. For each run, the output has
the seconds, the peak memory of a process beyond its imports, the planned memory, and the error on
10 000 other rows. The setup, in which the metric is learned, is killed in proportion to its time;
the first kill always hits it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import check, environment, json_parser, write_results
from benchmarks.resident import begin_peak, resident_bytes
from streamkern.basics.text import text_table
from streamkern.config.run_config import RunConfig
from streamkern.ingest.ingest import ingest
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.saved_model import load_model
from streamkern.train.train import train

ROWS, TEST, D, TELLING = 60_000, 10_000, 784, 12
SIGMA = 0.2
POLLED_S = 0.1
BEFORE = "imports"  # a file with what a process had before it began


def write_store(path: Path, n: int, part: int) -> None:
    """Write a store of bytes X (n, 784), and of a smooth function of 12 of them and of three sums
    of these."""
    rng = np.random.default_rng([17, part])
    X = rng.integers(0, 256, (n, D), dtype=np.uint8)
    u = X[:, ::64][:, :TELLING].astype(np.float64) / 64 - 2
    y = np.sin(u[:, 0]) + u[:, 1] * u[:, 2] / 2 + np.cos(u[:, 3:].sum(axis=1) / 3)
    ingest(X, path, y=(y + 0.1 * rng.normal(size=n)).astype(np.float32))


def make_config(args: argparse.Namespace, folder: Path, metric: str, name: str) -> RunConfig:
    """Return the settings of the run `name`."""
    return RunConfig.from_tables({
        "data": {
            "train": str(folder / "train.zarr"),
            "test": str(folder / "test.zarr"),
            "copies": args.copies, "epochs": 1,
            "transforms": [{"kind": "scale"}, {"kind": "noise", "sigma": SIGMA}],
        },
        "model": {"n_centers": args.centers, "metric": metric},
        "solver": {"name": "block"},
        "run": {
            "run_dir": str(folder / name), "device": "cpu", "threads": args.threads,
            "memory": args.memory, "checkpoint_every": "10 s", "evaluate_every": 0,
        },
    })  # fmt: skip


def _life(args: argparse.Namespace, folder: Path, metric: str, name: str) -> None:
    import sklearn.utils.validation  # noqa: F401  # all imports come before

    config = make_config(args, folder, metric, name)
    open_run(config).backend.close()  # compiles
    (folder / BEFORE).write_text(str(begin_peak()))  # the imports had a peak of their own
    train(config).model.backend.close()


def live(
    args: argparse.Namespace, folder: Path, metric: str, name: str, seconds: float | None = None
) -> tuple[bool, float]:
    """Return whether a process ended within these seconds, and its peak memory in MiB."""
    life = multiprocessing.get_context("spawn").Process(
        target=_life, args=(args, folder, metric, name)
    )
    life.start()
    began, peak = time.monotonic(), 0
    while life.is_alive() and (seconds is None or time.monotonic() - began < seconds):
        peak = max(peak, resident_bytes("VmHWM", life.pid))
        life.join(POLLED_S)
    life.kill()
    life.join()
    check(life.exitcode in (0, -9), f"the exit code of {name}, {life.exitcode},")
    before_file = folder / BEFORE
    peak_above = peak - int(before_file.read_text()) if before_file.exists() else 0
    return life.exitcode == 0, peak_above / 2**20


def result(folder: Path, name: str) -> tuple[dict[str, Any], bytes]:
    """Return the last evaluation in the log, and all bits of the weights."""
    records = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
    figures = [r for r in records if r.get("event") == "evaluation"][-1]
    chosen = [r["chosen"] for r in records if r.get("event") == "metric" and "chosen" in r]
    model = load_model(folder / name, device="cpu", threads=1)
    with model.backend:
        metric = model.op.kernel.metric
        bits = np.asarray(model.weights).tobytes() + (b"" if metric is None else metric.tobytes())
    return {
        "r2": figures["test_r2"], "mse": figures["test_mse"],
        "learned": chosen[0] if chosen else None,
    }, bits  # fmt: skip


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return a record for each of the three runs."""
    write_store(folder / "train.zarr", ROWS, 0)
    write_store(folder / "test.zarr", TEST, 1)
    records, bits, draw = [], {}, random.Random(args.seed)
    for name, metric in (("learned", "learn"), ("none", "none")):
        run = open_run(make_config(args, folder, metric, name))
        plan = run.buffers.peak / 2**20
        run.backend.close()
        began = time.monotonic()
        ended, peak = live(args, folder, metric, name)
        check(ended, f"the run {name}")
        seconds = time.monotonic() - began
        found, bits[name] = result(folder, name)
        record = {"run": name, "rows": ROWS * args.copies, "seconds": seconds, "kills": 0}
        records.append(record | {"peak_mib": peak, "plan_mib": plan} | found)
        print(text_table(records[-1:], list(COLUMNS)), flush=True)
    full_seconds, plan = records[0]["seconds"], records[0]["plan_mib"]
    began, kills, peak, ended = time.monotonic(), 0, 0.0, False
    while not ended:
        limit = None
        if kills < args.kills:
            limit = args.first if kills == 0 else draw.uniform(0.3, 2.0) * full_seconds / args.kills
        ended, highest = live(args, folder, "learn", "killed", limit)
        peak, kills = max(peak, highest), kills + (not ended)
    found, bits["killed"] = result(folder, "killed")
    check(bits["killed"] == bits["learned"], "a bit of the run that was killed")
    records.append({
        "run": "killed", "rows": ROWS * args.copies, "seconds": time.monotonic() - began,
        "kills": kills, "peak_mib": peak, "plan_mib": plan, **found,
    })  # fmt: skip
    return records


COLUMNS = ("run", "rows", "kills", "seconds", "peak_mib", "plan_mib", "r2", "mse")


def main() -> None:
    """See the module's first lines."""
    parser = json_parser(__doc__)
    add = parser.add_argument
    add("--copies", type=int, default=167, help="of 60 000 rows")
    add("--centers", type=int, default=1000)
    add("--kills", type=int, default=10)
    add("--first", type=float, default=8.0, help="seconds to the first kill")
    add("--memory", default="2 GiB")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0, help="of the kills")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = measure(args, Path(folder))
    print(text_table(records, list(COLUMNS)))
    circumstances = {"environment": environment(), "centers": args.centers}
    write_results(args.json, circumstances | {"runs": records})


if __name__ == "__main__":
    sys.exit(main())
