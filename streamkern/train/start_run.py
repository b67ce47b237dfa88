"""Start a run: check its inputs, lock its directory, and make or load its setup."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from streamkern.backend.ranks import Communicator, on_devices
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.progress import ProgressSetting
from streamkern.basics.stop import StopRequest
from streamkern.basics.warning import warn
from streamkern.centers.given_centers import check_center_features
from streamkern.config.run_config import RunConfig
from streamkern.planning.sizes import Sizes
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.cluster import check_cluster, connect
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.patch_features import PatchFeatures, patches_among, restore_patches
from streamkern.stream.sources.quantile_scores import scores_among
from streamkern.stream.sources.transforms import MixUp, Transform
from streamkern.train.continue_run import ParentId, complete_from_parent
from streamkern.train.loop.callbacks import Callback, Callbacks
from streamkern.train.loop.schedule import EvaluationSchedule
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import checked_classes, open_test
from streamkern.train.restart.run_snapshot import recorded_run, recorded_sizes, sizes_from
from streamkern.train.run_identity import (
    check_same_run,
    has_scale,
    recorded_patches,
    run_record,
    with_recorded_settings,
)
from streamkern.train.trainer import Trainer


class RankZeroChoices(NamedTuple):
    """Choices of a run; None for those that are not made yet, or that the run does not have.

    sizes : sizes of the plan
    parent_id : identity of the parent run
    scores : whether the features have quantile scores
    pixels : whether the rows are taken for pixels
    patches : patch features
    """

    sizes: Sizes | None = None
    parent_id: ParentId | None = None
    scores: bool | None = None
    pixels: bool | None = None
    patches: PatchFeatures | None = None


def run_directory(config: RunConfig, *, writable: bool = True) -> RunDirectory:
    """Return the run directory, without acquiring its lock."""
    assert config.run.run_dir is not None
    return RunDirectory(
        config.run.run_dir, keep=config.run.keep_checkpoints, writable=writable,
        storage_options=config.data.storage_options,
    )  # fmt: skip


@contextlib.contextmanager
def acquire_run(
    config: RunConfig, inputs: RunInputs, directory: RunDirectory | None, request: StopRequest,
) -> Iterator[tuple[ResolvedRun, BaseSource | None, Any, contextlib.ExitStack]]:  # fmt: skip
    """Resolve and check a run, lock its directory, and record its settings there.

    Yields the resolved run; its test data, on rank 0, or None; the Dask client to read on, or None;
    and an exit stack that is closed at the end. After an error the backend is closed.

    directory : run directory, not locked yet; None for a run without one
    request : request by which a signal ends the run
    """
    if inputs.ranks.rank:
        run = open_recorded_run(config, inputs, directory, _receive_choices(inputs.ranks))
    else:
        run = open_recorded_run(config, inputs, directory)
        _broadcast_choices(run)
    try:
        ranks = on_devices(inputs.ranks, run.backend)
        inputs = replace(inputs, ranks=ranks)
        run = replace(run, inputs=replace(run.inputs, ranks=ranks))
        if inputs.centers is not None:
            check_center_features(inputs.centers.shape, run.data.source.row_shape)
        _check_no_mixup_over_ranks(config, run.data.source.feed_transforms)
        for note in checked_classes(run.data):
            warn(note)
        is_rank0 = inputs.ranks.rank == 0
        test = open_test(config, run.data, inputs.test) if is_rank0 else None
        record = run_record(run)
        check_same_run(directory, record)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run.backend.active())
            client = inputs.client
            if client is None and config.data.dask is not None:
                client = stack.enter_context(connect(config.data.dask))
            if client is not None:
                check_cluster(client, run.data.source)
            if directory is not None:
                # A signal waits until the lock is released, but ends the wait for the lock, which
                # may last until the lease of another process expires.
                stack.enter_context(request.defer_signals())
                with request.raise_on_signal():
                    stack.enter_context(directory)
                check_same_run(directory, record)  # it may have changed before it was locked
                if is_rank0 and recorded_run(directory) is None:
                    directory.write_config(record)
            yield run, test, client, stack
    except BaseException:
        run.backend.close()
        raise


@contextlib.contextmanager
def start_trainer(
    config: RunConfig,
    inputs: RunInputs,
    directory: RunDirectory | None,
    request: StopRequest,
    progress: ProgressSetting = False,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Iterator[Trainer]:
    """Yield a trainer before its first step, or with the state of the newest checkpoint.

    After an error the backend is closed. Parameters: see `acquire_run` and `train`.
    """
    with acquire_run(config, inputs, directory, request) as (run, test, client, stack):
        validation = run.data.validation_rows if inputs.ranks.rank == 0 else None
        evaluations = EvaluationSchedule(config.run, test, on_evaluation, validation)
        trainer = Trainer(
            run, directory, evaluations, stack, request, Callbacks(callbacks, stack),
            progress=progress,
        )  # fmt: skip
        with request.raise_on_signal():
            trainer.begin(client)
        yield trainer


def _check_no_mixup_over_ranks(config: RunConfig, transforms: Sequence[Transform]) -> None:
    """Raise ConfigError for mixup with several ranks, whose pairs of rows may lie on two ranks."""
    if config.run.n_ranks > 1 and any(isinstance(transform, MixUp) for transform in transforms):
        raise ConfigError(
            f"{mention('run.ranks', config.run.ranks)} cannot divide batches in which mixup "
            "pairs the rows",
            "leave one of them out",
        )


def open_recorded_run(
    config: RunConfig, inputs: RunInputs, directory: RunDirectory | None,
    rank0_choices: RankZeroChoices | None = None,
) -> ResolvedRun:  # fmt: skip
    """Resolve a run, which may continue another one.

    rank0_choices : choices that rank 0 has broadcast, on the other ranks
    """
    sizes, parent_id, scores, pixels, patches = rank0_choices or RankZeroChoices()
    record = recorded_run(directory)
    config = with_recorded_settings(config, directory, record)
    config, inputs = complete_from_parent(config, inputs, directory, record, parent_id)
    patches = inputs.patches if patches is None else patches
    if directory is not None and record is not None:
        sizes = recorded_sizes(record) if sizes is None else sizes
        description = record["identity"]["data"]
        scores = has_scale(description, "quantiles") if scores is None else scores
        pixels = has_scale(description, "global") if pixels is None else pixels
        if patches is None and config.model.patch_features:
            patches = recorded_patches(directory)
    inputs = replace(inputs, patches=patches, pixels=pixels)
    return open_run(config, inputs, fixed_sizes=sizes, scores=scores)


def _broadcast_choices(run: ResolvedRun) -> None:
    """Broadcast choices of rank 0 that a machine with less memory, or rounding, might make
    differently."""
    ranks, parent = run.inputs.ranks, run.inputs.continued_run
    patches = patches_among(run.data.fixed_transforms)
    parent_id = None if parent is None else (parent.ancestry, parent.stored_centers.sha256)
    scores = scores_among(run.data.fixed_transforms) is not None
    arrays = {} if patches is None else patches.arrays()
    numbers = {} if patches is None else patches.numbers()
    shapes = {name: array.shape for name, array in arrays.items()}
    sizes = run.sizes.as_record(), run.config.model.features
    choices = [*sizes, parent_id, scores, run.data.pixels, shapes, numbers]
    ranks.broadcast_bytes(json.dumps(choices).encode())
    for array in arrays.values():
        ranks.broadcast(np.ascontiguousarray(array))


def _receive_choices(ranks: Communicator) -> RankZeroChoices:
    """Receive the choices of rank 0, on another rank."""
    *sizes, parent_id, scores, pixels, shapes, numbers = json.loads(ranks.broadcast_bytes(b""))
    arrays = {name: ranks.broadcast(np.empty(shape)) for name, shape in shapes.items()}
    patches = restore_patches(arrays, numbers) if arrays else None
    parent_id = None if parent_id is None else tuple(parent_id)
    return RankZeroChoices(sizes_from(*sizes), parent_id, scores, pixels, patches)
