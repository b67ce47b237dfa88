"""HTML assembled from parts; all text that is not `Html` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_VOID = frozenset({"meta", "link", "br"})


class Html(str):
    """Text that is markup; made only by `tag`, `joined_html` and constants of this package."""

    __slots__ = ()


NO_HTML = Html("")
NO_VALUE = "\N{EN DASH}"


def tag(name: str, /, *children: str, **attributes: object) -> Html:
    """Return an element with attributes and with children, whose plain text is escaped.

    In names of attributes, a final underscore is removed and others become hyphens. An attribute
    that is None is left out.
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{attribute_text}>")
    return Html(f"<{name}{attribute_text}>{joined_html(children)}</{name}>")


def joined_html(children: Iterable[str]) -> Html:
    """Return the children one after the other, with plain text escaped."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children))


Cell = str | None
"""Text or markup of a cell; None for an unknown value, shown as a dash."""


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[Cell]], *, first_row: Html = NO_HTML,
    left: Sequence[int] = (), marked: Iterable[tuple[int, int]] = (),
) -> Html:  # fmt: skip
    """Return a table whose first column names the rows; other columns are aligned to the right.

    head : heads of the columns
    rows : cells of each row
    first_row : a row above the head
    left : columns aligned to the left
    marked : (row, column) of the highlighted cells
    """
    highlighted, left_columns = set(marked), {0, *left}

    def row_html(name: str, cells: Sequence[Cell], i: int) -> Html:
        """Return row i as an element; the head is row -1.

        name : element of the cells, "th" or "td"
        """
        elements = []
        for j, cell in enumerate(cells):
            scope = "col" if name == "th" else "row" if j == 0 else None
            if cell is None:
                text: str = tag("span", NO_VALUE, class_="no")
            else:
                text = tag("mark", cell) if (i, j) in highlighted else cell
            elements.append(
                tag(
                    "th" if scope else "td",
                    text,
                    class_=None if j in left_columns else "n",
                    scope=scope,
                )
            )
        return tag("tr", *elements)

    table_head = tag("thead", first_row, row_html("th", head, -1))
    body = tag("tbody", *(row_html("td", cells, i) for i, cells in enumerate(rows)))
    table = tag("table", table_head, body)
    return tag("div", table, class_="wide")
