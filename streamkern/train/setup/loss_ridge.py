"""Choose the ridge for a loss by cross-validation on the rows that the noise is estimated from.

Each row is a center. For each fold of the rows, and for kappa from large to small, the minimum of

    sum_i w_i l(m + g f(x_i), y_i) / (L g^2) + kappa / 2 |f|^2,    f = K alpha

is approximated, where m and g are mean and gain of the outputs, and L bounds the curvature of l.
Accelerated steps minimise the quadratic upper bound of the loss with curvature L. K = U S U^T is
factored once; with alpha = U b, a step then costs two products with U for any kappa.

As for squares (`solver.precondition.noise`), kappa is a property of the data, and the ridge for n
rows is kappa / n. For squares, kappa is the variance of the noise. For another loss it differs:
with outliers, Huber's loss has a smaller kappa than squares, and for the log loss kappa depends on
the size of the logits.

For the log loss, the kappa of squares refines the kappa of the folds: it lies between tens, and
follows from leave-one-out errors of more rows than the folds fit. More values of kappa do not help,
since the held-out losses are too noisy; docs/explanation/losses-measured.md has the measurements.

A loss with a log link has no bound L, and its minima are approached by Newton steps. For each
output, h stands for the second derivative of l (its Fisher information, or larger, see
`LogLink.row_curvature`). The objective is

    sum_i w_i l(m + g f_i, y_i) / g^2 + kappa / 2 f^T K^-1 f,

and with s = sqrt(w h) and G = w l' / g, a step is

    alpha <- s (s K s + kappa)^-1 (s f - G / s),

halved until the objective falls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats, Ints
from streamkern.losses.base import Loss
from streamkern.losses.errors import Quantile
from streamkern.losses.log_link import LogLink
from streamkern.losses.log_loss import LogLoss
from streamkern.solver.precondition.noise import Noise
from streamkern.stream.target_scale import TargetScale

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
solver of the run reaches the minimum; see docs/explanation/loss-method.md."""
CONVERGED_CHANGE = 1e-6
"""Relative change of the values f in a step (in the 2-norm) below which these steps end."""
KAPPA_EXPONENTS = range(3, -9, -1)
"""Each kappa is 10 to one of these powers, times the mean of k(x, x); the largest comes first."""
MAX_RELATIVE_MINIMUM = 0.98
"""If the least held-out loss is above this multiple of the loss for the largest kappa, the rows do
not determine kappa, and the noise of squares is used."""
EQUIVALENT_LOSS_RATIO = 1.01
"""The largest kappa is chosen whose held-out loss is at most this multiple of the least."""
MAX_KAPPAS_AFTER_LEAST = 2
"""Number of consecutive kappas, each with a held-out loss above `EQUIVALENT_LOSS_RATIO` times the
least one, after which the search ends."""
MAX_REFINEMENT = math.sqrt(10.0)
"""Largest factor by which the kappa of squares changes a kappa of the log loss: half the distance
of two tens."""
MAX_NEWTON_STEPS = 30
"""Largest number of Newton steps for one kappa."""
MAX_STEP_LENGTHS = 6
"""Largest number of lengths that are tried for a Newton step."""
CONVERGED_DECREASE = 1e-4
"""Decrease of the objective in a step, relative to its value, below which Newton steps end."""
MIN_ROOT = 1e-20
"""Smallest s of a row in a Newton step; rows with a smaller s do not change the step."""


class LossRows(NamedTuple):
    """Rows in float64, with their original targets.

    K : (n, n) kernel matrix, without weights
    Y : (n, c) targets
    w : (n,) sample weights
    score_w : (n,) sample weights in held-out losses, 0 for rows whose target is an outlier
    mean, gain : (c,) mean and gain of the outputs z = mean + gain f
    """

    K: Floats
    Y: Floats
    w: Floats
    score_w: Floats
    mean: Floats
    gain: Floats

    def part(self, rows: Ints) -> LossRows:
        """Return some of the rows. K keeps all rows of the matrix: it becomes (n, len(rows))."""
        w, score_w = self.w[rows], self.score_w[rows]
        return self._replace(K=self.K[:, rows], Y=self.Y[rows], w=w, score_w=score_w)

    def with_outputs(self, outputs: TargetScale) -> LossRows:
        """Return the rows with this mean and gain of the outputs."""
        return self._replace(mean=outputs.mean, gain=outputs.scale)


def loss_noise(loss: Loss, rows: LossRows, noise: Noise, *, exact: bool = False) -> Noise:
    """Return `noise` with the largest kappa of about the least held-out loss as its variance.

    Returns `noise` unchanged if the rows do not determine kappa, see `MAX_RELATIVE_MINIMUM`, or are
    too few.

    For the log loss, the variance is the geometric mean of this kappa and `noise.variance`, within
    a factor `MAX_REFINEMENT` of this kappa.

    loss : the loss with its parameters
    noise : noise for squares; its other fields are kept
    exact : whether the solver of the run reaches the minimum of the loss
    """
    losses = losses_by_kappa(loss, rows, exact=exact)
    least_loss = min((value for _, value in losses), default=math.inf)
    if not losses or least_loss > MAX_RELATIVE_MINIMUM * losses[0][1]:
        return noise
    equivalent = [kappa for kappa, value in losses if value <= _equivalent_limit(least_loss)]
    kappa = max(equivalent)
    if isinstance(loss, LogLoss) and noise.trials:
        factor = math.sqrt(noise.variance / kappa)
        kappa *= min(max(factor, 1 / MAX_REFINEMENT), MAX_REFINEMENT)
    return replace(noise, variance=kappa)


def _equivalent_limit(least_loss: float) -> float:
    """Return the largest loss that counts as equal to the least one, which a user's loss may make
    negative."""
    ratio = EQUIVALENT_LOSS_RATIO if least_loss >= 0 else 1 / EQUIVALENT_LOSS_RATIO
    return ratio * least_loss


def losses_by_kappa(
    loss: Loss, rows: LossRows, *, exact: bool = False
) -> list[tuple[float, float]]:
    """Return each kappa, from the largest, with its mean held-out loss.

    The list ends before the first loss that is not finite, or when the losses grow
    (`MAX_KAPPAS_AFTER_LEAST`). It is empty if there are too few rows. For the parameters, see
    `loss_noise`.
    """
    if len(rows.Y) < RIDGE_FOLDS:
        return []
    rows, parts = fold_rows(rows)
    paths: Sequence[_LossPath]
    if isinstance(loss, LogLink):
        paths = [NewtonPath(loss, rows, fitted) for fitted in parts]
    else:
        exact = exact and isinstance(loss, Quantile)
        paths = [_BoundedPath(loss.at(math.inf), rows, fitted, exact) for fitted in parts]
    losses: list[tuple[float, float]] = []
    scale, least_loss, n_after_least = float(rows.K.diagonal().mean()), math.inf, 0
    for exponent in KAPPA_EXPONENTS:
        kappa = scale * 10.0**exponent
        held_out = sum(path.held_out_loss(kappa) for path in paths) / rows.score_w.sum()
        if not math.isfinite(held_out):
            break
        losses.append((kappa, float(held_out)))
        least_loss = min(least_loss, held_out)
        # The losses of few rows may rise before they fall to their minimum. If a user's loss is
        # negative, ratios do not tell a minimum.
        has_minimum = 0 <= least_loss <= MAX_RELATIVE_MINIMUM * losses[0][1]
        is_worse = has_minimum and held_out > _equivalent_limit(least_loss)
        n_after_least = n_after_least + 1 if is_worse else 0
        if n_after_least == MAX_KAPPAS_AFTER_LEAST:
            break
    return losses


def fold_rows(rows: LossRows) -> tuple[LossRows, list[Ints]]:
    """Return at most `RIDGE_ROWS` of the rows, and the indices of the fitted rows of each fold."""
    rng = np.random.default_rng(0)
    sampled = np.sort(rng.permutation(len(rows.Y))[:RIDGE_ROWS])
    rows = rows.part(sampled)._replace(K=rows.K[np.ix_(sampled, sampled)])
    fold = rng.permutation(len(sampled)) % RIDGE_FOLDS
    return rows, [np.flatnonzero(fold != k) for k in range(RIDGE_FOLDS)]


class _LossPath:
    """Minima of the loss on some rows for falling kappa, and their loss on the other rows.

    fitted : indices of the rows that are fitted
    K : (n, n) kernel matrix of the n fitted rows
    K_held_out : (m, n) kernel matrix of the m other rows with the fitted ones
    alpha : (n, c) weights of the last minimum, from which the next search starts
    """

    def __init__(self, loss: Loss, rows: LossRows, fitted: Ints) -> None:
        held_out = np.setdiff1d(np.arange(len(rows.Y)), fitted)
        self.loss, self.rows, self.held_out_rows = loss, rows.part(fitted), rows.part(held_out)
        self.K, self.K_held_out = self.rows.K[fitted], self.rows.K[held_out]
        self.alpha = np.zeros_like(self.rows.Y)

    def minimise(self, kappa: float) -> None:
        """Move alpha to the minimum for kappa, or towards it."""
        raise NotImplementedError

    def held_out_losses(self, kappa: float) -> Floats:
        """Return l of each held-out row at the minimum for kappa, without weights."""
        self.minimise(kappa)
        rows = self.held_out_rows
        z = rows.mean + rows.gain * (self.K_held_out @ self.alpha)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            F = z if self.loss.for_classes else self.loss.predict(np, z)
            losses: Floats = self.loss.values(np, F, rows.Y)
        return losses

    def held_out_loss(self, kappa: float) -> float:
        """Return the weighted sum of `held_out_losses`."""
        return float(self.held_out_rows.score_w @ self.held_out_losses(kappa))


class _BoundedPath(_LossPath):
    """Path of a loss whose curvature is bounded, by accelerated gradient steps.

    With sample weights W, the weights of the rows are W^1/2 U b, where W^1/2 K W^1/2 = U S U^T. The
    attribute `alpha` is b, and `K_held_out` the matrix from b to the values of the held-out rows.

    exact : whether the steps continue until they converge
    """

    def __init__(self, loss: Loss, rows: LossRows, fitted: Ints, exact: bool) -> None:
        super().__init__(loss, rows, fitted)
        self.steps = MAX_STEPS_TO_MINIMUM if exact else STEPS_PER_KAPPA
        self.min_change = CONVERGED_CHANGE if exact else 0.0
        self.root = np.sqrt(self.rows.w)[:, None]
        self.S, self.U = np.linalg.eigh(self.K * self.root * self.root.T)
        self.S = np.maximum(self.S, 0)[:, None]
        self.K_held_out = self.K_held_out @ (self.root * self.U)

    def minimise(self, kappa: float) -> None:
        """Move b towards the minimum by accelerated gradient steps.

        The acceleration is restarted when a step opposes the gradient (O'Donoghue and Candes 2015,
        Adaptive Restart for Accelerated Gradient Schemes).
        """
        b = ahead = self.alpha  # `ahead` is the point at which the gradient is evaluated
        t = 1.0  # the sequence t_k of Nesterov's method
        for _ in range(self.steps):
            gradient = self.U.T @ self._residual(ahead) + kappa * ahead
            next_b = ahead - gradient / (self.S + kappa)
            if float(((ahead - next_b) * self.S * (next_b - b)).sum()) > 0:
                t, next_ahead = 1.0, next_b
            else:
                next_t = (1 + math.sqrt(1 + 4 * t * t)) / 2
                next_ahead = next_b + (t - 1) / next_t * (next_b - b)
                t = next_t
            change = float(np.linalg.norm(self.S * (next_b - b)))
            b, ahead = next_b, next_ahead
            if change < self.min_change * float(np.linalg.norm(self.S * b)):
                break
        self.alpha = b

    def _residual(self, b: Floats) -> Floats:
        """Return W^1/2 l'(z) / (L g), (n, c)."""
        rows, loss = self.rows, self.loss
        f = (self.U @ (self.S * b)) / np.where(self.root > 0, self.root, 1)
        errors = loss.predict(np, rows.mean + rows.gain * f) - rows.Y
        gradient = loss.gradient(np, errors, rows.Y)
        residual: Floats = self.root * gradient / (loss.curvature * rows.gain)
        return residual


class NewtonPath(_LossPath):
    """Path of a loss with a log link, by Newton steps.

    rows : rows with targets divided by the unit of the loss
    """

    loss: LogLink

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
            else:  # no length lowers the objective: it is minimal up to rounding errors
                break
            alpha, f = alpha + length * direction, f + length * K_direction
            converged = objective - new_value <= CONVERGED_DECREASE * abs(new_value)
            objective = new_value
            if converged:
                break
        self.alpha[:, k] = alpha

    def _predictions(self, k: int, f: Floats) -> Floats:
        """Return the predictions (n,) of output k from the values f (n,) of the model."""
        predictions: Floats = self.loss.predict(np, self.rows.mean[k] + self.rows.gain[k] * f)
        return predictions

    def _objective(self, k: int, alpha: Floats, f: Floats, kappa: float) -> float:
        """Return the objective of the module docstring for output k, where f = K alpha."""
        rows = self.rows
        deviances = self.loss.values(np, self._predictions(k, f)[:, None], rows.Y[:, k : k + 1])
        return float(rows.w @ deviances / 2 / rows.gain[k] ** 2 + kappa / 2 * (alpha @ f))

    def _newton_point(self, k: int, f: Floats, kappa: float) -> Floats:
        """Return the minimum (n,) of the quadratic model at f for output k; NaN if singular."""
        rows, F, Y = self.rows, self._predictions(k, f), self.rows.Y[:, k]
        # With the expected curvature alone, a row would move by its slope, which may be large.
        curvature = self.loss.row_curvature(np, F[:, None], Y[:, None])
        root = np.sqrt(rows.w * curvature)
        gradient = rows.w * self.loss.slope(np, F, Y) / rows.gain[k]
        root, has_curvature = np.maximum(root, MIN_ROOT), root > MIN_ROOT
        A = self.K * root * root[:, None]
        A[np.diag_indices_from(A)] += kappa
        right_side = np.where(has_curvature, root * f - gradient / root, 0)
        try:
            alpha: Floats = root * np.linalg.solve(A, right_side)
        except np.linalg.LinAlgError:
            return np.full_like(f, np.nan)
        return alpha
