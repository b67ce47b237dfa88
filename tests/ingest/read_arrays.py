"""Open inputs as `ingest` does, and read all of their rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np

from streamkern.ingest.columns import ReadRequest
from streamkern.ingest.input_files import FileOpener
from streamkern.ingest.reader import Reader
from streamkern.ingest.readers import open_reader


def open_input(
    inputs: Any, files: ExitStack, y: Any = None, sample_weight: Any = None, **options: Any
) -> Reader:
    """Return a reader of `inputs`. options : fields of `ReadRequest`, or options of `FileOpener`"""
    request = {name: options.pop(name) for name in ReadRequest._fields if name in options}
    opener = FileOpener(options.pop("input_options", None), files, **options)
    return open_reader(inputs, ReadRequest(y=y, w=sample_weight, **request), opener)


def read_arrays(
    url: Any, y: Any = None, block_bytes: int = 1 << 20, start: int = 0, **options: Any
) -> tuple[Any, Any]:
    """Return X and y of the rows from `start` on. options : as for `open_input`"""
    with ExitStack() as files:
        blocks = list(open_input(url, files, y, **options).blocks(start, block_bytes))
    return np.concatenate([b.X for b in blocks]), np.concatenate([b.y for b in blocks])
