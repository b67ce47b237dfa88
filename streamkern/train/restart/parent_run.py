"""The run, or the fitted model, from whose weights another run starts.

With a *warm start*, the new run chooses its own centers and scaling, which must be the ones that
the weights belong to. A run that *continues* another one takes centers, kernel, metric and scaling
from it. Its data may differ: appended rows, for example, change the statistics of a store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.config.run_config import RunConfig
from streamkern.ingest.tables.encoder import check_encoder
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.notation import bandwidths, with_bandwidths
from streamkern.losses.losses import SQUARES, loss_class, make_loss, saved_loss
from streamkern.losses.own import loss_name
from streamkern.stream.sources.alignment import check_same_rows
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import Scale, Transform, is_deterministic
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.restart.stored_centers import StoredCenters, center_digests


@dataclass(frozen=True, eq=False)
class ParentRun(RunSnapshot):
    """A run that is continued, or from whose weights another run starts.

    The new run takes over the mean and scale of the targets that belong to the weights, so that it
    starts from the same function.

    alpha : (p, c) weights in the order in which the centers were selected; None if they are not
        loaded. The centers of a fitted model in memory have this order too.
    ancestry : description of a run that is continued, as JSON values: "run", "step", "samples",
        "epochs" done, SHA-256 of the "model", and "before", the runs that it continued itself,
        newest first
    samples : number of samples with which this run has trained the weights
    """

    alpha: HostArray | None = None
    ancestry: dict[str, Any] = field(default_factory=dict)
    samples: int = 0

    # -- a run that is continued ---------------------------------------------------------------

    @property
    def epochs(self) -> int:
        """Number of epochs before the new run.

        The new run numbers its epochs from there, so that no order of rows and no random transform
        is repeated.
        """
        return int(self.ancestry["epochs"])

    @property
    def label_dtype(self) -> str | None:
        """Dtype of the labels of classes, as in `StoreSpec`."""
        return self.facts.get("labels")

    def full_kernel(self) -> Kernel:
        """Return the kernel with bandwidth and metric; for random features, the kernel that they
        approximate."""
        return get_kernel(self.kernel, metric=self.metric, trees=self.trees)

    def with_fitted_transforms(
        self, requested: Sequence[Transform]
    ) -> tuple[list[Transform], list[Transform]]:
        """Replace the fixed transforms in `requested` by the fitted transforms of this run.

        Returns the transforms, and the fixed transforms of this run that are left to be applied
        after them.

        requested : transforms that the settings of the new run ask for

        Raises ConfigError if their fixed transforms differ from the transforms of this run.
        """
        unused = list(self.fixed_transforms)
        transforms: list[Transform] = []
        for transform in requested:
            if not is_deterministic(transform) or getattr(transform, "mode", "") == "none":
                transforms.append(transform)
                continue
            fitted = unused.pop(0) if unused else None
            if fitted is None or getattr(fitted, "mode", "") != getattr(transform, "mode", None):
                raise ConfigError(
                    f"{mention('data.transforms')} scales rows differently than the run that is "
                    "continued",
                    "leave the scale out; the scale of that run is used",
                )
            transforms.append(fitted)
        return transforms, unused

    def check_scale(self, scale: str) -> None:
        """Raise ConfigError if the setting data.scale contradicts the scaling of this run."""
        modes = [t.mode for t in self.fixed_transforms if isinstance(t, Scale)] or ["none"]
        if scale not in ("auto", *modes):
            raise ConfigError(
                f"{mention('data.scale', scale)} contradicts the run that is continued, which has "
                f'"{modes[-1]}"',
                "leave it out",
            )

    # -- its weights ---------------------------------------------------------------------------

    def check_fits(
        self, config: RunConfig, source: BaseSource,
        metric: npt.NDArray[np.float64] | None = None,
    ) -> None:  # fmt: skip
        """Raise ConfigError unless a new run can start from the weights.

        Both runs must have the same metric, compatible rows, the same outputs in the same order,
        compatible losses and target scales, and both an intercept or none.

        config, source, metric : settings, training rows and given metric of the new run
        """
        self._check_loss(config)
        self._check_transform(config)
        if metric is not None and not (
            self.metric is not None and np.array_equal(metric, self.metric)
        ):
            raise ConfigError(
                f"{self._setting} was trained in another metric than {mention('model.metric')}",
                f"leave {mention('model.metric')} out to use the metric of the weights, or leave "
                "warm_start out",
            )
        check_same_rows(source, self, "this run has", f"{self._setting} was trained on")
        check_encoder(source.encoder, self.encoder, "the data of this run")
        # The number of outputs and the classes.
        assert self.alpha is not None
        classes = None if source.classes is None else tuple(source.classes)
        levels = config.model.quantile
        n_outputs = len(levels) if isinstance(levels, tuple) else source.n_outputs
        if self.alpha.shape[1] != n_outputs or self.classes != classes:
            raise ConfigError(
                f"{self._setting} was trained on other targets than this run",
                "use data with the same targets, or leave warm_start out",
            )
        # Several targets must have the same order; one may have another name.
        own_names, new_names = self.target_columns, source.target_columns
        if (
            own_names is not None
            and new_names is not None
            and len(own_names) > 1
            and own_names != tuple(new_names)
        ):
            raise ConfigError(
                f"{self._setting} was trained on the targets "
                f"{some(own_names)}, but this run has {some(new_names)}",
                "use data with the same targets in the same order, or leave warm_start out",
            )
        has_intercept = self.setup.meta["fit_intercept"]
        if has_intercept != config.model.fit_intercept:
            raise ConfigError(
                f"{self._setting} was trained with "
                f"{mention('model.fit_intercept=')}{str(has_intercept).lower()}",
                f"give this run the same {mention('model.fit_intercept')}",
            )

    def _check_loss(self, config: RunConfig) -> None:
        """Raise ConfigError unless the weights can be the start of the new run's loss.

        Weights of squares can, if that loss has one output for each target and no log link; other
        weights can only for the same loss with the same parameters.
        """
        meta = self.setup.meta
        own_name, own_loss = loss_name(meta.get("loss", SQUARES)), saved_loss(meta)
        new_name = loss_name(config.model.loss)
        if own_loss is None and isinstance(config.model.quantile, tuple):
            raise ConfigError(
                f"{self._setting} minimised squares with one output for each target, so the "
                f"several quantiles of {mention('model.quantile', list(config.model.quantile))} "
                "cannot start from it",
                "give a single quantile, or leave warm_start out",
            )
        if own_loss is None and new_name != SQUARES and loss_class(config.model.loss).log_link:
            raise ConfigError(
                f"{self._setting} minimised squares, whose weights predict values, but "
                f"{mention('model.loss', new_name)} predicts their logarithms",
                f"train it with {mention('model.loss', new_name)}, or leave warm_start out",
            )
        if own_loss is None:
            return
        if own_name != new_name:
            raise ConfigError(
                f"{self._setting} was trained with {mention('model.loss', own_name)}, but this "
                f"run has {mention('model.loss', new_name)}: only weights of squares can be the "
                "start of another loss",
                "give both runs the same loss, or leave warm_start out",
            )
        new_loss = make_loss(config.model.loss, config.model.quantile)
        assert new_loss is not None
        for parameter, value in new_loss.parameters().items():
            own_value = own_loss.parameters()[parameter]
            if value is not None and value != own_value:  # None: it is found from the data
                raise ConfigError(
                    f"{self._setting} was trained with "
                    f"{mention(f'model.{parameter}', own_value)}, "
                    f"but this run has {mention(f'model.{parameter}', value)}",
                    f"give both runs the same {parameter}, or leave warm_start out",
                )

    def _check_transform(self, config: RunConfig) -> None:
        """Raise ConfigError unless the new run may use the target scale of the weights."""
        setting, on_log_scale = config.model.target_transform, self.targets.gain is not None
        if on_log_scale and config.model.loss != SQUARES:
            raise ConfigError(
                f"{self._setting} was trained on a log scale of the targets, from which only "
                f"squares can be continued, but this run has "
                f"{mention('model.loss', loss_name(config.model.loss))}",
                f"train it with {mention('model.target_transform', 'none')}, or leave warm_start "
                "out",
            )
        if setting != "auto" and (setting == "log") != on_log_scale:
            scale = "on a log scale" if on_log_scale else "on the scale"
            raise ConfigError(
                f"{self._setting} was trained {scale} of the targets, but this run has "
                f"{mention('model.target_transform', setting)}",
                "leave it out to use the scale of the weights, or leave warm_start out",
            )

    @property
    def loss_age(self) -> float:
        """Number of samples per center with which the loss was minimised, over all runs."""
        earlier_age: float = self.setup.meta["setup"].get("loss_age", 0.0)
        return earlier_age + self.samples / len(self.centers)

    def kernel_for(self, config: RunConfig) -> Kernel | None:
        """Return the kernel that belongs to the weights if the new run leaves its kernel or
        bandwidth open, else None.

        With another bandwidth the weights would be another function. If the new run has kernel
        "auto" and a given bandwidth, it replaces the bandwidth of a kernel that has one.
        """
        model = config.model
        if isinstance(model.kernel, Kernel):
            return None
        own_bandwidths = bandwidths(self.kernel)
        if model.kernel == "auto":
            if len(own_bandwidths) == 1 and not isinstance(model.bandwidth, str):
                notation = with_bandwidths(self.kernel, [model.bandwidth])
                return get_kernel(notation, metric=self.metric, trees=self.trees)
            return self.full_kernel()
        requested = bandwidths(model.kernel)
        if (
            model.bandwidth != "auto"
            or "auto" not in requested
            or len(requested) != len(own_bandwidths)
        ):
            return None
        # Compare the kernels with bandwidth 1 in place of each open one.
        compared_bandwidths = [
            1.0 if a == "auto" else b for a, b in zip(requested, own_bandwidths, strict=True)
        ]
        own_notation = with_bandwidths(self.kernel, compared_bandwidths)
        own_kernel = get_kernel(own_notation, metric=self.metric, trees=self.trees)
        own_kernel = own_kernel.with_metric(None).with_trees(None)
        if own_kernel.describe() != get_kernel(model.kernel, 1.0).describe():
            return None
        return self.full_kernel()

    @property
    def digest(self) -> str:
        """SHA-256 of the weights and of the target scale."""
        assert self.alpha is not None
        digest, targets = hashlib.sha256(), self.targets
        for part in (self.alpha, *targets.arrays().values()):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def has_centers(self, centers: StoredCenters) -> bool:
        """Return whether the manifests show that these are the centers of the weights, in the same
        order."""
        return isinstance(self.centers, StoredCenters) and self.centers.sha256 == centers.sha256

    def weights_for(self, centers: HostArray | StoredCenters, meta: Mapping[str, Any]) -> HostArray:
        """Return the weights (p, c) in the order of the centers of another setup.

        No center is read if the manifests show that the centers are equal. Otherwise their digests
        are compared; centers in float64 are rounded to float32 first if the others are in float32.

        centers, meta : centers and metadata of the other setup, see `Assembled`

        Raises ConfigError unless the centers are the same, and `digest` is the recorded one.
        """
        order: npt.NDArray[np.int64] | None
        dtype = min(self.centers.dtype, centers.dtype, key=lambda kind: kind.itemsize)
        if not isinstance(centers, StoredCenters):
            order = _match_digests(self._digests(dtype), center_digests(centers, dtype))
        elif self.has_centers(centers):
            order = self.order
        else:
            order = _match_digests(self._digests(dtype), centers.digests(dtype))
        if order is None:
            raise ConfigError(
                f"{self._setting} has other centers than this run, but the centers must be the "
                "same after scaling",
                "give both runs the same centers, transforms and scale, and "
                f"{mention('run.calibrate')}, which determines the rows that can be centers; "
                "continue that run, which keeps its centers (streamkern train --continue, or "
                "continues of train_model), or leave warm_start out",
            )
        if self.digest != meta["warm_start"]:
            raise ConfigError(
                f"{self._setting} has been replaced, or trained on, since the setup of this run",
                "start this run again in another run_dir",
            )
        assert self.alpha is not None
        return np.asarray(self.alpha[order])

    @property
    def _setting(self) -> str:
        """The setting that names this run, for messages; `location` is True for a fitted model."""
        return mention(f"solver.warm_start={self.location}")

    def _digests(self, dtype: np.dtype[Any]) -> npt.NDArray[np.uint8]:
        """Return `center_digests` of the centers, in the order of `alpha`."""
        if isinstance(self.centers, StoredCenters):
            return np.asarray(self.centers.digests(dtype)[np.argsort(self.order)])
        return center_digests(self.centers, dtype)


def _match_digests(
    digests: npt.NDArray[np.uint8], other_digests: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int64] | None:
    """Return the index among `digests` of each row of `other_digests`; None unless both have the
    same rows."""
    if digests.shape != other_digests.shape:
        return None
    # One entry of a void dtype for each row, which can be sorted and compared.
    entries, other_entries = (
        np.ascontiguousarray(A).view((np.void, A.shape[1])).reshape(-1)
        for A in (digests, other_digests)
    )
    # A stable sort keeps the order of equal centers, which does not depend on the number of ranks.
    sort_order, other_sort_order = (
        np.argsort(row_entries, kind="stable") for row_entries in (entries, other_entries)
    )
    if not np.array_equal(entries[sort_order], other_entries[other_sort_order]):
        return None
    order = np.empty(len(digests), np.int64)
    order[other_sort_order] = sort_order
    return order
