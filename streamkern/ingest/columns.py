"""Request features, targets and sample weights by name or position, and record their names.

`ReadRequest` is the user's choice, and `RecordedArrays` are the names of earlier data, by which
later data is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from streamkern.basics.values import to_builtin
from streamkern.ingest.tables.missing import MissingMarkers

_MAX_POSITION_LENGTH = 3
"""Length up to which a number in a request, such as "12", may be a position, so that no header must
have it as a name."""


class ReadRequest(NamedTuple):
    """Request for arrays and columns of an input by name, or for arrays given beside it.

    x : the name of an array; or columns by name or, where no column has that name, by position;
        None for the default
    y : targets: a name, a position, a file, an array, or several columns; None for the default
    w : sample weights, given as y is; None for no weights
    targets : whether y and w are read; if not, columns of these names are only left out
    columns : the names that the features must have, in the order to read them in
    dropped_columns : names of columns to leave out as features; if `columns` is given, they may be
        missing, or targets
    as_table : whether features are read as Arrow tables of any cells, and not as numbers
    missing_texts : texts that mark a missing cell in such a table, in files without types
    markers : the user's markers of missing cells, also in targets
    drop_missing : whether rows that lack a target are left out
    reads_all_columns : whether all columns are read, including an index of the rows
    """

    x: Any = None
    y: Any = None
    w: Any = None
    targets: bool = True
    columns: Sequence[str] | None = None
    dropped_columns: Sequence[str] = ()
    as_table: bool = False
    missing_texts: Sequence[str] = ()
    markers: MissingMarkers | None = None
    drop_missing: bool = False
    reads_all_columns: bool = False

    @property
    def x_name(self) -> Any:
        """Name of the array X in a file with named arrays."""
        return "X" if self.x is None else self.x

    @property
    def y_name(self) -> Any:
        """Name of the array y in a file with named arrays."""
        return "y" if self.y is None else self.y

    @property
    def arrays(self) -> list[Any]:
        """Names of the arrays X, y and w of one file; y and w only if they are read."""
        y, w = ([self.y_name] if self.targets else []), ([self.w] if self.reads_weights else [])
        return [self.x_name, *y, *w]

    @property
    def expected_names(self) -> tuple[str, ...]:
        """Names that columns must have: the names of the features, or the names requested.

        A short number may be a position; a longer one, such as a year, is taken for a name.
        """
        requested = [*as_list(self.x), *as_list(self.y), *as_list(self.w)]
        names = [
            name
            for name in requested
            if isinstance(name, str)
            and (len(name) > _MAX_POSITION_LENGTH or not name.lstrip("-").isdecimal())
        ]
        return tuple(self.columns or names)

    @property
    def non_feature_names(self) -> tuple[str, ...]:
        """Names of the targets, weights and dropped columns, which a table may also have."""
        return (*map(str, (*as_list(self.y), *as_list(self.w))), *self.dropped_columns)

    def with_recorded_positions(self, record: Mapping[str, Any] | None, width: int) -> Self:
        """Return the request with the columns at the positions that they had in earlier files.

        The request is returned unchanged if these files had column names or another width. Roles
        that the user chose stay.

        record : `FileForm.earlier_record`
        width : number of columns of the file, which has no column names
        """
        positions = (record or {}).get("positions") or {}
        if positions.get("width") != width:
            return self
        return self._replace(
            x=positions.get("x") if self.x is None else self.x,
            y=positions["y"] if self.y is None else self.y,
            w=positions["sample_weight"] or None if self.w is None else self.w,
        )

    @property
    def reads_weights(self) -> bool:
        """True if sample weights are read."""
        return self.targets and self.w is not None

    def keeps_missing(self, i: int) -> bool:
        """Return whether missing values are read from the i-th of `arrays`, to drop their rows."""
        return self.drop_missing and self.targets and i == 1

    def json(self) -> Any:
        """Return x, y, w, `columns` and `targets` as JSON, to distinguish ingests."""
        return [_json(names) for names in (self.x, self.y, self.w, self.columns)] + [self.targets]


def as_list(columns: Any) -> list[Any]:
    """Return one column, several or None as a list."""
    columns = to_builtin(columns)
    if columns is None:
        return []
    is_list = isinstance(columns, Iterable) and not isinstance(columns, str | bytes)
    return list(columns) if is_list else [columns]


def _json(columns: Any) -> Any:
    columns = to_builtin(columns)
    if columns is None or isinstance(columns, str | int):
        return columns
    return [column if isinstance(column, int) else str(column) for column in as_list(columns)]


class RecordedArrays(NamedTuple):
    """Names of the arrays of earlier data; None for the default name, and for no weights.

    If the user gives no names, these are used for Zarr groups, files and xarray Datasets.
    """

    x: str | None = None
    y: str | None = None
    sample_weight: str | None = None

    @classmethod
    def from_run(cls, run: Mapping[str, Any] | None, form: Mapping[str, Any] | None) -> Self:
        """Return the names in the settings of a run, or else in its store's record of files.

        run : the recorded run, as in `RunDirectory`
        form : `StoreSpec.file_form`
        """
        data = (run or {}).get("identity", {}).get("settings", {}).get("data", {})
        x = data.get("x", "X")
        y = data.get("y", "y")
        names_in_form = cls.from_form(form)
        return cls(
            names_in_form.x if x == "X" else x, names_in_form.y if y == "y" else y,
            data.get("sample_weight") or names_in_form.sample_weight,
        )  # fmt: skip

    @classmethod
    def from_form(cls, form: Mapping[str, Any] | None) -> Self:
        """Return the names in a store's record of its files. form : `StoreSpec.file_form`."""
        return cls(**(form or {}).get("arrays", {}))

    @classmethod
    def from_request(cls, request: ReadRequest) -> Self:
        """Return the names that a user gave; None for positions, arrays and several columns."""
        roles = (request.x, request.y, request.w)
        return cls(*(role if isinstance(role, str) else None for role in roles))

    def with_columns(self, columns: Sequence[str] | None, weight_column: str | None) -> Self:
        """Return these names with the target and weights of a table in place of y and w.

        columns : names of the target columns; y is replaced only if there is one
        weight_column : name of the column of weights, None if there is none
        """
        y = columns[0] if columns is not None and len(columns) == 1 else self.y
        return self._replace(y=y, sample_weight=weight_column or self.sample_weight)

    def add_to_record(self, form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a copy of a record of files with these names. form : `StoreSpec.file_form`."""
        names = {role: name for role, name in self._asdict().items() if name is not None}
        return {**(form or {}), "arrays": names} if names else form

    def apply_to(self, request: ReadRequest, has_array: Callable[[str], bool]) -> ReadRequest:
        """Return the request with these names where the user gave none.

        Rows and targets are read by the default name if only the array of this name exists; weights
        are not read if their array does not exist.

        has_array : returns whether an array of a name exists
        """
        x, y, w = request.x, request.y, request.w
        if request.targets:
            if y is None and self.y is not None and (has_array(self.y) or not has_array("y")):
                y = self.y
            if w is None and self.sample_weight is not None and has_array(self.sample_weight):
                w = self.sample_weight
        if x is None and self.x is not None and (has_array(self.x) or not has_array("X")):
            x = self.x
        return request._replace(x=x, y=y, w=w)


DEFAULT_ARRAYS = RecordedArrays()
"""No recorded names: the defaults X and y, and no weights."""


def unused_columns(form: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the columns of earlier files that no feature was made of; later files may have them.

    form : `StoreSpec.file_form`
    """
    return tuple((form or {}).get("unused", ()))


def add_unused_columns(
    form: Mapping[str, Any] | None, names: Iterable[str], used: Iterable[str | None]
) -> Mapping[str, Any] | None:
    """Return a copy of a record of files with the names of unused columns, each of them once.

    form : `StoreSpec.file_form`
    names : names for `unused_columns`
    used : names that are not recorded: features, targets, weights; None is ignored
    """
    unused = [name for name in dict.fromkeys(names) if name not in {*used}]
    return {**(form or {}), "unused": unused} if unused else form


def recorded_form(data: Any) -> Mapping[str, Any] | None:
    """Return the record by which later files are read: `file_form`, with the names of the arrays.

    data : a `StoreSpec`, a `ReferenceData` or a `KernelModel`
    """
    names = RecordedArrays.from_form(data.file_form)
    names = names.with_columns(data.target_columns, data.weight_column)
    return names.add_to_record(data.file_form)
