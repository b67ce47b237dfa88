"""Start of a run: everything checked, the run directory acquired, and the setup made or loaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from streamkern.backend.ranks import Communicator, on_devices
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.progress import ProgressSetting
from streamkern.basics.stop import StopRequest
from streamkern.basics.warning import warn
from streamkern.centers.random_rows import check_center_features
from streamkern.config.run_config import RunConfig
from streamkern.planning.sizes import Sizes
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.cluster import check_cluster, connect
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import MixUp, Transform
from streamkern.train.continue_run import ParentId, continuing
from streamkern.train.loop.callbacks import Callback, Callbacks
from streamkern.train.loop.evaluations import EvaluationSchedule
from streamkern.train.resolve.resolved_run import ResolvedRun, open_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import checked_classes, open_test
from streamkern.train.restart.run_snapshot import recorded_run, sizes_from
from streamkern.train.run_identity import (
    as_recorded,
    check_same_run,
    recorded_sizes,
    run_record,
)
from streamkern.train.trainer import Trainer


def run_directory(config: RunConfig, *, writable: bool = True) -> RunDirectory:
    """Return the directory of the run, not yet acquired."""
    assert config.run.run_dir is not None
    return RunDirectory(
        config.run.run_dir, keep=config.run.keep_checkpoints, writable=writable,
        storage_options=config.data.storage_options,
    )  # fmt: skip


@contextlib.contextmanager
def acquired_run(
    config: RunConfig, given: RunInputs, directory: RunDirectory | None, request: StopRequest,
) -> Iterator[tuple[ResolvedRun, BaseSource | None, Any, contextlib.ExitStack]]:  # fmt: skip
    """Open, check and record a run, whose directory this process locks.

    Yields the run, its test data, the Dask client to read on, and a stack that is closed at the
    end. The backend is closed on an error.
    """
    ranks = given.ranks
    if ranks.rank:  # with another memory it might resolve other sizes
        run = opened_run(config, given, directory, *_received(ranks))
    else:
        run = opened_run(config, given, directory)
        parent, parent_id = run.given.continued, None
        if parent is not None:
            parent_id = parent.ancestry, parent.stored.sha256
        ranks.broadcast_bytes(
            json.dumps([asdict(run.sizes), run.config.model.features, parent_id]).encode()
        )
    try:
        ranks = on_devices(given.ranks, run.backend)
        given = replace(given, ranks=ranks)
        run = replace(run, given=replace(run.given, ranks=ranks))
        if given.centers is not None:
            check_center_features(given.centers.shape, run.data.source.row_shape)
        _check_shareable(config, run.data.source.feed_transforms)
        for note in checked_classes(run.data):
            warn(note)
        first = given.ranks.rank == 0
        held_out = open_test(config, run.data, given.test) if first else None
        record = run_record(run)
        check_same_run(directory, record)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run.backend.active())
            client = given.client
            if client is None and config.data.dask is not None:
                client = stack.enter_context(connect(config.data.dask))
            if client is not None:
                check_cluster(client, run.data.source)
            if directory is not None:
                stack.enter_context(request.later())  # until the directory is released
                with request.at_once():  # the lease of another process may have to expire first
                    stack.enter_context(directory)
                check_same_run(directory, record)  # nobody else wrote in between
                if first and recorded_run(directory) is None:
                    directory.write_config(record)
            yield run, held_out, client, stack
    except BaseException:
        run.backend.close()
        raise


@contextlib.contextmanager
def started_trainer(
    config: RunConfig,
    given: RunInputs,
    directory: RunDirectory | None,
    request: StopRequest,
    progress: ProgressSetting = False,
    on_evaluation: Callable[[dict[str, Any]], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Iterator[Trainer]:
    """Yield a trainer after its setup or its last checkpoint; its backend is closed on an error."""
    with acquired_run(config, given, directory, request) as (run, held_out, client, stack):
        aside = run.data.aside if given.ranks.rank == 0 else None
        evaluations = EvaluationSchedule(config.run, held_out, on_evaluation, aside)
        listeners = Callbacks(callbacks, stack)
        trainer = Trainer(run, directory, evaluations, stack, request, listeners, progress=progress)
        with request.at_once():
            trainer.begin(client)
        yield trainer


def _check_shareable(config: RunConfig, transforms: Sequence[Transform]) -> None:
    """Raise if a transform of a row depends on other rows of its batch, which other ranks may
    hold."""
    if config.run.n_ranks > 1 and any(isinstance(each, MixUp) for each in transforms):
        raise ConfigError(
            f"{mention('run.ranks', config.run.ranks)} cannot share batches whose rows mixup pairs",
            "leave one of them out",
        )


def opened_run(
    config: RunConfig, given: RunInputs, directory: RunDirectory | None,
    sizes: Sizes | None = None, parent_id: ParentId | None = None,
) -> ResolvedRun:  # fmt: skip
    """Open a run, or its continuation of another run.

    sizes, parent_id : as rank 0 found them, on another rank
    """
    config, given = continuing(as_recorded(config, directory), given, directory, parent_id)
    return open_run(config, given, fixed_sizes=sizes or recorded_sizes(directory))


def _received(ranks: Communicator) -> tuple[Sizes, ParentId | None]:
    """Return the sizes and the identity of the parent run that rank 0 broadcasts."""
    *sizes, parent_id = json.loads(ranks.broadcast_bytes(b""))
    return sizes_from(*sizes), None if parent_id is None else tuple(parent_id)
