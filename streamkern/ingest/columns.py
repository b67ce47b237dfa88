"""Choose columns of a table as features, targets and sample weights, by name or position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.values import to_builtin
from streamkern.ingest.tables.missing import MissingMarkers

FileRowCounts = tuple[tuple[str, int | None], ...]
"""For each file, its name without secrets and its number of rows, or None if it is unknown."""


_MAX_POSITION_DIGITS = 3
"""Number of characters up to which digits, such as "12", may be the position of a column."""


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

        A short number may be a position; a longer one, such as a year, is a name.
        """
        requested = [*as_list(self.x), *as_list(self.y), *as_list(self.w)]
        names = [
            k for k in requested
            if isinstance(k, str)
            and (len(k) > _MAX_POSITION_DIGITS or not k.lstrip("-").isdecimal())
        ]  # fmt: skip
        return tuple(self.columns or names)

    @property
    def non_feature_names(self) -> tuple[str, ...]:
        """Names of the targets, weights and dropped columns, which a table may also have."""
        return (*map(str, (*as_list(self.y), *as_list(self.w))), *self.dropped_columns)

    def with_recorded_positions(self, record: Mapping[str, Any] | None, width: int) -> Self:
        """Return the request with the columns at the positions that they had in earlier files.

        The request is returned unchanged if these files had column names or another width.

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
        return self.targets and self.w is not None

    def keeps_missing(self, i: int) -> bool:
        """Return whether missing values are read from the i-th of `arrays`, to drop their rows."""
        return self.drop_missing and self.targets and i == 1

    def json(self) -> Any:
        """Return the names and positions as JSON, to distinguish ingests."""
        return [_json(k) for k in (self.x, self.y, self.w, self.columns)] + [self.targets]


@dataclass(frozen=True)
class ColumnRoles:
    """Names of the columns of a table by role; no `targets` and `weights` if they are not read.

    unused : the columns without a role
    """

    features: tuple[str, ...]
    targets: tuple[str, ...]
    weights: tuple[str, ...]
    unused: tuple[str, ...] = ()

    @property
    def all_columns(self) -> list[str]:
        """All columns that are read."""
        return [*self.features, *self.targets, *self.weights]

    @property
    def weight_column(self) -> str | None:
        """Name of the column of weights; None if there is none."""
        return next(iter(self.weights), None)


def assign_columns(
    names: Sequence[str], request: ReadRequest, location: str, *, has_names: bool = True
) -> ColumnRoles:
    """Return the columns of a table with these `names` by role.

    has_names : whether `names` are names in the file; if False, they are positions

    Raises
    ------
    DataError
        If a column does not exist or has two roles, if two columns have the same name, if no column
        is left as a feature, or if the columns differ from `request.columns`.
    """
    if (repeated_name := _first_repeated(names)) is not None:
        raise DataError(f"{location} has two columns named {repeated_name!r}", "rename one of them")
    for parameter, values in (("y", request.y), ("sample_weight", request.w)):
        _refuse_values(values, len(names), parameter, location)

    def requested(role: Any) -> list[str]:
        """Return the names of targets or weights; only existing columns if they are not read.

        Columns that are not read are looked up as well, to leave them out of the features.
        """
        positions = range(-len(names), len(names))  # an integer is a position in this table
        return [
            _name_of(names, k, location, has_names)
            for k in as_list(role)
            if request.targets or str(k) in names or k in positions
        ]

    targets, weights = requested(request.y_name), requested(request.w)
    target_names = [*targets, *weights]
    if request.x is None:
        features = [name for name in names if name not in set(target_names)]
    else:
        features = [_name_of(names, k, location, has_names) for k in as_list(request.x)]
    if (repeated_name := _first_repeated([*target_names, *features])) is not None:
        raise DataError(
            f"column {repeated_name!r} of {location} is requested twice",
            "use it once, as feature, target or weight",
        )
    dropped_targets = [name for name in target_names if name in request.dropped_columns]
    if dropped_targets and request.columns is None:
        raise DataError(
            f"column {dropped_targets[0]!r} of {location} is a target or weight and cannot be "
            "dropped",
            f"leave it out of {mention('drop=')}",
        )
    unknown = [name for name in request.dropped_columns if name not in names]
    if unknown and request.columns is None:
        raise DataError(
            f"{location} has no column {some(unknown)} to leave out",
            f"name columns of the table with {mention('drop=')}: {some(names)}",
        )
    features = [name for name in features if name not in request.dropped_columns]
    if request.columns is not None and has_names:
        features = in_order(features, request.columns, location)
    if not features:
        raise DataError(
            f"{location} has no feature columns besides {', '.join(target_names)}",
            f"leave at least one column out of {mention('y=')}, {mention('sample_weight=')} or "
            f"{mention('drop=')}",
        )
    used = {*features, *target_names}
    unused = tuple(name for name in names if name not in used)
    if not request.targets:
        targets, weights = [], []
    return ColumnRoles(tuple(features), tuple(targets), tuple(weights), unused)


def _refuse_values(values: Any, n_columns: int, parameter: str, location: str) -> None:
    """Raise DataError if values of targets or weights are given in place of column names."""
    values = to_builtin(values)
    if values is None or isinstance(values, str | int):
        return
    if len(values) > n_columns or not all(isinstance(k, str | int) for k in values):
        kind = "targets" if parameter == "y" else "weights"
        raise DataError(
            f"{parameter} holds values, but {location} is a table with {kind} among its columns",
            f"give the name of the column as {parameter}, or read the table into a data frame and "
            "give this with the values",
        )


def in_order(
    columns: Sequence[str], expected: Sequence[str], location: str, role: str = "x"
) -> list[str]:
    """Return `expected` if it has the same columns as `columns`; DataError names any difference.

    role : the parameter that chooses the columns, for messages
    """
    present_names, expected_set = set(columns), set(expected)
    missing = [name for name in expected if name not in present_names]
    unexpected = [name for name in columns if name not in expected_set]
    if missing or unexpected:
        differences, remedies = [], []
        if missing:
            differences.append(f"lacks {some(missing)}")
            remedies.append("add what is missing")
        if unexpected:
            differences.append(f"has {some(unexpected)} besides")
            remedies.append(f"choose these with {mention(f'{role}=')}")
        raise DataError(
            f"{location} {' and '.join(differences)}: its columns must be {some(expected)}, in any "
            "order",
            " and ".join(remedies),
        )
    return list(expected)


def _name_of(names: Sequence[str], column: Any, location: str, has_names: bool) -> str:
    """Return the name of a column given by name, or by position, negative from the end.

    A number is a name if a column has it, because a command line cannot tell the two apart.
    """
    if isinstance(column, str | int) and str(column) in names:
        return str(column)
    position = None if isinstance(column, bool) else column  # True would be column 1
    if isinstance(column, str):
        digits = column.removeprefix("-")
        position = int(column) if digits.isdecimal() and len(digits) < 10 else None
    if not isinstance(position, int) or not -len(names) <= position < len(names):
        if not has_names and position is None:
            raise DataError(
                f"{location} has no header line, so it has no column {column!r}",
                f"add one, give the names of its {len(names)} columns with {mention('names=')}, "
                f"or give {mention('x=')} and {mention('y=')} as positions, counted from 0",
            )
        raise DataError(
            f"{location} has no column {column!r}",
            f"name columns of the file with {mention('x=')} and {mention('y=')}: {some(names)}",
        )
    return names[position]


def _first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once; None if there is none."""
    return next((name for name, n in Counter(names).items() if n > 1), None)


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
    return [str(k) if not isinstance(k, int) else k for k in as_list(columns)]


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
        """Return the names that a user gave."""
        return cls(*(k if isinstance(k, str) else None for k in (request.x, request.y, request.w)))

    def with_columns(self, columns: Sequence[str] | None, weight_column: str | None) -> Self:
        """Return these names with the target and weights of a table in place of y and w.

        columns : names of the target columns; y is replaced only if there is one
        weight_column : name of the column of weights, None if there is none
        """
        y = columns[0] if columns is not None and len(columns) == 1 else self.y
        return self._replace(y=y, sample_weight=weight_column or self.sample_weight)

    def add_to_record(self, form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a copy of a record of files with these names. form : `StoreSpec.file_form`."""
        names = {name: k for name, k in self._asdict().items() if k is not None}
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
