"""The run directory: one writer at a time, and files that survive a crash at any instant.

    run.json                      configuration and versions, for people
    setup/, setup.json            the computed setup, once per run
    checkpoints/000000000042/     the checkpoint of step 42: a zarr v3 group with one array per name
    checkpoints/000000000042.json its manifest: size and SHA-256 of every file, and metadata (JSON)
    log.jsonl                     the run log; on an object store, log/<writer>-<part>.jsonl
    writer.json, run.lock         writer and lock; on an object store, lease/<writer>.json

Every JSON file and every line of the log contains its own checksum (`checksums`, `run_log`). Every
manifest contains the configuration of its run. run.json is a copy of this configuration, and is
written again if it was lost or edited.

A group becomes a checkpoint when its manifest is published, which happens only after the whole
group is durable (`checkpoint_format`). To delete a checkpoint, its manifest is deleted first. The
newest manifest that verifies therefore describes a complete checkpoint, whenever a process is
killed.

On an object store the writers are numbered (`lease`), and the names of setups and checkpoints begin
with the number of their writer: ``000000000003-000000000042.json``. Checkpoints are ordered by
writer and then by step. If a writer that was presumed dead still publishes files, they are thus
older than all files of its successor.
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
from streamkern.filesystem.path_kinds import no_run_text
from streamkern.rundir import file_names
from streamkern.rundir.checkpoint_format import (
    SavedGroup,
    checked_meta,
    load_checkpoint,
    publish_checkpoint,
)
from streamkern.rundir.checksums import UnverifiedError
from streamkern.rundir.chunked_array import ChunkedArray, TargetFactory, allocate_on_host
from streamkern.rundir.file_names import (
    CHECKPOINTS,
    CheckpointId,
    CheckpointRetention,
    checkpoint_ids,
    name_stem,
)
from streamkern.rundir.run_log import RunLog, last_line_number
from streamkern.rundir.run_storage import WriterLock, folder_error, open_folder, os_error_text

__all__ = ["RunDirectory", "SavedGroup"]


class RunDirectory:
    """The files of one run, on a disk or on an object store, with at most one writer.

    Parameters
    ----------
    path : path or URL
    keep : number of checkpoints to keep; each save deletes all but the newest
    writable : False opens the directory for reading, without the lock, while another process may
        write to it (``evaluate``, ``predict``).
    storage_options : options of a remote URL, as for fsspec; a local path does not need them

    In addition to the caller's arrays, a save to a disk holds one chunk (8 to 64 MiB) in memory. A
    save to an object store holds two copies of the chunks in flight, which take 64 MiB, or two
    chunks if that is more. A load holds no more in addition to its result.
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
            raise ConfigError(f"keep={keep} must be at least 1, or nothing remains; set keep=1")
        self._folder = open_folder(path, storage_options)
        self.location = self._folder.location
        self.writable = writable
        self._run: dict[str, Any] | None = None  # the configuration in setup and checkpoints
        self._run_is_known = False
        self._retention = CheckpointRetention(self._folder, keep)
        self._lock: WriterLock | None = None
        self._log = RunLog(None)
        self._save_lock = threading.Lock()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the lock of the writer ----------------------------------------------------------------

    def acquire(self) -> None:
        """Acquire the writer lock, and delete files that a killed writer left unfinished.

        Raises RunLockedError, naming the process that holds the lock, or RunError or StorageError
        if the directory cannot be used.
        """
        if self._lock is not None:
            return
        if not self.writable:
            if not self._folder.exists():
                raise RunError(no_run_text(self.location, self.location))
            return
        with self._acquiring():
            lock = self._folder.acquire_lock(self._highest_writer())
            try:
                self._retention.delete_unfinished(lock)
                self._run, self._run_is_known = self.read_record(), True
                if self._run is not None:
                    file_names.repair_run_json(self._folder, self._run)
                self._log = RunLog(None, file_names.n_logged_lines(self._folder))
            except BaseException:
                lock.release()
                raise
        self._lock = lock

    @contextlib.contextmanager
    def _acquiring(self) -> Iterator[None]:
        """Convert an OSError while the lock is acquired to RunError."""
        try:
            yield
        except (RunError, StorageError):
            raise
        except OSError as error:
            raise folder_error(
                f"run directory {self.location} cannot be written to",
                "give another run directory, or solve this problem, and run the same command again",
                error,
            ) from error

    def _highest_writer(self) -> int:
        """Return the highest number of a writer so far; 0 on a disk, where writers have no number.

        Raises RunError if the directory contains files of other programs.
        """
        names = self._folder.names()
        if "zarr.json" in names:
            raise RunError(f"{self.location} is a zarr store", "give a new or empty directory")
        foreign = file_names.foreign_files(self._folder)
        if foreign is not None:
            raise RunError(
                f"{self.location} holds {foreign!r} but no run of streamkern",
                "give a new or empty directory",
            )
        manifests = checkpoint_ids(names) + checkpoint_ids(self._folder.names(CHECKPOINTS))
        return max((writer for writer, _ in manifests), default=0)

    def holder(self) -> str | None:
        """Return a description of the process that holds the lock, for messages, or None."""
        return self._folder.holder()

    def close(self) -> None:
        """Wait for a save in progress and release the lock. May be called more than once."""
        with self._save_lock:
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.release()

    # -- saving --------------------------------------------------------------------------------

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write `config` to ``run.json``, atomically. Manifests of later saves contain it, too."""
        plain = checked_meta(config, "config")
        with self._writing("run.json") as lock:
            lock.check()
            file_names.write_config(self._folder, plain)
            self._run = plain

    def read_config(self) -> dict[str, Any] | None:
        """Return the content of ``run.json``, or None; RunError if it was damaged or edited."""
        return file_names.read_config(self._folder)

    def read_record(self) -> dict[str, Any] | None:
        """Return the configuration in the setup's manifest, or else in the newest intact one.

        None if there is no intact manifest.
        """
        setups, checkpoints = file_names.published_manifests(self._folder)
        manifest = file_names.newest_intact(self._folder, checkpoints + setups)
        return None if manifest is None else manifest["run"]

    def open_log(self) -> RunLog:
        """Open the run log; the caller closes it. Every save first flushes it to the storage."""
        with self._writing("the run log") as lock:
            last_number = last_line_number(self._folder.read_log(), self._log.flush())
            self._log = RunLog(self._folder.open_log(lock), last_number)
            return self._log

    def read_log(self) -> tuple[list[dict[str, Any]], str | None]:
        """Return the records of the run log in order, and a warning if any are damaged or lost."""
        return file_names.stored_records(self._folder)

    def save_setup(self, arrays: Mapping[str, ChunkedArray], meta: Mapping[str, object]) -> None:
        """Store the setup. A run does so once; another call would replace it atomically."""
        with self._writing("the setup") as lock:
            self._publish(lock, "setup", self._folder.names(), arrays, meta)

    def save(
        self,
        step: int,
        arrays: Mapping[str, ChunkedArray],
        meta: Mapping[str, object],
        before_publishing: Callable[[], object] | None = None,
    ) -> None:
        """Store a checkpoint, and then delete checkpoints that are too old.

        When this returns, the checkpoint survives a power cut.

        step : number of the step, at least the step of the newest checkpoint, and below 10^12
        arrays : of bool, integer, float or complex dtypes, stored bit for bit
        meta : JSON values with finite floats and integers of any size
        before_publishing : called once the arrays are stored and before the manifest is published;
            if it raises an exception, nothing is published

        Raises CheckpointError; RunLockedError if another process has taken over the run; or the
        exception of `before_publishing`. An error leaves the earlier checkpoints unchanged.
        """
        with self._writing(f"the checkpoint of step {step}") as lock:
            names = self._folder.names(CHECKPOINTS)
            damaged = self._retention.unverified
            intact = [id_ for id_ in checkpoint_ids(names) if name_stem(*id_) not in damaged]
            newest = max(intact, default=(0, 0))
            checkpoint = (lock.number, step)
            if newest[0] > lock.number:
                lock.check()  # raises an error that names the process that took over
            if not newest <= checkpoint or not 0 <= step < 10**12:
                raise CheckpointError(
                    f"step={step} must be between the newest checkpoint, {newest[1]} in"
                    f" {self.location}, and 10^12",
                    "resume from that one or give a new run directory",
                )
            self._publish(lock, step, names, arrays, meta, before_publishing)

    def delete_old(self) -> None:
        """Delete checkpoints that are too old, which a killed writer may have left.

        Call it after `load_latest`. Nothing is deleted if `load_latest` found a damaged checkpoint.
        """
        with self._writing("what is left of the run") as lock:
            if not self._retention.unverified:
                self._retention.delete_old(lock, CHECKPOINTS, self._folder.names(CHECKPOINTS))

    def _publish(
        self, lock: WriterLock, step: int | str, names: set[str],
        arrays: Mapping[str, ChunkedArray], meta: Mapping[str, object],
        before_publishing: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Write a group, publish its manifest, and delete old files of the same folder.

        step : step of a checkpoint, or "setup"
        names : names in the folder, to which the new ones are added
        """

        def flush_and_check() -> int:
            n_logged = self._log.flush()
            if before_publishing is not None:
                before_publishing()
            lock.check()
            return n_logged

        stem = name_stem(lock.number, step)
        folder_name = "" if step == "setup" else CHECKPOINTS
        group = publish_checkpoint(
            self._folder, folder_name + stem, 0 if isinstance(step, str) else step, arrays, meta,
            run=self._run, existing_names=names, before_publishing=flush_and_check,
        )  # fmt: skip
        names |= {group, f"{stem}.json"}
        self._retention.record_group(f"{folder_name}{stem}.json", group)
        self._retention.unverified.discard(stem)
        self._retention.delete_old(lock, folder_name, names)

    @contextlib.contextmanager
    def _writing(self, file_text: str) -> Iterator[WriterLock]:
        """Yield the lock for one save at a time; convert an OSError to CheckpointError."""
        with self._save_lock:
            if self._lock is None:
                raise RunError(
                    f"{file_text} cannot be written: {self.location} was not acquired",
                    "use it in a with block",
                )
            try:
                yield self._lock
            except (RunError, DataError):
                raise
            except OSError as error:
                if not isinstance(error, StorageError):
                    self._lock.check()  # the directory may be gone, or have a new writer
                raise CheckpointError(
                    f"{file_text} could not be written to {self.location}: {os_error_text(error)}",
                    "earlier checkpoints are untouched, so solve this problem, and run the same "
                    "command again",
                ) from error

    # -- loading -------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of all manifests, oldest first; they are not verified."""
        return [step for _, step in checkpoint_ids(self._folder.names(CHECKPOINTS))]

    def load_latest(self, into: TargetFactory = allocate_on_host) -> SavedGroup | None:
        """Load the newest checkpoint that verifies; return None if none was ever published.

        into : as in `load_checkpoint`; arrays that it leaves out are neither read nor verified

        `SavedGroup.skipped` names damaged newer checkpoints, and the next save deletes them.

        Raises CheckpointError if there are manifests but none verifies, and ResumeMismatchError if
        the checkpoint belongs to another run than the setup.
        """
        failures: dict[CheckpointId, str] = {}
        damaged: list[CheckpointId] = []
        # List again each time, since another process may delete the checkpoint to be read next.
        while remaining := [
            checkpoint for checkpoint in self._published() if checkpoint not in failures
        ]:
            try:
                saved = load_checkpoint(
                    self._folder, f"{CHECKPOINTS}{name_stem(*remaining[-1])}.json", into
                )
            except UnverifiedError as error:
                failures[remaining[-1]] = str(error)
                damaged += remaining[-1:] if remaining[-1] in self._published() else []
                continue
            self._check_same_run(saved)
            self._retention.unverified.update(name_stem(*checkpoint) for checkpoint in damaged)
            skipped = tuple(
                f"checkpoint of step {checkpoint[1]} in {self.location} was skipped, and the "
                f"checkpoint of step {saved.step} is used: {failures[checkpoint]}"
                for checkpoint in damaged
            )
            return replace(saved, skipped=skipped)
        if not failures:
            return None
        reasons = "; ".join(f"step {step}: {why}" for (_, step), why in failures.items())
        raise CheckpointError(
            f"{self.location} has {len(failures)} checkpoint(s), but none is intact ({reasons})",
            "restore one from a copy, or start again in a new run directory",
        )

    def _check_same_run(self, saved: SavedGroup) -> None:
        """Raise ResumeMismatchError if a checkpoint and the setup belong to different runs.

        Weights are valid only for the centers and the scaling of their own setup.
        """
        if self._run_is_known and saved.run != self._run:
            raise ResumeMismatchError(
                f"the checkpoint of step {saved.step} in {self.location} was made by another run "
                "than its setup",
                "put back the files of one run, or start again in a new run directory",
            )

    def _published(self) -> list[CheckpointId]:
        return checkpoint_ids(self._folder.names(CHECKPOINTS))

    def load_setup(self, into: TargetFactory = allocate_on_host) -> SavedGroup | None:
        """Load the setup; return None if there is none.

        into : as in `load_checkpoint`

        Raises CheckpointError if the setup does not verify.
        """
        setups = checkpoint_ids(self._folder.names())
        if not setups:
            return None
        manifest = f"{name_stem(setups[-1][0], 'setup')}.json"
        try:
            saved = load_checkpoint(self._folder, manifest, into)
        except UnverifiedError as error:
            raise CheckpointError(
                f"the setup in {self.location} is damaged ({error})",
                f"delete {manifest} there, so that the setup is computed again",
            ) from error
        if self._lock is None:
            self._run, self._run_is_known = saved.run, True
        return saved
