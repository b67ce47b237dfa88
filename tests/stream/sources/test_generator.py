"""What a function that makes rows may not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkern
from streamkern import DataError, GeneratorSource

Arrays = tuple[np.ndarray, ...]


def test_a_function_that_draws_anew_in_every_call_is_refused() -> None:
    def impure(seed: int, epoch: int, start: int, stop: int) -> Arrays:
        return np.random.default_rng().random((stop - start, 2)), np.zeros(stop - start)

    source = GeneratorSource(impure, 10, (2,), np.float64, 1, name="impure")
    with pytest.raises(DataError, match=r"impure .* other values in a second .*RowRandom"):
        source.read_unit(0, 0, 0)

    def remedied(seed: int, epoch: int, start: int, stop: int) -> Arrays:
        rng = streamkern.RowRandom(np, seed, epoch, 0, np.arange(start, stop), np.float64)
        return rng.uniform((2,)), np.zeros(stop - start)

    again = GeneratorSource(remedied, 10, (2,), np.float64, 1)
    assert np.array_equal(again.read_unit(0, 0, 0).X, again.read_unit(0, 0, 0).X)


def test_an_error_in_the_function_is_told_with_its_place() -> None:
    def broken(seed: int, epoch: int, start: int, stop: int) -> Arrays:
        return np.zeros((stop - start, 2)), np.zeros(stop - start) / (1 // start)

    source = GeneratorSource(broken, 10, (2,), np.float64, 1, name="broken")
    with pytest.raises(DataError, match=r"rows 0 to 9\).*ZeroDivisionError: .*zero") as caught:
        source.read_unit(0, 0, 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_targets_that_are_text_are_refused_in_a_sentence() -> None:
    def rows(seed: int, epoch: int, start: int, stop: int) -> Any:
        return np.ones((stop - start, 2), np.float32), np.full(stop - start, "a", object)

    source = GeneratorSource(rows, n_rows=10, row_shape=(2,), dtype="float32", n_outputs=1)
    with pytest.raises(DataError):
        source.read_unit(0, 0, 0)
