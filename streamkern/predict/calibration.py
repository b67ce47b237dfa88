"""Calibration: probabilities, intervals and sets, fitted on rows not used in training.

Classes get probabilities and sets, values get intervals. Figures of their quality:

    log_loss  mean of -log p of the class of a row
    brier     mean of sum_k (p_k - [class k])^2, half of it for two classes
    ece       |accuracy - p| of the largest p of each row, in 15 bins of p; their weighted mean
    coverage  share of the targets in their 90 % intervals, or of the rows whose class is in its set
    width     mean width of these intervals, in the units of the targets
    normalised_coverage, normalised_width  the same for intervals scaled by the residual scale
    set_size  mean number of classes in these sets
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.predict.intervals import Intervals, without_prefix
from streamkern.predict.probabilities import (
    Probabilities,
    fit_probabilities,
    kept_probabilities,
    log_losses,
)
from streamkern.predict.residual_scale import Normalised, ResidualScale

CALIBRATION_PREFIX = "calibration_"
"""Prefix of the names of its arrays when they are stored with others."""
LEVEL = 0.9
"""Level of the intervals and sets that are evaluated."""
BINS = 15


@dataclass(frozen=True, eq=False)
class Calibration:
    """Fitted calibration of a model.

    intervals : intervals of values, or sets of classes
    probabilities : for classes; otherwise None
    normalised : for values; None in models of older versions
    """

    intervals: Intervals
    probabilities: Probabilities | None = None
    normalised: Normalised | None = None

    @classmethod
    def of_classes(
        cls, F: npt.NDArray[Any], labels: npt.NDArray[np.int64], w: Floats | None,
        origins: npt.NDArray[np.integer] | None = None,
    ) -> Calibration:  # fmt: skip
        """Fit to values (m, c) of rows of classes `labels` (m,), with weights (m,) or None.

        origins : (m,) equal for rows made from one row; the first of them represents the others
        """
        if origins is not None and w is not None:
            origins = origins[w > 0]
        F, labels, w = _counted(F, labels, w)
        if origins is not None:
            F, labels, w = _one_of_each(F, labels, w, origins)
        missed = 1 - np.take_along_axis(F, labels[:, None], axis=1)
        return cls(Intervals.of(missed, w), fit_probabilities(F, labels, w))

    @classmethod
    def of_values(
        cls, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats | None,
        origins: npt.NDArray[np.integer] | None = None,
    ) -> Calibration:  # fmt: skip
        """Fit to values and targets (m, c), with weights (m,) or None; see `of_classes`."""
        if origins is not None and w is not None:
            origins = origins[w > 0]
        F, Y, w = _counted(F, Y, w)
        missed = np.abs(F - Y)
        if origins is not None:
            missed, _, w = _one_of_each(missed, np.zeros(len(F), np.int64), w, origins)
        return cls(Intervals.of(missed, w))

    def normalised_by(
        self, difficulty: ResidualScale, missed: Floats, spread: Floats, w: Floats | None
    ) -> Calibration:
        """Return the calibration with normalised intervals added.

        missed : absolute residuals (k, c)
        spread : residual scale (k, c) of the same rows, fitted on others
        """
        return replace(self, normalised=Normalised(difficulty, Intervals.of(missed / spread, w)))

    @classmethod
    def kept(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Calibration | None:
        """Return the calibration stored in `arrays`; None if they hold none."""
        own = without_prefix(arrays, CALIBRATION_PREFIX)
        if not own:
            return None
        return cls(Intervals.kept(own), kept_probabilities(own), Normalised.kept(own))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store, by prefixed names."""
        own = {} if self.probabilities is None else self.probabilities.arrays()
        own |= {} if self.normalised is None else self.normalised.arrays()
        return {
            f"{CALIBRATION_PREFIX}{name}": a for name, a in (self.intervals.arrays() | own).items()
        }

    def describe(self) -> dict[str, Any]:
        """Return a short description, as JSON."""
        said: dict[str, Any] = {"rows": len(self.intervals.missed)}
        if self.probabilities is not None:
            said |= {"way": self.probabilities.way}
            if self.probabilities.way == "temperature":
                slope = float(self.probabilities.arrays()["slope"][0])
                said |= {"temperature": 1 / slope if slope else None}
        return said


def lacking(meta: Mapping[str, Any]) -> str:
    """Return why a model has no calibration, and what it needs.

    meta : of the setup of its run
    """
    why = meta.get("uncalibrated") or "or its run has not ended; train it with calibrate=True"
    return f"rows that were set aside in training, and of this model none were, {why}"


def _counted(
    F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats | None
) -> tuple[Floats, npt.NDArray[Any], Floats | None]:
    """Return the rows with a weight above 0, in float64."""
    F = F.astype(np.float64)
    if w is None:
        return F, Y, None
    counted = w > 0
    return F[counted], Y[counted], w[counted].astype(np.float64)


def _one_of_each(
    F: Floats, labels: npt.NDArray[np.int64], w: Floats | None, origins: npt.NDArray[np.integer]
) -> tuple[Floats, npt.NDArray[np.int64], Floats | None]:
    """Return the first row of each origin and label, with the weight of all of them.

    The rows are unchanged if each has an origin of its own.
    """
    order = np.lexsort((labels, origins))
    other = (np.diff(origins[order]) != 0) | (np.diff(labels[order]) != 0)
    starts = np.concatenate(([0], np.flatnonzero(other) + 1))
    if len(starts) == len(F):
        return F, labels, w
    weights = np.add.reduceat(np.ones(len(F)) if w is None else w[order], starts)
    first = order[starts]
    return F[first], labels[first], weights


def _enough(intervals: Intervals) -> bool:
    """Return whether there are enough rows for the level."""
    return (len(intervals.missed) + 1) * (1 - LEVEL) >= 1


class CalibratedFigures:
    """Sums over the rows of an evaluation; see the module docstring."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._judges = _enough(calibration.intervals)
        self._normalised = calibration.normalised
        if self._normalised is not None and not _enough(self._normalised.intervals):
            self._normalised = None
        self._sums: dict[str, float] = {}
        self._bins = np.zeros((2, BINS))
        self._weight = 0.0

    def add(
        self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: npt.NDArray[Any] | None,
        spread: Floats | None = None,
    ) -> None:  # fmt: skip
        """Add values F and targets Y (m, c), weights w (m,) or None, on the host.

        spread : residual scale of the rows (m, c), if `asks_spread`
        """
        w = np.ones(len(F)) if w is None else w.astype(np.float64)
        self._weight += float(w.sum())
        if self._calibration.probabilities is None:
            self._add_values(F, Y, w, spread)
        else:
            self._add_classes(self._calibration.probabilities(F), F, Y, w)

    @property
    def asks_spread(self) -> bool:
        """True if `add` needs the residual scale of the rows."""
        return self._normalised is not None

    def _add(self, name: str, value: Any) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _add_values(
        self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats, spread: Floats | None
    ) -> None:
        missed = np.abs(F - Y)
        if self._judges:
            reach = self._calibration.intervals.reach(LEVEL)
            self._add("coverage", w @ (missed <= reach).mean(axis=1))
            self._add("width", w.sum() * 2 * reach.mean())
        if self._normalised is not None and spread is not None:
            reach = self._normalised.intervals.reach(LEVEL) * spread
            self._add("normalised_coverage", w @ (missed <= reach).mean(axis=1))
            self._add("normalised_width", w @ (2 * reach).mean(axis=1))

    def _add_classes(self, p: Floats, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats) -> None:
        labels = Y.argmax(axis=1)
        wanted = np.arange(p.shape[1]) == labels[:, None]
        self._add("log_loss", w @ log_losses(p, labels))
        squares = np.square(p - wanted).sum(axis=1)
        self._add("brier", w @ squares / (2 if p.shape[1] == 2 else 1))
        sure, right = p.max(axis=1), p.argmax(axis=1) == labels
        place = np.minimum((sure * BINS).astype(np.int64), BINS - 1)
        self._bins[0] += np.bincount(place, w * sure, BINS)
        self._bins[1] += np.bincount(place, w * right, BINS)
        if self._judges:
            sets = self._calibration.intervals.sets(F, LEVEL)
            self._add("coverage", w @ sets[np.arange(len(F)), labels])
            self._add("set_size", w @ sets.sum(axis=1))

    def result(self) -> dict[str, float]:
        """Return the figures by name; at least one row must have a weight."""
        found = {name: total / self._weight for name, total in self._sums.items()}
        if self._calibration.probabilities is None:
            return found
        ece = float(np.abs(self._bins[0] - self._bins[1]).sum()) / self._weight
        order = ("log_loss", "brier", "ece", "coverage", "set_size")
        found["ece"] = ece
        return {name: found[name] for name in order if name in found}
