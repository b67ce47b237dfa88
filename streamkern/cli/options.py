"""Options that several commands share, or that describe a table, and the parsing of values."""

from __future__ import annotations

import csv
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from streamkern.basics.errors import ConfigError
from streamkern.basics.user_class import import_user_module
from streamkern.config.toml import parse_toml
from streamkern.filesystem.urls import local_path

StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Pass this option to the remote storage, such as endpoint_url=http://host:9000; "
        "repeatable. Credentials belong in the environment.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
MissingOption = Annotated[
    str,
    typer.Option(
        help="Refuse chunks of Zarr and HDF5 that were never written (error), or read their fill "
        "value (fill)."
    ),
]
ExternalOption = Annotated[
    bool, typer.Option("--external", help="Follow links from an HDF5 file to other files.")
]
ForeignOption = Annotated[
    bool,
    typer.Option(
        "--foreign", help="Read a Zarr group as plain arrays, even if it looks like a store."
    ),
]
XArrayOption = Annotated[
    str, typer.Option("--x", metavar="NAME", help="Read rows from this array.")
]
YArrayOption = Annotated[
    str, typer.Option("--y", metavar="NAME", help="Read targets from this array.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="Compute on this device; auto takes a GPU if there is one.")
]
ImportancesOption = Annotated[
    str | None,
    typer.Option(
        "--importances",
        metavar="DATA",
        help="Show permutation importances: how much worse the model gets on this store or file, "
        "which it was not trained on, when a column is shuffled.",
    ),
]
ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module first, for example the module that defines your kernel; "
        "repeatable.",
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")]
DropMissingTargetsOption = Annotated[
    bool, typer.Option("--drop-missing-targets", help="Leave out rows whose target is missing.")
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="Read files in this format, such as csv, and ignore the endings of their names.",
    ),
]
NamesOption = Annotated[
    str | None,
    typer.Option(
        "--names", metavar="COLUMNS", help="Name the columns of a CSV without a header (a,b,c)."
    ),
]
HeaderOption = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Read the first line of a CSV as names of columns, or as a row.",
    ),
]
DelimiterOption = Annotated[
    str | None,
    typer.Option(
        "--delimiter",
        metavar="CHARACTER",
        help='Split the lines of a CSV at this character; " " means any blanks.',
    ),
]
DecimalOption = Annotated[
    str | None,
    typer.Option(
        "--decimal", metavar=".|,", help="Read numbers of a CSV with this decimal separator."
    ),
]
EncodingOption = Annotated[
    str | None,
    typer.Option(
        "--encoding", metavar="NAME", help="Read a CSV in this encoding, such as latin-1."
    ),
]
SkipLinesOption = Annotated[
    int | None,
    typer.Option("--skip-lines", metavar="N", help="Skip this many lines at the top of a CSV."),
]
ThousandsOption = Annotated[
    str | None,
    typer.Option(
        "--thousands",
        metavar="CHARACTER",
        help="Ignore this character between groups of three digits in a CSV.",
    ),
]
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


def add_options(
    convert: Callable[..., Any], name: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command the options of `convert`, in place of one parameter.

    convert : function whose parameters are options that several commands share
    name : name of the parameter, which receives the value that `convert` returns for the options.
        With None the options are added, and `convert` is called before the command.
    """
    options = inspect.signature(convert, eval_str=True).parameters

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options.values() if parameter.name == name else [parameter]
        parameters += options.values() if name is None else ()

        def run(**arguments: Any) -> Any:
            value = convert(**{option: arguments.pop(option) for option in options})
            return command(**arguments if name is None else arguments | {name: value})

        # typer reads the options from the signature. Parameters without a default come first.
        parameters = sorted(
            (parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters),
            key=lambda parameter: parameter.default is not parameter.empty,
        )
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def file_form_options(
    format: FormatOption = None,
    names: NamesOption = None,
    header: HeaderOption = None,
    delimiter: DelimiterOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    skip_lines: SkipLinesOption = None,
    thousands: ThousandsOption = None,
) -> dict[str, Any]:
    """Return the options on the format of files, by the parameters of `ingest`."""
    return {
        "format": format, "names": name_list(names, "--names"), "header": header,
        "delimiter": delimiter, "decimal": decimal, "encoding": encoding,
        "skip_lines": skip_lines, "thousands": thousands,
    }  # fmt: skip


def import_modules(modules: ImportOption = None) -> None:
    """Import modules of the user, which define classes that a model uses."""
    for module in modules or ():
        import_user_module(module, f"--import {module}")


_TEXT_OPTIONS = ("key", "secret", "token", "password", "username")
"""Storage options whose values are text, even if they look like numbers."""


def parse_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return {"anon": True} from ["anon=true"].

    Raises ConfigError for other text, without showing it in the message, as it may be secret.
    """
    options = {}
    for number, text in enumerate(texts or (), start=1):
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(
                f"--storage-option number {number} must be KEY=VALUE; write for example anon=true"
            )
        options[key] = value if key in _TEXT_OPTIONS else _option_value(number, value)
    return options


def _option_value(number: int, text: str) -> Any:
    """Return the value of a storage option; a table as JSON or as in a run file."""
    value = toml_or_text(text)
    if not isinstance(value, str) or text.strip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(
            f"--storage-option number {number} has a table or a list that is neither JSON nor TOML",
            'write it in single quotes, such as \'client_kwargs={"region_name": "eu-west-1"}\'',
        ) from None


def options_for(
    options: Mapping[str, Any], *locations: str | os.PathLike[str]
) -> Mapping[str, Any] | None:
    """Return the storage options, if one of `locations` is remote; a local path takes none."""
    return options if any(local_path(location) is None for location in locations) else None


def parse_transform(text: str) -> dict[str, Any]:
    """Return {"kind": "noise", "sigma": 0.5} from '{kind = "noise", sigma = 0.5}'.

    Raises ConfigError for text that is no table.
    """
    table = toml_or_text(text)
    if not isinstance(table, dict):
        raise ConfigError(
            f"--transform {text!r} must be a table as in a run file; write it in single quotes, "
            "such as '{kind = \"noise\", sigma = 0.5}'"
        )
    return table


def parse_numbers(text: str, option: str) -> list[float]:
    """Return [3.0, 1.0] from "3,1"; raise ConfigError for other text. option : for the message"""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} must be numbers with commas between them; write for example 3,1"
        ) from None


def name_list(text: str | None, option: str) -> list[str] | None:
    """Return names as in the first line of a CSV; None without a text.

    Raises ConfigError if the text is empty, or has several lines. option : for the message
    """
    if text is None:
        return None
    try:
        names = next(csv.reader([text]), [])
    except csv.Error:  # a line break
        raise ConfigError(
            f"{option} {text!r} must be the names of columns in one line; write for example a,b,c"
        ) from None
    if not names:
        raise ConfigError(f"{option} is empty", "name columns, such as a,b,c, or leave it out")
    return names


def column_list(text: str) -> str | list[int | str]:
    """Return the column names or positions of a comma-separated text; a single name as text."""
    columns = [number_or_text(name) for name in name_list(text, "--x") or ()]
    return columns if len(columns) > 1 or not isinstance(columns[0], str) else columns[0]


def target_columns(names: Sequence[str] | None) -> int | str | list[int | str] | None:
    """Return the target columns: one name or index, a list of several, or None without names."""
    columns = [number_or_text(name) for name in names or ()]
    if len(columns) == 1:
        return columns[0]
    return columns or None


def number_or_text(text: str) -> int | str:
    """Return the position of a column if the text is a whole number, else its name."""
    try:
        return int(text)
    except ValueError:
        return text


def toml_or_text(value: str) -> Any:
    """Return the value of the text if it is TOML, else the text."""
    try:
        return parse_toml(f"value = {value}")["value"]
    except (ValueError, KeyError):
        return value.strip()
