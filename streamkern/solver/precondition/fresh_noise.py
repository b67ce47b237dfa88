"""Noise of the targets from the first block, if a thousand rows do not distinguish it from none.

If each of a thousand rows is a center, there is little to smooth, and a rough kernel acts like a
ridge, so that all small penalties have equal errors (`noise.Noise.grows` is False). The first block
has far fewer centers than the sample has rows, and there the errors differ: its fit with each of
several penalties is measured on fresh rows. Each takes one factor of its covariance, and no other
rows.

For s sampled rows the best penalty was kappa / s, and for all n rows kappa / n with much the same
kappa, p = 2000, Laplace (n = 19 000 for the made problems, all rows of the tables):

| | s = 4096 | n | | s | n | | s | n |
|---|---|---|---|---|---|---|---|---|
| smooth | .12 | .19 | bike | .041 | .038 | diamonds | .12 | .012 |
| rough | .012 | .019 | compactiv | .011 | .036 | penbased | .041 | .017 |
| digits | .012 | .019 | kegg | .12 | .019 | the others | .01 to .09 | the same |

(All smaller penalties are within 1 % on diamonds.) The first of four blocks finds .01 to .04 for
the made problems, and for the tables the kappa of all p centers, within a factor of three; the
first of sixteen counts as noise what so few centers cannot fit: 1.2 for the rough problem. So
blocks of fewer than a quarter of the centers are not used.
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
"""Smallest fraction of the centers in a block that is used."""
FRESH_NOISE_GAIN_SE = 2.0
"""Smallest mean gain on the fresh rows that counts, in standard errors."""
DECADES = 5
"""Powers of ten below the top eigenvalue of the covariance at which the search begins.

Among the small penalties, whose errors may all be equal, it would see no slope.
"""


def noise_on_fresh_rows(factor: BlockFactor, probe: Sample, noise: Noise, rows: float) -> Noise:
    """Return `noise`, or if it is undetermined, one with a significantly smaller error.

    The error is that on the probe's fresh rows. Takes b^3 / 3 FLOPs for each of about six
    penalties.

    rows : number of rows that the sample is worth.
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
    gain = missed[min(missed)] - missed[best]  # over the smallest penalty with a factor
    if gain.mean() <= FRESH_NOISE_GAIN_SE * gain.std() / math.sqrt(len(gain)):
        return noise
    tried = [(least * 10.0**at * rows, found[at]) for at in sorted(missed)]
    return Noise(float(least * 10.0 ** parabola_minimum(found) * rows), round(rows), False, tried)


def _squares(factor: BlockFactor, probe: Sample, penalty: float) -> npt.NDArray[Any]:
    """Return weighted squared errors (h,) of the sample's fit on the fresh rows.

    They are NaN if rounding forbids the penalty.
    """
    op, fresh = factor.op, slice(probe.fresh, len(probe))
    learned = factor.solution(penalty)
    if learned is None:
        return np.full(probe.n_fresh, np.nan)
    left = probe.Y[fresh] - op.product(probe.X[fresh], factor.Z, learned)
    if probe.root is not None:
        left *= probe.root[fresh, None]
    squares: npt.NDArray[Any] = op.backend.to_host((left**2).sum(axis=1)).astype(np.float64)
    return squares
