"""The training loss of every epoch, from the losses of steps, which are read a window at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

Entries = Sequence[Sequence[float | None]]


class LossCurve:
    """Mean training losses, one for each epoch that has ended.

    The loss of a step is that of the weights before it. A solver that changes its weights only at
    the end of an epoch (`at_ends`) measures in epoch k + 1 the model with which epoch k ended, and
    that loss is recorded for epoch k. `measure` sets the loss of its last epoch.

    entries : for every epoch (loss summed over rows, rows); (loss, 0) if the model was measured;
        None in place of numbers that are not finite
    """

    def __init__(self, entries: Entries = (), *, at_ends: bool = False) -> None:
        self._at_ends = at_ends
        self._entries = [[math.nan if x is None else float(x) for x in pair] for pair in entries]
        self._waiting: list[tuple[int, int]] = []

    def restored(self, entries: Entries, epochs: int) -> Self:
        """Return a curve that continues from these entries after so many epochs."""
        lacking = epochs - self._at_ends - len(entries)
        return type(self)([*entries, *[(None, 0.0)] * lacking], at_ends=self._at_ends)

    def stepped(self, epoch: int, rows: int) -> None:
        """Note a step on `rows` rows, whose loss is read later."""
        self._waiting.append((epoch - self._at_ends, rows))

    def read(self, losses: Sequence[float]) -> None:
        """Record the losses of the oldest steps that were not read yet."""
        for (epoch, rows), loss in zip(self._waiting, losses, strict=False):
            if epoch == len(self._entries):
                self._entries.append([loss * rows, rows])
            elif epoch >= 0 and self._entries[epoch][1]:
                self._entries[epoch][0] += loss * rows
                self._entries[epoch][1] += rows
        del self._waiting[: len(losses)]

    def measure(self, epoch: int, loss: float) -> None:
        """Set the loss of the model with which an epoch has ended."""
        self._entries[epoch:] = [[loss, 0.0]]

    def entries(self) -> list[list[float | None]]:
        """Return the entries as JSON values."""
        return [[x if math.isfinite(x) else None for x in entry] for entry in self._entries]

    def losses(self, epochs: int) -> list[float]:
        """Return the losses of the first `epochs` epochs; NaN if unknown."""
        found = [loss / rows if rows else loss for loss, rows in self._entries[:epochs]]
        return found + [math.nan] * (epochs - len(found))
