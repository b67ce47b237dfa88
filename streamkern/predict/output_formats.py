"""Convert values of a model to the requested output.

That is values, probabilities, or values with the ends of intervals or standard deviations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.predict.calibration import Calibration
from streamkern.predict.intervals import check_level
from streamkern.predict.prediction_table import PredictionTable
from streamkern.predict.probabilities import Probabilities
from streamkern.predict.residual_scale import Normalised

NO_POSTERIOR = (
    "the posterior of a model, and of this one none was kept; train with posterior=True and "
    "solver='direct', or give interval= instead"
)
"""Requirement of standard deviations, for errors."""


def check_normalised(level: float | None, normalised: bool) -> None:
    """Raise ConfigError for normalised without an interval."""
    if normalised and level is None:
        raise ConfigError("normalised=True is for intervals; give interval, such as 0.9, as well")


def normalised_of(known: Calibration) -> Normalised:
    """Return the normalised intervals of a calibration; raise ConfigError if it has none."""
    if known.normalised is None:
        raise ConfigError(
            "normalised=True needs a model that was calibrated with values by a version of "
            "streamkern that knows it, and this one was not; leave it out, or train anew"
        )
    return known.normalised


@dataclass(frozen=True)
class OutputFormat:
    """Output format; by default the values themselves.

    probabilities : returns them in place of the values
    reach : (c,) half width of intervals at `level`
    normalised : whether `reach` is multiplied by the residual scale of a row
    std : whether standard deviations follow the values
    """

    probabilities: Probabilities | None = None
    reach: npt.NDArray[np.float64] | None = None
    level: float | None = None
    std: bool = False
    normalised: bool = False

    @classmethod
    def of(
        cls, known: Calibration | None, classes: Sequence[str] | None, proba: bool,
        level: float | None, lacking: str, normalised: bool = False,
    ) -> OutputFormat:  # fmt: skip
        """Return the requested format; raise ConfigError if it makes no sense for the model.

        lacking : requirement of a model without calibration, for the error
        """
        if level is not None:
            check_level(level)
        if proba and classes is None:
            raise ConfigError("proba=True is for classes, and the model has values; leave it out")
        if level is not None and classes is not None:
            raise ConfigError(
                f"interval={level!r} is for values, and the model has classes; give proba=True"
            )
        check_normalised(level, normalised)
        asked = "proba=True" if proba else f"interval={level!r}"
        if known is None and (proba or level is not None):
            raise ConfigError(f"{asked} needs {lacking}")
        if known is None or not (proba or level is not None):
            return cls()
        if proba:
            return cls(known.probabilities)
        assert level is not None
        intervals = known.intervals if not normalised else normalised_of(known).intervals
        return cls(None, intervals.reach(level), level, normalised=normalised)

    def with_std(self, known: bool) -> OutputFormat:
        """Return the format with standard deviations.

        Raises ConfigError if another format is requested as well, or if they are not `known`.
        """
        if self != OutputFormat():
            raise ConfigError(
                "std=True gives standard deviations behind the values alone; leave it out, or "
                "leave proba= and interval= out"
            )
        if not known:
            raise ConfigError(f"std=True needs {NO_POSTERIOR}")
        return OutputFormat(std=True)

    def answers(self, plain: PredictionTable) -> PredictionTable:
        """Return the description of the output, given that of the values."""
        if self.probabilities is not None:
            dtype, record = np.dtype(np.float64), plain.record | {"proba": True}
            return replace(plain, dtype=dtype, scores="probability", record=record)
        if self.reach is None and not self.std:
            return plain
        c = plain.width
        several = [f"value_{k}" for k in range(c)] if c > 1 else ["value"]
        names = list(plain.names or several)
        more, record = (("std",), {"std": True}) if self.std else (
            ("low", "high"),
            {"interval": self.level} | ({"normalised": True} if self.normalised else {}),
        )  # fmt: skip
        behind = [f"{name}_{what}" for what in more for name in names]
        return replace(
            plain, width=(1 + len(more)) * c, names=(*names, *behind), record=plain.record | record
        )

    def __call__(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the output for values (k, c), with residual scales behind them if `normalised`."""
        if self.probabilities is not None:
            return self.probabilities(F)
        if self.reach is None:
            return F
        c, reach = len(self.reach), self.reach
        if self.normalised:
            F, reach = F[:, :c], reach * F[:, c:]
        return np.concatenate((F, F - reach, F + reach), axis=1)
