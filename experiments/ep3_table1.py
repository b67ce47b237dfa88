"""Cost laws of EigenPro 3 and of FALKON, measured: Table 1 of EP3.

One number grows, p or n, and the exponent of a power law is fitted to the operations and the memory
that `plan` counts, less the memory of the interpreter, and to measured seconds. EigenPro 3 runs
with the inexact projection, which keeps no p x p matrix. The exponent of its operations is compared
with that of the table's formula for steps of 256 rows. The rows are normal; nothing is learned.
Seconds grow less than operations at these sizes, as larger matrices are multiplied faster.
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
from experiments.results import (
    Experiment,
    Measurement,
    Point,
    Results,
    Sizes,
    Verdict,
    exponent,
)
from streamkern.rundir.run_log import read_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLE, SETUP, MEMORY = "seconds a sample", "seconds of setup", "planned memory, MiB"
EACH, BEFORE = "planned operations a sample", "planned operations of setup"
EP3, FALKON, BLOCK = "EigenPro 3", "FALKON", "default, one block"
SOLVERS: dict[str, dict[str, Any]] = {
    EP3: {"name": "eigenpro3", "projection": "inexact", "n_nystrom": 1000, "level": 100},
    FALKON: {"name": "falkon", "ridge": 1e-6},
    BLOCK: {"name": "block", "ridge": 1e-6},
}
CENTERS, ROWS, FEATURES, CLASSES, BATCH = 2000, 8000, 20, 10, 256
GROWING = {"p": (1000, 2000, 4000, 8000), "n": (4000, 8000, 16_000, 32_000)}


def step_cost(p: int, m: int = BATCH, s: int = 1000, q: int = 100) -> float:
    """Return the operations of a step by the table, with T_ep2 = p^2 for a pass of EigenPro 2."""
    return p * (m + s) + s * (m + q) + p**2


LARGEST = GROWING["p"][-3:]
LAWS = {
    (EACH, EP3, "p"): exponent(LARGEST, [step_cost(p) for p in LARGEST]), (EACH, EP3, "n"): 0.0,
    (BEFORE, EP3, "p"): 0.0, (BEFORE, EP3, "n"): 0.0, (BEFORE, FALKON, "p"): 3.0,
    (MEMORY, EP3, "p"): 1.0, (MEMORY, FALKON, "p"): 2.0,
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
    """Yield seconds and memory of three methods while p or n grows."""

    def run(label: str, grows: str, size: int) -> Iterator[Measurement]:
        p, n = (size, ROWS) if grows == "p" else (CENTERS, size)
        for figure, value in costs(SOLVERS[label], p, n, options.device).items():
            yield Measurement(figure, f"{label}, {grows} grows", size, value)

    for repetition in range(options.repetitions):
        for grows, sizes in GROWING.items():
            for size in sizes[: 2 if options.quick else None]:
                for label in SOLVERS:
                    p = size if grows == "p" else CENTERS
                    key = f"{label}, {grows} {size}, repetition {repetition}"
                    work = 3e3 * p * max(ROWS, size) + p**3 / 2
                    yield Point(key, work, partial(run, label, grows, size))


def costs(solver: dict[str, Any], p: int, n: int, device: str) -> dict[str, float]:
    """Return the measured costs by figure. solver : settings of the method.

    One epoch is run, and with FALKON a second one, as its first is no step yet.
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
    fixed = next(
        b["bytes"] for b in plan["memory"]["buffers"] if b["buffer"].startswith("interpreter")
    )  # fmt: skip
    return {
        SAMPLE: (began(events["train"]) - began(events["start"])) / events["train"]["samples"],
        SETUP: events["start"]["setup_s"],
        MEMORY: (plan["memory"]["peak_bytes"] - fixed) / 2**20,
        EACH: plan["flops"]["training"] / events["train"]["samples"],
        BEFORE: plan["flops"]["setup"],
    }


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
    curve = f"{label}, {grows} grows"
    places = results.places(curve, figure)
    medians = [float(np.median(results.at(curve, x, figure))) for x in places]
    return exponent(places[-3:], medians[-3:])


def judge(results: Results) -> Verdict:
    """Fitted exponents of operations and memory against the table's laws, seconds beside them."""
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
    claim="EigenPro 3 needs memory in proportion to p, p (m + s) + s (m + q) + p^2 operations a "
    "step, and a setup that does not grow with p or n; FALKON needs p^2 memory and p^3 operations "
    "of setup",
    x="p or n",
    points=points,
    judge=judge,
    draw=draw,
    stand_in=Sizes(repetitions=1, epochs=1),
    paper=Sizes(repetitions=3, epochs=1),
    needs="nothing",
    published=PUBLISHED,
)
