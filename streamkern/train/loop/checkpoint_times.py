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

AUTO_S, CHECKPOINT_SHARE = 60.0, 20
"""Seconds after which a checkpoint is due, or multiple of the time for which the last checkpoint
blocked training, if that is longer. A checkpoint may have p^2 numbers to compute and to copy."""


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
        self._every = settings.checkpoint_cadence
        self._saver = None if directory is None else stack.enter_context(AsyncSaver(directory))
        self._saved, self._stood_still_s = time.monotonic(), 0.0

    @property
    def kept(self) -> bool:
        """True if checkpoints are saved."""
        return self._saver is not None

    @property
    def failed(self) -> bool:
        """True if a save has failed."""
        return self._saver is not None and self._saver.failed

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        steps, seconds = self._every
        if steps is not None:
            return self.at(step)
        auto = max(AUTO_S, CHECKPOINT_SHARE * self._stood_still_s)
        return time.monotonic() - self._saved >= (seconds or auto)

    def at(self, step: int) -> bool:
        """Return whether the settings name `step` as a step with a checkpoint."""
        steps, _ = self._every
        return steps is not None and step % steps == 0

    def save(self, steps: StepLoop, meta: dict[str, Any], before: Callable[[], object]) -> None:
        """Start to save the state of `steps`, with the entries `meta`.

        On ranks without checkpoints, this rank's arrays are sent to rank 0 instead. Collective if
        ranks partition the centers.

        before : called before the files become a checkpoint, see `AsyncSaver`
        """
        if self._saver is None:
            steps.hand_in()
            return
        began = time.monotonic()
        self._saver.wait()  # at most one copy is held
        arrays, kept = steps.kept()
        self._saver.submit(steps.position.step, arrays, kept | meta, before)
        self._saved = time.monotonic()
        self._stood_still_s = self._saved - began

    def wait(self) -> None:
        """Wait until the current save is done; raise its error if it failed."""
        if self._saver is not None:
            self._saver.wait()
