"""What a model is worth, said of single rows: by rows that it has not learned from.

Of classes probabilities and sets, of values intervals, and the figures of how true they are:

    log_loss  mean of -log p of the class of a row
    brier     mean of sum_k (p_k - [class k])^2, of two classes half of it
    ece       |accuracy - p| of the largest p of each row, in 15 bins of p; their weighted mean
    coverage  share of the targets in their 90 % intervals, or of the rows whose class is in its set
    width     mean width of these intervals, in the units of the targets
    set_size  mean number of classes in these sets
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.predict.intervals import Intervals
from streamkern.predict.probabilities import (
    Floats,
    Probabilities,
    fit_probabilities,
    kept_probabilities,
    log_losses,
)

IN_FRONT = "calibration_"
"""Of the names of its arrays, where they lie beside others."""
LEVEL = 0.9
"""Of the intervals and sets that are judged."""
BINS = 15


@dataclass(frozen=True, eq=False)
class Calibration:
    """intervals : see there. probabilities : of classes, else None."""

    intervals: Intervals
    probabilities: Probabilities | None = None

    @classmethod
    def of_classes(
        cls, F: npt.NDArray[Any], labels: npt.NDArray[np.int64], w: Floats | None
    ) -> Calibration:
        """From values (m, c) of rows of these classes (m,), with weights (m,) or None."""
        F, labels, w = _counted(F, labels, w)
        missed = 1 - np.take_along_axis(F, labels[:, None], axis=1)
        return cls(Intervals.of(missed, w), fit_probabilities(F, labels, w))

    @classmethod
    def of_values(cls, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats | None) -> Calibration:
        """From values and targets (m, c), with weights (m,) or None."""
        F, Y, w = _counted(F, Y, w)
        return cls(Intervals.of(np.abs(F - Y), w))

    @classmethod
    def kept(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Calibration | None:
        """That of which these are `arrays`, or None where there is none among them."""
        own = {
            name.removeprefix(IN_FRONT): np.asarray(array)
            for name, array in arrays.items()
            if name.startswith(IN_FRONT)
        }
        return cls(Intervals.kept(own), kept_probabilities(own)) if own else None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What it is made from, by names of their own."""
        own = {} if self.probabilities is None else self.probabilities.arrays()
        return {f"{IN_FRONT}{name}": a for name, a in (self.intervals.arrays() | own).items()}

    def describe(self) -> dict[str, Any]:
        """In a few words, JSON."""
        said: dict[str, Any] = {"rows": len(self.intervals.missed)}
        if self.probabilities is not None:
            said |= {"way": self.probabilities.way}
            if self.probabilities.way == "temperature":
                slope = float(self.probabilities.arrays()["slope"][0])
                said |= {"temperature": 1 / slope if slope else None}
        return said


def lacking(meta: Mapping[str, Any]) -> str:
    """What probabilities and intervals need, and why a model has none, in words.

    meta : of the setup of its run.
    """
    why = meta.get("uncalibrated") or "or its run has not ended; train it with calibrate=True"
    return f"rows that were set aside in training, and of this model none were, {why}"


def _counted(
    F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats | None
) -> tuple[Floats, npt.NDArray[Any], Floats | None]:
    """The rows that have a weight above 0, in float64."""
    F = F.astype(np.float64)
    if w is None:
        return F, Y, None
    counted = w > 0
    return F[counted], Y[counted], w[counted].astype(np.float64)


class CalibratedFigures:
    """Sums over the rows of an evaluation; see the head of this file."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        m = len(calibration.intervals.missed)
        self._judges = (m + 1) * (1 - LEVEL) >= 1  # else there are too few rows for the level
        self._sums: dict[str, float] = {}
        self._bins = np.zeros((2, BINS))
        self._weight = 0.0

    def add(self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: npt.NDArray[Any] | None) -> None:
        """Take in values F and targets Y (m, c), weights w (m,) or None, on the host."""
        w = np.ones(len(F)) if w is None else w.astype(np.float64)
        self._weight += float(w.sum())
        if self._calibration.probabilities is None:
            self._add_values(F, Y, w)
        else:
            self._add_classes(self._calibration.probabilities(F), F, Y, w)

    def _add(self, name: str, value: Any) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def _add_values(self, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats) -> None:
        if not self._judges:
            return
        reach = self._calibration.intervals.reach(LEVEL)
        self._add("coverage", w @ (np.abs(F - Y) <= reach).mean(axis=1))
        self._add("width", w.sum() * 2 * reach.mean())

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
        """The figures by name; of rows of which some have a weight."""
        found = {name: total / self._weight for name, total in self._sums.items()}
        if self._calibration.probabilities is None:
            return found
        ece = float(np.abs(self._bins[0] - self._bins[1]).sum()) / self._weight
        order = ("log_loss", "brier", "ece", "coverage", "set_size")
        found["ece"] = ece
        return {name: found[name] for name in order if name in found}
