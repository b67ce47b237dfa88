"""Test that ranks keep stripes of the centers, and that their setup equals that of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.ranks import SINGLE, Communicator
from streamkern.basics.stop import StopRequest
from streamkern.ingest.ingest import ingest
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.rank_work import prepare_run
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.setup import broadcast
from streamkern.train.start_run import run_directory, start_trainer
from tests import rank_runs as runs
from tests.rank_threads import on_threads

pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_rank_keeps_its_stripe(
    size: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check rows in any order, a few at a time; the mean has the bits of one rank."""
    monkeypatch.setattr(broadcast, "BROADCAST_CENTER_BYTES", 3 * 4 * np.dtype(dtype).itemsize)
    rng = np.random.default_rng(0)
    Z, order = rng.normal(size=(33, 4)).astype(dtype), rng.permutation(33)
    parts = [(order[at], Z[order[at]]) for at in (slice(20), slice(20, 21), slice(21, 33))]

    def stripe_and_mean(ranks: Communicator) -> Any:
        receives = ranks.rank > 0
        stripe = (broadcast.receive_shard if receives else partial(broadcast.scatter, parts))(
            33, ranks
        )
        return stripe, broadcast.mean(stripe, 33, ranks)

    actual = on_threads(size, stripe_and_mean)
    np.testing.assert_array_equal(np.concatenate([stripe for stripe, _ in actual]), Z)
    assert {stripe.dtype for stripe, _ in actual} == {np.dtype(dtype)}
    for _, mean_of_centers in [*actual, (Z, broadcast.mean(Z, 33, SINGLE))]:
        np.testing.assert_array_equal(mean_of_centers, Z.mean(axis=0, dtype=np.float64))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a store of training rows."""
    return runs.write_store(tmp_path_factory.mktemp("stripes"))


def setup_arrays(
    store: str, run_dir: Path, rows: int, columns: int, **changes: Any
) -> dict[str, Any]:
    """Return the arrays of a setup that a grid of ranks has computed and saved."""
    options = {
        "run.ranks": rows * columns, "run.center_ranks": columns, "data.epochs": 1,
        "model.bandwidth": "median",
    }  # fmt: skip
    config = runs.settings(store, run_dir, **options | changes)
    prepare_run(config)

    def compute_setup(ranks: Communicator) -> None:
        directory = run_directory(config, writable=ranks.rank == 0)
        request = StopRequest(install=False)
        with start_trainer(config, RunInputs(ranks=ranks), directory, request) as trainer:
            trainer.run.backend.close()

    on_threads(rows * columns, compute_setup)
    saved = RunDirectory(run_dir, writable=False).load_setup()
    assert saved is not None
    return saved.arrays | {"rules": saved.meta["setup"]["rules"], "kernel": saved.meta["kernel"]}


FOURIER = {
    "model.features": "fourier", "model.n_features": 60, "model.n_centers": "auto",
    "model.kernel": "gaussian", "solver.ridge": "auto",
}  # fmt: skip


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize(("changes", "rows", "columns"), [
    ({}, 1, 4),
    ({"model.centers": "all", "model.n_centers": "auto", "solver.block_size": 300}, 1, 2),
    ({"model.centers": "file", "model.n_centers": "auto"}, 1, 3),
    (FOURIER, 2, 2),
])  # fmt: skip
def test_setup_equals_that_of_one_rank(
    store: str, tmp_path: Path, changes: dict[str, Any], rows: int, columns: int
) -> None:
    """Check every way of choosing centers: centers have equal bits, all else is equal up to
    rounding."""
    if changes.get("model.centers") == "file":
        np.save(tmp_path / "Z.npy", np.random.default_rng(2).normal(size=(50, 4)))
        changes = changes | {"model.centers": str(tmp_path / "Z.npy")}
    one = setup_arrays(store, tmp_path / "one", 1, 1, **changes)
    ranks_setup = setup_arrays(store, tmp_path / "many", rows, columns, **changes)
    assert ranks_setup.keys() == one.keys()
    assert ranks_setup.pop("kernel") == one["kernel"]
    for a, b in zip(ranks_setup.pop("rules"), one["rules"], strict=True):
        assert a["lambda_1"] == pytest.approx(b["lambda_1"], rel=1e-6)
    for name in ("Z", "order", "shift", "sample_rows"):
        np.testing.assert_array_equal(ranks_setup.pop(name), one[name])
    for name, a in ranks_setup.items():
        atol = 1e-10 * max(1.0, float(np.abs(one[name]).max()))
        np.testing.assert_allclose(a, one[name], rtol=0, atol=atol)


def test_rows_of_weight_zero_are_no_centers_of_several_ranks(tmp_path: Path) -> None:
    """Check that ranks with stripes of the centers replace such rows as one rank does."""
    rng = np.random.default_rng(0)
    X, weights = rng.normal(size=(900, 4)).astype(np.float32), np.arange(900) % 3
    y = np.sin(X).sum(axis=1)
    store = str(tmp_path / "weighted.zarr")
    ingest(X, store, y=y, sample_weight=weights, chunk_mb=2**-10)
    one = setup_arrays(store, tmp_path / "one", 1, 1)
    ranks_setup = setup_arrays(store, tmp_path / "many", 1, 2)
    np.testing.assert_array_equal(ranks_setup["Z"], one["Z"])
