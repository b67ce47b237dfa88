"""The table of all center selectors; `streamkern.centers.selector` has their base class."""

from __future__ import annotations

from typing import Final

from streamkern.centers.balanced import Balanced
from streamkern.centers.kmeans import KMeans
from streamkern.centers.random_rows import Random
from streamkern.centers.rpcholesky import RPCholesky
from streamkern.centers.selector import CenterSelector

_ALL: Final[tuple[CenterSelector, ...]] = (Random(), Balanced(), KMeans(), RPCholesky())
SELECTORS: Final = {selector.name: selector for selector in _ALL}
"""Instance of each center selector, by the value of the setting `model.centers`."""
