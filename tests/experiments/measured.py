"""Make artificial measurements, to check how experiments judge them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.results import Measurement, Results

Curves = Mapping[str, Mapping[Any, Sequence[float]]]
"""Label -> x -> values of the repetitions."""


def results(*measurements: tuple[str, str, float, float]) -> Results:
    """Return results with one repetition of each (figure, label, x, value)."""
    found = Results()
    for each in measurements:
        found.add(Measurement(*each))
    return found


def results_of(figures: Mapping[str, Curves]) -> Results:
    """Return results with the curves of each figure."""
    return results(
        *(
            (figure, label, x, value)
            for figure, curves in figures.items()
            for label, values_of in curves.items()
            for x, values in values_of.items()
            for value in values
        )
    )
