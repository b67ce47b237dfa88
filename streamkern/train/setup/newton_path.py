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

MAX_NEWTON_STEPS: Final = 30
"""Largest number of steps for one kappa."""
MAX_STEP_LENGTHS: Final = 6
"""Largest number of lengths that are tried for a step."""
CONVERGED_DECREASE: Final = 1e-4
"""Decrease of the objective in a step, relative to its value, below which the steps end."""
MIN_ROOT: Final = 1e-20
"""Smallest s of a row; rows with a smaller s do not change the step."""

_Floats = npt.NDArray[np.float64]


class NewtonPath:
    """Minima of the loss on some rows for falling kappa, and their loss on the other rows.

    rows : all rows, with targets divided by the unit of the loss
    fitted : indices of the rows that are fitted
    alpha : (n, c) weights of the last minimum, from which the next search starts
    """

    def __init__(self, loss: LogLink, rows: LossRows, fitted: npt.NDArray[np.int64]) -> None:
        held_out = np.setdiff1d(np.arange(len(rows.Y)), fitted)
        fitted_rows = rows.part(fitted)
        self.loss, self.rows, self.K = loss, fitted_rows, fitted_rows.K[fitted]
        self.held_out_rows, self.K_held_out = rows.part(held_out), fitted_rows.K[held_out]
        self.alpha = np.zeros_like(fitted_rows.Y)

    def held_out_loss(self, kappa: float) -> float:
        """Return the weighted sum of l over the held-out rows at the minimum for kappa."""
        return float(self.held_out_rows.score_w @ self.held_out_losses(kappa))

    def held_out_losses(self, kappa: float) -> _Floats:
        """Return l of each held-out row at the minimum for kappa, without weights."""
        self.minimise(kappa)
        held_out = self.held_out_rows
        z = held_out.mean + held_out.gain * (self.K_held_out @ self.alpha)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            losses: _Floats = self.loss.values(np, self.loss.predict(np, z), held_out.Y)
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
        objective = self._objective(k, alpha, f, kappa)
        for _ in range(MAX_NEWTON_STEPS):
            direction = self._newton_point(k, f, kappa) - alpha
            if not np.isfinite(direction).all():
                break
            K_direction, length = self.K @ direction, 1.0
            for _attempt in range(MAX_STEP_LENGTHS):
                new_value = self._objective(
                    k, alpha + length * direction, f + length * K_direction, kappa
                )
                if new_value < objective:
                    break
                length /= 2
            else:
                break
            alpha, f = alpha + length * direction, f + length * K_direction
            converged = objective - new_value <= CONVERGED_DECREASE * abs(new_value)
            objective = new_value
            if converged:
                break
        self.alpha[:, k] = alpha

    def _predicted(self, k: int, f: _Floats) -> _Floats:
        predicted: _Floats = self.loss.predict(np, self.rows.mean[k] + self.rows.gain[k] * f)
        return predicted

    def _objective(self, k: int, alpha: _Floats, f: _Floats, kappa: float) -> float:
        rows = self.rows
        deviances = self.loss.values(np, self._predicted(k, f)[:, None], rows.Y[:, k : k + 1])
        return float(rows.w @ deviances / 2 / rows.gain[k] ** 2 + kappa / 2 * (alpha @ f))

    def _newton_point(self, k: int, f: _Floats, kappa: float) -> _Floats:
        """Return the minimum (n,) of the quadratic model at f for output k; NaN if singular."""
        rows, F, Y = self.rows, self._predicted(k, f), self.rows.Y[:, k]
        # With the expected curvature alone, a row would move by its slope, which may be large.
        curvature = self.loss.row_curvature(np, F[:, None], Y[:, None])
        root = np.sqrt(rows.w * curvature)
        gradient = rows.w * self.loss.slope(np, F, Y) / rows.gain[k]
        root, has_curvature = np.maximum(root, MIN_ROOT), root > MIN_ROOT
        A = self.K * root * root[:, None]
        A[np.diag_indices_from(A)] += kappa
        right = np.where(has_curvature, root * f - gradient / root, 0)
        try:
            solved: _Floats = root * np.linalg.solve(A, right)
        except np.linalg.LinAlgError:
            return np.full_like(f, np.nan)
        return solved
