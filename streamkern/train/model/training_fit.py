"""Measure the fit of a model to some of its training rows, and warn if the model is worthless.

A model may be constant, or may only memorise its centers: because of a setting, such as a bandwidth
of 1e30 or a ridge of 1e3, or because of an automatic choice. A few training rows reveal this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import Floats
from streamkern.basics.message import mention
from streamkern.basics.warning import warn
from streamkern.ingest.tables.encoder import Encoder
from streamkern.solver.method import Report
from streamkern.store.row_block import RowBlock
from streamkern.store.sample_weights import weigh_rows
from streamkern.stream.sources.patch_features import patches_among
from streamkern.stream.sources.quantile_scores import scores_among
from streamkern.stream.sources.sampling import sample_rows
from streamkern.stream.sources.transforms import Scale
from streamkern.train.model.kernel_model import KernelModel
from streamkern.train.resolve.resolved_run import ResolvedRun

MAX_FIT_ROWS, MAX_FIT_UNITS, MAX_FIT_BYTES = 512, 8, 16 << 20
"""Largest number of rows that are evaluated, of units from which they are read, and of bytes that
they take as float64."""
FIT_STAGE = 43
"""Index of the random stream from which these rows are drawn. `SCORES_STAGE` has the same index, so
rows of the sample that decided on quantile scores may be among them. The index stays, because with
another one a repeated run would report other figures."""
CONSTANT_VARIANCE = 1e-3
"""Ratio of the variances of predictions and targets below which the model counts as constant."""
WORSE_THAN_MEAN_SE = 3.0
"""Standard errors by which a model has to be worse than the mean to be reported as such."""
MIN_STANDARD_ERROR = 1e-300
"""Smallest standard error that is divided by, instead of 0."""
ISOLATED_KERNEL_SUM, ISOLATED_SHARE = 0.01, 0.9
"""Sum of the kernel values with other centers below which a row is isolated, and the share of
isolated rows above which the bandwidth counts as too narrow. With a smaller share of distinct rows,
isolated rows are not counted."""
MIN_SPAN_SD, SPAN_QUANTILES = 0.2, (0.05, 0.95)
"""Smallest distance between these two quantiles of a feature, in its standard deviations; the
normal distribution has 3.3."""

NOTHING_NOTE = "the model explains nothing of its training rows"
ISOLATED_NOTE = "the model knows only the rows of its centers"
SQUEEZED_NOTE = "nine tenths of the values of feature"
"""Beginnings of the warnings."""


class TrainingFit(NamedTuple):
    """Fit of a model to some of its training rows.

    The names of the fields are keys of the run log. The error is the squared error, or the loss if
    a loss for numeric targets was minimised. The constant is the mean of the targets of these rows;
    for such a loss, it is the offset of the model, because a quantile is not a mean.

    rows : number of rows that were evaluated
    mse : mean squared error over rows and outputs, on the scale on which targets are learned
    explained : 1 - (error of the model / error of the constant), summed over rows and outputs: R^2
        for the squared error; None if the error of the constant is not above 0
    spread : variance of the predictions, divided by the variance of the targets
    excess_in_se : error of the model minus the error of the constant, in standard errors
    isolated_share : share of isolated rows, whose kernel values with all centers not equal to the
        row are about 0; 0 if it is not computed
    beats_most_common_class : whether the model predicts more classes right than the most common
        class does, which is possible even if its outputs hardly vary
    """

    rows: int
    mse: float
    explained: float | None
    spread: float
    excess_in_se: float
    isolated_share: float = 0.0
    beats_most_common_class: bool = False

    def warning(self, fixed_settings: Sequence[str] = ()) -> str | None:
        """Return a warning if the model is worthless, else None.

        fixed_settings : names of the settings that are not "auto", for the remedy
        """
        if self.beats_most_common_class:
            return None
        if self.spread < CONSTANT_VARIANCE:
            problem = "its predictions are nearly constant"
        elif self.excess_in_se > WORSE_THAN_MEAN_SE:
            factor = "above" if self.explained is None else f"{1 - self.explained:.3g} times"
            problem = f"its error on them is {factor} that of a constant"
        elif self.isolated_share > ISOLATED_SHARE:
            return (
                f"{ISOLATED_NOTE}: {self.isolated_share:.0%} of the training rows are out of reach "
                "of other centers, and on new rows the model predicts the mean of the targets; "
                'give a larger bandwidth, or leave bandwidth at "auto"'
            )
        else:
            return None
        names = " and ".join(fixed_settings)
        remedy = f'leave {names} at "auto", ' if names else ""
        return (
            f"{NOTHING_NOTE}: {problem}; {remedy}add features that are related to the targets, "
            "or use the mean"
        )


def report_fit(run: ResolvedRun, model: Callable[[], KernelModel], report: Report) -> float | None:
    """Report the fit of the model, and warn if the model is worthless.

    Returns the mean squared error of the evaluated rows; None on ranks other than 0, or without
    rows that have a weight.

    model : function that returns the model; called on rank 0 only
    """
    if run.inputs.ranks.rank:
        return None
    kernel_model, block = model(), read_fit_sample(run)
    model_settings = run.config.model
    if text := squeezed_features(kernel_model, block):
        is_automatic = (
            run.config.data.scale == model_settings.kernel == model_settings.bandwidth == "auto"
        )
        # If these settings are automatic, `with_scores` has decided against quantile scores.
        if not is_automatic:
            text += f", or else set {mention('data.scale', 'quantiles')}"
        warn(text, once=text)
    fit = training_fit(run, kernel_model, block)
    if fit is not None:
        report("fit", fit._asdict())
        settings = {
            "kernel": model_settings.kernel,
            "bandwidth": model_settings.bandwidth,
            "ridge": run.config.solver.ridge,
        }
        if text := fit.warning([name for name, value in settings.items() if value != "auto"]):
            warn(text, once=text.partition(":")[0])
    return None if fit is None else fit.mse


def read_fit_sample(run: ResolvedRun) -> RowBlock:
    """Read up to `MAX_FIT_ROWS` training rows, without random transforms."""
    base, seed = run.data.base, run.config.run.random_state
    n = min(MAX_FIT_ROWS, base.n_rows, max(1, MAX_FIT_BYTES // (8 * run.problem.d)))
    return sample_rows(base, n, seed, stage=FIT_STAGE, max_units=MAX_FIT_UNITS)


def squeezed_features(model: KernelModel, block: RowBlock) -> str | None:
    """Return a warning if a few large values of a feature leave no room for the others.

    These values then determine the standard deviation that scales the feature, and distances hardly
    depend on the differences between other rows. Features that share one scale, as pixels do, are
    not checked. Values equal to the mean do not count, because missing cells get the mean.
    """
    features = _separately_scaled_features(model)
    if not len(features):
        return None
    with model.backend.active():
        X = model.backend.to_host(model.transformed_rows(block)).astype(np.float64)[:, features]
    width = _span(X)
    varies = np.ptp(X, axis=0) >= 1  # rounding errors of a constant are smaller
    narrow = np.flatnonzero((width > 0) & (width < MIN_SPAN_SD) & varies)
    squeezed = [k for k in narrow.tolist() if _span(X[X[:, k] != 0, k]) < MIN_SPAN_SD]
    if not squeezed:
        return None
    narrowest = int(squeezed[np.argmin(width[squeezed])])
    feature = int(features[narrowest])
    name = feature if model.columns is None else repr(model.columns[feature])
    count_text = f" ({len(squeezed)} features are like it)" if len(squeezed) > 1 else ""
    return (
        f"{SQUEEZED_NOTE} {name} span only {width[narrowest]:.1g} of its standard deviation, "
        "because a few values are very large, so that the model hardly distinguishes the others"
        f"{count_text}; give NaN in a data frame, or ingest with na_values, for values that stand "
        "for missing ones"
    )


def _span(values: Floats) -> Any:
    """Return the distance between the two `SPAN_QUANTILES` along the first axis."""
    low, high = np.quantile(values, SPAN_QUANTILES, axis=0)
    return high - low


def _separately_scaled_features(model: KernelModel) -> npt.NDArray[np.int64]:
    """Return the indices of numeric features that are scaled by their own standard deviation."""
    if scores_among(model.fixed_transforms) or patches_among(model.fixed_transforms):
        return np.empty(0, np.int64)
    if model.encoder is not None:
        encoder = Encoder.from_json(model.encoder, "the model")
        parts = zip(encoder.codes, encoder.groups, strict=True)
        numeric = [part.start for code, (_, part) in parts if code.kind == "number"]
        return np.array(numeric, np.int64)
    by_feature = any(isinstance(t, Scale) and t.mode == "feature" for t in model.fixed_transforms)
    return np.arange(math.prod(model.row_shape) if by_feature else 0)


def training_fit(run: ResolvedRun, model: KernelModel, block: RowBlock) -> TrainingFit | None:
    """Return the fit of a model to the rows of a block; None if no row has a weight.

    If all targets are equal, the fit counts as perfect, except for `mse`.

    block : stored rows, with targets in the units of the user
    """
    base = run.data.base
    w = weigh_rows(block.y, block.w, run.data.weight_factors)
    if not w.any():
        return None
    F = model.values(block.X).astype(np.float64)
    Y = np.broadcast_to(_targets(block, base.classes), F.shape)
    mean = w @ Y / w.sum()
    constant_errors, errors = (w * ((Y - f) ** 2).sum(axis=1) for f in (mean, F))
    mse = float(w @ model.targets.squared_errors(F, Y).mean(axis=1) / w.sum())
    total_squares = constant_errors.sum()
    if not total_squares > 0:
        return TrainingFit(len(Y), mse, explained=1.0, spread=1.0, excess_in_se=0.0)
    if model.loss is not None and not model.loss.for_classes:  # a quantile is not a mean
        constant = np.broadcast_to(model.loss.predict(np, model.targets.mean.copy()), Y.shape)
        constant_errors, errors = (w * model.loss.values(np, f, Y) for f in (constant, F))
    excess = errors - constant_errors  # of each row
    standard_error = max(excess.std() / np.sqrt(len(excess)), MIN_STANDARD_ERROR)
    constant_error = constant_errors.sum()  # a user's loss may be 0, or negative
    explained = float(1 - errors.sum() / constant_error) if constant_error > 0 else None
    spread = (w * ((F - w @ F / w.sum()) ** 2).sum(axis=1)).sum() / total_squares
    n_right = w @ (F.argmax(axis=1) == Y.argmax(axis=1))
    beats_most_common_class = bool(n_right > (w @ Y).max() * (1 + 1e-9))
    return TrainingFit(
        len(excess), mse, explained, float(spread),
        float(excess.mean() / standard_error), _isolated_share(model, block),
        base.classes is not None and beats_most_common_class,
    )  # fmt: skip


def _targets(block: RowBlock, classes: Sequence[str] | None) -> Floats:
    """Return the targets (m, c) of a block as float64; classes are one-hot."""
    if classes is None:
        return block.y.reshape(len(block.y), -1).astype(np.float64)
    if block.y.ndim > 1:  # class probabilities
        return block.y.astype(np.float64)
    return np.eye(len(classes))[block.y.astype(np.int64)]


def _isolated_share(model: KernelModel, block: RowBlock) -> float:
    """Return the share of isolated rows: rows whose kernel values with all centers not equal to the
    row are about 0.

    0 is returned if many rows are equal, because a center then predicts all rows equal to it, for
    kernels that are not a function of a distance, and for weights that belong to explicit features
    instead of centers.
    """
    kernel, backend = model.op.kernel, model.backend
    rows = block.X.reshape(len(block.X), -1)
    has_repeats = len(np.unique(rows, axis=0)) < ISOLATED_SHARE * len(rows)
    if (
        kernel.geometry not in ("distance", "l1")
        or has_repeats
        or len(model.Z) != len(model.weights)
    ):
        return 0.0
    with backend.active(), backend.single_threaded_blas():
        X, ones = model.transformed_rows(block), backend.xp.ones((len(model.Z), 1), model.op.dtype)
        kernel_sums = model.op.product(model.op.points(X, left=True), model.Z, ones)
        sums = backend.to_host(kernel_sums).reshape(-1)
    # The sum is 1 if the only center near the row is equal to it.
    has_equal_center_only = np.abs(sums - 1) < ISOLATED_KERNEL_SUM
    return float(np.mean((sums < ISOLATED_KERNEL_SUM) | has_equal_center_only))
