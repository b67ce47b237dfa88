"""Compare training from a store with training on the same batches in memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import streamkern as sk
from benchmarks.harness import Figure, check, figure, in_turns, rates
from benchmarks.out_of_core import make_store
from streamkern.backend.batch import Batch
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.feed import Feed
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.setup.assemble import Assembled, start

REPEATS = 3
SMALL = {"rows": 4096, "centers": 512}


def measure(repeats: int, *, rows: int = 60_000, centers: int = 10_000) -> list[Figure]:
    """Return samples/s of an epoch with d = 784, c = 10 and the default solver; the floor is from
    memory.

    `stall_share` is the part of the epochs from the store that is spent waiting for data.
    """
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "data": {
                "train": str(make_store(Path(folder), rows)), "scale": "none", "epochs": 1,
            },
            "model": {"kernel": "laplace", "bandwidth": 20.0, "n_centers": centers},
            "solver": {"name": "block"},
            "run": {"device": "cpu"},
        }  # fmt: skip
        run = open_run(sk.RunConfig.from_tables(tables))
        with run.backend:
            return _measure(repeats, run, start(run, lambda event, fields: None))


def _measure(repeats: int, run: ResolvedRun, made: Assembled) -> list[Figure]:
    epoch = Epoch(run, made)
    epoch.keep()
    times = in_turns({"from memory": epoch.from_memory, "from store": epoch.from_store}, repeats)
    weights = list(epoch.weights.values())
    check(np.array_equal(*weights), "training from the store, next to training from memory,")
    rows = run.data.source.n_rows
    case = f"rows={rows}, p={run.problem.p}, m={made.batch_size}, b={run.sizes.block_size}"
    memory, store = (rates(rows, times[key]) for key in ("from memory", "from store"))
    floor = float(np.median(memory))
    stalls = float(np.median(epoch.stalls))
    return [
        figure(case, "from memory", "samples/s", memory),
        figure(case, "from store", "samples/s", store, floor=floor, stall_share=stalls),
    ]


class Epoch:
    """The first epoch of a run, from the zero function, as often as it is asked for."""

    def __init__(self, run: ResolvedRun, made: Assembled) -> None:
        self.run, self.made = run, made
        self.stalls: list[float] = []
        self.weights: dict[str, np.ndarray] = {}
        self.kept: list[Batch] = []

    def keep(self) -> None:
        """Hold all batches in memory, for `from_memory`."""
        self._through_store(lambda batch: self.kept.append(_copy(batch)))

    def from_store(self) -> None:
        """Read, decode, shuffle, cast, step."""
        state, solver = self.made.solver.init(), self.made.solver
        began = time.perf_counter()
        stalled = self._through_store(lambda b: solver.step(state, b))
        self.stalls.append(stalled / (time.perf_counter() - began))
        self.weights["store"] = solver.weights(state).copy()

    def from_memory(self) -> None:
        """Step."""
        state, solver = self.made.solver.init(), self.made.solver
        for b in self.kept:
            solver.step(state, b)
        self.weights["memory"] = solver.weights(state).copy()

    def _through_store(self, use: Callable[[Batch], object]) -> float:
        """Return the seconds for which the consumer waited for data."""
        sizes = self.run.sizes
        loader = BatchReader(
            self.run.data.source,
            batch_size=self.made.batch_size,
            seed=0,
            block_bytes=sizes.loader_block_bytes,
            in_flight_bytes=sizes.loader_in_flight_bytes,
        )
        with loader, Feed(loader, self.run.backend, dtype=np.float32, seed=0) as feed:
            for batch in feed.epoch(0):
                use(batch)
            return loader.stats.stall_s


def _copy(batch: Batch) -> Batch:
    return replace(batch, X=batch.X.copy(), Y=batch.Y.copy(), row_ids=batch.row_ids.copy())
