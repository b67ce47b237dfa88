"""Check the center selectors (balanced, k-means, RPCholesky) against simple references."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from streamkern.backend.base import Backend
from streamkern.basics.array_types import Ints
from streamkern.basics.errors import ConfigError, DataError, MemoryBudgetError
from streamkern.centers import balanced
from streamkern.centers.kmeans import kmeans
from streamkern.centers.random_rows import all_rows
from streamkern.centers.rpcholesky import PIVOT_STAGE, RPCholesky, rpcholesky
from streamkern.centers.selector import CenterSelector
from streamkern.centers.selectors import SELECTORS
from streamkern.cli.overview import plan_overview
from streamkern.cli.plan_text import plan_text
from streamkern.cli.run_info import run_overview
from streamkern.ingest.ingest import ingest
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.products import KernelOperator
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.transforms import GaussianNoise, RandomFlip, Scale, host_transform
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.setup import choose_centers
from tests import reference as ref
from tests import runs
from tests.plans import PLAIN
from tests.runs import array_source, arrays, finished, opened, stream

Array = npt.NDArray[Any]
METHODS = ("random", "balanced", "kmeans", "rpcholesky")
LOW_RANK = {"n_nystrom", "n_probe", "level"}


# -- balanced -------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda c: sum(c) > 0),
    p=st.integers(1, 200),
    seed=st.integers(0, 100),
)
@settings(max_examples=100)
def test_class_quotas_are_balanced(counts: list[int], p: int, seed: int) -> None:
    """Compare with dealing out one row after the other, to each class in turn."""
    rng = np.random.default_rng(seed)
    favoured = rng.permutation(len(counts))
    left, shares = min(p, sum(counts)), np.zeros(len(counts), int)
    while left:
        for k in favoured:
            if left and shares[k] < counts[k]:
                shares[k] += 1
                left -= 1
    np.testing.assert_array_equal(balanced.quotas(np.array(counts), p, favoured), shares)


def labelled_source(y: Array, unit_rows: int, c: int) -> ArraySource:
    """Return rows with c classes, whose only feature is the row number."""
    X = np.arange(len(y), dtype=np.float32)[:, None]
    return ArraySource(X, y, classes=[str(k) for k in range(c)], unit_rows=unit_rows)


@given(
    c=st.integers(1, 6), n=st.integers(1, 400), share=st.floats(0.01, 1), unit=st.integers(1, 50),
    skew=st.floats(0, 3), ordered=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=60)
def test_balanced_selector_gives_exact_counts(
    c: int, n: int, share: float, unit: int, skew: float, ordered: bool, seed: int
) -> None:
    weights = np.arange(1, c + 1) ** -skew
    y = np.random.default_rng(seed).choice(c, n, p=weights / weights.sum())
    y = np.sort(y) if ordered else y
    p = max(1, int(share * n))
    block, n_read = balanced.Balanced().rows(labelled_source(y, unit, c), p, seed)
    assert len(np.unique(block.row_ids)) == len(block.row_ids) == p
    np.testing.assert_array_equal(block.X[:, 0], block.row_ids)
    np.testing.assert_array_equal(block.y, y[block.row_ids])
    counts, available = np.bincount(block.y, minlength=c), np.bincount(y, minlength=c)
    # A class with less than another by more than one has no more to give.
    assert (counts[counts < counts.max() - 1] == available[counts < counts.max() - 1]).all()
    assert n_read <= n


@pytest.mark.slow
def test_balanced_selector_draws_rows_uniformly_within_class() -> None:
    """Check the chi-square of 400 choices of 5 of 25 rows, with 24 degrees of freedom."""
    source = labelled_source(np.repeat([0, 1], 25), 16, 2)
    hits = np.zeros(50)
    for seed in range(400):
        hits[balanced.Balanced().rows(source, 10, seed)[0].row_ids] += 1
    expected = 400 * 5 / 25
    for part in (hits[:25], hits[25:]):
        # Drawn without replacement: the variance is smaller by 1 - 5 / 25.
        statistic = ((part - expected) ** 2).sum() / (expected * 0.8)
        assert 7 < statistic < 52  # all but 5e-4 on either side


def test_balanced_selector_reads_units_until_classes_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that 256 of 1000 units are read in random order, and more only for the rare class."""
    y = np.arange(20_000) % 2
    y[10_000:10_003] = 2
    source = labelled_source(y, 20, 3)
    mixed, n_read = balanced.Balanced().rows(labelled_source(y % 2, 20, 2), 300, 0)
    assert n_read == 256 * 20
    assert len(np.unique(mixed.row_ids // 20)) <= 256
    block, n_read = balanced.Balanced().rows(source, 303, 0)
    assert np.bincount(block.y).tolist() == [150, 150, 3]
    assert n_read == 20_000
    assert len(np.unique(block.row_ids // 20)) <= 256 + 3


def test_balanced_selector_reads_labels_of_store_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also the choice from an array with the same units, and from a mixture."""
    X, y = arrays(600, 1)
    ingest(X, tmp_path / "s.zarr", y=y, shuffle=False, chunk_mb=0.001)
    source = ZarrSource(tmp_path / "s.zarr")
    rows = int(source.unit_bounds(0)[1])
    full = ArraySource(X, y, classes=source.classes, unit_rows=rows)
    expected = balanced.Balanced().rows(full, 30, 3)
    units_read: list[int] = []
    plain = source.store.read_chunk
    monkeypatch.setattr(source.store, "read_chunk", lambda i: units_read.append(i) or plain(i))
    chosen_rows = balanced.Balanced().rows(source, 30, 3)
    np.testing.assert_array_equal(chosen_rows[0].row_ids, expected[0].row_ids)
    np.testing.assert_array_equal(chosen_rows[0].X, expected[0].X)
    assert len(units_read) <= 30
    two = MixtureSource([source, full])
    block, _ = balanced.Balanced().rows(two, 31, 0)
    np.testing.assert_array_equal(block.X, np.concatenate([X, X])[block.row_ids])
    assert sorted(np.bincount(block.y)) == [10, 10, 11]


def test_balanced_selector_uses_transformed_labels() -> None:
    @host_transform
    def relabel(X: Array, y: Array, rng: Any) -> tuple[Array, Array]:
        return X, np.where(X[:, 0] < 90, 0, 1)

    y = np.zeros(100, int)
    X = np.arange(100, dtype=np.float32)[:, None]
    source = ArraySource(X, y, [relabel], classes=["a", "b"], unit_rows=7)
    block, _ = balanced.Balanced().rows(source, 20, 0)
    assert (block.row_ids >= 90).sum() == 10


def test_balanced_selector_accepts_user_source() -> None:
    def rows(seed: int, epoch: int, start: int, stop: int) -> tuple[Array, Array]:
        i = np.arange(start, stop)
        return i[:, None].astype(np.float32), (i % 10 == 0).astype(np.int64)

    source = GeneratorSource(rows, 500, (1,), np.float32, 2, ["a", "b"], block_rows=30)
    block, _ = balanced.Balanced().rows(source, 80, 0)
    assert np.bincount(block.y).tolist() == [40, 40]


# -- k-means --------------------------------------------------------------------------------------


def clustered_rows(n: int, k: int, d: int = 4, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((k, d)) * 6
    return (means[rng.integers(k, size=n)] + rng.standard_normal((n, d))).astype(np.float32)


def distortion(X: Array, Z: Array) -> float:
    """Return the mean squared distance of a row to the nearest center."""
    return float((cdist(np.float64(X), np.float64(Z)).min(axis=1) ** 2).mean())


def test_kmeans_moves_empty_clusters() -> None:
    """Start from one outlier and 19 copies of one row, with 5 clusters."""
    X = clustered_rows(20_000, 5, seed=1)
    initial_means = np.repeat(X[:1], 20, axis=0)
    initial_means[0] = 1000
    Z = kmeans(initial_means, (X[i : i + 500] for i in range(0, 20_000, 500)), 0, 1)
    assert np.abs(Z).max() < 100
    assert len(np.unique(Z, axis=0)) == 20
    assert distortion(X, Z) < 4


def choose(run: ResolvedRun) -> tuple[choose_centers.ChosenCenters, dict[str, Any]]:
    """Return the centers of a run, and the fields of its event "centers"."""
    events: list[tuple[str, dict[str, Any]]] = []
    dtype = np.dtype(np.float64 if run.precision == "float64" else np.float32)
    centers = choose_centers.choose_centers(run, dtype, lambda *event: events.append(event))
    events = [event for event in events if event[0] != "setup"]
    assert [name for name, _ in events] == ["centers"]
    return centers, events[0][1]


def test_kmeans_uses_scaled_rows_without_augmentation() -> None:
    """Check that means of scaled bytes are the scaled means of the bytes."""
    X = np.random.default_rng(0).integers(0, 255, (200, 2, 3, 1), np.uint8)
    X[::2] //= 16
    base = ArraySource(X, np.arange(200) % 2, unit_rows=50)
    scale = Scale("global", 100.0, 50.0).bind(base)
    source = AugmentedSource(base, 3, [RandomFlip(), scale, GaussianNoise(3.0)])
    found, event = choose(
        opened(source, **{"model.centers": "kmeans", "model.n_centers": 2, "data.scale": "auto"})
    )
    truth = np.stack([X[1::2].reshape(100, 6).mean(0), X[::2].reshape(100, 6).mean(0)])
    Z = found.Z[np.argsort(-found.Z[:, 0])]
    np.testing.assert_allclose(Z, (truth - 100) / 50, atol=0.05)
    assert event["rows"] == 2 + 10 * 200


@pytest.mark.parametrize("method", ["kmeans", "rpcholesky"])
def test_bandwidth_comes_from_rows_for_every_selector(method: str) -> None:
    """Check selectors whose centers have other distances than the rows.

    Means are nearer to each other than rows are, and pivots farther apart.
    """
    source = ArraySource(*arrays(4000), classes=runs.CLASSES)
    overrides = {"model.centers": method, "model.bandwidth": "auto", "model.n_centers": 100}
    width = choose(opened(source, **overrides))[0].kernel.bandwidth
    rows = choose(opened(source, **overrides | {"model.centers": "random"}))[0].kernel.bandwidth
    assert width == pytest.approx(rows, rel=0.03)


# -- pivots ---------------------------------------------------------------------------------------


def plain_rpcholesky(K: Array, p: int, seed: int) -> Array:
    """Return the pivots of Algorithm 1 of Chen et al. (2023), from the same uniform numbers."""
    rng = np.random.default_rng([seed, PIVOT_STAGE])
    F, d, rows = np.zeros((len(K), p)), K.diagonal().copy(), []
    for i in range(p):
        s = int(np.searchsorted(np.cumsum(d), rng.random() * d.sum(), side="right"))
        rng.random()
        g = K[:, s] - F[:, :i] @ F[s, :i]
        F[:, i] = g / np.sqrt(g[s])
        d -= F[:, i] ** 2
        d = np.maximum(d, 0)
        d[s] = 0
        rows.append(s)
    return np.array(rows)


def trace_residual(K: Array, rows: Array) -> float:
    """Return the trace of the error of the Nystrom approximation, divided by the trace of K."""
    L = np.linalg.cholesky(K[np.ix_(rows, rows)])
    return float(1 - (np.linalg.solve(L, K[rows]) ** 2).sum() / np.trace(K))


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend(2) as made:
        yield made


def test_rpcholesky_with_block_of_one_equals_simple_algorithm(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamkern.centers.rpcholesky.PIVOT_BLOCK", 1)
    X = clustered_rows(200, 8).astype(np.float64)
    op = KernelOperator(Laplace(4.0), backend, "float64")
    K = ref.laplace(X, X, 4.0)
    for seed in range(5):
        found = rpcholesky(op, X, 40, seed)
        np.testing.assert_array_equal(found.rows, plain_rpcholesky(K, 40, seed))
        assert found.residual == pytest.approx(trace_residual(K, found.rows), rel=1e-9)


@pytest.mark.parametrize("precision", ["exact", "float64"])
def test_blocked_rpcholesky_leaves_as_little_trace_as_single_pivots(
    precision: str, backend: Backend
) -> None:
    """Compare the mean remaining trace with that of single pivots, a bound, and random rows.

    The bound is Theorem 3.1 of Chen et al.
    """
    X = clustered_rows(400, 10, seed=3).astype(np.float32 if precision == "exact" else np.float64)
    op = KernelOperator(Laplace(8.0), backend, precision)
    K, p = ref.laplace(np.float64(X), np.float64(X), 8.0), 40
    best = np.cumsum(np.linalg.eigvalsh(K)) / np.trace(K)  # best[-1 - r] is left by rank r
    # r / eps + r log(1 / (eps best_r)) pivots leave (1 + eps) best_r, in the mean; eps = 1.
    allowed = min(2 * best[-1 - r] for r in range(1, p) if r - r * np.log(best[-1 - r]) <= p)
    rng = np.random.default_rng(0)
    blocked = [rpcholesky(op, X, p, seed) for seed in range(12)]
    rounds = [trace_residual(K, found.rows) for found in blocked]
    single = [trace_residual(K, plain_rpcholesky(K, p, seed)) for seed in range(12)]
    random = [trace_residual(K, rng.permutation(400)[:p]) for _ in range(12)]
    np.testing.assert_allclose([found.residual for found in blocked], rounds, rtol=1e-3)
    error = np.std(rounds) / np.sqrt(12) + np.std(single) / np.sqrt(12)
    assert abs(np.mean(rounds) - np.mean(single)) < 4 * error
    assert best[-1 - p] < np.mean(rounds) < allowed
    assert np.mean(rounds) < np.mean(random)


def test_rpcholesky_completes_choice_at_numerical_rank(backend: Backend) -> None:
    """Check rows that are nearly equal for the kernel, where rounding ends the draws."""
    X = clustered_rows(300, 3).astype(np.float32)
    pivots = rpcholesky(KernelOperator(Laplace(1e7), backend), X, 100, 0)
    assert pivots.n_drawn < 100
    assert len(np.unique(pivots.rows)) == 100
    assert pivots.residual == pytest.approx(0, abs=1e-5)


def test_duplicate_rows_are_never_chosen_twice() -> None:
    X = np.repeat(arrays(70, 2)[0], 5, axis=0)[np.random.default_rng(0).permutation(350)]
    source = ArraySource(X, np.arange(350) % 2, unit_rows=50)
    for seed in range(5):
        overrides = {"model.centers": "rpcholesky", "run.random_state": seed}
        found, event = choose(opened(source, **overrides))
        assert len(np.unique(found.Z, axis=0)) == runs.P == event["drawn"]
    overrides = {"model.centers": "rpcholesky", "model.n_centers": 71}
    with pytest.raises(DataError, match="70 distinct rows among the 350 candidates for n_cent"):
        choose(opened(source, **overrides))


# -- in a run -------------------------------------------------------------------------------------


def make_sources() -> dict[str, Any]:
    """Return sources of several kinds, by name."""
    X = np.random.default_rng(0).integers(0, 255, (150, 2, 3, 1), np.uint8)
    images = ArraySource(X, np.arange(150) % 3, unit_rows=40)
    return {
        "images": AugmentedSource(images, 1, [Scale("global", 120.0, 60.0)]),
        "augmented": AugmentedSource(array_source(), 3, [GaussianNoise(5.0)]),
        "mixture": MixtureSource([array_source(), array_source(seed=4)], [1.0, 3.0]),
        "float64": ArraySource(np.float64(arrays()[0]), arrays()[1], unit_rows=16),
    }


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("name", make_sources())
@pytest.mark.parametrize("method", METHODS)
def test_selectors_accept_any_source_and_number_of_threads(method: str, name: str) -> None:
    source = make_sources()[name]
    settings = {"model.centers": method, "model.n_centers": 30, "solver.block_size": 30}
    settings["data.scale"] = "auto"
    settings["run.precision"] = "float64" if name == "float64" else "auto"
    results = [
        finished(
            runs.settings(**settings, **{"run.threads": n, "data.prefetch_threads": n}),
            source=source,
        )
        for n in (1, 2)
    ]
    one, two = results
    np.testing.assert_array_equal(one.Z, two.Z)
    np.testing.assert_array_equal(one.model.weights, two.model.weights)
    assert sorted(one.order) == list(range(30))
    run = opened(source, **settings)
    all_stored = all_rows(run.data.base, 0)
    rows, _ = choose_centers.transform_rows(run, all_stored, one.Z.dtype)
    stored_rows = {row.tobytes() for row in rows}
    assert (method == "kmeans") != ({row.tobytes() for row in one.Z} <= stored_rows)


def test_integer_precision_keeps_pivots_on_grid() -> None:
    source = make_sources()["images"]
    for method in ("balanced", "rpcholesky", "kmeans"):
        overrides = {"model.centers": method, "run.precision": "integer", "model.n_centers": 20}
        overrides["data.scale"] = "auto"
        steps = choose(opened(source, **overrides))[0].Z * 60 + 120
        assert (np.abs(steps - np.rint(steps)) < 1e-3).all() == (method != "kmeans")


@pytest.mark.parametrize("method", METHODS)
def test_resumed_run_keeps_centers_and_reports_selector(method: str, tmp_path: Path) -> None:
    config = runs.settings(tmp_path / "run", **{"model.centers": method})
    uninterrupted = finished(runs.settings(**{"model.centers": method}), source=stream())
    runs.stopped(config, 3, source=stream())
    result = finished(config, source=stream())
    np.testing.assert_array_equal(result.Z, uninterrupted.Z)
    np.testing.assert_array_equal(result.model.weights, uninterrupted.model.weights)
    log = (tmp_path / "run" / "log.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    events = [line for line in lines if line["event"] == "centers"]  # once, not at the resume
    assert [(e["method"], e["centers"]) for e in events] == [(method, runs.P)]
    assert events[0]["seconds"] > 0
    assert events[0]["rows"] >= runs.P


class Last(CenterSelector):
    """A further selector: the last rows."""

    name = "last"

    def choose(self, source: BaseSource, n: int, seed: int) -> tuple[Ints, int]:
        return np.arange(source.n_rows - n, source.n_rows), n


def test_selector_needs_one_class_and_one_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SELECTORS, "last", Last())
    result = finished(runs.settings(**{"model.centers": "last"}), source=array_source())
    np.testing.assert_array_equal(result.Z[np.argsort(result.order)], arrays()[0][-runs.P :])


# -- planned and refused --------------------------------------------------------------------------


def test_plan_describes_center_selection() -> None:
    plain = plan_overview(opened())
    assert plain["centers"] == {"method": "random"}
    assert "centers" not in plain["flops"]
    for method, rows, epochs in (("kmeans", 10 * runs.N, 1), ("rpcholesky", runs.N, 2)):
        given = {"model.centers": method, "solver.name": "block", "data.epochs": epochs}
        plan = plan_overview(opened(**given))
        assert plan["centers"] == {"method": method, "rows": rows}
        assert plan["memory"]["phases"]["centers"] > 0
        assert f"60 centers ({method}, from {rows:,} rows)" in plan_text(plan)
        is_expensive = plan["flops"]["centers"] > plan["flops"]["training"]
        assert is_expensive == (method == "kmeans")
        assert ("takes more than training" in plan_text(plan)) == is_expensive


@pytest.mark.parametrize(
    ("solver", "names"),
    [
        ("sgd", {"n_probe"}),
        ("direct", {"n_sums"}),
        ("falkon", set()),
        ("eigenpro1", LOW_RANK),
        ("eigenpro2", LOW_RANK),
        ("eigenpro4", LOW_RANK | {"period", "projection"}),
        ("block", {"block_size", "keep", "n_sample", "n_probe"}),
    ],
)
def test_plan_has_sizes_of_its_solver(solver: str, names: set[str]) -> None:
    in_place = solver in ("sgd", "eigenpro1", "eigenpro2")
    overrides = runs.METHODS[solver] | {"solver.block_size": "auto"}
    plan = plan_overview(opened(stream(solver), **overrides))
    every = {"solver", "batch_size", "loader_block_bytes", "loader_in_flight_bytes"}
    assert set(plan["sizes"]) == names | every
    text = plan_text(plan)
    assert f"{runs.N} centers (all)" in text if in_place else f"{runs.P} centers (random)" in text
    assert "loader_block      128 MiB\n" in text
    assert ("block_size: " in text) == (solver == "block")


@pytest.mark.parametrize("solver", ["direct", "block"])
@pytest.mark.parametrize("noisy", [False, True])
def test_plan_counts_batches_that_run(solver: str, noisy: bool, tmp_path: Path) -> None:
    overrides = {"solver.name": solver, "data.epochs": 3}
    source = stream() if noisy else array_source()
    plan = plan_overview(opened(source, **overrides))
    finished(runs.settings(tmp_path, **overrides), source=source)
    assert plan["batches"] == run_overview(tmp_path)["step"]
    once = solver == "direct" and not noisy
    assert plan["batches"] == plan["batches_per_epoch"] * (1 if once else 3)
    assert ("of one epoch: the others bring the same rows" in plan_text(plan)) == once


def test_plan_of_fourier_features_has_no_centers() -> None:
    overrides = {"model.features": "fourier", "model.n_features": 20, "model.n_centers": "auto"}
    plan = plan_overview(opened(**overrides))
    assert plan["centers"] == {}
    assert "20 random Fourier features, on cpu" in plan_text(plan)


def test_rpcholesky_candidates_depend_on_memory() -> None:
    def rows(budget: int, n: int = 10**6) -> int:
        problem = replace(PLAIN, p=1000, d=10, row_bytes=40, point_bytes=48, threads=1)
        return RPCholesky().plan(problem, n, budget).rows

    assert (rows(1 << 30), rows(90 << 20), rows(1)) == (8000, 4000, 2000)
    assert rows(1 << 30, 5000) == 5000
    big = ArraySource(np.zeros((40_000, 2), np.float32), np.arange(40_000) % 2)
    overrides = {"model.centers": "rpcholesky", "model.n_centers": 20_000}
    with pytest.raises(MemoryBudgetError, match="the smallest plan needs"):
        opened(big, **overrides, **{"run.memory": "1 GiB"})


@pytest.mark.parametrize("method", METHODS)
def test_fewer_rows_than_centers_takes_all_rows_with_warning(method: str) -> None:
    with pytest.warns(UserWarning, match="n_centers=136 is more than the 135 training rows"):
        run = opened(**{"model.centers": method, "model.n_centers": 136})
    assert run.problem.p == run.problem.n_rows == 135


@pytest.mark.parametrize("method", ["balanced", "kmeans", "rpcholesky"])
def test_eigenpro2_refuses_center_selectors(method: str) -> None:
    overrides = {"solver.name": "eigenpro2", "model.n_centers": "auto", "model.centers": method}
    with pytest.raises(ConfigError, match="takes all 135 training rows as centers"):
        opened(array_source(), **overrides)
