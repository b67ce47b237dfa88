"""What rows set aside tell of a model that has been trained; it becomes part of the model."""

from __future__ import annotations

import numpy as np

from streamkern.basics.errors import DataError
from streamkern.predict.calibration import Calibration
from streamkern.stream.sources.base import BaseSource
from streamkern.train.model import KernelModel


def calibrate(
    model: KernelModel, source: BaseSource, asked: bool | str = True
) -> Calibration | None:
    """What the values of the rows of `source`, of which none was trained on, tell of the model.

    Where none of them has a weight it is nothing, None, or a DataError if that was `asked` for.
    """
    to_host, parts = model.backend.to_host, []
    with model.backend.active():
        for block, F, Y in model.stream(source):
            w = np.ones(len(F)) if block.w is None else block.w.astype(np.float64)
            parts.append((np.array(to_host(F)), np.array(to_host(Y)), w))
    F, Y, w = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not w.any():
        if asked == "auto":
            return None
        raise DataError(
            "all rows set aside by calibrate have sample weight 0; give more of the rows a weight "
            "above 0, or leave calibrate out"
        )
    weights = w if source.weighted else None
    if model.classes is None:
        return Calibration.of_values(F, Y, weights)
    return Calibration.of_classes(F, Y.argmax(axis=1), weights)
