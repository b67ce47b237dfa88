"""The journal of a search: an Optuna study with one trial per training.

    journal.log   the study, in the format of Optuna's `JournalFileBackend`: the settings and the
                  identity of the data, which must not change, and one line per finished training
    result.json   the table of the trials, written at the end of the search

On a disk, `search.lock` excludes a second process. On an object store there is no lock, and the
journal is one object that is rewritten after each training. Without a folder the records stay in
memory, and the journal does not use Optuna.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import filelock

from streamkern.basics.errors import ResumeMismatchError, RunError, RunLockedError, StorageError
from streamkern.basics.optional import import_optional
from streamkern.basics.values import json_digest
from streamkern.basics.warning import warn
from streamkern.filesystem.durable import is_temporary, make_folders, sync_file
from streamkern.filesystem.ownership import file_lock
from streamkern.filesystem.urls import local_path
from streamkern.kernels.notation import kernel_text
from streamkern.rundir.checksums import seal
from streamkern.rundir.run_storage import RunStorage, folder_error, open_folder
from streamkern.train.differences import record_differences

JOURNAL_NAME, RESULT_NAME, LOCK_NAME = "journal.log", "result.json", "search.lock"
STUDY_NAME = "trainings"
OLD_JOURNAL_NAME = "search.json"  # the journal of streamkern 0.1.0
TrialRecord = dict[str, Any]


def optuna_package(purpose: str = "a search that is recorded") -> Any:
    """Import Optuna; raise MissingDependencyError if it is not installed.

    purpose : the feature that needs it, for the error
    """
    return import_optional("optuna", purpose, "tune")


@contextlib.contextmanager
def quiet_optuna(optuna: Any) -> Iterator[None]:
    """Silence Optuna's message about a new study."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


class TrialJournal:
    """The records of all trainings of a search, kept in a folder or, without one, in memory.

    out : path or URL of the folder, or None
    identity : JSON values that must not change between the calls of a search
    storage_options : options of a remote URL

    Raises
    ------
    MissingDependencyError
        A folder is given, and Optuna is not installed.
    RunLockedError
        Another process runs the search in the folder.
    ResumeMismatchError
        The folder holds a search with another `identity`; the message names every difference.
    RunError, StorageError
        The folder holds something else, is damaged, or cannot be read or written.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        identity: Mapping[str, Any],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._records: dict[str, TrialRecord] = {}
        self._folder: RunStorage | None = None
        self._lock: filelock.BaseFileLock | None = None
        self._study: Any = None
        if out is None:
            return
        optuna_package()
        self._folder = open_folder(out, storage_options)
        try:
            with self._storage_errors():
                _check_search_folder(self._folder)
                self._acquire(self._folder, local_path(out))
                self._open(self._folder, local_path(out), json.loads(json.dumps(identity)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that another process can resume the search."""
        if self._lock is not None:
            self._lock.release()

    def records(self) -> list[TrialRecord]:
        """Return all records, in the order in which they were recorded."""
        return list(self._records.values())

    def get(self, settings: Sequence[Any], fold: int) -> TrialRecord | None:
        """Return the record of a training, or None.

        settings : kernel, bandwidth and ridge as JSON values
        fold : number of the fold whose rows are held out
        """
        return self._records.get(_record_key(settings, fold))

    def add(self, record: TrialRecord) -> None:
        """Add the record of a training; in a folder it is durable on return.

        The entries `settings` and `fold` identify the record.
        """
        self._records[_record_key(record["settings"], record["fold"])] = record
        if self._study is not None:
            with self._storage_errors():
                self._study.add_trial(_optuna_trial(record))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result of the search to result.json."""
        if self._folder is not None:
            with self._storage_errors():
                self._folder.write(RESULT_NAME, seal("result", result))

    def _acquire(self, folder: RunStorage, path: Path | None) -> None:
        """Lock a folder on a disk, and delete temporary files left by killed calls."""
        if path is None:
            return
        make_folders(path)
        lock = file_lock(path / LOCK_NAME)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise RunLockedError(
                f"another process runs the search in {folder.location}",
                "wait for it, or give another folder",
            ) from None
        self._lock = lock
        folder.delete(name for name in folder.names() if is_temporary(name))

    def _open(self, folder: RunStorage, path: Path | None, identity: Mapping[str, Any]) -> None:
        """Open the study, check its identity, and read its records."""
        name = f"{folder.location}/{JOURNAL_NAME}"
        try:
            self._study = _load_study(folder, path)
            recorded_identity = self._study.user_attrs.get("identity")
            trials = self._study.trials
            if recorded_identity is None and trials:
                raise ValueError("the settings of the search are missing")
        except (RunError, StorageError, OSError):
            raise
        except Exception as error:  # Optuna raises various errors for damaged lines
            raise RunError(
                f"{name} is damaged ({error})", "restore it from a copy, or give another folder"
            ) from error
        if recorded_identity is None:
            self._study.set_user_attr("identity", identity)
            return
        differences = record_differences(recorded_identity, identity)
        changes = [text.removeprefix("settings.") for text in differences]
        if changes:
            raise ResumeMismatchError(
                f"{folder.location} holds a search with other settings or data: "
                f"{'; '.join(changes)}",
                "restore the settings and data, or give another folder",
            )
        for trial in trials:
            record = trial.user_attrs.get("record")
            if trial.user_attrs.get("digest") != json_digest(record):
                warn(f"{name} is damaged (trial {trial.number}); this training is repeated")
                continue
            self._records[_record_key(record["settings"], record["fold"])] = record

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Turn an OSError of the folder into a RunError."""
        try:
            yield
        except (RunError, StorageError):
            raise
        except OSError as error:
            assert self._folder is not None
            raise folder_error(
                f"{self._folder.location} cannot be used",
                "give another folder, or solve this problem, and run the same command again",
                error,
            ) from error


def _record_key(settings: Sequence[Any], fold: int) -> str:
    """Return the text that identifies a training."""
    return json.dumps([*settings, fold], sort_keys=True)


def _optuna_trial(record: TrialRecord) -> Any:
    """Return a finished Optuna trial; a training that diverged is a failed trial."""
    optuna = optuna_package()
    distributions, state = optuna.distributions, optuna.trial.TrialState
    params: dict[str, Any] = {"kernel": kernel_text(record["kernel"])}
    params |= {name: record[name] for name in ("bandwidth", "ridge") if record[name] is not None}
    mse = record["held_out_mse"]
    return optuna.trial.create_trial(
        state=state.FAIL if mse is None else state.COMPLETE, value=mse, params=params,
        distributions={
            name: distributions.CategoricalDistribution((value,)) if name == "kernel"
            else distributions.FloatDistribution(value, value)
            for name, value in params.items()
        },
        user_attrs={"record": record, "digest": json_digest(record)},
    )  # fmt: skip


def _check_search_folder(folder: RunStorage) -> None:
    """Raise RunError unless the folder is empty or holds a search of this version."""
    names = folder.names()
    if OLD_JOURNAL_NAME in names and JOURNAL_NAME not in names:
        raise RunError(
            f"{folder.location} holds a search of streamkern 0.1.0, which cannot be resumed",
            "give a new or empty folder",
        )
    foreign = sorted(name for name in names if name != LOCK_NAME and not is_temporary(name))
    if foreign and JOURNAL_NAME not in names:
        raise RunError(
            f"{folder.location} holds {foreign[0]!r} but no search of streamkern",
            "give a new or empty folder",
        )


# -- storage of the study ------------------------------------------------------------------------


def _load_study(folder: RunStorage, path: Path | None) -> Any:
    """Return the study of the folder, created if there is none.

    path : path of a folder on a disk, or None
    """
    optuna = optuna_package()
    storages = optuna.storages
    if JOURNAL_NAME not in folder.names():
        # This backend writes whole objects, so that the first line of a new journal is complete.
        with quiet_optuna(optuna):
            storage = storages.JournalStorage(_ObjectBackend(folder))
            optuna.create_study(study_name=STUDY_NAME, storage=storage)
    backend: Any = _ObjectBackend(folder)
    _check_study(folder)
    if path is not None:
        _truncate_at_damage(path / JOURNAL_NAME)
        name = str(path / JOURNAL_NAME)
        backend = storages.journal.JournalFileBackend(name, lock_obj=_NoLock())
    return optuna.load_study(study_name=STUDY_NAME, storage=storages.JournalStorage(backend))


def _check_study(folder: RunStorage) -> None:
    """Raise RunError if the journal holds a foreign study, which must not be changed.

    Raises ValueError if the first line is not an entry of a journal.
    """
    lines = folder.read(JOURNAL_NAME).splitlines(keepends=True)
    if not lines or not _is_entry(lines[0]):
        raise ValueError("its first line")
    if json.loads(lines[0]).get("study_name") != STUDY_NAME:
        raise RunError(
            f"{folder.location}/{JOURNAL_NAME} is a study of Optuna, not a search of streamkern",
            "give a new or empty folder",
        )


class _NoLock:
    """A lock for Optuna's journal that does nothing, since this process holds `search.lock`.

    Optuna's own lock would outlive a killed process and delay the next one by half a minute.
    """

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class _ObjectBackend:
    """Journal backend for Optuna that rewrites the journal as one object for each append."""

    def __init__(self, folder: RunStorage) -> None:
        self._folder = folder
        try:
            self._lines = folder.read(JOURNAL_NAME).decode().splitlines()
        except FileNotFoundError:
            self._lines = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines[log_number_from:]]

    def append_logs(self, logs: Sequence[Mapping[str, Any]]) -> None:
        self._lines += map(json.dumps, logs)
        self._folder.write(JOURNAL_NAME, "".join(f"{line}\n" for line in self._lines).encode())


def _truncate_at_damage(path: Path) -> None:
    """Truncate a journal durably at its first damaged line.

    Its first line is intact, see `_check_study`. Optuna only appends to the file, and rejects a
    journal whose last line is incomplete after a kill or a power cut. Warns of any other damage.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    n_intact = next((k for k, line in enumerate(lines) if not _is_entry(line)), len(lines))
    if n_intact == len(lines):
        return
    last_line = lines[-1]
    # A torn write leaves a part of a line. A whole line without its line end is a changed byte.
    is_torn = not last_line.endswith(b"\n") and not _is_entry(last_line[:-1] + b"\n")
    if len(lines) > n_intact + 1 or not is_torn:
        warn(f"{path} is damaged from line {n_intact + 1} on; later trainings are repeated")
    os.truncate(path, sum(map(len, lines[:n_intact])))
    sync_file(path)


def _is_entry(line: bytes) -> bool:
    """Return whether a line is a complete entry of Optuna's journal."""
    try:
        return line.endswith(b"\n") and "op_code" in json.loads(line)
    except (ValueError, TypeError):
        return False
