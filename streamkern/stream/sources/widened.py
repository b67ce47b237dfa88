"""Pad the packed sparse rows of several sources to one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamkern.store.row_block import RowBlock
from streamkern.store.sparse_rows import is_packed, widened
from streamkern.stream.sources.alignment import Ordered
from streamkern.stream.sources.base import BaseSource


class Widened(Ordered):
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


def of_one_length(sources: Sequence[BaseSource]) -> list[BaseSource]:
    """Return the sources, with packed sparse rows padded to the longest; others unchanged."""
    longest = max((s.row_shape[1] for s in sources if is_packed(s.row_shape)), default=0)
    return [
        Widened(s, longest) if is_packed(s.row_shape) and s.row_shape[1] < longest else s
        for s in sources
    ]
