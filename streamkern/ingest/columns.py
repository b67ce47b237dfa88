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


class ReadRequest(NamedTuple):
    """Request for arrays and columns of an input by name, or for arrays given beside it.

    x : the name of an array, or columns by name or, where none has that name, position; None for
        the default
    y, w : targets and weights: a name, a position, a file, an array, or several columns; None for
        the default targets, and for no weights
    targets : whether y and w are read; if not, columns of these names are only left out
    columns : the names that the features must have, in the order to read them in
    dropped : names of columns to leave out as features; if `columns` is given, they may be missing,
        or targets
    cells : None if features are numbers; otherwise features are Arrow tables of any cells, and
        these texts mark a missing one
    marks : the user's markers of missing cells, also in targets
    drop_missing : whether rows that lack a target are left out
    reads_all_columns : whether all columns are read, including an index of the rows
    """

    x: Any = None
    y: Any = None
    w: Any = None
    targets: bool = True
    columns: Sequence[str] | None = None
    dropped: Sequence[str] = ()
    cells: Sequence[str] | None = None
    marks: MissingMarkers | None = None
    drop_missing: bool = False
    reads_all_columns: bool = False

    @property
    def arrays(self) -> list[Any]:
        """Names of X, y and w as arrays of one file, as far as they are read."""
        x, y = "X" if self.x is None else self.x, "y" if self.y is None else self.y
        return [x, *([y] if self.targets else []), *([self.w] if self.reads_weights else [])]

    @property
    def known_names(self) -> tuple[str, ...]:
        """Names that columns must have: the names of the features, or the names requested.

        A number of up to three digits may be a position; a longer one, such as a year, is a name.
        """
        requested = [*as_list(self.x), *as_list(self.y), *as_list(self.w)]
        names = [
            k for k in requested
            if isinstance(k, str) and (len(k) > 3 or not k.lstrip("-").isdecimal())
        ]  # fmt: skip
        return tuple(self.columns or names)

    @property
    def names_beside(self) -> tuple[str, ...]:
        """Names that columns may have besides the features: targets, weights, dropped columns."""
        return (*map(str, (*as_list(self.y), *as_list(self.w))), *self.dropped)

    def as_recorded(self, recorded: Mapping[str, Any] | None, width: int) -> Self:
        """Return the request with the columns at the positions that they had in earlier files.

        That holds for files without names that have as many columns; others have no targets.
        recorded : as in `FileForm`
        """
        positions = (recorded or {}).get("positions") or {}
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

    def keeps(self, i: int) -> bool:
        """Return whether missing values of the i-th of `arrays` are kept, to drop their rows."""
        return self.drop_missing and self.targets and i == 1

    def json(self) -> Any:
        """Return the names and positions as JSON, to distinguish ingests."""
        return [_json(k) for k in (self.x, self.y, self.w, self.columns)] + [self.targets]


@dataclass(frozen=True)
class Split:
    """Columns of a table by role; `targets` and `weights` are empty if they are not read.

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


def split_columns(
    names: Sequence[str], request: ReadRequest, location: str, *, named: bool = True
) -> Split:
    """Choose columns of a table with these `names` by role.

    named : whether the names are the file's own, and not positions, and can be compared

    Raises
    ------
    DataError
        No such column, one in two roles, nothing left as a feature, repeated names, or other
        columns than expected.
    """
    if (repeated := _first_repeated(names)) is not None:
        raise DataError(f"{location} has two columns named {repeated!r}", "rename one of them")
    for parameter, values in (("y", request.y), ("sample_weight", request.w)):
        _refuse_values(values, len(names), parameter, location)
    targets, weights = (
        [
            _name_of(names, k, location, named)
            for k in as_list(role)
            # An integer is always a position in this table.
            if request.targets or str(k) in names or k in range(-len(names), len(names))
        ]
        for role in ("y" if request.y is None else request.y, request.w)
    )
    target_names = [*targets, *weights]
    if request.x is None:
        features = [name for name in names if name not in set(target_names)]
    else:
        features = [_name_of(names, k, location, named) for k in as_list(request.x)]
    if (repeated := _first_repeated([*target_names, *features])) is not None:
        raise DataError(
            f"column {repeated!r} of {location} is requested twice",
            "use it once, as feature, target or weight",
        )
    dropped_targets = [name for name in target_names if name in request.dropped]
    if dropped_targets and request.columns is None:
        raise DataError(
            f"column {dropped_targets[0]!r} of {location} is a target or weight and cannot be "
            "dropped",
            f"leave it out of {mention('drop=')}",
        )
    unknown = [name for name in request.dropped if name not in names]
    if unknown and request.columns is None:
        raise DataError(
            f"{location} has no column {some(unknown)} to leave out",
            f"name columns of the table with {mention('drop=')}: {some(names)}",
        )
    features = [name for name in features if name not in request.dropped]
    if request.columns is not None and named:
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
    return Split(tuple(features), tuple(targets), tuple(weights), unused)


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

    role : the parameter that chooses them
    """
    present, expected_set = set(columns), set(expected)
    missing = [name for name in expected if name not in present]
    extra = [name for name in columns if name not in expected_set]
    if missing or extra:
        differences, remedies = [], []
        if missing:
            differences.append(f"lacks {some(missing)}")
            remedies.append("add what is missing")
        if extra:
            differences.append(f"has {some(extra)} besides")
            remedies.append(f"choose these with {mention(f'{role}=')}")
        raise DataError(
            f"{location} {' and '.join(differences)}: its columns must be {some(expected)}, in any "
            "order",
            " and ".join(remedies),
        )
    return list(expected)


def _name_of(names: Sequence[str], column: Any, location: str, named: bool = True) -> str:
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
        if not named and position is None:
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

    They apply if the user gives no name, to Zarr groups, files and xarray Datasets alike.
    """

    x: str | None = None
    y: str | None = None
    sample_weight: str | None = None

    @classmethod
    def from_run(cls, recorded: Mapping[str, Any] | None, form: Mapping[str, Any] | None) -> Self:
        """Return the names in the settings of a run, or else in its store's record of files.

        recorded : as in `RunDirectory`
        form : `StoreSpec.file_form`
        """
        data = (recorded or {}).get("identity", {}).get("settings", {}).get("data", {})
        x, y, recorded_names = data.get("x", "X"), data.get("y", "y"), cls.from_form(form)
        return cls(
            recorded_names.x if x == "X" else x, recorded_names.y if y == "y" else y,
            data.get("sample_weight") or recorded_names.sample_weight,
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
        """Return these names with the names of a single target column and of the weights replaced.

        columns, weight_column : names of the targets and weights of a store or a model
        """
        y = columns[0] if columns is not None and len(columns) == 1 else self.y
        return self._replace(y=y, sample_weight=weight_column or self.sample_weight)

    def added(self, form: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a record of files with these names added. form : `StoreSpec.file_form`."""
        names = {name: k for name, k in self._asdict().items() if k is not None}
        return {**(form or {}), "arrays": names} if names else form

    def filled(self, request: ReadRequest, has: Callable[[str], bool]) -> ReadRequest:
        """Return the request with these names where the user gave none.

        has : returns whether an array of a name exists. Rows and targets are read by the default
        name if only that one exists, and weights are not read if they do not exist.
        """
        x, y, w = request.x, request.y, request.w
        if request.targets:
            if y is None and self.y is not None and (has(self.y) or not has("y")):
                y = self.y
            if w is None and self.sample_weight is not None and has(self.sample_weight):
                w = self.sample_weight
        if x is None and self.x is not None and (has(self.x) or not has("X")):
            x = self.x
        return request._replace(x=x, y=y, w=w)


DEFAULT_ARRAYS = RecordedArrays()
"""Names of data with the default names."""


def unused_columns(form: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the columns of earlier files that no feature was made of; later files may have them.

    form : `StoreSpec.file_form`
    """
    return tuple((form or {}).get("unused", ()))


def recorded_form(data: Any) -> Mapping[str, Any] | None:
    """Return the record by which later files are read: `file_form`, with the names of the arrays.

    data : a `StoreSpec`, a `Like` or a `KernelModel`
    """
    arrays = RecordedArrays.from_form(data.file_form)
    return arrays.with_columns(data.target_columns, data.weight_column).added(data.file_form)
