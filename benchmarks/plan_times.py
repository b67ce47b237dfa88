"""Compare the times that `plan` predicts with a run: setup, one epoch, and the whole run.

Runs use one thread; times are seconds of its processor, which other work on the machine affects
little. Each run is planned before and after it, and compared with the mean of the two plans.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock
from unittest.mock import patch

import numpy as np

import streamkern as sk
from benchmarks.harness import Figure, check, figure, points
from streamkern.stream.sources.base import BaseSource
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.resolve.training_data import open_test
from streamkern.train.setup import speeds
from streamkern.train.setup.planned import Times, expected_times
from streamkern.train.trainer import Trainer

REPEATS = 1
CLOCK = time.process_time
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
TEST_ROWS = 5000


@dataclass(frozen=True)
class Shape:
    """A run: its rows, and the settings that are not at their defaults."""

    name: str
    n: int
    d: int
    c: int
    model: dict[str, Any]
    solver: dict[str, Any]
    epochs: int = 1


FIXED = {"kernel": "laplace", "bandwidth": "median"}
SHAPES = (
    Shape("all open", 60_000, 16, 1, {"metric": "none", "n_centers": 2000}, {}, 2),
    Shape("block, p", 300_000, 8, 1, FIXED | {"n_centers": 4000},
          {"name": "block", "block_size": 4000}, 2),
    Shape("block, p/4", 60_000, 128, 10, FIXED | {"n_centers": 8000},
          {"name": "block", "block_size": 2000}, 2),
    Shape("block, p/4", 80_000, 784, 10, FIXED | {"n_centers": 2000},
          {"name": "block", "block_size": 500, "ridge": 1e-6}, 2),
    Shape("direct", 100_000, 32, 1, FIXED | {"n_centers": 3000}, {"name": "direct", "ridge": 1e-6}),
    Shape("falkon", 100_000, 64, 1, {"kernel": "gaussian", "metric": "none", "n_centers": 2000},
          {"name": "falkon", "ridge": 1e-6}, 11),
    Shape("eigenpro4", 100_000, 64, 10, FIXED | {"n_centers": 4000}, {"name": "eigenpro4"}, 2),
    Shape("eigenpro2", 8000, 784, 10, FIXED | {"centers": "all"}, {"name": "eigenpro2"}, 10),
)  # fmt: skip
SMALL = {"shapes": (Shape("block", 2000, 8, 1, FIXED | {"n_centers": 200}, {"name": "block"}),)}


def measure(repeats: int, *, shapes: tuple[Shape, ...] = SHAPES) -> list[Figure]:
    """Return the measured seconds; `expected`; and `quotient`, which is `expected` divided by their
    median."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for at, shape in enumerate(shapes):
            place = Path(folder) / str(at)
            train, test = _stores(shape, place)
            turns = [_turn(shape, train, test, place / f"run{k}") for k in range(repeats)]
            found += _figures(shape, turns)
    return found


def _stores(shape: Shape, place: Path) -> tuple[Path, Path]:
    """Write stores with targets that are a rough function of the rows, or labels for several
    outputs."""
    X = points(shape.n + TEST_ROWS, shape.d, 1)
    w = np.random.default_rng(2).standard_normal((shape.d, shape.c)) / np.sqrt(shape.d)
    f = np.sin(2 * X @ w)
    y = f.argmax(axis=1) if shape.c > 1 else (f + 0.1 * np.cos(7 * X[:, :1])).ravel()
    stores = place / "train.zarr", place / "test.zarr"
    for store, part in zip(stores, (slice(shape.n), slice(shape.n, None)), strict=True):
        sk.ingest_store(X[part], store, y=y[part])
    return stores


def _turn(shape: Shape, train: Path, test: Path, run_dir: Path) -> tuple[list[Times], Times]:
    """Return the times planned before and after a run, and the times of the run."""
    tables = {
        "data": {"train": str(train), "test": str(test), "epochs": shape.epochs},
        "model": shape.model, "solver": shape.solver,
        "run": {"device": "cpu", "threads": 1, "run_dir": str(run_dir)},
    }  # fmt: skip
    config = sk.RunConfig.from_tables(tables)
    with ProcessPoolExecutor(1, FORKS, max_tasks_per_child=1) as fresh:
        before, took, after = (
            fresh.submit(call, config).result() for call in (_expected, _took, _expected)
        )
    return [before, after], took


def _took(config: sk.RunConfig) -> Times:
    """Return the times of a run; the time of an evaluation belongs to its epoch."""
    began, marks = CLOCK(), list[float]()
    with _marked(marks):
        result = sk.train_model(config, on_evaluation=lambda record: marks.append(CLOCK()))
    whole = CLOCK() - began
    result.model.backend.close()
    check(len(marks) == len(result.history) + 1, "the number of evaluations")
    setup, passes = marks[0] - began, len(result.history)
    return Times(setup, (whole - setup) / passes, 0.0, whole, {})


@contextmanager
def _marked(marks: list[float]) -> Iterator[None]:
    """Append the time at which a setup ends to `marks`, for a `with` block."""
    begin = Trainer.begin

    def marked(trainer: Trainer, *given: Any) -> None:
        begin(trainer, *given)
        marks.append(CLOCK())

    with mock.patch.object(Trainer, "begin", marked):
        yield


def _expected(config: sk.RunConfig) -> Times:
    run = open_run(config)
    with run.backend:
        held_out: BaseSource | None = open_test(config, run.data)
        with patch.object(speeds, "perf_counter", CLOCK):
            return expected_times(run, held_out)


def _figures(shape: Shape, turns: list[tuple[list[Times], Times]]) -> list[Figure]:
    case = f"{shape.name}, n={shape.n}, d={shape.d}, c={shape.c}"
    found = []
    for part in ("setup", "epoch", "whole"):
        took = [getattr(times, part) for _, times in turns]
        expected = [
            mean(getattr(t, part) + (t.evaluation if part == "epoch" else 0) for t in planned)
            for planned, _ in turns
        ]
        quotient = float(np.median(np.array(expected) / took))
        found.append(
            figure(case, part, "s", took, expected=float(np.median(expected)), quotient=quotient)
        )
    return found
