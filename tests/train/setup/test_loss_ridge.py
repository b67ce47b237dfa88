"""Test the ridge for a loss: against minima by SciPy, and its growth with the noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from streamkern.losses.base import Loss
from streamkern.losses.errors import Huber, Quantile
from streamkern.losses.log_loss import LogLoss
from streamkern.solver.precondition.noise import NO_NOISE, Noise
from streamkern.train.setup import loss_ridge
from streamkern.train.setup.loss_ridge import (
    KAPPA_EXPONENTS,
    RIDGE_FOLDS,
    LossRows,
    loss_noise,
    losses_by_kappa,
)

LOSSES: dict[str, Loss] = {
    "log_loss": LogLoss(),
    "huber": Huber(delta=[0.5, 0.5]),
    "quantile": Quantile(quantile=0.8, width=[0.3, 0.3]),
}


def noisy_rows(name: str, noise: float, weighted: bool = False, n: int = 120) -> LossRows:
    """Return rows of a curve with noise, with two outputs."""
    rng = np.random.default_rng(8)
    points = rng.standard_normal((n, 1))
    Y = (np.sin(3 * points) + noise * rng.standard_normal((n, 1))) @ [[1.0, -1.0]]
    if name == "log_loss":
        Y = (Y > 0).astype(float)
    w = rng.integers(1, 3, n).astype(float) if weighted else np.ones(n)
    return LossRows(np.exp(-cdist(points, points)), Y, w, w, np.zeros(2), np.ones(2))


@pytest.mark.parametrize("name", LOSSES)
def test_ridge_increases_with_noise(name: str) -> None:
    actual = [
        loss_noise(LOSSES[name], noisy_rows(name, noise), NO_NOISE).variance for noise in (0.01, 1)
    ]
    assert actual[0] < actual[1]


@pytest.mark.parametrize("name", LOSSES)
def test_weight_acts_as_repeated_rows(name: str) -> None:
    """Check that weights multiplied by 10 multiply the noise by 10 for the same curve."""
    rows = noisy_rows(name, 1.0, weighted=True)
    variance, scaled_variance = (
        loss_noise(LOSSES[name], rows._replace(w=times * rows.w), NO_NOISE).variance
        for times in (1, 10)
    )
    assert scaled_variance == pytest.approx(10 * variance)


@pytest.mark.parametrize("name", ["log_loss", "quantile"])
def test_ridge_minimises_held_out_loss_of_exact_minima(name: str) -> None:
    """Compare with SciPy's minima for every fold and noise, and their losses on the fold.

    For an outer quantile, few steps end far before them: then a tenth of this noise is found.
    """
    outer = Quantile(quantile=0.95, width=[0.05, 0.05])
    loss = outer if name == "quantile" else LOSSES[name]
    rows = noisy_rows(name, 1.0, weighted=True, n=60)
    actual = loss_noise(loss, rows, NO_NOISE, exact=True).variance
    rng = np.random.default_rng(0)
    rng.permutation(60)  # the order of the rows, drawn before the folds
    fold = rng.permutation(60) % RIDGE_FOLDS

    def held_out(kappa: float) -> float:
        return sum(_fold_loss(loss, rows, fold != k, kappa) for k in range(RIDGE_FOLDS))

    nearby = [held_out(actual * 10.0**exponent) for exponent in (-1, 0, 1)]
    assert nearby[1] <= 1.002 * min(nearby)


def _fold_loss(loss: Loss, rows: LossRows, fitted: np.ndarray, kappa: float) -> float:
    K, Y, w = rows.K[fitted][:, fitted], rows.Y[fitted], rows.w[fitted]
    final = loss.at(math.inf)
    L = float(np.max(final.curvature))

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        alpha = flat.reshape(Y.shape)
        z = K @ alpha
        errors = loss.predict(np, z.copy()) - Y
        value = w @ _minimised(final, z, errors, Y) / L + kappa / 2 * (alpha * z).sum()
        slope = w[:, None] * final.gradient(np, errors, Y) / L + kappa * alpha
        return float(value), (K @ slope).reshape(-1)

    options = {"maxiter": 5000, "ftol": 1e-13, "gtol": 1e-8}
    minimum = minimize(objective, np.zeros(Y.size), jac=True, method="L-BFGS-B", options=options)
    F = rows.K[~fitted][:, fitted] @ minimum.x.reshape(Y.shape)
    return float(rows.w[~fitted] @ loss.values(np, F, rows.Y[~fitted]))


def _minimised(loss: Loss, z: np.ndarray, errors: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """Return the losses that steps minimise; for a quantile, this is the integral of the ramp."""
    if not isinstance(loss, Quantile):
        return loss.values(np, z, Y)
    h, size = np.asarray(loss.width), np.abs(errors)
    ramp = np.where(size < h, errors**2 / (4 * h) + h / 4, size / 2)
    return (ramp + (0.5 - np.asarray(loss.quantile)) * errors).sum(axis=1)


@pytest.mark.parametrize("name", LOSSES)
def test_search_ends_after_least_loss_and_finds_same_ridge(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = noisy_rows(name, 1.0)
    actual = loss_noise(LOSSES[name], rows, NO_NOISE).variance
    n_tried = len(losses_by_kappa(LOSSES[name], rows))
    monkeypatch.setattr(loss_ridge, "MAX_KAPPAS_AFTER_LEAST", math.inf)
    assert n_tried < len(losses_by_kappa(LOSSES[name], rows)) == len(KAPPA_EXPONENTS)
    assert loss_noise(LOSSES[name], rows, NO_NOISE).variance == actual


@pytest.mark.parametrize(("offset", "n_tried"), [(0.0, 7), (-5.0, len(KAPPA_EXPONENTS))])
def test_search_continues_while_losses_rise_before_their_minimum(
    offset: float, n_tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a curve that rises first, also of a loss with negative values."""
    rows = noisy_rows("huber", 1.0)
    rises_first = [1.79, 1.84, 2.06, 1.82, 1.5, *[1.8, 2.0, 2.2] * len(KAPPA_EXPONENTS)]
    curve = np.add(rises_first, offset) * rows.score_w.sum() / RIDGE_FOLDS

    class Path:
        """A path of fits whose held-out losses are those of the curve."""

        def __init__(self, *_arguments: object) -> None:
            self._losses = iter(curve)

        def held_out_loss(self, _kappa: float) -> float:
            return next(self._losses)

    monkeypatch.setattr(loss_ridge, "_BoundedPath", Path)
    losses = losses_by_kappa(LOSSES["huber"], rows)
    assert len(losses) == n_tried  # two after the minimum
    assert loss_noise(LOSSES["huber"], rows, NO_NOISE).variance == losses[4][0]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("factor", "change"), [(4.0, 2.0), (0.25, 0.5), (1e4, math.sqrt(10)), (0.0, math.sqrt(0.1))]
)
def test_noise_of_squares_refines_ridge_of_log_loss_only(
    name: str, factor: float, change: float
) -> None:
    rows = noisy_rows(name, 1.0)
    kappa = loss_noise(LOSSES[name], rows, NO_NOISE).variance
    squares = Noise(variance=factor * kappa, trials=[(factor * kappa, 1.0)])
    expected = kappa * change if name == "log_loss" else kappa
    assert loss_noise(LOSSES[name], rows, squares).variance == pytest.approx(expected)


def test_too_few_rows_keep_noise_of_squares() -> None:
    rows, noise = noisy_rows("huber", 1.0, n=RIDGE_FOLDS - 1), Noise(variance=0.5)
    assert loss_noise(LOSSES["huber"], rows, noise) is noise


def test_overflowing_losses_end_the_path() -> None:
    rows = noisy_rows("huber", 1.0)
    noise = Noise(variance=0.5)
    assert loss_noise(LOSSES["huber"], rows._replace(mean=np.full(2, math.inf)), noise) is noise
