"""Choose the ridge for a loss by cross-validation on the rows that the noise is estimated from.

Each row is a center. For each fold of the rows, and for kappa from large to small, the minimum of

    sum_i w_i l(m + g f(x_i), y_i) / (L g^2) + kappa / 2 |f|^2,    f = K alpha

is approximated, where m and g are mean and gain of the outputs, and L bounds the curvature of l.
Accelerated steps minimise the quadratic upper bound of the loss with curvature L. K = U S U^T is
factored once; with alpha = U b, a step then costs two products with U for any kappa.

As for squares (`solver.precondition.noise`), kappa is a property of the data, and the ridge for n
rows is kappa / n. For squares, kappa is the variance of the noise. For another loss it differs:
with outliers, Huber's loss has a smaller kappa than squares, and for the log loss kappa depends on
the size of the logits. A loss with a log link has no bound L; `NewtonPath` finds its minima.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from streamkern.losses.base import Loss
from streamkern.losses.errors import Quantile
from streamkern.losses.log_link import LogLink
from streamkern.solver.precondition.noise import Noise
from streamkern.train.setup.loss_rows import LossRows
from streamkern.train.setup.newton_path import NewtonPath

RIDGE_ROWS = 768
"""Largest number of rows, drawn at random, that the cross-validation uses."""
RIDGE_FOLDS = 3
"""Number of folds of the cross-validation."""
STEPS_PER_KAPPA = 40
"""Number of steps for one kappa, which start from the weights for the next larger kappa.

For a small kappa, the steps end before the minimum, as a run of few epochs does.
"""
MAX_STEPS_TO_MINIMUM = 200
"""Largest number of steps for one kappa of a quantile loss, which converges most slowly, if the
solver of the run reaches the minimum; see docs/explanation/losses.md."""
CONVERGED_CHANGE = 1e-6
"""Relative change of the values f in a step (in the 2-norm) below which these steps end."""
KAPPA_EXPONENTS = range(3, -9, -1)
"""Each kappa is 10 to one of these powers, times the mean of k(x, x); the largest comes first."""
MAX_RELATIVE_MINIMUM = 0.98
"""If the least held-out loss is above this multiple of the loss for the largest kappa, the rows do
not determine kappa, and the noise of squares is used."""
EQUIVALENT_LOSS_RATIO = 1.01
"""The largest kappa is chosen whose held-out loss is at most this multiple of the least."""

_Floats = npt.NDArray[np.float64]


def loss_noise(loss: Loss, rows: LossRows, noise: Noise, *, exact: bool = False) -> Noise:
    """Return `noise` with the kappa of the least held-out loss as its variance.

    loss : the loss with its parameters
    noise : noise for squares; its other fields are kept
    exact : whether the solver of the run reaches the minimum of the loss
    """
    losses = held_out_losses(loss, rows, exact=exact)
    least_loss = min((value for _, value in losses), default=math.inf)
    if not losses or least_loss > MAX_RELATIVE_MINIMUM * losses[0][1]:
        return noise
    equivalent = [kappa for kappa, value in losses if value <= EQUIVALENT_LOSS_RATIO * least_loss]
    return replace(noise, variance=max(equivalent))


def held_out_losses(
    loss: Loss, rows: LossRows, *, exact: bool = False
) -> list[tuple[float, float]]:
    """Return each kappa, from the largest, with its mean held-out loss.

    The list ends before the first loss that is not finite, and is empty if there are too few rows.
    For the parameters, see `loss_noise`.
    """
    if len(rows.Y) < RIDGE_FOLDS:
        return []
    rows, parts = fold_rows(rows)
    paths: list[NewtonPath | _RidgePath]
    if isinstance(loss, LogLink):
        paths = [NewtonPath(loss, rows, fitted) for fitted in parts]
    else:
        exact = exact and isinstance(loss, Quantile)
        paths = [_RidgePath(loss.at(math.inf), rows, fitted, exact) for fitted in parts]
    losses: list[tuple[float, float]] = []
    scale = float(rows.K.diagonal().mean())
    for exponent in KAPPA_EXPONENTS:
        kappa = scale * 10.0**exponent
        held_out = sum(path.held_out_loss(kappa) for path in paths) / rows.score_w.sum()
        if not math.isfinite(held_out):
            break
        losses.append((kappa, float(held_out)))
    return losses


def fold_rows(rows: LossRows) -> tuple[LossRows, list[npt.NDArray[np.int64]]]:
    """Return at most `RIDGE_ROWS` of the rows, and the indices of the fitted rows of each fold."""
    rng = np.random.default_rng(0)
    sampled = np.sort(rng.permutation(len(rows.Y))[:RIDGE_ROWS])
    rows = rows.part(sampled)._replace(K=rows.K[np.ix_(sampled, sampled)])
    fold = rng.permutation(len(sampled)) % RIDGE_FOLDS
    return rows, [np.flatnonzero(fold != k) for k in range(RIDGE_FOLDS)]


class _RidgePath:
    """Minima of the loss on some rows for falling kappa, and their loss on the other rows.

    With sample weights W, alpha = W^1/2 U b and W^1/2 K W^1/2 = U S U^T.

    fitted : indices of the rows that are fitted
    exact : whether the steps continue until they converge
    """

    def __init__(
        self, loss: Loss, rows: LossRows, fitted: npt.NDArray[np.int64], exact: bool
    ) -> None:  # fmt: skip
        held_out = np.setdiff1d(np.arange(len(rows.Y)), fitted)
        fitted_rows = rows.part(fitted)
        self.loss, self.rows = loss, fitted_rows
        self.steps, self.min_change = (
            (MAX_STEPS_TO_MINIMUM, CONVERGED_CHANGE) if exact else (STEPS_PER_KAPPA, 0.0)
        )
        self.root = np.sqrt(fitted_rows.w)[:, None]
        self.S, self.U = np.linalg.eigh(fitted_rows.K[fitted] * self.root * self.root.T)
        self.S = np.maximum(self.S, 0)[:, None]
        self.held_out_rows = rows.part(held_out)
        self.K_held_out = fitted_rows.K[held_out] @ (self.root * self.U)
        self.b = np.zeros_like(fitted_rows.Y)

    def held_out_loss(self, kappa: float) -> float:
        """Return the weighted sum of l over the other rows at the minimum for kappa."""
        self._minimise(kappa)
        held_out = self.held_out_rows
        z = held_out.mean + held_out.gain * (self.K_held_out @ self.b)
        F = z if self.loss.for_classes else self.loss.predict(np, z)
        return float(held_out.score_w @ self.loss.values(np, F, held_out.Y))

    def _minimise(self, kappa: float) -> None:
        """Move b towards the minimum by accelerated gradient steps.

        The acceleration is restarted when a step opposes the gradient (O'Donoghue and Candes 2015,
        Adaptive Restart for Accelerated Gradient Schemes).
        """
        b = ahead = self.b
        t = 1.0
        for _ in range(self.steps):
            new = ahead - (self.U.T @ self._residual(ahead) + kappa * ahead) / (self.S + kappa)
            if float(((ahead - new) * self.S * (new - b)).sum()) > 0:
                t, following = 1.0, new
            else:
                next_t = (1 + math.sqrt(1 + 4 * t * t)) / 2
                following = new + (t - 1) / next_t * (new - b)
                t = next_t
            change = float(np.linalg.norm(self.S * (new - b)))
            b, ahead = new, following
            if change < self.min_change * float(np.linalg.norm(self.S * new)):
                break
        self.b = b

    def _residual(self, b: _Floats) -> _Floats:
        """Return W^1/2 l'(z) / (L g), (n, c)."""
        rows, loss = self.rows, self.loss
        f = (self.U @ (self.S * b)) / np.where(self.root > 0, self.root, 1)
        errors = loss.predict(np, rows.mean + rows.gain * f) - rows.Y
        gradient = loss.gradient(np, errors, rows.Y)
        residual: _Floats = self.root * gradient / (loss.curvature * rows.gain)
        return residual
