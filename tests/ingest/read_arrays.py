"""Read all rows of files of arrays, as `open_reader` yields them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from streamkern.ingest.readers import open_reader


def read_arrays(
    url: Any, y: Any = None, block_bytes: int = 1 << 20, start: int = 0, **options: Any
) -> tuple[Any, Any]:
    """Return X and y of the rows from `start` on. options : of `open_reader`."""
    with ExitStack() as files:
        blocks = list(open_reader(url, y, files, **options).blocks(start, block_bytes))
    return np.concatenate([b.X for b in blocks]), np.concatenate([b.y for b in blocks])
