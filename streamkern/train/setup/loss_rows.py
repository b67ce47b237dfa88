"""Rows from which parameters, start and ridge of a loss are found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.stream.target_scale import TargetScale

_Floats = npt.NDArray[np.float64]


class LossRows(NamedTuple):
    """Rows to find the ridge from, in float64, with targets as stored.

    K, Y, w : (n, n) kernel matrix without weights, (n, c) targets, (n,) weights
    judged : (n,) weights of the rows where they are held out; 0 with an outlier as a target
    mean, gain : (c,) of the outputs z = mean + gain f
    """

    K: _Floats
    Y: _Floats
    w: _Floats
    judged: _Floats
    mean: _Floats
    gain: _Floats

    def part(self, rows: npt.NDArray[np.int64]) -> LossRows:
        """Return these rows, with the kernel matrix of all rows and them."""
        w, judged = self.w[rows], self.judged[rows]
        return self._replace(K=self.K[:, rows], Y=self.Y[rows], w=w, judged=judged)

    def with_outputs(self, outputs: TargetScale) -> LossRows:
        """Return the rows with this mean and gain of the outputs."""
        return self._replace(mean=outputs.mean, gain=outputs.scale)
