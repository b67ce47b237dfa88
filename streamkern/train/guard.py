"""The divergence guard: judged at fixed steps, so that it decides alike on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array
from streamkern.basics.errors import DivergenceError
from streamkern.solver.base import LOSSES, Solver, State
from streamkern.train.loss_curve import LossCurve

WINDOW = LOSSES
FACTOR = 0.5
MAX_BACK_OFFS = 8


@dataclass
class Guard:
    """Compares the mean loss of each window of `WINDOW` steps with the best so far.

    Losses are taken before the step, on rows not seen before, so they are honest, and every output
    counts in its own scale. Predicting zero inside is predicting the mean. A window is bad
    if it is not finite, if it is twice as bad as predicting zero, if it is worse than that after
    one that was half as bad, or if it is ten times the best window and a tenth of predicting zero:
    minibatch noise and hard stretches of data do none of it, an exponentially growing error does
    all within a few windows.

    Predicting zero costs what the targets are worth. Where that changes by a factor of 4, the
    targets are others than before, and a larger loss is no sign of growth: the comparison begins
    anew, and only twice the largest worth so far is too much.

    best : mean loss of the best window since the last back-off or change of the targets. worth,
    most : loss of predicting zero then, and its largest value.
    """

    best: float = math.inf
    back_offs: int = 0
    worth: float = 0.0
    most: float = 0.0

    def judge(self, loss: float, zero_loss: float, remedy: str = "a larger bandwidth") -> bool:
        """Whether the window is bad. loss : its mean; zero_loss : that of predicting zero."""
        if not 0.25 * self.worth <= zero_loss <= 4 * self.worth:
            self.best, self.worth = math.inf, zero_loss
        self.most = max(self.most, zero_loss)
        bad = (
            not math.isfinite(loss)
            or loss > 2 * self.most
            or loss > zero_loss > 2 * self.best
            or (loss > 10 * self.best and loss > 0.1 * zero_loss)
        )
        if not bad:
            self.best = min(self.best, loss)
            return False
        self.back_offs += 1
        self.best, self.most = math.inf, zero_loss  # the way back down is no growth
        if self.back_offs > MAX_BACK_OFFS:
            raise DivergenceError(
                f"training diverged and halving the step size {MAX_BACK_OFFS} times did not help "
                f"(with scaled targets loss {loss:.3g}, that of their mean {zero_loss:.3g}); "
                f"check the data for outliers, or set {remedy}"
            )
        return True

    @staticmethod
    def trusts(window: Sequence[Sequence[float]]) -> bool:
        """Whether the weights after a window that was not bad are worth going back to.

        window : (loss, loss of predicting zero) of its steps. Growth that is slow enough for the
        mean to pass has already spoilt the last steps; from there on no back-off would help.
        """
        tail = window[-max(1, len(window) // 4) :]
        return sum(loss for loss, _ in tail) <= sum(zero for _, zero in tail)

    def scalars(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON knows no infinity."""
        kept = asdict(self)
        return kept | {"best": None if math.isinf(self.best) else self.best}

    @classmethod
    def restore(cls, scalars: dict[str, Any]) -> Guard:
        """The guard that `scalars` came from."""
        kept = {name: scalars[name] for name in asdict(cls())}
        return cls(**kept | {"best": math.inf if kept["best"] is None else kept["best"]})


class Watch:
    """The losses since the last verdict, the weights to go back to, and what a verdict does.

    good : (p, c) device array. scale : (c,) of the targets. report : hears of back-offs. curve :
    gets every loss. window : (n, 4), of the steps that are not judged yet the mean over outputs of
    the loss and of that of predicting zero, first in the scale of each, then as squares of the
    user's targets. Losses stay on the device until they are needed, and come over in one piece.
    """

    def __init__(
        self,
        solver: Solver,
        state: State,
        good: Array,
        guard: Guard,
        scale: npt.NDArray[np.float64],
        report: Callable[[str, dict[str, Any]], None],
        curve: LossCurve,
        window: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self.curve = curve
        self.solver, self.state, self.good, self.guard = solver, state, good, guard
        self._report = report
        self._units = np.stack([np.ones_like(scale), scale**2], axis=1) / len(scale)
        self._window = np.empty((0, 4)) if window is None else window
        self._read = state.steps  # the losses of later ones wait in the solver

    def __len__(self) -> int:
        return len(self._window) + self.state.steps - self._read

    @property
    def full(self) -> bool:
        """Whether it is time to judge. Before the solver writes over the oldest loss."""
        return len(self) >= WINDOW

    def read(self) -> npt.NDArray[np.float64]:
        """The window, on the host; waits for the device."""
        if self._read < self.state.steps:
            losses = self.solver.backend.to_host(self.solver.losses)  # (LOSSES, 2, c)
            new = losses[np.arange(self._read, self.state.steps) % LOSSES]
            with np.errstate(over="ignore", invalid="ignore"):  # they may have overflowed
                means = (new @ self._units).swapaxes(1, 2).reshape(-1, 4)
            self._window = np.concatenate([self._window, means])
            self.curve.read(means[:, 2].tolist())
            self._read = self.state.steps
        return self._window

    def judge(self, *, finite: bool = True) -> float:
        """Mean loss of the window, and a back-off if it is bad; in squares of the user's targets,
        mean over the outputs.

        finite : False condemns the window whatever its losses are. Of a solver whose steps have no
        size nothing else does: its weights are those of least loss, or on their way there.
        """
        window = self.read()
        loss, zero, *shown = window.mean(axis=0).tolist() if len(window) else [0.0] * 4
        if not finite:
            loss = shown[0] = math.nan
        self._window = self._window[:0]
        if self.solver.rules():
            bad = self.guard.judge(loss, zero, self.solver.remedy)
        else:
            bad = not math.isfinite(loss)
        if bad:
            self.solver.backed_off(self.state, self.good, FACTOR)
            fields = {"loss": shown[0], "zero_loss": shown[1], "scale": self.state.scale}
            self._report("back-off", fields)
        elif self.guard.trusts(window[:, :2].tolist()):
            self.good[...] = self.state.alpha
        return shown[0]

    def rest(self) -> list[float]:
        """The mean loss of the steps that are not judged yet, where there are any; see `judge`."""
        window = self.read()
        with np.errstate(over="ignore", invalid="ignore"):
            return [float(window[:, 2].mean())] if len(window) else []

    def judge_rest(self) -> None:
        """Judge the window that the end of the run cuts short.

        The mean of a few steps says little, unless there are no others; NaN and infinity say all.
        """
        window, xp, steps = self.read(), self.solver.backend.xp, self.state.steps
        n, arrays = len(window), self.solver.arrays(self.state).values()
        finite = bool(np.isfinite(window).all()) and all(bool(xp.isfinite(a).all()) for a in arrays)
        finite = self.solver.agree(finite)
        if not steps or (finite and n < min(steps, WINDOW // 4)):
            return
        before = self.guard.back_offs
        loss = self.judge(finite=finite)
        if self.guard.back_offs == before:
            return
        # Back at weights that no step has moved: the run was for nothing.
        if self.solver.agree(not bool((self.good != self.solver.init().alpha).any())):
            raise DivergenceError(
                f"training diverged within its {steps} steps (loss {loss:.3g}); check the data for "
                f"outliers, lower solver.step_scale or set {self.solver.remedy}"
            )
