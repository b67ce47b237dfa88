"""Saves in the background, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from streamkern.basics.errors import RunError
from streamkern.rundir.checkpoint_format import checked_arrays, checked_meta
from streamkern.rundir.chunked_array import ChunkedArray
from streamkern.rundir.run_directory import RunDirectory


class AsyncSaver:
    """Saves in the background, one checkpoint at a time: ``submit`` waits for the previous one.

    Each save runs in a thread of its own that ends with it, so a saver that was never closed cannot
    keep the interpreter alive. An error is raised by the next `submit`, `wait` or `close`.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.failed = False  # an error was raised
        self._run = run
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def submit(
        self,
        step: int,
        arrays: Mapping[str, ChunkedArray],
        meta: Mapping[str, object],
        before: Callable[[], object] | None = None,
    ) -> None:
        """Start saving. The arrays now belong to the saver: do not write to them again.

        `meta` is copied. `before` is called in the saver's thread, see `RunDirectory.save`. Raises
        at once for arrays or meta that cannot be saved.
        """
        self.wait()
        if self._closed:
            raise RunError("submit() after close(): make a new AsyncSaver")
        job = (step, checked_arrays(arrays), checked_meta(meta, "meta"), before)
        thread = threading.Thread(
            target=self._save, args=job, name="streamkern-checkpoint", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:  # out of threads or memory: the run waits for the save
            self._save(*job)
        else:
            self._thread = thread

    def _save(
        self,
        step: int,
        arrays: dict[str, ChunkedArray],
        meta: dict[str, Any],
        before: Callable[[], object] | None,
    ) -> None:
        try:
            self._run.save(step, arrays, meta, before)
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait for the save in flight and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self.failed = True
            raise error

    def close(self) -> None:
        """Wait, refuse further saves, and raise the error of the last one."""
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
