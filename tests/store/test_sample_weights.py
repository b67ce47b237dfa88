"""Check sample weights: whole numbers against repeated rows, 0 against absent rows, formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight

from streamkern import ConfigError, DataError, KernelClassifier, KernelRegressor, MixUp
from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.basics.errors import ResumeMismatchError
from streamkern.cli.main import run_command
from streamkern.ingest.ingest import ingest
from streamkern.solver.block import BlockMethod
from streamkern.solver.block_step import ORDER_STAGE, BlockSolver
from streamkern.solver.in_place import SGDSolver
from streamkern.solver.precondition.block import build_block
from streamkern.solver.precondition.low_rank import build_low_rank
from streamkern.solver.precondition.samples import Sample
from streamkern.store.sample_weights import as_weights, weight_factors
from streamkern.store.store import open_store
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.feed import Feed
from streamkern.stream.materialise import materialise
from streamkern.stream.sources.arrays import ArraySource
from streamkern.stream.sources.augmented import AugmentedSource
from streamkern.stream.sources.base import Source
from streamkern.stream.sources.mixture import MixtureSource
from streamkern.stream.sources.sampling import sample_rows
from streamkern.stream.sources.stores import ZarrSource
from streamkern.stream.sources.user import GeneratorSource
from streamkern.train.saved_model import load_model
from tests import reference as ref
from tests import solver_problems
from tests.conftest import MakeZarr
from tests.plans import solver_settings
from tests.raw_files import write_hdf5
from tests.runs import METHODS, arrays, assert_same_bits, final, finished, settings, stopped
from tests.store_damage import content

N = 60
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
IDS = np.arange(N) % 3
W = np.round(np.abs(np.float64(X[:, 0])) * 4) / 4  # a function of the row; some are 0
VALUES = np.stack([X[:, 0] ** 2, X[:, 1]], axis=1)
CLASSES = ("a", "b", "c")
# Of a store without weights, which another release must give again.
PLAIN_FINGERPRINT = "d199b6146d8be239841fe4718e50720e3faae5e95e7f11061265f193019ff250"


def weighted_source(**options: Any) -> ArraySource:
    """Return the rows with class ids and weights."""
    return ArraySource(X, IDS, classes=CLASSES, sample_weight=W, **options)


def weights_of_rows(rows: np.ndarray) -> np.ndarray:
    """Return the weights that were given to rows of X."""
    return np.asarray(np.round(np.abs(rows[:, 0]) * 4) / 4, np.float32)


# ---------------------------------------------------------------------- the minimised loss

KERNEL_ROWS, CENTERS = solver_problems.rows(0, 240, 3), solver_problems.rows(1, 10, 3)
TARGETS = np.stack([np.sin(KERNEL_ROWS[:, 0]), KERNEL_ROWS[:, 2] ** 2], axis=1)
TARGETS += 0.3 * solver_problems.rows(3, 240, 2)
COUNTS = np.random.default_rng(4).integers(0, 4, 240)


def repeated_rows() -> np.ndarray:
    """Return the normal equations of the problem in which row i occurs COUNTS[i] times."""
    K = np.repeat(ref.laplace(KERNEL_ROWS, CENTERS, 2.0), COUNTS, axis=0)
    Y = np.repeat(TARGETS, COUNTS, axis=0)
    return np.asarray(np.linalg.solve(K.T @ K, K.T @ Y))


def test_integer_weights_equal_repeated_rows() -> None:
    """Check the block solver at its end, with weights in the setup and in all steps."""
    op, w = solver_problems.operator(), COUNTS / COUNTS.mean()
    root = np.sqrt(w)
    Z = solver_problems.both(op, CENTERS)
    sizes = solver_problems.small_sizes(block_size=10, batch_size=240, n_sample=240, n_probe=240)
    options = solver_settings(average=False)
    both = solver_problems.SampleRows(KERNEL_ROWS, TARGETS, root)
    work = solver_problems.Work(
        op, Z, solver_problems.problem_of(CENTERS, 2, cycled=240), sizes, options, 3
    )
    setup = BlockMethod().compute(work, lambda: (both, both), solver_problems.quiet)
    solver = BlockMethod().assemble(work, setup)
    state = solver.init()
    for _ in range(100):
        loss = solver.step(state, Batch(KERNEL_ROWS, TARGETS, np.arange(240), w))
    K, truth = ref.laplace(KERNEL_ROWS, CENTERS, 2.0), repeated_rows()
    np.testing.assert_allclose(state.alpha, truth, rtol=1e-8)
    # The loss, too, equals the loss of the repeated rows.
    residual = np.repeat((K @ truth - TARGETS) ** 2, COUNTS, axis=0)
    np.testing.assert_allclose(loss[0].sum(), residual.sum() / COUNTS.sum(), rtol=1e-9)


@pytest.mark.parametrize(
    "name", [name for name in solver_problems.SOLVERS if name not in solver_problems.IN_PLACE]
)
def test_steps_of_weighted_rows_equal_repeated_rows(name: str) -> None:
    """Compare without leverages, because each of two copies has its own.

    Three passes over two batches: direct and FALKON have no weights before a pass ends, and FALKON
    only from the second one on.
    """
    case = solver_problems.make_case(solver_problems.operator(), name)
    for sketch in [key for key in case.setup.arrays if key.startswith("G.")]:
        del case.setup.arrays[sketch]
    # Steps as long as the top eigenvalue allows, whatever the number of rows is.
    alone = [
        rule | {"leverage": rule["lambda_1"], "mean": 0.0} for rule in case.setup.meta["rules"]
    ]
    case.setup.meta |= {"rules": alone, "batch_size": 80}
    weighted_solver, repeated_solver = case.solver(), case.solver()
    a, b = weighted_solver.init(), repeated_solver.init()
    for t in range(6):
        # Batches of the same total weight: a sum over a pass, too, equals the sum of repeated rows.
        batch, counts = np.arange(20) + 20 * (t % 2), np.roll(COUNTS[:20], 7 * (t % 2))
        repeated = np.repeat(batch, counts)
        w = counts / counts.mean()
        weighted_loss = weighted_solver.step(a, Batch(case.X[batch], case.Y[batch], batch, w))
        repeated_loss = repeated_solver.step(b, Batch(case.X[repeated], case.Y[repeated], repeated))
        np.testing.assert_allclose(weighted_loss, repeated_loss, rtol=1e-9)
        if t % 2:
            facts, truth = weighted_solver.end_epoch(a), repeated_solver.end_epoch(b)
            np.testing.assert_allclose(
                facts.get("residual", 0), truth.get("residual", 0), rtol=1e-6
            )
    weighted_solver.finish(a)
    repeated_solver.finish(b)
    assert (a.alpha != 0).all()
    np.testing.assert_allclose(a.alpha, b.alpha, rtol=1e-7, atol=1e-9)


def test_weighted_row_step_equals_formula() -> None:
    """Check the formula of a step with several blocks in float64, with rows damped by leverage."""
    case = solver_problems.make_case(solver_problems.operator(), "blocks")
    solver = case.solver()
    assert isinstance(solver, BlockSolver)
    batch, w = np.array([1, 2, 3, 5, 6]), np.array([0.0, 0.5, 1.0, 2.0, 1.5])
    pre, state = solver.preconditioner, solver.init()
    solver.step(state, Batch(case.X[batch], case.Y[batch], batch, w))
    K = ref.laplace(case.X[batch], case.Z, 2.0)
    r, alpha = -case.Y[batch], np.zeros((len(case.Z), 2))
    assert pre.sketches is not None
    leverages = [
        ((K[:, block] @ G) ** 2).sum(axis=1)
        for block, G in zip(pre.blocks, pre.sketches, strict=True)
    ]
    w = w / (1 + max(rule.eta(5) for rule in pre.rules) / 5 * w * sum(leverages))
    for b in np.random.default_rng([3, ORDER_STAGE, 0]).permutation(len(pre.blocks)):
        K_b, H, eta = K[:, pre.blocks[b]], pre.H[b], pre.rules[b].eta(5)
        u = eta / 5 * H.T @ H @ K_b.T @ (w[:, None] * r)
        alpha[pre.blocks[b]] -= u
        r = r + (eta / 5 * w * leverages[b])[:, None] * r - K_b @ u
    np.testing.assert_allclose(state.alpha, alpha, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["eigenpro2", "sgd"])
def test_weighted_step_in_place_equals_formula(name: str) -> None:
    """Check the formula of the step in float64; rows outside of the sample get no correction."""
    case = solver_problems.make_case(solver_problems.operator(), name)
    solver, batch = case.solver(), np.array([1, 2, 3, 5, 6])
    assert case.sample_rows is not None
    assert not set(batch) & set(case.sample_rows)
    state, w = solver.init(), np.array([0.0, 0.5, 1.0, 2.0, 1.5])
    solver.step(state, Batch(case.X[batch], case.Y[batch], batch, w))
    eta = solver.rules()[0].eta(5)
    np.testing.assert_allclose(state.alpha[batch], eta / 5 * w[:, None] * case.Y[batch], rtol=1e-12)


def test_eigenpro1_weighted_steps_equal_formula() -> None:
    """Check the formula of two steps in float64, with the preconditioner of the solver.

    The second one has residuals of weights that are not zero.
    """
    case = solver_problems.make_case(solver_problems.operator(), "eigenpro1")
    solver, w = case.solver(), np.array([0.0, 0.5, 1.0, 2.0, 1.5])
    assert isinstance(solver, SGDSolver)
    assert solver.P is not None
    K, (E, D) = ref.laplace(case.X, case.X, 2.0), (solver.P.E, solver.P.D)
    state, alpha, step = solver.init(), np.zeros((240, 2)), solver.rules()[0].eta(5) / 5
    for batch in (np.array([1, 2, 3, 5, 6]), np.array([2, 6, 40, 41, 200])):
        solver.step(state, Batch(case.X[batch], case.Y[batch], batch, w))
        g = step * w[:, None] * (K[batch] @ alpha - case.Y[batch])
        alpha[batch] -= g
        alpha += E @ (D[:, None] * (E.T @ (K[:, batch] @ g)))
        np.testing.assert_allclose(state.alpha, alpha, rtol=1e-9, atol=1e-12)
    assert (state.alpha != 0).all()


@pytest.mark.parametrize("name", solver_problems.SOLVERS)
def test_unit_weights_change_nothing(name: str) -> None:
    case = solver_problems.make_case(solver_problems.operator(), name)
    plain, with_ones = case.solver(), case.solver()
    a, b = plain.init(), with_ones.init()
    for t in range(4):
        batch = case.batch(t)
        plain_loss = plain.step(a, Batch(case.X[batch], case.Y[batch], batch))
        ones = np.ones(len(batch))
        weighted_loss = with_ones.step(b, Batch(case.X[batch], case.Y[batch], batch, ones))
        np.testing.assert_array_equal(plain_loss, weighted_loss)
    for name_, array in plain.arrays(a).items():
        np.testing.assert_array_equal(array, with_ones.arrays(b)[name_])


@pytest.mark.parametrize("name", solver_problems.SOLVERS)
def test_zero_weight_rows_have_no_effect(name: str) -> None:
    """Compare up to the number of rows m of the batch, which determines the step eta(m) / m."""
    case = solver_problems.make_case(solver_problems.operator(), name)
    batch = case.batch(0)
    w = np.ones(len(batch))
    w[3:7] = 0
    one, two = case.solver(), case.solver()
    a, b = one.init(), two.init()
    wild = case.Y[batch].copy()
    wild[3:7] = 1e6
    one.step(a, Batch(case.X[batch], case.Y[batch], batch, w))
    two.step(b, Batch(case.X[batch], wild, batch, w))
    for key, array in one.arrays(a).items():
        np.testing.assert_array_equal(array, two.arrays(b)[key])


def test_step_rules_equal_those_of_weighted_stream() -> None:
    """Compare with float64 values from rows scaled by the root of their weights."""
    op, w = solver_problems.operator(), COUNTS / COUNTS.mean()
    root, sample = np.sqrt(w), solver_problems.rows(9, 300, 3)
    ones = np.ones(300)
    S, P = (solver_problems.both(op, A) for A in (sample, KERNEL_ROWS))
    first, second = Sample(S, np.ones((300, 2)), ones), Sample(P, TARGETS, root)
    inputs = solver_problems.block_inputs(op, CENTERS, first, second)
    block = build_block(inputs, [slice(0, 10)], damping=1e-4)
    phi = ref.laplace(KERNEL_ROWS, CENTERS, 2.0) @ block.H[0].T * root[:, None]
    np.testing.assert_allclose(block.rules[0].leverage, (phi**2).sum(1).max(), rtol=1e-9)
    low, high = ref.held_out_lambda_1(phi)
    assert low * (1 - 1e-9) <= block.rules[0].lambda_1 <= high * (1 + 1e-9)
    # Where the probe is all rows, there are no others.
    inputs = replace(inputs, probe=replace(second, first_fresh=100))
    full = build_block(inputs, [slice(0, 10)], damping=1e-4)
    np.testing.assert_allclose(full.rules[0].lambda_1, np.linalg.norm(phi, 2) ** 2 / 240, rtol=1e-6)


def test_start_equals_weighted_sample_solution() -> None:
    op, w = solver_problems.operator(), COUNTS / COUNTS.mean()
    sample = Sample(solver_problems.both(op, KERNEL_ROWS), TARGETS, np.sqrt(w))
    inputs = solver_problems.block_inputs(op, CENTERS, sample, sample)
    block = build_block(inputs, [slice(0, 10)], damping=1e-3)
    K = ref.laplace(KERNEL_ROWS, CENTERS, 2.0)
    covariance = K.T @ (w[:, None] * K) / 240 + block.mu * ref.laplace(CENTERS, CENTERS, 2.0)
    truth = np.linalg.solve(covariance, K.T @ (w[:, None] * TARGETS) / 240)
    assert block.start is not None
    np.testing.assert_allclose(block.start, truth, rtol=1e-7)


def test_eigensystem_equals_that_of_repeated_rows() -> None:
    op = solver_problems.operator()
    root, R = np.sqrt(COUNTS / COUNTS.mean()), np.repeat(KERNEL_ROWS, COUNTS, axis=0)
    P = solver_problems.both(op, KERNEL_ROWS)
    low = build_low_rank(op, P, P, level=20, sample_root=root, root=root)
    lam, E = (a[..., ::-1] for a in np.linalg.eigh(ref.laplace(R, R, 2.0) / len(R)))
    D = (1 - lam[20] / lam[:20]) / lam[:20] / len(R)
    E = ref.laplace(CENTERS, R, 2.0) @ E[:, :20]
    ours = ref.laplace(CENTERS, KERNEL_ROWS, 2.0) @ low.E
    np.testing.assert_allclose(ours * low.D @ ours.T, E * D @ E.T, rtol=1e-4, atol=1e-6)
    # On the rows it was made from, every direction above the tail is brought down to the tail.
    np.testing.assert_allclose(low.rule.lambda_1, lam[20], rtol=1e-3)


# ------------------------------------------------------------------------------ on the way


def batches(source: Source, threads: int = 2, class_weight: Any = None) -> list[Any]:
    """Return the batches of an epoch, as a training gets them."""
    factors = weight_factors(source, class_weight)
    all_batches = []
    with (
        BatchReader(source, batch_size=13, seed=1, threads=threads, block_bytes=600) as loader,
        Feed(loader, Backend(threads=1), dtype=np.float64, seed=1, factors=factors) as feed,
    ):
        for b in feed.epoch(0):
            w = None if b.w is None else b.w.copy()
            all_batches.append(
                replace(b, X=b.X.copy(), Y=b.Y.copy(), row_ids=b.row_ids.copy(), w=w)
            )
    return all_batches


def test_weights_have_mean_one_over_an_epoch() -> None:
    sources: list[Source] = [
        weighted_source(unit_rows=7),
        ArraySource(X, VALUES, sample_weight=W, unit_rows=7),
        AugmentedSource(weighted_source(unit_rows=7), 3, []),
        MixtureSource([weighted_source(unit_rows=7), weighted_source(unit_rows=20)]),
        MixtureSource(
            [weighted_source(unit_rows=6), weighted_source(unit_rows=6)], [2, 1], n_rows=180
        ),
    ]
    for source in sources:
        all_batches = batches(source)
        w = np.concatenate([b.w for b in all_batches])
        rows = np.concatenate([b.X for b in all_batches])
        np.testing.assert_allclose(w.mean(), 1, rtol=1e-12)
        row_weights = np.float64(weights_of_rows(rows))
        np.testing.assert_allclose(w / w.sum(), row_weights / row_weights.sum(), rtol=1e-12)


def test_weights_do_not_depend_on_threads() -> None:
    one, four = (
        batches(weighted_source(unit_rows=7), threads=k, class_weight="balanced") for k in (1, 4)
    )
    for a, b in zip(one, four, strict=True):
        assert a.w.tobytes() == b.w.tobytes()
        assert a.X.tobytes() == b.X.tobytes()


def test_unweighted_source_has_no_weights() -> None:
    assert weight_factors(ArraySource(X, IDS, classes=CLASSES)) is None
    assert all(b.w is None for b in batches(ArraySource(X, IDS, classes=CLASSES)))


def test_mixup_mixes_weights_like_targets() -> None:
    """Check a target that equals the weight before and after mix-up."""
    source = ArraySource(X, W[:, None], [MixUp(0.5)], sample_weight=W, unit_rows=7)
    for b in batches(source):
        np.testing.assert_allclose(b.w * W.mean(), b.Y[:, 0], rtol=1e-12)


def test_sample_keeps_weights_of_its_rows() -> None:
    block = sample_rows(weighted_source(unit_rows=7), 25, 3)
    np.testing.assert_array_equal(block.w, weights_of_rows(block.X))


# --------------------------------------------------------------------------- class weights

labels = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(np.array)


@given(labels)
def test_balanced_class_weights_equal_scikit_learn(y: np.ndarray) -> None:
    source = ArraySource(np.zeros((len(y), 1)), y, classes=("a", "b", "c", "d"))
    factors = weight_factors(source, "balanced")
    assert factors is not None
    present = np.unique(y)
    expected = compute_class_weight("balanced", classes=present, y=y)
    np.testing.assert_allclose(factors[present], expected, rtol=1e-12)


def test_class_weights_multiply_sample_weights() -> None:
    w = W + 0.5
    source = ArraySource(X, IDS, classes=CLASSES, sample_weight=w)
    all_batches = batches(source, class_weight={"a": 3.0, "c": 0.0})
    expected = (w * np.array([3.0, 1.0, 0.0])[IDS]).astype(np.float32)
    rows = np.concatenate([b.row_ids for b in all_batches])
    np.testing.assert_allclose(
        np.concatenate([b.w for b in all_batches]), expected[rows] / expected.mean(), rtol=1e-6
    )


@pytest.mark.parametrize(
    "w", [np.ones(3), np.ones((4, 1)), np.array(["a"] * 4), [1, 2, -1, 0], [1, np.nan, 1, 1]]
)
def test_invalid_weights_are_refused(w: Any) -> None:
    with pytest.raises(DataError, match="weight"):
        as_weights(w, 4, "X")
    with pytest.raises(DataError, match="weight"):
        ArraySource(X[:4], IDS[:4], sample_weight=w)


# ---------------------------------------------------------------------------------- stores


def write_store(tmp_path: Path, **options: Any) -> Any:
    """Ingest the rows with their weights; return the spec of the store."""
    return ingest(
        X, tmp_path / "s", y=options.pop("y", IDS), sample_weight=W, chunk_mb=2**-13, **options
    )


@pytest.mark.parametrize("y", [IDS, VALUES], ids=["classes", "values"])
def test_store_keeps_weights_with_rows(tmp_path: Path, y: np.ndarray) -> None:
    spec = write_store(tmp_path, y=y)
    store = open_store(tmp_path / "s")
    store.verify()
    assert store.n_chunks > 3
    plain = zarr.open_group(str(tmp_path / "s"), mode="r")
    w: Any = plain["w"]
    assert (w.shape, w.dtype, w.chunks) == ((N,), np.float32, plain["y"].chunks[:1])  # type: ignore[union-attr]
    assert w.metadata.dimension_names == ("row",)
    np.testing.assert_array_equal(w[:], weights_of_rows(np.asarray(plain["X"])))  # type: ignore[arg-type]
    total = [W[k == IDS].sum() for k in range(3)] if y is IDS else [W.sum()]
    np.testing.assert_allclose(spec.weight_totals, total)
    assert spec.fingerprint == store.spec.fingerprint
    for i in range(store.n_chunks):
        rows, _, weights = store.read_weighted_chunk(i)
        np.testing.assert_array_equal(weights, weights_of_rows(rows))
    assert open_store(tmp_path / "s", y=None).read_weighted_chunk(0)[2] is None


def test_unweighted_store_has_no_weight_array(tmp_path: Path) -> None:
    rows = (np.arange(240).reshape(60, 4) % 251).astype(np.uint8)
    spec = ingest(rows, tmp_path / "s", y=np.arange(60) % 3, chunk_mb=2**-14)
    assert spec.fingerprint == PLAIN_FINGERPRINT
    assert not (tmp_path / "s" / "w").exists()


def test_altered_weight_is_detected(tmp_path: Path) -> None:
    spec = write_store(tmp_path)
    doubled_spec = ingest(X, tmp_path / "o", y=IDS, sample_weight=2 * W, chunk_mb=2**-13)
    assert doubled_spec.fingerprint != spec.fingerprint
    array: Any = zarr.open_group(str(tmp_path / "s"), mode="r+")["w"]
    array[3] = array[3] + 1
    with pytest.raises(DataError, match=r"w/c/0 of .* not the chunk that was written there"):
        open_store(tmp_path / "s").verify()


def csv(path: Path) -> dict[str, Any]:
    """Write the rows as CSV; return the arguments that ingest them with weights."""
    table = np.column_stack([X, W, IDS])
    fmt = ["%.9g"] * 4 + ["%d"]
    np.savetxt(path / "d.csv", table, fmt, ",", header="p,q,r,weight,y", comments="")
    return {"inputs": path / "d.csv", "sample_weight": "weight", "dtype": "f4"}


def parquet(path: Path) -> dict[str, Any]:
    """Write the rows as Parquet, where the weights have the column 2."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    columns = {"p": X[:, 0], "q": X[:, 1], "weight": W, "r": X[:, 2], "y": IDS}
    files.write_table(pyarrow.table(columns), path / "d.parquet")
    return {"inputs": path / "d.parquet", "sample_weight": 2}


def npy(path: Path) -> dict[str, Any]:
    """Write the rows to three files."""
    for name, array in (("X", X), ("y", IDS), ("w", W)):
        np.save(path / f"{name}.npy", array)
    return {"inputs": path / "X.npy", "y": path / "y.npy", "sample_weight": path / "w.npy"}


def npz(path: Path) -> dict[str, Any]:
    """Write the rows to one file."""
    np.savez(path / "d.npz", X=X, y=IDS, importance=W)
    return {"inputs": path / "d.npz", "sample_weight": "importance"}


def hdf5(path: Path) -> dict[str, Any]:
    """Write the rows to an HDF5 file."""
    inputs = write_hdf5(path / "d.h5", X=X, y=IDS, importance=W)
    return {"inputs": inputs, "sample_weight": "importance"}


def write_foreign(path: Path) -> dict[str, Any]:
    """Write the rows to a group of zarr."""
    group = zarr.create_group(str(path / "d.zarr"))
    for name, array in (("X", X), ("y", IDS), ("importance", W)):
        group.create_array(name, data=array)
    return {"inputs": path / "d.zarr", "sample_weight": "importance"}


def lazy_blocks(path: Path) -> dict[str, Any]:
    """Return the rows as blocks in memory."""
    return {"inputs": [(X[k : k + 25], IDS[k : k + 25], W[k : k + 25]) for k in (0, 25, 50)]}


@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("form", [csv, parquet, npy, npz, hdf5, write_foreign, lazy_blocks])
def test_every_format_gives_the_same_store(
    tmp_path: Path, form: Callable[[Path], dict[str, Any]]
) -> None:
    full = write_store(tmp_path)
    spec = ingest(out_url=tmp_path / "other", chunk_mb=2**-13, **form(tmp_path))
    assert spec.fingerprint == full.fingerprint
    assert content(tmp_path / "other") == content(tmp_path / "s")
    reingested = ingest(tmp_path / "other", tmp_path / "again", shuffle=False, chunk_mb=2**-13)
    assert reingested.weight_totals == spec.weight_totals


def test_interrupted_ingest_resumes_with_weights(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(phase: str, n_done: int, rows: int | None) -> None:
        if phase == "write" and n_done > 30:
            raise StopError

    uninterrupted = write_store(tmp_path)
    settings_: dict[str, Any] = {"y": IDS, "chunk_mb": 2**-13}
    with pytest.raises(StopError):
        ingest(X, tmp_path / "cut", sample_weight=W, progress=stop, **settings_)
    with pytest.raises(ResumeMismatchError, match="inputs differ"):
        ingest(X, tmp_path / "cut", **settings_)
    spec = ingest(X, tmp_path / "cut", sample_weight=W, **settings_)
    assert spec.fingerprint == uninterrupted.fingerprint


@pytest.mark.parametrize("value", ["-0.5", "nan", "much"])
def test_invalid_weight_is_named(tmp_path: Path, value: str) -> None:
    (tmp_path / "d.csv").write_text(f"a,w,y\n1,0.5,0\n2,{value},1\n")
    with pytest.raises(DataError, match="weight"):
        ingest(tmp_path / "d.csv", tmp_path / "s", sample_weight="w")
    assert not (tmp_path / "s").exists()


def test_invalid_weight_after_dropped_row_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,w,y\n1,0.5,0.5\n2,1,\n3,1,1.5\n4,-1,2.5\n")
    with pytest.raises(DataError, match="row 3, is -1"):
        ingest(tmp_path / "d.csv", tmp_path / "s", sample_weight="w", drop_missing_targets=True)


def test_missing_or_reused_weight_column_is_refused(tmp_path: Path) -> None:
    table, arrays_ = csv(tmp_path)["inputs"], npz(tmp_path)["inputs"]
    for given_, name, message in [
        (table, "y", "column 'y' of .* is requested twice"),
        (table, "age", "has no column 'age'"),
        (arrays_, "age", "has no array 'age'; it has X, y, importance"),
        (
            arrays_,
            W,
            "the sample weights of .* must be one of its arrays or columns; give its name",
        ),
        ([(X, IDS)], W, "blocks must be pairs"),
        ([(X[:9], IDS[:9], W[:9]), (X, IDS)], None, "some blocks of rows have sample weights"),
    ]:
        with pytest.raises((ConfigError, DataError), match=message):
            ingest(given_, tmp_path / "s", sample_weight=name)
    with pytest.raises(DataError, match=r"sample weights of the array have shape \(3,\)"):
        ingest(X, tmp_path / "s", y=IDS, sample_weight=W[:3])
    assert not (tmp_path / "s").exists()


def test_materialised_store_keeps_weights(tmp_path: Path) -> None:
    write_store(tmp_path)
    source = AugmentedSource(ZarrSource(tmp_path / "s"), 2, [MixUp(1.0)])
    spec = materialise(source, tmp_path / "m", chunk_mb=2**-13)
    assert spec.weight_totals is not None
    plain = AugmentedSource(ZarrSource(tmp_path / "s"), 2, [])
    materialise(plain, tmp_path / "p", chunk_mb=2**-13)
    for i in range((store := open_store(tmp_path / "p")).n_chunks):
        rows, _, w = store.read_weighted_chunk(i)
        np.testing.assert_array_equal(w, weights_of_rows(rows))


def test_foreign_store_names_its_weights(make_zarr: MakeZarr) -> None:
    path = make_zarr({"X": X, "y": IDS, "importance": W})
    assert not ZarrSource(path).weighted
    source = ZarrSource(path, w="importance")
    np.testing.assert_allclose(source.totals, [W[k == IDS].sum() for k in range(3)])
    np.testing.assert_array_equal(
        source.read_unit(0, 0, 0).w, weights_of_rows(source.read_unit(0, 0, 0).X)
    )
    source.store.check_unchanged()
    config = settings(**{"data.train": str(path), "data.sample_weight": "importance"})
    plain = settings(**{"data.train": str(path)})
    small = {"model.n_centers": 20, "data.epochs": 1}
    weighted_run, plain_run = (finished(c.with_overrides(small)) for c in (config, plain))
    assert not np.array_equal(weighted_run.model.weights, plain_run.model.weights)


def test_ingest_command_accepts_weights(tmp_path: Path) -> None:
    full = write_store(tmp_path)
    table, out = csv(tmp_path)["inputs"], tmp_path / "out"
    chosen = ("--sample-weight", "weight", "--chunk-mb", str(2**-13))
    assert run_command(["ingest", str(table), str(out), *chosen]) == 0
    assert open_store(out).spec.fingerprint == full.fingerprint
    assert run_command(["info", "--verify", str(out)]) == 0


def test_mixture_of_weighted_and_unweighted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source 2 of the mixture has weighted False and"):
        MixtureSource([weighted_source(), ArraySource(X, IDS, classes=CLASSES)])


# ------------------------------------------------------------------------------------ runs


@pytest.mark.full(all_but_every=4)
@pytest.mark.parametrize("method", METHODS)
def test_resumed_weighted_run_has_same_bits(method: str, tmp_path: Path) -> None:
    def source() -> Source:
        base = ArraySource(
            *arrays(), classes=("ant", "bee", "cat"), unit_rows=16, sample_weight=np.arange(135) % 4
        )
        in_place = METHODS[method]["solver.name"] in solver_problems.IN_PLACE
        return base if in_place else AugmentedSource(base, 1, [MixUp(0.3)])

    chosen = METHODS[method] | {"data.class_weight": "balanced"}
    if chosen["solver.name"] == "block":  # 135 rows show no noise, and 60 centers learn it by heart
        chosen["solver.damping"] = 1e-2
    finished(settings(tmp_path / "whole", **chosen), source=source())
    stopped(settings(tmp_path / "cut", **chosen), 5, source=source())
    finished(settings(tmp_path / "cut", **chosen), source=source())
    assert_same_bits(final(tmp_path / "cut"), final(tmp_path / "whole"))


def test_evaluation_uses_sample_weights_only(tmp_path: Path) -> None:
    write_store(tmp_path)
    config = settings(tmp_path / "run", **{"data.train": str(tmp_path / "s"), "data.epochs": 1})
    config = config.with_overrides({"model.n_centers": 20, "data.class_weight": {"0": 5.0}})
    finished(config)
    model = load_model(tmp_path / "run")
    store = ZarrSource(tmp_path / "s")
    block = sample_rows(store, N, 0)
    F, Y = model.values(block.X), np.eye(3)[block.y]
    w = weights_of_rows(block.X) / weights_of_rows(block.X).sum()
    metrics = model.evaluate(store)
    np.testing.assert_allclose(metrics["mse"], (w @ (F - Y) ** 2).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], w @ (F.argmax(1) == block.y), rtol=1e-6)
    model.backend.close()


# ------------------------------------------------------------------------------ generators


def generator_source(
    w: Any = None, totals: Any = None, y: Any = IDS, **options: Any
) -> GeneratorSource:
    """Return the rows of X, y and w, made in units of 16."""

    def fn(seed: int, epoch: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
        return tuple(a[start:stop] for a in (X, y, w) if a is not None)

    c = 3 if y is IDS else 2
    return GeneratorSource(
        fn, N, X.shape[1:], X.dtype, c, CLASSES if y is IDS else None, block_rows=16,
        weight_totals=totals, **options,
    )  # fmt: skip


def test_generator_yields_weights() -> None:
    """Check that a run equals a run on arrays, also with augmentation and class weights."""
    array = weighted_source(unit_rows=16)
    totals = np.bincount(IDS, W, minlength=3)
    config = settings(**{"model.n_centers": 20, "data.class_weight": "balanced"})
    generator = generator_source(W, totals)
    generator.repeats = True  # as arrays do, which decides about steps
    for make in (lambda s: s, lambda s: AugmentedSource(s, 2, [MixUp(0.3)])):
        model_weights = [
            finished(config, source=make(source)).model.weights for source in (array, generator)
        ]
        np.testing.assert_array_equal(*model_weights)
    mixed = MixtureSource([array, generator_source(W, totals)])
    np.testing.assert_allclose(mixed.totals, 2 * totals)
    values = generator_source(W, W.sum(), VALUES)
    assert values.describe()["weight_totals"] == [W.sum()]
    assert "weight_totals" not in generator_source().describe()
    block = sample_rows(values, 30, 0)
    np.testing.assert_array_equal(block.w, np.float32(W)[block.row_ids])


@pytest.mark.parametrize(
    ("totals", "message"),
    [
        ([1.0, 2.0], "must be 3 numbers, one for each class, 0 or above and not all 0"),
        (7.0, "must be 3 numbers"),
        ([1, -1, 1], "must be 3 numbers"),
        ([0, 0, 0], "not all 0"),
        ([1, np.nan, 1], "0 or above"),
        (["a", "b", "c"], "must be 3 numbers"),
    ],
)
def test_invalid_generator_totals_are_refused(totals: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generator_source(W, totals)


def test_generator_weights_are_validated() -> None:
    with pytest.raises(DataError, match=r"\(rows 16 to 31\) returned 3 arrays; return \(X, y, w\)"):
        generator_source(W).read_unit(1, 0, 0)
    negative_weights = np.where(np.arange(N) == 18, -1.0, 1.0)
    with pytest.raises(DataError, match=r"sample weight of unit 1 of generator .* row 18, is -1"):
        generator_source(negative_weights, [1, 1, 1]).read_unit(1, 0, 0)
    with pytest.raises(DataError, match=r"have shape \(16, 1\)"):
        generator_source(negative_weights[:, None], [1, 1, 1]).read_unit(1, 0, 0)


# ------------------------------------------------------------------------------ estimators


def test_weighted_array_and_store_train_equally(tmp_path: Path) -> None:
    w = W + 0.25  # rows of weight 0 are left out of an array, and read from a store
    ingest(X, tmp_path / "s", y=VALUES, sample_weight=w, shuffle=False)
    make = KernelRegressor(bandwidth=2.0, epochs=5, threads=1, n_centers=20, batch_size=20)
    from_store = make.fit(tmp_path / "s").dual_coef_
    np.testing.assert_array_equal(from_store, make.fit(X, VALUES, w).dual_coef_)
    assert not np.array_equal(from_store, make.fit(X, VALUES).dual_coef_)
    # One number for all rows is none at all, up to rounding; so is another scale.
    plain = make.fit(X, VALUES).dual_coef_
    np.testing.assert_allclose(make.fit(X, VALUES, 7.0).dual_coef_, plain, rtol=1e-4, atol=1e-5)


def test_balanced_classifier_equals_balanced_weights() -> None:
    y = np.where(X[:, 0] > 0.7, "rare", "common")
    options: dict[str, Any] = {"bandwidth": 2.0, "epochs": 5, "threads": 1, "n_centers": 20}
    balanced = KernelClassifier(class_weight="balanced", **options).fit(X, y)
    weights = compute_class_weight("balanced", classes=balanced.classes_, y=y)
    table = dict(zip(balanced.classes_, weights, strict=True))
    by_table = KernelClassifier(class_weight=table, **options).fit(X, y)
    by_row = KernelClassifier(**options).fit(X, y, [table[label] for label in y])
    for model in (by_table, by_row):
        np.testing.assert_allclose(model.dual_coef_, balanced.dual_coef_, rtol=1e-3, atol=1e-4)
    plain = KernelClassifier(**options).fit(X, y)
    rare = y == "rare"
    assert (balanced.predict(X)[rare] == "rare").mean() >= (plain.predict(X)[rare] == "rare").mean()


@pytest.mark.parametrize("w", [np.ones(3), -np.ones(N), np.full(N, np.nan), np.zeros(N)])
def test_estimator_refuses_invalid_weights(w: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"(?i)weight|NaN"):
        KernelRegressor(epochs=1, threads=1).fit(X, VALUES, w)


def test_unsupported_weightings_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path)
    with pytest.raises(ConfigError, match="own targets and weights; leave sample_weight out"):
        KernelClassifier().fit(tmp_path / "s", sample_weight=W)
    with pytest.raises(ConfigError, match="class_weight cannot be used with partial_fit"):
        KernelClassifier(class_weight="balanced").partial_fit(X, IDS)
    with pytest.raises(ConfigError, match=r'^class_weight=.* must be "balanced" or a table'):
        KernelClassifier(class_weight="fair").fit(X, IDS)
