"""The noise of the targets where a thousand rows, each of them a center, do not tell it from none.

Such rows leave little to be smoothed, and a rough kernel is a ridge of its own, so that all small
penalties look alike (`noise.Noise.grows` is False). The first block has far fewer centers than the
sample has rows, and there they do not: what it learns with each of some penalties is measured on
rows that nobody has learned from. That costs one factor of its covariance each, and no other row.

Of s sampled rows the best penalty was kappa / s, and of all n rows kappa / n with much the same
kappa, p = 2000, Laplace (n = 19 000 of the made problems, all rows of the tables):

| | s = 4096 | n | | s | n | | s | n |
|---|---|---|---|---|---|---|---|---|
| smooth | .12 | .19 | bike | .041 | .038 | diamonds | .12 | .012 |
| rough | .012 | .019 | compactiv | .011 | .036 | penbased | .041 | .017 |
| digits | .012 | .019 | kegg | .12 | .019 | the others | .01 to .09 | the same |

(All smaller penalties are within 1 % on diamonds.) The first of four blocks says .01 to .04 for the
made problems, and for the tables what all of p say, within a factor of three; the first of sixteen
takes what so few centers can not follow for noise: 1.2 for the rough problem. So blocks of fewer
than a quarter of the centers are not asked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.solver.precondition.block_factor import BlockFactor
from streamkern.solver.precondition.center_targets import Sample
from streamkern.solver.precondition.held_out import geometric_search, parabola_minimum
from streamkern.solver.precondition.noise import Noise

MIN_CENTER_SHARE = 0.25
"""Of the centers, that a block has to have."""
FRESH_NOISE_GAIN_SE = 2.0
"""Standard errors of the mean gain on the fresh rows."""
DECADES = 5
"""Below the top eigenvalue of the covariance, where the search begins: among the small penalties,
which may all look alike, it would see no slope."""


def noise_on_fresh_rows(factor: BlockFactor, probe: Sample, noise: Noise, rows: float) -> Noise:
    """`noise`, or one that does surely better on the probe's fresh rows, where it is not told.

    rows : what the sample is worth. Takes b^3 / 3 FLOPs for each of half a dozen penalties.
    """
    least = noise.penalty(rows)
    few = len(factor.Z) < MIN_CENTER_SHARE * len(factor.centers)
    if noise.grows or few or probe.n_fresh < 2 or not least > 0:
        return noise
    missed: dict[int, npt.NDArray[Any]] = {}

    def error(times: float) -> float:
        squares = factor.ranks.broadcast_scalars(_squares(factor, probe, least * times).tolist())
        if not np.isfinite(squares).all():
            return math.inf
        missed[round(math.log10(times))] = squares
        return float(squares.mean())

    top = max(round(math.log10(factor.top / least)), 0)
    found = geometric_search(error, max(top - DECADES, 0), 0, top, stride=1)
    if 0 not in found:
        found[0] = error(1.0)
    if not missed:
        return noise
    best = min(missed, key=lambda at: found[at])
    gain = missed[min(missed)] - missed[best]  # over what is known to be borne
    if gain.mean() <= FRESH_NOISE_GAIN_SE * gain.std() / math.sqrt(len(gain)):
        return noise
    tried = [(least * 10.0**at * rows, found[at]) for at in sorted(missed)]
    return Noise(float(least * 10.0 ** parabola_minimum(found) * rows), round(rows), False, tried)


def _squares(factor: BlockFactor, probe: Sample, penalty: float) -> npt.NDArray[Any]:
    """(h,) weighted squared errors on the fresh rows of what the sample teaches; NaN where rounding
    forbids the penalty."""
    op, fresh = factor.op, slice(probe.fresh, len(probe))
    learned = factor.solution(penalty)
    if learned is None:
        return np.full(probe.n_fresh, np.nan)
    left = probe.Y[fresh] - op.product(probe.X[fresh], factor.Z, learned)
    if probe.root is not None:
        left *= probe.root[fresh, None]
    squares: npt.NDArray[Any] = op.backend.to_host((left**2).sum(axis=1)).astype(np.float64)
    return squares
