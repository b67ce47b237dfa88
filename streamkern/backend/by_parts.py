"""A device array that is read and written in parts, for files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.arrays import Array
from streamkern.backend.base import Backend


class ByParts:
    """A device array whose parts are host arrays."""

    def __init__(self, backend: Backend, array: Array) -> None:
        self.backend, self.array = backend, array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, part: Any) -> npt.NDArray[Any]:
        return self.backend.to_host(self.array[part])

    def __setitem__(self, part: Any, host: npt.NDArray[Any]) -> None:
        with self.backend.active():
            self.array[part].set(np.ascontiguousarray(host, self.dtype))
