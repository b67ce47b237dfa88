"""Describe the differences of two records of a run as text, without digests of contents.

The rounding of a run depends on its backend, libraries and ranks, so their changes at a resume are
reported.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import zarr

from streamkern.basics.version import __version__
from streamkern.basics.warning import warn
from streamkern.kernels.notation import kernel_text
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.run_snapshot import recorded_run

MAX_SHOWN_ENTRIES = 6
"""Largest number of entries of a list that are shown."""
_SOURCE_ENTRIES = ("n_rows", "row_shape", "dtype", "n_outputs", "classes", "copies")


def record_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of two nested records, as "solver.level: was 100, now 200"."""
    old_entries, new_entries = dict(_entries(old)), dict(_entries(new))
    changes: list[str] = []
    for key in dict.fromkeys([*old_entries, *new_entries]):
        old_value, new_value = old_entries.get(key), new_entries.get(key)
        if _is_source(old_value) and _is_source(new_value):
            changes += _source_changes(key, old_value, new_value)
        elif key not in old_entries or key not in new_entries or old_value != new_value:
            changes.append(_change(key, old_entries, new_entries))
    if any(change.startswith("settings.data.scale:") for change in changes):  # the same difference
        changes = [change for change in changes if not change.startswith("data.transforms:")]
    return changes


def _entries(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and the values of the entries of nested tables.

    A kernel, an array and the description of a source are single values. An array that was given in
    place of a setting has the name of this setting.
    """
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if not prefix and _is_array(value) and "settings" in tables:
            name = f"settings.model.{key}"
        is_value = _is_array(value) or _is_source(value) or key in ("kernel", "continues")
        if isinstance(value, Mapping) and not is_value:
            yield from _entries(value, f"{name}.")
        else:
            yield name, value


def _change(key: str, old_entries: Mapping[str, Any], new_entries: Mapping[str, Any]) -> str:
    to_text = _kernel_text if key.rpartition(".")[2] == "kernel" else _text
    old, new = (
        to_text(values[key]) if key in values else "not set"
        for values in (old_entries, new_entries)
    )
    return f"{key}: other contents" if old == new else f"{key}: was {old}, now {new}"


def _source_changes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of the data of two runs, from the descriptions of their sources."""
    changes = []
    for key in _SOURCE_ENTRIES:
        pair = old.get(key), new.get(key)
        if pair[0] != pair[1] and (key != "copies" or set(pair) != {1, None}):
            entry = f"{name}.{key}"
            entries = ({entry: source[key]} if key in source else {} for source in (old, new))
            changes.append(_change(entry, *entries))
    other_rows = set(_checksums(old)) != set(_checksums(new))
    if other_rows:
        changes.append(f"{name}: other rows or targets")
    transforms = [list(_transforms(source)) for source in (old, new)]
    kinds = [[step.get("kind", "?") for step in source] for source in transforms]
    if kinds[0] != kinds[1]:
        changes.append(f"{name}.transforms: was {_text(kinds[0])}, now {_text(kinds[1])}")
    elif transforms[0] != transforms[1] and not other_rows:
        changed_kinds = [
            a["kind"] for a, b in zip(*transforms, strict=True) if a != b and "kind" in a
        ]
        changes.append(f"{name}.transforms: other numbers in {_text(changed_kinds)}")
    if not changes and old != new:
        changes.append(f"{name}: the same rows from another kind of source")
    return changes


def _transforms(source: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the transforms of a source in the order of their application, base sources first."""
    if isinstance(source, Mapping):
        for key, value in source.items():
            if key != "transforms":
                yield from _transforms(value)
        yield from source.get("transforms", ())
    elif isinstance(source, Sequence) and not isinstance(source, str):
        for item in source:
            yield from _transforms(item)


def _checksums(value: Any) -> Iterator[str]:
    """Yield the digests of contents in a description, but not in its transforms."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if "fingerprint" in key:
                yield json.dumps(entry)
            elif key != "transforms":
                yield from _checksums(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _checksums(entry)
    elif _is_checksum(value):
        yield value


def _is_checksum(value: object) -> bool:
    pattern = r"(\w+:)?[0-9a-f]{16,}"
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_array(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"shape", "sha256"}


def _is_source(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and {"kind", "n_rows"} <= value.keys()


def _kernel_text(value: Any) -> str:
    if not isinstance(value, Mapping):
        return _text(value)
    without_metric = {key: entry for key, entry in value.items() if key != "metric"}
    return kernel_text(without_metric) + (" in a metric" if "metric" in value else "")


def _text(value: Any) -> str:
    """Return a value as text for people."""
    if isinstance(value, Mapping):
        if _is_array(value):
            return f"an array of shape {value['shape']}"
        return str(value.get("run", value.get("kind", "a table")))
    if isinstance(value, list | tuple):
        entry_texts = [_text(entry) for entry in value[:MAX_SHOWN_ENTRIES]]
        return f"[{', '.join(entry_texts + ['...'] * (len(value) > MAX_SHOWN_ENTRIES))}]"
    return "other contents" if _is_checksum(value) else repr(value)


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
