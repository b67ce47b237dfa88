"""Decide when a checkpoint is due, and wait for the save under way.

`rundir.checkpoint_format` says what is in its files.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from streamkern.config.run_config import ExecutionConfig
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.saver import AsyncSaver
from streamkern.train.step_loop import Steps

# A checkpoint is due after a minute, or after so many times as long as training stood still for
# the one before, if that is more: with p^2 numbers to solve for and to copy, that counts.
AUTO_S, CHECKPOINT_SHARE = 60.0, 20


class Checkpoints:
    """In `directory`; without one nothing is kept."""

    def __init__(
        self,
        settings: ExecutionConfig,
        directory: RunDirectory | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._every = settings.checkpoint_cadence
        self._saver = None if directory is None else stack.enter_context(AsyncSaver(directory))
        self._saved, self._stood_still_s = time.monotonic(), 0.0

    @property
    def kept(self) -> bool:
        """Whether there are any."""
        return self._saver is not None

    @property
    def failed(self) -> bool:
        """Whether an error has come out of a save."""
        return self._saver is not None and self._saver.failed

    def due(self, step: int) -> bool:
        """Whether it is time for one after `step` steps."""
        steps, seconds = self._every
        if steps is not None:
            return self.at(step)
        auto = max(AUTO_S, CHECKPOINT_SHARE * self._stood_still_s)
        return time.monotonic() - self._saved >= (seconds or auto)

    def at(self, step: int) -> bool:
        """Whether the settings want one after `step` steps, whatever the clock says."""
        steps, _ = self._every
        return steps is not None and step % steps == 0

    def save(self, steps: Steps, meta: dict[str, Any], before: Callable[[], object]) -> None:
        """Begin to save `steps` and `meta`; `before` is called on the way, see `AsyncSaver`."""
        if self._saver is None:
            steps.hand_in()
            return
        began = time.monotonic()
        self._saver.wait()  # so that no more than one copy is held
        arrays, kept = steps.kept()
        self._saver.submit(steps.position.step, arrays, kept | meta, before)
        self._saved = time.monotonic()
        self._stood_still_s = self._saved - began

    def wait(self) -> None:
        """Until the save under way is done; raises what it failed with."""
        if self._saver is not None:
            self._saver.wait()
