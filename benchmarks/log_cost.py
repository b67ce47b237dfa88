"""Measure the cost of reporting a run: log, line on a terminal and callbacks, against silence."""

from __future__ import annotations

import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import C, Figure, bandwidth, check, figure, in_turns, one_hot, points
from streamkern.basics.progress import ProgressLine
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.run_log import RunLog
from streamkern.stream.meter import Meter
from streamkern.train.loop.progress import RunProgress
from streamkern.train.loop.sinks import numbers_in
from streamkern.train.loop.step_loop import Position, StepLoop
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup.assemble import Assembled, start

REPEATS = 5
SMALL = {"rows": 4096, "centers": 256, "d": 32}
ALLOWED = 0.5
"""Per cent of a run that all of it may take."""


def measure(repeats: int, *, rows: int = 40_000, centers: int = 4000, d: int = 256) -> list[Figure]:
    """Return the seconds of a pass, and the share that reporting takes.

    The passes take turns. As a difference of two times the share is lost in their spread; so the
    time inside `RunProgress.record_step`, which is all that a run does for its log between two
    steps, is summed over a pass as well. `allowed` is what it may be.
    """
    X = points(rows, d, 1)
    tables = {
        "data": {"scale": "none", "epochs": 1},
        "model": {"kernel": "laplace", "bandwidth": bandwidth(d), "n_centers": centers},
        "solver": {"name": "block", "ridge": 0.0},
        "run": {"device": "cpu"},
    }
    inputs = RunInputs(sk.ArraySource(X, one_hot(X)))
    run = open_run(sk.RunConfig.from_tables(tables), inputs)
    with run.backend, tempfile.TemporaryDirectory() as folder:
        made = start(run, lambda event, fields: None)
        with RunDirectory(Path(folder) / "run") as directory, directory.open_log() as log:
            passes = _Passes(run, made, log)
            times = in_turns({"silent": passes.silent, "told": passes.told}, repeats)
        written = (Path(folder) / "run" / "log.jsonl").read_bytes()
    are_equal = [np.array_equal(passes.weights["silent"], w) for w in passes.weights.values()]
    check(all(are_equal) and passes.heard > 0 and b"train_mse" in written, "a pass that is told of")
    case = f"rows={rows}, p={centers}, d={d}, c={C}, m={made.batch_size}"
    shares = passes.shares[-repeats:]  # the first one warms up
    return [
        *(figure(case, variant, "s", times[variant]) for variant in ("silent", "told")),
        figure(case, "time in it", "% of the pass", shares, allowed=ALLOWED),
    ]


class _Terminal(io.StringIO):
    """A terminal that discards the progress line, which is drawn ten times a second."""

    def isatty(self) -> bool:
        return True


class _Passes:
    """Passes of one run from the zero function, reported or silent. heard : number of callback
    calls."""

    def __init__(self, run: ResolvedRun, made: Assembled, log: RunLog) -> None:
        self.run, self.made, self.log = run, made, log
        self.heard = 0
        self.shares: list[float] = []
        self.weights: dict[str, np.ndarray] = {}

    def silent(self) -> None:
        """Run the steps alone."""
        self._pass("silent", None)

    def told(self) -> None:
        """Run the steps with a log on the disk, a progress line and a callback that reads
        numbers."""
        with ProgressLine(_Terminal()) as line:
            self._pass("told", RunProgress(line, self.log, Position(), on_record=self._hear))

    def _hear(self, record: dict[str, Any]) -> None:
        self.heard += len(list(numbers_in(record)))

    def _pass(self, name: str, live: RunProgress | None) -> None:
        position = Position() if live is None else live.position
        steps = StepLoop(self.run, self.made, position, lambda event, fields: None)
        steps.begin()
        inside, began = 0.0, time.perf_counter()
        with steps.feed() as feed:
            if live is not None:
                live.begin(Meter(feed.reader, 0), self.run.data.source.n_rows, 1)
            for batch in feed.epoch(0):
                loss = steps.take(batch)
                if live is not None:
                    before = time.perf_counter()
                    live.record_step(loss)
                    inside += time.perf_counter() - before
            if live is not None:
                before = time.perf_counter()
                live.losses += steps.watch.pending_loss()
                live.log_losses()
                inside += time.perf_counter() - before
        if live is not None:
            self.shares.append(100 * inside / (time.perf_counter() - began))
        self.weights[name] = np.array(steps.solver.weights(steps.state))
