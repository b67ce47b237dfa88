"""Every error streamkern raises on purpose, in one tree.

    StreamkernError
    ├── ConfigError            (ValueError)         a setting is wrong; nothing was started
    │   └── MemoryBudgetError  (also MemoryError)   a setting does not fit the memory given
    ├── DataError              (ValueError)         the data is not what was promised
    │   ├── StoreNotFoundError (also FileNotFoundError)
    │   ├── CorruptChunkError                       a chunk is missing, truncated or altered
    │   ├── NotNumbersError    (also TypeError)     words, dates or nothing where numbers must be
    │   └── NonFiniteError                          NaN or infinity in the data
    ├── RunError               (RuntimeError)       a run directory cannot be used
    │   ├── ResumeMismatchError                     data or settings differ from the run's
    │   ├── RunLockedError                          another process writes to it
    │   │   └── RunLostError                        taken over, moved or deleted in mid-run
    │   └── CheckpointError    (also OSError)       a checkpoint cannot be written or read
    ├── StorageError           (OSError)            storage failed until the deadline for retries
    │   └── StorageAccessError                      no permission, no such place, no credentials
    ├── ClusterError           (OSError)            the Dask cluster is gone, or cannot do the work
    ├── TrainingInterrupted    (RuntimeError)       stopped by a signal; the same call goes on
    ├── DivergenceError        (ArithmeticError)    diverged, and smaller steps did not help
    ├── BackendError           (RuntimeError)       the device asked for cannot be used
    │   └── DeviceMemoryError  (also MemoryError)   its memory is full
    └── MissingDependencyError (ImportError)        an optional package is needed

A message names the setting, its value, the rule it breaks and the remedy, in one sentence; each is
a field of the error, see `StreamkernError`. `exit_code` is the exit code of a command that fails
with it: 2 wrong usage or input found before anything was written, 3 the run failed and can be
resumed.
"""

from __future__ import annotations

from streamkern.basics.message import Mention, Vocabulary, mentions, render_message

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_TRY_AGAIN = 75


class StreamkernError(Exception):
    """Base of all errors raised on purpose.

    message : rule and remedy, with mentions of settings (see `basics.message`)
    rule : what is wrong
    remedy : what the reader can do about it; None where nothing is to be done
    setting, value : of the first setting that the message mentions; None without one
    vocabulary : the words of `str(error)` for settings; the estimators set theirs
    """

    exit_code = EXIT_USAGE

    def __init__(self, rule: str = "", remedy: str | None = None, *, message: str = "") -> None:
        # PyTorch raises the error of a worker anew, with `message` alone.
        self.rule, self.remedy = rule or message, remedy
        self.vocabulary: Vocabulary = str
        super().__init__(render_message(self.message))

    @property
    def message(self) -> str:
        return self.rule if self.remedy is None else f"{self.rule}; {self.remedy}"

    @property
    def mentions(self) -> list[Mention]:
        return mentions(self.message)

    @property
    def setting(self) -> str | None:
        return next((mention.name for mention in self.mentions), None)

    @property
    def value(self) -> str | None:
        return next((mention.value for mention in self.mentions), None)

    def append(self, text: str) -> None:
        """Add text at the end of the message."""
        if self.remedy is None:
            self.rule += text
        else:
            self.remedy += text

    # OSError formats its arguments; ours is always one sentence. Two settings may have one word,
    # and their lines become equal.
    def __str__(self) -> str:
        return "\n".join(dict.fromkeys(render_message(self.message, self.vocabulary).splitlines()))


class ConfigError(StreamkernError, ValueError):
    """A setting is wrong, found before any work was done."""


class MemoryBudgetError(ConfigError, MemoryError):
    """The settings need more memory than they were given. needed : bytes that would do, or 0."""

    def __init__(self, rule: str = "", remedy: str | None = None, *, needed: int = 0) -> None:
        super().__init__(rule, remedy)
        self.needed = needed


class DataError(StreamkernError, ValueError):
    """The data is not what the store, the file or the caller promised."""


class NotNumbersError(DataError, TypeError):
    """A feature that is not a number; an encoder of the table could make features of it."""


class StoreNotFoundError(DataError, FileNotFoundError):
    """No store, or no such array, at the given URL."""


class CorruptChunkError(DataError):
    """A chunk is missing, truncated, or its checksum does not match. Names the chunk's key."""

    exit_code = EXIT_FAILED


class NonFiniteError(DataError):
    """NaN or infinity in the data. Names where: file or chunk, row, column."""


class RunError(StreamkernError, RuntimeError):
    """A run directory cannot be used as asked."""


class RankLostError(RunError):
    """Another rank of the run is gone. The run can be resumed from its last checkpoint."""


class ResumeMismatchError(RunError):
    """Data or settings differ from those the run was started with; names the difference."""


class RunLockedError(RunError):
    """Another process is writing to this run directory."""


class RunLostError(RunLockedError):
    """The run directory was taken over by another process, moved or deleted in mid-run."""

    exit_code = EXIT_FAILED


class CheckpointError(RunError, OSError):
    """A checkpoint could not be written or read."""

    exit_code = EXIT_FAILED


class StorageError(StreamkernError, OSError):
    """Reading or writing an object failed until the deadline. Names URL and key."""

    exit_code = EXIT_FAILED


class StorageAccessError(StorageError):
    """The storage refuses: no permission, no such bucket, no or expired credentials."""

    exit_code = EXIT_USAGE


class ClusterError(StreamkernError, OSError):
    """The Dask cluster is gone, or its workers cannot do the work. Names its address."""

    exit_code = EXIT_FAILED


class TrainingInterrupted(StreamkernError, RuntimeError):
    """The work was asked to stop, and saved; the same command again continues it."""

    exit_code = EXIT_TRY_AGAIN


class DivergenceError(StreamkernError, ArithmeticError):
    """Training diverged, and backing the step size off did not help."""

    exit_code = EXIT_FAILED


class BackendError(StreamkernError, RuntimeError):
    """The device asked for cannot be used."""


class DeviceMemoryError(BackendError, MemoryError):
    """The memory of a device is full."""


class MissingDependencyError(StreamkernError, ImportError):
    """An optional package is needed; the message says how to install it."""
