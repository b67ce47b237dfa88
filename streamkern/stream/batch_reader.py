"""Batches of an epoch, in plan order, read ahead by a pool of threads in bounded memory.

There are two block buffers: the consumer drains one, as views, while the pool fills the other. A
task reads one unit (read, decode, host transforms; on the pool's thread, or on a cluster while the
thread waits) and scatters its rows to their shuffled places in the buffer.

    units ──read──> [ thread ] ──scatter──> [ buffer A: filling  ]
                    [ thread ] ──scatter──> [ buffer B: draining ] ──views──> batches

So the bytes in flight are one unit per thread, no decoded unit waits for its turn, and the content
of a batch depends neither on the number of threads nor on the order of arrival.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from streamkern.basics.errors import ConfigError, RunError
from streamkern.basics.machine import available_cpus
from streamkern.basics.message import mention
from streamkern.basics.values import to_builtin
from streamkern.store.row_block import RowBlock
from streamkern.stream.buffers import WHOLE_SHARE, Buffer, Fill, Share
from streamkern.stream.order import PLAN_VERSION, EpochPlan
from streamkern.stream.sources.base import Source, target_bytes
from streamkern.stream.sources.unit_edges import unit_sizes
from streamkern.stream.sources.user import as_source
from streamkern.stream.unit_readers import ClusterReader, LocalReader, UnitReader, read_patiently

MAX_THREADS = 64


@dataclass
class ReaderStats:
    """Counts so far; `stall_s` over the run's time is the share lost to waiting.

    batches, rows : number of batches and rows that were delivered
    stall_s, last_wait_s, longest_wait_s : seconds that the consumer waited in all, for the last
        batch, and for one batch at most
    bytes_read : decoded bytes of the units that arrived
    bytes_in_flight : decoded bytes of the units being read
    retries : reads repeated after a fault, counted as they happen
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
    block_bytes : size of one shuffle block, at least one unit; two are held
    in_flight_bytes : bound on the units being read, one per thread, at least one unit
    threads : number of reading threads; "auto" is one per processor, or, if reads wait for a
        network or a cluster, as many as `in_flight_bytes` allows (up to 64), which is always the
        bound
    client : a `distributed.Client` to read on
    retry_s : seconds for which a transient OSError (a time-out, a reset connection) is retried
    in_order : keep the order of the source, without shuffling
    repeat : every epoch has the order, the draws and the number of epoch 0
    share : the share of each batch that this rank reads
    keep_bytes : if the stores of the source have no more decoded bytes, they are kept, once read,
        for the next replica or epoch; of no use with `client`
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
        share: Share = WHOLE_SHARE,
        keep_bytes: int = 0,
    ) -> None:
        for name, value in (("block_bytes", block_bytes), ("in_flight_bytes", in_flight_bytes)):
            if value < 1:
                raise ConfigError(f"{mention(name, value)} must be at least 1")
        source = as_source(source)
        self.source, self.batch_size, self.seed, self.retry_s = source, batch_size, seed, retry_s
        self.in_order, self.repeat, self.share = in_order, repeat, share
        self.stats = ReaderStats()
        self._sizes = unit_sizes(source)
        unit_rows = int(self._sizes.max(initial=1))
        x_bytes = math.prod(source.row_shape) * source.dtype.itemsize
        y_bytes = target_bytes(source)
        self._unit_bytes = unit_rows * (x_bytes + y_bytes + 8)
        self._row_bytes = x_bytes + y_bytes + 16  # with its row id and its place
        fit = max(1, block_bytes // (unit_rows * self._row_bytes))
        self.mix_units = max(1, min(fit, source.n_units))
        self._block_rows = min(self.mix_units * unit_rows, source.n_rows)
        self._buffer_rows = min(share.rows(self.mix_units, unit_rows), source.n_rows)
        self.n_batches = self._plan(0).n_batches  # also checks seed and batch_size
        waits = client is not None or source.remote
        self.threads = _n_threads(threads, in_flight_bytes // self._unit_bytes, waits)
        keeps = client is None and source.decoded_bytes <= keep_bytes
        self._reader: UnitReader = LocalReader(source.kept() if keeps else source)
        if client is not None:
            self._reader = ClusterReader(source, client, retry_s)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="streamkern-prefetch")
        self._buffers: list[Buffer] = []
        self._straddling_batch: Buffer | None = None
        self._run: _Run | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iterator and the threads, and drop the buffers. May be called twice."""
        self._closed = True
        if self._run is not None:
            self._end(self._run)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
        self._buffers, self._straddling_batch = [], None

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

    def epochs(self, first: int, stop: int, start: int = 0) -> Iterator[RowBlock]:
        """Return batches of epochs first … stop - 1, from batch `start` of the first one on.

        A batch is valid until the next one is requested: it holds views of a block buffer, or of
        one reused buffer across a block's edge. With a `share`, it is the share of this rank. The
        next epoch is read ahead while the last block of this one is drained.

        Raises
        ------
        OSError, DataError, or any error of the source
            The first failure in plan order, unchanged but for a note that names the unit.
        RunError
            The iterator is used after another one was started or the loader was closed.
        """
        if not 0 <= start <= self.n_batches or first < 0:
            raise ConfigError(
                f"batch {start} of epoch {first} was asked for",
                f"begin at an epoch from 0 on and at a batch from 0 to {self.n_batches}",
            )
        return self._iterate(first, stop, start)

    def positions(self, first: int, stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (epoch of the draws, number in the epoch) of each batch of `epochs`."""
        for epoch in range(first, stop):
            for index in range(start if epoch == first else 0, self.n_batches):
                yield 0 if self.repeat else epoch, index

    # ------------------------------------------------------------------- the consumer's thread

    def _iterate(self, first: int, stop: int, start: int) -> Iterator[RowBlock]:
        """Yield the batches of `epochs`, after ending the iteration before."""
        if self._run is not None:
            self._end(self._run)
        if self._closed:
            raise RunError("this loader is closed", "make a new one")
        run = self._run = _Run(self._blocks(first, stop, start), list(self._buffers))
        try:
            self._start_reads(run)
            for _, index in self.positions(first, stop, start):
                yield self._batch(run, index)
                if run.stopped.is_set():
                    raise RunError(
                        "this iterator has ended: another one was started on its loader, or "
                        "the loader was closed",
                        "use one to its end before the next",
                    )
                if run.drained:
                    self._release(run)
        finally:
            self._end(run)

    def _plan(self, epoch: int) -> EpochPlan:
        return EpochPlan(
            self._sizes,
            seed=self.seed,
            epoch=0 if self.repeat else epoch,
            batch_size=self.batch_size,
            mix_units=self.mix_units,
            strata=self.source.strata,
            in_order=self.in_order,
        )

    def _blocks(self, first: int, stop: int, start: int) -> Iterator[tuple[EpochPlan, int]]:
        """Yield every block from the one that holds batch `start` of epoch `first` on."""
        for epoch in range(first, stop):
            plan = self._plan(epoch)
            if epoch == first and start == self.n_batches:
                continue
            begin = plan.batch(start)[0].block if epoch == first else 0
            for block in range(begin, plan.n_blocks):
                yield plan, block

    def _batch(self, run: _Run, index: int) -> RowBlock:
        """Return batch `index`: a view if one block holds all of it, else a copy in one buffer."""
        self.stats.last_wait_s = 0.0
        pieces = run.fills[0].plan.batch(index)
        if len(pieces) == 1:
            piece, fill = pieces[0], self._ready(run)
            run.drained = piece.stop == fill.n_rows
            rows = fill.part(piece.start, piece.stop)
        else:
            if self._straddling_batch is None:
                self._straddling_batch = Buffer(self.source, self.batch_size, 0)
            done = 0
            for piece in pieces:
                if done:
                    self._release(run)
                fill = self._ready(run)
                part = fill.part(piece.start, piece.stop)
                size = len(part.row_ids)
                self._straddling_batch.rows.put(slice(done, done + size), part)
                run.drained = piece.stop == fill.n_rows
                done += size
            rows = self._straddling_batch.part(0, done)
        self.stats.batches += 1
        self.stats.rows += len(rows.row_ids)
        return rows

    def _ready(self, run: _Run) -> Fill:
        """Return the block being drained, once all of its units are in place."""
        fill = run.fills[0]
        if fill.futures:
            before = time.perf_counter()
            for future in fill.futures:
                future.result()  # in plan order, so that the same error is raised every time
            fill.futures = []
            waited = time.perf_counter() - before
            stats = self.stats
            stats.stall_s += waited
            stats.last_wait_s += waited
            stats.longest_wait_s = max(stats.longest_wait_s, stats.last_wait_s)
        return fill

    def _release(self, run: _Run) -> None:
        """Give the drained block's buffer to the next block to be read."""
        run.free.append(run.fills.popleft().buffer)
        self._start_reads(run)

    def _start_reads(self, run: _Run) -> None:
        """Submit the reads of following blocks until two are being read or drained."""
        while len(run.fills) < 2:
            following = next(run.blocks, None)
            if following is None:
                return
            if not run.free:
                run.free.append(Buffer(self.source, self._buffer_rows, self._block_rows))
                self._buffers.append(run.free[0])
            plan, block = following
            fill = Fill(plan, block, run.free.pop(), self.share)
            run.fills.append(fill)
            fill.futures = [
                self._pool.submit(self._read_into, fill, u, offset, run.stopped)
                for u, offset in fill.units
            ]

    def _end(self, run: _Run) -> None:
        """Stop a run's reads and wait for those under way: they write into its buffers."""
        run.stopped.set()
        futures = [future for fill in run.fills for future in fill.futures]
        for future in futures:
            future.cancel()
        wait(futures)
        run.fills.clear()

    # ----------------------------------------------------------------------- the pool's threads

    def _read_into(self, fill: Fill, u: int, offset: int, stopped: threading.Event) -> None:
        """Read unit u and write its rows to the buffer. offset : as in `Fill.units`."""
        if stopped.is_set():
            return
        stats = self.stats
        start, stop = self.source.unit_bounds(u)
        n_bytes = (stop - start) * (self._row_bytes - 8)
        with self._lock:
            stats.bytes_in_flight += n_bytes
            stats.bytes_in_flight_peak = max(stats.bytes_in_flight_peak, stats.bytes_in_flight)
        done_bytes = 0
        try:
            block = read_patiently(
                self._reader,
                u,
                self.seed,
                fill.plan.epoch,
                bounds=(start, stop),
                stopped=stopped,
                retry_s=self.retry_s,
                on_retry=self._count_retry,
            )
            fill.scatter(offset, block, u)
            done_bytes = n_bytes
        finally:
            with self._lock:
                stats.bytes_in_flight -= n_bytes
                stats.bytes_read += done_bytes

    def _count_retry(self) -> None:
        with self._lock:
            self.stats.retries += 1


@dataclass
class _Run:
    """One iteration: the blocks to come, the blocks being read or drained, the free buffers."""

    blocks: Iterator[tuple[EpochPlan, int]]
    free: list[Buffer]
    fills: deque[Fill] = field(default_factory=deque)
    stopped: threading.Event = field(default_factory=threading.Event)
    drained: bool = False  # whether the last batch drained its block


def _n_threads(threads: int | str, allowed: int, waits: bool) -> int:
    threads, allowed = to_builtin(threads), max(1, min(allowed, MAX_THREADS))
    if threads == "auto":
        return allowed if waits else min(allowed, max(2, available_cpus()))
    if not isinstance(threads, int) or threads < 1:
        raise ConfigError(
            f'{mention("threads", threads)} must be "auto" or a whole number, at least 1'
        )
    return min(allowed, threads)
