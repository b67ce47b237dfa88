"""An experiment consists of points, and it finds results and a verdict.

An experiment is a list of points. A point is one measurement that can be repeated alone, such as
one training run; the runner measures the points one after the other and keeps each in a file, so
that the same command goes on after a kill.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.data import Data

Array = np.ndarray
ERROR = "test error, %"


class Measurement(NamedTuple):
    """One number of a point.

    figure : what is measured, with its unit: the vertical axis of a plot.
    label : the curve.
    x : the place on the horizontal axis.
    value : the number.
    """

    figure: str
    label: str
    x: float
    value: float


@dataclass(frozen=True)
class Point:
    """One measurement to make.

    key : names the point among those of the experiment.
    work : multiplications and additions of one measurement, about; for the estimate of the time.
    measure : returns the numbers.
    """

    key: str
    work: float
    measure: Callable[[], Iterable[Measurement]]


@dataclass
class Results:
    """The numbers of an experiment.

    values : by figure, label and place on the axis, one number for each repetition.
    seconds : that all points took to measure.
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
        """Return the curves of a figure but the references, whose labels stand in brackets."""
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


@dataclass(frozen=True)
class Verdict:
    """A verdict says whether the claim was seen.

    criterion : the rule by which this run judges it.
    seen : the outcome; None where the experiment shows numbers and judges nothing.
    numbers : the numbers that decided.
    """

    criterion: str
    seen: bool | None
    numbers: str

    def line(self, claim: str) -> str:
        """Return the verdict in one line."""
        word = {True: "SEEN", False: "NOT SEEN", None: "MEASURED"}[self.seen]
        return f"{word}: {claim}. Criterion: {self.criterion}. Here: {self.numbers}."


@dataclass(frozen=True)
class Sizes:
    """Rows to train on at most, repetitions, and epochs of a run."""

    rows: int = 10_000
    repetitions: int = 3
    epochs: int = 10


@dataclass(frozen=True)
class Experiment:
    """One figure, table or claim of a paper.

    source : where it stands, such as "EP3, Fig. 2".
    claim : the sentence that is judged.
    x : the horizontal axis.
    x_of : the horizontal axis of figures that have another one.
    points, judge : make the measurements and the verdict.
    stand_in, paper : the sizes on built-in data, and those of the paper.
    published : the paper's numbers, as lines of text.
    needs : "rows" where `--data` is used, "images" where the rows must be images, "nothing" where
        the problem is made.
    stand_in_is : the data that take the place of the paper's.
    make : makes these data, where they are not the digits.
    options : adds options of its own to the command.
    draw : draws the picture, where curves are not enough.
    full_run : returns the plan of the paper's own run, on this machine, as text.
    """

    source: str
    claim: str
    x: str
    points: Callable[[Data, argparse.Namespace], Iterable[Point]]
    judge: Callable[[Results], Verdict]
    stand_in: Sizes = Sizes()
    paper: Sizes = Sizes(rows=60_000, repetitions=3, epochs=50)
    published: str = ""
    needs: str = "rows"
    stand_in_is: str = "scikit-learn's digits"
    make: Callable[[argparse.Namespace], Data] | None = None
    options: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    draw: Callable[[Results, str, Figure], None] | None = None
    full_run: Callable[[argparse.Namespace], str] | None = None
    x_of: Mapping[str, str] = field(default_factory=dict)

    def axis(self, figure: str) -> str:
        """Return the name of the horizontal axis of a figure."""
        return self.x_of.get(figure, self.x)
