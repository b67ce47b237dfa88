"""Callbacks: objects that observe a run while it trains, and may end it.

They receive the records of the log that are written after `begin`, and are called after every
epoch. A record is the JSON of an event. An exception in a callback ends the run; with a run
directory, the same call resumes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from streamkern.basics.errors import ConfigError
from streamkern.train.loop.step_loop import Position, Result
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.planned import setup_decisions


@dataclass(frozen=True)
class TrainStart:
    """A run that is about to take its first step.

    Attributes
    ----------
    settings : mapping
        Settings of the run: for each table a mapping from names to JSON values.
    setup : mapping
        Choices and measurements of the setup.
    step, epoch : int
        Steps and epochs already done, if the run is resumed.
    epochs : int
        Number of epochs after which the run ends at the latest.
    run_dir : str or None
        The run directory.
    """

    settings: Mapping[str, Mapping[str, Any]]
    setup: Mapping[str, Any]
    step: int
    epoch: int
    epochs: int
    run_dir: str | None = None

    @classmethod
    def of(
        cls, run: ResolvedRun, meta: dict[str, Any], position: Position, run_dir: str | None
    ) -> Self:
        """Return the start of a run with this setup, at this position."""
        settings, epochs = run.inputs.recorded_settings(run.config), run.config.data.n_epochs
        return cls(settings, setup_decisions(meta), position.step, position.epoch, epochs, run_dir)


@dataclass(frozen=True)
class EpochEnd:
    """An epoch that has ended.

    Attributes
    ----------
    epoch, step, samples : int
        Numbers of epochs, steps and samples done so far.
    figures : mapping of str to float
        Figures of the newest evaluation; after the last epoch, figures of the finished model.
    last : bool
        Whether no other epoch follows.
    result : callable
        Returns a `Result` with the current weights, without history. Its model belongs to the run:
        do not close or keep it.
    """

    epoch: int
    step: int
    samples: int
    figures: Mapping[str, float]
    last: bool
    result: Callable[[], Result]


class Callback:
    """Base class of callbacks, whose methods do nothing; override those you need.

    All methods are called by the training thread before, between or after steps; training waits for
    them.
    """

    def begin(self, run: TrainStart) -> None:
        """Handle the end of the setup. Also called when a run is resumed."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Handle a record of the log: `event`, `step`, `epoch`, `samples`, and fields of the event.

        "train" has `samples_per_s` and, if a window of steps has ended since the last record,
        `train_mse`. It comes about once a second if windows are short, otherwise about every 30 s,
        and before a checkpoint with new losses. With solvers whose last epoch does not measure the
        finished model, such as "direct", a last record "train" has `train_mse` alone. "evaluation"
        has figures. Records of the setup, before `begin`, are not passed.
        """

    def pass_ended(self, passed: EpochEnd) -> bool | None:
        """Handle the end of an epoch. Return True to end training."""
        return None

    def end(self, error: BaseException | None) -> None:
        """Handle the end of the run; no other call follows. Also called if `begin` failed.

        error : the exception that ended training; None if it is complete
        """


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Return callbacks as a tuple, () for None.

    Raises ConfigError if an object is no callback, or of a subclass that overrides no method,
    because methods of other libraries, such as on_epoch_end, would never be called.
    """
    if not isinstance(callbacks, Iterable | None):
        raise ConfigError(
            f"callbacks={callbacks!r} must be a list of callbacks",
            "put a single callback in a list: callbacks=[...]",
        )
    checked = tuple(callbacks or ())
    for callback in checked:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has {callback!r}, which is not a streamkern.Callback",
                "give objects of subclasses of streamkern.Callback; give callbacks of scikit-learn "
                "to set_callbacks",
            )
        is_subclass = type(callback) is not Callback
        if is_subclass and not any(_overrides(callback, name) for name in _METHODS):
            raise ConfigError(
                f"callbacks has a {type(callback).__name__}, which overrides no method of "
                "streamkern.Callback, so that nothing calls it",
                f"override one of {', '.join(_METHODS)}",
            )
    return checked


_METHODS = ("begin", "record", "pass_ended", "end")


def _overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback has its own method of this name."""
    own_method = getattr(callback, name)
    return getattr(own_method, "__func__", own_method) is not getattr(Callback, name)


class Callbacks:
    """The callbacks of a run, in order.

    stack : exit stack on which their `end` is registered
    """

    def __init__(self, callbacks: Sequence[Callback], stack: contextlib.ExitStack) -> None:
        self._callbacks, self._stack = callbacks, stack
        self._active: list[Callback] = []
        self._n_epochs = 0

    def begin(self, run: TrainStart) -> None:
        """Call `begin` of all callbacks, and register their `end`."""
        for callback in self._callbacks:
            self._stack.push(_end_of(callback))
            callback.begin(run)
            self._active.append(callback)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[list[Callback]]:
        """Yield the callbacks to call. After an error in one of them, none is called again except
        for `end`."""
        try:
            yield self._active
        except BaseException:
            self._active = []
            raise

    def record(self, record: Mapping[str, Any]) -> None:
        """Pass a record of the log to all callbacks. Records before `begin` are dropped."""
        with self._calling() as active:
            for callback in active:
                callback.record(record)

    def pass_ended(self, passed: EpochEnd) -> str | None:
        """Call all callbacks, once for each epoch; return why one of them ends training, or None.

        A call for an epoch that was already reported does nothing.
        """
        if passed.epoch <= self._n_epochs:
            return None
        self._n_epochs = passed.epoch
        with self._calling() as active:
            names = [type(callback).__name__ for callback in active if callback.pass_ended(passed)]
        return f"{names[0]} asked for no further epoch" if names else None


def _end_of(callback: Callback) -> Callable[..., None]:
    """Return a function with the signature of `__exit__` that calls `end` of the callback."""

    def end(kind: object, error: BaseException | None, traceback: object) -> None:
        callback.end(error)

    return end
