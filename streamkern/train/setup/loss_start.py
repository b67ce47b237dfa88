"""The start of a run with the log loss: the squares of the setup, as logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.predict.probabilities import temperature
from streamkern.solver.precondition.noise import Noise, left_out_values
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale

MIN_CLASS_SHARE = 1e-6
"""Smallest share of a class that its logit without features stands for; a class without weight has
a share of 0."""


def logits_scale(
    op: KernelOperator, Z: Points, arrays: dict[str, Array], targets: TargetScale,
    rows: SampleRows, noise: Noise,
) -> TargetScale:  # fmt: skip
    """Return mean and gain of the logits, and turn the start in `arrays` into theirs.

    The mean is the logarithm of the classes' shares, or 0 without an intercept: f = 0 predicts the
    shares. The logits of the start are its values times the slope that has the least log loss on
    `rows`, each of which the others predict. The gain is the power of two next to the slope, so
    that weights times the gain are exact.

    arrays : "start" (p, c), and "values", K(Z, Z) times it, if a ridge needs it
    targets : mean of the one-hot targets; their scale is 1
    rows, noise : rows that the noise was found from
    """
    mean = np.zeros_like(targets.mean)
    if targets.mean.any():
        mean = np.log(np.maximum(targets.mean, MIN_CLASS_SHARE))
    slope = max(_slope(op, Z, targets.mean, mean, rows, noise), 1.0)
    gain = 2.0 ** np.round(np.log2(slope))
    for name in ("start", "values"):
        if arrays.get(name) is not None:
            arrays[name] *= slope / gain
    return TargetScale(mean, np.full_like(targets.scale, gain))


def _slope(
    op: KernelOperator, Z: Points, shares: npt.NDArray[np.float64],
    mean: npt.NDArray[np.float64], rows: SampleRows, noise: Noise,
) -> float:  # fmt: skip
    """Return the slope from values of squares to logits; 0 if too few rows give the noise."""
    if not noise.tried:
        return 0.0
    to_host = op.backend.to_host
    values = left_out_values(op, Z, rows, noise)
    labels = (to_host(rows.Y) + shares).argmax(axis=1)
    w = np.ones(len(values))
    if rows.root is not None:
        w = to_host(rows.root).astype(np.float64) ** 2
    return float(temperature(values, labels, w, mean).slope[0])
