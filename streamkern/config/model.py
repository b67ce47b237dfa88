"""Section [model] of a run file: the kernel, its centers and the loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, InstanceOf, PlainSerializer, model_validator

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.rules import (
    AutoCount,
    Bandwidth,
    CentersSetting,
    Count,
    CountOrNone,
    Flag,
    MetricSetting,
    Quantiles,
    Rule,
    Table,
)
from streamkern.kernels.builtin import KERNELS, Kernel, builtin_name, get_kernel
from streamkern.kernels.own import import_kernel_classes
from streamkern.losses.base import Loss
from streamkern.losses.losses import LOSS_CLASSES, SQUARES
from streamkern.losses.own import described_loss, given_loss

ROUGH_TO_SMOOTH = ("laplace", "matern32", "matern52", "gaussian")
"""Kernels from which kernel = "auto" chooses, the roughest first."""
LEARNED: Final = ("learn", "learn-diagonal", "learn-full")
"""Values of model.metric for which a metric is learned; "auto" may become one of them."""
METRICS: Final = ("auto", "none", *LEARNED)
"""Values of model.metric that are not a path or an array."""


def _checked_kernel(value: object) -> object:
    """Return a kernel with our spelling of its name; ValueError if it cannot be a kernel."""
    if isinstance(value, str):
        value = "auto" if value.lower() == "auto" else builtin_name(value)
    is_name = isinstance(value, str) and (value in ("auto", *KERNELS) or ":" in value)
    if is_name or isinstance(value, Mapping | Kernel):
        return value
    raise ValueError("not a kernel")


def _json_kernel(kernel: object) -> object:
    """Return a kernel as JSON values."""
    return kernel.describe() if isinstance(kernel, Kernel) else kernel


KernelChoice = Annotated[
    str | dict[str, Any] | InstanceOf[Kernel],
    BeforeValidator(_checked_kernel),
    PlainSerializer(_json_kernel, when_used="json"),
    Rule(
        f'"auto", one of {", ".join(json.dumps(name) for name in KERNELS)}, "module:Class" of a '
        'custom class, or a table with kind = one of these, "sum" or "product"'
    ),
]


def _checked_loss(value: object) -> object:
    """Return a loss; ValueError if it cannot be one."""
    if isinstance(value, Loss) or value in (SQUARES, *LOSS_CLASSES):
        return value
    raise ValueError("not a loss")


LossChoice = Annotated[
    str | InstanceOf[Loss],
    BeforeValidator(_checked_loss),
    PlainSerializer(described_loss, when_used="json"),
    Rule(
        f"one of {', '.join(json.dumps(name) for name in (SQUARES, *LOSS_CLASSES))}, or "
        '"module:Class" of a custom class'
    ),
]


class ModelConfig(Table):
    """[model]: the kernel and its centers.

    kernel : kernel function; "auto": of four kernels, the roughest whose leave-one-out error on at
        most 512 rows is within 3 % of the lowest. It is a name, "module:Class" of a custom class,
        or a table, such as {kind = "polynomial", degree = 2}. A sum or product of kernels is a
        table, too, such as {kind = "sum", parts = ["laplace", {kind = "gaussian", bandwidth =
        2.0}]}. In Python it may be a `Kernel` with its bandwidth, such as 0.5 * Laplace(3) +
        Polynomial(2). "auto" chooses among "laplace", "matern32", "matern52" and "gaussian"; for
        "sgd", for EigenPro and with ridge 0 it is "laplace".
    bandwidth : length scale of the kernel, in units of the features after scaling; "auto": the one
        nearest to the median distance whose leave-one-out error on at most 512 rows is within 3 %
        of the lowest. In a sum or product of kernels, it is the bandwidth of the parts that have
        none of their own. "median" is the median distance,
        in the norm of the kernel, between centers, or between the rows with which "kmeans" and
        "rpcholesky" begin (with `kernel="auto"`, between 512 rows). "auto" tries 1/64 to 16 times
        the median distance.
    metric : metric of the distances; "auto": a learned metric on tables, else none. "learn" learns
        a scale for each feature, or a matrix, and uses it if held-out rows are predicted
        significantly better. A kernel and a bandwidth that are "auto" are then chosen for this
        metric. "learn-diagonal" learns only scales, "learn-full" only a matrix. "none" uses the
        Euclidean distance. "auto" means "learn" on tables (2 to 256 features that are not
        classified as pixels) with at least 256 rows, or 1000 for classes, if the bandwidth is
        "auto" and the kernel is "auto" or one of its candidates. A path or URL names an array (.npy
        or zarr); in Python it may be the array: scales (d,), or a matrix A (d, r) for distances |(x
        - z) A| of the features after scaling.
    n_centers : number of centers p; "auto": all rows, or as many as `effort` allows. "all" means
        centers = "all". If there are fewer rows than this number, all rows are centers, and a
        warning is issued.
    centers : selection of the centers, or their path. "random": random rows of the data.
        "balanced": random rows, equally many of each class if there are enough. "kmeans": means of
        clusters of a stream of rows, which help if p is far below n. "rpcholesky": rows that span
        the kernel matrix well, out of up to 8 p random rows. "all": every row. A path or URL names
        an array of rows (.npy or zarr) or a store, with their values before the scaling; in Python
        it may be an array (p, d).
    features : whether f is made of kernels or of explicit features. "kernel": f is a sum of kernels
        at the centers. "nystrom": the same f, trained as a linear model of the features L^-1 k(Z,
        x), where K(Z, Z) = L L^T. "fourier": a linear model of `n_features` random Fourier
        features, without centers, for the built-in kernels that are functions of a distance. The
        solvers "block", "sgd", "eigenpro1" and "direct" train explicit features.
    n_features : number of Fourier features, even; "auto": 10 000.
    fit_intercept : whether the (weighted) mean of the targets is subtracted before training, and
        added to f afterwards. Without it, as in most papers, f is only a sum of kernels. The mean
        is over the rows of the run; in `partial_fit` over the first block; in a warm start over the
        rows of the earlier run; and if a function makes or changes the targets, over a sample of
        the rows. Mix-up does not change the mean.
    loss : the loss that is minimised. For classes, besides "squared_error": "log_loss" of the
        softmax of the outputs, and "squared_hinge" of each class against the others. For values:
        "absolute_error", whose minimum is the median; "huber", which is linear for large errors;
        "quantile" and "expectile", with the setting `quantile`. For counts and amounts: "poisson"
        for targets of at least 0, and "gamma" for targets above 0; f is then the logarithm of the
        prediction. A custom loss is "module:Class", or a table {kind = "module:Class", ...} with
        its parameters.
    quantile : the quantile of the loss "quantile", or the expectile of "expectile", in (0, 1); 0.5
        if it is left out. With an increasing list, such as [0.05, 0.5, 0.95], the model predicts
        all of these quantiles of a single target, and they do not cross. With a list of one number,
        predictions are a column, (n, 1).
    effort : limit of the work of "auto" for `n_centers` and `metric`. "quick": all rows are centers
        up to 4096 rows, otherwise 2000; a metric is learned from 6144 rows. "default": all up to 16
        384 rows, otherwise 10 000; a metric from 15 360 rows. "best": all up to 100 000 rows if
        their kernel matrix fits into memory in float32, otherwise 10 000; a metric from 24 576
        rows. All rows are centers only with the solver "direct", and without random transforms.
    target_transform : the scale of the targets on which the squared error is minimised; predictions
        and evaluation metrics are in the units of the targets. "log" is log(1 + y / unit), for
        targets of at least 0; each output has a unit of its own. "auto" means "log" if there is one
        target and left-out rows are then predicted clearly better, else "none". It tries "log" for
        skewed targets that are never below 0, in whole runs of at least 256 rows, if kernel and
        bandwidth are "auto". "none" takes the targets as they are.
    patch_features : number of filters N whose responses replace the pixels of an image, such as
        512; 0: none. A filter is a whitened patch of a training image, drawn at random. Its
        response is computed for all patches of an image. The part of the responses above a
        threshold, and the part below the negative threshold, are averaged over each region of the
        image, which gives 2 N features for each region. They are computed on the device, after
        transforms and scaling, for training and prediction.
    patch_size : pixels along a side of a patch; "auto": 6, or 3 in images with a side of fewer than
        16 pixels.
    patch_grid : number of regions along a side of an image; 2 divides it into quarters, which
        gives 8 N features.
    """

    table = "model"
    kernel: KernelChoice = "auto"
    bandwidth: Bandwidth = "auto"
    metric: MetricSetting = "auto"
    n_centers: AutoCount = "auto"
    centers: CentersSetting = "random"
    features: Literal["kernel", "fourier", "nystrom"] = "kernel"
    n_features: AutoCount = "auto"
    fit_intercept: Flag = True
    loss: LossChoice = SQUARES
    quantile: Quantiles = None
    effort: Literal["quick", "default", "best"] = "default"
    target_transform: Literal["auto", "none", "log"] = "auto"
    patch_features: CountOrNone = 0
    patch_size: AutoCount = "auto"
    patch_grid: Count = 2

    @property
    def kernels(self) -> tuple[Any, ...]:
        """The candidates for the kernel, which are several if it is "auto"."""
        return ROUGH_TO_SMOOTH if self.kernel == "auto" else (self.kernel,)

    @model_validator(mode="after")
    def _check_kernel(self) -> ModelConfig:
        """Require a kernel that can be constructed, and that uses the bandwidth if one is set."""
        if isinstance(self.kernel, str) and self.bandwidth == "auto":
            return self
        geometries: list[str] = []  # one for each part that asks for the bandwidth

        def bandwidth(geometry: str) -> float:
            geometries.append(geometry)
            return 1.0

        try:
            get_kernel(self.kernels[0], bandwidth)
        except ConfigError as error:
            raise ConfigError(f"{mention('model.kernel')}: {error.message}") from None
        if self.bandwidth != "auto" and not geometries:
            value = "median" if self.bandwidth == "median" else f"{self.bandwidth:g}"
            raise ConfigError(
                f"{mention(f'model.bandwidth={value}')} is not used by any part of "
                f"{mention('model.kernel', self.kernel)}",
                "leave it out",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _convert_all_centers(cls, values: Any) -> Any:
        """Convert n_centers = "all" to centers = "all", its only possible meaning."""
        all_rows = isinstance(values, dict) and str(values.get("n_centers")) == "all"
        if all_rows and values.get("centers", "random") in ("random", "all"):
            return values | {"centers": "all", "n_centers": "auto"}
        return values

    @model_validator(mode="before")
    @classmethod
    def _import_user_classes(cls, values: Any) -> Any:
        """Convert user-defined classes to a kernel and a loss."""
        if not isinstance(values, dict):
            return values
        convert = {"kernel": import_kernel_classes, "loss": given_loss}
        return values | {name: convert[name](values[name]) for name in convert if name in values}

    @model_validator(mode="after")
    def _check_quantile(self) -> ModelConfig:
        """Require a loss that uses the quantile, if one is set."""
        losses = [name for name, loss in LOSS_CLASSES.items() if loss.takes_quantile]
        if self.quantile is not None and self.loss not in losses:
            raise ConfigError(
                f"{mention('model.quantile', self.quantile)} is not used by "
                f"{mention('model.loss', self.loss)}",
                f"leave it out, or give one of {', '.join(losses)} as {mention('model.loss')}",
            )
        return self

    @model_validator(mode="after")
    def _check_target_transform(self) -> ModelConfig:
        """Require the squared error for targets on a log scale."""
        if self.target_transform == "log" and self.loss != SQUARES:
            raise ConfigError(
                f"{mention('model.target_transform', 'log')} needs the squared error, not "
                f"{mention('model.loss', self.loss)}",
                f"leave one of them out; {mention('model.loss', 'poisson')} and "
                f"{mention('model.loss', 'gamma')} have a log scale of their own",
            )
        return self

    @model_validator(mode="after")
    def _check_patch_features(self) -> ModelConfig:
        """Require patch features if their size or grid is set."""
        if self.patch_features:
            return self
        for name, default in (("patch_size", "auto"), ("patch_grid", 2)):
            if (value := getattr(self, name)) != default:
                patch_features = mention("model.patch_features")
                raise ConfigError(
                    f"{mention(f'model.{name}', value)} has no effect, because {patch_features} "
                    "is 0",
                    f"set {patch_features}, or leave {mention(f'model.{name}')} out",
                )
        return self

    @model_validator(mode="after")
    def _check_metric(self) -> ModelConfig:
        """Require a kernel for which a metric can be set, if one is set."""
        if self.metric not in ("auto", "none"):
            self.check_takes_metric()
        return self

    def check_takes_metric(self) -> None:
        """Raise ConfigError if the kernel cannot be used with a metric."""
        if self.features == "fourier":
            raise ConfigError(
                f"{mention('model.metric')} cannot be used with "
                f"{mention('model.features', 'fourier')}: a metric needs kernels at centers",
                "leave one of them out",
            )
        if isinstance(self.kernel, Kernel) and self.kernel.metric is not None:
            raise ConfigError(
                f"{mention('model.metric')} cannot be combined with the metric of "
                f"{mention('model.kernel', self.kernel)}",
                "leave one of them out",
            )

    def check_takes_centers(self) -> None:
        """Raise ConfigError if the features have no centers."""
        if self.features == "fourier":
            n_centers = mention("model.n_centers", self.n_centers)
            prefix = "" if self.n_centers == "auto" else f"{n_centers}: "
            raise ConfigError(
                f"{prefix}{mention('model.features', 'fourier')} has no centers",
                'leave centers and n_centers out, and set n_features, or set features = "nystrom"',
            )

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelConfig:
        """Require an even number of features for Fourier features, and centers for the others."""
        fourier = self.features == "fourier"
        if not fourier and self.n_features != "auto":
            raise ConfigError(
                f"{mention('model.n_features', self.n_features)} is for "
                f"{mention('model.features', 'fourier')}",
                "leave it out, or set n_centers",
            )
        if self.n_features != "auto" and self.n_features % 2:
            raise ConfigError(
                f"{mention('model.n_features', self.n_features)} must be even, for a cosine and "
                "a sine of each frequency; add or subtract 1"
            )
        if self.centers != "random" or self.n_centers != "auto":
            self.check_takes_centers()
        if self.centers == "all" and self.n_centers != "auto":
            raise ConfigError(
                f"{mention('model.n_centers', self.n_centers)} contradicts "
                f"{mention('model.centers', 'all')}, which uses every training row",
                'leave n_centers out or set centers = "random"',
            )
        return self
