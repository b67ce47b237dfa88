"""Provenance of predictions, as recorded in a file of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamkern.predict.input_rows import FileRows
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.stores import stores_of


def provenance(
    model: Mapping[str, Any], source: BaseSource | FileRows, classes: Sequence[str] | None
) -> dict[str, Any]:
    """Return JSON values that describe a model, the rows that it predicts, and its classes."""
    files = (
        source.files
        if isinstance(source, FileRows)
        else [file for store in stores_of(source) for file in store.spec.files]
    )
    return {
        "model": dict(model),
        "data": {
            "fingerprint": source.fingerprint,
            "files": [list(file) for file in files],
        },
        "classes": None if classes is None else list(classes),
    }
