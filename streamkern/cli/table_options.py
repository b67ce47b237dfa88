"""The options of `ingest` that define the encoding of the columns of a table."""

from __future__ import annotations

from typing import Annotated

import typer

EncodeOption = Annotated[
    str,
    typer.Option(
        help="Encode words, dates and missing values as numbers (auto), or refuse them (none)."
    ),
]
CategoricalOption = Annotated[
    str | None, typer.Option(metavar="COLUMNS", help="Encode these columns as categories (a,b,c).")
]
NumericOption = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMNS", help="Read these columns as numbers; refuse what is not a number."
    ),
]
DropOption = Annotated[
    str | None, typer.Option(metavar="COLUMNS", help="Leave these columns out (a,b,c).")
]
DateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--date",
        metavar="COLUMN",
        help="Read this column as dates; COLUMN=%d/%m/%Y gives their format. Repeatable.",
    ),
]
NaValueOption = Annotated[
    list[str] | None,
    typer.Option(
        "--na-value",
        metavar="TEXT",
        help="Treat cells with this text as missing, in addition to empty cells, NA and similar "
        "markers; repeatable.",
    ),
]
LikeOption = Annotated[
    str | None,
    typer.Option(metavar="STORE", help="Encode columns as they were encoded for this store."),
]
