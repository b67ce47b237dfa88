"""Compare parameter values between calls, and store transforms with a run as JSON.

A run stores its settings, and so most parameters. But the transforms of an estimator are a part of
the data for the run, so the estimator stores them itself.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.basics.message import mention
from streamkern.basics.values import checked_list, to_builtin
from streamkern.kernels.builtin import Kernel
from streamkern.losses.base import Loss
from streamkern.stream.sources.transforms import (
    TRANSFORM_KINDS,
    Scale,
    describe_transform,
    transform_name,
)
from streamkern.train.run_identity import array_identity

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Address of an object in its default `repr`, which differs between processes."""
_LONGEST_LABEL = 80
"""Largest number of characters of a parameter's value in a message."""


@dataclass(frozen=True, eq=False)
class ParameterValue:
    """A parameter's value in a form that can be compared later.

    text : description of the value, equal for equal values, also in another process
    objects : functions and other objects that the text does not identify, in order. They are
        compared by `is` or `==`, so they are pickled and copied with the estimator.
    label : shorter description for messages, perhaps equal for different values
    """

    text: str
    objects: tuple[Any, ...]
    label: str = ""

    @classmethod
    def of(cls, value: Any) -> ParameterValue:
        """Return the comparable form of a value."""
        objects: list[Any] = []
        text = _text(value, objects)
        label = _ADDRESS.sub("", repr(value)) if isinstance(value, Kernel | Loss) else text
        if len(label) > _LONGEST_LABEL:
            label = label[:_LONGEST_LABEL].rstrip() + " ..."
        return cls(text, tuple(objects), label)

    def equals(self, value: ParameterValue) -> bool:
        """Return whether both values produce the same model."""
        if self.text != value.text or len(self.objects) != len(value.objects):
            return False
        return all(a is b or a == b for a, b in zip(self.objects, value.objects, strict=True))


def _text(value: Any, objects: list[Any]) -> str:
    """Return the text of a value, and append objects that it does not identify to `objects`."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        entries = sorted(f"{k!r}: {_text(v, objects)}" for k, v in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, objects) for item in value)}]"
    if isinstance(value, Kernel):
        return f"{value!r} {json.dumps(value.describe(), sort_keys=True, default=repr)}"
    if isinstance(value, Loss):
        return json.dumps({"kind": value.name, **value.parameters()}, default=repr)
    if hasattr(value, "__array__") and hasattr(value, "shape"):
        array = np.asarray(value)
        array = array.astype(np.float64) if array.dtype.kind in "biuf" else array
        return f"array of shape {array.shape}, sha256 {array_identity(array)['sha256']}"
    if callable(value) and hasattr(value, "describe"):
        return json.dumps(describe_transform(value), sort_keys=True, default=repr)
    text = repr(value)
    if _ADDRESS.search(text):
        objects.append(value)
    return _ADDRESS.sub("", text)


@dataclass(frozen=True)
class UnsavedParameter:
    """Placeholder for the value of a parameter that a run does not store.

    kind : description of the value, such as "an array"
    """

    kind: str

    def error_text(self, name: str) -> str:
        """Return the error message for a call that needs the value."""
        return (
            f"{name} was {self.kind}, which is not kept on disk; give it again with "
            f"set_params({mention(f'{name}=')}...)"
        )

    def __repr__(self) -> str:
        return f"<not kept: {self.kind}>"


def transform_tables(transforms: Sequence[Any]) -> tuple[list[dict[str, Any]] | None, str]:
    """Return (tables of a run file, "") for a list of transforms.

    If a transform cannot be written as a table, return (None, description of the list).
    """
    tables = []
    for transform in checked_list("transforms", transforms):
        table = _table(transform)
        if table is None:
            return None, f"a list with {transform_name(transform)!r}"
        tables.append(table)
    return tables, ""


def _table(transform: Any) -> dict[str, Any] | None:
    """Return a transform as a table of a run file; None if it cannot be written as one."""
    if isinstance(transform, Mapping):
        table = dict(to_builtin(transform))
    elif type(transform) not in TRANSFORM_KINDS.values() or (
        isinstance(transform, Scale) and transform.mean is not None
    ):
        return None
    else:
        table = describe_transform(transform)
    try:
        return dict(json.loads(json.dumps(table)))
    except TypeError:  # it holds arrays
        return None


def restored_transforms(facts: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of the parameter `transforms` for the estimator of a loaded run.

    facts : facts that the estimator that trained the run has stored; empty if there was none
    tables : the transforms in the settings of the run
    """
    if "transforms" not in facts:
        return tuple(copy.deepcopy(dict(table)) for table in tables)
    recorded = facts["transforms"]
    return UnsavedParameter(facts["not_kept"]) if recorded is None else tuple(recorded)
