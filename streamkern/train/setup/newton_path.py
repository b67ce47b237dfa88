"""Minimise a loss with a log link on a few rows, by Newton steps.

Each row is a center: f = K alpha. For each output, with mean m and gain g, the minimum of

    sum_i w_i l(m + g f_i, y_i) / g^2 + kappa / 2 f^T K^-1 f

is approached by Newton steps, in which h stands for the second derivative of l (its Fisher
information, or larger, see `LogLink.row_curvature`). With s = sqrt(w h) and G = w l' / g, a step is

    alpha <- s (s K s + kappa)^-1 (s f - G / s),

halved until the objective falls.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from streamkern.losses.log_link import LogLink
from streamkern.train.setup.loss_rows import LossRows

NEWTON_STEPS: Final = 30
"""Largest number of steps for one kappa."""
HALVINGS: Final = 6
"""Largest number of lengths that are tried for a step."""
SETTLED: Final = 1e-4
"""Fall of the objective in a step, relative to its size, below which the steps end."""
MIN_ROOT: Final = 1e-20
"""Smallest s of a row; a row with less has no part in the step."""

_Floats = npt.NDArray[np.float64]


class NewtonPath:
    """Minima of the loss on some rows for falling kappa, and their loss on the other rows.

    rows : all rows, with targets divided by the unit of the loss
    fitted : indices of the rows that are fitted
    alpha : (n, c) weights of the last minimum, from which the next search starts
    """

    def __init__(self, loss: LogLink, rows: LossRows, fitted: npt.NDArray[np.int64]) -> None:
        others = np.setdiff1d(np.arange(len(rows.Y)), fitted)
        own = rows.part(fitted)
        self.loss, self.rows, self.K = loss, own, own.K[fitted]
        self.of_others, self.K_others = rows.part(others), own.K[others]
        self.alpha = np.zeros_like(own.Y)

    def held_out_loss(self, kappa: float) -> float:
        """Return the weighted sum of l over the other rows at the minimum for kappa."""
        return float(self.of_others.judged @ self.held_out_losses(kappa))

    def held_out_losses(self, kappa: float) -> _Floats:
        """Return l of each of the other rows at the minimum for kappa, without weights."""
        self.minimise(kappa)
        others = self.of_others
        z = others.mean + others.gain * (self.K_others @ self.alpha)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            losses: _Floats = self.loss.values(np, self.loss.predict(np, z), others.Y)
        return losses

    def minimise(self, kappa: float) -> None:
        """Move alpha to the minimum for kappa."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for k in range(self.alpha.shape[1]):
                self._minimise_output(k, kappa)

    def _minimise_output(self, k: int, kappa: float) -> None:
        """Minimise the objective of output k by Newton steps from `alpha`."""
        alpha = self.alpha[:, k]
        f = self.K @ alpha
        value = self._objective(k, alpha, f, kappa)
        for _ in range(NEWTON_STEPS):
            move = self._newton(k, f, kappa) - alpha
            if not np.isfinite(move).all():
                break
            of_move, length = self.K @ move, 1.0
            for _halving in range(HALVINGS):
                reached = self._objective(k, alpha + length * move, f + length * of_move, kappa)
                if reached < value:
                    break
                length /= 2
            else:
                break
            alpha, f = alpha + length * move, f + length * of_move
            settled = value - reached <= SETTLED * abs(reached)
            value = reached
            if settled:
                break
        self.alpha[:, k] = alpha

    def _predicted(self, k: int, f: _Floats) -> _Floats:
        predicted: _Floats = self.loss.predict(np, self.rows.mean[k] + self.rows.gain[k] * f)
        return predicted

    def _objective(self, k: int, alpha: _Floats, f: _Floats, kappa: float) -> float:
        rows = self.rows
        deviances = self.loss.values(np, self._predicted(k, f)[:, None], rows.Y[:, k : k + 1])
        return float(rows.w @ deviances / 2 / rows.gain[k] ** 2 + kappa / 2 * (alpha @ f))

    def _newton(self, k: int, f: _Floats, kappa: float) -> _Floats:
        """Return the minimum (n,) of the quadratic model at f for output k; NaN if singular."""
        rows, F, Y = self.rows, self._predicted(k, f), self.rows.Y[:, k]
        # With the expected curvature alone, a row would move by its slope, which may be large.
        curvature = self.loss.row_curvature(np, F[:, None], Y[:, None])
        root = np.sqrt(rows.w * curvature)
        gradient = rows.w * self.loss.slope(np, F, Y) / rows.gain[k]
        root, some = np.maximum(root, MIN_ROOT), root > MIN_ROOT
        A = self.K * root * root[:, None]
        A[np.diag_indices_from(A)] += kappa
        right = np.where(some, root * f - gradient / root, 0)
        try:
            solved: _Floats = root * np.linalg.solve(A, right)
        except np.linalg.LinAlgError:
            return np.full_like(f, np.nan)
        return solved
