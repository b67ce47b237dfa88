"""Counts and amounts, and the objective of a loss with a log link in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.spatial.distance import cdist
from sklearn.metrics import mean_gamma_deviance, mean_poisson_deviance

N, P = 200, 40
RNG = np.random.default_rng(4)
X = RNG.standard_normal((N, 3)).astype(np.float32)
RATES = np.exp(np.sin(2 * X[:, 0]) + X[:, 1])
TARGETS = {
    "poisson": RNG.poisson(RATES).astype(float),
    "gamma": 1000 * RATES * RNG.gamma(1.0, size=N) + 1e-3,
}
DEVIANCES: dict[str, Any] = {"poisson": mean_poisson_deviance, "gamma": mean_gamma_deviance}
LOSSES = sorted(TARGETS)


def of_loss(name: str, **overrides: Any) -> dict[str, Any]:
    """Return the settings of a run with the loss."""
    return {
        "solver.name": "block", "model.loss": name, "model.n_centers": P, "model.metric": "none",
        "solver.ridge": "auto",
    } | overrides  # fmt: skip


def penalised(model: Any, Z: np.ndarray, Y: np.ndarray, ridge: float) -> Any:
    """Return the objective of the weights and its gradient, in float64."""
    loss, targets, c = model.loss, model.targets, Y.shape[1]
    K, of_centers = (np.exp(-cdist(a, Z) / 3.0) for a in (np.float64(X), Z))
    Y, mean = Y / loss.unit, targets.mean - np.log(loss.unit)

    def objective(flat: Any) -> tuple[float, Any]:
        alpha = flat.reshape(-1, c)
        F = loss.predict(np, mean + targets.scale * (K @ alpha))
        of_outputs = [
            loss.values(np, F[:, k : k + 1], Y[:, k : k + 1]).mean() / 2 for k in range(c)
        ]
        slope = K.T @ (loss.slope(np, F.copy(), Y) / targets.scale) / N
        slope += ridge * (of_centers @ alpha)
        penalty = ridge / 2 * float((alpha * (of_centers @ alpha)).sum())
        return float(of_outputs @ (1 / targets.scale**2)) + penalty, slope.reshape(-1)

    return objective


def excess_over_minimum(
    model: Any, Z: np.ndarray, alpha: np.ndarray, Y: np.ndarray, ridge: float = 1e-2
) -> float:
    """Return the objective of the weights minus SciPy's minimum in float64, divided by the same
    difference for the mean."""
    objective, zero = penalised(model, Z, Y, ridge), np.zeros(alpha.size)
    options = {"maxiter": 5000, "maxfun": 10**6, "ftol": 1e-15, "gtol": 1e-9}
    best = minimize(objective, zero, jac=True, method="L-BFGS-B", options=options).fun
    reached = objective(alpha.reshape(-1))[0]
    return float((reached - best) / (objective(zero)[0] - best))
