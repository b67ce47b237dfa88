"""Ingest inputs to a store in memory, and read stores in the order of their inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamkern.ingest.ingest import ingest
from streamkern.store.layout import StoreSpec
from streamkern.store.store import open_store
from tests.raw_files import memory_url


class Ingested(NamedTuple):
    """A store: its spec, and X and y of all rows in the order of the inputs."""

    spec: StoreSpec
    X: Any
    y: Any


def ingest_and_read(inputs: Any, **options: Any) -> Ingested:
    """Return the store that `ingest` makes of the inputs with these options, unshuffled."""
    url = memory_url()
    spec = ingest(inputs, url, shuffle=False, **options)
    return Ingested(spec, *read_in_order(url))


def read_in_order(location: Path | str) -> tuple[Any, Any]:
    """Return X and y of all rows of a store, in the order of its inputs."""
    store = open_store(location)
    numbers = np.concatenate([store.source_rows(i) for i in range(store.n_chunks)])
    return store.read_rows(np.argsort(numbers))
