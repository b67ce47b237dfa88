"""Check sources that repeat the rows of epoch 0, and solvers whose centers are these rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamkern import AugmentedSource, GeneratorSource, KernelRegressor, RowRandom
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.first_epoch import with_first_epoch
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.user import as_source
from tests.runs import array_source
from tests.streams import Plain, assert_same_rows

N_ROWS = 300


def generator(epoch_of: Callable[[int], int]) -> GeneratorSource:
    """Return a generator whose rows are those of the epoch `epoch_of(epoch)`."""

    def make(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        rng = RowRandom(np, seed, epoch_of(epoch), 0, np.arange(start, stop), np.float32)
        X = rng.uniform((3,))
        return X, X.sum(axis=1, keepdims=True)

    return GeneratorSource(make, N_ROWS, (3,), np.float32, 1, block_rows=100, name="sums")


def changing_generator() -> GeneratorSource:
    """Return a generator with other rows in each epoch."""
    return generator(lambda epoch: epoch)


@pytest.mark.parametrize(
    "source",
    [
        changing_generator(),
        as_source(Plain(changing_generator())),
        AugmentedSource(changing_generator(), 2),
        MixtureSource([changing_generator(), changing_generator()]),
    ],
    ids=["generator", "user", "copies", "mixture"],
)
def test_every_epoch_has_rows_of_first_epoch(source: BaseSource) -> None:
    fixed = with_first_epoch(source)
    assert fixed.describe() == source.describe()
    for u in range(source.n_units):
        expected = source.read_unit(u, 7, 0)
        for epoch in (0, 1, 5):
            assert_same_rows(fixed.read_unit(u, 7, epoch), expected)
            np.testing.assert_array_equal(fixed.read_targets(u, 7, epoch), expected.y)
        np.testing.assert_array_equal(fixed.source_rows(u), source.source_rows(u))


def test_sources_that_repeat_are_unchanged() -> None:
    arrays = array_source()
    assert with_first_epoch(arrays) is arrays
    plain: Any = Plain(arrays)
    plain.repeats = True
    declared = as_source(plain)
    assert with_first_epoch(declared) is declared


@pytest.mark.parametrize("solver", ["sgd", "eigenpro1", "eigenpro2"])
def test_rows_are_their_own_centers_in_every_epoch(solver: str) -> None:
    def weights(source: GeneratorSource) -> np.ndarray:
        model = KernelRegressor("gaussian", bandwidth=2.0, solver=solver, epochs=2).fit(source)
        return np.asarray(model.dual_coef_)

    # This generator repeats its rows, also in the samples of the setup, by itself.
    repeating_generator = generator(lambda epoch: 0)
    np.testing.assert_array_equal(weights(changing_generator()), weights(repeating_generator))
