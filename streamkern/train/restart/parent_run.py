"""The run, or the fitted model, from whose weights another run starts.

A *warm start* has its own centers, which must be the same, and its own data, whose scaling must
fit. A run that *continues* another one (`ancestry`) takes all that the weights depend on from that
one: centers, kernel, metric and scaling. Its data may differ, and appended rows, for instance,
change the statistics of a store; nothing is chosen anew.
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
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.notation import bandwidths, with_bandwidths
from streamkern.losses.losses import SQUARES, loss_of, saved_loss
from streamkern.losses.own import loss_name
from streamkern.stream.sources.alignment import check_same_rows
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import Scale, Transform, is_deterministic
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.restart.stored_centers import StoredCenters, center_digests


@dataclass(frozen=True, eq=False)
class ParentRun(RunSnapshot):
    """A run that is continued, or whose weights a run starts from.

    The new run takes over the mean and scale of the targets that belong to the weights, so that it
    starts from the same function, whatever the mean of its own targets.

    alpha : (p, c) weights of the centers, as chosen; None until they are needed. Centers of a
        fitted model that are not stored have the order in which they were chosen, too.
    ancestry : JSON of a run that is continued: which one (`run`, `step`, `samples`, `epochs`
        already done, sha256 of the `model`), and the runs that it continued itself (`before`),
        newest first
    samples : number of rows, over all passes, that the weights were trained with in its run
    """

    alpha: HostArray | None = None
    ancestry: dict[str, Any] = field(default_factory=dict)
    samples: int = 0

    # -- a run that is continued ---------------------------------------------------------------

    @property
    def epochs(self) -> int:
        """Epochs done before this run.

        Its own are numbered from there, so that no order of rows and no random draw is repeated.
        """
        return int(self.ancestry["epochs"])

    @property
    def words(self) -> str:
        """Description of the scaling of the features."""
        return f"as in {self.ancestry['run']}, which is continued"

    @property
    def label_dtype(self) -> str | None:
        """Dtype of the labels of classes, as in `StoreSpec`."""
        return self.facts.get("labels")

    def made_kernel(self) -> Kernel:
        """Return the kernel with bandwidth and metric; of features, what they stand for."""
        return get_kernel(self.kernel, metric=self.metric)

    def chosen(
        self, dtype: np.dtype[Any], features: str, rows: slice
    ) -> tuple[HostArray, npt.NDArray[np.int64], Kernel]:
        """Return `rows` of the centers, order and kernel, see `Chosen`; raise ConfigError for
        another dtype."""
        centers = self.stored
        if centers.dtype != dtype:
            raise ConfigError(
                f"{mention('run.precision')} gives {dtype.name} numbers, and the run that is "
                f"continued has {centers.dtype.name} ones",
                f"set {mention('run.precision')} to what it has there",
            )
        kernel = self.made_kernel()
        if features == "fourier":
            kernel = FourierFeatures(len(centers), kernel.describe())
        return centers.read(rows), self.order, kernel

    def bound(self, built: Sequence[Transform]) -> tuple[list[Transform], list[Transform]]:
        """Return the transforms with the numbers of the old run, and those to apply after them.

        built : transforms that the settings ask for. Raises ConfigError if their fixed ones differ
            from those of the old run.
        """
        rest = list(self.fixed)
        bound: list[Transform] = []
        for transform in built:
            if not is_deterministic(transform) or getattr(transform, "mode", "") == "none":
                bound.append(transform)
                continue
            old = rest.pop(0) if rest else None
            if old is None or getattr(old, "mode", "") != getattr(transform, "mode", None):
                raise ConfigError(
                    f"{mention('data.transforms')} scales rows otherwise than the run that is "
                    f"continued",
                    "leave the scale out, which is taken from there",
                )
            bound.append(old)
        return bound, rest

    def check_scale(self, scale: str) -> None:
        """Raise ConfigError if data.scale asks for another scaling than that of the old run."""
        modes = [t.mode for t in self.fixed if isinstance(t, Scale)] or ["none"]
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
        """Raise ConfigError unless both runs have compatible rows, the same outputs in the same
        order, and both an intercept or none; and unless the weights are of the recorded step.

        metric : metric that is given to the run
        """
        self._check_loss(config)
        self._check_transform(config)
        if metric is not None and not (
            self.metric is not None and np.array_equal(metric, self.metric)
        ):
            raise ConfigError(
                f"{self._mentioned} was trained in another metric than {mention('model.metric')}",
                f"leave {mention('model.metric')} out, for that of the weights, or leave "
                f"warm_start out",
            )
        check_same_rows(source, self, "this run has", f"{self._mentioned} was trained on")
        check_encoder(source.encoder, self.encoder, "the data of this run")
        assert self.alpha is not None
        classes = None if source.classes is None else tuple(source.classes)
        levels = config.model.quantile
        n_outputs = len(levels) if isinstance(levels, tuple) else source.n_outputs
        if self.alpha.shape[1] != n_outputs or self.classes != classes:
            raise ConfigError(
                f"{self._mentioned} was trained on other targets than this run",
                "use data with the same targets, or leave warm_start out",
            )
        own, names = self.target_columns, source.target_columns
        if own is not None and names is not None and len(own) > 1 and own != tuple(names):
            raise ConfigError(
                f"{self._mentioned} was trained on the targets "
                f"{some(own)} and this run has {some(names)}",
                "use data with the same targets in the same order, or leave warm_start out",
            )
        with_intercept = self.setup.meta["fit_intercept"]
        if with_intercept != config.model.fit_intercept:
            raise ConfigError(
                f"{self._mentioned} was trained with "
                f"{mention('model.fit_intercept=')}{str(with_intercept).lower()}",
                "give this run the same",
            )

    def _check_loss(self, config: RunConfig) -> None:
        """Raise ConfigError unless the weights are those of squares, or of the loss of the run."""
        meta = self.setup.meta
        name, old = loss_name(meta.get("loss", SQUARES)), saved_loss(meta)
        own = loss_name(config.model.loss)
        if old is None and isinstance(config.model.quantile, tuple):
            raise ConfigError(
                f"{self._mentioned} minimised squares, and the several quantiles of "
                f"{mention('model.quantile', list(config.model.quantile))} cannot begin from the "
                "one output of a target",
                "give a single quantile, or leave warm_start out",
            )
        if old is None:
            return
        if name != own:
            raise ConfigError(
                f"{self._mentioned} was trained with {mention('model.loss', name)}, and this run "
                f"has {mention('model.loss', own)}: only weights of squares can be the start of "
                "another loss",
                "give both runs the same loss, or leave warm_start out",
            )
        new = loss_of(config.model.loss, config.model.quantile)
        assert new is not None
        for parameter, value in new.parameters().items():  # those that are not found from the data
            before = old.parameters()[parameter]
            if value is not None and value != before:
                raise ConfigError(
                    f"{self._mentioned} was trained with {mention(f'model.{parameter}', before)}, "
                    f"and this run has {mention(f'model.{parameter}', value)}",
                    "give both runs the same, or leave warm_start out",
                )

    def _check_transform(self, config: RunConfig) -> None:
        """Raise ConfigError unless the run can learn the targets on the scale of the weights."""
        asked, on_log_scale = config.model.target_transform, self.targets.gain is not None
        if on_log_scale and config.model.loss != SQUARES:
            raise ConfigError(
                f"{self._mentioned} was trained on a log scale of the targets, from which only "
                f"squares can be continued, and this run has "
                f"{mention('model.loss', loss_name(config.model.loss))}",
                f"train it with {mention('model.target_transform', 'none')}, or leave warm_start "
                "out",
            )
        if asked != "auto" and (asked == "log") != on_log_scale:
            scale = "on a log scale" if on_log_scale else "on the scale"
            raise ConfigError(
                f"{self._mentioned} was trained {scale} of the targets, and this run has "
                f"{mention('model.target_transform', asked)}",
                "leave it out, for the scale of the weights, or leave warm_start out",
            )

    @property
    def loss_age(self) -> float:
        """Rows per center that the weights were trained with by their loss, over all runs."""
        before: float = self.setup.meta["setup"].get("loss_age", 0.0)
        return before + self.samples / len(self.centers)

    def check_continued(self, ancestry: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the weights are of the checkpoint that a run is recorded to
        continue."""
        if (step := self.saved.step) != ancestry["step"]:
            raise ConfigError(
                f"{self.place} has been trained on, from step {ancestry['step']} to {step}, "
                "since this run began to continue it",
                "continue it in another run_dir",
            )

    def metric_for(self, config: RunConfig) -> npt.NDArray[np.float64] | None:
        """Return the metric that belongs to alpha, whatever the run requests; None for a `Kernel`
        object, which has its own."""
        return None if isinstance(config.model.kernel, Kernel) else self.metric

    def kernel_for(self, config: RunConfig) -> Kernel | None:
        """Return the kernel that belongs to alpha if the run leaves its kernel or bandwidth open,
        else None.

        A bandwidth found on other rows would turn the weights into another function. With kernel
        "auto", a given bandwidth replaces that of a kernel with one bandwidth.
        """
        model = config.model
        if isinstance(model.kernel, Kernel):
            return None
        own = bandwidths(self.kernel)
        if model.kernel == "auto":
            if len(own) == 1 and not isinstance(model.bandwidth, str):
                described = with_bandwidths(self.kernel, [model.bandwidth])
                return get_kernel(described, metric=self.metric)
            return self.made_kernel()
        requested = bandwidths(model.kernel)
        if model.bandwidth != "auto" or "auto" not in requested or len(requested) != len(own):
            return None
        open_to_1 = [1.0 if a == "auto" else b for a, b in zip(requested, own, strict=True)]
        unit = with_bandwidths(self.kernel, open_to_1)
        same = get_kernel(unit, metric=self.metric).with_metric(None)
        if same.describe() != get_kernel(model.kernel, 1.0).describe():
            return None
        return self.made_kernel()

    @property
    def digest(self) -> str:
        """SHA-256 digest of the function: its weights, and the scale of its targets."""
        assert self.alpha is not None
        digest, targets = hashlib.sha256(), self.targets
        for part in (self.alpha, *targets.arrays().values()):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def has(self, centers: StoredCenters) -> bool:
        """Return whether these are the centers of the weights, in the same order, according to the
        manifests."""
        return isinstance(self.centers, StoredCenters) and self.centers.sha256 == centers.sha256

    def weights_for(self, centers: HostArray | StoredCenters, meta: Mapping[str, Any]) -> HostArray:
        """Return alpha in the order of the centers of another setup, whose random order may differ.

        centers, meta : of that setup, see `Assembled`

        Raises ConfigError unless centers and `digest` are the same. No center is read if the
        manifests show that the centers are equal. Those in float64 are rounded to float32 where
        the others are: scaled features are rounded once, and so are equal.
        """
        order: npt.NDArray[np.int64] | None
        dtype = min(self.centers.dtype, centers.dtype, key=lambda kind: kind.itemsize)
        if not isinstance(centers, StoredCenters):
            order = _positions(self._keys(dtype), center_digests(centers, dtype))
        elif self.has(centers):
            order = self.order
        else:
            order = _positions(self._keys(dtype), centers.keys(dtype))
        if order is None:
            raise ConfigError(
                f"{self._mentioned} has other centers than this run: they "
                "must be the same after scaling",
                "give both runs the same centers, transforms and scale, "
                f"and {mention('run.calibrate')}, which says among which rows they are chosen; "
                "continue that run, which takes them over (streamkern train --continue, or "
                "continues of train_model), or leave warm_start out",
            )
        if self.digest != meta["warm_start"]:
            raise ConfigError(
                f"{self._mentioned} has been replaced, or trained on, since the setup of this run",
                "begin it in another run_dir",
            )
        assert self.alpha is not None
        return np.asarray(self.alpha[order])

    @property
    def _mentioned(self) -> str:
        """The setting that names this run; `place` is True for a fit of the caller."""
        return mention(f"solver.warm_start={self.place}")

    def _keys(self, dtype: np.dtype[Any]) -> npt.NDArray[np.uint8]:
        """Return `center_digests` of the centers, as chosen."""
        if isinstance(self.centers, StoredCenters):
            return np.asarray(self.centers.keys(dtype)[np.argsort(self.order)])
        return center_digests(self.centers, dtype)


def _positions(
    keys: npt.NDArray[np.uint8], wanted: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int64] | None:
    """Return the index among `keys` of each row of `wanted`; None unless both have the same
    rows."""
    if keys.shape != wanted.shape:
        return None
    one, other = (
        np.ascontiguousarray(A).view((np.void, A.shape[1])).reshape(-1) for A in (keys, wanted)
    )
    # Equal centers keep their order, which does not depend on the number of ranks.
    mine, theirs = (np.argsort(each, kind="stable") for each in (one, other))
    if not np.array_equal(one[mine], other[theirs]):
        return None
    order = np.empty(len(keys), np.int64)
    order[theirs] = mine
    return order
