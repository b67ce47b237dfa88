"""The divergence guard, and the training loss of every epoch.

The losses of steps stay on the device and are read a window at a time. The guard judges each
window, that is, at fixed steps, so that it decides the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.errors import DivergenceError
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.solver.base import LOSS_BUFFER_STEPS, Solver, State

WINDOW = LOSS_BUFFER_STEPS
"""Number of steps in a window."""
BACK_OFF_FACTOR = 0.5
"""Factor of the step sizes at a back-off."""
MAX_BACK_OFFS = 8
"""Number of back-offs after which another one is an error."""
NEGLIGIBLE_LOSS = 1e-6
"""Loss in scaled targets below which no window is bad. The loss of f = 0 is about 1; it is smaller
only for constant targets, which f approximates to the half width h of a quantile's ramp."""


@dataclass
class Guard:
    """Decide whether the mean loss of a window of `WINDOW` steps shows that training diverges.

    The loss of a step is computed before its update, on rows that are new in this epoch. Every
    output counts in its own scale. The loss is compared with the loss of predicting zero, which in
    scaled targets means predicting the mean. A window is bad if its loss is

    - not finite,
    - above twice the largest loss of predicting zero so far,
    - above the loss of predicting zero, although the best window had less than half of that, or
    - above ten times the loss of the best window, and above a tenth of the loss of predicting zero.

    A finite loss below `NEGLIGIBLE_LOSS` is never bad. Minibatch noise and difficult parts of the
    data do not meet these conditions. An exponentially growing error soon meets all of them.

    The loss of predicting zero is the mean square of the targets. If it changes by a factor of 4,
    the targets have changed, and a larger loss is no sign of divergence. The comparison with the
    best window then begins again.

    The names of the fields are keys of checkpoints.

    best : mean loss of the best window since the last back-off or change of the targets
    back_offs : number of back-offs
    worth : loss of predicting zero at the last change of the targets
    most : largest loss of predicting zero since the last back-off
    """

    best: float = math.inf
    back_offs: int = 0
    worth: float = 0.0
    most: float = 0.0

    def judge(self, loss: float, zero_loss: float, remedy: str = "a larger bandwidth") -> bool:
        """Return whether the window is bad.

        loss, zero_loss : mean loss of the window, and mean loss of predicting zero in it
        remedy : setting that the error message recommends

        Raises DivergenceError after more than `MAX_BACK_OFFS` bad windows.
        """
        if not 0.25 * self.worth <= zero_loss <= 4 * self.worth:
            self.best, self.worth = math.inf, zero_loss
        self.most = max(self.most, zero_loss)
        grows = (
            loss > 2 * self.most
            or loss > zero_loss > 2 * self.best
            or (loss > 10 * self.best and loss > 0.1 * zero_loss)
        )
        is_bad = not math.isfinite(loss) or (grows and loss > NEGLIGIBLE_LOSS)
        if not is_bad:
            self.best = min(self.best, loss)
            return False
        self.back_offs += 1
        self.best, self.most = math.inf, zero_loss  # losses fall from here, which is not growth
        if self.back_offs > MAX_BACK_OFFS:
            raise DivergenceError(
                f"training diverged and halving the step size {MAX_BACK_OFFS} times did not help "
                f"(loss {loss:.3g} with scaled targets, and {zero_loss:.3g} for their mean)",
                f"check the data for outliers, or set {remedy}",
            )
        return True

    @staticmethod
    def may_keep_weights(window: Sequence[Sequence[float]]) -> bool:
        """Return whether a later back-off may return to the weights after this good window.

        It may not if the last quarter of the steps had a larger loss than predicting zero: their
        weights may already diverge, although the mean of the window is good.

        window : (loss, loss of predicting zero) of each step
        """
        last_quarter = window[-max(1, len(window) // 4) :]
        return sum(loss for loss, _ in last_quarter) <= sum(
            zero_loss for _, zero_loss in last_quarter
        )

    def scalars(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values; infinity becomes None."""
        scalars = asdict(self)
        return scalars | {"best": None if math.isinf(self.best) else self.best}

    @classmethod
    def restore(cls, scalars: dict[str, Any]) -> Guard:
        """Return the guard whose state is `scalars`."""
        fields = {name: scalars[name] for name in asdict(cls())}
        return cls(**fields | {"best": math.inf if fields["best"] is None else fields["best"]})


class Watch:
    """Collect the losses of steps, judge each window, and back off after a bad one.

    Losses stay on the device until they are needed, and are then copied to the host together.

    solver, state : solver of the run, and its state, which a back-off changes
    good_weights : (p, c) device array, the weights to which a back-off returns
    guard : judges the windows
    scale : (c,) factors that convert errors of the solver to the unit of the user's targets
    report : called with each back-off
    curve : receives every loss
    window : (n, 4) losses of the n steps that were not judged yet, as means over the outputs: the
        loss and the loss of predicting zero in scaled targets, and both in squared units of the
        user's targets
    """

    def __init__(
        self,
        solver: Solver,
        state: State,
        good_weights: Array,
        guard: Guard,
        scale: npt.NDArray[np.float64],
        report: Callable[[str, dict[str, Any]], None],
        curve: LossCurve,
        window: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self.curve = curve
        self.solver, self.state, self.good_weights, self.guard = solver, state, good_weights, guard
        self._report = report
        self._units = np.stack([np.ones_like(scale), scale**2], axis=1) / len(scale)
        self._window = np.empty((0, 4)) if window is None else window
        self._n_read = state.steps  # losses of later steps are still in the solver

    @property
    def is_full(self) -> bool:
        """True if it is time to judge, before the solver overwrites the oldest loss."""
        return len(self._window) + self.state.steps - self._n_read >= WINDOW

    def read(self) -> npt.NDArray[np.float64]:
        """Return the window (n, 4) on the host, after waiting for the device."""
        if self._n_read < self.state.steps:
            losses = self.solver.backend.to_host(self.solver.losses)  # (LOSS_BUFFER_STEPS, 2, c)
            new_losses = losses[np.arange(self._n_read, self.state.steps) % LOSS_BUFFER_STEPS]
            with np.errstate(over="ignore", invalid="ignore"):  # they may have overflowed
                means = (new_losses @ self._units).swapaxes(1, 2).reshape(-1, 4)
            self._window = np.concatenate([self._window, means])
            self.curve.read(means[:, 2].tolist())
            self._n_read = self.state.steps
        return self._window

    def judge(self, *, is_finite: bool = True) -> float:
        """Return the mean loss of the window, 0 if it has no steps, and back off if it is bad.

        The loss is in squared units of the user's targets, averaged over the outputs.

        is_finite : False makes the window bad whatever its losses. The window of a solver without
            step sizes is bad only for this reason, or if its mean loss is not finite, since such a
            solver cannot diverge.

        Raises DivergenceError after too many bad windows, see `Guard.judge`.
        """
        window = self.read()
        means = window.mean(axis=0).tolist() if len(window) else [0.0] * 4
        loss, zero_loss, user_loss, user_zero_loss = means
        if not is_finite:
            loss = user_loss = math.nan
        self._window = self._window[:0]
        if self.solver.rules():
            is_bad = self.guard.judge(loss, zero_loss, self.solver.remedies)
        else:
            is_bad = not math.isfinite(loss)
        self.curve.end_window(is_accepted=not is_bad)
        if is_bad:
            self.solver.back_off(self.state, self.good_weights, BACK_OFF_FACTOR)
            fields = {"loss": user_loss, "zero_loss": user_zero_loss, "scale": self.state.scale}
            self._report("back-off", fields)
        elif self.guard.may_keep_weights(window[:, :2].tolist()):
            self.good_weights[...] = self.state.alpha
        return user_loss

    def pending_loss(self) -> list[float]:
        """Return [mean loss] of the steps that were not judged yet, see `judge`; [] if there are
        none."""
        window = self.read()
        with np.errstate(over="ignore", invalid="ignore"):
            return [float(window[:, 2].mean())] if len(window) else []

    def judge_pending(self) -> None:
        """Judge the last window, which the end of the run cuts short.

        A window of a few steps is judged only if the run has no more steps, because its mean is
        unreliable, or if a loss or a weight is not finite.

        Raises DivergenceError if the back-off returns to the weights with which the solver begins
        without initial weights. Warns of any other back-off at the end of the run, because no later
        step makes up for the discarded ones.
        """
        window, xp, steps = self.read(), self.solver.backend.xp, self.state.steps
        n, arrays = len(window), self.solver.arrays(self.state).values()
        is_finite = bool(np.isfinite(window).all()) and all(
            bool(xp.isfinite(a).all()) for a in arrays
        )
        is_finite = self.solver.agree(is_finite)
        if not steps or (is_finite and n < min(steps, WINDOW // 4)):
            return
        back_offs_before = self.guard.back_offs
        loss = self.judge(is_finite=is_finite)
        if self.guard.back_offs == back_offs_before:
            return
        # With the weights of a solver that has taken no step, the run has learned nothing.
        if self.solver.agree(not bool((self.good_weights != self.solver.init().alpha).any())):
            raise DivergenceError(
                f"training diverged within its {steps} steps (loss {loss:.3g})",
                f"check the data for outliers, lower {mention('solver.step_scale')} or set "
                f"{self.solver.remedies}",
            )
        warn(
            f"training diverged in its last {n} steps (loss {loss:.3g}), which are discarded: "
            f"lower {mention('solver.step_scale')} or set {self.solver.remedies}"
        )


LossEntries = Sequence[Sequence[float | None]]
"""The entries of a `LossCurve`."""


class LossCurve:
    """Mean training loss of each epoch that has ended.

    The loss of a step is the loss of the weights before the step. If a solver changes its weights
    only at the end of an epoch (`at_ends`), the steps of epoch k + 1 measure the model at the end
    of epoch k, and their loss is recorded for epoch k; `measure` sets the loss of the last epoch.

    Steps that a back-off discards do not count. The loss of an epoch without others is unknown.

    entries : a pair (sum of the loss over rows, number of rows) for each epoch, or (loss, 0) after
        `measure`; (0, 0) if all steps were discarded; None stands for numbers that are not finite
    accepted : the entries at the start of the window; None if it is empty
    """

    def __init__(
        self,
        entries: LossEntries = (),
        accepted: LossEntries | None = None,
        *,
        at_ends: bool = False,
    ) -> None:
        self._at_ends = at_ends
        self._entries = _as_floats(entries)
        self._accepted = _as_floats(entries if accepted is None else accepted)
        self._unread_steps: list[tuple[int, int]] = []

    def continue_from(
        self, entries: LossEntries, epochs: int, accepted: LossEntries | None = None
    ) -> Self:
        """Return a curve that continues from entries after `epochs` epochs.

        The losses of epochs without an entry are unknown.
        """
        n_unknown = epochs - self._at_ends - len(entries)  # one epoch less is measured `at_ends`
        padded = [*entries, *[(None, 0.0)] * n_unknown]
        return type(self)(padded, accepted, at_ends=self._at_ends)

    def record_step(self, epoch: int, rows: int) -> None:
        """Record a step on `rows` rows, whose loss is read later."""
        self._unread_steps.append((epoch - self._at_ends, rows))

    def read(self, losses: Sequence[float]) -> None:
        """Record the losses of the oldest steps whose losses are not known yet.

        Steps of an epoch that no entry belongs to, or whose entry is unknown, are left out.
        """
        for (epoch, rows), loss in zip(self._unread_steps, losses, strict=False):
            if epoch == len(self._entries):
                self._entries.append([loss * rows, rows])
            elif epoch >= 0 and (self._entries[epoch][1] or self._is_empty(epoch)):
                self._entries[epoch][0] += loss * rows
                self._entries[epoch][1] += rows
        del self._unread_steps[: len(losses)]

    def _is_empty(self, epoch: int) -> bool:
        """Return whether all steps of the epoch so far were discarded."""
        return not self._at_ends and self._entries[epoch] == [0.0, 0.0]

    def end_window(self, *, is_accepted: bool) -> None:
        """Remove the losses that were read since the last call, unless they are accepted."""
        if not is_accepted:
            n_new = len(self._entries) - len(self._accepted)
            sum_so_far = math.nan if self._at_ends else 0.0  # NaN stays unknown
            self._entries = [*self._accepted, *([sum_so_far, 0.0] for _ in range(n_new))]
        self._accepted = [entry.copy() for entry in self._entries]

    def measure(self, epoch: int, loss: float) -> None:
        """Set the loss of an epoch, measured with the model at its end."""
        self._entries[epoch:] = [[loss, 0.0]]

    def entries(self) -> list[list[float | None]]:
        """Return the entries as JSON values."""
        return _as_json(self._entries)

    def accepted_entries(self) -> list[list[float | None]]:
        """Return the entries at the start of the window, as JSON values."""
        return _as_json(self._accepted)

    def losses(self, epochs: int) -> list[float]:
        """Return the losses of the first `epochs` epochs; NaN if unknown."""
        entries = [
            [math.nan, 0.0] if self._is_empty(k) else entry
            for k, entry in enumerate(self._entries[:epochs])
        ]
        losses = [loss / rows if rows else loss for loss, rows in entries]
        return losses + [math.nan] * (epochs - len(losses))


def _as_floats(entries: LossEntries) -> list[list[float]]:
    """Return entries of a `LossCurve` as floats; None becomes NaN."""
    return [[math.nan if x is None else float(x) for x in pair] for pair in entries]


def _as_json(entries: list[list[float]]) -> list[list[float | None]]:
    """Return entries of a `LossCurve` as JSON values; numbers that are not finite become None."""
    return [[x if math.isfinite(x) else None for x in pair] for pair in entries]
