"""The run directory: the lock of its writer, and files that survive a crash at any instant.

    run.json                      configuration and versions, for people
    setup/, setup.json            the computed setup, once per run
    checkpoints/000000000042/     a plain zarr v3 group, one array per name
    checkpoints/000000000042.json its manifest: sizes and SHA-256 of every file, and the meta
    log.jsonl                     the run log; on an object store log/<writer>-<part>.jsonl
    writer.json, run.lock         the holder of the lock; on an object store lease/<writer>.json

Every JSON file, and every line of the log, carries a checksum of itself (`checksums`, `run_log`).
Every manifest records the run that it belongs to, with the whole content of run.json: that file is
a copy, and is written again if it was lost or edited.

By the rules of `checkpoint_format` a group counts from the instant its manifest exists, and never
before all of it is durable. Deletion goes the other way: manifest first. So a process can die at
any point, and the newest manifest that verifies is still a complete checkpoint.

On an object store writers are numbered (`lease`), and names of setups and checkpoints begin with
that number: ``000000000003-000000000042.json``. The order is by writer, then by step, so that files
still published by a writer that was presumed dead come before all files of its successor.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

from streamkern.basics.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ResumeMismatchError,
    RunError,
    StorageError,
)
from streamkern.filesystem.ownership import no_run
from streamkern.rundir import file_names
from streamkern.rundir.checkpoint_format import (
    Saved,
    checked_meta,
    load_checkpoint,
    publish_checkpoint,
)
from streamkern.rundir.checksums import UnverifiedError
from streamkern.rundir.chunked_array import ChunkedArray, TargetFactory, on_host
from streamkern.rundir.file_names import (
    CHECKPOINTS,
    CheckpointId,
    CheckpointRetention,
    checkpoint_ids,
    stem_of,
)
from streamkern.rundir.run_log import RunLog, last_line
from streamkern.rundir.run_storage import WriterLock, open_folder, reason

__all__ = ["RunDirectory", "Saved"]


class RunDirectory:
    """One run's files, on a disk or on an object store, with at most one writer.

    Parameters
    ----------
    path : path or URL
    keep : checkpoints kept, newest first; older ones are deleted after each save
    writable : False reads without the lock, beside a running writer (``evaluate``, ``predict``)
    storage_options : of a remote URL; a local path does not need them

    Beside the caller's arrays a save on a disk holds one chunk (8-64 MiB). On an object store 64
    MiB of chunks are in flight, or two chunks if that is more, each copied twice. A load holds no
    more than that beside its result.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 3,
        writable: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep} must be at least 1, or no checkpoint would remain")
        self._folder = open_folder(path, storage_options)
        self.place = self._folder.place
        self.writable = writable
        self._run: dict[str, Any] | None = None  # the configuration of setup and checkpoints
        self._run_is_known = False
        self._leftovers = CheckpointRetention(self._folder, keep)
        self._hold: WriterLock | None = None
        self._log = RunLog(None)
        self._saving = threading.Lock()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the only writer -----------------------------------------------------------------------

    def acquire(self) -> None:
        """Become the only writer and delete files that a killed one left unfinished.

        Raises RunLockedError naming the holder, or RunError or StorageError if the place cannot be
        used.
        """
        if self._hold is not None:
            return
        if not self.writable:
            if not self._folder.exists():
                raise RunError(no_run(self.place, self.place))
            return
        with self._using():
            hold = self._folder.hold(self._highest_writer())
            try:
                self._leftovers.tidy(hold)
                self._run, self._run_is_known = self.recorded(), True
                if self._run is not None:
                    file_names.repair_run_json(self._folder, self._run)
                self._log = RunLog(None, file_names.logged(self._folder))
            except BaseException:
                hold.release()
                raise
        self._hold = hold

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except (RunError, StorageError):
            raise
        except OSError as error:
            raise RunError(
                f"run directory {self.place} cannot be written to: {reason(error)}",
                "give another run directory, or run the same command again once that is solved",
            ) from error

    def _highest_writer(self) -> int:
        """Return the highest writer number; RunError if there are files of other programs."""
        names = self._folder.names()
        if "zarr.json" in names:
            raise RunError(f"{self.place} is a zarr store", "give a new or empty directory")
        foreign = file_names.foreign_files(self._folder)
        if foreign is not None:
            raise RunError(
                f"{self.place} holds {foreign!r} but no run of streamkern",
                "give a new or empty directory",
            )
        manifests = checkpoint_ids(names) + checkpoint_ids(self._folder.names(CHECKPOINTS))
        return max((writer for writer, _ in manifests), default=0)

    def holder(self) -> str | None:
        """Return the process that writes to it, as part of a sentence, or None."""
        return self._folder.holder()

    def close(self) -> None:
        """Wait for a save in progress and release the lock; harmless when repeated."""
        with self._saving:
            hold, self._hold = self._hold, None
            if hold is not None:
                hold.release()

    # -- saving --------------------------------------------------------------------------------

    def write_config(self, config: Mapping[str, object]) -> None:
        """Store `config` as ``run.json``, atomically; later saves record it as their run."""
        plain = checked_meta(config, "config")
        with self._writing("run.json") as hold:
            hold.check()
            file_names.write_config(self._folder, plain)
            self._run = plain

    def read_config(self) -> dict[str, Any] | None:
        """Return the content of ``run.json``, or None; RunError if it was damaged or edited."""
        return file_names.read_config(self._folder)

    def recorded(self) -> dict[str, Any] | None:
        """Return the configuration of the setup, or else of the newest intact checkpoint.

        None if there is neither: then nothing was computed that another configuration could
        contradict.
        """
        return file_names.recorded(self._folder)

    def open_log(self) -> RunLog:
        """Open the run log, to be closed by the caller; it is stored before every checkpoint."""
        with self._writing("the run log") as hold:
            after = last_line(self._folder.read_log(), self._log.flush())
            self._log = RunLog(self._folder.open_log(hold), after)
            return self._log

    def read_log(self) -> tuple[list[dict[str, Any]], str | None]:
        """Return the records of the run log in order, and a sentence if any are damaged or lost."""
        return file_names.stored_records(self._folder)

    def save_setup(self, arrays: Mapping[str, ChunkedArray], meta: Mapping[str, object]) -> None:
        """Store the setup, once per run; a later call replaces it atomically."""
        with self._writing("the setup") as hold:
            names = self._folder.names()
            self._publish(hold, "", stem_of(hold.number, "setup"), 0, arrays, meta, names)
            self._leftovers.retire(hold, "", names)

    def save(
        self,
        step: int,
        arrays: Mapping[str, ChunkedArray],
        meta: Mapping[str, object],
        before: Callable[[], object] | None = None,
    ) -> None:
        """Store a checkpoint that survives a power cut once this returns; then delete the oldest.

        Arrays of bool, integer, float and complex dtypes keep every bit. `meta` is JSON with finite
        floats and integers of any size. `before` is called once the data is stored, and an
        exception that it raises stops the publication. After an error the earlier checkpoints are
        as they were: CheckpointError, RunLockedError if the run was taken over, or the exception of
        `before`.
        """
        with self._writing(f"the checkpoint of step {step}") as hold:
            names = self._folder.names(CHECKPOINTS)
            good = [r for r in checkpoint_ids(names) if stem_of(*r) not in self._leftovers.broken]
            newest, rank = max(good, default=(0, 0)), (hold.number, step)
            if newest[0] > hold.number:
                hold.check()  # names the process that took over
            if not newest <= rank or not 0 <= step < 10**12:
                raise CheckpointError(
                    f"step={step} must be between the newest checkpoint, {newest[1]} in"
                    f" {self.place}, and 10^12",
                    "resume from that one or give a new run directory",
                )
            self._publish(hold, CHECKPOINTS, stem_of(*rank), step, arrays, meta, names, before)
            self._leftovers.broken.discard(stem_of(*rank))
            self._leftovers.retire(hold, CHECKPOINTS, names)

    def retire(self) -> None:
        """Delete checkpoints that are too old, if the last writer was killed before it could.

        For a run whose newest checkpoint was loaded. Nothing is deleted if one of them does not
        verify.
        """
        with self._writing("what is left of the run") as hold:
            if not self._leftovers.broken:
                self._leftovers.retire(hold, CHECKPOINTS, self._folder.names(CHECKPOINTS))

    def _publish(
        self,
        hold: WriterLock,
        where: str,
        stem: str,
        step: int,
        arrays: Mapping[str, ChunkedArray],
        meta: Mapping[str, object],
        names: set[str],
        before: Callable[[], object] | None = None,
    ) -> None:
        """Publish a group in `where`, and add its names to `names`."""

        def ready() -> int:
            logged = self._log.flush()
            if before is not None:
                before()
            hold.check()
            return logged

        group = publish_checkpoint(
            self._folder, where + stem, step, arrays, meta, run=self._run, taken=names, ready=ready
        )
        names |= {group, f"{stem}.json"}
        self._leftovers.named(f"{where}{stem}.json", group)

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[WriterLock]:
        with self._saving:
            if self._hold is None:
                raise RunError(
                    f"{what} cannot be written: {self.place} was not acquired",
                    "use it in a with block",
                )
            try:
                yield self._hold
            except (RunError, DataError):
                raise
            except OSError as error:
                if not isinstance(error, StorageError):
                    self._hold.check()  # it may be gone, or deleted by its new writer
                raise CheckpointError(
                    f"{what} could not be written to {self.place}: {reason(error)}",
                    "earlier checkpoints are untouched, so run the same command again once that is "
                    "solved",
                ) from error

    # -- loading -------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, oldest first, verified or not."""
        return [step for _, step in checkpoint_ids(self._folder.names(CHECKPOINTS))]

    def load_latest(self, into: TargetFactory = on_host) -> Saved | None:
        """Load the newest checkpoint that verifies; None if none was ever published.

        into : as in `load_checkpoint`; arrays that are not wanted are neither read nor verified.

        Checkpoints that do not verify are named in the result's `skipped`, and deleted after the
        next save. Raises CheckpointError if there are manifests and none verifies, and
        ResumeMismatchError if the checkpoint belongs to another run than the one being written or
        the setup that was loaded.
        """
        failed: dict[CheckpointId, str] = {}
        damaged: list[CheckpointId] = []
        # Listed again each time: another process may delete one that is about to be read.
        while remaining := [rank for rank in self._published() if rank not in failed]:
            try:
                saved = load_checkpoint(
                    self._folder, f"{CHECKPOINTS}{stem_of(*remaining[-1])}.json", into
                )
            except UnverifiedError as error:
                failed[remaining[-1]] = str(error)
                damaged += remaining[-1:] if remaining[-1] in self._published() else []
                continue
            self._check_same_run(saved)
            self._leftovers.broken.update(stem_of(*rank) for rank in damaged)
            skipped = tuple(
                f"checkpoint of step {rank[1]} in {self.place} was skipped, and that of step "
                f"{saved.step} is used: {failed[rank]}"
                for rank in damaged
            )
            return replace(saved, skipped=skipped)
        if not failed:
            return None
        reasons = "; ".join(f"step {step}: {why}" for (_, step), why in failed.items())
        raise CheckpointError(
            f"{self.place} has {len(failed)} checkpoint(s) and none verifies ({reasons})",
            "restore one from a copy, or start again in a new run directory",
        )

    def _check_same_run(self, saved: Saved) -> None:
        """Raise an error for weights of another run: they need its own centers and scales."""
        if self._run_is_known and saved.run != self._run:
            raise ResumeMismatchError(
                f"the checkpoint of step {saved.step} in {self.place} was made by another run than "
                "its setup",
                "put back the files of one run, or start again in a new run directory",
            )

    def _published(self) -> list[CheckpointId]:
        return checkpoint_ids(self._folder.names(CHECKPOINTS))

    def load_setup(self, into: TargetFactory = on_host) -> Saved | None:
        """Load the setup, or return None without one; raise CheckpointError if it does not verify.

        into : as in `load_checkpoint`
        """
        setups = checkpoint_ids(self._folder.names())
        if not setups:
            return None
        manifest = f"{stem_of(setups[-1][0], 'setup')}.json"
        try:
            saved = load_checkpoint(self._folder, manifest, into)
        except UnverifiedError as error:
            raise CheckpointError(
                f"the setup in {self.place} does not verify ({error})",
                f"delete {manifest} there to have it computed again",
            ) from error
        if self._hold is None:
            self._run, self._run_is_known = saved.run, True
        return saved
