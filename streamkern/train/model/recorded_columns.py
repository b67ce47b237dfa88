"""The columns of the training data, as a setup records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def column_names(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the column names recorded in a setup, as arguments of `KernelModel`.

    meta : metadata of the setup, JSON
    """
    facts = meta.get("facts", {})
    arguments = {name: meta.get(name) for name in ("encoder", "file_form")}
    for name in ("columns", "target_columns"):
        arguments[name] = None if meta[name] is None else tuple(meta[name])
    arguments |= {"label_dtype": facts.get("labels"), "weight_column": facts.get("weight_column")}
    return arguments
