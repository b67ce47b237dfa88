"""Assign the columns of a table to features, targets and sample weights, as a user requests."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamkern.basics.errors import DataError
from streamkern.basics.message import mention
from streamkern.basics.text import some
from streamkern.basics.values import to_builtin
from streamkern.ingest.columns import ReadRequest, as_list


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
        If two columns have the same name, if y or w holds values in place of columns, if a column
        does not exist or has two roles, if no column is left as a feature, or if the features have
        other names than `request.columns`. Without `request.columns`, also if a column to drop does
        not exist or is a target or weight.
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
            _name_of(names, column, location, has_names)
            for column in as_list(role)
            if request.targets or str(column) in names or column in positions
        ]

    targets, weights = requested(request.y_name), requested(request.w)
    target_names = [*targets, *weights]
    if request.x is None:
        features = [name for name in names if name not in set(target_names)]
    else:
        features = [_name_of(names, column, location, has_names) for column in as_list(request.x)]
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
            f"{_suggestion(names, unknown[0])}name columns of the table with {mention('drop=')}: "
            f"{some(names)}",
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
    if len(values) > n_columns or not all(isinstance(value, str | int) for value in values):
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
            f"{_suggestion(names, column)}name columns of the file with {mention('x=')} and "
            f"{mention('y=')}: {some(names)}",
        )
    return names[position]


def _suggestion(names: Sequence[str], column: Any) -> str:
    """Return a question that suggests the name most similar to a wrong one; "" without any."""
    similar = difflib.get_close_matches(str(column), names, n=1)
    return f"did you mean {similar[0]!r}? Otherwise " if similar else ""


def _first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once; None if there is none."""
    return next((name for name, n in Counter(names).items() if n > 1), None)
