"""Whether ranks can share out the centers of a run."""

from __future__ import annotations

from streamkern.backend.rank_grid import check_columns
from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig


def check_center_ranks(config: RunConfig, *, goes_on: bool) -> None:
    """Raise ConfigError where they can not. goes_on : from weights that were there before."""
    columns = config.run.center_ranks
    if columns == 1:
        return
    check_columns(config.run.n_ranks, columns)
    if goes_on or config.solver.warm_start is not None:
        raise ConfigError(
            f"run.center_ranks={columns} can not begin from the weights of another run, of which "
            "no rank has all; leave it out"
        )
