"""Check the detection of functions that do not return their rows again, or overwrite them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import DataError
from streamkern.stream.sources.repeatable import check_repeatable
from streamkern.stream.sources.user import GeneratorSource

ROWS = np.random.default_rng(0).normal(size=(20, 3))


@pytest.mark.parametrize(("start", "n_rows"), [(0, 4), (0, 5), (0, 20), (12, 16), (12, 20)])
def test_views_and_constants_are_accepted(start: int, n_rows: int) -> None:
    zeros = np.zeros((20, 1))  # the same memory in each call, but it never changes

    def make_rows(first: int, last: int) -> tuple[Any, Any]:
        assert 0 <= first < last <= n_rows
        return ROWS[first:last], zeros[: last - first]

    check_repeatable(make_rows, start, start + 4, n_rows, "unit 0")


def test_one_buffer_for_all_calls_is_refused() -> None:
    buffer = np.empty((20, 3))

    def make_rows(first: int, last: int) -> tuple[Any, Any]:
        buffer[: last - first] = ROWS[first:last]
        return buffer[: last - first], ROWS[first:last, :1]

    with pytest.raises(DataError, match=r"overwrote .* unit 0; return new arrays in each call"):
        check_repeatable(make_rows, 0, 10, 20, "unit 0")


@pytest.mark.parametrize("n_rows", [6, 12, 18])
def test_every_call_begins_at_a_unit(n_rows: int) -> None:
    """Check a function that can only make rows of one unit of 6 rows."""

    def make_rows(first: int, last: int) -> tuple[Any, Any]:
        assert first % 6 == 0
        assert first < last <= min(first + 6, n_rows)
        return ROWS[first:last], ROWS[first:last, :1]

    check_repeatable(make_rows, 0, 6, n_rows, "unit 0")


def test_rows_that_change_in_place_are_refused() -> None:
    changing = ROWS.copy()

    def make_rows(first: int, last: int) -> tuple[Any, Any]:
        changing[first:last] += 1.0
        return changing[first:last], ROWS[first:last, :1]

    with pytest.raises(DataError, match="other values in a second call"):
        check_repeatable(make_rows, 0, 10, 20, "unit 0")


@pytest.mark.parametrize("reuses", [True, False])
def test_buffer_reused_in_the_next_epoch_is_refused_and_new_arrays_are_not(*, reuses: bool) -> None:
    buffer = np.empty((20, 3))

    def make_rows(seed: int, epoch: int, start: int, stop: int) -> tuple[Any, Any]:
        X = buffer if reuses else np.empty((20, 3))
        X[start:stop] = ROWS[start:stop] + epoch
        return X[start:stop], ROWS[start:stop, 0]

    source = GeneratorSource(make_rows, 20, (3,), np.float64, 1)
    assert source.n_units == 1
    source.read_unit(0, 0, 0)
    if reuses:
        with pytest.raises(DataError, match=r"overwrote .* unit 0 .*; return new arrays"):
            source.read_unit(0, 0, 1)
    else:
        np.testing.assert_array_equal(source.read_unit(0, 0, 1).X, ROWS + 1)
