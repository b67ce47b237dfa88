"""Check the arguments of a `Loader`, and open its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.store.row_block import RowBlock
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import MixUp, Transform
from streamkern.stream.sources.user import is_source


def check_loader(
    source: BaseSource, batch_size: int, n_ranks: int, *, shuffle: Any, drop_last: Any
) -> None:
    """Raise ConfigError if arguments are invalid or exclude each other."""
    for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(value, bool | np.bool_):
            raise ConfigError(
                f"{mention(name, value)} must be True or False",
                "correct it, or leave it out for the default",
            )
    if drop_last and source.n_rows < batch_size:
        raise ConfigError(
            f"{mention('drop_last', True)} would drop all {source.n_rows} rows: a batch has "
            f"{batch_size}",
            f"leave it out, or give a smaller {mention('batch_size')}",
        )
    if n_ranks > 1 and any(isinstance(t, MixUp) for t in _transforms(source)):
        raise ConfigError(
            f"mix-up needs all rows of a batch, but {mention('n_ranks', n_ranks)} divides each "
            "batch",
            f"leave {mention('n_ranks')} out",
        )


def open_source(
    data: Any, transforms: Sequence[Transform], options: Mapping[str, Any] | None
) -> Any:
    """Return `data` if it is a source, else the source of the store that it names.

    transforms, options : transforms and storage options of the store

    Raises ConfigError for other data, and for transforms or options that are given with a source.
    """
    if not is_source(data):
        if isinstance(data, tuple | list) or hasattr(data, "__array__"):
            raise ConfigError(
                f"{mention('data')} is a {type(data).__name__}, not a store or a source",
                "give the URL of a store, or arrays as streamkern.ArraySource(X, y)",
            )
        return ZarrSource(data, transforms, storage_options=options)
    if transforms or options:
        name = "transforms" if transforms else "storage_options"
        raise ConfigError(
            f"{mention(name)} is only for the URL of a store", f"give {mention(name)} to the source"
        )
    return data


def _transforms(source: BaseSource) -> Iterator[Transform]:
    """Yield the transforms of a source and of its parts."""
    yield from (*source.host_transforms, *source.feed_transforms)
    for part in source.parts:
        yield from _transforms(part)


def checked_fields(fields: str | Sequence[str], source: Any) -> str | tuple[str, ...]:
    """Return the fields, one name or a tuple; raise ConfigError if the source lacks one."""
    requested: Any = fields
    is_sequence = np.iterable(requested) and not isinstance(requested, str)
    names = tuple(requested) if is_sequence else (requested,)
    unknown = [name for name in names if name not in RowBlock._fields]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(
            f"{mention('fields', fields)} has entries that are not names of arrays",
            f"give some of {', '.join(RowBlock._fields)}, each once",
        )
    if ("w" in names and not source.weighted) or ("y" in names and not source.n_outputs):
        lacking = "sample weights" if "w" in names and not source.weighted else "targets"
        raise ConfigError(
            f"{mention('fields', fields)} is not possible: the source has no {lacking}",
            f"give {mention('fields', 'X')}, or other arrays that it has",
        )
    return requested if isinstance(requested, str) else names
