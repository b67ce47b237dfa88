"""Models of a few rows, in any metric and kernel, and their errors on held-out rows.

Up to `METRIC_FIT_ROWS` rows are all centers of a kernel ridge regression. Of more rows, the first
`METRIC_FIT_ROWS` are the centers of the least-squares problem

    sum_i w_i (f(x_i) - y_i)^2 + ridge |f|^2.

Its equations are summed in float64, because with many rows even a ridge that float32 cannot resolve
changes the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.base import Array, tiles
from streamkern.basics.array_types import Floats
from streamkern.kernels.builtin import Kernel, Laplace, get_kernel
from streamkern.kernels.categorical import CategoricalFeatures
from streamkern.kernels.points import Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import EVALUATED_ROWS, METRIC_FIT_ROWS
from streamkern.predict.probabilities import fit_temperature
from streamkern.solver.precondition.held_out import geometric_search
from streamkern.solver.precondition.samples import SampleRows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup.choose_kernel import (
    KERNEL_ERROR_TOLERANCE,
    KERNEL_GAIN_SE,
    candidate_kernels,
    max_bandwidth_log2,
    median_distances,
    must_choose_bandwidth,
    search_operator,
)

HELD_OUT_BANDWIDTHS_LOG2 = (-2, 4)
"""Smallest and largest exponents of two tried for the bandwidth, relative to the median
distance."""
MIN_RIDGE_LOG10, MAX_RIDGE_LOG10 = -7, 3
"""Smallest and largest exponents of ten tried for the ridge, for kernels with k(x, x) = 1."""
JITTERS = (1e-13, 1e-12, 1e-11, 1e-10, 1e-9)
"""Multiples of the trace that are added to the diagonal of the equations of many rows. The next
larger one is tried if the Cholesky factorisation fails. The equations of wide smooth kernels, and
of metrics with few features, are singular in float64."""
MIN_SINGLE_PRECISION_RIDGE = 1e-3
"""Smallest ridge with which the equations of a kernel matrix are solved in the precision of its
values. With a smaller ridge they are solved in float64, because adding it to the diagonal in
float32 would change little."""
TINY_STANDARD_ERROR = 1e-300
"""Smallest standard error by which a gain is divided."""


class HeldOutModel(NamedTuple):
    """A model f = K(., points) alpha, and its errors on the n held-out rows.

    error : mean of `errors`; infinite if no model could be fitted, whose `alpha` has no meaning
    errors : (n,) squared errors, times the sample weights
    log_losses : (n,) log losses of the softmax of slope f, with the slope of least loss, times the
        sample weights; None for values, and until `HeldOutProblem.with_losses` sets them
    bandwidth_log2 : exponent of two of the bandwidth, relative to the median distance
    ridge_log10 : exponent of ten of the ridge
    op : kernel operator
    points : (p, d) centers; None once they are dropped, as `alpha` and `values`
    alpha : (p, c) weights
    values : (n, c), f at the held-out rows
    """

    error: float
    errors: Floats
    log_losses: Floats | None
    bandwidth_log2: int
    ridge_log10: int
    op: KernelOperator
    points: Points | None
    alpha: Array | None
    values: Array | None = None

    @property
    def losses(self) -> Floats:
        """The log losses of classes; for values, the squared errors."""
        return self.errors if self.log_losses is None else self.log_losses


def choose_model(models: list[HeldOutModel]) -> HeldOutModel:
    """Return the model whose kernel is chosen, of models with kernels from rough to smooth.

    A smoother kernel replaces the one chosen so far if it lowers the error by the share
    `KERNEL_ERROR_TOLERANCE`, and significantly so, since a few extreme rows may cause its gain.
    """
    best = models[0]
    for model in models[1:]:
        lowers_error = model.error <= (1 - KERNEL_ERROR_TOLERANCE) * best.error
        is_significant = gain_in_standard_errors(best.errors, model.errors) >= KERNEL_GAIN_SE
        if lowers_error and (is_significant or math.isinf(best.error)):
            best = model
    return best


def gain_in_standard_errors(before: Floats, after: Floats) -> float:
    """Return the mean gain per row in units of its standard error; 0 if an error is not finite."""
    if not np.isfinite(before).all() or not np.isfinite(after).all():
        return 0.0
    gains = before - after
    return float(gains.mean() / max(gains.std() / math.sqrt(len(gains)), TINY_STANDARD_ERROR))


class HeldOutProblem:
    """Rows to fit, and held-out rows on which the models are compared.

    fit, held_out : the rows to fit, of which the first are the centers, and the held-out rows
    classes : mean and scale of the one-hot targets; None for a regression
    categorical : categorical features of all models, unless the kernel of the run has its own
    """

    def __init__(
        self, run: ResolvedRun, fit: SampleRows, held_out: SampleRows, classes: TargetScale | None,
        categorical: CategoricalFeatures = (),
    ) -> None:  # fmt: skip
        kernel_categorical = get_kernel(run.config.model.kernels[0]).categorical
        self.categorical = kernel_categorical or categorical
        self.run, self.fit, self.held_out, self.classes = run, fit, held_out, classes
        self.host_X = run.backend.to_host(fit.X[:METRIC_FIT_ROWS])

    @property
    def min_ridge_exponent(self) -> int:
        """Exponent of ten of the smallest ridge with which the solver converges fast."""
        min_penalty = self.run.method.min_penalty
        if not min_penalty:
            return MIN_RIDGE_LOG10
        return round(math.log10(len(self.fit.X) * min_penalty))

    def operator(self, kernel: Kernel) -> KernelOperator:
        """Return the operator of a kernel for these rows."""
        return search_operator(self.run, kernel, self.host_X)

    def with_laplace_kernel(
        self, metric: Floats | None, bandwidth_log2: int, ridge_log10: int,
        bandwidth_range: tuple[int, int] = HELD_OUT_BANDWIDTHS_LOG2,
    ) -> HeldOutModel:  # fmt: skip
        """Return the model with the Laplace kernel in a metric, see `_with_best_bandwidth`.

        metric : scales (d,) or matrix (d, r); None for no metric
        bandwidth_log2, ridge_log10, bandwidth_range : see `_with_best_bandwidth`
        """
        median = median_distances(self.run, self.host_X, metric)("distance")
        laplace = Laplace(1.0, metric=metric).with_categorical(self.categorical)

        def kernel_of(exponent: int) -> Kernel:
            return laplace.with_bandwidth(2.0**exponent * median)

        return self._with_best_bandwidth(
            kernel_of, bandwidth_log2, ridge_log10, MIN_RIDGE_LOG10, bandwidth_range
        )

    def with_run_kernel(
        self,
        previous: HeldOutModel,
        metric: Floats | None,
        categorical: CategoricalFeatures | None = None,
    ) -> HeldOutModel:
        """Return the model in a metric with the kernel of the run, or with the best of its kernels.

        previous : model at whose bandwidth and ridge the search begins
        metric : scales (d,) or matrix (d, r); None for no metric
        categorical : categorical features; None for `self.categorical`
        """
        categorical = self.categorical if categorical is None else categorical
        bandwidth = self.run.config.model.bandwidth
        median = median_distances(self.run, self.host_X, metric)

        def kernel_of(notation: Any, exponent: int) -> Kernel:
            is_set = not isinstance(bandwidth, str)  # otherwise a word such as "auto"
            width = bandwidth if is_set else lambda geometry: 2.0**exponent * median(geometry)
            kernel = get_kernel(notation, width).with_metric(metric)
            is_distance = kernel.geometry == "distance"
            return kernel.with_categorical(categorical) if categorical and is_distance else kernel

        models = list[HeldOutModel]()
        for notation in candidate_kernels(self.run):
            is_open = must_choose_bandwidth(self.run, notation)
            low, high = (
                (HELD_OUT_BANDWIDTHS_LOG2[0], max_bandwidth_log2(self.run)) if is_open else (0, 0)
            )
            previous = self._with_best_bandwidth(
                partial(kernel_of, notation), min(max(previous.bandwidth_log2, low), high),
                previous.ridge_log10, self.min_ridge_exponent, (low, high),
            )  # fmt: skip
            models.append(previous._replace(points=None, alpha=None))
        return self.with_losses(choose_model(models))

    def _with_best_bandwidth(
        self, kernel_of: Callable[[int], Kernel], bandwidth_log2: int, ridge_log10: int,
        min_ridge: int, bandwidth_range: tuple[int, int],
    ) -> HeldOutModel:  # fmt: skip
        """Return the model with the bandwidth and the ridge of least held-out error.

        For the Laplace kernel, doubling the bandwidth has about the effect of halving the ridge.
        The ridge is therefore searched only at the first and at the best bandwidth; for other
        kernels, at every bandwidth.

        kernel_of : returns the kernel whose bandwidth is 2 to this power, in median distances
        bandwidth_log2, ridge_log10 : exponents at which the search begins, see `HeldOutModel`
        min_ridge : exponent of the smallest ridge
        bandwidth_range : smallest and largest exponent of the bandwidth
        """

        def fit_at(log2: int, start_ridge: int, *, finds_ridge: bool = True) -> HeldOutModel:
            ridges = (min_ridge, MAX_RIDGE_LOG10) if finds_ridge else (start_ridge, start_ridge)
            return self.with_kernel(kernel_of(log2), start_ridge, *ridges)._replace(
                bandwidth_log2=log2
            )

        best = fit_at(bandwidth_log2, max(ridge_log10, min_ridge))
        is_laplace = isinstance(best.op.kernel, Laplace)

        def error(factor: float) -> float:
            nonlocal best
            exponent, model = round(math.log2(factor)), best
            if exponent != bandwidth_log2:
                model = fit_at(exponent, best.ridge_log10, finds_ridge=not is_laplace)
            if model.error < best.error:
                best = model
            return model.error

        geometric_search(error, bandwidth_log2, *bandwidth_range, base=2.0, stride=1)
        if is_laplace and best.bandwidth_log2 != bandwidth_log2:
            best = fit_at(best.bandwidth_log2, best.ridge_log10)
        return best

    def with_kernel(
        self, kernel: Kernel, start_ridge: int, min_ridge: int, max_ridge: int = MAX_RIDGE_LOG10
    ) -> HeldOutModel:
        """Return the model with the ridge of least held-out error.

        start_ridge : exponent of ten at which the search begins
        min_ridge, max_ridge : smallest and largest exponent of ten
        """
        op, held_out = self.operator(kernel), self.held_out
        points = op.points(self.fit.X[:METRIC_FIT_ROWS], right=True)
        rows_are_centers = len(self.fit.X) <= METRIC_FIT_ROWS
        if rows_are_centers:
            (G, B), norm = self._kernel_equations(op, points), None
        else:
            G, B = self._normal_equations(op, points)
            norm = op.gram(points).astype(np.float64)
        K_held_out = op.matrix(op.points(held_out.X, left=True), points)
        infinite = np.full(len(held_out.X), np.inf)
        best = HeldOutModel(math.inf, infinite, None, 0, start_ridge, op, points, B)

        kernel_values = cache(lambda dtype: K_held_out.astype(dtype, copy=False))

        def error(ridge: float) -> float:
            nonlocal best
            alpha = self._solve(G, B, norm, ridge, op.dtype)
            if alpha is None:
                return math.inf
            F = kernel_values(alpha.dtype) @ alpha
            squares = self._squared_errors(F)
            value = float(squares.mean())
            if value < best.error:
                exponent = round(math.log10(ridge))
                best = HeldOutModel(value, squares, None, 0, exponent, op, points, alpha, F)
            return value if math.isfinite(value) else math.inf

        geometric_search(error, start_ridge, min_ridge, max_ridge, stride=1)
        return best

    def _solve(
        self, G: Array, B: Array, norm: Array | None, ridge: float, dtype: np.dtype[Any]
    ) -> Array | None:
        """Return the weights of the centers, (p, c); None if the equations have no Cholesky factor.

        The equations are (G + ridge I) x = B if all rows are centers, where alpha is x times the
        roots of the sample weights, and else (G + ridge norm) alpha = B.

        G, B : results of `_kernel_equations` or `_normal_equations`
        norm : (p, p) kernel matrix of the centers; None if all rows are centers
        dtype : precision of the kernel values
        """
        backend, diagonal, has_factor = self.run.backend, self.run.backend.xp.arange(len(G)), False
        if norm is None:
            A = G.astype(dtype if ridge >= MIN_SINGLE_PRECISION_RIDGE else np.float64)
            A[diagonal, diagonal] += ridge
            has_factor = backend.cholesky(A, keep_upper=True)
        else:
            trace = float(G.trace())
            for jitter in JITTERS:
                A = ridge * norm
                A += G
                A[diagonal, diagonal] += jitter * trace
                if has_factor := backend.cholesky(A, keep_upper=True):
                    break
        if not has_factor:
            return None
        alpha = B.astype(A.dtype)
        backend.solve_lower(A, alpha)
        backend.solve_lower(A, alpha, transposed=True)
        if norm is None and self.fit.root is not None:
            alpha *= self.fit.root[:, None]
        return alpha

    def refit(self, model: HeldOutModel) -> HeldOutModel:
        """Return the model of these rows in the kernel of another model, with its losses.

        The search for its ridge starts at the ridge of the other model.
        """
        min_ridge = self.min_ridge_exponent
        start_ridge = max(model.ridge_log10, min_ridge)
        return self.with_losses(self.with_kernel(model.op.kernel, start_ridge, min_ridge))

    def with_losses(self, model: HeldOutModel) -> HeldOutModel:
        """Return a model of these rows with the log losses of classes, and without its arrays."""
        losses = None
        if self.classes is not None and model.values is not None:
            losses = self._log_losses(model.values)
        elif self.classes is not None:
            assert not math.isfinite(model.error)  # no model could be fitted
            losses = model.errors
        return model._replace(log_losses=losses, points=None, alpha=None, values=None)

    def _kernel_equations(self, op: KernelOperator, points: Points) -> tuple[Array, Array]:
        """Return W^1/2 K W^1/2 (n, n) and W^1/2 Y (n, c), with the sample weights W."""
        fit = self.fit
        K, Y = op.gram(points), fit.Y.astype(np.float64)
        if fit.root is not None:
            K *= fit.root[:, None]
            K *= fit.root
            Y *= fit.root[:, None]
        return K, Y

    def _normal_equations(self, op: KernelOperator, points: Points) -> tuple[Array, Array]:
        """Return K^T W K (p, p) and K^T W Y (p, c), summed over all rows in float64."""
        fit, backend = self.fit, self.run.backend
        p = len(points)
        G, B = backend.xp.zeros((p, p)), backend.xp.zeros((p, fit.Y.shape[1]))
        for part in tiles(len(fit.X), EVALUATED_ROWS):
            K = op.matrix(op.points(fit.X[part], left=True), points).astype(np.float64)
            Y = fit.Y[part].astype(np.float64)
            if fit.root is not None:
                K *= fit.root[part, None]
                Y *= fit.root[part, None]
            backend.add_gram(G, K, 1.0)
            B += K.T @ Y
        backend.mirror_lower(G)
        return G, B

    def _squared_errors(self, F: Array) -> Floats:
        """Return the weighted squared errors of values F (m, c) at the held-out rows."""
        squares = ((F.astype(np.float64) - self.held_out.Y) ** 2).sum(axis=1)
        if self.held_out.root is not None:
            squares *= self.held_out.root**2
        return np.asarray(self.run.backend.to_host(squares))

    def _log_losses(self, F: Array) -> Floats:
        """Return the weighted log losses of values F (m, c) at the held-out rows."""
        assert self.classes is not None
        held_out, backend = self.held_out, self.run.backend
        outputs, one_hot = (
            backend.to_host(self.classes.in_target_units(backend.xp, values, np.float64))
            for values in (F, held_out.Y)
        )
        w = np.ones(len(outputs))
        if held_out.root is not None:
            w = backend.to_host(held_out.root).astype(np.float64) ** 2
        labels = one_hot.argmax(axis=1)
        log_probabilities = fit_temperature(outputs, labels, w).log(outputs)
        losses: Floats = -w * np.take_along_axis(log_probabilities, labels[:, None], 1)[:, 0]
        return losses
