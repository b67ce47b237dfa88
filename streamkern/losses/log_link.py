"""Losses of positive predictions exp(z): Poisson's and the gamma distribution's, up to a factor.

Their curvature in z has no bound. A row has instead

    information   the expected curvature where the prediction is the mean: exp(z), or 1

and a step takes as its curvature the information, or so much more that the step alone would move z
by at most `LONGEST_MOVE`, over which the curvature grows by at most the exponential of that: its
third derivative is at most the second (a self-concordant loss, as in Bach 2010, Electron. J. Stat.
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

LONGEST_MOVE: Final = 1.0
LARGEST_EXPONENT: Final = {4: 60.0, 8: 700.0}
"""Largest size of z that counts, by the bytes of its dtype: exp(z) does not overflow."""


@dataclass(frozen=True)
class LogLink(Loss):
    """A loss of predictions exp(z).

    unit : (c,) means of the targets, above 0, by which solvers divide them; found from the data
    """

    log_link, identity_link = True, False
    zero_targets: ClassVar[bool] = True
    """Whether targets may be 0."""
    unit: Sequence[float] | None = None

    def in_unit(self, means: npt.NDArray[np.float64]) -> Self:
        """Return the loss for targets with these means, (c,)."""
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
        """Raise DataError if a target (m, c) of the rows with these numbers (m,) is too small.

        of_data : the data, for the error, such as " of data.test"
        """
        bad = Y < 0 if self.zero_targets else Y <= 0
        if bad.any():
            row = int(np.argmax(bad.reshape(len(Y), -1).any(axis=1)))
            raise self._refusal(f"row {row_ids[row]}{of_data} has {Y[row].min():g}")

    def check_means(self, means: npt.NDArray[np.float64]) -> None:
        """Raise DataError if the mean (c,) of the targets of an output is not above 0."""
        if not (means > 0).all():
            raise self._refusal(f"the mean of target {int(np.argmin(means))} is {means.min():g}")

    def _refusal(self, fact: str) -> DataError:
        rule = (
            "targets of at least 0 that are not all 0" if self.zero_targets else "targets above 0"
        )
        return DataError(
            f"{mention('model.loss', self.name)} needs {rule}, and {fact}",
            f"correct the targets, or give {mention('model.loss', 'squared_error')}",
        )

    def gradient(self, xp: Any, errors: Any, Y: Any) -> Any:
        """Return dl/dz of half the deviance (m, c), in place of the errors."""
        errors += Y
        return self.slope(xp, errors, Y)

    def slope(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return dl/dz of half the deviance (m, c), in place of the predictions F."""
        raise NotImplementedError

    def information(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the expected curvature in z at the predictions F (m, c), which stay."""
        raise NotImplementedError

    def row_curvature(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the curvatures that steps on batches take at F, (m,): the largest of the outputs.

        With it, a step for one row alone changes z by at most `LONGEST_MOVE`.
        """
        size = self._sizes(xp, F, Y, LONGEST_MOVE)
        return xp.maximum(size, self.information(xp, F, Y), out=size).max(axis=1)

    def newton_curvatures(self, xp: Any, F: Any, Y: Any, longest_move: float) -> Any:
        """Return the curvatures (m, c) that Newton steps take at F.

        longest_move : the largest change of z by a step for one row alone
        """
        size = self._sizes(xp, F, Y, longest_move)
        return xp.maximum(size, self.second_derivative(xp, F, Y), out=size)

    def _sizes(self, xp: Any, F: Any, Y: Any, longest_move: float) -> Any:
        """Return the sizes of the slopes at F over the longest move, (m, c)."""
        size = self.slope(xp, F.copy(), Y)
        xp.abs(size, out=size)
        size /= longest_move
        return size

    def second_derivative(self, xp: Any, F: Any, Y: Any) -> Any:
        """Return the second derivative in z of half the deviance at F, (m, c)."""
        raise NotImplementedError


class Poisson(LogLink):
    """Poisson's deviance of counts, 2 (y log(y / mu) - y + mu) with mu = exp(z)."""

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
        # log(y / mu) of y = 0 is multiplied by 0
        return 2 * (Y * xp.log(xp.where(Y > 0, Y, F) / F) - Y + F).sum(axis=1)


class Gamma(LogLink):
    """The gamma distribution's deviance, 2 (y / mu - 1 - log(y / mu)) with mu = exp(z)."""

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
