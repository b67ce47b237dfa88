"""Cost laws of EigenPro 3 and of FALKON, measured: Table 1 of EP3.

One number grows, p or n, and the exponent of a power law is fitted to the operations and the memory
that `plan` counts, and to measured seconds. The memory excludes the interpreter, the compiler and
the buffers for reading rows, which grow with n up to a bound.

EigenPro 3 runs with the inexact projection, which keeps no p x p matrix. The exponents of its
operations and memory are compared with the exponents of the table's formulas for steps of 256 rows.
The table's row of the exact projection is Algorithm 1, with all rows in a step and n^2 numbers; no
solver here works like this. Only its p^3 operations are compared, with the setup of Algorithm 2
with the exact projection. The rows are normal, and nothing is learned. At these sizes, seconds grow
more slowly than operations, because larger matrices are multiplied faster.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import streamkern as sk
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Measurement, Results, exponent
from streamkern.rundir.run_log import read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLE, SETUP, MEMORY = "seconds a sample", "seconds of setup", "planned memory, MiB"
EACH, BEFORE = "planned operations a sample", "planned operations of setup"
FACTOR = "planned operations of setup beyond those with the inexact projection"
EP3, EXACT, FALKON = "EigenPro 3", "EigenPro 3, exact projection", "FALKON"
BLOCK = "default, one block"
SOLVERS: dict[str, dict[str, Any]] = {
    EP3: {"name": "eigenpro3", "projection": "inexact", "n_nystrom": 1000, "level": 100},
    EXACT: {"name": "eigenpro3", "projection": "exact", "n_nystrom": 1000, "level": 100},
    FALKON: {"name": "falkon", "ridge": 1e-6},
    BLOCK: {"name": "block", "ridge": 1e-6},
}
CENTERS, ROWS, FEATURES, CLASSES, BATCH = 2000, 8000, 20, 10, 256
GROWING = {"p": (1000, 2000, 4000, 8000), "n": (4000, 8000, 16_000, 32_000)}
QUICK_SHARE = 8
"""Divisor of the rows, the centers and the sizes of a preconditioner in a quick run."""


def step_cost(p: int, m: int = BATCH, s: int = 1000, q: int = 100) -> float:
    """Return the operations of a step by the table, with T_ep2 = p^2 for a pass of EigenPro 2."""
    return p * (m + s) + s * (m + q) + p**2


def step_memory(p: int, m: int = BATCH, s: int = 1000) -> float:
    """Return the numbers that are kept by the table, with M_ep2 = p."""
    return s**2 + s * m + p


LARGEST = GROWING["p"][-3:]
LAWS = {
    (EACH, EP3, "p"): exponent(LARGEST, [step_cost(p) for p in LARGEST]), (EACH, EP3, "n"): 0.0,
    (BEFORE, EP3, "p"): 0.0, (BEFORE, EP3, "n"): 0.0,
    (MEMORY, EP3, "p"): exponent(LARGEST, [step_memory(p) for p in LARGEST]),
    (MEMORY, EP3, "n"): 0.0, (FACTOR, EXACT, "p"): 3.0,
    (EACH, FALKON, "p"): 1.0, (EACH, FALKON, "n"): 0.0,
    (BEFORE, FALKON, "p"): 3.0, (BEFORE, FALKON, "n"): 0.0,
    (MEMORY, FALKON, "p"): 2.0, (MEMORY, FALKON, "n"): 0.0,
}  # fmt: skip
"""Exponents of the table: figure, method and the number that grows."""
IN_SECONDS = {EACH: SAMPLE, BEFORE: SETUP}
SLACK = 0.5
"""Largest difference of a fitted exponent from the law."""
PUBLISHED = """\
EP3, Table 1      setup        a step                           memory
EigenPro 3        s^2 q        p (m + s) + s (m + q) + T_ep2    s^2 + s m + M_ep2
  exact           n q^2 + p^3  n p + n q                        p n + n^2
FALKON            p^3          n p                              p^2
T_ep2 = O(p^2) and M_ep2 = O(p) for one epoch of EigenPro 2"""


def points(data: object, options: argparse.Namespace) -> Iterator[Point]:
    """Yield seconds and memory of the methods while p or n grows."""

    share = QUICK_SHARE if options.quick else 1

    def run(label: str, grows: str, size: int) -> Iterator[Measurement]:
        p, n = (size, ROWS // share) if grows == "p" else (CENTERS // share, size)
        solver = {
            k: v // share if k in ("n_nystrom", "level") else v for k, v in SOLVERS[label].items()
        }
        for figure, value in costs(solver, p, n, options.device).items():
            yield Measurement(figure, f"{label}, {grows} grows", size, value)

    for repetition in range(options.repetitions):
        for grows, sizes in GROWING.items():
            for size in [size // share for size in sizes[: 2 if options.quick else None]]:
                for label in SOLVERS:
                    p = size if grows == "p" else CENTERS // share
                    key = f"{label}, {grows} {size}, repetition {repetition}"
                    work = 3e3 * p * max(ROWS // share, size) + p**3 / 2
                    yield Point(key, work, partial(run, label, grows, size))


def costs(solver: dict[str, Any], p: int, n: int, device: str) -> dict[str, float]:
    """Return the measured costs by figure. solver : settings of the method.

    One epoch is run, and with FALKON a second one, because its first epoch is no step yet.
    """
    epochs = {"epochs": 2 if solver["name"] == "falkon" else 1}
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((n, FEATURES), np.float32), rng.integers(0, CLASSES, n)
    with tempfile.TemporaryDirectory() as folder:
        store, run_dir = Path(folder, "rows.zarr"), Path(folder, "run")
        sk.ingest_store(X, store, y=y)
        config = sk.RunConfig.from_tables(
            {
                "data": {"train": str(store), "batch_size": BATCH} | epochs,
                "model": {"kernel": "laplace", "bandwidth": 4.0, "n_centers": p},
                "solver": solver,
                "run": {"run_dir": str(run_dir), "device": device, "evaluate_every": 0},
            }
        )
        plan = sk.plan(config, measure=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the model explains nothing|.* is lowered to")
            sk.train_model(config).model.backend.close()
        events = {record["event"]: record for record in read_log(run_dir / "log.jsonl")}
    return {
        SAMPLE: (began(events["train"]) - began(events["start"])) / events["train"]["samples"],
        SETUP: events["start"]["setup_s"],
        MEMORY: method_bytes(plan["memory"]) / 2**20,
        EACH: plan["flops"]["training"] / events["train"]["samples"],
        BEFORE: plan["flops"]["setup"],
    }


def method_bytes(memory: Mapping[str, Any]) -> int:
    """Return the largest phase of planned memory without the process and the reading of rows."""

    def held(phase: str) -> int:
        return sum(
            b["bytes"]
            for b in memory["buffers"]
            if b["phase"] in ("always", phase)
            and not b["buffer"].startswith(("interpreter", "compiler", "loader"))
            and not b["buffer"].endswith("being read")
        )

    return max(map(held, memory["phases"]))


def draw(results: Results, title: str, figure: Figure) -> None:
    """Draw each figure twice: p grows on the left, and n on the right."""
    from experiments.plot import curves

    figure.set_size_inches(12, 3.2 * len(results.values))
    panels = figure.subplots(len(results.values), 2, sharey="row")
    for (name, by_label), row in zip(results.values.items(), panels, strict=True):
        for axes, grows in zip(row, GROWING, strict=True):
            ending = f", {grows} grows"
            chosen = {k.removesuffix(ending): v for k, v in by_label.items() if k.endswith(ending)}
            curves(axes, Results({name: chosen}), name, "centers p" if grows == "p" else "rows n")
        row[0].get_legend().remove()
    figure.suptitle(title, fontsize=10)


def began(record: Mapping[str, Any]) -> float:
    """Return the time of a record of the log, in seconds."""
    return datetime.fromisoformat(record["time"]).timestamp()


def fitted(results: Results, figure: str, label: str, grows: str) -> float:
    """Return the exponent over the largest three sizes."""
    measured = BEFORE if figure == FACTOR else figure
    places = results.places(f"{label}, {grows} grows", measured)[-3:]

    def median(of: str, x: float) -> float:
        return float(np.median(results.at(f"{of}, {grows} grows", x, measured)))

    values = [median(label, x) - (median(EP3, x) if figure == FACTOR else 0) for x in places]
    return exponent(places, values)


def judge(results: Results) -> Verdict:
    """Judge the fitted exponents of operations and memory against the laws of the table."""
    numbers, near = [], True
    for (figure, label, grows), law in LAWS.items():
        found = fitted(results, figure, label, grows)
        near &= abs(found - law) <= SLACK
        text = f"{label}, {figure} in {grows}: {found:.2f} ({law:.3g}"
        if figure in IN_SECONDS:
            text += f"; seconds {fitted(results, IN_SECONDS[figure], label, grows):.2f}"
        numbers.append(f"{text})")
    return Verdict(
        f"exponents of planned operations and memory, fitted to the largest three sizes, within "
        f"{SLACK} of the table's; the measured seconds are shown beside them",
        near,
        "; ".join(numbers),
    )


EXPERIMENT = Experiment(
    source="EP3, Table 1",
    claim="EigenPro 3 needs s^2 + s m + p memory, p (m + s) + s (m + q) + p^2 operations a step, "
    "and a setup that does not grow with p or n; an exact projection p^3 operations of setup; "
    "FALKON p^2 memory, p^3 operations of setup, and n p a step",
    x="p or n",
    points=points,
    judge=judge,
    draw=draw,
    stand_in=Sizes(repetitions=1, epochs=1),
    paper=Sizes(repetitions=3, epochs=1),
    needs="nothing",
    published=PUBLISHED,
)
