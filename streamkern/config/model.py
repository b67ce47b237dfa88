"""[model] of a run file: the kernel and its centers."""

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
from streamkern.kernels.builtin import KERNELS, Kernel, get_kernel, our_name
from streamkern.kernels.own import given_kernel
from streamkern.losses.base import Loss
from streamkern.losses.losses import LOSS_CLASSES, SQUARES
from streamkern.losses.own import described_loss, given_loss

ROUGH_TO_SMOOTH = ("laplace", "matern32", "matern52", "gaussian")
"""Kernels from which "auto" chooses."""
LEARNED: Final = ("learn", "learn-diagonal", "learn-full")
"""Metrics that are learned."""
METRICS: Final = ("auto", "none", *LEARNED)
"""All metrics by name; others are arrays."""


def _kernel(value: object) -> object:
    if isinstance(value, str):
        value = "auto" if value.lower() == "auto" else our_name(value)
    known = isinstance(value, str) and (value in ("auto", *KERNELS) or ":" in value)
    if known or isinstance(value, Mapping | Kernel):
        return value
    raise ValueError("not a kernel")


def _described(kernel: object) -> object:
    return kernel.describe() if isinstance(kernel, Kernel) else kernel


KernelChoice = Annotated[
    str | dict[str, Any] | InstanceOf[Kernel],
    BeforeValidator(_kernel),
    PlainSerializer(_described, when_used="json"),
    Rule(
        f'"auto", one of {", ".join(json.dumps(name) for name in KERNELS)}, "module:Class" of a '
        'class of your own, or a table with kind = one of these, "sum" or "product"'
    ),
]


def _loss(value: object) -> object:
    if isinstance(value, Loss) or value in (SQUARES, *LOSS_CLASSES):
        return value
    raise ValueError("not a loss")


LossChoice = Annotated[
    str | InstanceOf[Loss],
    BeforeValidator(_loss),
    PlainSerializer(described_loss, when_used="json"),
    Rule(
        f"one of {', '.join(json.dumps(name) for name in (SQUARES, *LOSS_CLASSES))}, or "
        '"module:Class" of a class of your own'
    ),
]


class ModelConfig(Table):
    """[model]: the kernel and its centers.

    kernel : kernel function; "auto": the one of four with which rows predict each other best. It is
        a name, "module:Class" of a class of your own, or a table, such as {kind = "polynomial",
        degree = 2}. A sum or product of kernels is a table, too, such as {kind = "sum", parts =
        ["laplace", {kind = "gaussian", bandwidth = 2.0}]}. In Python it may be a `Kernel` with its
        bandwidth, such as 0.5 * Laplace(3) + Polynomial(2). "auto" chooses among "laplace",
        "matern32", "matern52" and "gaussian" on 512 rows (`setup.choose_kernel`); for "sgd" and
        EigenPro it takes "laplace".
    metric : metric of the distances; "auto": a learned one on tables, else none. "learn" learns a
        scale for each feature, or a matrix, and uses it if held-out rows are predicted
        significantly better (`setup.choose_metric`). A kernel and a bandwidth that are "auto" are
        then chosen to suit the metric. "learn-diagonal" allows only scales, "learn-full" only a
        matrix. "none" takes the features as they are. "auto" means "learn" on tables (2 to 256
        features that are not classified as pixels) with at least 256 rows, or 1000 for classes, if
        the bandwidth is "auto" and the kernel is "auto" or one of its candidates
        (`resolve.metric_mode`). A path or URL names an array (.npy or zarr), which in Python may be
        given itself: scales (d,), or a matrix A (d, r) for distances |(x - z) A| of the features
        after scaling.
    bandwidth : length scale of the kernel; "auto": the one with which rows predict each other best.
        Its unit is that of the features after scaling. In a sum or product of kernels, it holds for
        the parts that have no bandwidth of their own. "median" is the median distance, in the norm
        of the kernel, between centers, or between the rows with which "kmeans" and "rpcholesky"
        begin (with `kernel="auto"`, between 512 rows). "auto" tries 1/64 to 16 times the median
        distance on 512 rows (`setup.choose_kernel`).
    n_centers : number of centers p; "auto": all rows, or as many as `effort` allows. "all" means
        centers = "all". If there are fewer rows than this number, all rows are centers, and a
        warning says so.
    effort : limit of the work of "auto" for `n_centers` and `metric`. "quick": all rows are centers
        up to 4096 rows, otherwise 2000; a metric is learned from 6144 rows. "default": all up to 16
        384 rows, otherwise 10 000; a metric from 15 360 rows. "best": all up to 100 000 rows if
        their kernel matrix fits into memory in float32, otherwise 10 000; a metric from 24 576
        rows. All rows are centers only with the solver "direct", and without random transforms.
    features : whether f is made of kernels or of explicit features. "kernel": f is a sum of kernels
        at the centers. "nystrom": the same f, trained as a linear model of the features L^-1 k(Z,
        x), where K(Z, Z) = L L^T. "fourier": a linear model of `n_features` random Fourier
        features, without centers, for the built-in kernels that are functions of a distance. The
        solvers "block", "sgd", "eigenpro1" and "direct" train explicit features.
    centers : selection of the centers, or their path. "random": random rows of the data.
        "balanced": random rows, equally many of each class if there are enough. "kmeans": means of
        clusters of a stream of rows (`kmeans`), which help if p is far below n. "rpcholesky": rows
        that span the kernel matrix well, out of up to 8 p random rows (`rpcholesky`). "all": every
        row. A path or URL names an array of rows (.npy or zarr) or a store, in the units before the
        scaling; in Python it may be an array (p, d).
    n_features : number of Fourier features, even; "auto": 10 000.
    fit_intercept : whether the mean of the targets is subtracted before training, and added to f
        afterwards. It is the weighted mean. Without it, as in most papers, f is a sum of kernels
        and nothing else. The mean is over the rows of the run; in `partial_fit` over the first
        block (f learns by how much later blocks differ); in a warm start over the rows of the
        earlier run; and if a function makes or changes the targets, over a sample of the rows.
        Mix-up keeps the mean.
    loss : the loss that is minimised. For classes, besides squares: "log_loss" of the softmax of
        the outputs, and "squared_hinge" of each class against the others. For values:
        "absolute_error", whose minimum is the median; "huber", which is linear for large errors;
        "quantile" and "expectile", with the setting `quantile`. For counts and amounts, with the
        solver "block" or "direct": "poisson" for targets of at least 0, and "gamma" for targets
        above 0; f is then the logarithm of the prediction. A loss of your own is "module:Class", or
        a table {kind = "module:Class", ...} with its parameters.
    quantile : the quantile of the loss "quantile", or the expectile of "expectile", in (0, 1); 0.5
        if it is left out. An increasing list, such as [0.05, 0.5, 0.95], gives a single target as
        many outputs, which do not cross. With a list of one number, predictions are a column, (n,
        1).
    target_transform : the scale of the targets on which the squared error is minimised; predictions
        and figures are in the units of the targets. "log" is log(1 + y / unit), for targets of at
        least 0; each output has a unit of its own. "auto" means "log" if there is one target and
        left-out rows are then predicted clearly better, else "none". It tries "log" for skewed
        targets that are never below 0, in whole runs of at least 256 rows, if kernel and bandwidth
        are "auto" (`setup.choose_transform`). "none" takes the targets as they are.
    patch_features : number of filters N whose responses replace the pixels of an image, such as
        512; 0: none. A filter is a whitened patch of a training image, drawn at random. It is
        compared with all patches of an image. The part of the responses above a threshold, and the
        part below the negative threshold, are averaged over each region of the image, which gives 2
        N features for each region. They are computed on the device, after transforms and scaling,
        for every row that the model sees.
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
        """The kernel, or the candidates for "auto"."""
        return ROUGH_TO_SMOOTH if self.kernel == "auto" else (self.kernel,)

    @model_validator(mode="after")
    def _kernel_can_be_made(self) -> ModelConfig:
        if isinstance(self.kernel, str) and self.bandwidth == "auto":
            return self
        used_by: list[str] = []

        def width(geometry: str) -> float:
            used_by.append(geometry)
            return 1.0

        try:
            get_kernel(self.kernels[0], width)
        except ConfigError as error:
            raise ConfigError(f"{mention('model.kernel')}: {error.message}") from None
        if self.bandwidth != "auto" and not used_by:
            shown = "median" if self.bandwidth == "median" else f"{self.bandwidth:g}"
            raise ConfigError(
                f"{mention(f'model.bandwidth={shown}')} is used by no part of "
                f"{mention('model.kernel', self.kernel)}",
                "leave it out",
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _all_centers(cls, values: Any) -> Any:
        """Take n_centers = "all" as centers = "all", its only possible meaning."""
        every = isinstance(values, dict) and str(values.get("n_centers")) == "all"
        if every and values.get("centers", "random") in ("random", "all"):
            return values | {"centers": "all", "n_centers": "auto"}
        return values

    @model_validator(mode="before")
    @classmethod
    def _own_classes(cls, values: Any) -> Any:
        """Take user-defined classes as a kernel and a loss."""
        if not isinstance(values, dict):
            return values
        taken = {"kernel": given_kernel, "loss": given_loss}
        return values | {name: taken[name](values[name]) for name in taken if name in values}

    @model_validator(mode="after")
    def _quantile_is_taken(self) -> ModelConfig:
        taking = [name for name, loss in LOSS_CLASSES.items() if loss.takes_quantile]
        if self.quantile is not None and self.loss not in taking:
            raise ConfigError(
                f"{mention('model.quantile', self.quantile)} is not used by "
                f"{mention('model.loss', self.loss)}",
                f"leave it out, or give one of {', '.join(taking)} as {mention('model.loss')}",
            )
        return self

    @model_validator(mode="after")
    def _log_scale_of_squares(self) -> ModelConfig:
        if self.target_transform == "log" and self.loss != SQUARES:
            raise ConfigError(
                f"{mention('model.target_transform', 'log')} is for squares, and not for "
                f"{mention('model.loss', self.loss)}",
                f"leave one of them out; {mention('model.loss', 'poisson')} and "
                f"{mention('model.loss', 'gamma')} have a log scale of their own",
            )
        return self

    @model_validator(mode="after")
    def _patches_are_asked_for(self) -> ModelConfig:
        if self.patch_features:
            return self
        for name, usual in (("patch_size", "auto"), ("patch_grid", 2)):
            if (value := getattr(self, name)) != usual:
                raise ConfigError(
                    f"{mention(f'model.{name}', value)} is used by "
                    f"{mention('model.patch_features')}, which is 0",
                    "set that, or leave this out",
                )
        return self

    @model_validator(mode="after")
    def _one_metric(self) -> ModelConfig:
        if self.metric not in ("auto", "none"):
            self.check_takes_metric()
        return self

    def check_takes_metric(self) -> None:
        """Raise ConfigError if the kernel cannot be used with a metric."""
        if self.features == "fourier":
            raise ConfigError(
                f"{mention('model.metric')} is for kernels at centers, and "
                f"{mention('model.features', 'fourier')} has none",
                "leave one of them out",
            )
        if isinstance(self.kernel, Kernel) and self.kernel.metric is not None:
            raise ConfigError(
                f"{mention('model.metric')} would replace the metric of "
                f"{mention('model.kernel', self.kernel)}",
                "leave one of them out",
            )

    def check_takes_centers(self) -> None:
        """Raise ConfigError if the features have no centers."""
        if self.features == "fourier":
            prefix = (
                ""
                if self.n_centers == "auto"
                else f"{mention('model.n_centers', self.n_centers)}: "
            )
            raise ConfigError(
                f"{prefix}{mention('model.features', 'fourier')} has no centers",
                'leave centers and n_centers out, and set n_features, or set features = "nystrom"',
            )

    @model_validator(mode="after")
    def _one_way_to_count(self) -> ModelConfig:
        fourier = self.features == "fourier"
        if not fourier and self.n_features != "auto":
            raise ConfigError(
                f"{mention('model.n_features', self.n_features)} is for "
                f"{mention('model.features', 'fourier')}",
                "leave it out, or set n_centers",
            )
        if self.n_features != "auto" and self.n_features % 2:
            raise ConfigError(
                f"{mention('model.n_features', self.n_features)} must be even: a cosine and a sine "
                "of each frequency"
            )
        if self.centers != "random" or self.n_centers != "auto":
            self.check_takes_centers()
        if self.centers == "all" and self.n_centers != "auto":
            raise ConfigError(
                f"{mention('model.n_centers', self.n_centers)} contradicts "
                f"{mention('model.centers', 'all')}, which takes every training row",
                'leave n_centers out or set centers = "random"',
            )
        return self
