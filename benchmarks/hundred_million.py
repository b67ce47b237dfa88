"""Stream 10^6 to 1.2 10^8 virtual rows: time to plan, to begin and to resume, and peak memory.

    python -m benchmarks.hundred_million --json hundred_million.json
    python -m benchmarks.hundred_million --rows 1000000 --kinds generator

Each size runs in a process of its own. `augmented` consists of 60 000 images of 4 x 4 bytes in as
many replicas as needed, flipped on the host, then scaled and made noisy at the feed; `generator`
draws the bytes of each row. The consumer adds up row numbers and features, and checks both sums.

plan_s, plan_mib   making the loader: the time, and the memory of the plan
first_s            from the start to the first batch; middle_s, last_s: to the middle and the last
                   batch of the epoch, which must equal the batch of an epoch in order, bit for bit
rate               samples/s of a whole epoch, read, shuffled, transformed and added up
share              of the floor: the same draws, and a copy of as many bytes
peak_mib           VmHWM minus the resident size after all imports (Linux)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import (
    REPOSITORY,
    SCHEMA,
    WrongResult,
    check,
    environment,
    json_parser,
    write_results,
)
from benchmarks.resident import reset_peak, resident_bytes
from streamkern.backend.base import Backend
from streamkern.basics.text import text_table

BASE, D, CLASSES = 60_000, 16, 10
# A unit is 4 replicas of the images, two to a block, or 65 536 drawn rows, eight to a block: 10^6
# rows already fill both buffers.
BATCH, BLOCK_BYTES = 16_384, 20 << 20
SIGMA, STEADY_UNITS = 0.1, 50
MODULE = "benchmarks.hundred_million"
KINDS = ("augmented", "generator")
COLUMNS = (
    *("kind", "rows", "units", "plan_s", "plan_mib", "first_s", "middle_s", "last_s"),
    *("epoch_s", "rate", "share", "stall", "peak_mib"),
)


def generated(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of 16 random bytes; the label is the last digit of the row number."""
    from streamkern.basics.randomness import words

    rows = np.arange(start, stop)
    X = words((seed, epoch, 99), rows, D // 4).view(np.uint8)
    return X.reshape(-1, 4, 4, 1), rows % CLASSES


def make_source(kind: str, rows: int) -> Any:
    """Return a source of at least `rows` virtual rows: whole units of 4 replicas, or exactly as
    many."""
    import streamkern as sk

    feed = [sk.Scale("global", mean=127.5, scale=73.9), sk.GaussianNoise(SIGMA)]
    if kind == "generator":
        names = [str(k) for k in range(CLASSES)]
        return sk.GeneratorSource(
            generated,
            rows,
            (4, 4, 1),
            np.uint8,
            CLASSES,
            names,
            block_rows=1 << 16,
            transforms=feed,
        )
    base = min(BASE, rows)
    X, y = generated(0, 0, 0, base)
    copies = 4 * -(-rows // (4 * base))
    return sk.AugmentedSource(sk.ArraySource(X, y), copies, [sk.RandomFlip(), *feed])


def child(kind: str, rows: int) -> dict[str, Any]:
    """Measure one size in this process."""
    import dask.local  # noqa: F401 - imported before the baseline is taken, as all imports are

    from streamkern.backend.devices import get_backend

    with get_backend("cpu") as backend:
        _first(make_source(kind, 1000), backend, 0)  # compiled code is loaded by its first call
        reset_peak()  # the imports had a peak of their own
        baseline = resident_bytes("VmRSS")
        began = time.perf_counter()
        source = make_source(kind, rows)
        results = {"kind": kind, "rows": source.n_rows, "units": source.n_units}
        results |= _plan(source)
        _first(source, backend, 0)
        results["first_s"] = time.perf_counter() - began
        n_batches = -(-source.n_rows // BATCH)
        resumed = {}
        for name, start in (("middle_s", n_batches // 2), ("last_s", n_batches - 1)):
            began = time.perf_counter()
            resumed[start] = _first(source, backend, start)
            results[name] = time.perf_counter() - began
        results |= _epoch(source, backend, resumed)
        results["peak_mib"] = (resident_bytes("VmHWM") - baseline) / 2**20
        floor = _floor(backend, kind)
        return {**results, "floor_s": floor * source.n_rows,
                "share": floor * source.n_rows / results["epoch_s"]}  # fmt: skip


def _loader(source: Any) -> Any:
    from streamkern.stream.batch_reader import BatchReader

    return BatchReader(source, batch_size=BATCH, seed=1, block_bytes=BLOCK_BYTES)


def _plan(source: Any) -> dict[str, float]:
    from streamkern.stream.order import EpochPlan
    from streamkern.stream.sources.unit_edges import unit_sizes

    began = time.perf_counter()
    loader = _loader(source)
    seconds = time.perf_counter() - began
    loader.close()
    mix_units = loader.order_key()["mix_units"]
    plan = EpochPlan(unit_sizes(source), seed=1, epoch=0, batch_size=BATCH, mix_units=mix_units)
    plan_bytes = sum(a.nbytes for a in vars(plan).values() if isinstance(a, np.ndarray))
    return {"plan_s": seconds, "plan_mib": plan_bytes / 2**20}


def _feed(loader: Any, backend: Backend) -> Any:
    from streamkern.stream.feed import Feed

    return Feed(loader, backend, dtype=np.float32, seed=1)


def _first(source: Any, backend: Backend, start: int) -> bytes:
    """Make a loader, and take one batch from `start` on; its digest."""
    with _loader(source) as loader, _feed(loader, backend) as feed:
        batches = feed.epoch(0, start)
        batch = next(batches)
        digest = _digest(batch)
        batches.close()
    return digest


def _digest(batch: Any) -> bytes:
    return hashlib.sha256(batch.row_ids.tobytes() + batch.X.tobytes()).digest()


def _epoch(source: Any, backend: Backend, resumed: dict[int, bytes]) -> dict[str, float]:
    """Consume every row of an epoch once, and sum the rows; `resumed` are digests of batches that a
    resumed epoch must return.

    A few units are read for several epochs, as long as it takes the memory to be in its steady
    state.
    """
    epochs = -(-STEADY_UNITS // source.n_units)
    n, count, rows, total = source.n_rows * epochs, 0, 0, 0.0
    with _loader(source) as loader, _feed(loader, backend) as feed:
        began = time.perf_counter()
        for batch in feed.epochs(0, epochs):
            count += len(batch.row_ids)
            rows += int(batch.row_ids.sum())
            total += float(batch.X.sum())
            if batch.epoch == 0 and batch.index in resumed:
                check(_digest(batch) == resumed.pop(batch.index), "a batch resumed at")
        seconds = time.perf_counter() - began
        stall = loader.stats.stall_s / seconds
    check((count, rows) == (n, n * (source.n_rows - 1) // 2), "the set of rows in an epoch")
    check(not resumed, "the number of batches")
    # The mean of the features is that of the bytes; 60 000 images are a sample of them.
    check(abs(total / (n * D)) < 8 / np.sqrt(min(n, BASE) * D), "the mean of the features")
    return {"epoch_s": seconds / epochs, "rate": n / seconds, "stall": stall}


def _floor(backend: Backend, kind: str, repeats: int = 50) -> float:
    """Return the seconds per row of the random draws alone, and of copying as many bytes as pass
    through memory.

    Draws: 16 normals, and a block of words for the flip or the bytes. Bytes: the row (X, label,
    number: 32) is made and scattered, of the images also flipped; then 16 float32 are cast,
    scaled, made noisy (written and added to) and summed.
    """
    from streamkern.basics.randomness import RowRandom

    rows = np.arange(BATCH)
    n_bytes = 32 * (3 if kind == "augmented" else 2) + 4 * D * 4
    target, origin = (np.ones(BATCH * n_bytes, np.uint8) for _ in range(2))
    draws = np.empty((BATCH, D), np.float32)

    def work() -> None:
        rng = RowRandom(
            np, 1, 0, 1, rows, run=backend.run, fills=backend.fills, empty=lambda *_: draws
        )
        rng.normal((D,))
        rng.integers(0, 2)
        half = len(target) // 2
        backend.run(
            lambda part: np.copyto(target[part], origin[part]), [slice(0, half), slice(half, None)]
        )

    return _median(work, repeats) / BATCH


def _median(call: Callable[[], None], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def run(kinds: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Measure all sizes of all kinds, and the differences between the peaks of one kind."""
    results: dict[str, Any] = {"schema": SCHEMA, **environment(), "figures": [], "wrong": []}
    for kind in kinds:
        for rows in sizes:
            command = [sys.executable, "-m", MODULE, "--child", kind, str(rows)]
            completed = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
            if completed.returncode:
                results["wrong"].append(f"{kind}, {rows}: {completed.stderr.strip()[-2000:]}")
                continue
            results["figures"].append(json.loads(completed.stdout.splitlines()[-1]))
            print(show(results["figures"][-1:]), flush=True)
    results["peak_spread"] = {
        kind: max(peaks) / min(peaks) - 1
        for kind in kinds
        if (peaks := [f["peak_mib"] for f in results["figures"] if f["kind"] == kind])
    }
    results["load_after"] = environment()["machine"]["load"]
    return results


def show(figures: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table."""
    rows = [
        {k: round(v) if isinstance(v, float) and v >= 1000 else v for k, v in f.items()}
        for f in figures
    ]
    return text_table(rows, COLUMNS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if every result was right."""
    parser = json_parser(__doc__, f"python -m {MODULE}")
    parser.add_argument("--rows", type=int, nargs="+", default=[10**6, 10**7, 120_000_000])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--child", nargs=2, metavar=("KIND", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        try:
            print(json.dumps(child(options.child[0], int(options.child[1]))))
        except WrongResult as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    results = run(options.kinds, options.rows)
    print("\n" + show(results["figures"]))
    for kind, spread in results["peak_spread"].items():
        print(f"{kind}: peaks are within {spread:.1%} of each other")
    for wrong in results["wrong"]:
        print(f"WRONG: {wrong}")
    write_results(options.json, results)
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
