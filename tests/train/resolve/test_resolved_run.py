"""All rows as centers, if `effort` allows, and in runs that other versions began."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from streamkern.planning.effort_levels import EffortLevel
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.random_transforms import GaussianNoise
from streamkern.train.resolve import given_arrays, resolved_run
from tests import reference as ref
from tests.runs import (
    N,
    array_source,
    arrays,
    assert_same_bits,
    final,
    finished,
    opened,
    settings,
    stopped,
)

OPEN = {"model.n_centers": "auto", "solver.name": "auto", "solver.ridge": 1e-3}


def allow(patch: pytest.MonkeyPatch, n_centers: int, all_rows: int) -> None:
    """Give effort "default" these limits."""
    levels = MappingProxyType({"default": EffortLevel(n_centers, all_rows, 100)})
    for module in (given_arrays, resolved_run):
        patch.setattr(module, "EFFORT_LEVELS", levels)


def test_all_rows_if_the_effort_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    for n_centers, all_rows, p in ((N, 0, N), (20, N, N), (20, N - 1, 20)):
        allow(monkeypatch, n_centers, all_rows)
        run = opened(array_source(), **OPEN)
        assert (run.problem.p, run.in_order) == (p, p == N)
        run.backend.close()


@pytest.mark.parametrize(
    "changes",
    [{"run.memory": "120 MiB"}, {"run.early_stopping": True}, {"solver.ridge": 0.0}],
)
def test_fewer_centers_if_all_rows_are_not_one_equation(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel matrix does not fit the memory, or another solver is needed."""
    allow(monkeypatch, 20, 3000)
    source = array_source(3000)
    for more, p in (({}, 3000), (changes, 20)):
        run = opened(source, **(OPEN | more))
        assert (run.problem.p, run.in_order) == (p, p == 3000)
        run.backend.close()


def test_fewer_centers_of_augmented_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 20, N)
    run = opened(AugmentedSource(array_source(), 1, [GaussianNoise(0.1)]), **OPEN)
    assert run.problem.p == 20
    run.backend.close()


def test_a_run_keeps_its_centers_if_the_limits_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a newer version do."""
    for name, before, after, p in (("few", 0, N, 20), ("all", N, 0, N)):
        allow(monkeypatch, 20, before)
        config = settings(tmp_path / name, **(OPEN | {"run.checkpoint_every": 1}))
        stopped(config, 1, source=array_source(), test=array_source(10, 5))
        allow(monkeypatch, 20, after)
        result = finished(config, source=array_source(), test=array_source(10, 5))
        assert len(result.Z) == p
        whole = settings(tmp_path / f"{name} whole", **OPEN)
        allow(monkeypatch, 20, before)
        finished(whole, source=array_source(), test=array_source(10, 5))
        assert_same_bits(final(tmp_path / name), final(tmp_path / f"{name} whole"))


def test_all_rows_are_the_solution_of_one_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 20, N)
    X, y = arrays()
    result = finished(settings(**OPEN), source=array_source())
    K, Y = ref.laplace(X, X, 3.0), np.eye(3)[y]
    alpha = np.linalg.solve(K + N * 1e-3 * np.eye(N), Y - Y.mean(axis=0))
    fresh = arrays(seed=1)[0]
    expected = ref.laplace(fresh, X, 3.0) @ alpha + Y.mean(axis=0)
    np.testing.assert_allclose(result.model.predict(array_source(seed=1)), expected, atol=1e-4)
