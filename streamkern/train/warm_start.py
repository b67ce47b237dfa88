"""Weights of an earlier run from which another one starts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.basics.text import redact, some
from streamkern.basics.warning import warn
from streamkern.config.run_config import RunConfig
from streamkern.ingest.tables.encoder import check_encoder
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.fourier import of_features
from streamkern.kernels.notation import bandwidths, with_bandwidths
from streamkern.rundir.checkpoint_format import Saved, checkpoint_errors
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.alignment import check_row_shape
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.target_scale import TargetScale
from streamkern.train.device_loader import load_trained
from streamkern.train.kept_centers import CentersSeen, KeptCenters, center_digests
from streamkern.train.training_data import storage_options_for


@dataclass(frozen=True)
class WarmStart:
    """Weights of a run or of a model, with everything that identifies their function.

    place : directory of the run
    row_shape : shape of the rows it was trained on
    Z : (p, d) centers of the run, as chosen, or `KeptCenters`, which are read when needed
    alpha : (p, c) weights of the centers, as chosen
    order : (p,) order of kept centers, as in `Assembled`
    targets : mean and scale of the targets that belong to alpha. The new run takes them over, so
        that it starts from the same function, whatever the mean of its own targets.
    kernel, metric : description of the kernel that belongs to alpha, and its metric
    skipped : sentences about damaged checkpoints, as in `Result`
    encoder : as in `KernelModel`
    step : step of the checkpoint, or None if it is not from one
    """

    place: str
    row_shape: tuple[int, ...]
    Z: npt.NDArray[Any] | KeptCenters
    alpha: npt.NDArray[Any]
    classes: list[str] | None
    targets: TargetScale
    fit_intercept: bool
    target_columns: list[str] | None = None
    kernel: Mapping[str, Any] | None = None
    metric: npt.NDArray[np.float64] | None = None
    skipped: tuple[str, ...] = ()
    encoder: Mapping[str, Any] | None = None
    step: int | None = None
    order: npt.NDArray[np.int64] | None = None

    def check(
        self, config: RunConfig, source: BaseSource,
        metric: npt.NDArray[np.float64] | None = None,
    ) -> None:  # fmt: skip
        """Raise ConfigError unless both runs have compatible rows, the same outputs in the same
        order, and
        both an intercept or none. metric : metric that is given to the run."""
        if metric is not None and not (
            self.metric is not None and np.array_equal(metric, self.metric)
        ):
            raise ConfigError(
                f"solver.warm_start={self.place} was trained in another metric than model.metric; "
                "leave model.metric out, for that of the weights, or leave warm_start out"
            )
        check_row_shape(
            "this run has", source.row_shape,
            f"solver.warm_start={self.place} was trained on", self.row_shape,
        )  # fmt: skip
        check_encoder(source.encoder, self.encoder, "the data of this run")
        classes = None if source.classes is None else list(source.classes)
        if self.alpha.shape[1] != source.n_outputs or self.classes != classes:
            raise ConfigError(
                f"solver.warm_start={self.place} was trained on other targets than this run; use "
                "data with the same targets, or leave warm_start out"
            )
        own, names = self.target_columns, source.target_columns
        if own is not None and names is not None and len(own) > 1 and own != list(names):
            raise ConfigError(
                f"solver.warm_start={self.place} was trained on the targets {some(own)} and this "
                f"run has {some(names)}; use data with the same targets in the same order, or "
                "leave warm_start out"
            )
        if self.fit_intercept != config.model.fit_intercept:
            raise ConfigError(
                f"solver.warm_start={self.place} was trained with model.fit_intercept="
                f"{str(self.fit_intercept).lower()}; give this run the same"
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
        if self.kernel is None or isinstance(model.kernel, Kernel):
            return None
        own = bandwidths(self.kernel)
        if model.kernel == "auto":
            if len(own) == 1 and not isinstance(model.bandwidth, str):
                return self._made(with_bandwidths(self.kernel, [model.bandwidth]))
            return self._made(self.kernel)
        asked = bandwidths(model.kernel)
        if model.bandwidth != "auto" or "auto" not in asked or len(asked) != len(own):
            return None
        open_to_1 = [1.0 if a == "auto" else b for a, b in zip(asked, own, strict=True)]
        same = self._made(with_bandwidths(self.kernel, open_to_1)).with_metric(None)
        if same.describe() != get_kernel(model.kernel, 1.0).describe():
            return None
        return self._made(self.kernel)

    def _made(self, described: str | Mapping[str, Any]) -> Kernel:
        return get_kernel(described, metric=self.metric)

    @property
    def digest(self) -> str:
        """SHA-256 digest of the function: its weights, and the mean and scale of its targets."""
        found = hashlib.sha256()
        for part in (self.alpha, self.targets.mean, self.targets.scale):
            found.update(np.ascontiguousarray(part).tobytes())
        return found.hexdigest()

    def check_continued(self, ancestry: Mapping[str, Any]) -> None:
        """Raise ConfigError unless the weights are of the checkpoint that a run is recorded to
        continue."""
        if self.step != ancestry["step"]:
            raise ConfigError(
                f"{self.place} has been trained on, from step {ancestry['step']} to {self.step}, "
                "since this run began to continue it; continue it in another run_dir"
            )

    def has(self, Z: KeptCenters) -> bool:
        """Return whether Z are the centers of these weights, in the same order, according to the
        manifests."""
        return isinstance(self.Z, KeptCenters) and self.Z.sha256 == Z.sha256

    def weights(
        self, Z: npt.NDArray[Any] | KeptCenters, meta: Mapping[str, Any]
    ) -> npt.NDArray[Any]:
        """Return alpha in the order of the centers of another setup, whose random order may differ.

        Z : centers of that setup
        meta : metadata of its `Assembled`

        Raises ConfigError unless centers and `digest` are the same. No center is read if the
        manifests show that the centers are equal.
        """
        if isinstance(Z, KeptCenters):
            order = self.order if self.has(Z) else _places(self._keys(), Z.keys())
        else:
            order = _places(self._keys(), center_digests(np.asarray(Z)))
        if order is None:
            raise ConfigError(
                f"solver.warm_start={self.place} has other centers than this run: they must be "
                "the same after scaling; give both runs the same centers, transforms and scale, "
                "and run.calibrate, which says among which rows they are chosen; "
                "continue that run, which takes them over (streamkern train --continue, or "
                "continues of train_model), or leave warm_start out"
            )
        if self.digest != meta["warm_start"]:
            raise ConfigError(
                f"solver.warm_start={self.place} has been replaced, or trained on, since the setup "
                "of this run; begin it in another run_dir"
            )
        return np.asarray(self.alpha[order])

    def _keys(self) -> npt.NDArray[np.uint8]:
        if isinstance(self.Z, KeptCenters):
            assert self.order is not None
            return np.asarray(self.Z.keys()[np.argsort(self.order)])
        return center_digests(self.Z)


def _places(
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


def load_warm_start(config: RunConfig) -> WarmStart | None:
    """Load the weights of the newest good checkpoint of solver.warm_start; None if it is not set.

    Warns if a newer checkpoint is damaged.
    """
    place = config.solver.warm_start
    if place is None:
        return None
    opened, seen = reader(config, place), CentersSeen()
    with opened() as run:
        setup, saved = load_trained(run, seen)
    if setup is None or saved is None:
        raise ConfigError(
            f"solver.warm_start={redact(run.place)} has no checkpoint yet; train it first, or "
            "leave warm_start out"
        )
    for text in saved.skipped:
        warn(text)
    with checkpoint_errors(run.place):
        Z = KeptCenters.of(setup, seen, opened)
        return _warm_start_of(run.place, setup, saved, Z)


def reader(config: RunConfig, place: str) -> Callable[[], RunDirectory]:
    """Return a function that opens a run directory for reading, this run's or another one."""
    options = storage_options_for(config, place)
    return partial(RunDirectory, place, writable=False, storage_options=options)


def _warm_start_of(place: str, setup: Saved, saved: Saved, Z: KeptCenters) -> WarmStart:
    """Return the warm start from a run's setup and a checkpoint, as `load_trained` returns them. Z
    : its centers."""
    chosen = np.argsort(setup.arrays["order"])
    return WarmStart(
        redact(place), tuple(setup.meta["row_shape"]), Z,
        saved.arrays[saved.meta["evaluated"]][chosen], setup.meta["classes"],
        TargetScale.from_arrays(setup.arrays), setup.meta["fit_intercept"],
        setup.meta["target_columns"], of_features(setup.meta["kernel"]),
        setup.arrays.get("metric"), saved.skipped, setup.meta.get("encoder"),
        saved.step, setup.arrays["order"],
    )  # fmt: skip
