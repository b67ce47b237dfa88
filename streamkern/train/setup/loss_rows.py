"""Rows from which the parameters, the start and the ridge of a loss are found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.stream.target_scale import TargetScale

_Floats = npt.NDArray[np.float64]


class LossRows(NamedTuple):
    """Rows in float64, with their original targets.

    K : (n, n) kernel matrix, without weights
    Y : (n, c) targets
    w : (n,) sample weights
    score_w : (n,) sample weights in held-out losses, 0 for rows whose target is an outlier
    mean, gain : (c,) mean and gain of the outputs z = mean + gain f
    """

    K: _Floats
    Y: _Floats
    w: _Floats
    score_w: _Floats
    mean: _Floats
    gain: _Floats

    def part(self, rows: npt.NDArray[np.int64]) -> LossRows:
        """Return some of the rows. K keeps all rows of the matrix: it becomes (n, len(rows))."""
        w, score_w = self.w[rows], self.score_w[rows]
        return self._replace(K=self.K[:, rows], Y=self.Y[rows], w=w, score_w=score_w)

    def with_outputs(self, outputs: TargetScale) -> LossRows:
        """Return the rows with this mean and gain of the outputs."""
        return self._replace(mean=outputs.mean, gain=outputs.scale)
