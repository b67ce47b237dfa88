"""Compare compiled random draws with NumPy and with float64."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.backend.numba_random import DRAWN_CHUNK, _make_box_muller, fills
from streamkern.basics.philox import philox_key, round_keys
from streamkern.basics.randomness import Fillers, RowRandom, words

ROWS = st.lists(st.integers(0, 2**40), min_size=1, max_size=40)


def as_python(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def compilers() -> list[Any]:
    """Yield Numba's compiler, or one that leaves the loops to Python, to check the arithmetic."""
    if importlib.util.find_spec("numba") is None:
        return [as_python]
    from streamkern.backend.numba_backend import jit

    return [as_python, jit]


@pytest.fixture(scope="module", params=compilers(), ids=lambda f: f.__name__)
def compile_with(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def drawn(compile_with: Any) -> Fillers:
    return fills(compile_with)


def exact_normals(pairs: np.ndarray) -> np.ndarray:
    """Return the Box-Muller transform in float64 of the top 24 bits of words (..., 2)."""
    u = (np.floor(pairs[..., 0] / 256.0) + 1) / 2**24
    v = np.floor(pairs[..., 1] / 256.0) / 2**24
    radius = np.sqrt(-2 * np.log(u))
    # An eighth of a turn at a time: cos of a rounded 2πv is far off near its zeros.
    quarter = np.round(4 * v)
    angle = (4 * v - quarter) * (np.pi / 2)
    cosine, sine = np.cos(angle), np.sin(angle)
    turn = quarter.astype(int) % 4
    a = np.choose(turn, [cosine, -sine, -cosine, sine])
    b = np.choose(turn, [sine, cosine, -sine, -cosine])
    return radius[..., None] * np.stack([a, b], axis=-1)


@settings(max_examples=25, deadline=None)
@given(ROWS, st.integers(1, 9), st.integers(0, 2**31))
def test_compiled_words_equal_numpy(
    drawn: Fillers, rows: list[int], n_blocks: int, first_block: int
) -> None:
    ids = np.array(rows, np.int64)
    got = np.empty((len(ids), 4 * n_blocks), np.uint32)
    drawn.words(ids, round_keys(philox_key(3, 1)), first_block, got)
    np.testing.assert_array_equal(got, words((3, 1), ids, 4 * n_blocks, first_block=first_block))


def test_compiled_normals_are_within_4_ulp(drawn: Fillers) -> None:
    rows = np.arange(60, dtype=np.int64) << 28
    z = RowRandom(np, 5, 0, 1, rows, fills=drawn).normal((40,))
    exact = exact_normals(words((5, 0, 1), rows, 40).reshape(60, 20, 2)).reshape(60, 40)
    assert (np.abs(z - exact) <= 4 * np.spacing(np.abs(exact).astype(np.float32))).all()
    plain = RowRandom(np, 5, 0, 1, rows).normal((40,))
    np.testing.assert_allclose(z, plain, rtol=0, atol=4e-6)


def test_extreme_words_give_accurate_normals(compile_with: Any) -> None:
    extremes = np.array([0, 0xFF, 0x100, 0x1FFFFFFF, 0x20000000, 0x40000000, 0x5FFFFFFF,
                         0x80000000, 0xA0000000, 0xC0000000, 0xE0000000, 0xFFFFFFFF],
                        np.uint32)  # fmt: skip
    pairs = np.stack(np.meshgrid(extremes, extremes), axis=-1).reshape(-1, 2)
    state = np.zeros((2, DRAWN_CHUNK), np.uint32)
    state[:, : len(pairs)] = pairs.T
    z = np.empty((2, DRAWN_CHUNK), np.float32)
    _make_box_muller(compile_with)(state[0], state[1], z[0], z[1])
    got, exact = z[:, : len(pairs)].T, exact_normals(pairs)
    assert (np.abs(got - exact) <= 4 * np.spacing(np.abs(exact).astype(np.float32))).all()
    assert np.abs(got).max() <= 5.8


@pytest.mark.parametrize("part", [slice(0, 1), slice(3, 70), slice(69, 70), slice(None, None, -1)])
@pytest.mark.parametrize("n", [1, 3, 4, 66])
def test_row_has_same_bits_at_any_position(part: Any, drawn: Fillers, n: int) -> None:
    rows = np.random.default_rng(0).permutation(70).astype(np.int64)
    full = RowRandom(np, 1, 0, 2, rows, fills=drawn).normal((n,))
    assert full.shape == (70, n)
    part_normals = RowRandom(np, 1, 0, 2, rows[part], fills=drawn).normal((n,))
    np.testing.assert_array_equal(part_normals, full[part])


def test_threads_do_not_change_random_draws(drawn: Fillers) -> None:
    rows = np.arange(9)
    single_thread = RowRandom(np, 1, 2, 3, rows, fills=drawn)
    with Backend(threads=2) as backend:
        shared = RowRandom(np, 1, 2, 3, rows, fills=drawn, run=backend.run)
        for draw in ("normal", "uniform"):
            expected = getattr(single_thread, draw)((7,))
            np.testing.assert_array_equal(expected, getattr(shared, draw)((7,)))
    np.testing.assert_array_equal(single_thread.integers(0, 9), shared.integers(0, 9))


def test_float64_draws_use_numpy(drawn: Fillers) -> None:
    rows = np.arange(4)
    z = RowRandom(np, 1, 2, 3, rows, np.float64, fills=drawn).normal((5,))
    np.testing.assert_array_equal(z, RowRandom(np, 1, 2, 3, rows, np.float64).normal((5,)))


def test_empty_draws_have_empty_shapes(drawn: Fillers) -> None:
    assert RowRandom(np, 0, 0, 0, np.arange(0), fills=drawn).normal((4,)).shape == (0, 4)
    assert RowRandom(np, 0, 0, 0, np.arange(3), fills=drawn).normal((0,)).shape == (3, 0)
