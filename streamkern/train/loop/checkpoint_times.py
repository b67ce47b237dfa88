"""Decide when a checkpoint is due, and save it in the background.

`rundir.checkpoint_format` describes the files of a checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from streamkern.config.run_config import ExecutionConfig
from streamkern.rundir.run_directory import RunDirectory
from streamkern.rundir.saver import AsyncSaver
from streamkern.train.loop.step_loop import StepLoop

MIN_AUTO_INTERVAL_S, AUTO_INTERVAL_RATIO = 60.0, 20
"""Without a set interval, a checkpoint is due after so many seconds, or after this multiple of the
time for which the last checkpoint blocked training, if that is longer. A checkpoint may have p^2
numbers to compute and to copy."""


class Checkpoints:
    """Checkpoints of a run in `directory`; nothing is saved if it is None.

    stack : exit stack of the run, on which the background thread is closed
    """

    def __init__(
        self,
        settings: ExecutionConfig,
        directory: RunDirectory | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._interval_steps, self._interval_s = settings.checkpoint_cadence
        self._saver = None if directory is None else stack.enter_context(AsyncSaver(directory))
        self._last_save, self._blocked_s = time.monotonic(), 0.0

    @property
    def saves(self) -> bool:
        """True if checkpoints are saved."""
        return self._saver is not None

    @property
    def has_failed(self) -> bool:
        """True if a save has failed."""
        return self._saver is not None and self._saver.has_failed

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        if self._interval_steps is not None:
            return self.is_set_for(step)
        auto_interval_s = max(MIN_AUTO_INTERVAL_S, AUTO_INTERVAL_RATIO * self._blocked_s)
        return time.monotonic() - self._last_save >= (self._interval_s or auto_interval_s)

    def is_set_for(self, step: int) -> bool:
        """Return whether the settings ask for a checkpoint after exactly `step` steps."""
        return self._interval_steps is not None and step % self._interval_steps == 0

    def save(
        self, step_loop: StepLoop, meta: dict[str, Any], before_commit: Callable[[], object]
    ) -> None:
        """Start to save the state of `step_loop`, with the entries `meta`.

        On ranks without checkpoints, this rank's arrays are sent to rank 0 instead. Collective if
        ranks partition the centers.

        before_commit : called before the files become a checkpoint, see `AsyncSaver`
        """
        if self._saver is None:
            step_loop.send_to_rank0()
            return
        start = time.monotonic()
        self._saver.wait()  # at most one copy is held
        arrays, values = step_loop.snapshot()
        self._saver.submit(step_loop.position.step, arrays, values | meta, before_commit)
        self._last_save = time.monotonic()
        self._blocked_s = self._last_save - start

    def wait(self) -> None:
        """Wait until the current save is done; raise its error if it failed."""
        if self._saver is not None:
            self._saver.wait()
