"""Check that threads do not change the bits of a run, and chunks only the rounding."""

from __future__ import annotations

import numpy as np
import pytest

from streamkern.stream.sources.arrays import ArraySource
from tests.runs import METHODS, arrays, finished, settings, stream


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("method", METHODS)
def test_bits_of_run_do_not_depend_on_threads(method: str) -> None:
    weights = [
        finished(
            settings(**METHODS[method], **{"run.threads": n, "data.prefetch_threads": n}),
            source=stream(method),
        ).model.weights
        for n in (1, 3)
    ]
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("method", ["direct", "direct, fourier", "direct, nystrom", "falkon"])
def test_chunks_and_batches_change_only_rounding(method: str) -> None:
    """Check solvers that sum over an epoch, whose result does not depend on the order of steps.

    The sums of all are in float64; only the kernel values of a row may be rounded in another way
    where it is in another batch.
    """
    X, y = arrays()
    overrides = METHODS[method] | {"run.precision": "float64", "data.epochs": 4}
    if method != "direct, fourier":
        overrides |= {"model.n_centers": "auto"}
    centers = None if "fourier" in method else np.float64(arrays(40, 1)[0])
    weights = []
    for unit_rows, batch_size in ((16, 20), (50, 33), (135, 135), (7, 1)):
        source = ArraySource(np.float64(X), y, unit_rows=unit_rows)
        config = settings(**overrides | {"data.batch_size": batch_size})
        result = finished(config, source=source, centers=centers)
        weights.append(result.model.values(np.float64(arrays(50, 5)[0])))
    for values in weights[1:]:
        np.testing.assert_allclose(values, weights[0], rtol=0, atol=1e-8 * np.abs(weights[0]).max())
