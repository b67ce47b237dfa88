"""NumPy array types for annotations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
HostArray = npt.NDArray[Any]
"""An array in host memory, of any dtype."""
