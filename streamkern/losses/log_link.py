"""Losses of positive predictions mu = exp(z): the Poisson and the gamma deviance.

Solvers minimise half the deviance, whose second derivative in z has no bound. For each row, steps
use the

    information   the expected second derivative if mu is the mean: mu for Poisson, 1 for gamma,

or a larger curvature, such that a step for the row alone changes z by at most `MAX_ROW_MOVE`. Over
such a change the second derivative grows by at most a factor exp(`MAX_ROW_MOVE`), because the third
derivative is at most as large as the second (self-concordance as in Bach 2010, Electron. J. Stat.
4, 384-414).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.losses.base import Loss

MAX_ROW_MOVE: Final = 1.0
"""Largest change of z by a step for one row alone."""
LARGEST_EXPONENT: Final = {4: 60.0, 8: 700.0}
"""Bytes of a dtype -> largest |z| that is used, so that exp(z) does not overflow."""


@dataclass(frozen=True)
class LogLink(Loss):
    """A loss of predictions exp(z).

    unit : (c,) means of the targets, above 0, by which solvers divide the targets; None before they
        are computed from the data.
    """

    log_link, identity_link = True, False
    zero_targets: ClassVar[bool] = True
    """Whether targets may be 0."""
    unit: Sequence[float] | None = None

    def in_unit(self, means: npt.NDArray[np.float64]) -> Self:
        """Return the loss with the means (c,) of the targets as its unit."""
        return replace(self, unit=means.tolist())

    def parameters(self) -> dict[str, Any]:
        """Return the unit."""
        return {"unit": self.unit}

    def predict(self, xp: Any, z: Any) -> Any:
        """Return exp(z) (m, c), in place of z."""
        largest = LARGEST_EXPONENT[z.dtype.itemsize]
        xp.clip(z, -largest, largest, out=z)
        return xp.exp(z, out=z)

    def output(self, means: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the logarithms of the means, (c,)."""
        return np.log(means)

    def check_targets(
        self, Y: npt.NDArray[Any], row_ids: npt.NDArray[np.int64], of_data: str = ""
    ) -> None:
        """Raise DataError if a target is negative, or 0 where it must be positive.

        Y : (m, c) targets.
        row_ids : (m,) row numbers, for the error.
        of_data : name of the data, for the error, such as " of data.test".
        """
        is_wrong = Y < 0 if self.zero_targets else Y <= 0
        if is_wrong.any():
            row = int(np.argmax(is_wrong.reshape(len(Y), -1).any(axis=1)))
            raise self._target_error(f"row {row_ids[row]}{of_data} has {Y[row].min():g}")

    def check_means(self, means: npt.NDArray[np.float64]) -> None:
        """Raise DataError unless the means (c,) of the targets are all above 0."""
        if not (means > 0).all():
            index = int(np.argmin(means))
            raise self._target_error(f"the mean of target {index} is {means.min():g}")

    def _target_error(self, fact: str) -> DataError:
        rule = (
            "targets of at least 0 that are not all 0" if self.zero_targets else "targets above 0"
        )
        return DataError(
            f"{mention('model.loss', self.name)} needs {rule}, but {fact}",
            f"correct the targets, or use {mention('model.loss', 'squared_error')}",
        )

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return dl/dz of half the deviance (m, c), in place of the errors."""
        errors += Y
        return self.slope(xp, errors, Y)

    def slope(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return dl/dz of half the deviance (m, c), in place of the predictions F."""
        raise NotImplementedError

    def information(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the expected second derivative in z at the predictions F (m, c), not changed."""
        raise NotImplementedError

    def row_curvature(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the curvatures (m,) that steps on batches use at F: the largest over the outputs.

        With them, a step for one row alone changes z by at most `MAX_ROW_MOVE`.
        """
        least = self._least_curvatures(xp, F, Y, MAX_ROW_MOVE)
        return xp.maximum(least, self.information(xp, F, Y), out=least).max(axis=1)

    def newton_curvatures(self, xp: Any, F: Any, Y: Any, longest_move: float) -> Any:
        """Return the curvatures (m, c) that Newton steps use at F.

        longest_move : largest change of z by a step for one row alone.
        """
        least = self._least_curvatures(xp, F, Y, longest_move)
        return xp.maximum(least, self.second_derivative(xp, F, Y), out=least)

    def _least_curvatures(self, xp: Any, F: Any, Y: Any, longest_move: float) -> Any:
        """Return the curvatures (m, c) with which a step for one row moves z by `longest_move`."""
        curvatures = self.slope(xp, F.copy(), Y)
        xp.abs(curvatures, out=curvatures)
        curvatures /= longest_move
        return curvatures

    def second_derivative(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the second derivative in z of half the deviance at F, (m, c)."""
        raise NotImplementedError


class Poisson(LogLink):
    """Poisson deviance of counts, 2 (y log(y / mu) - y + mu) with mu = exp(z)."""

    name, figure = "poisson", "poisson_deviance"

    def slope(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return mu - y."""
        F -= Y
        return F

    def information(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return mu."""
        return F

    def second_derivative(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return mu."""
        return F

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the deviances of the rows, (m,) float64."""
        F, Y = F.astype(np.float64), Y.astype(np.float64)
        # For y = 0, log(1) replaces log(y / mu), which would be multiplied by 0.
        return 2 * (Y * xp.log(xp.where(Y > 0, Y, F) / F) - Y + F).sum(axis=1)


class Gamma(LogLink):
    """Gamma deviance, 2 (y / mu - 1 - log(y / mu)) with mu = exp(z)."""

    name, figure = "gamma", "gamma_deviance"
    zero_targets = False

    def slope(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return 1 - y / mu."""
        xp.divide(Y, F, out=F)
        return xp.subtract(1, F, out=F)

    def information(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return 1."""
        return xp.ones_like(F)

    def second_derivative(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return y / mu."""
        return Y / F

    def values(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the deviances of the rows, (m,) float64."""
        ratio = Y.astype(np.float64) / F
        return 2 * (ratio - 1 - xp.log(ratio)).sum(axis=1)
