"""Check the labels and the column names of prediction files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkern.predict.prediction_table import PredictionTable, output_labels


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("3", "5", "-7"), [3, 5, -7]),
        *((names, [*names]) for names in (("3", "05"), ("3", "x"), ("9" * 30, "1"))),
    ],
)
def test_labels_are_integers_if_all_classes_are(names: Any, labels: list[Any]) -> None:
    assert output_labels(names, None).tolist() == labels


@pytest.mark.parametrize(
    ("width", "classes", "names", "header"),
    [
        (2, np.array(["a", "b"]), ("row",), ["row", "row_", "score_a", "score_b"]),
        (2, None, ("y", "z"), ["row", "y", "z"]),
        (1, None, None, ["row", "value"]),
    ],
)
def test_output_columns_have_unique_names(
    width: int, classes: Any, names: Any, header: Any
) -> None:
    assert PredictionTable(9, np.dtype(np.float32), width, classes, names).header() == header
