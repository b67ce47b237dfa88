"""Kill ranks, and sometimes their driver, at random instants, and compare every bit.

    python -m benchmarks.rank_kills --kills 200 --json rank_kills.json

`streamkern train --ranks 2` runs on this machine. One of its processes is killed (SIGKILL) again
and again, each time after the run has progressed further than before. If it was the driver, or if
the command gave up (`gave_up`), the same command is given again. The final arrays must equal the
arrays of an undisturbed run. `seen_s` is the time from the kill of a rank to the message about it,
and `again_s` the time to the next checkpoint. An existing JSON is continued, and its kills count.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import streamkern as sk
from benchmarks.harness import environment, json_parser, write_results
from streamkern.rundir.run_directory import RunDirectory

ROWS, D, CENTERS, EPOCHS = 40_000, 20, 1000, 12
OF_THE_DRIVER = 0.15
"""Of the kills."""
KILLS_OF_A_RUN = 20
SECONDS = ("seen_s", "again_s")
NOTHING: dict[str, Any] = {
    "kills": 0, "of_driver": 0, "gave_up": 0, "runs": 0, "failures": [], "seen_s": [], "again_s": []
}  # fmt: skip
RANK_BYTES = 60 << 20
"""That a worker holds once it is a rank; the others are Dask's helpers."""


def command(folder: Path, run: Path) -> list[str]:
    """Train in two ranks, with a checkpoint every few steps."""
    settings = {
        "model.n_centers": CENTERS, "model.kernel": "laplace", "model.bandwidth": 6.0,
        "solver.name": "block", "solver.block_size": 250, "data.batch_size": 512,
        "run.checkpoint_every": 20,
    }  # fmt: skip
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    where = ["--train", str(folder / "train.zarr"), "--run-dir", str(run)]
    train = [sys.executable, "-m", "streamkern", "train", *where]
    return [*train, "--ranks", "2", "--epochs", str(EPOCHS), *sets]


class Life:
    """A driver and its messages."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.said = run.with_suffix(".said")
        with self.said.open("a") as said:
            self.process = subprocess.Popen(command(folder, run), stdout=said, stderr=said)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if "spawn_main" in " ".join(child.cmdline()):
                    found += [child] if child.memory_info().rss > RANK_BYTES else []
            except psutil.Error:
                continue  # it has ended
        return found

    def losses(self) -> int:
        return self.said.read_text().count("is gone; the run")

    def gave_up(self, before: int) -> bool:
        """Return whether the run ended because ranks were lost too often before a new
        checkpoint."""
        return self.said.read_text().count("3 times in a row") > before


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint, -1 before the first."""
    steps = [int(path.stem.rpartition("-")[2]) for path in (run / "checkpoints").glob("*.json")]
    return max(steps, default=-1)


def arrays(run: Path) -> dict[str, Any]:
    """Return the arrays of the last checkpoint."""
    saved = RunDirectory(run, writable=False).load_latest()
    assert saved is not None
    assert saved.meta["position"]["done"]
    return {name: np.asarray(array) for name, array in saved.arrays.items()}


def killed(folder: Path, run: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """Run a training that is killed `kills` times, and return its times."""
    results: dict[str, Any] = {
        "kills": 0,
        "of_driver": 0,
        "gave_up": 0,
        "seen_s": [],
        "again_s": [],
    }
    life, furthest = Life(folder, run), -1
    while life.alive or life.gave_up(results["gave_up"]):
        if not life.alive:
            results["gave_up"] += 1
            life = Life(folder, run)
        ranks = life.ranks() if newest(run) > furthest and results["kills"] < kills else []
        if not ranks:
            time.sleep(0.05)
            continue
        time.sleep(draw.uniform(0, 1.5))
        furthest, losses, at = newest(run), life.losses(), time.monotonic()
        driver = draw.random() < OF_THE_DRIVER
        if not _ended(psutil.Process(life.process.pid) if driver else draw.choice(ranks)):
            continue  # by itself
        results["kills"] += 1
        if driver:
            results["of_driver"] += 1
            life.process.wait()
            life = Life(folder, run)
            continue
        while life.alive and life.losses() == losses and time.monotonic() - at < 30:
            time.sleep(0.02)
        if life.losses() == losses:
            continue  # it was not yet a rank, or there was nothing left to do
        results["seen_s"].append(round(time.monotonic() - at, 3))
        while life.alive and newest(run) <= furthest and time.monotonic() - at < 120:
            time.sleep(0.05)
        results["again_s"].append(round(time.monotonic() - at, 3))
    results["failed"] = life.said.read_text()[-2000:] if life.process.returncode else ""
    return results


def _ended(process: psutil.Process) -> bool:
    """Return whether the process was alive when it was killed."""
    with contextlib.suppress(psutil.Error):
        there = process.status() != psutil.STATUS_ZOMBIE
        process.kill()
        return there
    return False


def measure(kills: int, seed: int, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the record after each run of `KILLS_OF_A_RUN` at most, until it has so many kills.

    record : of a call before, or `NOTHING`.
    """
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="streamkern-rank-kills-") as name:
        folder = Path(name)
        X = rng.normal(size=(ROWS, D)).astype(np.float32)
        sk.ingest_store(X, folder / "train.zarr", y=np.sin(2 * X[:, 0]) + X[:, 1], chunk_mb=0.05)
        undisturbed = killed(folder, folder / "plain", 0, random.Random(seed))
        assert not undisturbed["failed"], undisturbed["failed"]
        expected = arrays(folder / "plain")
        while record["kills"] < kills and not record["failures"]:
            run, draw = folder / f"run-{record['runs']}", random.Random(f"{seed} {record['runs']}")
            found = killed(folder, run, min(KILLS_OF_A_RUN, kills - record["kills"]), draw)
            failed = found.pop("failed")
            record = {what: of + found.get(what, type(of)()) for what, of in record.items()}
            record["runs"] += 1
            record["failures"] += [failed] if failed else _differences(expected, arrays(run))
            yield record
            shutil.rmtree(run)


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return the counts, and the medians of the seconds."""
    return {
        what: {"median": statistics.median(of), "most": max(of)} if what in SECONDS and of else of
        for what, of in record.items()
    }


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"{name} is another"
        for name in sorted({*expected, *found})
        if not np.array_equal(expected.get(name), found.get(name), equal_nan=True)
    ]


def main() -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    record, before = NOTHING, []
    if args.json is not None and args.json.exists():
        written = json.loads(args.json.read_text())
        record, before = written["record"], written["environments"]
    here, records = environment(), measure(args.kills, args.seed, record)
    for record in records:
        print(summary(record), flush=True)
        written = {"environments": [*before, here], "summary": summary(record)}
        write_results(args.json, {**written, "record": record})
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
