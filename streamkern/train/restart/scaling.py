"""Save the fixed transforms of a run, which include the scaling of the features, and load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.basics.errors import ConfigError
from streamkern.stream.sources.patch_features import PatchFeatures, restore_patches
from streamkern.stream.sources.quantile_scores import QuantileScores
from streamkern.stream.sources.transforms import Scale, Transform, transform_name


def save_scaling(
    fixed: tuple[Transform, ...],
) -> tuple[dict[str, npt.NDArray[Any]], list[dict[str, Any]]]:
    """Return the fixed transforms as arrays and JSON values.

    A user-defined function is saved as its name only.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    meta: list[dict[str, Any]] = []
    for i, transform in enumerate(fixed):
        if isinstance(transform, Scale):
            meta.append({"kind": "scale", "mode": transform.mode})
            if transform.mode != "none":
                arrays[f"scaling.{i}.mean"] = np.asarray(transform.mean, np.float64)
                arrays[f"scaling.{i}.scale"] = np.asarray(transform.scale, np.float64)
            if transform.scores is not None:
                for name, array in transform.scores.arrays().items():
                    arrays[f"scaling.{i}.scores.{name}"] = array
        elif isinstance(transform, PatchFeatures):
            meta.append({"kind": "patches", **transform.numbers()})
            for name, array in transform.arrays().items():
                arrays[f"scaling.{i}.{name}"] = array
        else:
            meta.append({"kind": "function", "name": transform_name(transform)})
    return arrays, meta


def load_scaling(
    arrays: dict[str, npt.NDArray[Any]], meta: list[dict[str, Any]]
) -> tuple[Transform, ...]:
    """Return the transforms that `save_scaling` saved.

    Raises ConfigError if one of them is a user-defined function.
    """
    fixed: list[Transform] = []
    for i, entry in enumerate(meta):
        if entry["kind"] == "patches":
            fixed.append(restore_patches(_arrays_with_prefix(arrays, f"scaling.{i}."), entry))
            continue
        if entry["kind"] != "scale":
            raise ConfigError(
                f"the run was trained with the function {entry['name']!r} as a transform, which "
                "is not saved with the model",
                "predict in Python from the fitted estimator",
            )
        if entry["mode"] != "none":
            mean, spread = (arrays[f"scaling.{i}.{name}"] for name in ("mean", "scale"))
            score_arrays = _arrays_with_prefix(arrays, f"scaling.{i}.scores.")
            scores = QuantileScores(**score_arrays) if score_arrays else None
            fixed.append(Scale(entry["mode"], mean, spread, scores))
    return tuple(fixed)


def saved_patches(
    arrays: Mapping[str, npt.NDArray[Any]], meta: Sequence[Mapping[str, Any]]
) -> PatchFeatures | None:
    """Return the patch features among the saved transforms; None if there are none."""
    kinds = [entry["kind"] for entry in meta]
    if "patches" not in kinds:
        return None
    i = kinds.index("patches")
    return restore_patches(_arrays_with_prefix(arrays, f"scaling.{i}."), meta[i])


def _arrays_with_prefix(
    arrays: Mapping[str, npt.NDArray[Any]], prefix: str
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
