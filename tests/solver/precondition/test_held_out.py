"""Check which rows are held out, and the search over powers of ten."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.solver.precondition.held_out import (
    FOLDS,
    HELD_OUT_PARTS,
    MAX_CENTERS_OF_FOLDS,
    geometric_search,
    hash_rows,
    held_out_parts,
    n_parts,
    parabola_minimum,
)


@given(n_stored=st.integers(1, 10**9), copies=st.integers(1, 50), row=st.integers(0, 10**9))
def test_copies_of_a_row_are_in_one_fold(n_stored: int, copies: int, row: int) -> None:
    rows = row % n_stored + n_stored * np.arange(copies)
    for n in (1, FOLDS):
        assert len(set(held_out_parts(rows % n_stored, n).tolist())) == 1


@pytest.mark.parametrize("stride", [1, 2, 10, 1000, 4096])
def test_folds_have_expected_sizes_for_any_stride(stride: int) -> None:
    """Check sizes within five standard deviations."""
    n = 20_000
    rows = stride * np.arange(n)
    for parts, share in ((1, 1 / HELD_OUT_PARTS), (FOLDS, 1 / FOLDS)):
        counts = np.bincount(held_out_parts(rows, parts), minlength=parts + 1)
        room = 5 * math.sqrt(n * share * (1 - share))
        np.testing.assert_allclose(counts[1:], n * share, atol=room)
        assert len(counts) == parts + 1


def test_few_centers_use_several_folds() -> None:
    assert (n_parts(MAX_CENTERS_OF_FOLDS), n_parts(MAX_CENTERS_OF_FOLDS + 1)) == (FOLDS, 1)


@given(at=st.floats(-12.9, 1.9), depth=st.floats(0.05, 3))
def test_minimum_of_unimodal_curve_is_found(at: float, depth: float) -> None:
    """Check within a third of a power of ten; no exponent is tried twice, or beyond the limits."""
    trials = []

    def measure(ridge: float) -> float:
        trials.append(ridge)
        return 1 + depth * (math.log10(ridge) - at) ** 2

    errors = geometric_search(measure, -6, -13, 2)
    assert abs(parabola_minimum(errors) - at) < 0.35
    assert len(set(trials)) == len(trials) == len(errors)
    assert list(errors) == sorted(errors)
    assert min(errors) >= -13
    assert max(errors) <= 2


def test_plateau_needs_few_trials() -> None:
    errors = geometric_search(lambda ridge: 1.0 if ridge < 1e-5 else 2.0, -6, -13, 2)
    assert list(errors) == [-8, -7, -6, -5, -4]


def test_ridges_with_infinite_error_are_skipped() -> None:
    def measure(ridge: float) -> float:
        return math.inf if ridge < 1e-3 else 1 + (math.log10(ridge) + 1) ** 2

    assert parabola_minimum(geometric_search(measure, -6, -13, 2)) == pytest.approx(-1, abs=0.4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_have_equal_bits_only_if_equal(dtype: type) -> None:
    rng = np.random.default_rng(0)
    X = rng.integers(0, 2, (1000, 6)).astype(dtype) * dtype(1.1)
    hashes = hash_rows(X, Backend(threads=1))
    groups, ours = (np.unique(A, axis=0, return_inverse=True)[1] for A in (X, hashes))
    assert len(np.unique(np.stack([groups.ravel(), ours.ravel()]), axis=1).T) == groups.max() + 1
    assert ours.max() == groups.max()
