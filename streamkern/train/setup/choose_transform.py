"""Decide whether the targets are learned on a log scale.

Prices, counts and durations often vary in proportion to their size. Kernel ridge regression
therefore predicts each of some rows from the others (leave-one-out, in closed form). It is fitted
to y, and to log(1 + y / unit) for a few units, each time with the kernel and the noise of least
error. The predictions are converted back to the scale of y, multiplied by the factor that makes
them means (`smearing_factor`), and compared there.

The factor for the run's model differs, because this model has more rows and smaller errors. In
expectation, the share noise / (noise + variance of f) of a squared leave-one-out residual is noise,
and remains with more rows; f is the Gaussian process of the other rows. The rest is estimated to
fall like 1 / rows.

The log scale is used if the mean squared error falls by the share `LOG_SCALE_GAIN`, and by
`LOG_SCALE_SE` standard errors of the paired differences. So that these do not depend on a few rows,
squared errors are capped at the quantile `ERROR_CAP_QUANTILE` of the errors without a log scale. In
addition, the mean of the squared errors without the cap must not rise. Measurements are in
docs/explanation/log-scale.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.basics.log_scale import symmetric_exp, symmetric_log
from streamkern.centers.random_rows import median_bandwidth
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.products import KernelOperator
from streamkern.solver.method import Report
from streamkern.solver.precondition.noise import (
    MIN_ROWS_OF_NOISE,
    mean_difference_in_se,
    weighted_gram,
)
from streamkern.solver.precondition.samples import SampleRows, merge_equal_rows
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.target_moments import (
    MIN_VARIATION_COEFFICIENT,
    changes_targets,
    is_skew,
    known_moments,
    leaves_transform_open,
    sampled_moments,
    target_moments,
)
from streamkern.train.resolve.training_data import in_memory
from streamkern.train.setup.setup_rows import read_unmerged_rows

MAX_TRANSFORM_ROWS, SECOND_GAIN_ROWS = 1024, 512
"""Largest number of rows that are compared, and number of rows for a second estimate of the factor
of the predictions. The smaller estimate is used, because either may be too large.
"""
PREDICTION_MARGIN_SD = 1.0
"""Distance of the largest prediction from the largest target, in standard deviations of
log(1 + y / unit)."""
TRIED_KERNELS: Final = (
    ("laplace", 2), ("laplace", 8), ("gaussian", 1), ("gaussian", 2), ("gaussian", 4),
)  # fmt: skip
"""Kernels that are tried, with their bandwidths in units of the median distance."""
TRIED_NOISES: Final = tuple(10.0 ** (k / 2) for k in range(-10, 5))
"""Noise variances that are tried, in units of the mean k(x, x)."""
LOG_SCALE_GAIN, LOG_SCALE_SE = 0.03, 1.25
"""Smallest gain for which the log scale is used: as a share of the capped mean squared error, and
in standard errors of the difference."""
ERROR_CAP_QUANTILE, SMALL_UNIT_QUANTILE = 0.98, 0.02
"""Quantile of the squared errors at which they are capped, and quantile of the positive targets
from which the smallest unit follows."""
MIN_TOTAL_ERROR = 1e-300
"""Smallest error by which an error is divided."""


class FoundTransform(NamedTuple):
    """Mean and scale of the targets on a log scale, and facts for the record as JSON values."""

    targets: TargetScale
    facts: dict[str, Any]


def find_transform(run: ResolvedRun, dtype: np.dtype[Any], report: Report) -> FoundTransform | None:
    """Return the log scale of the targets if the settings ask for it or the rows show that it is
    better; else None.

    Reads up to `MAX_TRANSFORM_ROWS` rows, with their features.
    """
    is_required = run.config.model.target_transform == "log"
    if not is_required and not _may_use_log_scale(run):
        return None
    c = run.problem.c
    data, seed = run.data, run.config.run.random_state
    source_args = run.backend, data.source, data.weight_factors, seed, dtype
    scale = TargetScale.from_moments(target_moments(*source_args), False).scale
    # Rows with targets divided by their standard deviation, for which the scales are compared.
    rows = read_unmerged_rows(run, dtype, TargetScale(np.zeros(c), scale), MAX_TRANSFORM_ROWS)
    if rows.root is not None:
        has_weight = rows.root > 0
        rows = rows.part(has_weight) if has_weight.any() else rows._replace(root=None)
    y = run.backend.to_host(rows.Y).astype(np.float64)
    if not is_required and not is_skew(y[:, 0]):
        return None
    with run.backend.single_threaded_blas():
        verdicts = _TargetColumns(run, rows, y, _units(y)).verdicts()
        if not is_required and not verdicts[0].is_better:
            return None
        unit, first_rows = np.array([verdict.unit for verdict in verdicts]), slice(SECOND_GAIN_ROWS)
        second_columns = _TargetColumns(run, rows.part(first_rows), y[first_rows], [unit])
        second_verdicts = second_columns.verdicts()
    gain = np.array([min(a.gain, b.gain) for a, b in zip(verdicts, second_verdicts, strict=True)])
    deviation = symmetric_log(np, y, unit).std(axis=0)
    unit = unit * scale  # from here on in the unit of the targets
    max_target = _max_log_targets(run, unit)
    max_target = None if max_target is None else max_target + PREDICTION_MARGIN_SD * deviation
    moments = sampled_moments(*source_args, TargetScale(np.zeros(c), np.ones(c), unit))
    standardised = TargetScale.from_moments(moments, run.config.model.fit_intercept)
    targets = TargetScale(standardised.mean, standardised.scale, unit, gain, max_target)
    facts: dict[str, Any] = {"unit": unit.tolist(), "gain": gain.tolist()}
    if all(math.isfinite(verdict.ratio) for verdict in verdicts):
        facts["error_ratio"] = float(np.mean([verdict.ratio for verdict in verdicts]))
    report("target_transform", facts)
    return FoundTransform(targets, facts)


def _max_log_targets(run: ResolvedRun, unit: Floats) -> Floats | None:
    """Return the largest log(1 + |y| / unit) over all rows, (c,).

    None if the rows are not in memory, if other rows may follow, if a transform may change the
    targets, or if an output is always 0.

    unit : (c,)
    """
    base = run.data.base
    if not run.problem.complete or not in_memory(base) or changes_targets(run.data.source):
        return None
    largest = np.max([part.largest_targets() for part in _arrays(base)], axis=0)
    return np.asarray(np.log1p(largest / unit)) if largest.all() else None


def _arrays(source: BaseSource) -> list[ArraySource]:
    """Return the array sources that a source in memory consists of."""
    if isinstance(source, ArraySource):
        return [source]
    return [array_source for part in source.parts for array_source in _arrays(part)]


def _may_use_log_scale(run: ResolvedRun) -> bool:
    """Return whether the setup may choose a log scale, from the settings and the kind of the data.

    Reads no row.
    """
    data = run.data
    if not leaves_transform_open(run.config) or run.inputs.metric is not None:
        return False
    if not run.problem.complete or run.inputs.continued_run is not None:
        return False
    if data.source.classes is not None or run.problem.c > 1 or changes_targets(data.source):
        return False
    moments = known_moments(data.source, data.weight_factors)
    if moments is not None and moments.weight > 0:
        mean, deviation = float(moments.mean[0]), math.sqrt(float(moments.variance()[0]))
        return mean > 0 and deviation >= MIN_VARIATION_COEFFICIENT * mean
    return True


def _units(y: Floats) -> list[Floats]:
    """Return the units (c,) that are tried: the mean |y|, an eighth of it, and a small one.

    The small unit is below most targets, so that the scale is nearly a plain logarithm.

    y : (n, c)
    """
    units_by_output = []
    for size in np.abs(y).T:
        positive = size[size > 0] if size.any() else np.ones(1)
        mean = float(size.mean()) or 1.0
        small = min(float(np.quantile(positive, SMALL_UNIT_QUANTILE)), mean)
        units_by_output.append((mean, mean / 8, small / 8))
    return [np.array(unit) for unit in zip(*units_by_output, strict=True)]


class _LogScaleVerdict(NamedTuple):
    """Comparison of a log scale of one output with the output itself.

    unit : unit of the log scale
    gain : expected `smearing_factor` of the run's model
    ratio, uncapped_ratio : mean squared error with the log scale over that without it, with and
        without the cap
    standard_errors : fall of the capped mean squared error, in its standard errors
    """

    unit: float
    gain: float
    ratio: float
    uncapped_ratio: float
    standard_errors: float

    @property
    def is_better(self) -> bool:
        """Return whether the log scale is significantly better."""
        error_decreases = self.ratio <= 1 - LOG_SCALE_GAIN and self.uncapped_ratio <= 1
        return error_decreases and self.standard_errors >= LOG_SCALE_SE


class _TargetColumns:
    """Rows whose target columns are the c outputs, followed by their log scales in each unit.

    rows : rows with standardised columns, equal rows merged
    y, w : (n, c) targets and (n,) sample weights, before equal rows were merged
    group : (n,) index of the merged row of each row
    mean, scale : (columns,) mean and standard deviation of the columns
    falling_ratio : estimated mean squared error without the noise, for the run's model relative to
        a model of these rows
    """

    def __init__(self, run: ResolvedRun, rows: SampleRows, y: Floats, units: list[Floats]) -> None:
        backend, self.run, self.units = run.backend, run, units
        self.y, self.c = y, y.shape[1]
        logs = [symmetric_log(np, self.y, unit) for unit in units]
        columns = np.concatenate([self.y, *logs], axis=1)
        self.mean, spread = columns.mean(axis=0), columns.std(axis=0)
        self.scale = np.where(spread > 0, spread, 1.0)
        self.falling_ratio = min(1.0, len(y) / min(run.problem.p, run.data.base.n_rows))
        standardised = backend.asarray((columns - self.mean) / self.scale, rows.Y.dtype)
        self.rows = merge_equal_rows(backend, rows._replace(Y=standardised))
        repeats, root = self.rows.repeats, self.rows.root
        self.group, self.w = np.arange(len(y)), np.ones(len(y))
        if root is not None:
            self.w = backend.to_host(root).astype(np.float64) ** 2
        if repeats is not None:
            self.group, self.w = repeats.group, repeats.w
        host = backend.to_host(self.rows.X)
        self._width = median_bandwidth(host, sparse=run.data.sparse)
        self._shift = host.mean(axis=0, dtype=np.float64).astype(host.dtype)

    def _values(self) -> tuple[Floats, Floats]:
        """Return leave-one-out predictions of the columns, and expected corrections.

        Both are (n, columns). A column is predicted with its kernel and noise of least error. The
        corrections are the changes that the larger number of rows of the run would make to the
        predictions.
        """
        to_host = self.run.backend.to_host
        Y = to_host(self.rows.Y).astype(np.float64)
        root = np.ones((len(Y), 1))
        if self.rows.root is not None:
            root = to_host(self.rows.root).astype(np.float64)[:, None]
        min_errors = np.full(Y.shape[1], math.inf)
        best = np.zeros((2, *Y.shape))  # values and corrections of least error, for each column
        precision = "float64" if self.run.search_precision == "float64" else "exact"
        for name, width in TRIED_KERNELS:
            kernel = self.run.data.kernel_of(get_kernel(name, width * self._width))
            op = KernelOperator(kernel, self.run.backend, precision, self._shift)
            K = to_host(weighted_gram(op, None, self.rows.X, self.rows.root))
            for residuals, noise in left_out_residuals(K, Y, root[:, 0]):
                errors = (residuals**2).mean(axis=0)
                is_smaller = errors < min_errors
                min_errors[is_smaller] = errors[is_smaller]
                shrinkage = np.sqrt(noise + (1 - noise) * self.falling_ratio)[:, None]
                values, corrections = Y - residuals / root, (1 - shrinkage) * residuals / root
                best[:, :, is_smaller] = values[:, is_smaller], corrections[:, is_smaller]
        values, corrections = best[:, self.group] * self.scale
        return values + self.mean, corrections

    def verdicts(self) -> list[_LogScaleVerdict]:
        """Return the verdict on the best unit of each output."""
        no_gain = [_LogScaleVerdict(unit, 1.0, math.inf, math.inf, 0.0) for unit in self.units[0]]
        if len(self.rows.X) < MIN_ROWS_OF_NOISE:
            return no_gain
        values, corrections = self._values()
        if not np.isfinite(values).all():
            return no_gain
        verdicts_by_output = [
            [self._verdict(values, corrections, k, i) for i in range(len(self.units))]
            for k in range(self.c)
        ]
        return [min(verdicts, key=lambda verdict: verdict.ratio) for verdicts in verdicts_by_output]

    def _verdict(
        self, values: Floats, corrections: Floats, k: int, unit_index: int
    ) -> _LogScaleVerdict:
        """Return the verdict on unit number `unit_index` of output k.

        values, corrections : results of `_values`
        """
        unit, column = float(self.units[unit_index][k]), (unit_index + 1) * self.c + k
        y, w = self.y[:, k], self.w
        predictions = symmetric_exp(np, values[:, column], unit)
        noisy_targets = symmetric_exp(np, symmetric_log(np, y, unit) - corrections[:, column], unit)
        gain = smearing_factor(predictions, noisy_targets, w)
        plain_errors = (values[:, k] - y) ** 2
        log_errors = (smearing_factor(predictions, y, w) * predictions - y) ** 2
        uncapped = float(w @ log_errors) / max(float(w @ plain_errors), MIN_TOTAL_ERROR)
        cap = float(np.quantile(plain_errors, ERROR_CAP_QUANTILE))
        plain_errors = w * np.minimum(plain_errors, cap)
        log_errors = w * np.minimum(log_errors, cap)
        ratio = float(log_errors.sum()) / max(float(plain_errors.sum()), MIN_TOTAL_ERROR)
        return _LogScaleVerdict(
            unit, gain, ratio, uncapped, mean_difference_in_se(plain_errors, log_errors)
        )


def smearing_factor(values: Floats, y: Floats, w: Floats) -> float:
    """Return the factor by which predictions have to be multiplied to have the mean of the targets.

    It takes the place of the smearing factor of Duan (1983), which is the mean of the exponentials
    of the residuals. The factor with the least squared error would depend on the few largest rows.

    values, y, w : (n,) predictions, targets and sample weights

    Returns 1 if the quotient is not positive and finite.
    """
    total = float(w @ values)
    factor = float(w @ y) / total if total else 0.0
    return factor if math.isfinite(factor) and factor > 0 else 1.0


def left_out_residuals(K: Floats, Y: Floats, root: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Yield the leave-one-out residuals (n, k), and the expected share of noise in their squares
    (n,), for each of `TRIED_NOISES`.

    These residuals are targets minus predictions, times the roots of the weights; for the formulas,
    see `precondition.noise`. One eigendecomposition, about 10 n^3 FLOPs, serves all noises.

    K : (n, n) kernel matrix, rows and columns multiplied by the roots of the weights
    Y : (n, k) targets
    root : (n,) square roots of the sample weights
    """
    spectrum, U = np.linalg.eigh(K)
    scale, squares = float(spectrum.mean()), U * U
    rotated = U.T @ (root[:, None] * Y)
    for noise in TRIED_NOISES:
        inverse = 1 / (np.maximum(spectrum, 0) + noise * scale)
        diagonal = squares @ inverse
        yield U @ (inverse[:, None] * rotated) / diagonal[:, None], noise * scale * diagonal
