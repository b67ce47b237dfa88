"""pyarrow, imported at its first use, and the types and cells of its columns.

pyarrow is an optional package: without it, the first use of a module here raises
MissingDependencyError, with the command that installs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkern.basics.optional import import_optional


class _ModuleOnUse:
    """A module that is imported when one of its attributes is used."""

    def __init__(self, import_module: Callable[[], Any]) -> None:
        self._import_module = import_module

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._import_module(), attribute)


arrow: Any = _ModuleOnUse(lambda: import_optional("pyarrow"))
"""The module pyarrow."""
compute: Any = _ModuleOnUse(lambda: import_optional("pyarrow.compute"))
"""The module pyarrow.compute."""
arrow_ipc: Any = _ModuleOnUse(lambda: import_optional("pyarrow.ipc"))
"""The module pyarrow.ipc."""


def is_of_kind(arrow_type: Any, *kinds: str) -> bool:
    """Return whether a type is of one of these kinds. kinds : "integer" for `types.is_integer`."""
    return any(getattr(arrow.types, f"is_{kind}")(arrow_type) for kind in kinds)


def is_text_type(arrow_type: Any) -> bool:
    """Return whether cells of this type are text."""
    return is_of_kind(arrow_type, "string", "large_string", "string_view")


def is_list_type(arrow_type: Any) -> bool:
    """Return whether cells of this type are lists."""
    return is_of_kind(arrow_type, "list", "large_list", "fixed_size_list")


def column_kind(arrow_type: Any) -> str | None:
    """Return the kind of column that a type represents.

    "number", "category" or "date"; "text" if the cells decide; "empty" for a type without values;
    None for types that no cell of a table has, such as lists.
    """
    if is_of_kind(arrow_type, "dictionary"):
        return "category" if column_kind(arrow_type.value_type) is not None else None
    if is_text_type(arrow_type):
        return "text"
    if is_of_kind(arrow_type, "null"):
        return "empty"
    if is_of_kind(arrow_type, "date", "timestamp"):
        return "date"
    is_number = is_of_kind(arrow_type, "boolean", "integer", "floating", "decimal", "duration")
    return "number" if is_number else None


def unwrap_column(column: Any) -> Any:
    """Return an Arrow array without chunks, dictionary, extension type or string views."""
    if isinstance(column, arrow.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, arrow.ChunkedArray):  # of no chunks
        column = arrow.array([], column.type)
    if isinstance(column, arrow.ExtensionArray):
        column = column.storage
    if is_of_kind(column.type, "dictionary"):
        column = unwrap_column(column.dictionary).take(column.indices)
    if is_of_kind(column.type, "string_view"):  # few Arrow functions support string views
        column = column.cast(arrow.string())
    return column


def plain_cells(column: Any) -> Any:
    """Return a column as `unwrap_column` does, with text stripped; empty text becomes null.

    Line breaks in text become line feeds, as in the cells of a CSV, so that a word has the same
    code in a data frame and in a CSV.
    """
    column = unwrap_column(column)
    if not is_text_type(column.type):
        return column
    text = compute.utf8_trim_whitespace(column)
    if compute.any(compute.match_substring(text, "\r")).as_py():
        for line_break in ("\r\n", "\r"):
            text = compute.replace_substring(text, line_break, "\n")
    return with_null(text, compute.equal(text, arrow.scalar("", text.type)))


def with_null(column: Any, mask: Any) -> Any:
    """Return an Arrow array with null in the cells of an Arrow mask (k,)."""
    return compute.if_else(mask, arrow.scalar(None, column.type), column)


def as_mask(booleans: Any) -> NDArray[np.bool_]:
    """Return Arrow booleans (k,) as a NumPy mask; False for null."""
    return np.asarray(booleans.fill_null(False).to_numpy(zero_copy_only=False), bool)


def as_array(column: Any) -> NDArray[Any]:
    """Return an Arrow array (k,) as a NumPy array."""
    return np.asarray(column.to_numpy(zero_copy_only=False))


def match_mask(column: Any, pattern: str) -> NDArray[np.bool_]:
    """Return a mask (k,) of the cells of a text column that match; False for missing cells."""
    return as_mask(compute.match_substring_regex(column, pattern))


def value_mask(column: Any) -> NDArray[np.bool_]:
    """Return a mask (k,) of the cells with a value: not null and, for floats, not NaN."""
    valid = as_mask(column.is_valid())
    if is_of_kind(column.type, "floating"):
        valid &= ~np.isnan(as_array(column).astype(np.float64))
    return valid
