"""Load the initial weights of a run on rank 0, and scatter them over the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from streamkern.backend.base import tiles
from streamkern.backend.rank_grid import CenterPartition
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.basics.text import redact
from streamkern.config.run_config import RunConfig
from streamkern.planning.memory import SAVED_CHUNK_BYTES
from streamkern.rundir.checkpoint_format import checkpoint_errors
from streamkern.train.loop.rank_coordinator import RankCoordinator
from streamkern.train.loop.step_loop import StepLoop
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.training_data import storage_options_for
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import RunSnapshot
from streamkern.train.restart.stored_centers import StoredCenters


def load_warm_start(config: RunConfig) -> ParentRun | None:
    """Load the weights of the newest good checkpoint of solver.warm_start; None if it is not set.

    Warns if a newer checkpoint is damaged. Raises ConfigError if there is no checkpoint.
    """
    parent_path = config.solver.warm_start
    if parent_path is None:
        return None
    run = ParentRun.find(parent_path, storage_options_for(config, parent_path), load_centers=False)
    if run is None:
        raise ConfigError(
            f"{mention(f'solver.warm_start={redact(parent_path)}')} has no checkpoint yet",
            "train that run to its first checkpoint, or leave warm_start out",
        )
    run.warn_of_damage()
    with checkpoint_errors(run.check().location):
        alpha = run.weights[np.argsort(run.order)]
        samples = run.loaded_checkpoint.meta["position"]["samples"]
        without_arrays = replace(run.loaded_checkpoint, arrays={})
        return replace(run, alpha=alpha, samples=samples, checkpoint=without_arrays)


def given_weights(run: ResolvedRun) -> ParentRun | None:
    """Return the weights that the run starts from; None if it starts from zero.

    Raises ConfigError if they do not fit the run. Their centers are compared later, by
    `initial_weights`.
    """
    warm = run.inputs.warm_start or load_warm_start(run.config)
    if warm is not None:
        warm.check_fits(run.config, run.data.source, run.metric)
        if run.inputs.continued_run is not None:
            warm.check_step_unchanged(run.inputs.continued_run.ancestry)
    return warm


def initial_weights(
    warm: ParentRun | None, step_loop: StepLoop, coordinator: RankCoordinator, *, saved: bool
) -> HostArray | None:
    """Return the initial weights (q, c) of this rank's centers; None to start from zero.

    Collective: all ranks call it for a run without a checkpoint.

    warm : result of `given_weights` on rank 0; None on other ranks
    saved : whether the setup is in the run directory

    Raises ConfigError if the weights belong to other centers.
    """
    assembled, share, ranks, alpha = step_loop.assembled, step_loop.share, step_loop.ranks, None
    config = step_loop.run.config
    if warm is not None:
        Z: HostArray | StoredCenters = assembled.arrays["Z"]
        run_dir = config.run.run_dir
        if saved and run_dir is not None:
            options = storage_options_for(config, run_dir)
            own_run = RunSnapshot.find(run_dir, options, load_centers=False, load_weights=False)
            if own_run is not None and (
                warm.has_centers(own_run.stored_centers) or not share.is_replicated
            ):
                Z = own_run.stored_centers
        alpha = warm.weights_for(Z, assembled.meta)
        if (slope := assembled.meta["setup"].get("warm_slope")) is not None:
            alpha *= slope
    if ranks.is_single or config.solver.warm_start is None:
        return alpha
    coordinator.check_step()
    return scatter_weights(
        alpha, (share.n, step_loop.run.problem.c), assembled.op.dtype, share, ranks
    )


def scatter_weights(
    alpha: HostArray | None, shape: tuple[int, int], dtype: np.dtype[Any], share: CenterPartition,
    ranks: Communicator,
) -> HostArray:  # fmt: skip
    """Return this rank's rows (q, c) of `alpha`, which rank 0 broadcasts in chunks. Collective.

    alpha : (p, c) on rank 0; None on other ranks
    shape : (q, c)
    share : centers of this rank
    """
    own_weights = np.empty(shape, dtype)
    row_bytes = max(1, own_weights[:1].nbytes)
    for rows in tiles(share.p, max(1, SAVED_CHUNK_BYTES // row_bytes)):
        chunk = np.empty((rows.stop - rows.start, shape[1]), dtype)
        if alpha is not None:
            chunk[...] = alpha[rows]
        chunk = ranks.broadcast(chunk)
        first, stop = np.searchsorted(share.ids, (rows.start, rows.stop)).tolist()
        own_weights[first:stop] = chunk[share.ids[first:stop] - rows.start]
    return own_weights
