"""Gradient steps on a metric that lower the error of kernel ridge regression on other rows.

The method is kernel flows (Owhadi and Yoo 2019, arXiv 1808.04475) with the squared error of rows
that are not fitted. Each step draws rows X with targets Y to fit, and other rows to predict. With
the ridge lam, f = K(., X) a with (K + lam I) a = Y, and

    L = mean |f(x) - y|^2 over other rows,      v = (K + lam I)^-1 K(X, others) dL/df,

    dL/dK = -v a^T,   dL/dK(others, X) = dL/df a^T,   dL/dlam = -v^T a.

The kernel is a function phi of the squared distance s = |u - u'|^2 of rows u = A^T x / bandwidth,
where A is a root of the metric M = A A^T. With W = dL/dK phi'(s), entry by entry,

    dL/dA = 2 / bandwidth  sum_ij W_ij (x_i - x_j)(u_i - u_j)^T.

Since each step draws new rows, the noise of a few rows averages out and is not learned. The
steps follow Adam (Kingma and Ba 2015, arXiv 1412.6980), except that the squared gradients are
averaged along each row of A, that is, over the entries of one feature. Neither a step length for
each entry nor one for all of A was as good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.basics.array_types import Floats
from streamkern.kernels.base import Kernel
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.slope import Slope
from streamkern.planning.memory import (
    MAX_FULL_METRIC_FEATURES,
    METRIC_STEP_FIT_ROWS,
    METRIC_STEP_PREDICTED_ROWS,
)
from streamkern.solver.precondition.samples import SampleRows
from streamkern.train.setup.held_out_models import (
    MIN_RIDGE_LOG10,
    MIN_SINGLE_PRECISION_RIDGE,
    HeldOutModel,
)

GRADIENT_DECAY, SQUARES_DECAY = 0.8, 0.95
"""Decay rates of the running means of the gradients and of their squares (beta_1, beta_2 of
Adam)."""
RIDGE_STEP_RATIO = 5.0
"""Step length of log lam, relative to the step length of A."""
RELATIVE_ROUNDING = 1e-10
"""Gradients below this multiple of the largest gradient count as rounding errors; features that
hardly vary have such gradients."""
MAX_RELATIVE_RESIDUAL = 5.0
"""Largest length of a row's residual, relative to the median. Longer residuals are shortened in the
gradient, so that a few extreme rows do not dominate the steps."""
TINY_GRADIENT_SQUARE, TINY_RESIDUAL = 1e-300, 1e-30
"""Smallest values of denominators."""
SLOPE_TILE = 128
"""Number of rows whose kernel values are computed at once."""


class StepStage(NamedTuple):
    """A number of steps with the same sizes.

    n_fit : number of rows that a step fits
    n_predicted : number of rows that it predicts
    pool : largest number of rows to draw from
    n_steps : number of steps
    length : length of the first steps relative to the root mean square of A's entries; in the
        second half of the stage it falls linearly to zero
    """

    n_fit: int
    n_predicted: int
    pool: int
    n_steps: int
    length: float


STAGES = (
    StepStage(384, 768, 3072, 120, 0.1),
    StepStage(768, 1536, 5120, 120, 0.07),
    StepStage(METRIC_STEP_FIT_ROWS, METRIC_STEP_PREDICTED_ROWS, 8192, 60, 0.05),
)
"""Each stage begins where the stage before it ended. It is run only if there are more rows than the
pool of the stage before it."""


def stages(pool: int) -> list[StepStage]:
    """Return the stages of gradient steps that are run with `pool` rows to draw from."""
    return [STAGES[0], *(stage for previous, stage in pairwise(STAGES) if pool > previous.pool)]


def metrics_of_steps(
    model: HeldOutModel, rows: SampleRows, kind: str, seed: int
) -> Iterator[tuple[Kernel, int]]:
    """Yield, after each stage, the kernel in the metric, scaled to trace d, and the number of steps
    so far.

    Yields nothing if these steps do not exist for the kernel or its metric, see `_initial_root`.
    Ends before the last stage if a derivative is not finite, or if the metric becomes 0.

    model : model without or with a metric, from which the steps start
    rows : rows in random order, to fit and to predict
    kind : form of the metric: "diagonal", scales (d,); "full", a matrix (d, r), for at most
        `MAX_FULL_METRIC_FEATURES` features; "", a matrix if possible, else scales
    seed : seed of the drawn rows
    """
    start = _initial_root(model.op.kernel, kind, rows.X.shape[1])
    if start is None:
        return
    steps, rng = _Steps(model, start), np.random.default_rng([seed, 0x57E9])
    for stage in stages(len(rows.X)):
        if not steps.run_stage(stage, rows.part(slice(stage.pool)), rng) or not steps.A.any():
            return
        scale = math.sqrt(len(steps.A) / float((steps.A**2).sum()))
        categorical = [(j, weight * scale**2) for j, weight in steps.kernel.categorical]
        kernel = steps.kernel.with_metric(steps.A * scale)
        yield kernel.with_categorical(categorical), steps.n_taken


def _initial_root(kernel: Kernel, kind: str, d: int) -> Floats | None:
    """Return A of a kernel's metric, scales (d,) or a matrix (d, r), as the steps start from it.

    None for kernels that are no differentiable function of the distance, and for metrics that are
    not of the kind.
    """
    if kernel.geometry != "distance" or kernel.expression is None:
        return None
    A = np.ones(d) if kernel.metric is None else np.array(kernel.metric, np.float64)
    is_matrix = kind != "diagonal" and d <= MAX_FULL_METRIC_FEATURES
    if is_matrix and A.ndim == 1:
        return np.diag(A).copy()
    return A if is_matrix or (A.ndim == 1 and kind != "full") else None


class _Steps:
    """A metric and a ridge, both changed by the steps.

    A : root of the metric, not scaled to trace d: its scale takes the place of the bandwidth, which
        stays fixed
    n_taken : number of steps taken
    log_ridge : natural logarithm of lam
    """

    def __init__(self, model: HeldOutModel, A: Floats) -> None:
        op = model.op
        self.kernel, self.backend, self.A, self.n_taken = op.kernel, op.backend, A, 0
        self.shift = None if op.shift is None else op.backend.to_host(op.shift)
        self.log_ridge = math.log(10.0) * model.ridge_log10
        # The equations of nearly equal rows may have a Cholesky factor in float64 only.
        self.precisions = dict.fromkeys((op.precision, "float64"))

    def run_stage(self, stage: StepStage, rows: SampleRows, rng: np.random.Generator) -> bool:
        """Take the steps of a stage; return False if a derivative is not finite."""
        n_fit = min(stage.n_fit, len(rows.X) // 3)
        n = min(n_fit + stage.n_predicted, len(rows.X))
        constant = self.backend.to_host(rows.X.max(axis=0) == rows.X.min(axis=0))
        self.A[constant] = 0.0  # the scale of a constant feature cannot be learned
        moments = _AdamMoments(self.A)
        for t in range(stage.n_steps):
            indices = self.backend.asarray(rng.permutation(len(rows.X))[:n])
            fit, predicted = rows.part(indices[:n_fit]), rows.part(indices[n_fit:])
            self.n_taken += 1
            derivatives = self._derivatives(fit, predicted)
            if derivatives is None:  # the equations are singular: continue with a larger ridge
                self.log_ridge += math.log(10.0)
                continue
            g, g_ridge = np.array(self.backend.to_host(derivatives[0])), derivatives[1]
            g[constant] = 0.0
            if not (np.isfinite(g).all() and math.isfinite(g_ridge)):
                return False
            length = stage.length * min(1.0, 2 - 2 * t / stage.n_steps)
            step_A, step_ridge = moments.directions(g, g_ridge)
            self.A = self.A - length * math.sqrt(float((self.A**2).mean())) * step_A
            log_ridge = self.log_ridge - RIDGE_STEP_RATIO * length * step_ridge
            self.log_ridge = max(log_ridge, MIN_RIDGE_LOG10 * math.log(10.0))
        return True

    def _derivatives(self, fit: SampleRows, predicted: SampleRows) -> tuple[Array, float] | None:
        """Return `error_derivatives` in the first precision that allows a Cholesky factor."""
        for precision in self.precisions:
            kernel = self.kernel.with_metric(self.A)
            op = KernelOperator(kernel, self.backend, precision, self.shift)
            derivatives = error_derivatives(op, fit, predicted, math.exp(self.log_ridge))
            if derivatives is not None:
                return derivatives
        return None


class _AdamMoments:
    """Running means of the gradients and of their squares, for A and for log lam."""

    def __init__(self, A: Floats) -> None:
        self.mean, self.squares, self.t = np.zeros_like(A), np.zeros((len(A), 1)[: A.ndim]), 0
        self.ridge_mean = self.ridge_square = 0.0

    def directions(self, g: Floats, ridge_derivative: float) -> tuple[Floats, float]:
        """Add gradients by A and by log lam; return the directions of the step, with entries of
        about one."""
        self.t += 1
        row_squares = (g**2).mean(axis=1, keepdims=True) if g.ndim == 2 else g**2
        self.mean += (1 - GRADIENT_DECAY) * (g - self.mean)
        self.squares += (1 - SQUARES_DECAY) * (row_squares - self.squares)
        self.ridge_mean += (1 - GRADIENT_DECAY) * (ridge_derivative - self.ridge_mean)
        self.ridge_square += (1 - SQUARES_DECAY) * (ridge_derivative**2 - self.ridge_square)
        bias_gradient, bias_squares = 1 - GRADIENT_DECAY**self.t, 1 - SQUARES_DECAY**self.t
        squares = np.maximum(self.squares, RELATIVE_ROUNDING**2 * self.squares.max())
        scale = np.sqrt(squares / bias_squares + TINY_GRADIENT_SQUARE)
        ridge_scale = math.sqrt(self.ridge_square / bias_squares + TINY_GRADIENT_SQUARE)
        return self.mean / bias_gradient / scale, self.ridge_mean / bias_gradient / ridge_scale


def error_derivatives(
    op: KernelOperator, fit: SampleRows, predicted: SampleRows, ridge: float
) -> tuple[Array, float] | None:
    """Return the derivatives of the weighted mean squared error of `predicted` by A and by log lam.

    The derivatives are taken of a Huber loss whose threshold is held fixed, see
    `MAX_RELATIVE_RESIDUAL`. Returns None if the equations have no Cholesky factor.

    Kernel values and sums are computed in the precision of `op`. The equations are solved in
    float64 if the ridge is below `MIN_SINGLE_PRECISION_RIDGE`, else in the precision of `op`.

    op : operator of a kernel with a metric
    fit, predicted : rows that are fitted, and rows that are predicted
    ridge : lam
    """
    backend, xp, dtype = op.backend, op.backend.xp, op.dtype
    fit_side, predicted_side = _Side(op, fit), _Side(op, predicted)
    K, W = _values(op, fit_side, None)
    K_predicted, W_predicted = _values(op, predicted_side, fit_side)
    solve_dtype = np.dtype(np.float64) if ridge < MIN_SINGLE_PRECISION_RIDGE else dtype
    root = xp.ones(len(fit.X), solve_dtype) if fit.root is None else fit.root.astype(solve_dtype)
    L = K.astype(solve_dtype)
    if fit.root is not None:
        L *= root[:, None]
        L *= root
    L[xp.arange(len(L)), xp.arange(len(L))] += ridge
    if not backend.cholesky(L, keep_upper=True):  # only the lower part of L is read
        return None

    def solve(B: Array) -> Array:
        # Sample weights W scale the equations: (W^1/2 K W^1/2 + lam I) x = W^1/2 B.
        B = root[:, None] * B
        backend.solve_lower(L, B)
        backend.solve_lower(L, B, transposed=True)
        return B

    scaled_a = solve(fit.Y.astype(solve_dtype))
    a = (root[:, None] * scaled_a).astype(dtype)
    dL_df = _loss_gradient(xp, K_predicted @ a - predicted.Y, predicted.root).astype(dtype)
    scaled_v = solve((K_predicted.T @ dL_df).astype(solve_dtype))
    v = (root[:, None] * scaled_v).astype(dtype)
    dL_dA = _metric_sum(op, W_predicted, dL_df, a, predicted_side, fit_side)
    dL_dA -= _metric_sum(op, W, v, a, fit_side, fit_side)
    return (2 / op.kernel.bandwidth) * dL_dA, -ridge * float((scaled_v * scaled_a).sum())


def _loss_gradient(xp: Any, R: Array, root: Array | None) -> Array:
    """Return the gradient (m, c) of the weighted mean square by the residuals R (m, c).

    Residuals are shortened to at most `MAX_RELATIVE_RESIDUAL` times the median length of the rows
    whose weight is not 0.

    root : (m,) square roots of the sample weights, or None
    """
    weight = xp.ones(len(R)) if root is None else root.astype(np.float64) ** 2
    total = max(float(weight.sum()), TINY_GRADIENT_SQUARE) * R.shape[1]
    has_weight = weight > 0
    if has_weight.any():
        lengths = xp.sqrt((R**2).sum(axis=1))
        longest = MAX_RELATIVE_RESIDUAL * xp.median(lengths[has_weight])
        R = R * xp.minimum(1, longest / xp.maximum(lengths, TINY_RESIDUAL))[:, None]
    return (2 / total) * weight[:, None] * R


class _Side:
    """Rows as one side of a matrix of pairs: x (n, d), shifted, and u = A^T x / bandwidth (n, r).

    The product `left_factor @ right_factor.T` of two sides is s = |u - u'|^2 of all pairs.
    """

    def __init__(self, op: KernelOperator, rows: SampleRows) -> None:
        xp, A = op.backend.xp, op.kernel.metric
        x = rows.X.astype(op.dtype)
        self.categorical = x[:, op.categorical_columns]
        self.x = x if op.shift is None else x - op.shift.astype(op.dtype)
        assert A is not None
        A = xp.asarray(A / op.kernel.bandwidth, op.dtype)
        self.u = self.x * A if A.ndim == 1 else self.x @ A
        ones, squares = xp.ones((len(x), 1), op.dtype), (self.u**2).sum(axis=1)[:, None]
        self.left_factor = xp.concatenate([self.u, squares, ones], axis=1)
        self.right_factor = xp.concatenate([-2 * self.u, ones, squares], axis=1)
        self.with_ones = xp.concatenate([self.u, ones], axis=1)


def _values(op: KernelOperator, left: _Side, right: _Side | None) -> tuple[Array, Array]:
    """Return phi(s) and phi'(s) of all pairs. right : None for the pairs of `left` with itself."""
    xp, slope, on_diagonal = op.backend.xp, Slope(op.kernel), right is None
    right_side = left if right is None else right
    right_columns = right_side.right_factor.T
    shape = (len(left.u), right_columns.shape[1])
    K, W = xp.empty(shape, op.dtype), xp.empty(shape, op.dtype)

    def evaluate(part: slice) -> None:
        s = xp.matmul(left.left_factor[part], right_columns, out=K[part])
        xp.abs(s, out=s)  # s may be rounded to below 0; `abs` takes less time than `maximum`
        if op.categorical_weights:
            pairs = left.categorical[part], right_side.categorical
            op.backend.add_unequal(*pairs, op.categorical_weights, s)
        if on_diagonal:
            diagonal = xp.arange(len(s))
            s[diagonal, part.start + diagonal] = 0
        slope.with_values(s, W[part], xp)
        if on_diagonal:
            # phi' may be infinite, but x_i - x_i is 0.
            W[part.start + diagonal, part.start + diagonal] = 0

    op.backend.run(evaluate, tiles(shape[0], SLOPE_TILE))
    return K, W


def _metric_sum(
    op: KernelOperator, W: Array, by_value: Array, a: Array, left: _Side, right: _Side
) -> Array:
    """Return sum_ij V_ij (x_i - x_j)(u_i - u_j)^T, or its diagonal if the metric is diagonal.

    V is the elementwise product of W = phi'(s), which is overwritten, and by_value a^T.

    by_value : (m, c), for the rows of `left`
    a : (n, c), for the rows of `right`
    """
    # With c = 1 the vectors scale the rows of the sums, which takes less time than scaling W.
    xp, parts, single_output = op.backend.xp, tiles(len(W), SLOPE_TILE), a.shape[1] == 1
    left_values = left.with_ones * by_value if single_output else left.with_ones
    right_values = right.with_ones * a if single_output else right.with_ones
    row_sums = xp.empty((len(W), right_values.shape[1]), op.dtype)
    partial_sums = xp.empty((len(parts), W.shape[1], left_values.shape[1]), op.dtype)

    def multiply(k: int) -> None:
        V = W[parts[k]]
        if not single_output:
            V *= by_value[parts[k]] @ a.T
        xp.matmul(V, right_values, out=row_sums[parts[k]])
        xp.matmul(V.T, left_values[parts[k]], out=partial_sums[k])

    op.backend.run(multiply, range(len(parts)))
    column_sums = partial_sums.sum(axis=0)
    if single_output:
        row_sums *= by_value
        column_sums *= a
    row_sums = row_sums[:, -1:] * left.u - row_sums[:, :-1]
    column_sums = column_sums[:, -1:] * right.u - column_sums[:, :-1]
    if op.kernel.metric is not None and op.kernel.metric.ndim == 2:
        return left.x.T @ row_sums + right.x.T @ column_sums
    return (left.x * row_sums).sum(axis=0) + (right.x * column_sums).sum(axis=0)
