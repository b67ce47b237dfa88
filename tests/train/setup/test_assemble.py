"""The ridge of a run, from as many rows as its centers are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkern.solver.precondition.noise import Noise, find_noise
from streamkern.train.setup import assemble
from tests import reference as ref
from tests.runs import N, array_source, arrays, finished, settings

ALL = {"model.n_centers": "auto", "model.centers": "all", "solver.name": "direct"}


@pytest.mark.parametrize("few", [64, N])
def test_the_ridge_is_refined_with_more_rows(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, Noise | None]] = []

    def noted(op: Any, Z: Any, rows: Any, near: Noise | None = None, **options: Any) -> Noise:
        calls.append((len(rows.X), near))
        return find_noise(op, Z, rows, near, **options)

    monkeypatch.setattr(assemble, "NOISE_ROWS", few)
    monkeypatch.setattr(assemble, "find_noise", noted)
    result = finished(settings(**ALL), source=array_source())
    sizes = [n for n, _ in calls]
    assert sizes == ([N] if few == N else [few, N])
    assert [near is None for _, near in calls] == [True, False][: len(calls)]
    # The best of a few powers of ten has about the least error of all ridges.
    X, y = arrays()
    K, Y = ref.laplace(X, X, 3.0), np.eye(3)[y]
    Y -= Y.mean(axis=0)

    def left_out(ridge: float) -> float:
        inverse = np.linalg.inv(K + N * ridge * np.eye(N))
        return float(((inverse @ Y / inverse.diagonal()[:, None]) ** 2).sum())

    ridge = result.meta["setup"]["ridge"]
    assert left_out(ridge) <= 1.02 * min(map(left_out, np.geomspace(1e-8, 10, 60)))
