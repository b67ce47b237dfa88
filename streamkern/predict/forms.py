"""What is written of the values of a model: they, probabilities, or values between their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.predict.answer_files import Answers
from streamkern.predict.calibration import Calibration
from streamkern.predict.intervals import check_level
from streamkern.predict.probabilities import Probabilities


@dataclass(frozen=True)
class Form:
    """probabilities : of these, or reach : (c,) of intervals that hold as often as `level`."""

    probabilities: Probabilities | None = None
    reach: npt.NDArray[np.float64] | None = None
    level: float | None = None

    @classmethod
    def of(
        cls, known: Calibration | None, classes: Sequence[str] | None, proba: bool,
        level: float | None, lacking: str,
    ) -> Form:  # fmt: skip
        """As asked; ConfigError where that makes no sense for the model. lacking : what an
        uncalibrated one would need."""
        if level is not None:
            check_level(level)
        if proba and classes is None:
            raise ConfigError("proba=True is for classes, and the model has values; leave it out")
        if level is not None and classes is not None:
            raise ConfigError(
                f"interval={level!r} is for values, and the model has classes; give proba=True"
            )
        asked = "proba=True" if proba else f"interval={level!r}"
        if known is None and (proba or level is not None):
            raise ConfigError(f"{asked} needs {lacking}")
        if known is None or not (proba or level is not None):
            return cls()
        if proba:
            return cls(known.probabilities)
        assert level is not None
        return cls(None, known.intervals.reach(level), level)

    def answers(self, plain: Answers) -> Answers:
        """What is known of the answers, from that of values."""
        if self.probabilities is not None:
            dtype, record = np.dtype(np.float64), plain.record | {"proba": True}
            return replace(plain, dtype=dtype, scores="probability", record=record)
        if self.reach is None:
            return plain
        c = plain.width
        several = [f"value_{k}" for k in range(c)] if c > 1 else ["value"]
        names = list(plain.names or several)
        ends = [f"{name}_{end}" for end in ("low", "high") for name in names]
        return replace(
            plain, width=3 * c, names=(*names, *ends),
            record=plain.record | {"interval": self.level},
        )  # fmt: skip

    def __call__(self, F: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What is written of values (k, c)."""
        if self.probabilities is not None:
            return self.probabilities(F)
        if self.reach is None:
            return F
        return np.concatenate((F, F - self.reach, F + self.reach), axis=1)
