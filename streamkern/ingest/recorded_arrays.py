"""Names of the arrays that earlier data were read from, as defaults for later data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from streamkern.ingest.columns import ReadRequest


class RecordedArrays(NamedTuple):
    """Names of the arrays of earlier data; None for the default name, and for no weights.

    They apply if the user gives no name, to Zarr groups, files and xarray Datasets alike.
    """

    x: str | None = None
    y: str | None = None
    sample_weight: str | None = None

    @classmethod
    def of_run(cls, recorded: Mapping[str, Any] | None, form: Mapping[str, Any] | None) -> Self:
        """Return the names in the settings of a run, or else in its store's record of files.

        recorded : as in `RunDirectory`
        form : `StoreSpec.file_form`
        """
        data = (recorded or {}).get("identity", {}).get("settings", {}).get("data", {})
        x, y, own = data.get("x", "X"), data.get("y", "y"), cls.of_form(form)
        return cls(
            own.x if x == "X" else x, own.y if y == "y" else y,
            data.get("sample_weight") or own.sample_weight,
        )  # fmt: skip

    @classmethod
    def of_form(cls, form: Mapping[str, Any] | None) -> Self:
        """Return the names in a store's record of its files. form : `StoreSpec.file_form`."""
        return cls(**(form or {}).get("arrays", {}))

    @classmethod
    def of_asked(cls, asked: ReadRequest) -> Self:
        """Return the names that a user gave."""
        return cls(*(k if isinstance(k, str) else None for k in (asked.x, asked.y, asked.w)))

    def with_columns(self, columns: Sequence[str] | None, weight_column: str | None) -> Self:
        """Return these names with the names of a single target column and of the weights replaced.

        columns, weight_column : names of the targets and weights of a store or a model
        """
        y = columns[0] if columns is not None and len(columns) == 1 else self.y
        return self._replace(y=y, sample_weight=weight_column or self.sample_weight)

    def added(self, form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a record of files with these names added. form : `StoreSpec.file_form`."""
        names = {name: k for name, k in self._asdict().items() if k is not None}
        return {**(form or {}), "arrays": names} if names else form

    def filled(self, asked: ReadRequest, has: Callable[[str], bool]) -> ReadRequest:
        """Return the request with these names where the user gave none.

        has : returns whether an array of a name exists. Rows and targets are read by the default
        name if only that one exists, and weights are not read if they do not exist.
        """
        x, y, w = asked.x, asked.y, asked.w
        if asked.targets:
            if y is None and self.y is not None and (has(self.y) or not has("y")):
                y = self.y
            if w is None and self.sample_weight is not None and has(self.sample_weight):
                w = self.sample_weight
        if x is None and self.x is not None and (has(self.x) or not has("X")):
            x = self.x
        return asked._replace(x=x, y=y, w=w)


USUAL = RecordedArrays()
"""Names of data with the default names."""


def recorded_form(data: Any) -> Mapping[str, Any] | None:
    """Return the form for later files: the record, with arrays by the names of the columns.

    data : a `StoreSpec`, a `Like` or a `KernelModel`
    """
    arrays = RecordedArrays.of_form(data.file_form)
    return arrays.with_columns(data.target_columns, data.weight_column).added(data.file_form)
