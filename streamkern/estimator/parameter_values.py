"""Values of parameters in a form that can be compared with those of an earlier call."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamkern.kernels.builtin import Kernel
from streamkern.stream.sources.transforms import describe_transform
from streamkern.train.run_identity import array_identity

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, eq=False)
class ParameterValue:
    """The value of a parameter.

    text : the same for equal values, also in another process
    objects : functions and other objects that the text does not identify, in their order. They are
        compared directly, and stay the estimator's objects when it is pickled or copied.
    """

    text: str
    objects: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> ParameterValue:
        objects: list[Any] = []
        return cls(_text(value, objects), tuple(objects))

    def same(self, other: ParameterValue) -> bool:
        """Return whether both values produce the same model."""
        if self.text != other.text or len(self.objects) != len(other.objects):
            return False
        return all(a is b or a == b for a, b in zip(self.objects, other.objects, strict=True))


def _text(value: Any, objects: list[Any]) -> str:
    """Return the text of a value, and add to `objects` those that the text does not identify."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{k!r}: {_text(v, objects)}' for k, v in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, objects) for item in value)}]"
    if isinstance(value, Kernel):
        return f"{value!r} {json.dumps(value.describe(), sort_keys=True, default=repr)}"
    if hasattr(value, "__array__") and hasattr(value, "shape"):
        array = np.asarray(value)
        array = array.astype(np.float64) if array.dtype.kind in "biuf" else array
        return f"array of shape {array.shape}, sha256 {array_identity(array)['sha256']}"
    if callable(value) and hasattr(value, "describe"):
        return json.dumps(describe_transform(value), sort_keys=True, default=repr)
    found = repr(value)
    if _ADDRESS.search(found):
        objects.append(value)
    return _ADDRESS.sub("", found)
