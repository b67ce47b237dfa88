"""The command `info`: what is at a place, a store or a run."""

from __future__ import annotations

from typing import Annotated

import typer

from streamkern.basics.errors import DataError
from streamkern.cli.console import as_text
from streamkern.cli.described import is_run_directory, run_overview, run_text, store_text
from streamkern.cli.options import (
    AsJson,
    Foreign,
    StorageOption,
    XName,
    YName,
    options_for,
    parse_options,
)
from streamkern.store.describe import describe_store, describe_unfinished
from streamkern.store.store import open_store


def info(
    place: Annotated[str, typer.Argument(metavar="STORE_OR_RUN_DIR")],
    x: XName = "X",
    y: YName = "y",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every chunk and compare it with its digest.")
    ] = False,
    foreign: Foreign = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Describe a store, finished or not, or the state of a run."""
    options = options_for(parse_options(storage_option), place)
    if is_run_directory(place, options):
        run = run_overview(place, options)
        typer.echo(as_text(run) if as_json else run_text(run))
        return
    try:
        store = open_store(place, x=x, y=y, storage_options=options, foreign=foreign)
    except DataError:
        found = describe_unfinished(place, storage_options=options)
        if found is None:
            raise
    else:
        found = describe_store(store, exact=verify)
        if verify:
            store.verify()
            found["verified"] = True
    typer.echo(as_text(found) if as_json else store_text(found))
