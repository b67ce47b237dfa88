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
    ├── BackendError           (RuntimeError)       the device asked for is not there
    └── MissingDependencyError (ImportError)        an optional package is needed

A message names the parameter, its value, the rule it breaks and the remedy, in one sentence.
`exit_code` is what the command line returns for it: 2 wrong usage or input found before
anything was written, 3 the run failed and can be resumed.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_FAILED = 3
EXIT_TRY_AGAIN = 75


class StreamkernError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = EXIT_USAGE


class ConfigError(StreamkernError, ValueError):
    """A setting is wrong, found before any work was done."""


class MemoryBudgetError(ConfigError, MemoryError):
    """The settings need more memory than they were given. needed : bytes that would do, or 0."""

    def __init__(self, *args: object, needed: int = 0) -> None:
        super().__init__(*args)
        self.needed = needed


class DataError(StreamkernError, ValueError):
    """The data is not what the store, the file or the caller promised."""


class NotNumbersError(DataError, TypeError):
    """A feature that is not a number; an encoder of the table could make features of it."""


class StoreNotFoundError(DataError, FileNotFoundError):
    """No store, or no such array, at the given URL."""

    # FileNotFoundError formats (errno, strerror); ours is always one sentence.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


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

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StorageError(StreamkernError, OSError):
    """Reading or writing an object failed until the deadline. Names URL and key."""

    exit_code = EXIT_FAILED

    # OSError formats (errno, strerror); ours is always one sentence.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StorageAccessError(StorageError):
    """The storage refuses: no permission, no such bucket, no or expired credentials."""

    exit_code = EXIT_USAGE


class ClusterError(StreamkernError, OSError):
    """The Dask cluster is gone, or its workers cannot do the work. Names its address."""

    exit_code = EXIT_FAILED

    # OSError formats (errno, strerror); ours is always one sentence.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TrainingInterrupted(StreamkernError, RuntimeError):
    """The work was asked to stop, and saved; the same command again continues it."""

    exit_code = EXIT_TRY_AGAIN


class DivergenceError(StreamkernError, ArithmeticError):
    """Training diverged, and backing the step size off did not help."""

    exit_code = EXIT_FAILED


class BackendError(StreamkernError, RuntimeError):
    """The device asked for is not available."""


class MissingDependencyError(StreamkernError, ImportError):
    """An optional package is needed; the message says how to install it."""
