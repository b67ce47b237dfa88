"""The start of a run with the log loss: the squares of the setup, as logits."""

from __future__ import annotations

import numpy as np

from streamkern.backend.base import Array
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.predict.probabilities import temperature
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale

MAX_SLOPE = 100.0
"""Largest factor from values of squares to logits; a few rows without an error ask for more."""


def logits_scale(
    op: KernelOperator, Z: Points, arrays: dict[str, Array], targets: TargetScale, probe: SampleRows
) -> TargetScale:  # fmt: skip
    """Return mean and gain of the logits, and turn the start in `arrays` into theirs.

    The logits of the start are those of the squares times the slope that has the least log loss on
    the rows of the probe that are no centers, on which the setup was not fitted. The gain is the
    power of two next to it, so that weights times the gain are exact.

    arrays : "start" (p, c), and "values", K(Z, Z) times it, if a ridge needs it
    targets : mean of the one-hot targets; their scale is 1
    """
    backend, index = op.backend, probe.center_index
    apart = np.arange(len(probe.X)) if index is None else np.flatnonzero(index < 0)
    x = op.points(probe.X[backend.asarray(apart)], left=True)
    F = backend.to_host(op.product(x, Z, arrays["start"])) + targets.mean
    Y = backend.to_host(probe.Y)[apart] + targets.mean
    w = np.ones(len(F))
    if probe.root is not None:
        w = np.asarray(backend.to_host(probe.root), np.float64)[apart] ** 2
    slope = float(temperature(F.astype(np.float64), Y.argmax(axis=1), w).slope[0])
    slope = min(max(slope, 1.0), MAX_SLOPE)
    gain = 2.0 ** np.round(np.log2(slope))
    for name in ("start", "values"):
        if arrays.get(name) is not None:
            arrays[name] *= slope / gain
    return TargetScale(targets.mean * slope, np.full_like(targets.scale, gain))
