"""Read a run at one checkpoint from its directory: record, setup, checkpoint and centers.

`RunSnapshot.find` is used wherever a trained run is needed: for predictions, `load`, `partial_fit`,
a warm start, and a run that continues another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from streamkern.basics.array_types import HostArray
from streamkern.basics.errors import ConfigError, RunError
from streamkern.basics.warning import warn
from streamkern.filesystem.path_kinds import content_kind, no_run_text
from streamkern.kernels.fourier import of_features
from streamkern.losses.base import Loss
from streamkern.losses.losses import loss_for_figures
from streamkern.planning.sizes import Sizes
from streamkern.predict.calibration import CALIBRATION_PREFIX
from streamkern.rundir.checkpoint_format import SavedGroup, checkpoint_errors
from streamkern.rundir.chunked_array import ChunkedArray, TargetFactory, allocate_on_host
from streamkern.rundir.run_directory import RunDirectory
from streamkern.solver.methods import find
from streamkern.solver.posterior import POSTERIOR_PREFIX
from streamkern.stream.sources.transforms import Transform
from streamkern.stream.target_scale import TargetScale
from streamkern.train.restart.scaling import load_scaling
from streamkern.train.restart.stored_centers import CentersTarget, StoredCenters

POST_TRAINING_PREFIXES = (CALIBRATION_PREFIX, POSTERIOR_PREFIX)
"""Prefixes of the arrays that a run computes after its last step, for predictions."""


# -- the record of a run ---------------------------------------------------------------------------


def checked_record(recorded: Mapping[str, Any] | None, location: str) -> dict[str, Any]:
    """Return the record of a run: "identity", "sizes" and "versions", see `run_record`.

    Raises RunError if it has other entries, because another version of streamkern has written it.
    """
    with contextlib.suppress(ValidationError, KeyError, TypeError, ConfigError):
        record = dict(recorded or {})
        are_tables = all(
            isinstance(record[name], dict) for name in ("identity", "sizes", "versions")
        )
        # Unknown sizes, and values that pydantic converts, are not equal to the recorded ones.
        knows_sizes = are_tables and recorded_sizes(record).as_record() == record["sizes"]
        if knows_sizes and len(record) == 3:
            return record
    raise RunError(
        f"{location} holds a run of another version of streamkern",
        "continue it with that version, or give another run_dir",
    )


def recorded_run(directory: RunDirectory | None) -> dict[str, Any] | None:
    """Return the record that setup and checkpoints carry; None if nothing was computed yet.

    A run whose setup has failed can therefore be started again with other settings.
    """
    recorded = None if directory is None else directory.read_record()
    if directory is None or recorded is None:
        return None
    return checked_record(recorded, directory.location)


def recorded_calibrate(record: Mapping[str, Any]) -> Any:
    """Return the setting run.calibrate of a run; False if no rows were set aside."""
    return record["identity"]["settings"].get("run", {}).get("calibrate", False)


def recorded_sizes(record: Mapping[str, Any]) -> Sizes:
    """Return the sizes with which a run was started."""
    return sizes_from(record["sizes"], record["identity"]["settings"]["model"]["features"])


def sizes_from(saved: Mapping[str, Any], features: str) -> Sizes:
    """Return the sizes from a recorded table. features : setting model.features"""
    sizes_class: Any = find(saved["solver"], features).sizes
    sizes: Sizes = TypeAdapter(sizes_class).validate_python(saved)
    return sizes


# -- the run ---------------------------------------------------------------------------------------


def is_solver_array(name: str) -> bool:
    """Return whether an array of a setup belongs to the solver, and is loaded to the device.

    Other arrays describe the model and stay on the host.
    """
    model_arrays = ("Z", "order", "shift", "sample_rows", "metric", "trees")
    return name not in model_arrays and not name.startswith(("scaling", "target_"))


def _model_array_factory(centers: TargetFactory) -> TargetFactory:
    """Return a factory that loads the arrays of a setup that describe the model.

    centers : factory for the array Z
    """

    def model_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray | None:
        if name == "Z":
            return centers(name, shape, dtype)
        describes_model = name == "ridges" or not is_solver_array(name)
        return allocate_on_host(name, shape, dtype) if describes_model else None

    return model_array


def _load_weights(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray | None:
    """Load the arrays of a checkpoint that predictions need (a `TargetFactory`)."""
    is_needed = name in ("alpha", "average", "ridges") or name.startswith(POST_TRAINING_PREFIXES)
    return allocate_on_host(name, shape, dtype) if is_needed else None


@dataclass(frozen=True, eq=False)
class RunSnapshot:
    """A run at one checkpoint.

    The properties look up entries of the setup's metadata when they are used, see `check`.

    location : run directory, for messages
    setup : arrays and JSON values, see `Assembled`; with the array Z only if it was loaded
    checkpoint : see `StepLoop.snapshot`; None if it was not loaded
    centers : (p, d) in storage order, loaded or in the run directory
    """

    location: str
    setup: SavedGroup
    checkpoint: SavedGroup | None
    centers: HostArray | StoredCenters

    @classmethod
    def find(
        cls, location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *,
        load_centers: bool = True, load_weights: bool = True, load_solver: bool = False,
    ) -> Self | None:  # fmt: skip
        """Return the newest good checkpoint of a run; None if it has no setup or no checkpoint yet.

        The run may be running. Raises RunError if there is no run, and CheckpointError or
        StorageError if its files cannot be read or verified.

        load_centers : whether the centers are loaded; otherwise they stay in the directory
        load_weights : whether the checkpoint is loaded; otherwise only the setup is, and the run
            needs no checkpoint
        load_solver : whether the arrays of the solver are loaded, about p^2 numbers
        """
        target = CentersTarget()
        setup_factory: TargetFactory = allocate_on_host
        if not load_solver:
            setup_factory = _model_array_factory(allocate_on_host if load_centers else target)
        with RunDirectory(location, writable=False, storage_options=storage_options) as run:
            setup, saved = run.load_setup(setup_factory), None
            if load_weights:
                saved = run.load_latest(allocate_on_host if load_solver else _load_weights)
        if setup is None and content_kind(location) not in ("run", "remote"):
            raise RunError(no_run_text(location, run.location))
        if setup is None or (saved is None and load_weights):
            return None
        if load_centers:
            return cls(run.location, setup, saved, setup.arrays["Z"])
        shape, dtype, sha256 = target.shape, target.dtype, setup.checksums["Z"]
        centers = StoredCenters(location, storage_options, shape, dtype, sha256)
        return cls(run.location, setup, saved, centers)

    @classmethod
    def open(
        cls, location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *,
        load_solver: bool = False,
    ) -> Self:  # fmt: skip
        """Return what `find` returns; raise RunError if it finds none, or the errors of `find`."""
        run = cls.find(location, storage_options, load_solver=load_solver)
        if run is None:
            description = RunDirectory(
                location, writable=False, storage_options=storage_options
            ).location
            raise RunError(no_run_text(location, description))
        return run

    @property
    def record(self) -> dict[str, Any]:
        """The record of the run, see `checked_record`."""
        return checked_record(self.setup.run, self.location)

    @property
    def loaded_checkpoint(self) -> SavedGroup:
        """The checkpoint, which must have been loaded."""
        assert self.checkpoint is not None
        return self.checkpoint

    @property
    def stored_centers(self) -> StoredCenters:
        """The centers, which must have stayed in the run directory."""
        assert isinstance(self.centers, StoredCenters)
        return self.centers

    @property
    def damaged_checkpoints(self) -> tuple[str, ...]:
        """A sentence for each damaged checkpoint that is newer than this one."""
        return () if self.checkpoint is None else self.checkpoint.skipped

    def check(self) -> Self:
        """Return this object; raise CheckpointError if the metadata lack an entry that a property
        needs."""
        with checkpoint_errors(self.location):
            for name in _CHECKED_PROPERTIES:
                getattr(self, name)
        return self

    def warn_of_damage(self) -> None:
        """Warn of damaged newer checkpoints."""
        for text in self.damaged_checkpoints:
            warn(text)

    @property
    def weights(self) -> HostArray:
        """Weights (p, c) in the order of the centers."""
        weights: HostArray = self.loaded_checkpoint.arrays[self.loaded_checkpoint.meta["evaluated"]]
        return weights

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Order (p,): center i was center order[i] as selected, see `Assembled`."""
        return np.asarray(self.setup.arrays["order"])

    @property
    def kernel(self) -> Mapping[str, Any]:
        """Description of the kernel; for random features, of the kernel that they approximate."""
        return of_features(self.setup.meta["kernel"])

    @property
    def metric(self) -> npt.NDArray[np.float64] | None:
        """Metric of the kernel: scales (d,), a matrix (d, r), or None."""
        return self.setup.arrays.get("metric")

    @property
    def trees(self) -> npt.NDArray[np.float64] | None:
        """Nodes of the trees of the kernel (T, k, 4), see `TreePartitions`, or None."""
        return self.setup.arrays.get("trees")

    @property
    def targets(self) -> TargetScale:
        """Mean and scale of the targets."""
        return TargetScale.from_arrays(self.setup.arrays)

    @property
    def loss(self) -> Loss | None:
        """The loss that was minimised; None for squares, and for an unknown user-defined class."""
        return loss_for_figures(self.setup.meta)

    @property
    def fixed_transforms(self) -> tuple[Transform, ...]:
        """Transforms that are applied to every row, including the scaling."""
        return load_scaling(self.setup.arrays, self.setup.meta["scaling"])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a stored row."""
        return tuple(self.setup.meta["row_shape"])

    @property
    def file_form(self) -> dict[str, Any] | None:
        """Form of the data files, see `StoreSpec`."""
        form: dict[str, Any] | None = self.setup.meta.get("file_form")
        return form

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes; None for numeric targets."""
        return _names(self.setup.meta["classes"])

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the features, or None."""
        return _names(self.setup.meta["columns"])

    @property
    def target_columns(self) -> tuple[str, ...] | None:
        """Names of the targets, or None."""
        return _names(self.setup.meta["target_columns"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """JSON values that the caller of the run has given."""
        facts: Mapping[str, Any] = self.setup.meta.get("facts", {})
        return facts

    @property
    def encoder(self) -> Mapping[str, Any] | None:
        """Description of the encoder of the table, see `StoreSpec`; None if there is none."""
        return self.setup.meta.get("encoder")


_CHECKED_PROPERTIES = (
    "order", "kernel", "metric", "trees", "targets", "loss", "fixed_transforms", "row_shape",
    "classes", "columns", "target_columns", "facts", "encoder",
)  # fmt: skip


def _names(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def column_names(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the training data, as arguments of `KernelModel`.

    meta : metadata of the setup, JSON
    """
    facts = meta.get("facts", {})
    return {
        "columns": _names(meta["columns"]), "target_columns": _names(meta["target_columns"]),
        "encoder": meta.get("encoder"), "file_form": meta.get("file_form"),
        "label_dtype": facts.get("labels"), "weight_column": facts.get("weight_column"),
    }  # fmt: skip
