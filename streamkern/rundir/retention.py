"""Deletion in a run: old checkpoints, and unfinished files of a killed writer."""

from __future__ import annotations

import logging

from streamkern.basics.errors import StorageError
from streamkern.filesystem.durable import is_temporary
from streamkern.rundir.checkpoint_format import STEM, named_group
from streamkern.rundir.file_names import CHECKPOINTS, checkpoint_ids, stem_of, writer_of
from streamkern.rundir.run_storage import RunStorage, WriterLock, reason

_log = logging.getLogger("streamkern")


class CheckpointRetention:
    """Deletes old files of one run directory, on behalf of the process that holds it.

    keep : checkpoints kept, newest first
    broken : stems of checkpoints that do not verify; they are deleted with the next old ones
    """

    def __init__(self, folder: RunStorage, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._groups: dict[str, str] = {}  # the group of each manifest, as far as known
        self.broken: set[str] = set()

    def named(self, manifest: str, group: str) -> None:
        """Record that a manifest was just written that names this group."""
        self._groups[manifest] = group

    def tidy(self, hold: WriterLock) -> None:
        """Delete files that earlier writers left unfinished."""
        for where in ("", CHECKPOINTS):
            try:
                self._sweep(hold, where, self._folder.names(where))
            except StorageError:
                raise
            except OSError as error:  # a writer that lost the run may use the same files
                self._say_left(error)

    def retire(self, hold: WriterLock, where: str, names: set[str]) -> None:
        """Delete the files among `names` that are too old.

        The save is safe already, so a failure is only logged. Raises RunLockedError if the run was
        taken over: the new writer may have resumed from a checkpoint that is too old here, and may
        have deleted the one just saved before its manifest was written.
        """
        try:
            hold.check()
            if where == CHECKPOINTS:
                old = [stem_of(*rank) for rank in checkpoint_ids(names)]
                good = [stem for stem in old if stem not in self.broken]
                retired = {f"{stem}.json" for stem in (*good[: -self._keep], *self.broken)}
                self._folder.delete([where + name for name in sorted(retired)])
                names -= retired
                self.broken.clear()
            self._sweep(hold, where, names)
        except OSError as error:
            self._say_left(error)

    def _sweep(self, hold: WriterLock, where: str, names: set[str]) -> None:
        """Delete temporary files, and groups of writers up to this one that no manifest names."""
        for name in names:
            match = STEM.fullmatch(name)
            if is_temporary(name):
                self._folder.delete([where + name])
            elif match and ("setup" in name) == (not where) and writer_of(name) <= hold.number:
                manifest = f"{match[1]}.json"
                # An unreadable manifest names nothing and keeps everything.
                if manifest not in names or self._group(where + manifest) not in (None, name):
                    self._folder.delete_group(where + name)

    def _group(self, manifest: str) -> str | None:
        if manifest not in self._groups:
            group = named_group(self._folder, manifest)
            if group is None:
                return None
            self._groups[manifest] = group
        return self._groups[manifest]

    def _say_left(self, error: OSError) -> None:
        place = self._folder.place
        _log.warning("old files in %s could not be deleted: %s", place, reason(error))
