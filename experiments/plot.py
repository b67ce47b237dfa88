"""The picture of an experiment: one panel for each figure, curves with bars over the repetitions.

A label in brackets marks a reference, drawn in black or grey, dashed or dotted, without bars.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import Experiment
from experiments.results import Results

Axes = Any
REFERENCES = (("0", "--"), ("0.4", ":"), ("0.6", "-."), ("0.4", "--"), ("0.6", ":"), ("0", "-."))
"""Shades and strokes of the references of a figure, in their order."""


def picture(experiment: Experiment, results: Results, title: str, path: Path) -> None:
    """Draw all figures into one PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.5 * max(len(results.values), 1)), layout="constrained")
    if experiment.draw is not None:
        experiment.draw(results, title, figure)
    else:
        panels = figure.subplots(len(results.values), squeeze=False)[:, 0]
        for axes, name in zip(panels, results.values, strict=True):
            curves(axes, results, name, experiment.axis(name))
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=90)


def curves(axes: Axes, results: Results, name: str, x_name: str) -> None:
    """Draw the curves of one figure; logarithmic where all numbers are positive."""
    by_label, looks = results.values[name], cycle(REFERENCES)
    for label, by_place in by_label.items():
        x = sorted(by_place)
        mean = [float(np.mean(by_place[k])) for k in x]
        bars = [float(np.std(by_place[k], ddof=1)) if len(by_place[k]) > 1 else 0.0 for k in x]
        if label.startswith("("):
            shade, stroke = next(looks)
            axes.plot(x, mean, stroke, lw=1.2, color=shade, label=label, zorder=3)
        else:
            axes.errorbar(x, mean, bars, fmt="o-", ms=4, capsize=2, label=label)
    logarithmic(axes, [v for c in by_label.values() for v in c], spread(by_label))
    axes.set(xlabel=x_name, ylabel=name)
    axes.grid(color="0.9")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)


def spread(by_label: dict[str, dict[float, list[float]]]) -> list[float]:
    """Return all numbers of a figure."""
    return [v for curve in by_label.values() for values in curve.values() for v in values]


def logarithmic(axes: Axes, x: list[float], y: list[float]) -> None:
    """Give an axis a logarithmic scale if its numbers are positive and differ threefold."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, values, name in ((axes.xaxis, x, "x"), (axes.yaxis, y, "y")):
        if not values or min(values) <= 0 or max(values) < 3 * min(values):
            continue
        getattr(axes, f"set_{name}scale")("log")
        few = max(values) < 1e4 * min(values)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
