"""The ridge for a loss, found by cross-validation on the few rows of the noise.

Each row is a center. For folds of the rows and a path of falling kappa, the minimum of

    sum_i w_i l(m + g f(x_i), y_i) / (L g^2) + kappa / 2 |f|^2,    f = K alpha

is approached by accelerated steps of the majorising squares: with K = U S U^T once, and weights
U b, a step costs two products with U, whatever kappa is. As for squares
(`solver.precondition.noise`), kappa is a property of the data, and the ridge for n rows is
kappa / n: with squares it is the variance of the noise. It is not the same for a loss: Huber's sees
less noise than squares with outliers do, and the log loss has no noise but the amplitude of its
logits. A loss with a log link has no bound L; its minima are found by `NewtonPath`.
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
"""Largest number of rows that are used."""
RIDGE_FOLDS = 3
STEPS = 40
"""Steps for one kappa; the path goes on from the weights of the kappa before.

With little kappa they end before the minimum, as a run of few epochs does.
"""
STEPS_TO_MINIMUM = 200
"""Largest number of steps for one kappa of the losses with the longest way, those of quantiles, if
the solver reaches the minimum.

With 40, `direct` had .0578 of pinball loss on compactiv, and .0436 with 200, where the best ridge
has .0430 (600 rows; docs/explanation/losses.md). Solvers that end before the minimum gain nothing:
`block` had .0414 and .0415, and `falkon` .0473 and .0506.
"""
SETTLED_CHANGE = 1e-6
"""Change of the values in a step, relative to them (root mean square), with which these steps
end."""
EXPONENTS = range(3, -9, -1)
"""Powers of ten of kappa that are tried, relative to the mean k(x, x), from the largest."""
FLAT = 0.98
"""Least held-out loss over that of the largest kappa above which the rows do not tell: the noise of
squares is taken."""
SAME = 1.01
"""Held-out loss over the least one of the largest kappa that counts as no worse."""

_Floats = npt.NDArray[np.float64]


def loss_noise(loss: Loss, rows: LossRows, noise: Noise, *, exact: bool = False) -> Noise:
    """Return `noise` with the kappa of the least held-out loss as its variance.

    loss : the loss with its parameters
    noise : that for squares, whose growth is kept
    exact : whether the solver goes on to the minimum of the loss
    """
    rng = np.random.default_rng(0)
    if len(rows.Y) < RIDGE_FOLDS:
        return noise
    some = np.sort(rng.permutation(len(rows.Y))[:RIDGE_ROWS])
    rows = rows.part(some)._replace(K=rows.K[np.ix_(some, some)])
    fold = rng.permutation(len(some)) % RIDGE_FOLDS
    parts = [np.flatnonzero(fold != k) for k in range(RIDGE_FOLDS)]
    paths: list[NewtonPath | _RidgePath]
    if isinstance(loss, LogLink):
        paths = [NewtonPath(loss, rows, fitted) for fitted in parts]
    else:
        exact = exact and isinstance(loss, Quantile)
        paths = [_RidgePath(loss.at(math.inf), rows, fitted, exact) for fitted in parts]
    tried: list[tuple[float, float]] = []
    scale = float(rows.K.diagonal().mean())
    for exponent in EXPONENTS:
        kappa = scale * 10.0**exponent
        held_out = sum(path.held_out_loss(kappa) for path in paths) / rows.judged.sum()
        if not math.isfinite(held_out):
            break
        tried.append((kappa, float(held_out)))
    least = min((value for _, value in tried), default=math.inf)
    if not tried or least > FLAT * tried[0][1]:
        return noise
    borne = [kappa for kappa, value in tried if value <= SAME * least]
    return replace(noise, variance=max(borne))


class _RidgePath:
    """The minima on some rows for falling kappa, evaluated on the others.

    With weights, alpha = W^1/2 U b, and b solves the same equations with W^1/2 K W^1/2 = U S U^T.
    """

    def __init__(
        self, loss: Loss, rows: LossRows, fitted: npt.NDArray[np.int64], exact: bool
    ) -> None:  # fmt: skip
        others = np.setdiff1d(np.arange(len(rows.Y)), fitted)
        own = rows.part(fitted)
        self.loss, self.rows = loss, own
        self.steps, self.settled = (STEPS_TO_MINIMUM, SETTLED_CHANGE) if exact else (STEPS, 0.0)
        self.root = np.sqrt(own.w)[:, None]
        self.S, self.U = np.linalg.eigh(own.K[fitted] * self.root * self.root.T)
        self.S = np.maximum(self.S, 0)[:, None]
        self.of_others = rows.part(others)
        self.K_others = own.K[others] @ (self.root * self.U)
        self.b = np.zeros_like(own.Y)

    def held_out_loss(self, kappa: float) -> float:
        """Return the weighted sum of l over the other rows at the minimum for kappa."""
        self._minimise(kappa)
        others = self.of_others
        z = others.mean + others.gain * (self.K_others @ self.b)
        F = z if self.loss.for_classes else self.loss.predict(np, z)
        return float(others.judged @ self.loss.values(np, F, others.Y))

    def _minimise(self, kappa: float) -> None:
        """Move b to the minimum by accelerated steps, which begin anew if they turn back."""
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
            if change < self.settled * float(np.linalg.norm(self.S * new)):
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
