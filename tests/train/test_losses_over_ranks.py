"""Test that runs over several ranks with other losses equal runs of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.basics.errors import TrainingInterrupted
from streamkern.ingest.ingest import ingest
from streamkern.losses.scaled import ScaledLoss
from streamkern.train.resolve.resolved_run import open_run
from streamkern.train.setup import assemble
from streamkern.train.setup.choose_centers import choose_centers
from streamkern.train.train import train
from tests import rank_runs as runs

pytestmark = pytest.mark.usefixtures("one_blas_thread")

LOSSES: dict[str, dict[str, Any]] = {
    "log_loss": {"model.loss": "log_loss"},
    "quantile": {"model.loss": "quantile", "model.quantile": 0.8},
    "huber": {"model.loss": "huber"},
    "poisson": {"model.loss": "poisson"},
    "gamma": {"model.loss": "gamma"},
}
SMALL = {
    "data.epochs": 1, "data.batch_size": 80, "run.checkpoint_every": 3, "run.calibrate": False,
    "solver.ridge": "auto",
}  # fmt: skip
SOLVERS: dict[str, dict[str, Any]] = {
    "block": {},
    "falkon": {"data.epochs": 4, "solver.ridge": 1e-3},
    "direct": {"data.epochs": 4, "solver.ridge": 1e-3},
    "eigenpro3": {"data.epochs": 2},
    "eigenpro4": {"data.epochs": 2},
}
"""Settings of solvers; FALKON and Newton's method take their first steps after two epochs."""
SQUARES = {"model.loss": "squared_error", "model.quantile": None}
LIMIT = ScaledLoss.limit


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the path of a store with suitable targets for each loss."""
    folder, rng = tmp_path_factory.mktemp("stores"), np.random.default_rng(0)
    X = rng.normal(size=(600, 4)).astype(np.float32)
    labels = np.array(["ant", "bee", "cat"])[np.abs(X[:, :3]).argmax(axis=1)]
    values = np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * rng.standard_t(3, 600)
    rates = np.exp(2 * np.sin(2 * X[:, 0]) + X[:, 1])
    counts, amounts = rng.poisson(rates).astype(float), rates * rng.gamma(1.0, size=600)
    targets = {"labels": labels, "values": values, "counts": counts, "amounts": amounts}
    for name, y in targets.items():
        ingest(X, str(folder / name), y=y, chunk_mb=10 * 16 / 2**20)
    names = {"log_loss": "labels", "poisson": "counts", "gamma": "amounts"}
    return {name: str(folder / names.get(name, "values")) for name in LOSSES}


def settings(
    store: str, location: Path, name: str, rows: int, columns: int, solver: str = "block"
) -> Any:
    """Return the settings of a run with a loss on a grid of ranks."""
    options = SMALL | LOSSES[name] | runs.grid(rows, columns) | {"data.test": store}
    if solver != "block":
        options |= {"solver.name": solver, "solver.block_size": "auto"} | SOLVERS[solver]
    return runs.settings(store, location, **options)


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize(("solver", "name", "rows", "columns"), [
    ("block", "log_loss", 1, 2), ("block", "log_loss", 2, 1), ("block", "log_loss", 2, 2),
    ("block", "quantile", 3, 1), ("block", "quantile", 1, 3), ("block", "huber", 2, 1),
    ("block", "huber", 1, 2), ("block", "poisson", 2, 1), ("block", "gamma", 3, 1),
    ("falkon", "log_loss", 2, 1), ("falkon", "quantile", 1, 2), ("falkon", "poisson", 2, 2),
    ("falkon", "gamma", 3, 1), ("direct", "log_loss", 2, 1), ("direct", "huber", 3, 1),
    ("direct", "gamma", 2, 1), ("eigenpro3", "huber", 1, 3), ("eigenpro3", "log_loss", 3, 1),
    ("eigenpro4", "poisson", 2, 2), ("eigenpro4", "quantile", 2, 1),
])  # fmt: skip
def test_run_over_ranks_equals_one_process(
    stores: dict[str, str], tmp_path: Path, solver: str, name: str, rows: int, columns: int
) -> None:
    one = train(settings(stores[name], tmp_path / "one", name, 1, 1, solver))
    config = settings(stores[name], tmp_path / "many", name, rows, columns, solver)
    ended, *_ = runs.on_ranks(rows * columns, config)
    weights, expected = (runs.alpha(tmp_path / location) for location in ("many", "one"))
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert ended["metrics"].keys() == one.metrics.keys()
    assert all(abs(ended["metrics"][k] - v) < 1e-10 for k, v in one.metrics.items())


def without_known_rows(*args: Any) -> Any:
    """Return centers of which no row is known, in place of `choose_centers`."""
    return choose_centers(*args)._replace(rows=None)


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize(("name", "rows"), [("poisson", 2), ("gamma", 1)])
def test_log_link_with_partitioned_centers_equals_one_process(
    stores: dict[str, str], tmp_path: Path, name: str, rows: int
) -> None:
    """Compare with a rank that does not know the targets of the centers, because no rank has all of
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "choose_centers", without_known_rows)
        train(settings(stores[name], tmp_path / "one", name, 1, 1))
    runs.on_ranks(2 * rows, settings(stores[name], tmp_path / "many", name, rows, 2))
    weights, expected = (runs.alpha(tmp_path / location) for location in ("many", "one"))
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("gamma", 2, 1), ("gamma", 2, 2), ("poisson", 3, 1)]
)
def test_step_limit_is_shared_by_all_ranks(
    stores: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, rows: int, columns: int,
) -> None:  # fmt: skip
    """Continue a run on targets 1000 times as large, so that the first steps would be too long.

    Each rank has other rows or centers, but all shorten a step by the same factor.
    """
    store, factors = sk.open_store(stores[name]), list[float]()
    chunks = [store.read_chunk(i) for i in range(store.n_chunks)]
    X, y = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    large = str(tmp_path / "large")
    ingest(X, large, y=1000 * y.ravel(), targets="values", chunk_mb=10 * 16 / 2**20)

    def record_limit(self: ScaledLoss, largest: Any) -> Any:
        factor = LIMIT(self, largest)
        factors.append(float(factor))
        return factor

    train(settings(stores[name], tmp_path / "old", name, 1, 1))
    monkeypatch.setattr(ScaledLoss, "limit", record_limit)
    if name == "poisson":  # its curvature already shortens these steps to a move of 1.5
        monkeypatch.setattr("streamkern.losses.scaled.MAX_STEP_MOVE", 0.5)
    train(settings(large, tmp_path / "one", name, 1, 1), continues=tmp_path / "old")
    n_steps, n_limited = len(factors), sum(factor < 1 for factor in factors)
    assert n_limited >= 3
    factors.clear()
    ranks_config = settings(large, tmp_path / "many", name, rows, columns)
    runs.on_ranks(rows * columns, ranks_config, str(tmp_path / "old"))
    assert len(factors) == rows * columns * n_steps
    assert sum(factor < 1 for factor in factors) == rows * columns * n_limited
    weights, expected = (runs.alpha(tmp_path / location) for location in ("many", "one"))
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize(("old", "name"), [
    ("squared_error", "log_loss"), ("log_loss", "log_loss"), ("squared_error", "quantile"),
    ("quantile", "quantile"), ("poisson", "poisson"),
])  # fmt: skip
def test_continued_run_over_ranks_equals_one_process(
    stores: dict[str, str], tmp_path: Path, old: str, name: str
) -> None:
    """Check starts from the same loss and from squares, with two ranks for the centers."""
    store = stores[name]
    old_path, one_path, many_path = (tmp_path / path for path in ("old", "one", "many"))
    before = settings(store, old_path, name, 1, 1)
    train(before if old == name else before.with_overrides(SQUARES))
    train(settings(store, one_path, name, 1, 1), continues=old_path)
    runs.on_ranks(2, settings(store, many_path, name, 1, 2), str(old_path))
    weights, expected = runs.alpha(many_path), runs.alpha(one_path)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.full(all_but_every=2)
@pytest.mark.parametrize(("solver", "name", "rows", "columns"), [
    ("block", "log_loss", 1, 2), ("block", "quantile", 2, 1), ("block", "huber", 2, 2),
    ("block", "poisson", 2, 2), ("falkon", "gamma", 2, 2), ("falkon", "log_loss", 3, 1),
    ("direct", "poisson", 2, 1), ("eigenpro4", "huber", 2, 2),
])  # fmt: skip
def test_stopped_run_resumes_to_same_bits(
    stores: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    solver: str, name: str, rows: int, columns: int,
) -> None:  # fmt: skip
    """Stop within the first epoch, or for falkon and direct, within the third."""
    calm, parts = (
        settings(stores[name], tmp_path / location, name, rows, columns, solver)
        for location in ("calm", "parts")
    )
    runs.on_ranks(rows * columns, calm)
    with monkeypatch.context() as patch:
        runs.stop_rank0_after(20 if solver in ("falkon", "direct") else 4, patch)
        with pytest.raises(TrainingInterrupted, match="and saved"):
            runs.on_ranks(rows * columns, parts)
    runs.on_ranks(rows * columns, parts)
    np.testing.assert_array_equal(runs.alpha(tmp_path / "parts"), runs.alpha(tmp_path / "calm"))


def test_plan_counts_the_same_as_for_squared_error(stores: dict[str, str], tmp_path: Path) -> None:
    """Check that the arrays of a loss replace the residuals."""
    lines = []
    for changes in ({}, SQUARES):
        config = settings(stores["quantile"], tmp_path / "run", "quantile", 2, 2)
        run = open_run(config.with_overrides(changes))
        run.backend.close()
        lines.append(run.buffers.lines)
    assert lines[0] == lines[1]
