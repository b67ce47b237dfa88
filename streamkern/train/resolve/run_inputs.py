"""Objects that the caller of a run passes in place of settings: sources, centers, a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.centers.selectors import SELECTORS
from streamkern.config.run_config import RunConfig
from streamkern.losses.log_loss import LogLoss
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.train.resolve.given_arrays import (
    check_count,
)
from streamkern.train.resolve.training_data import storage_options_for
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import calibrate_of, recorded_run
from streamkern.train.restart.scaling import saved_patches
from streamkern.train.restart.stored_centers import StoredCenters


@dataclass(frozen=True)
class RunInputs:
    """Objects that the caller of a run passes in place of settings.

    source, test : replace data.train and data.test
    centers : (p, d) or (p, *row_shape) rows in storage form, in place of model.centers, or those of
        the run that is continued
    metric : replaces model.metric. The settings of both must be left at their defaults.
    client : a `distributed.Client`, in place of data.dask
    warm : replaces solver.warm_start
    facts : JSON values of the caller, saved with the setup
    continues : directory of the run that this one continues
    continued : everything that is taken over from the run that is continued
    patches : patch features that the run was started with, or that rank 0 has found
    ranks : communicator of the ranks that share the steps
    placed : location of the ranks, for the log: `workers`, and the `dashboard` of their cluster
    """

    source: Source | None = None
    test: Source | None = None
    centers: npt.NDArray[Any] | StoredCenters | None = None
    metric: npt.NDArray[Any] | None = None
    client: Any = None
    warm: ParentRun | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    continues: str | None = None
    continued: ParentRun | None = None
    patches: PatchFeatures | None = None
    ranks: Communicator = SINGLE
    placed: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, config: RunConfig) -> RunConfig:
        """Return the settings of a run with these arrays, after checking that they are
        compatible."""
        unused = {}
        if self.centers is not None:
            config.model.check_takes_centers()
            check_count(config.model.n_centers, len(self.centers), "centers")
            unused["model.centers"] = "random"
        if self.metric is not None:
            config.model.check_takes_metric()
            unused["model.metric"] = "none"
        return config.with_overrides(unused) if unused else config

    def recorded(self, config: RunConfig) -> dict[str, dict[str, Any]]:
        """Return the settings that identify a run, without those that an array replaces."""
        settings = config.identity()
        for name, array in (("centers", self.centers), ("metric", self.metric)):
            if array is not None:
                del settings["model"][name]
        return settings

    def leaves_same_rows(self, config: RunConfig, *, whole: bool) -> bool:
        """Return whether the run leaves out the rows that an earlier one may have set aside.

        It then goes on from weights over the same centers, chosen among the other rows. The run of
        solver.warm_start records if it set none aside.
        """
        place = config.solver.warm_start
        if not whole or self.continued is not None or not (self.warm or place):
            return False
        if config.model.loss == LogLoss.name:  # of which a run sets no rows aside
            return self.warm is not None and self.warm.loss is None
        if place is None or config.run.calibrate != "auto":
            return True
        options = storage_options_for(config, place)
        with RunDirectory(place, writable=False, storage_options=options) as directory:
            recorded = recorded_run(directory)
        return recorded is None or calibrate_of(recorded) is not False

    def known_patches(self, config: RunConfig) -> PatchFeatures | None:
        """Return the patch features that the run has already, or that its first weights are of."""
        if self.patches is not None or not config.model.patch_features:
            return self.patches
        parent, place = self.warm, config.solver.warm_start
        if parent is None and place is not None:
            options = storage_options_for(config, place)
            parent = ParentRun.find(place, options, load_centers=False, load_weights=False)
        if parent is None:
            return None
        return saved_patches(parent.setup.arrays, parent.setup.meta["scaling"])


NO_INPUTS = RunInputs()


def centers_from(config: RunConfig, given: RunInputs) -> str:
    """Return the origin of the centers: one of `SELECTORS`, "all", "given" or "file"."""
    if given.centers is not None:
        return "given"
    wanted = config.model.centers
    return wanted if wanted in (*SELECTORS, "all") else "file"
