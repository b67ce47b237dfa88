"""The export of models whose kernel compares leaves of trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from benchmarks.exports import CompiledModel
from tests.export_models import compiled, rows_of, run_exported
from tests.trees import fitted_trees, step_table

X, Y = step_table(300)
NEW = step_table(40, 1)[0]


def tree_model(precision: str, categorical: list[tuple[int, float]]) -> sk.KernelRegressor:
    """Return a model of 300 centers whose 19 trees have 2 to 8 leaves."""
    kernel = sk.Laplace(1.0, metric=np.eye(8)[:, :5]).with_trees(fitted_trees(19)[0])
    kernel = kernel.with_categorical(categorical)
    model = sk.KernelRegressor(kernel, ridge=1e-4, solver="direct", precision=precision)
    return model.fit(np.where(np.arange(8) == 7, np.rint(X), X), Y)


@pytest.mark.parametrize("categorical", [[], [(7, 0.5)]], ids=str)
def test_onnx_values_equal_model(categorical: Any, tmp_path: Path) -> None:
    for precision, tolerance in (("float64", 1e-10), ("exact", 1e-4)):
        model = tree_model(precision, categorical)
        new = np.where(np.arange(8) == 7, np.rint(NEW), NEW)
        actual = run_exported(model, tmp_path / f"{precision}.onnx", new)["predictions"]
        np.testing.assert_allclose(actual.ravel(), model.predict(new), atol=tolerance)


@compiled
def test_c_values_equal_model(tmp_path: Path) -> None:
    model = tree_model("float64", [])
    model.to_c(tmp_path / "m.c")
    actual = rows_of(CompiledModel(tmp_path / "m.c", "-O1"), "predictions", NEW)
    np.testing.assert_allclose(actual.ravel(), model.predict(NEW), atol=1e-10)
