"""The run directory: who may write to it, and what survives a crash at any instant.

    run.json                      configuration and versions, for people
    setup/, setup.json            what setup computed, once per run
    checkpoints/000000000042/     a plain zarr v3 group, one array per name
    checkpoints/000000000042.json its manifest: sizes and SHA-256 of every file, and the meta
    log.jsonl                     the run log; on an object store log/<writer>-<part>.jsonl
    writer.json, run.lock         who holds the directory; on an object store lease/<writer>.json

Every JSON file, and every line of the log, carries a checksum of itself (`documents`, `run_log`).
Every manifest says which run it belongs to, with all that run.json says: that file is a copy, and
is written again where it was lost or edited.

`sealed` makes a group count from the instant its manifest is there, and never before all of it
is durable. Deleting goes the other way: manifest first. So a process can die anywhere, and the
newest manifest that verifies is still a whole checkpoint.

On an object store writers are numbered (`lease`), and names of setups and checkpoints begin with
that number: ``000000000003-000000000042.json``. The order is by writer, then by step, so that
what a writer that was taken for dead may still publish comes before all that its successor does.
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
from streamkern.filesystem.place_kind import no_run
from streamkern.rundir import file_names
from streamkern.rundir.checkpoint_format import (
    ChunkedArray,
    Saved,
    TargetFactory,
    checked_meta,
    load_checkpoint,
    on_host,
    publish_checkpoint,
)
from streamkern.rundir.checksums import UnverifiedError
from streamkern.rundir.file_names import CHECKPOINTS, CheckpointId, checkpoint_ids, stem_of
from streamkern.rundir.retention import CheckpointRetention
from streamkern.rundir.run_log import RunLog, last_line, read_lines
from streamkern.rundir.run_storage import WriterLock, open_folder, reason

__all__ = ["RunDirectory", "Saved"]


class RunDirectory:
    """One run's files, on a disk or on an object store, with at most one writer.

    Parameters
    ----------
    path : path or URL
    keep : checkpoints kept, newest first; older ones go after each save
    writable : False reads without the lock, beside a running writer (``evaluate``, ``predict``)
    storage_options : of a remote URL; a local path does not need them

    Beside the caller's arrays a save on a disk holds one chunk (8-64 MiB). On an object store
    64 MiB of chunks are on their way, or two chunks if that is more, each copied twice. A load
    holds no more than that beside its result.
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
        self._run: dict[str, Any] | None = None  # what setup and checkpoints belong to
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
        """Become the only writer and clear what a killed one left half done.

        Raises RunLockedError naming the holder, or RunError or StorageError when the place can
        not be used.
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
                f"run directory {self.place} can not be written to: {reason(error)}; give another "
                "run directory, or run the same command again once that is solved"
            ) from error

    def _highest_writer(self) -> int:
        """The highest number in a name, after making sure that nothing here is anybody else's."""
        names = self._folder.names()
        if "zarr.json" in names:
            raise RunError(f"{self.place} is a zarr store; give a new or empty directory")
        found = file_names.foreign_files(self._folder)
        if found is not None:
            raise RunError(
                f"{self.place} holds {found!r} but no run of streamkern; give a new or empty"
                " directory"
            )
        manifests = checkpoint_ids(names) + checkpoint_ids(self._folder.names(CHECKPOINTS))
        return max((writer for writer, _ in manifests), default=0)

    def holder(self) -> str | None:
        """Who is writing to it, as part of a sentence, or None."""
        return self._folder.holder()

    def close(self) -> None:
        """Wait for a save in progress and let go; harmless when repeated."""
        with self._saving:
            hold, self._hold = self._hold, None
            if hold is not None:
                hold.release()

    # -- saving --------------------------------------------------------------------------------

    def write_config(self, config: Mapping[str, object]) -> None:
        """Store `config` as ``run.json``, atomically; what is saved from now on belongs to it."""
        plain = checked_meta(config, "config")
        with self._writing("run.json") as hold:
            hold.check()
            file_names.write_config(self._folder, plain)
            self._run = plain

    def read_config(self) -> dict[str, Any] | None:
        """What ``run.json`` says, or None without one. RunError where it was damaged or edited."""
        return file_names.read_config(self._folder)

    def recorded(self) -> dict[str, Any] | None:
        """The configuration that the setup, or else the newest good checkpoint, belongs to.

        None where there is neither: then nothing was computed that another one could contradict.
        """
        return file_names.recorded(self._folder)

    def open_log(self) -> RunLog:
        """The run log, to be closed by the caller; it is stored before every checkpoint."""
        with self._writing("the run log") as hold:
            after = last_line(self._folder.read_log(), self._log.flush())
            self._log = RunLog(self._folder.open_log(hold), after)
            return self._log

    def read_log(self) -> tuple[list[dict[str, Any]], str | None]:
        """The records of the run log in order, and a sentence if any are damaged or lost."""
        try:
            stored = file_names.logged(self._folder)  # before the log, which only grows
            return read_lines(self._folder.read_log(), f"the run log in {self.place}", stored)
        except StorageError:
            raise
        except OSError as error:
            raise RunError(f"the run log in {self.place} can not be read: {error}") from error

    def save_setup(self, arrays: Mapping[str, ChunkedArray], meta: Mapping[str, object]) -> None:
        """Store what setup computed, once per run; a later call replaces it atomically."""
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
        """Store a checkpoint; on return it survives a power cut. Then retire the oldest.

        Arrays of bool, integer, float and complex dtypes keep every bit. `meta` is JSON with
        finite floats and integers of any size. `before` is called once the data is stored, and
        what it raises stops the publication. After an error the earlier checkpoints are as they
        were: CheckpointError, RunLockedError if the run was taken over, or what `before` raised.
        """
        with self._writing(f"the checkpoint of step {step}") as hold:
            names = self._folder.names(CHECKPOINTS)
            good = [r for r in checkpoint_ids(names) if stem_of(*r) not in self._leftovers.broken]
            newest, rank = max(good, default=(0, 0)), (hold.number, step)
            if newest[0] > hold.number:
                hold.check()  # says who took over
            if not newest <= rank or not 0 <= step < 10**12:
                raise CheckpointError(
                    f"step={step} must be between the newest checkpoint, {newest[1]} in"
                    f" {self.place}, and 10^12; resume from that one or give a new run directory"
                )
            self._publish(hold, CHECKPOINTS, stem_of(*rank), step, arrays, meta, names, before)
            self._leftovers.broken.discard(stem_of(*rank))
            self._leftovers.retire(hold, CHECKPOINTS, names)

    def retire(self) -> None:
        """Delete checkpoints that are too old, where who saved the last one was killed before.

        Of a run whose newest checkpoint was loaded. Not where one of them does not verify.
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
        """Publish, and add to `names`, what is in `where`."""

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
                    f"{what} can not be written: {self.place} was not acquired; use it in "
                    "a with block"
                )
            try:
                yield self._hold
            except (RunError, DataError):
                raise
            except OSError as error:
                if not isinstance(error, StorageError):
                    self._hold.check()  # it may be gone, or swept by who took it over
                raise CheckpointError(
                    f"{what} could not be written to {self.place}: {reason(error)}; earlier"
                    " checkpoints are untouched, so run the same command again once that is solved"
                ) from error

    # -- loading -------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that have a manifest, oldest first; whether they verify shows when loading."""
        return [step for _, step in checkpoint_ids(self._folder.names(CHECKPOINTS))]

    def load_latest(self, into: TargetFactory = on_host) -> Saved | None:
        """The newest checkpoint that verifies, or None when none was ever published.

        into : as in `sealed.load`; what is not wanted is not read, and not verified.

        Those that do not are named in its `skipped`, and deleted after the next save. Raises
        CheckpointError when there are manifests and none verifies, and ResumeMismatchError when
        what was found is not of the run that is written, or whose setup was loaded.
        """
        failed: dict[CheckpointId, str] = {}
        damaged: list[CheckpointId] = []
        # Listed anew each time: a writer beside us may retire one that we are about to read.
        while left := [rank for rank in self._published() if rank not in failed]:
            try:
                saved = load_checkpoint(
                    self._folder, f"{CHECKPOINTS}{stem_of(*left[-1])}.json", into
                )
            except UnverifiedError as error:
                failed[left[-1]] = str(error)
                damaged += left[-1:] if left[-1] in self._published() else []
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
            f"{self.place} has {len(failed)} checkpoint(s) and none verifies ({reasons}); restore"
            " one from a copy, or start again in a new run directory"
        )

    def _check_same_run(self, saved: Saved) -> None:
        """Weights are worth something only with the centers and scales they were trained with."""
        if self._run_is_known and saved.run != self._run:
            raise ResumeMismatchError(
                f"the checkpoint of step {saved.step} in {self.place} was made by another run than "
                "its setup; put back the files of one run, or start again in a new run directory"
            )

    def _published(self) -> list[CheckpointId]:
        return checkpoint_ids(self._folder.names(CHECKPOINTS))

    def load_setup(self, into: TargetFactory = on_host) -> Saved | None:
        """What `save_setup` stored, or None. Raises CheckpointError when it does not verify.

        into : as in `sealed.load`.
        """
        setups = checkpoint_ids(self._folder.names())
        if not setups:
            return None
        manifest = f"{stem_of(setups[-1][0], 'setup')}.json"
        try:
            saved = load_checkpoint(self._folder, manifest, into)
        except UnverifiedError as error:
            raise CheckpointError(
                f"the setup in {self.place} does not verify ({error}); delete {manifest} there to"
                " have it computed again"
            ) from error
        if self._hold is None:
            self._run, self._run_is_known = saved.run, True
        return saved
