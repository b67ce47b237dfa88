"""Describe predictions, and convert the values of a model to them.

Predictions are values, scores or probabilities of classes, or values with the ends of intervals or
with standard deviations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.ingest.original_columns import OriginalColumns
from streamkern.losses.base import Loss
from streamkern.predict.calibration import Calibration, Intervals, check_level, interval_ends
from streamkern.predict.probabilities import Probabilities
from streamkern.store.class_labels import labels_from_names

CHUNK_BYTES = 8 << 20  # bytes of the values in a Zarr chunk
Slabs = Iterable[tuple[int, Any, Any]]
"""Blocks of predictions as (first position, rows, values).

rows : row numbers (k,), or a list of columns (k,) of the input
values : (k, c), or class ids (k, 1)
"""
QUANTILE_TOLERANCE = 1e-9
"""Largest difference between two levels of the same quantile."""
MOST_PROBABLE = "most_probable"
"""Column of the class with the largest probability, which may differ from the predicted class."""


@dataclass(frozen=True)
class PredictionTable:
    """Description of the predictions, known before the first one.

    n_rows : number of all rows; 0 if it is unknown
    dtype : dtype of the values
    width : number of values of a row: c, or 1 if only class ids are kept
    classes : label of each class, or None for values
    names : names of the targets; None if they have none
    numbered : whether the positions differ from the row numbers
    only_ids : whether values are class ids (k, 1)
    record : JSON that identifies the model, the data and the options of the predictions
    scores : prefix of the names of columns with the values of classes, such as "probability"
    input_columns : columns of the input to write before the predictions
    escapes_formulas : whether CSV text that a spreadsheet would compute gets a "'" in front
    """

    n_rows: int
    dtype: np.dtype[Any]
    width: int
    classes: NDArray[Any] | None
    names: tuple[str, ...] | None
    numbered: bool = False
    only_ids: bool = False
    record: dict[str, Any] = field(default_factory=dict)
    scores: str = "score"
    input_columns: OriginalColumns | None = None
    escapes_formulas: bool = False

    @property
    def label_name(self) -> str:
        """Name of the column of labels; only with scores these are the predicted classes."""
        return "label" if self.scores == "score" else MOST_PROBABLE

    @property
    def value_names(self) -> Sequence[str]:
        """Names of the values of a row: the names of the targets, or numbered ones."""
        numbered = [f"value_{k}" for k in range(self.width)] if self.width > 1 else ["value"]
        return self.names or numbered

    @property
    def chunk_rows(self) -> int:
        """Rows of a Zarr chunk."""
        return max(1, CHUNK_BYTES // (self.width * self.dtype.itemsize))

    def labels(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the label of each row of values (k, c)."""
        assert self.classes is not None
        labels: NDArray[Any] = self.classes[values.argmax(axis=1)]
        return labels

    def header(self) -> list[str]:
        """Return the names of the columns of a table, all distinct."""
        names = ["row"] if self.input_columns is None else list(self.input_columns.names)
        if self.classes is None:
            columns = list(self.value_names)
        else:
            label = self.label_name
            label = self.names[0] if self.names and label == "label" else label
            columns = [label, *(f"{self.scores}_{name}" for name in self.classes.tolist())]
        for name in columns:
            while name in names:
                name += "_"
            names.append(name)
        return names

    def columns(self, rows: Any, values: NDArray[Any], part: slice = slice(None)) -> list[Any]:
        """Return the columns of a table, as in `header`, or a part of their rows."""
        first_columns = [rows] if self.input_columns is None else rows
        labels = [] if self.classes is None else [self.labels(values[part])]
        return [*(column[part] for column in first_columns), *labels, *values[part].T]


def output_labels(names: Sequence[str], dtype: str | None) -> NDArray[Any]:
    """Return labels (c,) as written to files: as `labels_from_names`, but dates as text."""
    labels = labels_from_names(names, dtype)
    if labels.dtype.kind in "iu" and np.can_cast(labels.dtype, np.int64):
        return labels.astype(np.int64)
    return labels if labels.dtype.kind in "biufU" else np.array(names)


NO_POSTERIOR = (
    "the posterior of the model, but this model has none; train with "
    f"{mention('posterior', True)} and {mention('solver', 'direct')}, or give "
    f"{mention('interval=')} instead"
)
"""End of the error "... needs" for a model without a posterior."""


def check_normalised(level: float | None, normalised: bool) -> None:
    """Raise ConfigError if `normalised` is requested without an interval."""
    if normalised and level is None:
        raise ConfigError(
            f"{mention('normalised', True)} needs an interval", "give interval too, such as 0.9"
        )


def _normalised_intervals(calibration: Calibration) -> Intervals:
    """Return the normalised intervals of a calibration; raise ConfigError if it has none."""
    if calibration.normalised is None:
        raise ConfigError(
            f"{mention('normalised', True)} needs a residual scale, which the calibration of this "
            "model does not have",
            "leave it out, or train again",
        )
    return calibration.normalised


def _interval_quantiles(
    level: float, quantiles: Sequence[float], normalised: bool
) -> tuple[int, int]:
    """Return the indices of the two quantiles that are the ends of intervals of this level.

    Raises ConfigError if the model was not trained for both, or if `normalised` is requested.
    """
    if normalised:
        raise ConfigError(
            f"{mention('normalised', True)} cannot be used with a model of quantiles, whose "
            "intervals already vary in width",
            "leave it out",
        )
    ends = (1 - level) / 2, (1 + level) / 2
    matches = [np.flatnonzero(np.isclose(quantiles, q, 0, QUANTILE_TOLERANCE)) for q in ends]
    if not all(map(len, matches)):
        trained = ", ".join(f"{q:g}" for q in quantiles)
        raise ConfigError(
            f"{mention('interval', level)} needs the quantiles {ends[0]:.6g} and {ends[1]:.6g}, "
            f"but the model was trained for {trained}",
            f"train it with both of them among {mention('quantile=')}",
        )
    return int(matches[0][0]), int(matches[1][0])


def require_calibration(calibration: Calibration | None, request: str, lacking: str) -> Calibration:
    """Return the calibration; raise ConfigError if it is None.

    request : argument that needs it, for the error
    lacking : end of the error, from `no_calibration_text`
    """
    if calibration is None:
        raise ConfigError(f"{request} needs {lacking}")
    return calibration


@dataclass(frozen=True)
class OutputFormat:
    """Conversion of a model's values to the requested output; by default the values themselves.

    probabilities : maps values to probabilities, which replace them; None to keep the values
    half_width : (c,) half width of intervals at `level`
    level : level of the intervals; None without intervals
    std : whether standard deviations follow the values
    normalised : whether `half_width` is multiplied by the residual scale of a row
    ends : indices of the two outputs of a model of quantiles that are the ends of intervals
    unit : see `Calibration`
    """

    probabilities: Probabilities | None = None
    half_width: NDArray[np.float64] | None = None
    level: float | None = None
    std: bool = False
    normalised: bool = False
    ends: tuple[int, int] | None = None
    unit: NDArray[np.float64] | None = None

    @classmethod
    def from_request(
        cls, calibration: Calibration | None, classes: Sequence[str] | None, proba: bool,
        level: float | None, lacking: str, normalised: bool = False, loss: Loss | None = None,
    ) -> OutputFormat:  # fmt: skip
        """Return the requested format; raise ConfigError if the model does not support it.

        calibration : the calibration of the model, or None
        classes : names of the classes; None for values
        proba : whether probabilities are requested
        level : level of the requested intervals, or None
        lacking : see `require_calibration`
        normalised : whether normalised intervals are requested
        loss : the loss of the model; None for the squared error
        """
        if level is not None:
            check_level(level)
        if proba and classes is None:
            raise ConfigError(
                f"{mention('proba', True)} needs classes, but the model predicts values",
                "leave it out",
            )
        if level is not None and classes is not None:
            raise ConfigError(
                f"{mention('interval', level)} needs values, but the model predicts classes",
                f"give {mention('proba', True)}",
            )
        check_normalised(level, normalised)
        if not proba and level is None:
            return cls()
        if level is not None and loss is not None and loss.quantiles is not None:
            return cls(level=level, ends=_interval_quantiles(level, loss.quantiles, normalised))
        request = "proba=True" if proba else f"interval={level!r}"
        calibration = require_calibration(calibration, request, lacking)
        if level is None:
            return cls(calibration.probabilities)
        intervals = _normalised_intervals(calibration) if normalised else calibration.intervals
        half_width = intervals.score_quantile(level)
        return cls(None, half_width, level, normalised=normalised, unit=calibration.unit)

    def with_std(self, has_posterior: bool) -> OutputFormat:
        """Return the format with standard deviations.

        Raises ConfigError if another format is requested too, or without a posterior.
        """
        if self != OutputFormat():
            raise ConfigError(
                f"{mention('std', True)} cannot be combined with probabilities or intervals",
                f"leave it out, or leave {mention('proba=')} and {mention('interval=')} out",
            )
        if not has_posterior:
            raise ConfigError(f"{mention('std', True)} needs {NO_POSTERIOR}")
        return OutputFormat(std=True)

    def apply_to(self, values: PredictionTable) -> PredictionTable:
        """Return the description of the output, given the description of the plain values."""
        if self.probabilities is not None:
            dtype, record = np.dtype(np.float64), values.record | {"proba": True}
            return replace(values, dtype=dtype, scores="probability", record=record)
        if self.half_width is None and not self.std and self.ends is None:
            return values
        c, names = values.width, values.value_names
        suffixes: tuple[str, ...] = ("low", "high")
        record = {"interval": self.level} | ({"normalised": True} if self.normalised else {})
        if self.ends is not None:
            assert values.names is not None
            ends = tuple(f"interval_{end}" for end in suffixes)
            record = values.record | record
            return replace(values, width=c + 2, names=(*values.names, *ends), record=record)
        if self.std:
            suffixes, record = ("std",), {"std": True}
        names = (*names, *(f"{name}_{end}" for end in suffixes for name in names))
        return replace(
            values, width=(1 + len(suffixes)) * c, names=names, record=values.record | record
        )

    def __call__(self, F: NDArray[Any]) -> NDArray[Any]:
        """Return the output for values (k, c).

        With `normalised`, F is (k, 2 c), values and residual scales. With `std`, it is (k, 2 c),
        values and standard deviations, and returned unchanged.
        """
        if self.probabilities is not None:
            return self.probabilities(F)
        if self.ends is not None:
            return np.concatenate((F, F[:, list(self.ends)]), axis=1)
        if self.half_width is None:
            return F
        c, half_width = len(self.half_width), self.half_width
        if self.normalised:
            F, half_width = F[:, :c], half_width * F[:, c:]
        return np.concatenate((F, *interval_ends(F, half_width, self.unit)), axis=1)
