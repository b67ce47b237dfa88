"""Check that declared total weights are compared with the rows of the first complete pass."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from streamkern import GeneratorSource, KernelClassifier
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.base import read_units
from streamkern.stream.sources.total_weights import TotalWeights
from streamkern.stream.sources.user import as_source
from tests.streams import Plain

N = 400
rng = np.random.default_rng(0)
IDS, X = rng.integers(0, 3, N), rng.normal(size=(N, 2))
W = rng.uniform(0.5, 1.5, N).astype(np.float32)
TOTALS = np.bincount(IDS, W.astype(np.float64), minlength=3)


def generator(totals: Any, block_rows: int = 60) -> GeneratorSource:
    """Return the weighted rows of three classes, with these declared totals."""

    def make_rows(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
        return X[start:stop], IDS[start:stop], W[start:stop]

    return GeneratorSource(
        make_rows, N, (2,), X.dtype, 3, ("a", "b", "c"), block_rows=block_rows,
        weight_totals=totals,
    )  # fmt: skip


def read_pass(source: Any, epoch: int = 0) -> None:
    """Read all units of an epoch, last unit first."""
    for u in reversed(range(source.n_units)):
        source.read_unit(u, 0, epoch)


@pytest.mark.parametrize("block_rows", [N, 60])
@pytest.mark.parametrize("totals", [[1, 0, 1], 3 * TOTALS, TOTALS[::-1] * [0.1, 1, 10]])
def test_wrong_totals_of_a_generator_give_warning(totals: Any, block_rows: int) -> None:
    with pytest.warns(UserWarning, match=r"weight_totals .* for class .* sum to .*: give \["):
        read_pass(generator(totals, block_rows))


@pytest.mark.parametrize("totals", [TOTALS, np.round(1.05 * TOTALS), [N / 3] * 3])
def test_right_and_rough_totals_are_accepted(totals: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        source = generator(totals)
        for epoch in range(3):
            read_pass(source, epoch)
        list(read_units(generator(totals), range(7), 0, 0))  # by several threads
    assert caught == []


def test_a_fit_warns() -> None:
    with pytest.warns(UserWarning, match=r"weight_totals of generator .* is 4000 for class 'a'"):
        KernelClassifier(n_centers=20).fit(generator([4000.0, *TOTALS[1:]]))


def test_totals_of_an_own_source_are_compared() -> None:
    base = ArraySource(X, IDS, classes=("a", "b", "c"), unit_rows=50)
    plain: Any = Plain(base)
    plain.totals = np.bincount(IDS)
    read_pass(as_source(plain))
    plain.totals = [N, N, N]
    with pytest.warns(UserWarning, match="totals of Plain is 400 for class 'a'"):
        read_pass(as_source(plain))


def test_the_sum_of_constant_weights_is_compared_to_the_tolerance() -> None:
    for declared, is_valid in [(109.0, True), (91.0, True), (120.0, False), (80.0, False)]:
        total = TotalWeights("totals", np.array([declared]), None, 1)
        y, w = np.zeros((50, 1)), np.full(50, 2.0, np.float32)
        if is_valid:
            total.add(0, 0, 0, y, w)
        else:
            with pytest.warns(UserWarning, match=r"weights of an epoch sum to 100; .* give 100"):
                total.add(0, 0, 0, y, w)


def test_random_weights_of_mean_one_are_accepted() -> None:
    """Check that chance gives no warning of right expectations, also for a class with few rows."""
    with warnings.catch_warnings(record=True) as caught:
        for seed in range(200):
            rng = np.random.default_rng(seed)
            y, w = rng.choice(3, 300, p=[0.69, 0.3, 0.01]), rng.exponential(size=300)
            total = TotalWeights("totals", 300 * np.array([0.69, 0.3, 0.01]), ("a", "b", "c"), 1)
            total.add(0, 0, seed, y, w.astype(np.float32))
    assert caught == []


def test_passes_may_overlap_and_units_may_be_read_again() -> None:
    total = TotalWeights("totals", np.array([30.0]), None, 3)
    y = np.zeros((5, 1))
    for u, epoch in [(0, 0), (0, 0), (1, 0), (0, 1), (1, 1), (1, 0)]:
        total.add(u, 0, epoch, y, None)
    for epoch in range(2, 9):  # passes that are never completed are forgotten
        total.add(0, 0, epoch, y, None)
    total.add(0, 0, 9, y, None)
    total.add(1, 0, 9, y, None)
    with pytest.warns(UserWarning, match="is 30, but the weights of an epoch sum to 15"):
        total.add(2, 0, 9, y, None)
