"""The number of centers of a run, from its settings and metadata."""

from __future__ import annotations

from streamkern.basics.errors import ConfigError
from streamkern.basics.warning import warn
from streamkern.centers.selectors import SELECTORS
from streamkern.config.run_config import RunConfig
from streamkern.solver.methods import find
from streamkern.stream.sources.row_shapes import check_row_shape
from streamkern.train.given_arrays import open_centers
from streamkern.train.training_data import Data

DEFAULT_CENTERS = 10_000


def count_centers(config: RunConfig, data: Data, *, whole: bool = True) -> int:
    """Return p, from the settings and metadata.

    If model.n_centers is above the number of rows that have a weight, as far as it is known, the
    number of rows is returned, with a warning.

    whole : False if more rows will follow, from which no centers could be drawn any more: then a
        first block with fewer rows than centers is a ConfigError
    """
    model, n = config.model, data.base.n_rows
    if model.features == "fourier":
        return DEFAULT_CENTERS if model.n_features == "auto" else model.n_features
    if model.centers == "all" or find(config.solver.name, model.features).in_place:
        return n
    if model.centers not in SELECTORS:
        array = open_centers(config, data.source.columns, data.source.encoder)
        check_row_shape(
            "model.centers has", array.shape[1:], "the data has rows of shape",
            data.source.row_shape,
        )  # fmt: skip
        check_count(model.n_centers, array.shape[0], "model.centers")
        return int(array.shape[0])
    SELECTORS[model.centers].check(data.base)
    n = data.base.n_counted or n
    if model.n_centers == "auto":
        return min(n, DEFAULT_CENTERS)
    if model.n_centers <= n:
        return model.n_centers
    if not whole:
        raise ConfigError(
            f"model.n_centers={model.n_centers} centers are drawn from the first block, which has "
            f"{n} rows; give a first block of at least so many rows, lower n_centers, or give "
            "centers"
        )
    warn(
        f"model.n_centers={model.n_centers} is more than the {n} training rows"
        + " that have a weight" * (n < data.base.n_rows)
        + ": all of them are taken as centers"
    )
    return n


def check_count(n_centers: int | str, held: int, where: str) -> None:
    """Raise ConfigError unless model.n_centers is the number of rows held, or "auto"."""
    if n_centers not in ("auto", held):
        raise ConfigError(
            f"model.n_centers={n_centers} but {where} holds {held} rows; leave n_centers out"
        )
