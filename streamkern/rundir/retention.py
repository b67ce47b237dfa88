"""What of a run may be deleted: checkpoints too old, and what a killed writer left half done."""

from __future__ import annotations

import logging

from streamkern.basics.errors import StorageError
from streamkern.filesystem.durable import is_temporary
from streamkern.rundir.checkpoint_format import STEM, named_group
from streamkern.rundir.file_names import CHECKPOINTS, checkpoint_ids, stem_of, writer_of
from streamkern.rundir.run_storage import RunStorage, WriterLock, reason

_log = logging.getLogger("streamkern")


class CheckpointRetention:
    """Of one run directory, deleted by who holds it.

    keep : checkpoints kept, newest first
    broken : stems of checkpoints that do not verify; they go with the next that is too old
    """

    def __init__(self, folder: RunStorage, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._groups: dict[str, str] = {}  # what manifests name, as far as known
        self.broken: set[str] = set()

    def named(self, manifest: str, group: str) -> None:
        """Take note that a manifest was just written that names this group."""
        self._groups[manifest] = group

    def tidy(self, hold: WriterLock) -> None:
        """Delete what the writers before left half done."""
        for where in ("", CHECKPOINTS):
            try:
                self._sweep(hold, where, self._folder.names(where))
            except StorageError:
                raise
            except OSError as error:  # who lost the run may be at the same files
                self._say_left(error)

    def retire(self, hold: WriterLock, where: str, names: set[str]) -> None:
        """Delete what is too old of `names`. The save is safe already: a failure is only logged.

        RunLockedError if the run was taken over: the new writer may have resumed from what is too
        old here, and may have deleted what was just saved before its manifest was there.
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
        """Delete temporary files, and groups of this writer or before that no manifest names."""
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
