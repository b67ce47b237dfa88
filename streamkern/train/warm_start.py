"""Weights of an earlier run to start another one from."""

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
from streamkern.rundir.checkpoint_format import Saved, as_saved
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.row_shapes import check_row_shape
from streamkern.stream.target_scale import TargetScale
from streamkern.train.device_loader import load_trained
from streamkern.train.kept_centers import CentersSeen, KeptCenters, center_digests
from streamkern.train.training_data import storage_options_for


@dataclass(frozen=True)
class WarmStart:
    """place : of the run. row_shape : of the rows it was trained on. Z : (p, d) its centers, as
    chosen, or such that are kept, and read where they have to be. alpha : (p, c) their weights, as
    chosen. order : (p,) of those that are kept, as of `Assembled`.

    targets : mean and scale that belong to alpha. They become those of the run that goes on, so
    that it starts from the same function, whatever the mean of its own targets.
    kernel : of alpha, described, and metric, as it takes it.
    skipped, encoder : as of `KernelModel`. step : of the checkpoint, where it is of one.
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
        """Raise ConfigError unless both runs have rows that can stand for each other, the same
        outputs in the same order, and an intercept or none. metric : that is given to the run.
        """
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
        """That of alpha, whatever the run asks for; a `Kernel` object brings its own."""
        return None if isinstance(config.model.kernel, Kernel) else self.metric

    def kernel_for(self, config: RunConfig) -> Kernel | None:
        """That of alpha, for a run that leaves it open, or the bandwidth of the same one: found
        anew on other rows it would make another function of the weights. With a bandwidth that is
        given.
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
        """Of the function: its weights, and the mean and scale they belong to."""
        found = hashlib.sha256()
        for part in (self.alpha, self.targets.mean, self.targets.scale):
            found.update(np.ascontiguousarray(part).tobytes())
        return found.hexdigest()

    def check_continued(self, ancestry: Mapping[str, Any]) -> None:
        """Raise ConfigError unless it is of the checkpoint that a run says it continues."""
        if self.step != ancestry["step"]:
            raise ConfigError(
                f"{self.place} has been trained on, from step {ancestry['step']} to {self.step}, "
                "since this run began to continue it; continue it in another run_dir"
            )

    def has(self, Z: KeptCenters) -> bool:
        """Whether these are its centers, in its order, by what the manifests say."""
        return isinstance(self.Z, KeptCenters) and self.Z.sha256 == Z.sha256

    def weights(
        self, Z: npt.NDArray[Any] | KeptCenters, meta: Mapping[str, Any]
    ) -> npt.NDArray[Any]:
        """alpha in the order of the centers of another setup, whose random order may differ.

        Z : these. meta : of its `Assembled`. Raises ConfigError unless centers and `digest` are the
        same. No center is read where manifests say that they are.
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
    """Where each row of `wanted` stands among the keys; None unless both have the same rows."""
    if keys.shape != wanted.shape:
        return None
    one, other = (
        np.ascontiguousarray(A).view((np.void, A.shape[1])).reshape(-1) for A in (keys, wanted)
    )
    # Centers that are alike keep their order, which does not depend on the number of ranks.
    mine, theirs = (np.argsort(each, kind="stable") for each in (one, other))
    if not np.array_equal(one[mine], other[theirs]):
        return None
    order = np.empty(len(keys), np.int64)
    order[theirs] = mine
    return order


def load_warm_start(config: RunConfig) -> WarmStart | None:
    """What solver.warm_start names: the weights that its newest good checkpoint evaluates.

    Warns where a newer checkpoint is damaged.
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
    with as_saved(run.place):
        Z = KeptCenters.of(setup, seen, opened)
        return _warm_start_of(run.place, setup, saved, Z)


def reader(config: RunConfig, place: str) -> Callable[[], RunDirectory]:
    """Opens a run directory to read it, this run's or another one."""
    options = storage_options_for(config, place)
    return partial(RunDirectory, place, writable=False, storage_options=options)


def _warm_start_of(place: str, setup: Saved, saved: Saved, Z: KeptCenters) -> WarmStart:
    """That of a run's setup and of a checkpoint, as `load_trained` returns them. Z : its
    centers."""
    chosen = np.argsort(setup.arrays["order"])
    return WarmStart(
        redact(place), tuple(setup.meta["row_shape"]), Z,
        saved.arrays[saved.meta["evaluated"]][chosen], setup.meta["classes"],
        TargetScale.from_arrays(setup.arrays), setup.meta["fit_intercept"],
        setup.meta["target_columns"], of_features(setup.meta["kernel"]),
        setup.arrays.get("metric"), saved.skipped, setup.meta.get("encoder"),
        saved.step, setup.arrays["order"],
    )  # fmt: skip
