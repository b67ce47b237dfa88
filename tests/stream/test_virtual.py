"""Count the operations of a GPU, and check that their order is safe, on a virtual device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkern.backend.base import Backend
from streamkern.backend.batch import Batch
from streamkern.backend.host_memory import NO_COPIES
from streamkern.backend.staging_ring import PinnedMemory, Ring, Transfers
from streamkern.config.run_config import RunConfig
from streamkern.config.solver import SolverConfig
from streamkern.solver.base import Solver, State
from streamkern.solver.method import Setup
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.feed import Feed
from streamkern.stream.sources.arrays import ArraySource
from streamkern.train.resolve import resolved_run as opening
from streamkern.train.train import train
from tests.plans import solver_settings
from tests.solver_problems import (
    GRID,
    IN_PLACE,
    RIDGED,
    SOLVERS,
    Case,
    both,
    make_case,
    operator,
    rows,
)
from tests.virtual_gpu import Counts, DeviceArray, Event, PlainBackend, Stream, VirtualBackend

CASES = {
    **{name: (name, {}) for name in SOLVERS if name not in IN_PLACE},
    "eigenpro4, resident": ("eigenpro4", {"projection": "resident"}),
    "eigenpro4, inexact": ("eigenpro4", {"projection": "inexact"}),
}
N_WARM_UP_STEPS, N_COUNTED_STEPS = 7, 9
"""The first steps allocate every buffer; the operations of the next ones are counted."""


def case_of(name: str, precision: str, options: SolverConfig) -> Case:
    """Return a solver of CASES with its setup made by NumPy."""
    op = operator(precision=precision, backend=PlainBackend())
    solver, changes = CASES[name]
    return make_case(op, solver, options=options, **changes)


def solver_on_device(case: Case, precision: str, seed: int) -> tuple[VirtualBackend, Solver]:
    """Return a virtual device and the solver of `case` on it."""
    backend = VirtualBackend(seed)
    arrays = {key: backend.asarray(a) for key, a in case.setup.arrays.items()}
    op = operator(precision=precision, backend=backend)
    return backend, case.solver(Setup(arrays, case.setup.meta), op)


def take_steps(case: Case, solver: Solver, state: State, upload: list[Any], steps: range) -> None:
    """Queue steps on uploaded batches; an epoch ends after the fourth.

    upload : functions that upload X and Y
    """
    for t in steps:
        ids = case.batch(t)
        host = (case.X[ids].astype(solver.op.dtype), case.Y[ids].astype(solver.op.dtype))
        X, Y = (send(a) for send, a in zip(upload, host, strict=True))
        solver.step(state, Batch(X, Y, ids))
        if t == 3:
            solver.end_epoch(state)


@pytest.mark.full(all_but_every=5)
@pytest.mark.parametrize("precision", ["float64", "exact", "high", "integer"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_steps_need_no_allocation_transfer_or_wait(name: str, precision: str) -> None:
    """Compare the bits with NumPy's as well, for three random orders of the streams."""
    options = solver_settings(damping=1e-3, ridge=0.01 if name in RIDGED else 0.0)
    case = case_of(name, precision, options)
    numpy_solver = case.solver()
    numpy_state = numpy_solver.init()
    n_steps = N_WARM_UP_STEPS + N_COUNTED_STEPS
    take_steps(case, numpy_solver, numpy_state, [np.asarray] * 2, range(n_steps))
    for seed in range(3):
        backend, solver = solver_on_device(case, precision, seed)
        rings = [backend.uploader() for _ in "XY"]
        upload = [ring.upload for ring in rings]
        state = solver.init()
        take_steps(case, solver, state, upload, range(N_WARM_UP_STEPS))
        backend.device.counts = counts = Counts()
        take_steps(case, solver, state, upload, range(N_WARM_UP_STEPS, n_steps))
        assert counts == Counts(sent=2 * N_COUNTED_STEPS, pageable=2 * N_COUNTED_STEPS)
        for array_name, expected in numpy_solver.arrays(numpy_state).items():
            actual = backend.to_host(solver.arrays(state)[array_name])
            np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(backend.to_host(solver.losses), numpy_solver.losses)
        for ring in rings:
            ring.close()


class FloatOperands(PlainBackend):
    """A backend that computes the same products with operands of float32, as on the CPU."""

    operand_dtype = Backend.operand_dtype
    gemm = Backend.gemm


@pytest.mark.parametrize("precision", ["high", "fast", "integer"])
def test_half_precision_operands_are_exact(precision: str) -> None:
    """Check that the operands fit half precision, so that float32 emulates the products exactly.

    Eight features need no padding: zeros would change the order of the sums.
    """
    results = []
    for backend in (PlainBackend(), FloatOperands()):
        op = operator(precision=precision, backend=backend, shift=rows(2, 8))
        A, B = (both(op, GRID.offset + GRID.step * np.rint(40 * rows(i, 50, 8))) for i in (0, 1))
        results.append((op.matrix(A, B), op.gram(A)))
    for half, single in zip(*results, strict=True):
        np.testing.assert_array_equal(half, single)


@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_batch_is_uploaded_once_and_transformed_in_place(dtype: Any, classes: bool) -> None:
    rng = np.random.default_rng(0)
    X = rng.integers(0, 256, (200, 2, 2, 3)).astype(dtype)
    y = rng.integers(0, 3, 200) if classes else rng.normal(size=(200, 3)).astype(np.float32)
    for seed in range(5):
        backend = VirtualBackend(seed)
        totals = [backend.device.empty((20, 15), np.float32) for _ in range(10)]
        with (
            BatchReader(ArraySource(X, y), batch_size=20, seed=0) as reader,
            Feed(reader, backend, dtype=np.float32, seed=0) as feed,
        ):
            batch_digests = []
            for i, batch in enumerate(feed.epoch(0)):
                if i == 2:
                    backend.device.counts = counts = Counts()
                totals[i][:, :12] = batch.X
                totals[i][:, 12:] = batch.Y
                batch_digests.append(batch.row_ids.copy())
        assert counts == Counts(sent=3 * 7, syncs=3)  # a wait for each ring's copies at the end
        for ids, total in zip(batch_digests, totals, strict=True):
            Y = np.eye(3)[y[ids]] if classes else y[ids]
            truth = np.concatenate([X[ids].reshape(20, 12), Y], axis=1)
            np.testing.assert_array_equal(backend.to_host(total), truth.astype(np.float32))


# --- memory -------------------------------------------------------------------------------------


class MeasuredBackend(VirtualBackend):
    """A backend with large tiles, which records the memory during training."""

    tile_rows, prepare_rows = 512, 256
    tile_cols = wide_tile_cols = 512
    training_bytes = 0

    def memory_available(self) -> int:
        return 1 << 30

    def uploader(self, depth: int = 3) -> Ring:
        ring = super().uploader(depth)
        upload = ring.upload

        def record_memory_and_upload(host: np.ndarray) -> Any:
            self.training_bytes = max(self.training_bytes, self.device.live_bytes)
            return upload(host)

        ring.upload = record_memory_and_upload  # type: ignore[method-assign]
        return ring


@pytest.mark.slow
@pytest.mark.full(all_but_every=7)
@pytest.mark.parametrize("precision", ["exact", "integer"])
@pytest.mark.parametrize(
    "solver",
    [
        {"name": "block"},
        {"name": "block", "ridge": 1e-3},
        {"name": "block", "block_size": 300},
        {"name": "direct"},
        {"name": "falkon"},
        {"name": "eigenpro4", "n_nystrom": 500, "projection": "exact"},
        {"name": "eigenpro4", "n_nystrom": 500, "projection": "resident"},
        {"name": "eigenpro4", "n_nystrom": 500, "projection": "inexact"},
    ],
    ids=lambda solver: " ".join(map(str, solver.values())),
)
def test_device_memory_stays_within_plan(
    solver: dict[str, Any], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a whole run with evaluations, and its training alone."""
    backends: list[MeasuredBackend] = []

    def get_backend(*settings: Any) -> MeasuredBackend:
        backends.append(MeasuredBackend())
        return backends[-1]

    monkeypatch.setattr(opening, "get_backend", get_backend)
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 256, (9000, 12, 12, 1)).astype(np.uint8), rng.integers(0, 10, 9000)
    source, test = ArraySource(X, y), ArraySource(X[:2000], y[:2000])
    config = RunConfig.from_tables(
        {
            "data": {"epochs": 2},
            "model": {"bandwidth": 800.0, "n_centers": 1500},
            "solver": solver,
            "run": {"device": "gpu", "precision": precision},
        }
    )
    planned = opening.open_run(config, opening.RunInputs(source)).buffers
    train(config, source=source, test=test)
    # The contract is 10 %. The plan of a setup may be larger than it: its parts follow each other.
    assert backends[-1].device.peak <= 1.1 * planned.peak
    if solver["name"] == "block":
        assert backends[-1].device.peak >= 0.9 * planned.peak
    # The memory is recorded at uploads of training, when no rows are being evaluated.
    evaluated = [
        size for _, buffer_name, size in planned.lines if buffer_name == "rows being evaluated"
    ]
    expected = planned.total("train") - evaluated[0]
    assert backends[-1].training_bytes <= 1.1 * expected
    # `direct` and `falkon` take most memory between two epochs, or in the setup.
    uses_setup_peak = solver["name"] in ("direct", "falkon")
    peak_bytes = backends[-1].device.peak if uses_setup_peak else backends[-1].training_bytes
    assert peak_bytes >= 0.8 * expected
    on_host = {buffer_name for phase, buffer_name, _ in planned.lines if phase == "host"}
    assert "loader, its shuffle blocks, pinned" in on_host
    pinned = [size for _, name, size in planned.lines if name.endswith("blocks, pinned")]
    # The last batch of an epoch crosses no edge of a block here, so there is no partial batch.
    assert 0.9 * pinned[0] <= backends[-1].device.pinned_peak <= pinned[0]


# --- the ring -----------------------------------------------------------------------------------


def run_ring(backend: VirtualBackend, transfers: Transfers, depth: int, sizes: list[int]) -> bool:
    """Return whether every batch was complete when its steps ran.

    Batches come from two buffers of the host in turn.
    """
    ring, memory = Ring(backend, transfers, depth), PinnedMemory(transfers)
    rng = np.random.default_rng(1)
    buffers = [memory.empty((max(sizes), 3), np.float32) for _ in range(2)]
    copied = [NO_COPIES] * 2
    batches = [rng.normal(size=(size, 3)).astype(np.float32) for size in sizes]
    results = [backend.device.empty((2, size, 3), np.float32) for size in sizes]
    for i, (host, result) in enumerate(zip(batches, results, strict=True)):
        copied[i % 2].synchronize()
        host_buffer = buffers[i % 2][: len(host)]
        host_buffer[...] = host
        X = ring.upload(host_buffer)
        copied[i % 2] = memory.last_copy()
        for half in result:  # a step reads the batch twice
            np.multiply(X, 2, out=half)
    ring.close()
    copies = [backend.to_host(result) for result in results]
    return all(np.array_equal(a, [2 * b] * 2) for a, b in zip(copies, batches, strict=True))


@given(
    seed=st.integers(0, 2**32), depth=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=20),
)  # fmt: skip
@settings(max_examples=60)
def test_upload_ring_is_safe_in_any_order(seed: int, depth: int, sizes: list[int]) -> None:
    """Check batches that grow, and empty ones."""
    backend = VirtualBackend(seed)
    assert run_ring(backend, backend.transfers(), depth, sizes)


class NotWaiting:
    """A stream or an event that does not wait."""

    def __init__(self, real: Stream | Event) -> None:
        self._real = real

    def wait_event(self, event: Any) -> None:
        """Ignore the event."""

    def synchronize(self) -> None:
        """Ignore the call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_real":
            super().__setattr__(name, value)
        else:
            setattr(self._real, name, value)


MUTANTS: dict[str, Callable[[Transfers], Transfers]] = {
    "a step before its copy": lambda t: t._replace(computing=NotWaiting(t.computing)),
    "a copy into a batch in use": lambda t: t._replace(copying=NotWaiting(t.copying)),
    "a buffer of the host in use": lambda t: t._replace(event=lambda: NotWaiting(t.event())),
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_missing_waits_are_detected(mutant: str) -> None:
    comparisons = []
    for seed in range(20):
        backend = VirtualBackend(seed)
        transfers = MUTANTS[mutant](backend.transfers())
        comparisons.append(run_ring(backend, transfers, 2, [5] * 30))
    assert not all(comparisons)


def test_memory_is_not_freed_during_the_copy_from_it() -> None:
    """Check arrays that the caller drops at once, also temporary copies of columns."""
    for seed in range(6):
        backend = VirtualBackend(seed, lazy=seed < 3)
        ring = backend.uploader()
        results = [backend.device.empty((2, 4, 3), np.float32) for _ in range(12)]
        for i, result in enumerate(results):
            host = backend.host_memory.empty((4, 6), np.float32)
            host[...] = i
            np.add(ring.upload(host[:, :3]), 0, out=result[0])
            np.add(ring.upload(host.reshape(8, 3)[4:]), 0, out=result[1])
            del host
        ring.close()
        assert backend.device.pinned_bytes == 0
        for i, result in enumerate(results):
            np.testing.assert_array_equal(backend.to_host(result), np.full((2, 4, 3), i))


# --- the loader's buffers -----------------------------------------------------------------------

NUMBERS = np.arange(1, 401, dtype=np.float32)[:, None] + np.arange(3, dtype=np.float32) / 4


def read_fed_batches(
    backend: VirtualBackend, batch_size: int, block_rows: int, threads: int = 3
) -> list[bool]:
    """Return whether each batch of three epochs had the rows of its numbers on the device.

    The second epoch is left in the middle. Blocks have two units; a row takes 12 bytes, its target
    8, and number and position 16.
    """
    source = ArraySource(NUMBERS, NUMBERS[:, 0].astype(np.float64), unit_rows=block_rows // 2)
    uploads: list[tuple[np.ndarray, DeviceArray]] = []
    with (
        BatchReader(
            source, batch_size=batch_size, seed=0, block_bytes=block_rows * 36, threads=threads
        ) as reader,
        Feed(reader, backend, dtype=np.float32, seed=0) as feed,
    ):
        for epoch, stop in ((0, 1000), (1, 5), (2, 1000)):
            batches = feed.epoch(epoch)
            for batch in batches:
                total = backend.device.empty((2, len(batch.row_ids), 4), np.float32)
                for half in total:  # a step reads the batch twice
                    half[:, :3] = batch.X
                    half[:, 3:] = batch.Y
                uploads.append((batch.row_ids, total))
                if batch.index == stop:
                    break
            batches.close()  # type: ignore[attr-defined]
    assert len(uploads) == 2 * -(-400 // batch_size) + 6
    assert backend.device.pinned_bytes == 0
    truth = np.concatenate([NUMBERS, NUMBERS[:, :1]], axis=1)
    return [np.array_equal(backend.to_host(total), [truth[rows]] * 2) for rows, total in uploads]


@pytest.mark.parametrize(("batch_size", "block_rows"), [(10, 40), (14, 40), (30, 20)])
def test_batches_are_copied_from_the_blocks(
    batch_size: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that batches come from pinned blocks, which stay unchanged until their copy."""
    for seed in range(6):
        backend = VirtualBackend(seed, lazy=seed < 3)
        assert all(read_fed_batches(backend, batch_size, block_rows))
        assert backend.device.counts.pageable == 0


class PinnedMemoryWithoutWaits(PinnedMemory):
    """Pinned memory that lets buffers be reused before their copy has ended."""

    def last_copy(self) -> Any:
        return NO_COPIES


@pytest.mark.parametrize(("batch_size", "block_rows"), [(10, 40), (30, 20)])
def test_block_that_is_freed_too_early_is_detected(batch_size: int, block_rows: int) -> None:
    comparisons = []
    for seed in range(6):
        backend = VirtualBackend(seed, lazy=seed < 3)
        backend.host_memory = PinnedMemoryWithoutWaits(backend.transfers())
        comparisons += read_fed_batches(backend, batch_size, block_rows)
    assert not all(comparisons)


def test_blocks_that_cannot_be_pinned_are_copied_with_a_warning() -> None:
    """Check that one warning names the bytes of the first buffer."""

    def pin(nbytes: int) -> Any:
        raise MemoryError("cudaErrorMemoryAllocation: out of memory")

    backend = VirtualBackend(1)
    backend.host_memory = PinnedMemory(backend.transfers()._replace(pin=pin))
    with pytest.warns(
        UserWarning, match=r"could not pin 480 bytes .* \(cudaErr.*\)$"
    ) as warnings_seen:
        assert all(read_fed_batches(backend, 14, 40))
    assert len(warnings_seen) == 1
    assert backend.device.counts.pageable == backend.device.counts.sent > 0


def test_two_loaders_feed_two_devices() -> None:
    """Check that each reader holds its rows in memory of its device, which may change."""
    source = ArraySource(NUMBERS, NUMBERS[:, 0])
    backends = [VirtualBackend(seed) for seed in range(2)]
    with (
        BatchReader(source, batch_size=50, seed=0) as first_reader,
        BatchReader(source, batch_size=50, seed=0) as second_reader,
    ):
        for reader, order in ((first_reader, (0, 1)), (second_reader, (1, 0))):
            for k in order:
                with Feed(reader, backends[k], dtype=np.float32, seed=0) as feed:
                    for batch in feed.epoch(0):
                        rows = batch.row_ids
                        np.testing.assert_array_equal(backends[k].to_host(batch.X), NUMBERS[rows])
                assert backends[k].device.pinned_bytes > 0
        assert all(backend.device.counts.pageable == 0 for backend in backends)
    assert all(backend.device.pinned_bytes == 0 for backend in backends)


def test_a_loader_may_close_before_its_feed() -> None:
    """Check a loop that fails: the copies in progress read memory that still exists."""
    for seed in range(6):
        backend = VirtualBackend(seed, lazy=seed < 3)
        reader = BatchReader(ArraySource(NUMBERS, NUMBERS[:, 0]), batch_size=25, seed=0)
        feed = Feed(reader, backend, dtype=np.float32, seed=0)
        batches = feed.epoch(0)
        total = backend.device.empty((25, 3), np.float32)
        for _ in range(4):
            batch = next(batches)
        np.add(batch.X, 0, out=total)
        reader.close()
        feed.close()
        np.testing.assert_array_equal(backend.to_host(total), NUMBERS[batch.row_ids])
        del batch
        batches.close()  # type: ignore[attr-defined]
        assert backend.device.pinned_bytes == 0


def test_host_reads_and_races_are_detected() -> None:
    """Check the counters and refusals of the virtual device, on which the other tests rely."""
    backend = VirtualBackend()
    xp, counts = backend.xp, backend.device.counts
    a = backend.asarray(np.arange(6.0))
    assert (counts.uploads, counts.allocations) == (1, 1)
    b = a + 1
    assert counts.allocations == 2
    np.add(a, b, out=a)
    a[2:] *= 2
    assert (counts.allocations, counts.host_reads) == (2, 0)
    assert float(a.sum()) == 1 + 3 + 2 * (5 + 7 + 9 + 11)
    assert bool(a[0] == 1)
    assert counts.host_reads == counts.syncs == 2
    for implicit in (lambda: a + np.ones(6), lambda: np.asarray(a)):
        with pytest.raises(TypeError, match="host"):
            implicit()
    assert np.isnan(backend.to_host(xp.empty(3))).all()
    live = backend.device.live_bytes
    del b
    assert backend.device.live_bytes == live - 48
    assert isinstance(a.T, DeviceArray)
