"""Batches of an epoch, in plan order, read ahead by a pool of threads in bounded memory.

There are two block buffers: the consumer drains one, as views, while the pool fills the other. A
task reads one unit (read, decode, host transforms; on the pool's thread, or on a cluster while the
thread waits) and scatters its rows to their shuffled places in the buffer.

    units ──read──> [ thread ] ──scatter──> [ buffer A: filling  ]
                    [ thread ] ──scatter──> [ buffer B: draining ] ──views──> batches

So one unit per thread is in flight, no decoded unit waits for its turn, and the content
of a batch depends neither on the number of threads nor on the order of arrival.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from streamkern.backend.host_memory import PAGEABLE, HostMemory
from streamkern.basics.errors import ConfigError, RunError
from streamkern.basics.machine import available_cpus
from streamkern.basics.message import mention
from streamkern.basics.values import is_whole_number, to_builtin
from streamkern.planning.sizes import POSITION_BYTES, ROW_ID_BYTES
from streamkern.store.row_block import RowBlock
from streamkern.stream.buffers import WHOLE_BLOCK, Buffer, OpenBlock, Shard
from streamkern.stream.order import PLAN_VERSION, EpochPlan
from streamkern.stream.sources.base import Source, target_bytes
from streamkern.stream.sources.unit_edges import unit_sizes
from streamkern.stream.sources.user import as_source
from streamkern.stream.unit_readers import ClusterReader, LocalReader, UnitReader, read_with_retries

MAX_THREADS = 64


@dataclass
class ReaderStats:
    """Counts and waiting times of a reader since it was created.

    batches, rows : number of batches and rows that were delivered
    stall_s : seconds for which the consumer waited for data, in total
    last_wait_s, longest_wait_s : seconds of the wait for the last batch, and of the longest wait
    bytes_read : decoded bytes of the units that arrived
    bytes_in_flight, bytes_in_flight_peak : decoded bytes of the units being read, now and at most
    retries : number of reads that were repeated after a fault
    """

    batches: int = 0
    rows: int = 0
    stall_s: float = 0.0
    last_wait_s: float = 0.0
    longest_wait_s: float = 0.0
    bytes_read: int = 0
    bytes_in_flight: int = 0
    bytes_in_flight_peak: int = 0
    retries: int = 0


class BatchReader:
    """Reads the epochs of a source ahead of their consumer. Use as a context manager.

    There is one consumer at a time: starting an epoch ends the iterator before it. The order
    depends only on the source, `batch_size`, `seed` and `block_bytes` (see `order_key`).

    Parameters
    ----------
    source : the source; one of the user's own is wrapped by `as_source`
    batch_size : number of rows of a batch, over all ranks
    seed : seed of the order and of the random draws
    block_bytes : size of one shuffle block, at least one unit; two blocks are held in memory
    in_flight_bytes : bound on the units being read, one per thread, at least one unit; the default
        holds 64 MiB of rows with their ids, see `planning.sizes.LOADER_SIZES`
    threads : number of reading threads, at most as many as `in_flight_bytes` allows and 64. "auto":
        one per processor, or the largest number allowed if reads wait for a network or a cluster
    client : a `distributed.Client` to read on
    retry_s : seconds for which a transient OSError (a time-out, a reset connection) is retried
    in_order : keep the order of the source, without shuffling
    repeat : use the order and the random draws of epoch 0 in every epoch, which then has number 0
    shard : the shard of each batch that this rank reads
    keep_bytes : if the decoded rows of all stores of the source fit into this size, rows stay in
        memory after their first read, for the next replica or epoch; ignored with `client`

    Raises ConfigError for a value out of range, and for a source with invalid attributes or units.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        block_bytes: int = 128 << 20,
        in_flight_bytes: int = 68 << 20,
        threads: int | str = "auto",
        client: Any = None,
        retry_s: float = 60.0,
        in_order: bool = False,
        repeat: bool = False,
        shard: Shard = WHOLE_BLOCK,
        keep_bytes: int = 0,
    ) -> None:
        for name, value in (("block_bytes", block_bytes), ("in_flight_bytes", in_flight_bytes)):
            if value < 1:
                raise ConfigError(
                    f"{mention(name, value)} must be at least 1",
                    "correct it, or leave it out for the default",
                )
        source = as_source(source)
        self.source, self.batch_size, self.seed, self.retry_s = source, batch_size, seed, retry_s
        self.in_order, self.repeat, self.shard = in_order, repeat, shard
        self.stats = ReaderStats()
        self._sizes = unit_sizes(source)
        unit_rows = int(self._sizes.max(initial=1))
        self._row_bytes = source.row_bytes + target_bytes(source) + ROW_ID_BYTES + POSITION_BYTES
        self._unit_bytes = unit_rows * (self._row_bytes - POSITION_BYTES)
        units_per_block = max(1, block_bytes // (unit_rows * self._row_bytes))
        self.mix_units = max(1, min(units_per_block, source.n_units))
        self._block_rows = min(self.mix_units * unit_rows, source.n_rows)
        self._buffer_rows = min(shard.max_rows(self.mix_units, unit_rows), source.n_rows)
        self.n_batches = self._plan(0).n_batches  # also checks seed and batch_size
        reads_wait = client is not None or source.remote
        self.threads = _n_threads(threads, in_flight_bytes // self._unit_bytes, reads_wait)
        in_memory = client is None and source.decoded_bytes <= keep_bytes
        self._reader: UnitReader = LocalReader(source.with_unit_cache() if in_memory else source)
        if client is not None:
            self._reader = ClusterReader(source, client, retry_s)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="streamkern-prefetch")
        self._memory: HostMemory = PAGEABLE
        self._buffers: list[Buffer] = []
        self._straddling_batch: Buffer | None = None
        self._iteration: _Iteration | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iterator and the threads, and drop the buffers. May be called twice."""
        self._is_closed = True
        if self._iteration is not None:
            self._stop_reads(self._iteration)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
        self._buffers, self._straddling_batch = [], None

    def use_memory(self, memory: HostMemory) -> None:
        """Allocate buffers in `memory`, for example in pinned memory of the device.

        An iterator ends if its rows were in other memory.
        """
        if memory is self._memory:
            return
        if self._iteration is not None:
            self._stop_reads(self._iteration)
        self._buffers, self._straddling_batch = [], None
        self._memory = memory

    def order_key(self) -> dict[str, int]:
        """Return the values that fix the order of samples for a source; a resume compares them."""
        return {
            "plan_version": PLAN_VERSION,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "mix_units": self.mix_units,
            "n_units": self.source.n_units,
            "n_rows": self.source.n_rows,
        }

    def epoch(self, epoch: int, start: int = 0) -> Iterator[RowBlock]:
        """Return batches start, start + 1, … of one epoch."""
        return self.epochs(epoch, epoch + 1, start)

    def epochs(self, first_epoch: int, stop: int, start: int = 0) -> Iterator[RowBlock]:
        """Return batches of epochs first_epoch … stop - 1, from batch `start` of the first one on.

        A batch is valid until the next one is requested: it holds views of a block buffer or, if
        it straddles two blocks, of another buffer, which is reused. With a `shard`, it holds the
        shard of this rank. While the last block of an epoch is drained, the next epoch is read
        ahead.

        Raises
        ------
        ConfigError
            If `first_epoch` or `start` does not exist; raised by this call.
        OSError, DataError, or any error of the source
            The first failure in plan order, unchanged except for a note that names the unit.
        RunError
            If the iterator is used after another one was started or the loader was closed.
        """
        if not 0 <= start <= self.n_batches or first_epoch < 0:
            raise ConfigError(
                f"batch {start} of epoch {first_epoch} does not exist",
                f"give an epoch of at least 0 and a batch from 0 to {self.n_batches}",
            )
        return self._iterate(first_epoch, stop, start)

    def positions(self, first_epoch: int, stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (epoch, index) of each batch of `epochs`; the epoch keys its random draws."""
        for epoch in range(first_epoch, stop):
            first_index = start if epoch == first_epoch else 0
            for index in range(first_index, self.n_batches):
                yield 0 if self.repeat else epoch, index

    # ------------------------------------------------------------------- the consumer's thread

    def _iterate(self, first_epoch: int, stop: int, start: int) -> Iterator[RowBlock]:
        """End the previous iteration, and yield the batches of `epochs`."""
        if self._iteration is not None:
            self._stop_reads(self._iteration)
        if self._is_closed:  # the user knows the reader as a part of a loader
            raise RunError("this loader is closed", "make a new one")
        iteration = self._iteration = _Iteration(
            self._blocks(first_epoch, stop, start), list(self._buffers)
        )
        for buffer in self._buffers:
            buffer.last_copy = self._memory.last_copy()
        try:
            self._start_reads(iteration)
            for _, index in self.positions(first_epoch, stop, start):
                yield self._batch(iteration, index)
                if iteration.stopped.is_set():
                    raise RunError(
                        "this iterator has ended, because another one was started on its "
                        "loader, or the loader was closed",
                        "finish an iterator before you start another one",
                    )
                if iteration.is_drained:
                    self._release_drained_block(iteration)
        finally:
            self._stop_reads(iteration)

    def _plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch."""
        return EpochPlan(
            self._sizes,
            seed=self.seed,
            epoch=0 if self.repeat else epoch,
            batch_size=self.batch_size,
            mix_units=self.mix_units,
            strata=self.source.strata,
            in_order=self.in_order,
        )

    def _blocks(self, first_epoch: int, stop: int, start: int) -> Iterator[tuple[EpochPlan, int]]:
        """Yield (plan, block) from the block of batch `start` of the first epoch on."""
        for epoch in range(first_epoch, stop):
            plan = self._plan(epoch)
            if epoch == first_epoch and start == self.n_batches:
                continue
            first_block = plan.batch(start)[0].block if epoch == first_epoch else 0
            for block in range(first_block, plan.n_blocks):
                yield plan, block

    def _batch(self, iteration: _Iteration, index: int) -> RowBlock:
        """Return batch `index`: a view if one block holds all of it, else a copy in one buffer."""
        self.stats.last_wait_s = 0.0
        pieces = iteration.open_blocks[0].plan.batch(index)
        if len(pieces) == 1:
            piece, block = pieces[0], self._wait_for_block(iteration)
            iteration.is_drained = piece.stop == block.n_rows
            rows = block.part(piece.start, piece.stop)
        else:
            if self._straddling_batch is None:
                self._straddling_batch = Buffer(self.source, self.batch_size, 0, self._memory)
            self._memory.last_copy().synchronize()
            n_copied = 0
            for piece in pieces:
                if n_copied:
                    self._release_drained_block(iteration)
                block = self._wait_for_block(iteration)
                part = block.part(piece.start, piece.stop)
                size = len(part.row_ids)
                self._straddling_batch.rows.put(slice(n_copied, n_copied + size), part)
                iteration.is_drained = piece.stop == block.n_rows
                n_copied += size
            rows = self._straddling_batch.part(0, n_copied)
        self.stats.batches += 1
        self.stats.rows += len(rows.row_ids)
        return rows

    def _wait_for_block(self, iteration: _Iteration) -> OpenBlock:
        """Return the block being drained, once all of its units are in place."""
        block = iteration.open_blocks[0]
        if block.futures:
            start_s = time.perf_counter()
            for future in block.futures:
                future.result()  # in plan order, so that the same error is raised every time
            block.futures = []
            waited_s = time.perf_counter() - start_s
            stats = self.stats
            stats.stall_s += waited_s
            stats.last_wait_s += waited_s
            stats.longest_wait_s = max(stats.longest_wait_s, stats.last_wait_s)
        return block

    def _release_drained_block(self, iteration: _Iteration) -> None:
        """Give the drained block's buffer to the next block to be read."""
        buffer = iteration.open_blocks.popleft().buffer
        buffer.last_copy = self._memory.last_copy()
        iteration.free_buffers.append(buffer)
        self._start_reads(iteration)

    def _start_reads(self, iteration: _Iteration) -> None:
        """Submit the reads of following blocks until two are being read or drained."""
        while len(iteration.open_blocks) < 2:
            next_block = next(iteration.remaining_blocks, None)
            if next_block is None:
                return
            if not iteration.free_buffers:
                iteration.free_buffers.append(
                    Buffer(self.source, self._buffer_rows, self._block_rows, self._memory)
                )
                self._buffers.append(iteration.free_buffers[0])
            plan, index = next_block
            block = OpenBlock(plan, index, iteration.free_buffers.pop(), self.shard)
            iteration.open_blocks.append(block)
            block.futures = [
                self._pool.submit(self._read_into, block, u, offset, iteration.stopped)
                for u, offset in block.units
            ]

    def _stop_reads(self, iteration: _Iteration) -> None:
        """Stop the reads of an iteration; wait for running reads, which write to its buffers.

        The iteration releases the buffers, so that they are freed when the reader drops them.
        """
        iteration.stopped.set()
        futures = [future for block in iteration.open_blocks for future in block.futures]
        for future in futures:
            future.cancel()
        wait(futures)
        iteration.open_blocks.clear()
        iteration.free_buffers.clear()

    # ----------------------------------------------------------------------- the pool's threads

    def _read_into(self, block: OpenBlock, u: int, offset: int, stopped: threading.Event) -> None:
        """Read unit u and write its rows to the buffer. offset : as in `OpenBlock.units`"""
        if stopped.is_set():
            return
        stats = self.stats
        start, stop = self.source.unit_bounds(u)
        n_bytes = (stop - start) * (self._row_bytes - POSITION_BYTES)
        with self._lock:
            stats.bytes_in_flight += n_bytes
            stats.bytes_in_flight_peak = max(stats.bytes_in_flight_peak, stats.bytes_in_flight)
        try:
            unit = read_with_retries(
                self._reader, u, self.seed, block.plan.epoch, bounds=(start, stop),
                stopped=stopped, retry_s=self.retry_s, on_retry=self._count_retry,
            )  # fmt: skip
            block.scatter(offset, unit, u)
            with self._lock:
                stats.bytes_read += n_bytes
        finally:
            with self._lock:
                stats.bytes_in_flight -= n_bytes

    def _count_retry(self) -> None:
        with self._lock:
            self.stats.retries += 1


@dataclass
class _Iteration:
    """The state of one iteration: blocks not yet opened, blocks being read or drained, buffers."""

    remaining_blocks: Iterator[tuple[EpochPlan, int]]  # with the index of the block in its plan
    free_buffers: list[Buffer]
    open_blocks: deque[OpenBlock] = field(default_factory=deque)
    stopped: threading.Event = field(default_factory=threading.Event)
    is_drained: bool = False  # whether the last batch drained its block


def _n_threads(threads: int | str, max_allowed: int, reads_wait: bool) -> int:
    """Return the number of reading threads, at most `max_allowed`.

    reads_wait : whether reads wait for a network or a cluster instead of using a processor
    """
    threads, max_allowed = to_builtin(threads), max(1, min(max_allowed, MAX_THREADS))
    if threads == "auto":
        return max_allowed if reads_wait else min(max_allowed, max(2, available_cpus()))
    if not is_whole_number(threads) or threads < 1:
        raise ConfigError(
            f'{mention("threads", threads)} must be "auto" or a whole number, at least 1',
            "correct it, or leave it out for the default",
        )
    return min(max_allowed, threads)
