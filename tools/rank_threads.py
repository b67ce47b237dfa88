"""Ranks that are threads of one process, for tests and for measurements."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import RankLostError


class Threads(Communicator):
    """One of the ranks that `made` creates; each adds the values in the order of the ranks."""

    @classmethod
    def made(cls, size: int) -> list[Threads]:
        """Return `size` ranks, each for a thread of its own."""
        ranks = [cls() for _ in range(size)]
        board: dict[int, dict[int, npt.NDArray[Any]]] = {}
        changed = threading.Condition()
        for rank, each in enumerate(ranks):
            each.rank, each.size, each._turn = rank, size, 0
            each._group, each._board, each._changed = ranks, board, changed
        return ranks

    _turn: int
    _group: list[Threads]
    _board: dict[int, dict[int, npt.NDArray[Any]]]
    _changed: threading.Condition
    _broken = False

    def _total(self, mine: npt.NDArray[Any]) -> npt.NDArray[Any]:
        assert mine.dtype != np.float16, "XGBoost's collective cannot sum half-precision numbers"
        with self._changed:
            turn, self._turn = self._turn, self._turn + 1
            parts = self._board.setdefault(turn, {})
            parts[self.rank] = mine.copy()
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(parts) == self.size or self._broken)
            if len(parts) < self.size:
                raise RankLostError("another rank has failed")
            self._board.pop(turn - 1, None)  # every rank has added that one up
        first, *others = (parts[k] for k in range(self.size))
        return np.asarray(sum(others, first))

    def abort(self) -> None:
        """Make every pending or later collective call of the group fail."""
        with self._changed:
            for each in self._group:
                each._broken = True
            self._changed.notify_all()
