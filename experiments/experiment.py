"""An experiment consists of points, and it finds results and a verdict.

A point is one measurement that can be repeated alone, such as one training run; the runner measures
the points one after the other and records each in a file, so that the same command resumes after a
kill.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.results import Measurement, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.data import Data


@dataclass(frozen=True)
class Point:
    """One measurement to make.

    key : names the point among those of the experiment.
    work : approximate number of multiplications and additions, for the estimate of the time.
    measure : returns the numbers.
    """

    key: str
    work: float
    measure: Callable[[], Iterable[Measurement]]


@dataclass(frozen=True)
class Verdict:
    """A verdict says whether the claim was confirmed.

    criterion : the rule by which this run judges the claim.
    confirmed : the outcome; None if the experiment shows numbers without a verdict.
    numbers : the numbers that decided.
    """

    criterion: str
    confirmed: bool | None
    numbers: str

    def line(self, claim: str) -> str:
        """Return the verdict in one line."""
        word = {True: "CONFIRMED", False: "NOT CONFIRMED", None: "MEASURED"}[self.confirmed]
        return f"{word}: {claim}. Criterion: {self.criterion}. Here: {self.numbers}."


@dataclass(frozen=True)
class Sizes:
    """Largest number of training rows, repetitions, and epochs of a run."""

    rows: int = 10_000
    repetitions: int = 3
    epochs: int = 10


@dataclass(frozen=True)
class Experiment:
    """One figure, table or claim of a paper.

    source : its place, such as "EP3, Fig. 2".
    claim : the sentence that is judged.
    x : the horizontal axis.
    x_of : the horizontal axis of figures with a different one.
    points, judge : make the measurements and the verdict.
    stand_in, paper : the sizes on built-in data, and the sizes of the paper.
    published : the paper's numbers, as lines of text.
    needs : "rows" if `--data` is used, "images" if the rows must be images, "nothing" if the
        problem is generated.
    stand_in_is : the data that replace the paper's data.
    make : generates these data, if they are not the digits.
    options : adds options of its own to the command.
    draw : draws the picture, if curves are not enough.
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
