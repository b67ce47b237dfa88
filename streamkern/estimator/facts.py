"""Facts that an estimator stores beside its run, as JSON, so that loading restores the same one.

A run stores its rows, classes as names, and settings. Only the estimator knows that y was flat, the
dtype of the labels, and the transforms, which the run takes for a part of its data.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamkern.basics.values import to_builtin
from streamkern.stream.sources.transforms import (
    TRANSFORM_KINDS,
    Scale,
    describe_transform,
    transform_name,
)


@dataclass(frozen=True)
class UnsavedParameter:
    """Placeholder of a parameter whose value a run does not keep. what : the value, in words"""

    what: str

    def refusal(self, name: str) -> str:
        """Return the error message for a call that needs the value."""
        return (
            f"{name} was {self.what}, which is not kept on disk; give it again with "
            f"set_params({name}=...)"
        )

    def __repr__(self) -> str:
        return f"<not kept: {self.what}>"


def transform_tables(transforms: Sequence[Any]) -> tuple[list[dict[str, Any]] | None, str]:
    """Return the transforms as in a run file, and "".

    If a table cannot hold one of them: None, and a description of the list.
    """
    tables = []
    for transform in transforms:
        table = _table(transform)
        if table is None:
            return None, f"a list with {transform_name(transform)!r}"
        tables.append(table)
    return tables, ""


def _table(transform: Any) -> dict[str, Any] | None:
    if isinstance(transform, Mapping):
        held = dict(to_builtin(transform))
    elif isinstance(transform, Scale) and transform.mean is not None:
        return None
    elif type(transform) in TRANSFORM_KINDS.values():
        held = describe_transform(transform)
    else:
        return None
    try:
        kept = json.loads(json.dumps(held))
    except TypeError:  # numbers in arrays
        return None
    return dict(kept)


def restored_transforms(facts: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of the parameter `transforms`.

    facts : of the estimator, if one has trained the run
    tables : of the run file
    """
    if "transforms" not in facts:
        return tuple(copy.deepcopy(dict(table)) for table in tables)
    kept = facts["transforms"]
    return UnsavedParameter(facts["not_kept"]) if kept is None else tuple(kept)
