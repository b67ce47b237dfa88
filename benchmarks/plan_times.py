"""What `plan` expects a run to take, against what it takes: setup, an epoch and the whole.

Other work on the machine slows what is measured and what is run alike, if it lasts: so each run is
planned before and after, and the middle of the two is what is compared.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import streamkern as sk
from benchmarks.harness import Figure, check, figure, points
from streamkern.stream.sources.base import BaseSource
from streamkern.train.opened import open_run
from streamkern.train.planned import Times, expected_times
from streamkern.train.training_data import open_test

REPEATS = 1
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
    run: dict[str, Any] = field(default_factory=dict)


FIXED = {"kernel": "laplace", "bandwidth": "median"}
SHAPES = (
    Shape("all open", 60_000, 16, 1, {"n_centers": 2000}, {}, 2),
    Shape("block, p", 300_000, 8, 1, FIXED | {"n_centers": 4000},
          {"name": "block", "block_size": 4000}, 2),
    Shape("block, p/4", 60_000, 128, 10, FIXED | {"n_centers": 8000},
          {"name": "block", "block_size": 2000}, 2),
    Shape("block, p/4", 80_000, 784, 10, FIXED | {"n_centers": 2000},
          {"name": "block", "block_size": 500, "ridge": 1e-6}, 2),
    Shape("direct", 100_000, 32, 1, FIXED | {"n_centers": 3000}, {"name": "direct", "ridge": 1e-6}),
    Shape("falkon", 100_000, 64, 1, {"kernel": "gaussian", "n_centers": 2000},
          {"name": "falkon", "ridge": 1e-6}, 11),
    Shape("eigenpro4", 100_000, 64, 10, FIXED | {"n_centers": 4000}, {"name": "eigenpro4"}, 2),
    Shape("eigenpro2", 8000, 784, 10, FIXED | {"centers": "all"}, {"name": "eigenpro2"}, 10),
)  # fmt: skip
SMALL = {"shapes": (Shape("block", 2000, 8, 1, FIXED | {"n_centers": 200}, {"name": "block"}),)}


def measure(repeats: int, *, shapes: tuple[Shape, ...] = SHAPES) -> list[Figure]:
    """Seconds it took; `expected`, and that over the median of what it took, `quotient`."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for at, shape in enumerate(shapes):
            place = Path(folder) / str(at)
            train, test = _stores(shape, place)
            turns = [_turn(shape, train, test, place / f"run{k}") for k in range(repeats)]
            found += _figures(shape, turns)
    return found


def _stores(shape: Shape, place: Path) -> tuple[Path, Path]:
    """Rows whose targets are a rough function of them; labels where there are several outputs."""
    X = points(shape.n + TEST_ROWS, shape.d, 1)
    f = np.sin(2 * X @ np.random.default_rng(2).standard_normal((shape.d, shape.c)))
    y = f.argmax(axis=1) if shape.c > 1 else (f + 0.1 * np.cos(7 * X[:, :1])).ravel()
    stores = place / "train.zarr", place / "test.zarr"
    for store, part in zip(stores, (slice(shape.n), slice(shape.n, None)), strict=True):
        sk.ingest_store(X[part], store, y=y[part])
    return stores


def _turn(shape: Shape, train: Path, test: Path, run_dir: Path) -> tuple[list[Times], Times]:
    """What was expected before and after, and what it took."""
    tables = {
        "data": {"train": str(train), "test": str(test), "epochs": shape.epochs},
        "model": shape.model, "solver": shape.solver,
        "run": {"device": "cpu", "run_dir": str(run_dir), **shape.run},
    }  # fmt: skip
    config = sk.RunConfig.from_tables(tables)
    before = _expected(config)
    marks: list[float] = []
    began = time.perf_counter()
    result = sk.train_model(config, on_evaluation=lambda record: marks.append(time.perf_counter()))
    whole = time.perf_counter() - began
    result.model.backend.close()
    records = _log(run_dir)
    check(bool(records), "the log of the run")
    setup = records["setup_s"]
    passes = max(1, round(result.samples / shape.n))
    expected = [before, _expected(config)]
    epoch = (whole - setup) / passes - mean(times.evaluation for times in expected)
    return expected, Times(setup, epoch, 0.0, whole, {})


def _expected(config: sk.RunConfig) -> Times:
    run = open_run(config)
    with run.backend:
        held_out: BaseSource | None = open_test(config, run.data)
        return expected_times(run, held_out)


def _log(run_dir: Path) -> dict[str, Any]:
    from json import loads

    lines = (run_dir / "log.jsonl").read_text().splitlines()
    return next(record for record in map(loads, lines) if record.get("event") == "start")


def _figures(shape: Shape, turns: list[tuple[list[Times], Times]]) -> list[Figure]:
    case = f"{shape.name}, n={shape.n}, d={shape.d}, c={shape.c}"
    found = []
    for part in ("setup", "epoch", "whole"):
        took = [getattr(times, part) for _, times in turns]
        expected = [mean(getattr(t, part) for t in planned) for planned, _ in turns]
        quotient = float(np.median(np.array(expected) / took))
        found.append(
            figure(case, part, "s", took, expected=float(np.median(expected)), quotient=quotient)
        )
        print(found[-1]["case"], part, took, expected, quotient, flush=True)
    return found
