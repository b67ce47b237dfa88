"""Distribution of warm-start weights: rank 0 reads them, and each rank keeps those of its centers.

They are broadcast one chunk at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.backend.base import tiles
from streamkern.backend.rank_grid import CenterPartition
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import HostArray
from streamkern.planning.memory import SAVED_CHUNK
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.kept_centers import KeptCenters
from streamkern.train.rank_coordinator import RankCoordinator
from streamkern.train.resolve import ResolvedRun
from streamkern.train.step_loop import StepLoop
from streamkern.train.warm_start import WarmStart, load_warm_start, reader


def given_weights(run: ResolvedRun) -> WarmStart | None:
    """Return the weights from which the run starts, or None for zero weights. Their centers are
    compared later."""
    warm = run.given.warm or load_warm_start(run.config)
    if warm is not None:
        warm.check(run.config, run.data.source, run.metric)
        if run.given.continued is not None:
            warm.check_continued(run.given.continued.ancestry)
    return warm


def weights_of_first(
    warm: WarmStart | None,
    steps: StepLoop,
    directory: RunDirectory | None,
    agreement: RankCoordinator,
) -> HostArray | None:
    """Return the (q, c) initial weights of this rank's centers, or None to start from zero.

    warm : None on all ranks but rank 0

    All ranks must call it if there is no checkpoint.
    """
    made, share, ranks, alpha = steps.made, steps.share, steps.ranks, None
    if warm is not None:
        Z: HostArray | KeptCenters = made.arrays["Z"]
        config = steps.run.config
        if directory is not None and config.run.run_dir is not None:
            kept = KeptCenters.there(reader(config, config.run.run_dir))
            if kept is not None and (warm.has(kept) or not share.whole):
                Z = kept
        alpha = warm.weights(Z, made.meta)
    if ranks.is_single or steps.run.config.solver.warm_start is None:
        return alpha
    agreement.check_step()
    return broadcast_weights(alpha, (share.n, steps.run.problem.c), made.op.dtype, share, ranks)


def broadcast_weights(
    alpha: HostArray | None, shape: tuple[int, int], dtype: np.dtype[Any], share: CenterPartition,
    ranks: Communicator,
) -> HostArray:  # fmt: skip
    """Return this rank's rows of `alpha`, which rank 0 broadcasts.

    alpha : (p, c) on rank 0, None on the others
    shape : shape of the array that this rank keeps
    """
    own = np.empty(shape, dtype)
    for rows in tiles(share.p, max(1, SAVED_CHUNK // max(1, own[:1].nbytes))):
        part = np.empty((rows.stop - rows.start, shape[1]), dtype)
        if alpha is not None:
            part[...] = alpha[rows]
        part = ranks.broadcast(part)
        first, stop = np.searchsorted(share.ids, (rows.start, rows.stop)).tolist()
        own[first:stop] = part[share.ids[first:stop] - rows.start]
    return own
