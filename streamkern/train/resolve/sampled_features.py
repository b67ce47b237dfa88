"""Quantile scores and patch features, which a sample of the rows of a run determines.

`QuantileScores.of_sample` finds the features whose distribution is far from normal. Kernel ridge
regression with a Laplace kernel then predicts each of some rows from all the others, with and
without the scores, each time with the bandwidth and the noise of least error. The scores are used
if the mean squared error falls by `SCORES_GAIN_SE` standard errors.

Patch features replace the pixels of images if the settings ask for them. They are drawn from a
sample, unless they are already known.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from streamkern.backend.base import Backend
from streamkern.backend.devices import get_backend
from streamkern.basics.array_types import Floats, HostArray
from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.log_scale import symmetric_log
from streamkern.basics.message import mention
from streamkern.centers.random_rows import median_bandwidth
from streamkern.config.model import ModelConfig
from streamkern.config.run_config import RunConfig
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import MAX_FULL_METRIC_FEATURES
from streamkern.solver.precondition.held_out import geometric_search
from streamkern.solver.precondition.noise import (
    Noise,
    find_noise,
    mean_difference_in_se,
    row_errors,
)
from streamkern.solver.precondition.samples import SampleRows, merge_equal_rows
from streamkern.store.row_block import RowBlock
from streamkern.store.sample_weights import weigh_rows, weight_factors
from streamkern.stream.sources.augmented import AugmentedSource, without_copies
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.patch_features import (
    PATCH_ROWS,
    PATCH_STAGE,
    PatchFeatures,
    patch_size,
    patches_among,
)
from streamkern.stream.sources.quantile_scores import QuantileScores, scores_among
from streamkern.stream.sources.transforms import Scale, is_deterministic
from streamkern.train.resolve.find_scaling import transformed_sample
from streamkern.train.resolve.target_moments import (
    is_skew,
    leaves_kernel_open,
    leaves_transform_open,
)

SCORES_STAGE: Final = 43
"""Index of the random stream from which the sample is drawn."""
MAX_SAMPLE_ROWS: Final = 10_000
"""Largest number of rows of the sample from which the scores are computed."""
MAX_PREDICTED_ROWS, MIN_ROWS_FOR_AUTO_SCORES = 512, 256
"""Largest number of rows that are predicted, and smallest number of rows for "auto"."""
WIDTH_EXPONENTS: Final = (-1, 3)
"""Exponents of two of the smallest and largest bandwidth tried, relative to the median distance."""
SCORES_GAIN_SE = 2.0
"""Standard errors by which the mean squared error must fall for the scores to be used."""
MAX_SAMPLE_ENTRIES: Final = 2 << 20
"""Largest number of entries (images x pixels x channels) of the sample, which is in float64."""
MIN_SAMPLE_IMAGES: Final = 32
"""Number of images in the sample even if they exceed `MAX_SAMPLE_ENTRIES`."""


def with_scores(
    scale: Scale | None,
    scaling_text: str,
    source: BaseSource,
    config: RunConfig,
    use_scores: bool | None,
) -> tuple[Scale | None, str]:
    """Return the scaling and its description, with quantile scores if they are used.

    Reads a sample of the rows if the settings ask for scores or leave them open.

    scale, scaling_text : scaling and description from `find_scale`; `scale` is None if the rows are
        already scaled, for example by the encoder of a table
    use_scores : whether scores are used if the settings leave it open; None: the rows decide

    Raises ConfigError if data.scale = "quantiles" cannot be used, and DataError if it is set and
    rows of the sample are invalid.
    """
    is_required = config.data.scale == "quantiles"
    if scores_among(source.feed_transforms):
        return scale, scaling_text
    if not is_required and (use_scores is False or not _is_open(scale, source, config)):
        return scale, scaling_text
    if is_required and len(source.row_shape) != 1:
        raise ConfigError(
            f"{mention('data.scale', 'quantiles')} is for rows that are vectors, and these have "
            f"the shape {source.row_shape}",
            f"give another {mention('data.scale')}",
        )
    try:
        X, y = _weighted_sample(source, config)
    except DataError:
        if is_required:
            raise
        return scale, scaling_text  # invalid rows do not prevent a plan; a run reports them later
    d = source.row_shape[0]
    unscored = scale or Scale("feature", np.zeros(d), np.ones(d))
    X = (X - unscored.mean) / unscored.scale
    scores = QuantileScores.of_sample(X)
    if scores is None or (not is_required and d + len(scores) > MAX_FULL_METRIC_FEATURES):
        return scale, scaling_text
    if not is_required and use_scores is None and not _are_better(scores, X, y, source, config):
        return scale, scaling_text
    text = f"{scaling_text}; quantile scores of {len(scores)} of {d} features beside them"
    return replace(unscored, mode="quantiles", scores=scores), text


def _is_open(scale: Scale | None, source: BaseSource, config: RunConfig) -> bool:
    """Return whether the settings and the kind of the rows leave it open to use scores."""
    # The encoder of a table has scaled each feature, too.
    are_scaled = source.encoder is not None if scale is None else scale.mode == "feature"
    return (
        config.data.scale == "auto"
        and are_scaled
        and len(source.row_shape) == 1
        and not any(is_deterministic(t) for t in source.feed_transforms)
        and leaves_kernel_open(config)
        and without_copies(source).n_rows >= MIN_ROWS_FOR_AUTO_SCORES
    )


def _weighted_sample(source: BaseSource, config: RunConfig) -> tuple[Floats, HostArray]:
    """Return unscaled features (n, d) and targets of a sample, without rows of weight 0."""
    block, X = _fixed_sample(source, MAX_SAMPLE_ROWS, config.run.random_state, SCORES_STAGE)
    factors = weight_factors(source, config.data.class_weight)
    if factors is None:
        return X.astype(np.float64), block.y
    has_weight = weigh_rows(block.y, block.w, factors) > 0
    return X[has_weight].astype(np.float64), block.y[has_weight]


def _are_better(
    scores: QuantileScores, X: HostArray, y: HostArray, source: BaseSource,
    config: RunConfig,
) -> bool:  # fmt: skip
    """Return whether rows of the sample predict each other significantly better with the scores.

    If the result is not significant, a skewed target is also compared on a log scale, if the run
    may use one, because a few large squared errors may hide the gain.
    """
    Y = y.reshape(len(y), -1).astype(np.float64)
    if source.classes is not None and y.ndim == 1:
        Y = np.eye(len(source.classes))[y]
    gain = _gain(scores, X, Y)
    if abs(gain) >= SCORES_GAIN_SE or Y.shape[1] > 1 or not is_skew(Y[:, 0]):
        return gain >= SCORES_GAIN_SE
    if config.model.target_transform != "log" and not leaves_transform_open(config):
        return False
    return _gain(scores, X, symmetric_log(np, Y, Y.mean(axis=0))) >= SCORES_GAIN_SE


def _gain(scores: QuantileScores, X: HostArray, Y: Floats) -> float:
    """Return the decrease of the mean squared error by the scores, in its standard errors."""
    Y = Y[:MAX_PREDICTED_ROWS]
    deviation = Y.std() or 1.0  # targets may be constant
    backend = get_backend("cpu", 1, "none")
    with backend, backend.active():
        rows = SampleRows(X[:MAX_PREDICTED_ROWS], (Y - Y.mean(axis=0)) / deviation)
        rows = merge_equal_rows(backend, rows)
        score_columns = np.empty((len(rows.X), len(scores)))
        scores.write_scores(np, rows.X, score_columns)
        plain_errors = _errors(backend, rows)
        score_errors = _errors(backend, rows._replace(X=np.column_stack([rows.X, score_columns])))
    return mean_difference_in_se(plain_errors, score_errors)


def _errors(backend: Backend, rows: SampleRows) -> Floats:
    """Return the squared leave-one-out errors of the rows, (n,), with the best bandwidth."""
    width = median_bandwidth(rows.X)
    results: dict[float, tuple[Noise, KernelOperator]] = {}
    last_noise: Noise | None = None

    def error(factor: float) -> float:
        nonlocal last_noise
        kernel: Kernel = get_kernel("laplace", factor * width)
        op = KernelOperator(kernel, backend, "float64", rows.X.mean(axis=0))
        last_noise = find_noise(op, None, rows, last_noise)
        results[factor] = last_noise, op
        return last_noise.error

    errors = geometric_search(error, 0, *WIDTH_EXPONENTS, base=2.0, stride=1)
    noise, op = results[2.0 ** min(errors, key=lambda exponent: errors[exponent])]
    return row_errors(op, None, rows, noise)[0]


def with_patches(
    source: BaseSource,
    scaling_text: str,
    model: ModelConfig,
    seed: int,
    known_features: PatchFeatures | None,
) -> tuple[BaseSource, str]:
    """Return the source, with patch features if `model` asks for them, and the description of its
    scaling.

    Reads a sample of the rows if the patch features are not known.

    scaling_text : description of the scaling without patch features
    known_features : patch features with which the run was started, or that belong to its initial
        weights; None if there are none

    Raises ConfigError if the rows are not images, or have too few different patches.
    """
    features = patches_among(source.feed_transforms)  # a warm start of an estimator has its own
    if not model.patch_features and features is None:
        return source, scaling_text
    size = patch_size(model.patch_size, source.row_shape)
    requested = model.patch_features, size, model.patch_grid
    if features is None:
        features = known_features
        if features is None or _parameters(features) != requested:
            max_images = MAX_SAMPLE_ENTRIES // math.prod(without_copies(source).row_shape)
            n = min(PATCH_ROWS, max(MIN_SAMPLE_IMAGES, max_images))
            images = _fixed_sample(source, n, seed, PATCH_STAGE)[1]
            features = PatchFeatures.of_sample(images, *requested, seed)
        source = AugmentedSource(source, 1, [features])
    elif _parameters(features) != requested:
        raise ConfigError(
            f"{mention('model.patch_features', model.patch_features)} with patches of {size} "
            f"pixels and {mention('model.patch_grid', model.patch_grid)} differ from the fit that "
            f"this one starts from, which has {features!r}",
            f"give the values of that fit, or leave {mention('warm_start')} out",
        )
    (width,) = features.shape_after(source.row_shape)
    text = f"{width} features by {features.n_filters} patches of {features.size} pixels"
    return source, f"{scaling_text}; {text}"


def _parameters(features: PatchFeatures) -> tuple[int, int, int]:
    return features.n_filters, features.size, features.grid


def _fixed_sample(
    source: BaseSource, max_rows: int, seed: int, stage: int
) -> tuple[RowBlock, HostArray]:
    """Return rows of a sample without copies, and their features after the fixed transforms."""
    base = without_copies(source)
    fixed = [t for t in source.feed_transforms if is_deterministic(t)]
    return transformed_sample(base, fixed, min(max_rows, base.n_rows), seed, stage)
