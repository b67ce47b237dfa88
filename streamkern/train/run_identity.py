"""Check that a run is resumed with the same settings and data, and keep its choices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.numba_backend import numba_problem
from streamkern.basics.errors import ConfigError, ResumeMismatchError
from streamkern.basics.message import mention
from streamkern.config.run_config import RunConfig
from streamkern.config.toml import toml_value
from streamkern.kernels.builtin import get_kernel, is_built_in
from streamkern.rundir.checkpoint_format import checked_meta, checkpoint_errors
from streamkern.rundir.chunked_array import ChunkedArray, allocate_on_host
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.train.differences import library_versions, record_differences
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.restart.run_snapshot import recorded_calibrate, recorded_run
from streamkern.train.restart.scaling import saved_patches
from streamkern.train.restart.stored_centers import StoredCenters


def run_record(run: ResolvedRun) -> dict[str, Any]:
    """Return the record of a run, as JSON values, which its directory stores.

    "identity" : settings, data, centers and metric, which must not change on a resume
    "sizes" : sizes of the plan
    "versions" : versions of libraries
    """
    identity: dict[str, Any] = {"settings": run.inputs.recorded_settings(run.config)}
    # The contents identify a store, since its address may change.
    identity["settings"]["data"].pop("train", None)
    identity["data"] = run.data.source.describe()
    for name, array in (("centers", run.inputs.centers), ("metric", run.metric)):
        if isinstance(array, StoredCenters):
            identity[name] = {
                "shape": list(array.shape),
                "sha256": array.recorded_sha256 or array.sha256,
            }
        elif array is not None:
            identity[name] = array_identity(array)
    if run.inputs.continued_run is not None:
        identity["continues"] = run.inputs.continued_run.ancestry
    return {
        "identity": checked_meta(identity, "identity"),  # tuples become lists, as after reading
        "sizes": run.sizes.as_record(),
        "versions": library_versions(),
    }


def array_identity(array: npt.ArrayLike) -> dict[str, Any]:
    """Return the shape and the SHA-256 digest of an array, as JSON values."""
    a = np.ascontiguousarray(array)
    return {"shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}


def with_recorded_settings(
    config: RunConfig, directory: RunDirectory | None, record: Mapping[str, Any] | None
) -> RunConfig:
    """Return the settings with "auto" replaced by the values with which the run was started.

    These are data.epochs, run.calibrate and run.accelerator. A new run keeps its settings.

    record : result of `recorded_run`
    """
    if directory is None or record is None:
        return config
    resolved: dict[str, Any] = {}
    if config.data.epochs == "auto":
        resolved["data.epochs"] = record["identity"]["settings"]["data"]["epochs"]
    if config.run.calibrate == "auto":
        resolved["run.calibrate"] = recorded_calibrate(record)
    if config.run.accelerator == "auto":
        setup = directory.load_setup(lambda *_: None)
        with checkpoint_errors(directory.location):
            resolved["run.accelerator"] = (
                "auto" if setup is None else accelerator_at_start(setup.meta)
            )
    return config.with_overrides(resolved)


def accelerator_at_start(meta: Mapping[str, Any]) -> str:
    """Return the accelerator with which a run was started, as a value of run.accelerator.

    "auto" if it is not available on this machine.

    meta : metadata of the run's setup
    """
    name = str(meta["backend"].get("accelerator")).partition(" ")[0]
    is_available = name == "none" or (name == "numba" and numba_problem() is None)
    return name if is_available else "auto"


def recorded_patches(directory: RunDirectory) -> PatchFeatures | None:
    """Return the patch features of a run; None if it has no setup yet, or no patch features.

    Computed on another machine or by a newer version, they would differ at least by rounding.
    """

    def scaling_arrays(
        name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> ChunkedArray | None:
        return allocate_on_host(name, shape, dtype) if name.startswith("scaling.") else None

    setup = directory.load_setup(scaling_arrays)
    if setup is None:
        return None
    with checkpoint_errors(directory.location):
        return saved_patches(setup.arrays, setup.meta["scaling"])


def has_scale(description: Any, mode: str) -> bool:
    """Return whether the description of a source has a scaling of this mode, at any depth.

    Another machine or a newer version might choose other features than the run was started with.
    """
    if isinstance(description, Mapping):
        parts = list(description.values())
        return description.get("mode") == mode or any(has_scale(part, mode) for part in parts)
    is_list = isinstance(description, list | tuple)
    return is_list and any(has_scale(part, mode) for part in description)


def check_same_run(directory: RunDirectory | None, record: dict[str, Any]) -> None:
    """Raise ResumeMismatchError, with all differences, if the directory holds another run.

    record : result of `run_record`
    """
    recorded = recorded_run(directory)
    if directory is not None and recorded is not None:
        _check_same(directory, recorded["identity"], record["identity"])


def check_same_model(directory: RunDirectory, config: RunConfig, inputs: RunInputs) -> None:
    """Raise ResumeMismatchError if [model] or [solver] differ from the run in the directory.

    This check needs no data. Runs that continue another one are not checked.
    """
    recorded = recorded_run(directory)
    if recorded is None or "continues" in recorded["identity"]:
        return
    settings = checked_meta(inputs.recorded_settings(inputs.settings(config)), "settings")
    model_settings = (
        {"settings": {name: tables[name] for name in ("model", "solver")}}
        for tables in (recorded["identity"]["settings"], settings)
    )
    _check_same(directory, *model_settings)


def _check_same(
    directory: RunDirectory, recorded: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Raise ResumeMismatchError with all differences of two identities, and a remedy."""
    changes = record_differences(*_with_equal_kernels(recorded, current))
    changes = [change.removeprefix("settings.") for change in changes]
    if changes:
        remedy = "restore these, or give another run_dir"
        kernels_differ = any(change.startswith("model.kernel") for change in changes)
        if kernels_differ and _has_kernel_object(recorded) and not _has_kernel_object(current):
            table = _kernel_table(recorded["settings"]["model"]["kernel"])
            kernel_remedy = (
                "resume it in Python by the call that began it, whose kernel is an object"
                if table is None
                else f"give its kernel, {mention('model.kernel')} = {toml_value(table)}"
            )
            remedy = (
                f"{kernel_remedy}, or continue this run in another run_dir "
                "(streamkern train --continue)"
            )
        elif all(change.startswith("data") for change in changes):  # more epochs, or other rows
            remedy = (
                "restore these, give another run_dir, or continue this run in another one "
                "(streamkern train --continue, or continues of train_model)"
            )
        raise ResumeMismatchError(
            f"{directory.location} holds a run that differs: {'; '.join(changes)}", remedy
        )


def _has_kernel_object(identity: Mapping[str, Any]) -> bool:
    """Return whether the kernel was given as an object: its description has no "kind"."""
    kernel = identity.get("settings", {}).get("model", {}).get("kernel")
    return isinstance(kernel, Mapping) and "kind" not in kernel


def _with_equal_kernels(
    recorded: Mapping[str, Any], current: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return both identities; kernels that only differ in their notation are made equal.

    A run that was started with the object `Laplace(2)` in Python can therefore be resumed with the
    table {kind = "laplace", bandwidth = 2.0}, for example on the command line.
    """
    if _has_kernel_object(recorded) == _has_kernel_object(current):
        return recorded, current
    recorded_table, current_table = (
        _kernel_table(identity.get("settings", {}).get("model", {}).get("kernel"))
        for identity in (recorded, current)
    )
    if recorded_table is None or recorded_table != current_table:
        return recorded, current
    model = {**current["settings"]["model"], "kernel": recorded["settings"]["model"]["kernel"]}
    return recorded, {**current, "settings": {**current["settings"], "model": model}}


def _kernel_table(kernel: Any) -> dict[str, Any] | None:
    """Return a built-in kernel, as a record describes it, as a table with all of its parameters.

    None if a parameter is open, or if a table cannot hold the kernel, as with a metric.
    """
    try:
        kernel_object = get_kernel(kernel, "auto")
    except ConfigError:
        return None
    is_plain = not (kernel_object.is_open or kernel_object.sparse or kernel_object.n_compared)
    if not is_plain or not is_built_in(kernel_object):
        return None
    return _with_kinds(kernel_object.describe())


def _with_kinds(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a built-in kernel as a table of a run file."""
    table = {"kind": description["kernel"], **description}
    del table["kernel"]
    if "parts" in table:
        table["parts"] = [_with_kinds(part) for part in table["parts"]]
    return table


def check_order(saved: Mapping[str, Any] | None, current: Mapping[str, Any]) -> None:
    """Raise ResumeMismatchError unless samples come in the same order as before.

    saved, current : values of `BatchReader.order_key`; `saved` is None if there is no checkpoint
    """
    changes = record_differences(saved or current, current)
    if changes:
        raise ResumeMismatchError(
            f"the run was started with its samples in another order: {'; '.join(changes)}",
            "read the data in the same units and with the same version, or give another run_dir",
        )
