"""Calibration: probabilities, intervals and sets, fitted to rows that were not used in training.

Classes get probabilities (`probabilities`) and sets of classes, values get intervals. Intervals and
sets use split conformal prediction with m calibration rows. The score s of a row is |y - f| for
values and 1 - f_y for classes; nothing in it is fitted to these rows. For a new row from the same
distribution, each rank of its score among theirs is equally likely. So its score is at most the
k-th smallest, k = ceil((m + 1) level), with probability at least `level`. A row of weight w counts
w times, and the new row is assumed to have the largest weight of all rows (Tibshirani, Barber,
Candes and Ramdas 2019, corollary 1, which holds for a new row of at most this weight).

For targets on a log scale (`stream.target_scale`), s is the distance of their logarithms: intervals
are wider where predictions are larger, with the same coverage.

Predicted quantiles are shifted: with the score s = y - f, the k-th smallest score is added to f,
where k = ceil((m + 1) q) for q >= 1/2 and k = floor((m + 1) q) for q < 1/2. So a new target is
below the quantile q with probability at least q if q >= 1/2, and at most q otherwise (Romano,
Patterson and Candes 2019, conformalized quantile regression, with a separate shift for each end).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError
from streamkern.basics.log_scale import symmetric_exp, symmetric_log
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.predict.probabilities import (
    Probabilities,
    fit_probabilities,
    probabilities_from_arrays,
)
from streamkern.predict.residual_scale import ResidualScale

CALIBRATION_PREFIX = "calibration_"
"""Prefix of the names of the arrays of a calibration that are stored with other arrays."""
_SCALE_PREFIX, _SCORES_PREFIX = "normalised_", "of_"
_RANK_TOLERANCE = 1e-9  # absorbs the rounding error of a rank
_MEDIAN = 0.5


def _without_prefix(
    arrays: Mapping[str, npt.NDArray[Any]], prefix: str
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays whose names begin with `prefix`, by the rest of their names."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): np.asarray(arrays[name]) for name in names}


@dataclass(frozen=True, eq=False)
class Intervals:
    """Sorted scores of calibration rows, whose quantiles are the half widths of intervals.

    scores : (m, c) scores of each output, ascending; (m, 1) for classes
    weights : (m, c) weights of the rows in the order of the scores, with mean 1; None if all are
        equal
    """

    scores: Floats
    weights: Floats | None = None

    @classmethod
    def from_scores(cls, scores: Floats, w: Floats | None) -> Intervals:
        """Return the sorted scores (m, c) of rows with weights w (m,); ignore rows of weight 0."""
        if w is None:
            return cls(np.sort(scores, axis=0))
        scores, w = scores[w > 0], w[w > 0] / w[w > 0].mean()
        order = np.argsort(scores, axis=0, kind="stable")
        ascending = np.take_along_axis(scores, order, axis=0)
        return cls(ascending, w[order] if np.ptp(w) else None)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Intervals:
        """Return the intervals from the result of `arrays`."""
        return cls(arrays["missed"], arrays.get("weights"))

    def arrays(self) -> dict[str, Floats]:
        """Return the arrays to store."""
        weights = {} if self.weights is None else {"weights": self.weights}
        return {"missed": self.scores} | weights

    def score_quantile(self, level: float) -> Floats:
        """Return the score (c,) that a new row does not exceed with probability `level`.

        Raises ConfigError if there are too few rows for the level.
        """
        m = len(self.scores)
        new_row_weight = 1.0 if self.weights is None else float(self.weights.max())
        check_level(level)
        if self.weights is None:
            k = max(math.ceil((m + 1) * level - _RANK_TOLERANCE), 1)
            ranks = np.full(self.scores.shape[1], k - 1)
        else:
            weight = (m + new_row_weight) * level - _RANK_TOLERANCE
            ranks = (self.weights.cumsum(axis=0) < weight).sum(axis=0)
        if (ranks >= m).any():
            raise ConfigError(
                f"{mention('interval', level)} needs more than {m} calibration rows, which "
                f"allow at most {m / (m + new_row_weight):.4g}",
                "give a smaller interval, or train on more rows",
            )
        quantile: Floats = self.scores[ranks, np.arange(len(ranks))]
        return quantile

    def shifts(self, levels: Sequence[float]) -> Floats:
        """Return the shifts (c,) of quantiles, as defined in the module docstring.

        If there are too few rows for a quantile, its shift is 0, and a warning is issued.

        levels : the quantile of each output, or one for all
        """
        m, c = self.scores.shape
        weights = None if self.weights is None else self.weights[::-1]
        mirrored, shifts = Intervals(-self.scores[::-1], weights), np.zeros(c)
        for k, q in enumerate(np.broadcast_to(np.asarray(levels), c).tolist()):
            try:
                shifts[k] = (
                    self.score_quantile(q)[k]
                    if q >= _MEDIAN
                    else -mirrored.score_quantile(1 - q)[k]
                )
            except ConfigError:
                warn(
                    f"quantile {q:g} is not calibrated, because {m} calibration rows are too few; "
                    "train on more rows"
                )
        return shifts

    def prediction_sets(self, F: npt.NDArray[Any], level: float) -> npt.NDArray[np.bool_]:
        """Return a mask (n, c) of the classes in the prediction set of each row.

        F : (n, c) values of the model; the set contains the class with the largest value at least
        level : probability that the set contains the class of the row
        """
        in_set: npt.NDArray[np.bool_] = 1 - F.astype(np.float64) <= self.score_quantile(level)
        in_set |= F.max(axis=1, keepdims=True, initial=-np.inf) == F
        return in_set


def check_level(level: Any) -> None:
    """Raise ConfigError unless the level is a number between 0 and 1."""
    is_number = isinstance(level, numbers.Real) and not isinstance(level, bool)
    if not (is_number and 0 < level < 1):
        raise ConfigError(
            f"{mention('interval', level)} must be a number between 0 and 1, the probability "
            "that the interval contains the target; give for example 0.9"
        )


@dataclass(frozen=True, eq=False)
class Calibration:
    """Fitted calibration of a model.

    intervals : scores for intervals of values, or for sets of classes
    probabilities : for classes; otherwise None
    residual_scale : for values; None for quantiles, and in models of older versions
    normalised : scores divided by the residual scale, of rows to which the scale was not fitted
    shifts : (c,) constants added to the outputs of a model of quantiles, whose `intervals` hold
        y - f; None for other models
    unit : (c,) unit of targets on a log scale, times the gain; the scores are then
        |log(1 + y / unit) - log(1 + f / unit)|. None if the scores are |y - f|
    """

    intervals: Intervals
    probabilities: Probabilities | None = None
    residual_scale: ResidualScale | None = None
    normalised: Intervals | None = None
    shifts: Floats | None = None
    unit: Floats | None = None

    @classmethod
    def fit_to_classes(
        cls, F: npt.NDArray[Any], labels: npt.NDArray[np.int64], w: Floats | None,
        origins: npt.NDArray[np.integer] | None = None,
    ) -> Calibration:  # fmt: skip
        """Fit to values (m, c) of rows of classes `labels` (m,), with weights (m,) or None.

        origins : (m,) equal for rows that are copies of one row; the first of them is used, with
            the weight of all
        """
        F, labels, w, origins = _weighted_rows(F, labels, w, origins)
        F, labels, w = _merge_copies(F, labels, w, origins)
        scores = 1 - np.take_along_axis(F, labels[:, None], axis=1)
        return cls(Intervals.from_scores(scores, w), fit_probabilities(F, labels, w))

    @classmethod
    def fit_to_values(
        cls, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats | None,
        origins: npt.NDArray[np.integer] | None = None, unit: Floats | None = None,
    ) -> Calibration:  # fmt: skip
        """Fit to values and targets (m, c), with weights (m,) or None.

        origins : see `fit_to_classes`
        unit : see `Calibration`
        """
        F, Y, w, origins = _weighted_rows(F, Y, w, origins)
        scores = interval_scores(F, Y, unit)
        scores, _, w = _merge_copies(scores, np.zeros(len(F), np.int64), w, origins)
        return cls(Intervals.from_scores(scores, w), unit=unit)

    @classmethod
    def fit_to_quantiles(
        cls, F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Floats | None, levels: Sequence[float],
        origins: npt.NDArray[np.integer] | None = None,
    ) -> Calibration:  # fmt: skip
        """Fit shifts to quantiles and targets (m, c), with weights (m,) or None.

        levels : the quantiles of the outputs, or one for all of them
        origins : see `fit_to_classes`
        """
        F, Y, w, origins = _weighted_rows(F, Y, w, origins)
        scores, _, w = _merge_copies(Y - F, np.zeros(len(F), np.int64), w, origins)
        intervals = Intervals.from_scores(scores, w)
        return cls(intervals, shifts=intervals.shifts(levels))

    @property
    def n_rows(self) -> int:
        """Number of calibration rows; 0 if the probabilities follow from the loss."""
        return len(self.intervals.scores)

    def with_normalised(
        self, scale: ResidualScale, residuals: Floats, sigma: Floats, w: Floats | None
    ) -> Calibration:
        """Return the calibration with normalised intervals added.

        residuals : (k, c) `interval_scores` of rows to which `scale` was not fitted
        sigma : (k, c) residual scale of these rows
        w : (k,) weights, or None
        """
        scaled = Intervals.from_scores(residuals / sigma, w)
        return replace(self, residual_scale=scale, normalised=scaled)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Calibration | None:
        """Return the calibration that is stored in `arrays`; None if there is none."""
        named_arrays = _without_prefix(arrays, CALIBRATION_PREFIX)
        if not named_arrays:
            return None
        intervals = Intervals.from_arrays(named_arrays)
        probabilities = probabilities_from_arrays(named_arrays)
        if "shifts" in named_arrays:
            return cls(intervals, shifts=named_arrays["shifts"])
        calibration = cls(intervals, probabilities, unit=named_arrays.get("unit"))
        normalised_arrays = _without_prefix(named_arrays, _SCALE_PREFIX)
        if not normalised_arrays:
            return calibration
        scores = Intervals.from_arrays(_without_prefix(normalised_arrays, _SCORES_PREFIX))
        return replace(
            calibration,
            residual_scale=ResidualScale.from_arrays(normalised_arrays),
            normalised=scores,
        )

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to store, by prefixed names."""
        named_arrays = self.intervals.arrays()
        if self.shifts is not None:
            named_arrays["shifts"] = self.shifts
        if self.unit is not None:
            named_arrays["unit"] = self.unit
        if self.probabilities is not None:
            named_arrays |= self.probabilities.arrays()
        if self.residual_scale is not None and self.normalised is not None:
            scores = {f"{_SCORES_PREFIX}{k}": a for k, a in self.normalised.arrays().items()}
            scaled = self.residual_scale.arrays() | scores
            named_arrays |= {f"{_SCALE_PREFIX}{name}": array for name, array in scaled.items()}
        return {f"{CALIBRATION_PREFIX}{name}": array for name, array in named_arrays.items()}

    def describe(self) -> dict[str, Any]:
        """Return a short description, as JSON."""
        description: dict[str, Any] = {"rows": len(self.intervals.scores)}
        if self.shifts is not None:
            description["shifts"] = self.shifts.tolist()
        if self.probabilities is not None:
            description["way"] = self.probabilities.method
            if self.probabilities.method == "temperature":
                slope = float(self.probabilities.arrays()["slope"][0])
                description["temperature"] = 1 / slope if slope else None
        return description


def interval_scores(F: npt.NDArray[Any], Y: npt.NDArray[Any], unit: Floats | None) -> Floats:
    """Return the scores (m, c) of values F and targets Y; unit : see `Calibration`."""
    if unit is not None:
        F, Y = (symmetric_log(np, a, unit) for a in (F, Y))
    scores: Floats = np.abs(F - Y)
    return scores


def interval_ends(
    F: npt.NDArray[Any], half_width: Floats, unit: Floats | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the ends (m, c) of intervals around values F (m, c).

    half_width : (c,) or (m, c), on the log scale if there is a unit
    unit : see `Calibration`
    """
    if unit is None:
        return F - half_width, F + half_width
    logs = symmetric_log(np, F, unit)
    return symmetric_exp(np, logs - half_width, unit), symmetric_exp(np, logs + half_width, unit)


def no_calibration_text(meta: Mapping[str, Any]) -> str:
    """Return the end of the error "... needs" for a model without calibration rows.

    meta : meta data of the setup of the run
    """
    reason = meta.get("uncalibrated") or "or its run has not ended; train it with calibrate=True"
    for text, value in (("calibrate=True", True), ('calibrate="auto"', "auto")):
        reason = reason.replace(text, mention("calibrate", value))  # the record has plain text
    return f"calibration rows set aside in training, but this model has none, {reason}"


def _weighted_rows(F: npt.NDArray[Any], Y: npt.NDArray[Any], w: Any, origins: Any) -> Any:
    """Return F in float64, Y, w and origins of the rows with a weight above 0."""
    F = F.astype(np.float64)
    if w is None:
        return F, Y, None, origins
    has_weight = w > 0
    origins = None if origins is None else origins[has_weight]
    return F[has_weight], Y[has_weight], w[has_weight].astype(np.float64), origins


def _merge_copies(
    F: Floats, labels: npt.NDArray[np.int64], w: Floats | None,
    origins: npt.NDArray[np.integer] | None,
) -> tuple[Floats, npt.NDArray[np.int64], Floats | None]:  # fmt: skip
    """Return the first row of each origin and label, with the weight of all of them.

    The rows are unchanged if each has a different origin.
    """
    if origins is None:
        return F, labels, w
    order = np.lexsort((labels, origins))
    differs = (np.diff(origins[order]) != 0) | (np.diff(labels[order]) != 0)
    starts = np.concatenate(([0], np.flatnonzero(differs) + 1))
    if len(starts) == len(F):
        return F, labels, w
    weights = np.add.reduceat(np.ones(len(F)) if w is None else w[order], starts)
    first_copies = order[starts]
    return F[first_copies], labels[first_copies], weights
