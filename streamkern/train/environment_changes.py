"""Detect changes of backend, libraries or grid of ranks since a run was last written.

Besides the settings, the bits of a run depend on these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamkern.basics.warning import warn
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.differences import difference
from streamkern.train.resolve import ResolvedRun
from streamkern.train.run_identity import changed_backend, library_versions, recorded_run

_GRID = ("ranks", "center_ranks")


class EnvironmentChanges:
    """The environment of the last writers of a run, as far as known, and of this process."""

    def __init__(self, run: ResolvedRun) -> None:
        grid = run.method.share(run.problem, run.sizes, run.given.ranks).grid
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
        found = {"libraries": _libraries(before, now), "ranks": difference(*grids)}
        what = [change for each in found.values() for change in each]
        if what:
            other = " and ".join(name for name, each in found.items() if each)
            warn(f"resumed with other {other}: {'; '.join(what)}; same to rounding only")
            report("changed", {"what": what})


def _libraries(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if "backend" not in before:
        return []
    changed = changed_backend(before["backend"], now["backend"])
    return changed + difference(before.get("versions", now["versions"]), now["versions"])
