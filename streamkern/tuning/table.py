"""Compare the candidates of a search on the same held-out rows, and choose one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.kernels.notation import without_values
from streamkern.tuning.metrics import Metric, Rows, squared_standard_error, unpack_losses

TrialRow = dict[str, Any]
"""Entries of a row of the table, or of a record."""
TRIAL_GAIN_SE = 2
"""Number of standard errors by which settings must be better than the given ones. With 1, a single
row could decide."""
HELD_OUT = "held_out"
"""Prefix of the names of metrics on the held-out rows."""
HELD_OUT_MSE = f"{HELD_OUT}_mse"


@dataclass(frozen=True)
class TrialPoint:
    """A candidate: a kernel, a bandwidth and a ridge, and its results.

    records : record of the training on each fold, see `Trainings.evaluate`
    is_given : whether these are the given settings
    """

    records: Sequence[TrialRow]
    is_given: bool = False

    @property
    def kernel(self) -> Any:
        return self.records[0]["kernel"]

    @property
    def bandwidth(self) -> float | None:
        return self.records[0]["bandwidth"]  # type: ignore[no-any-return]

    @property
    def ridge(self) -> float:
        return self.records[0]["ridge"]  # type: ignore[no-any-return]

    @property
    def is_open(self) -> bool:
        """True if some settings are "auto", and each training chooses their values."""
        return list(self.records[0]["settings"]) != [self.kernel, self.bandwidth, self.ridge]

    @property
    def diverged(self) -> bool:
        return any(record[HELD_OUT_MSE] is None for record in self.records)

    def figure(self, name: str) -> float:
        """Return the mean over the folds of an entry of the records."""
        return float(np.mean([record[name] for record in self.records]))

    def row(self) -> TrialRow:
        """Return the row of the table."""
        row: TrialRow = {
            "kernel": without_values(self.kernel), "bandwidth": self.bandwidth,
            "ridge": self.ridge, "as_given": self.is_given, HELD_OUT_MSE: None,
        }  # fmt: skip
        if not self.diverged:
            names = [name for name in self.records[0] if name.startswith(f"{HELD_OUT}_")]
            row |= {name: self.figure(name) for name in names}
        return row | {"seconds": math.fsum(record["seconds"] for record in self.records)}


class SearchTable:
    """The candidates that were trained.

    metric : metric by which they are compared
    weights : for each fold, the weights (n,) of the held-out rows in the metric, with sum 1
    """

    def __init__(self, metric: Metric, weights: Sequence[Rows]) -> None:
        self.metric, self._weights = metric, weights
        self.points: list[TrialPoint] = []

    def add(self, point: TrialPoint) -> None:
        """Add a point, unless the table has it already."""
        settings = point.records[0]["settings"]
        if all(existing.records[0]["settings"] != settings for existing in self.points):
            self.points.append(point)

    def best_point(self) -> TrialPoint:
        """Return the best point without settings "auto"."""
        return min((point for point in self.points if not point.is_open), key=self._rank)

    def tried_values(self, name: str, kernel: Any) -> list[float]:
        """Return the values of "bandwidth" or "ridge" that were tried with a kernel, ascending."""
        points = (p for p in self.points if not p.is_open and p.kernel == kernel)
        values = {getattr(point, name) for point in points}
        return sorted(value for value in values if value is not None)

    def ranked_points(self) -> list[TrialPoint]:
        """Return the points ordered by the metric and then by the mse, best first.

        Points whose training diverged are last.
        """
        return sorted(self.points, key=self._rank)

    def chosen_point(self) -> TrialPoint:
        """Return the point of the given settings, unless another one is significantly better."""
        best = self.ranked_points()[0]
        given_points = [
            p for p in self.points if p.is_given and self._comparison(p, best)["within"]
        ]
        return given_points[0] if given_points else best

    def rows(self) -> list[TrialRow]:
        """Return the rows of the table: the chosen point, then the others, best first."""
        points, chosen = self.ranked_points(), self.chosen_point()
        rest = [point for point in points if point is not chosen]
        return [{**p.row(), **self._comparison(p, points[0])} for p in (chosen, *rest)]

    def _rank(self, point: TrialPoint) -> tuple[float, float]:
        """Return the sort key of a point: the metric to minimise, and the mse."""
        return (self.loss(point), math.inf if point.diverged else point.figure(HELD_OUT_MSE))

    def loss(self, point: TrialPoint) -> float:
        """Return the metric as a quantity to minimise; infinite if a training diverged."""
        if point.diverged:
            return math.inf
        return self.metric.to_loss(point.figure(f"{HELD_OUT}_{self.metric.name}"))

    def _comparison(self, point: TrialPoint, best: TrialPoint) -> TrialRow:
        """Return the entries that compare a point with the best one.

        "se" : standard error, over the held-out rows, of the difference in loss; None for a single
            row
        "within" : whether the difference is at most `TRIAL_GAIN_SE` standard errors
        """
        if point.diverged:
            return {"se": None, "within": False}
        name, squared_se = self.metric.loss, 0.0
        pairs = zip(point.records, best.records, self._weights, strict=True)
        for record, best_record, weights in pairs:
            losses = unpack_losses(record["losses"][name])
            difference = losses - unpack_losses(best_record["losses"][name])
            squared_se += squared_standard_error(difference, weights)
        se = math.sqrt(squared_se) / len(self._weights)
        is_within = self.loss(point) - self.loss(best) <= TRIAL_GAIN_SE * se
        return {"se": se if math.isfinite(se) else None, "within": is_within}
