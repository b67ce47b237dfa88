"""Check when all rows become centers, and that a resumed run keeps its number of centers."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from streamkern.planning.sizes import EffortLevel
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

# Settings that leave the number of centers and the solver to streamkern.
OPEN = {"model.n_centers": "auto", "solver.name": "auto", "solver.ridge": 1e-3}


def set_limits(patch: pytest.MonkeyPatch, n_centers: int, all_rows: int) -> None:
    """Give effort "default" these limits: of centers that are drawn, and of rows that all become
    centers."""
    levels = MappingProxyType({"default": EffortLevel(n_centers, all_rows, 100)})
    for module in (given_arrays, resolved_run):
        patch.setattr(module, "EFFORT_LEVELS", levels)


@pytest.mark.parametrize(
    ("n_centers", "all_rows", "expected"),
    [(N, 0, N), (20, N, N), (20, N - 1, 20)],
    ids=["as many centers as rows", "rows within the limit", "one row above the limit"],
)
def test_effort_allows_all_rows_as_centers(
    n_centers: int, all_rows: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, n_centers, all_rows)
    run = opened(array_source(), **OPEN)
    assert (run.problem.p, run.in_order) == (expected, expected == N)


@pytest.mark.parametrize(
    "changes",
    [{"run.memory": "120 MiB"}, {"run.early_stopping": True}, {"solver.ridge": 0.0}],
    ids=["too little memory", "early stopping", "no ridge"],
)
def test_fewer_centers_if_one_equation_is_impossible(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check settings with which the kernel matrix of all rows cannot be factored."""
    set_limits(monkeypatch, 20, 3000)
    source = array_source(3000)
    for more, p in (({}, 3000), (changes, 20)):
        run = opened(source, **(OPEN | more))
        assert (run.problem.p, run.in_order) == (p, p == 3000)


def test_augmented_rows_use_fewer_centers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 20, N)
    run = opened(AugmentedSource(array_source(), 1, [GaussianNoise(0.1)]), **OPEN)
    assert run.problem.p == 20


@pytest.mark.parametrize(
    ("all_rows_before", "all_rows_after", "n_centers"), [(0, N, 20), (N, 0, N)], ids=["few", "all"]
)
def test_resumed_run_keeps_number_of_centers(
    all_rows_before: int, all_rows_after: int, n_centers: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Check a run that was begun by a version with another limit."""
    test = array_source(10, 5)
    set_limits(monkeypatch, 20, all_rows_before)
    finished(settings(tmp_path / "uninterrupted", **OPEN), source=array_source(), test=test)
    config = settings(tmp_path / "resumed", **(OPEN | {"run.checkpoint_every": 1}))
    stopped(config, 1, source=array_source(), test=test)
    set_limits(monkeypatch, 20, all_rows_after)
    result = finished(config, source=array_source(), test=test)
    assert len(result.Z) == n_centers
    assert_same_bits(final(tmp_path / "resumed"), final(tmp_path / "uninterrupted"))


def test_all_rows_solve_one_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 20, N)
    X, y = arrays()
    result = finished(settings(**OPEN), source=array_source())
    K, Y = ref.laplace(X, X, 3.0), np.eye(3)[y]
    alpha = np.linalg.solve(K + N * 1e-3 * np.eye(N), Y - Y.mean(axis=0))
    fresh = arrays(seed=1)[0]
    expected = ref.laplace(fresh, X, 3.0) @ alpha + Y.mean(axis=0)
    np.testing.assert_allclose(result.model.predict(array_source(seed=1)), expected, atol=1e-4)
