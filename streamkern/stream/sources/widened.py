"""Pad the packed sparse rows of several sources to one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamkern.store.row_block import RowBlock
from streamkern.store.sparse_rows import is_packed, widened
from streamkern.stream.sources.alignment import ReorderedSource
from streamkern.stream.sources.base import BaseSource


class PaddedSource(ReorderedSource):
    """The packed sparse rows of `base`, padded with zeros from (2, k) to (2, width)."""

    kind = "widened"

    def __init__(self, base: BaseSource, width: int) -> None:
        super().__init__(base, base.columns, base.target_columns)
        self.row_shape = (2, width)

    def read_unit(self, u: int, seed: int, epoch: int) -> RowBlock:
        block = self.base.read_unit(u, seed, epoch)
        return block._replace(X=widened(block.X, self.row_shape))

    def statistics(self) -> Any:
        return None, None, None, None


def padded_to_one_length(sources: Sequence[BaseSource]) -> list[BaseSource]:
    """Return the sources, with packed sparse rows padded to one length; others unchanged."""
    max_width = max(
        (source.row_shape[1] for source in sources if is_packed(source.row_shape)), default=0
    )
    return [
        PaddedSource(source, max_width)
        if is_packed(source.row_shape) and source.row_shape[1] < max_width
        else source
        for source in sources
    ]
