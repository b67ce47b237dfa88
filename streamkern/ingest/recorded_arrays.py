"""Names of the arrays that a run read, by which later groups of other programs are read as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import zarr

from streamkern.ingest.columns import Asked
from streamkern.ingest.zarr_groups import array_there


class RecordedArrays(NamedTuple):
    """Names of arrays in the settings of a run; None for the usual name, and for no weights.

    A name that the user gives comes first, then a column of the model that the group has as an
    array, then the name in the settings.
    """

    x: str | None = None
    y: str | None = None
    sample_weight: str | None = None

    @classmethod
    def of_run(cls, recorded: Mapping[str, Any] | None) -> Self:
        """Return the names in the settings of a run. recorded : as `RunDirectory` has it"""
        data = (recorded or {}).get("identity", {}).get("settings", {}).get("data", {})
        x, y = data.get("x", "X"), data.get("y", "y")
        return cls(None if x == "X" else x, None if y == "y" else y, data.get("sample_weight"))

    def asked(
        self,
        asked: Asked,
        group: zarr.Group | None,
        columns: Sequence[str] | None,
        weight_column: str | None,
    ) -> Asked:
        """Return what to read of a group of another program, with the recorded names filled in.

        columns, weight_column : names of the targets and weights of the model
        """
        x, y, w = asked.x, asked.y, asked.w
        if group is not None and asked.targets:
            if y is None and columns is not None and len(columns) == 1:
                y = array_there(group, columns[0])
            if w is None:
                w = array_there(group, weight_column) or array_there(group, self.sample_weight)
        x, y = self.x if x is None else x, self.y if y is None else y
        return asked._replace(x=x, y=y, w=w)


USUAL = RecordedArrays()
"""The names of a run whose settings name no array."""
