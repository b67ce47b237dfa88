"""The results of an experiment, and functions to judge them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
ERROR = "test error, %"


class Measurement(NamedTuple):
    """One number of a point.

    figure : name and unit of the measured number, the vertical axis of a plot.
    label : the curve.
    x : the place on the horizontal axis.
    value : the number.
    """

    figure: str
    label: str
    x: float
    value: float


@dataclass
class Results:
    """The numbers of an experiment.

    values : by figure, label and place on the axis, one number for each repetition.
    seconds : time in which all points were measured.
    """

    values: dict[str, dict[str, dict[float, list[float]]]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, measurement: Measurement) -> None:
        """Add one repetition of one measurement."""
        figure, label, x, value = measurement
        self.values.setdefault(figure, {}).setdefault(label, {}).setdefault(x, []).append(value)

    def at(self, label: str, x: float, figure: str = ERROR) -> Array:
        """Return all repetitions of a measurement."""
        return np.array(self.values[figure][label][x])

    def places(self, label: str, figure: str = ERROR) -> list[float]:
        """Return the places of a curve, sorted."""
        return sorted(self.values[figure][label])

    def labels(self, figure: str = ERROR) -> list[str]:
        """Return the curves of a figure without references, whose labels are in brackets."""
        return [label for label in self.values[figure] if not label.startswith("(")]

    def rows(self, figure: str, x: str) -> list[dict[str, Any]]:
        """Return the table of a figure: a row for each place, a column for each label."""
        curves = self.values[figure]
        places = sorted({place for by_place in curves.values() for place in by_place})
        return [
            {x: f"{place:g}"}
            | {name: shown(curve[place]) for name, curve in curves.items() if place in curve}
            for place in places
        ]


def shown(values: Sequence[float] | Array) -> str:
    """Return mean and standard deviation over the repetitions, such as "2.31 ± 0.12"."""
    mean = f"{np.mean(values):.3g}"
    return f"{mean} ± {np.std(values, ddof=1):.1g}" if len(values) > 1 else mean


def clearly(difference: Array) -> bool:
    """Return whether differences of paired repetitions exceed 0 by twice their standard error."""
    n = len(difference)
    error = difference.std(ddof=1) / math.sqrt(n) if n > 1 else 0.0
    return bool(difference.mean() > 2 * error and difference.mean() > 0)


def exponent(x: Sequence[float] | Array, y: Sequence[float] | Array) -> float:
    """Return the exponent b of the power law y = a x^b, fitted to the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def doubled(low: int, high: int, quick: bool) -> list[int]:
    """Return ..., high/4, high/2, high, none below `low`; the first and the last if quick."""
    sizes = [high >> k for k in range(high.bit_length(), -1, -1) if high >> k >= low]
    return sorted({sizes[0], sizes[-1]}) if quick else sizes
