"""Check centers that the user gives, as an array or as a file of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from streamkern.basics.errors import ConfigError, DataError, NonFiniteError
from streamkern.centers.given_centers import given_centers
from streamkern.ingest.ingest import ingest
from streamkern.train.train import train
from tests import runs
from tests.runs import arrays, finished, stream


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.float16, np.float64])
def test_given_centers_accept_any_number_type(dtype: Any) -> None:
    given_rows = np.arange(12).reshape(2, 6).astype(dtype)
    block = given_centers(given_rows, (3, 2, 1), 4)
    assert block.X.shape == (2, 3, 2, 1)
    np.testing.assert_array_equal(block.X.reshape(2, 6), np.arange(12).reshape(2, 6))
    assert block.y.shape == (2, 4)


def test_given_centers_keep_sign_of_integers() -> None:
    block = given_centers(np.array([[-1, 2]]), (2,), 1)
    np.testing.assert_array_equal(block.X, [[-1.0, 2.0]])


NAN_ROW = np.zeros((4, runs.D))
NAN_ROW[2, 1] = np.nan


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (NAN_ROW, NonFiniteError, "row 2; remove"),
        (np.full((3, runs.D), "a"), DataError, "dtype <U1"),
        (np.zeros((3, runs.D), complex), DataError, "dtype complex128"),
        (np.zeros((3, runs.D + 1)), ConfigError, r"shape \(6,\), the data has .*\(5,\)"),
        (np.zeros(runs.D), DataError, r"shape \(5,\); give at least one row"),
        (np.float32(1), DataError, r"shape \(\)"),
        (np.zeros((0, runs.D)), DataError, r"shape \(0, 5\)"),
    ],
)
def test_invalid_centers_are_refused_before_writing(
    array: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        train(
            runs.settings(tmp_path / "run", **{"model.n_centers": "auto"}),
            source=stream(),
            centers=array,
        )
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["npy", "zarr", "store"])
def test_centers_are_read_from_a_file(kind: str, tmp_path: Path) -> None:
    Z = arrays(20, 3)[0]
    if kind == "npy":
        np.save(tmp_path / "Z.npy", Z)
    elif kind == "store":
        ingest(Z, tmp_path / "Z.store", y=np.zeros(20), shuffle=False)
    else:
        zarr.create_array(str(tmp_path / "Z.zarr"), data=Z)
    overrides = {"model.centers": str(tmp_path / f"Z.{kind}"), "model.n_centers": "auto"}
    result = finished(runs.settings(**overrides), source=stream())
    in_memory = finished(runs.settings(**{"model.n_centers": "auto"}), source=stream(), centers=Z)
    np.testing.assert_array_equal(result.Z, Z[result.order])
    np.testing.assert_array_equal(result.model.weights, in_memory.model.weights)
