"""Rows from which parameters, start and ridge of a loss are found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]


class LossRows(NamedTuple):
    """Rows to find the ridge from, in float64, with targets as stored.

    K, Y, w : (n, n) kernel matrix without weights, (n, c) targets, (n,) weights
    mean, gain : (c,) of the outputs z = mean + gain f
    """

    K: _Floats
    Y: _Floats
    w: _Floats
    mean: _Floats
    gain: _Floats

    def part(self, rows: npt.NDArray[np.int64]) -> LossRows:
        """Return these rows, with the kernel matrix of all rows and them."""
        return self._replace(K=self.K[:, rows], Y=self.Y[rows], w=self.w[rows])
