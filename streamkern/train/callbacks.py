"""Callbacks: what is told of a run while it trains, and may end it.

They hear what the log is told, and are asked after every pass. One that raises ends the run with
its own exception; where there is a run directory, the same call goes on from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from streamkern.basics.errors import ConfigError
from streamkern.train.planned import decided
from streamkern.train.resolve import ResolvedRun
from streamkern.train.step_loop import Position, Result


@dataclass(frozen=True)
class TrainStart:
    """A run that is about to take its steps.

    settings : of the run, table by table, JSON. setup : what was chosen and measured. step, epoch :
    that are behind a run that is resumed. epochs : at most. run_dir : where there is one.
    """

    settings: Mapping[str, Mapping[str, Any]]
    setup: Mapping[str, Any]
    step: int
    epoch: int
    epochs: int
    run_dir: str | None = None

    @classmethod
    def of(cls, run: ResolvedRun, meta: dict[str, Any], at: Position, run_dir: str | None) -> Self:
        """Return that of a run with this setup, at this position."""
        settings, passes = run.given.recorded(run.config), run.config.data.passes
        return cls(settings, decided(meta), at.step, at.epoch, passes, run_dir)


@dataclass(frozen=True)
class EpochEnd:
    """A pass that has ended.

    epoch, step, samples : that are behind the run.
    figures : the newest of the evaluations, of the last pass those of the finished model.
    last : whether no other pass follows.
    result : makes one with the weights as they are now, without history, whose model is
    the run's own: it is neither closed nor kept.
    """

    epoch: int
    step: int
    samples: int
    figures: Mapping[str, float]
    last: bool
    result: Callable[[], Result]


class Callback:
    """Does nothing; override what is of interest.

    All is called by the thread that trains, between two steps, which wait for it.
    """

    def begin(self, run: TrainStart) -> None:
        """The setup is over. Also of a run that is resumed."""

    def record(self, record: Mapping[str, Any]) -> None:
        """What the log is told: `event`, `step`, `epoch`, `samples`, and what belongs to the event.

        "train" has `train_mse` and `samples_per_s`, about once a second; "evaluation" has figures.
        """

    def pass_ended(self, passed: EpochEnd) -> bool | None:
        """A pass has ended. True: no other one is wanted."""
        return None

    def end(self, error: BaseException | None) -> None:
        """Nothing more will be told. error : that training ended with; None where it came to its
        end. Also called where `begin` failed."""


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """The callbacks of a list, or none of None; ConfigError for what is none."""
    if not isinstance(callbacks, Iterable | None):
        raise ConfigError(f"callbacks={callbacks!r} must be a list of callbacks; give [it]")
    found = tuple(callbacks or ())
    for callback in found:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has {callback!r}; give objects of subclasses of streamkern.Callback, "
                "and callbacks of scikit-learn to set_callbacks"
            )
    return found


class Callbacks:
    """Those of a run, in order. stack : on which they end."""

    def __init__(self, callbacks: Sequence[Callback], stack: contextlib.ExitStack) -> None:
        self._callbacks, self._stack = callbacks, stack
        self._told: list[Callback] = []
        self._passes = 0

    def begin(self, run: TrainStart) -> None:
        """Tell all of them, and see to it that they end."""
        for callback in self._callbacks:
            self._stack.push(_ender(callback))
            callback.begin(run)
            self._told.append(callback)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[list[Callback]]:
        """Those to tell. Where one of them raises, what is saved then is no news for any."""
        try:
            yield self._told
        except BaseException:
            self._told = []
            raise

    def record(self, record: Mapping[str, Any]) -> None:
        """See `Callback`. What came before the beginning is not told."""
        with self._telling() as told:
            for callback in told:
                callback.record(record)

    def pass_ended(self, passed: EpochEnd) -> str | None:
        """Why no other pass is wanted, or None. All of them are told, of each pass once."""
        if passed.epoch <= self._passes:
            return None
        self._passes = passed.epoch
        with self._telling() as told:
            enders = [type(each).__name__ for each in told if each.pass_ended(passed)]
        return f"{enders[0]} asked for no further pass" if enders else None


def _ender(callback: Callback) -> Callable[..., None]:
    def end(kind: object, error: BaseException | None, traceback: object) -> None:
        callback.end(error)

    return end
