"""The errors that streamkern raises on purpose, in one tree.

    StreamkernError
    ├── ConfigError            (ValueError)         a setting is wrong; nothing was started
    │   └── MemoryBudgetError  (also MemoryError)   the settings need more memory than allowed
    ├── DataError              (ValueError)         the data differs from its description
    │   ├── StoreNotFoundError (also FileNotFoundError)
    │   ├── CorruptChunkError                       a chunk is missing, truncated or altered
    │   ├── NotNumbersError    (also TypeError)     words, dates or gaps in place of numbers
    │   └── NonFiniteError                          NaN or infinity in the data
    ├── RunError               (RuntimeError)       a run directory cannot be used
    │   ├── RankLostError                           another rank of the run has ended
    │   ├── ResumeMismatchError                     data or settings differ from the run's
    │   ├── RunLockedError                          another process writes to the run directory
    │   │   └── RunLostError                        taken over, moved or deleted during the run
    │   └── CheckpointError    (also OSError)       a checkpoint cannot be written or read
    ├── StorageError           (OSError)            storage failed until the deadline for retries
    │   └── StorageAccessError                      no permission, no such bucket, no credentials
    ├── ClusterError           (OSError)            the Dask cluster is gone, or cannot do the work
    ├── TrainingInterrupted    (RuntimeError)       stopped by a signal; the same call continues
    ├── DivergenceError        (ArithmeticError)    the loss diverged, also with smaller steps
    ├── BackendError           (RuntimeError)       the requested device cannot be used
    │   └── DeviceMemoryError  (also MemoryError)   the memory of the device is full
    └── MissingDependencyError (ImportError)        an optional package is not installed

A call of a subpackage, such as `streamkern.train()`, raises a `SubpackageCallError`, which is a
ConfigError. An unknown keyword argument is a TypeError, as in Python.

A message names the setting, its value, the rule that it breaks and the remedy, in one sentence;
each is an attribute of the error, see `StreamkernError`. The attribute `exit_code` is the exit code
of a command that ends with the error, one of the constants `EXIT_*`.
"""

from __future__ import annotations

from streamkern.basics.message import Mention, Vocabulary, mentions, render_message

EXIT_DONE = 0
EXIT_USAGE = 2  # a wrong argument or wrong data, found before anything was written
EXIT_FAILED = 3  # a failure during the work; if there is a run, it can be resumed
EXIT_TRY_AGAIN = 75  # stopped and saved; the same command continues


class StreamkernError(Exception):
    """Base of all errors raised on purpose.

    rule : description of the mistake or failure
    remedy : advice to the reader; None if the rule needs none
    message : rule and remedy, with mentions of settings (see `basics.message`)
    setting, value : name and value of the first setting that the message mentions, or None
    vocabulary : names of settings in `str(error)`; an estimator sets the names of its parameters
    """

    exit_code = EXIT_USAGE

    def __init__(self, rule: str = "", remedy: str | None = None, *, message: str = "") -> None:
        # PyTorch re-raises the error of a worker process as `kind(message=text)`.
        self.rule = rule or message
        self.remedy = remedy
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

    # OSError would format its arguments in its own way. Two settings may have the same name in a
    # vocabulary, which makes lines equal: each distinct line is shown once.
    def __str__(self) -> str:
        return "\n".join(dict.fromkeys(render_message(self.message, self.vocabulary).splitlines()))


class ConfigError(StreamkernError, ValueError):
    """A setting is wrong, found before any work was done."""


class MemoryBudgetError(ConfigError, MemoryError):
    """The settings need more memory than allowed. needed : bytes that they need; 0 if unknown."""

    def __init__(self, rule: str = "", remedy: str | None = None, *, needed: int = 0) -> None:
        super().__init__(rule, remedy)
        self.needed = needed


class DataError(StreamkernError, ValueError):
    """The data differs from the description in the store or the file, or by the caller."""


class NotNumbersError(DataError, TypeError):
    """A feature is not a number. In a table, an encoder could convert it."""


class RowShapeError(DataError, ConfigError):
    """Rows have another shape or number of features than the rows that they are used with."""


class StoreNotFoundError(DataError, FileNotFoundError):
    """No store, or no such array, at the given URL."""


class CorruptChunkError(DataError):
    """A chunk is missing, truncated or altered; the message names the key of the chunk."""

    exit_code = EXIT_FAILED


class NonFiniteError(DataError):
    """The data holds NaN or infinity; the message names the file or chunk, the row and column."""


class RunError(StreamkernError, RuntimeError):
    """A run directory cannot be used in the requested way."""


class RankLostError(RunError):
    """Another rank of the run has ended. The run can be resumed from its newest checkpoint."""


class ResumeMismatchError(RunError):
    """Data or settings differ from those of the run; the message names the differences."""


class RunLockedError(RunError):
    """Another process is writing to this run directory."""


class RunLostError(RunLockedError):
    """The run directory was taken over by another process, moved or deleted during the run."""

    exit_code = EXIT_FAILED


class CheckpointError(RunError, OSError):
    """A checkpoint could not be written or read."""

    exit_code = EXIT_FAILED


class StorageError(StreamkernError, OSError):
    """An object could not be read or written until the deadline; the message names it."""

    exit_code = EXIT_FAILED


class StorageAccessError(StorageError):
    """The storage refuses access: no permission, no such bucket, no or expired credentials."""

    exit_code = EXIT_USAGE


class ClusterError(StreamkernError, OSError):
    """The Dask cluster is gone, or cannot do the work; the message names its address."""

    exit_code = EXIT_FAILED


class TrainingInterrupted(StreamkernError, RuntimeError):
    """The work was stopped and saved; the same command continues it."""

    exit_code = EXIT_TRY_AGAIN


class DivergenceError(StreamkernError, ArithmeticError):
    """Training diverged, also with smaller steps."""

    exit_code = EXIT_FAILED


class BackendError(StreamkernError, RuntimeError):
    """The requested device cannot be used."""


class DeviceMemoryError(BackendError, MemoryError):
    """The memory of a device is full."""


class MissingDependencyError(StreamkernError, ImportError):
    """An optional package is not installed; the message says how to install it."""
