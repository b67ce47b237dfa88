"""Save checkpoints in the background, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from streamkern.basics.errors import RunError
from streamkern.rundir.checkpoint_format import checked_arrays, checked_meta
from streamkern.rundir.chunked_array import ChunkedArray
from streamkern.rundir.run_directory import RunDirectory


class AsyncSaver:
    """Save checkpoints in the background, one at a time.

    Each save runs in its own thread, which ends with it, so that a saver that was never closed does
    not keep the interpreter alive. An error is raised by the next `submit`, `wait` or `close`.

    has_failed : whether the error of a save was raised
    """

    def __init__(self, run: RunDirectory) -> None:
        self.has_failed = False
        self._run = run
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def submit(
        self,
        step: int,
        arrays: Mapping[str, ChunkedArray],
        meta: Mapping[str, object],
        before_publishing: Callable[[], object] | None = None,
    ) -> None:
        """Wait for the previous save, and start this one; finish it if no thread can be started.

        Parameters as in `RunDirectory.save`. The arrays must not be changed until the save ends.
        `meta` is copied. `before_publishing` is called in the saver's thread.

        Raises CheckpointError for arrays or metadata that cannot be saved, the error of the
        previous save, and RunError after `close`.
        """
        self.wait()
        if self._closed:
            raise RunError("submit() was called after close(); make a new AsyncSaver")
        job = (step, checked_arrays(arrays), checked_meta(meta, "meta"), before_publishing)
        thread = threading.Thread(
            target=self._save, args=job, name="streamkern-checkpoint", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: save in this one
            self._save(*job)
        else:
            self._thread = thread

    def _save(
        self,
        step: int,
        arrays: dict[str, ChunkedArray],
        meta: dict[str, Any],
        before_publishing: Callable[[], object] | None,
    ) -> None:
        """Save in the background thread, and keep the error for `wait`."""
        try:
            self._run.save(step, arrays, meta, before_publishing)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the current save, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self.has_failed = True
            raise error

    def close(self) -> None:
        """Wait for the current save, reject further ones, and raise its error."""
        self._closed = True
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as error:
            if value is None:
                raise
            value.add_note(f"and the last checkpoint failed: {error}")
