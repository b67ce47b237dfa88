"""Open and check the training and test data of a run, and find the scaling of the features.

Only metadata of stored rows is read, and a sample if scaling, scores or patch features need one.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention
from streamkern.basics.text import redact, some
from streamkern.config.run_config import RunConfig
from streamkern.filesystem.cache import Cache
from streamkern.filesystem.path_kinds import content_kind
from streamkern.filesystem.urls import local_path
from streamkern.kernels.base import Kernel
from streamkern.kernels.sparse import for_sparse_rows
from streamkern.losses.log_link import LogLink
from streamkern.losses.losses import SQUARES, make_loss
from streamkern.solver.methods import find
from streamkern.store.sample_weights import class_notes, weight_factors
from streamkern.store.sparse_rows import is_packed, sparse_features
from streamkern.stream.sources.alignment import align_classes, align_columns, check_same_rows
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource, without_copies
from streamkern.stream.sources.base import BaseSource, Source, host_transforms, same_rows
from streamkern.stream.sources.class_sampling import with_class_shares
from streamkern.stream.sources.first_epoch import with_first_epoch
from streamkern.stream.sources.mixture import open_stores, stored_rows
from streamkern.stream.sources.patch_features import PatchFeatures, patch_names, patches_among
from streamkern.stream.sources.quantile_scores import scores_among, shape_after
from streamkern.stream.sources.split import split_rows
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import (
    Transform,
    from_config,
    is_deterministic,
    transform_name,
)
from streamkern.stream.sources.user import as_source
from streamkern.train.resolve.calibration_split import CalibrationSplit, calibration_split
from streamkern.train.resolve.find_scaling import find_scale
from streamkern.train.resolve.sampled_features import with_patches, with_scores
from streamkern.train.restart.parent_run import ParentRun

MIN_AUTO_SAMPLES, MAX_AUTO_EPOCHS = 100_000, 20
"""With data.epochs="auto", at least so many samples are trained on, in at most so many epochs."""


@dataclass(frozen=True)
class Data:
    """The training rows as they are streamed, and the rows from which they are made.

    source : stream of training rows, with copies and transforms
    base : the same rows without augmentation, each once
    fixed_transforms : deterministic transforms (the scaling), in order; only these are applied to
        centers and to evaluated rows
    scale : description of the scaling of the features
    cache : cache of the chunks of remote stores
    weight_factors : see `sample_weights.weight_factors`; None without sample and class weights
    validation_rows : rows set aside for early stopping, which are not trained on, or None
    pixels : whether the automatic scaling took the features for pixels
    split : rows set aside for calibration, which are neither training nor validation rows
    """

    source: BaseSource
    base: BaseSource
    fixed_transforms: tuple[Transform, ...]
    scale: str
    cache: Cache | None
    weight_factors: Floats | None
    validation_rows: BaseSource | None
    pixels: bool
    split: CalibrationSplit

    @property
    def d(self) -> int:
        """Number of features of a row for the kernel."""
        return math.prod(shape_after(self.fixed_transforms, self.source.row_shape))

    @property
    def sparse(self) -> bool:
        """True if the rows are packed sparse rows."""
        return is_packed(self.source.row_shape)

    def kernel_of(self, kernel: Kernel) -> Kernel:
        """Return the kernel for these rows. Raises ConfigError if they are sparse and it cannot
        take sparse rows."""
        return for_sparse_rows(kernel) if self.sparse else kernel

    @property
    def feature_names(self) -> list[str]:
        """Names of the features of a row for the kernel."""
        if patches := patches_among(self.fixed_transforms):
            return patch_names(patches)
        d = math.prod(self.source.row_shape)
        names = list(self.source.columns or (f"feature {j}" for j in range(d)))
        scores = scores_among(self.fixed_transforms)
        return names if scores is None else scores.names(names)

    @property
    def is_augmented(self) -> bool:
        """True if stored rows are changed at random, or streamed more than once in an epoch."""
        without_augmentation = without_copies(self.source)
        is_repeated = (
            self.source.n_rows != self.base.n_rows or without_augmentation is not self.base
        )
        has_random = len(self.fixed_transforms) < len(self.source.feed_transforms)
        return is_repeated or has_random or bool(host_transforms(self.source))

    @property
    def repeats(self) -> bool:
        """True if every epoch is known to have the same rows, unchanged."""
        return not self.is_augmented and same_rows(self.source)


def open_data(
    config: RunConfig, source: Source | None = None, parent: ParentRun | None = None,
    why_none: str | None = None, *, keeps_calibration_rows: bool | Literal["auto"] = False,
    scores: bool | None = None, patches: PatchFeatures | None = None, pixels: bool | None = None,
) -> Data:  # fmt: skip
    """Open the training data, split off validation and calibration rows, and append the scaling.

    Rows are read only in a sample: if the scaling needs statistics that are not stored, if quantile
    scores are considered, or if patches of images are drawn.

    source : replaces data.train and data.transforms
    parent : run that this run continues, which determines the scaling and the order of the columns;
        else None
    why_none : why no rows can be set aside for calibration, or None
    keeps_calibration_rows : run.calibrate of the run whose calibration rows are set aside again, or
        False, see `calibration_split`
    scores : whether the features have quantile scores; None: `with_scores` decides
    patches : patch features that are already known; None: they are drawn if the settings ask for
        them
    pixels : whether the rows are taken for pixels; None: `find_scale` decides

    Raises ConfigError or DataError if the data cannot be used with the settings.
    """
    # The rows, with the transforms that the settings ask for.
    settings = config.data
    cache = None if settings.cache is None else Cache(settings.cache, settings.cache_size)
    if source is None:
        source = _stored_source(config, parent, cache)
    elif parent is not None:
        source = _in_its_columns(source, parent)
    source = as_source(source)
    if find(config.solver.name, config.model.features).in_place:
        source = with_first_epoch(source)
    if source.n_outputs < 1:
        raise ConfigError("the training data has no targets y", "give rows with targets")
    # Rows that are set aside, and the sampling of classes.
    validation_rows, run = None, config.run
    if run.early_stopping:
        source, validation_rows = split_rows(source, run.validation_fraction, run.random_state)
    split = calibration_split(
        config, source, why_none, keeps_calibration_rows=keeps_calibration_rows
    )
    source = with_class_shares(split.training_rows, settings.class_sampling)
    for transform in host_transforms(source):
        if is_deterministic(transform):
            raise ConfigError(
                f"transform {transform_name(transform)!r} is marked both host_transform and "
                "deterministic",
                "leave host_transform out: a deterministic transform is part of the model, which "
                "applies it on the device",
            )
    # The scaling: chosen for these rows, or taken over from the parent run.
    are_pixels = False
    if parent is None:
        scale, text = find_scale(
            source, settings.scale, config.run.random_state, settings.class_weight, pixels
        )
        are_pixels = settings.scale == "auto" and scale is not None and scale.mode == "global"
        scale, text = with_scores(scale, text, source, config, scores)
        if scale is not None:
            source = AugmentedSource(source, 1, [scale])
        source, text = with_patches(source, text, config.model, run.random_state, patches)
    else:
        parent.check_scale(settings.scale)
        fixed_transforms = [t for t in source.feed_transforms if is_deterministic(t)]
        unused = parent.with_fitted_transforms(fixed_transforms)[1]
        source = AugmentedSource(source, 1, unused) if unused else source
        text = f"as in {parent.ancestry['run']}, which is continued"
    fixed = tuple(t for t in source.feed_transforms if is_deterministic(t))
    factors = weight_factors(source, settings.class_weight)
    if is_packed(source.row_shape):
        _check_sparse(config, source)
    return Data(
        source, stored_rows(source), fixed, text, cache, factors, validation_rows, are_pixels, split
    )


def _check_sparse(config: RunConfig, source: BaseSource) -> None:
    """Raise ConfigError for settings that cannot be used with sparse rows."""
    if sparse_features(source.file_form) is None:
        k = source.row_shape[1]
        raise ConfigError(
            f"rows of shape {source.row_shape} look like packed sparse rows, but their number of "
            "features is not known",
            f"give images a channel, {(2, k, 1)}",
        )
    for setting, unusable, reason in (
        ("centers", "kmeans", "k-means needs"),
        ("features", "fourier", "random frequencies, of every feature, need"),
    ):
        if getattr(config.model, setting) == unusable:
            text = mention(f"model.{setting}", unusable)
            raise ConfigError(
                f"{text}: {reason} dense rows, but these are sparse", f"leave {text} out"
            )


def _stored_source(config: RunConfig, parent: ParentRun | None, cache: Cache | None) -> BaseSource:
    """Return the stores that the settings name, with copies and transforms."""
    settings = config.data
    if settings.train is None:
        raise ConfigError(
            f"{mention('data.train')} is missing: it must be a path or URL, or a list of them",
            "set it in [data]",
        )
    source = open_stores(
        settings.train_urls, settings.weights, x=settings.x, y=settings.y,
        w=settings.sample_weight, foreign=settings.foreign, cache=cache,
        storage_options=storage_options_for(config, *settings.train_urls),
    )  # fmt: skip
    if parent is not None:
        source = _in_its_columns(source, parent)
    if settings.copies > 1 or settings.transforms:
        transforms = list(from_config(settings.transform_tables))
        if parent is not None:
            transforms, _ = parent.with_fitted_transforms(transforms)
        source = AugmentedSource(source, settings.copies, transforms)
    return as_source(source)


def _in_its_columns(source: Source, parent: ParentRun) -> BaseSource:
    """Return the source with columns and classes in the order of the parent run."""
    names = parent.columns, parent.target_columns
    aligned = align_columns(as_source(source), names[0], "data.train", names[1], parent.encoder)
    return align_classes(aligned, parent.classes, parent.label_dtype, "data.train")


def with_epochs(config: RunConfig, n_rows: int) -> RunConfig:
    """Return the settings with data.epochs as a number. n_rows : rows of an epoch, with copies."""
    if config.data.epochs != "auto":
        return config
    return config.with_overrides({"data.epochs": auto_epochs(config, n_rows)})


def auto_epochs(config: RunConfig, n_rows: int) -> int:
    """Return the number of epochs for data.epochs="auto".

    It is `MAX_AUTO_EPOCHS` if the training ends by itself: with early stopping, and for solvers
    whose epochs are iterations over the same rows, which also need several epochs for large data.
    Otherwise it is the number of epochs with `MIN_AUTO_SAMPLES` rows, from 1 to `MAX_AUTO_EPOCHS`.

    n_rows : rows of an epoch, with copies
    """
    squares = config.model.loss == SQUARES
    method = find(config.solver.name, config.model.features, squares=squares)
    if method.needs_same_rows or config.run.early_stopping:
        return MAX_AUTO_EPOCHS
    return max(1, min(MAX_AUTO_EPOCHS, math.ceil(MIN_AUTO_SAMPLES / n_rows)))


def open_test(config: RunConfig, data: Data, test: Source | None = None) -> BaseSource | None:
    """Open the test rows, or take `test`; return them checked against the training rows, or None.

    Raises ConfigError or DataError if the model cannot be evaluated on them.
    """
    settings = config.data
    if test is None and settings.test is not None:
        _check_is_store(settings.test, settings.train_urls, data.source)
        test = ZarrSource(
            settings.test, x=settings.x, y=settings.y, foreign=settings.foreign, cache=data.cache,
            storage_options=storage_options_for(config, settings.test),
        )  # fmt: skip
    if test is None:
        return None
    train = data.source
    rows = align_columns(
        as_source(test), train.columns, "data.test", train.target_columns, train.encoder
    )
    rows = align_classes(rows, train.classes, train.label_dtype, "data.test")
    check_evaluable(rows, train, "data.test")
    if rows.n_outputs != train.n_outputs or rows.classes != train.classes:
        raise ConfigError(
            f"{mention('data.test')} has {targets_text(rows.classes, rows.n_outputs)}, but "
            f"{mention('data.train')} has {targets_text(train.classes, train.n_outputs)}",
            "use data with the same targets",
        )
    check_targets(config, rows, f" of {mention('data.test')}")
    return rows


def check_targets(config: RunConfig, source: BaseSource, of_data: str = "") -> None:
    """Raise DataError if a row in memory has a target that is invalid for the loss.

    of_data : text that names the data in the message
    """
    loss = make_loss(config.model.loss, config.model.quantile)
    if isinstance(loss, LogLink) and in_memory(source):
        for _, block in source.numbered_blocks(0):
            loss.check_targets(block.y, block.row_ids, of_data)


def in_memory(source: BaseSource) -> bool:
    """Return whether all rows are in memory, as arrays."""
    return isinstance(source, ArraySource) or (
        len(source.parts) > 0 and all(map(in_memory, source.parts))
    )


def _check_is_store(test: str, train: Sequence[str], source: BaseSource) -> None:
    """Raise ConfigError if `test` is a data file and no store, with the command to convert it."""
    if content_kind(test) != "file":
        return
    store = f"{PurePath(test).name.partition('.')[0]}.zarr"
    like_option = "" if source.encoder is None or not train else f" --like {redact(train[0])}"
    y_options = "".join(f" --y {name}" for name in source.target_columns or ())
    raise ConfigError(
        f"{mention('data.test', test)} is a file, not a zarr store",
        f"make a store from it with streamkern ingest {shlex.quote(test)} {store}"
        f"{like_option}{y_options}",
    )


def storage_options_for(config: RunConfig, *urls: str) -> dict[str, Any]:
    """Return the storage options for opening `urls`; {} if only other locations may need them.

    If all locations of the run are local, the options are returned, so that an error reports them.
    """
    locations = (
        *config.data.train_urls, config.data.test, config.run.run_dir, config.model.centers,
        config.solver.warm_start,
    )  # fmt: skip
    all_local = all(location is None or local_path(location) is not None for location in locations)
    is_remote = any(local_path(url) is None for url in urls)
    return config.data.storage_options if all_local or is_remote else {}


def check_evaluable(source: BaseSource, training_rows: Any, name: str) -> None:
    """Raise ConfigError unless a model can be evaluated on `source`.

    Its rows must have the form of the training rows and no random transforms, since only the fixed
    transforms of the model are applied to evaluated rows.

    training_rows : description of the training rows, see `check_same_rows`
    name : name of `source` in the message
    """
    check_same_rows(source, training_rows, f"{name} has")
    random_transforms = [t for t in source.feed_transforms if not is_deterministic(t)]
    if random_transforms:
        raise ConfigError(
            f"{name} is augmented by {transform_name(random_transforms[0])!r}, which is not "
            "applied to evaluated rows",
            "write the augmented rows to a store and evaluate that",
        )


def checked_classes(data: Data) -> list[str]:
    """Return sentences about unusual class frequencies in the training rows, for warnings.

    Raises DataError if all rows with a weight have the same class. With sample weights or class
    weights there are no sentences, because the frequencies are then deliberate.
    """
    source, factors = data.source, data.weight_factors
    if source.classes is None or source.totals is None:
        return []
    weight_totals = source.totals if factors is None else source.totals * factors
    uses_all_rows = data.validation_rows is None and data.split.calibration_rows is None
    rows_text = "rows" if uses_all_rows else "rows that are not set aside"
    notes = class_notes(source.classes, weight_totals, rows_text if factors is None else "weight")
    if np.count_nonzero(weight_totals) < 2:
        raise DataError(notes[0])
    return notes if factors is None else []


def targets_text(classes: Sequence[str] | None, n_outputs: int) -> str:
    """Return the targets as text, such as "3 values" or "2 classes (a, b)"."""
    if classes is None:
        return f"{n_outputs} values"
    return f"{n_outputs} classes ({some(classes)})"
