"""The inputs of a run that are objects instead of settings: sources, arrays, weights, ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import RunError
from streamkern.centers.selectors import SELECTORS
from streamkern.config.run_config import RunConfig
from streamkern.losses.log_loss import LogLoss
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.train.resolve.given_arrays import check_count
from streamkern.train.resolve.training_data import storage_options_for
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import recorded_calibrate, recorded_run
from streamkern.train.restart.scaling import saved_patches
from streamkern.train.restart.stored_centers import StoredCenters


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run that are objects instead of settings. All are optional.

    source : training rows, in place of the setting data.train
    test : test rows, in place of data.test
    centers : (p, d) or (p, *row_shape) rows before all transforms, or the centers of the parent run
        that is continued; in place of model.centers, which must have its default
    metric : (d,) scales or a (d, r) matrix, in place of model.metric, which must have its default
    client : a `distributed.Client`, in place of data.dask
    warm_start : run that provides the initial weights, in place of solver.warm_start
    facts : JSON values of the caller, which are saved with the setup
    continues : path of the run directory that this run continues
    continued_run : the run in `continues`, with its centers, weights and scaling, once it is loaded
    patches : patch features with which the run was started, or that rank 0 has drawn; if they are
        None and the settings ask for them, they are drawn
    pixels : whether the rows were taken for pixels when the run was started; None for a new run
    ranks : communicator of the ranks that train together
    rank_addresses : addresses for the log: "workers", of the ranks, and "dashboard", of their Dask
        cluster
    """

    source: Source | None = None
    test: Source | None = None
    centers: HostArray | StoredCenters | None = None
    metric: HostArray | None = None
    client: Any = None
    warm_start: ParentRun | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    continues: str | None = None
    continued_run: ParentRun | None = None
    patches: PatchFeatures | None = None
    pixels: bool | None = None
    ranks: Communicator = SINGLE
    rank_addresses: Mapping[str, Any] = field(default_factory=dict)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore a pickled object; fields that its version lacked have their defaults.

        An estimator that was pickled after `partial_fit` has the inputs of its first block.
        """
        self.__dict__.update(vars(RunInputs()) | dict(state))

    def has_initial_weights(self, config: RunConfig) -> bool:
        """Return whether the run starts from weights of another run instead of zero."""
        parents = self.warm_start, self.continued_run, config.solver.warm_start
        return any(parent is not None for parent in parents)

    def settings(self, config: RunConfig) -> RunConfig:
        """Return the settings, in which arrays have replaced `model.centers` and `model.metric`.

        The replaced settings have neutral values. Raises ConfigError if the settings contradict the
        arrays.
        """
        neutral_values = {}
        if self.centers is not None:
            config.model.check_takes_centers()
            check_count(config.model.n_centers, len(self.centers), "centers")
            neutral_values["model.centers"] = "random"
        if self.metric is not None:
            config.model.check_takes_metric()
            neutral_values["model.metric"] = "none"
        return config.with_overrides(neutral_values) if neutral_values else config

    def recorded_settings(self, config: RunConfig) -> dict[str, dict[str, Any]]:
        """Return the settings that a resume must repeat, by table; without replaced ones."""
        settings = config.identity()
        for name, array in (("centers", self.centers), ("metric", self.metric)):
            if array is not None:
                del settings["model"][name]
        return settings

    def keeps_calibration_rows(
        self, config: RunConfig, *, complete: bool
    ) -> bool | Literal["auto"]:
        """Return run.calibrate of the warm start, whose calibration rows are set aside again.

        The weights of an earlier run belong to its centers. If that run set calibration rows aside,
        its centers were chosen among the other rows. To get the same centers, this run must set the
        same rows aside. The result is False if none are. The run directory of solver.warm_start
        records the setting; for `warm_start` it is not known, and "auto" is returned unless its
        loss is the log loss, for which "auto" sets no rows aside.

        complete : whether no other rows will follow, as they may in `partial_fit`
        """
        parent_path = config.solver.warm_start
        if not complete or self.continued_run is not None:
            return False
        if self.warm_start is not None:
            return False if isinstance(self.warm_start.loss, LogLoss) else "auto"
        if parent_path is None or config.run.calibrate != "auto":
            return False if parent_path is None else "auto"
        return _calibrate_of_run(parent_path, config)

    def known_patches(self, config: RunConfig) -> PatchFeatures | None:
        """Return `patches`, or the patch features of the run that provides the initial weights.

        None if this run has no patch features, or has to draw new ones.
        """
        if self.patches is not None or not config.model.patch_features:
            return self.patches
        parent = self.weights_from(config)
        if parent is None:
            return None
        return saved_patches(parent.setup.arrays, parent.setup.meta["scaling"])

    def weights_from(self, config: RunConfig) -> ParentRun | None:
        """Return the run that provides the initial weights, or None.

        The run of a path is returned without its centers and weights.
        """
        path = config.solver.warm_start
        if self.warm_start is not None or path is None:
            return self.warm_start
        options = storage_options_for(config, path)
        return ParentRun.find(path, options, load_centers=False, load_weights=False)


NO_INPUTS = RunInputs()


def _calibrate_of_run(
    path: str, config: RunConfig, later_paths: tuple[str, ...] = ()
) -> bool | Literal["auto"]:
    """Return run.calibrate of the run in `path`, by which its calibration rows were set aside.

    A run that set aside the rows of its own warm start records "auto", so the setting of that run
    is returned if its directory still exists.

    config : settings of the new run, with the storage options
    later_paths : runs that were warm-started from this one, by way of each other. If one of them
        was later replaced by a run that starts from the others, the paths form a circle.

    Raises RunError if there is no run.
    """
    options = storage_options_for(config, path)
    with RunDirectory(path, writable=False, storage_options=options) as directory:
        recorded = recorded_run(directory)
    calibrate: bool | Literal["auto"] = "auto"
    if recorded is not None:
        calibrate = recorded_calibrate(recorded)
        warm_start = recorded["identity"]["settings"]["solver"].get("warm_start")
        seen_paths = (*later_paths, path)
        if calibrate == "auto" and warm_start is not None and warm_start not in seen_paths:
            with contextlib.suppress(RunError):
                return _calibrate_of_run(warm_start, config, seen_paths)
    return calibrate


def centers_from(config: RunConfig, inputs: RunInputs) -> str:
    """Return the origin of the centers.

    A name in `SELECTORS`, "all" for all rows, "given" for an array, or "file".
    """
    if inputs.centers is not None:
        return "given"
    setting = config.model.centers
    return setting if setting in (*SELECTORS, "all") else "file"
