"""The identity of a run: its settings and data, and the environment that its bits depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from streamkern.backend.numba_backend import numba_problem
from streamkern.basics.errors import ResumeMismatchError
from streamkern.basics.version import __version__
from streamkern.basics.warning import warn
from streamkern.config.run_config import RunConfig
from streamkern.planning.sizes import Sizes
from streamkern.rundir.checkpoint_format import checked_meta, checkpoint_errors
from streamkern.rundir.chunked_array import ChunkedArray, on_host
from streamkern.rundir.run_directory import RunDirectory
from streamkern.stream.sources.patch_features import PatchFeatures
from streamkern.train.differences import difference
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.restart.run_snapshot import calibrate_of, recorded_run, sizes_of
from streamkern.train.restart.scaling import saved_patches
from streamkern.train.restart.stored_centers import StoredCenters


def run_record(run: ResolvedRun) -> dict[str, Any]:
    """Return the record of a run: settings and data that must not change, sizes, versions."""
    identity: dict[str, Any] = {"settings": run.inputs.recorded(run.config)}
    # A store may move: its contents identify it, not its address.
    identity["settings"]["data"].pop("train", None)
    identity["data"] = run.data.source.describe()
    for name, array in (("centers", run.inputs.centers), ("metric", run.metric)):
        if isinstance(array, StoredCenters):
            identity[name] = {"shape": list(array.shape), "sha256": array.recorded or array.sha256}
        elif array is not None:
            identity[name] = array_identity(array)
    if run.inputs.continued is not None:
        identity["continues"] = run.inputs.continued.ancestry
    return {
        "identity": checked_meta(identity, "identity"),  # as it is read back: tuples become lists
        "sizes": run.sizes.recorded(),
        "versions": library_versions(),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that arithmetic and files depend on."""
    return {
        "streamkern": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zarr": zarr.__version__,
    }


def array_identity(array: npt.ArrayLike) -> dict[str, Any]:
    """Return the shape and the SHA-256 digest of an array, as JSON values."""
    a = np.ascontiguousarray(array)
    return {"shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}


def as_recorded(config: RunConfig, directory: RunDirectory | None) -> RunConfig:
    """Return the settings with "auto" replaced by the values it had when the run was started, for
    the epochs, the accelerator and the calibration."""
    recorded = recorded_run(directory)
    if directory is None or recorded is None:
        return config
    meant: dict[str, Any] = {}
    if config.data.epochs == "auto":
        meant["data.epochs"] = recorded["identity"]["settings"]["data"]["epochs"]
    if config.run.calibrate == "auto":
        meant["run.calibrate"] = calibrate_of(recorded)
    if config.run.accelerator == "auto":
        setup = directory.load_setup(lambda *_: None)
        with checkpoint_errors(directory.place):
            meant["run.accelerator"] = "auto" if setup is None else begun_with(setup.meta)
    return config.with_overrides(meant)


def begun_with(meta: Mapping[str, Any]) -> str:
    """Return the accelerator of a run, as a setting; "auto" if it is not available on this machine.

    meta : metadata of the run's setup
    """
    name = str(meta["backend"].get("accelerator")).partition(" ")[0]
    here = name == "none" or (name == "numba" and numba_problem() is None)
    return name if here else "auto"


def recorded_sizes(directory: RunDirectory | None) -> Sizes | None:
    """Return the sizes a run was started with, so that another machine's memory does not change
    them."""
    recorded = recorded_run(directory)
    return None if recorded is None else sizes_of(recorded)


def recorded_scores(directory: RunDirectory | None) -> bool | None:
    """Return whether a run was started with quantile scores; None if it is not there yet.

    Neither another machine nor a newer version may change the features of a run.
    """
    recorded = recorded_run(directory)
    return None if recorded is None else _has_scores(recorded["identity"]["data"])


def recorded_patches(directory: RunDirectory | None, config: RunConfig) -> PatchFeatures | None:
    """Return the patch features of a run that was started; None if it is not there yet.

    Those of another machine, or of a newer version, would differ by rounding at least.
    """
    if directory is None or not config.model.patch_features or recorded_run(directory) is None:
        return None

    def into(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ChunkedArray | None:
        return on_host(name, shape, dtype) if name.startswith("scaling.") else None

    setup = directory.load_setup(into)
    if setup is None:
        return None
    with checkpoint_errors(directory.place):
        return saved_patches(setup.arrays, setup.meta["scaling"])


def _has_scores(described: Any) -> bool:
    """Return whether a scaling with quantile scores is described anywhere within."""
    if isinstance(described, Mapping):
        return described.get("mode") == "quantiles" or any(map(_has_scores, described.values()))
    return isinstance(described, list | tuple) and any(map(_has_scores, described))


def changed_backend(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between two descriptions of a backend that can change a bit of the
    result.

    OpenMP is ignored: it is listed as soon as anything in the process has loaded it, for example
    scikit-learn, and nothing here computes with it.
    """

    def arithmetic(described: dict[str, Any]) -> dict[str, Any]:
        libraries = [name for name in described.get("blas", []) if not name.startswith("openmp")]
        return {**described, "blas": libraries}

    return difference(arithmetic(recorded), arithmetic(now))


def check_same_run(directory: RunDirectory | None, record: dict[str, Any]) -> None:
    """Raise ResumeMismatchError naming every difference to the run in the directory."""
    recorded = recorded_run(directory)
    if directory is not None and recorded is not None:
        _check_same(directory, recorded["identity"], record["identity"])


def check_same_model(directory: RunDirectory, config: RunConfig, inputs: RunInputs) -> None:
    """Raise ResumeMismatchError if [model] or [solver] differ, which can be checked without data.

    Only runs that do not continue another one are checked.
    """
    recorded = recorded_run(directory)
    if recorded is None or "continues" in recorded["identity"]:
        return
    settings = checked_meta(inputs.recorded(inputs.settings(config)), "settings")
    of_model = (
        {"settings": {name: each[name] for name in ("model", "solver")}}
        for each in (recorded["identity"]["settings"], settings)
    )
    _check_same(directory, *of_model)


def _check_same(
    directory: RunDirectory, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:  # fmt: skip
    changes = difference(before, now)
    changes = [change.removeprefix("settings.") for change in changes]
    if changes:
        remedy = "restore these, or give another run_dir"
        if _has_kernel_object(before) and not _has_kernel_object(now):
            remedy = (
                "resume it in Python by the call that began it, whose kernel is an object, or "
                "continue this run in another run_dir (streamkern train --continue)"
            )
        elif all(change.startswith("data") for change in changes):  # more epochs, or other rows
            remedy = (
                "restore these, give another run_dir, or continue this run in another one "
                "(streamkern train --continue, or continues of train_model)"
            )
        raise ResumeMismatchError(
            f"{directory.place} holds a run that differs: {'; '.join(changes)}", f"{remedy}"
        )


def _has_kernel_object(identity: Mapping[str, Any]) -> bool:
    """Return whether the kernel was given as an object: its description has no "kind"."""
    kernel = identity.get("settings", {}).get("model", {}).get("kernel")
    return isinstance(kernel, Mapping) and "kind" not in kernel


def check_order(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Raise ResumeMismatchError unless samples come in the same order as before. saved : None if no
    order was saved."""
    changes = difference(saved or now, now)
    if changes:
        raise ResumeMismatchError(
            f"the run was started with its samples in another order: {'; '.join(changes)}",
            "read the data in the same units and with the same version, or give another run_dir",
        )


# -- the environment, on which the bits of a run depend as well ------------------------------------

_GRID = ("ranks", "center_ranks")


class EnvironmentChanges:
    """The environment of the last writers of a run, as far as known, and of this process."""

    def __init__(self, run: ResolvedRun) -> None:
        grid = run.method.share(run.problem, run.sizes, run.inputs.ranks).grid
        self.grid = {"ranks": grid.size, "center_ranks": grid.columns}
        self._backend, self._before = run.backend, dict[str, Any]()

    def now(self) -> dict[str, Any]:
        """Return the environment of this process as a checkpoint stores it, JSON."""
        return {"backend": self._backend.describe(), "versions": library_versions()} | self.grid

    def of_setup(self, directory: RunDirectory, meta: Mapping[str, Any]) -> None:
        """Record the environment of a setup that was read.

        The grid is left out: a setup is the same to rounding with any grid.
        """
        recorded = recorded_run(directory)
        self._before = {"backend": meta["backend"]}
        self._before |= {} if recorded is None else {"versions": recorded["versions"]}

    def of_checkpoint(self, meta: Mapping[str, Any]) -> None:
        """Record the environment of a checkpoint that was read; by default of one process."""
        self._before |= {name: meta[name] for name in ("backend", "versions") if name in meta}
        if not meta["position"]["done"]:  # otherwise nothing more is computed
            self._before |= {name: meta.get(name, 1) for name in _GRID}

    def report(self, report: Callable[[str, dict[str, Any]], None]) -> None:
        """Warn of changes since the last writer, and report them."""
        before, now = self._before, self.now()
        grids = ({name: each[name] for name in _GRID if name in before} for each in (before, now))
        changes = {"libraries": _libraries(before, now), "ranks": difference(*grids)}
        texts = [change for each in changes.values() for change in each]
        if texts:
            other = " and ".join(name for name, each in changes.items() if each)
            warn(f"resumed with other {other}: {'; '.join(texts)}; same to rounding only")
            report("changed", {"what": texts})


def _libraries(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if "backend" not in before:
        return []
    changed = changed_backend(before["backend"], now["backend"])
    return changed + difference(before.get("versions", now["versions"]), now["versions"])
