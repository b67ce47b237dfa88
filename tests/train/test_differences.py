"""Test the sentences about the differences of two runs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.transforms import GaussianNoise, Scale
from streamkern.train.differences import record_differences
from streamkern.train.run_identity import run_record
from tests.runs import array_source, arrays, opened


def identity(source: Any = None, **changes: Any) -> dict[str, Any]:
    """Return the identity of a run of a source, with given centers or other settings."""
    centers = {} if "centers" not in changes else {"centers": changes.pop("centers")}
    run = opened(array_source() if source is None else source, **centers, **changes)
    actual: dict[str, Any] = run_record(run)["identity"]
    return actual


X = arrays()[0]
NOISE = AugmentedSource(array_source(), 1, [GaussianNoise(0.1)])
CHANGES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other targets": (array_source(seed=3), {}, "data: other rows or targets"),
    "fewer rows": (array_source(130), {}, "data.n_rows: was 135, now 130"),
    "noise": (NOISE, {}, "data.transforms: was .*now .*noise"),
    "copies": (AugmentedSource(array_source(), 2), {}, "data.n_rows: was 135, now 270"),
    "no scaling": (None, {"data.scale": "feature"}, "data.scale: was 'none', now 'feat"),
    "a scaling": (
        array_source(transforms=[Scale("feature", mean=np.ones(5), scale=np.ones(5))]),
        {"data.scale": "auto"},
        "data.scale: was 'none'",
    ),
    "a mixture": (MixtureSource([array_source(), array_source(seed=3)]), {}, "data: other rows"),
    "centers": (None, {"centers": X[:7]}, "model.centers: was 'random', now an array of shape"),
    "kernel": (
        None,
        {"model.kernel": {"kind": "sum", "parts": [{"kind": "laplace"}, {"kind": "gaussian"}]}},
        r"model.kernel: was 'laplace', now laplace \+ gaussian",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_differences_show_no_tables_digests_or_equal_settings(case: str) -> None:
    source, changes, pattern = CHANGES[case]
    plain, other = identity(), identity(source, **changes)
    assert record_differences(plain, plain) == record_differences(other, other) == []
    for differences in (record_differences(plain, other), record_differences(other, plain)):
        assert differences, case
        assert not re.search(r"[{}]|[0-9a-f]{16}|base", "; ".join(differences)), differences
    differences = record_differences(plain, other)
    assert re.search(pattern, "; ".join(differences)), differences


def test_changed_transforms_are_not_reported_as_other_rows() -> None:
    assert not any("other rows" in text for text in record_differences(identity(), identity(NOISE)))


def test_many_classes_are_abbreviated() -> None:
    old: dict[str, Any] = {
        "data": {"kind": "array", "n_rows": 3, "classes": [f"class {k}" for k in range(1000)]}
    }
    new: dict[str, Any] = {"data": {"kind": "array", "n_rows": 3, "classes": ["a", "b"]}}
    (text,) = record_differences(old, new)
    assert text.startswith("data.classes: was ['class 0', 'class 1'")
    assert len(text) < 150


def test_added_or_removed_setting_is_a_difference() -> None:
    old, new = {"solver": {"a": 1, "b": None}}, {"solver": {"b": None, "c": 2}}
    assert record_differences(old, new) == [
        "solver.a: was 1, now not set",
        "solver.c: was not set, now 2",
    ]
