"""Compare the environments in which a run is computed: backend, libraries and ranks.

The rounding of a run depends on them, so changes at a resume are reported.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import zarr

from streamkern.basics.version import __version__
from streamkern.basics.warning import warn
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.differences import record_differences
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.run_snapshot import recorded_run


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that arithmetic and files depend on."""
    return {
        "streamkern": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zarr": zarr.__version__,
    }


def backend_changes(recorded: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return the differences between two descriptions of a backend that can change the result.

    OpenMP is ignored. It is listed if any library of the process, such as scikit-learn, has loaded
    it, and streamkern does not compute with it.
    """

    def without_openmp(description: dict[str, Any]) -> dict[str, Any]:
        libraries = [name for name in description.get("blas", []) if not name.startswith("openmp")]
        return {**description, "blas": libraries}

    return record_differences(without_openmp(recorded), without_openmp(current))


_GRID_FACTS = ("ranks", "center_ranks")


class EnvironmentChanges:
    """Comparison of the environments of this process and of the last writer of a run.

    grid : numbers of ranks and of columns of the rank grid, in this process
    """

    def __init__(self, run: ResolvedRun) -> None:
        grid = run.method.center_partition(run.problem, run.sizes, run.inputs.ranks).grid
        self.grid = {"ranks": grid.size, "center_ranks": grid.columns}
        self._backend, self._recorded_environment = run.backend, dict[str, Any]()

    def now(self) -> dict[str, Any]:
        """Return the environment of this process as JSON values, for a checkpoint."""
        return {"backend": self._backend.describe(), "versions": library_versions()} | self.grid

    def of_setup(self, directory: RunDirectory, meta: Mapping[str, Any]) -> None:
        """Record the environment in which a setup was written.

        The grid is left out, because a setup depends on it by rounding only.
        """
        recorded = recorded_run(directory)
        self._recorded_environment = {"backend": meta["backend"]}
        self._recorded_environment |= {} if recorded is None else {"versions": recorded["versions"]}

    def of_checkpoint(self, meta: Mapping[str, Any]) -> None:
        """Record the environment in which a checkpoint was written.

        A checkpoint without a grid was written by a single process.
        """
        self._recorded_environment |= {
            name: meta[name] for name in ("backend", "versions") if name in meta
        }
        if not meta["position"]["done"]:  # otherwise nothing more is computed
            self._recorded_environment |= {name: meta.get(name, 1) for name in _GRID_FACTS}

    def report(self, report: Callable[[str, dict[str, Any]], None]) -> None:
        """Warn of changes since the last writer, and report them as an event "changed"."""
        recorded, current = self._recorded_environment, self.now()
        grids = (
            {name: values[name] for name in _GRID_FACTS if name in recorded}
            for values in (recorded, current)
        )
        changes = {
            "libraries": _library_changes(recorded, current),
            "ranks": record_differences(*grids),
        }
        texts = [change for values in changes.values() for change in values]
        if texts:
            changed_parts = " and ".join(name for name, values in changes.items() if values)
            warn(f"resumed with other {changed_parts}: {'; '.join(texts)}; same to rounding only")
            report("changed", {"what": texts})


def _library_changes(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the differences of backend and library versions between two environments."""
    if "backend" not in recorded:
        return []
    changes = backend_changes(recorded["backend"], current["backend"])
    return changes + record_differences(
        recorded.get("versions", current["versions"]), current["versions"]
    )
