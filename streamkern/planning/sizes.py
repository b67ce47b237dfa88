"""Choose the sizes that all methods have: batches, samples and read-ahead, within their limits.

This module only computes with numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.planning.problem import MiB, ProblemShape

MIN_PROBE, MAX_PROBE = 512, 4096
"""Smallest and largest number of rows of the probe."""
MIN_BATCH, MAX_BATCH = 256, 4096
"""Smallest and largest batch size that `auto_batch` returns."""
LOADER_SIZES = ((128 * MiB, 68 * MiB), (64 * MiB, 32 * MiB), (32 * MiB, 16 * MiB))
"""Bytes of a shuffle block and of the reads in flight, in the order in which they are tried. 68 MiB
hold 64 MiB of rows, in whole chunks of 4, 8 or 16 MiB, with their row numbers."""
ROW_ID_BYTES = 8
"""Bytes of a row number, which is stored with each row."""
POSITION_BYTES = 8
"""Bytes of the position of a row in its shuffle block."""


class EffortLevel(NamedTuple):
    """Limits of the automatic choices for a value of the setting model.effort.

    n_centers : largest number of centers that are drawn.
    all_rows : largest number of rows that may all be centers, if solver "direct" can solve the
        equations of their kernel matrix (`solver.kernel_ridge`); may exceed `n_centers`.
    metric_rows : largest number of rows from which a metric is learned. Its gradient steps use a
        third of them, in more stages if there are more rows, see `setup.metric_steps`.
    """

    n_centers: int
    all_rows: int
    metric_rows: int


EFFORT_LEVELS: Final[Mapping[str, EffortLevel]] = MappingProxyType({
    "quick": EffortLevel(2000, 4096, 6144),
    "default": EffortLevel(10_000, 16_384, 15_360),
    "best": EffortLevel(10_000, 100_000, 24_576),
})  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run for any method. Subclasses add the sizes of their method.

    solver : name of the method
    batch_size : number of rows of a step
    n_sample : number of rows of the setup sample
    n_probe : number of rows of the probe, on which step sizes are measured
    loader_block_bytes : bytes of a shuffle block
    loader_in_flight_bytes : bytes of the reads in flight
    widened : whether the run computes in float64 because run.precision is "auto"; kernel and metric
        are still chosen in float32
    """

    solver: str
    batch_size: int
    n_sample: int
    n_probe: int
    loader_block_bytes: int
    loader_in_flight_bytes: int
    widened: bool = field(default=False, kw_only=True)

    def as_record(self) -> dict[str, Any]:
        """Return the sizes as JSON values for the record of a run.

        Sizes with their default value are left out, because earlier versions do not have them.
        """
        defaults = {
            name: size_field.default for name, size_field in self.__dataclass_fields__.items()
        }
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}


def method_sizes(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of saved sizes that the method added to `Sizes`."""
    return {name: value for name, value in saved.items() if name not in Sizes.__dataclass_fields__}


def check_between(name: str, value: int | str | None, low: int, high: int, bound: str) -> None:
    """Raise ConfigError if a size is a number that is not between `low` and `high`.

    bound : text before `high` in the message, such as "n_rows="
    """
    if isinstance(value, int) and not low <= value <= high:
        remedy = "lower" if value > high else "raise"
        limit = mention(f"{bound}{high}") if bound.endswith("=") else f"{bound}{high}"
        raise ConfigError(
            f"{mention(name, value)} must lie between {low} and {limit}", f"{remedy} it"
        )


def check_batch_size(problem: ProblemShape) -> None:
    """Raise ConfigError if the user has set a batch with more rows than an epoch."""
    check_between("batch_size", problem.batch_size, 1, problem.n_rows, "n_rows=")


def halvings(fixed: int | None, start: int, end: int) -> list[int]:
    """Return [fixed] if it is set; otherwise `start` and its halves, rounded up, down to `end`."""
    if fixed is not None:
        return [fixed]
    sizes = [start]
    while sizes[-1] // 2 >= end:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def auto_batch(problem: ProblemShape) -> int:
    """Return the batch size for "auto": p / 4 rounded to a power of two, within limits.

    For any batch size m, a step costs 2 p b c FLOPs and two passes over H in addition to the kernel
    product. With m = p / 4 this is a few per cent of the kernel product, and m is still below the
    critical batch size.
    """
    return min(max(MIN_BATCH, min(nearest_power_of_two(problem.p / 4), MAX_BATCH)), problem.n_rows)


def nearest_power_of_two(size: float) -> int:
    """Return the nearest power of two, up to 2^19."""
    return min((1 << k for k in range(20)), key=lambda power: abs(power - size))


def batch_candidates(problem: ProblemShape, preferred: int | None = None) -> list[int]:
    """Return the batch sizes to try, from the preferred one to the smallest.

    preferred : batch size if the user has set none; None for `auto_batch`
    """
    return halvings(problem.batch_size, preferred or auto_batch(problem), min(64, problem.n_rows))


def n_steps(problem: ProblemShape) -> int:
    """Return the number of steps of the run, with the user's batch size or `auto_batch`."""
    return -(-problem.n_rows // (problem.batch_size or auto_batch(problem))) * problem.epochs


def sample_sizes(n_rows: int, n_sample: int, n_probe: int) -> tuple[int, int]:
    """Return the numbers of rows of the setup sample and of the probe.

    They are `n_sample` and `n_probe` if there are enough rows. Otherwise the sample is four fifths
    of the rows. The probe is then all rows if there are at most `MAX_PROBE`: the steps use exactly
    these rows, so that step sizes measured on them are bounds instead of estimates. With more rows,
    the probe is at most the remaining fifth.
    """
    if n_sample + n_probe <= n_rows:
        return n_sample, n_probe
    sample = max(1, n_rows * 4 // 5)
    return sample, n_rows if n_rows <= MAX_PROBE else min(n_rows - sample, MAX_PROBE)


def check_epochs(problem: ProblemShape, solver: str) -> None:
    """Raise ConfigError for a single epoch, with a solver whose first epoch takes no step."""
    if problem.epochs < 2:
        raise ConfigError(
            f"{mention('data.epochs', problem.epochs)} must be at least 2 with solver {solver!r}, "
            "whose first epoch takes no step",
            "set it to the number of steps plus 1, or leave it out",
        )


class LoaderBytes(NamedTuple):
    """The bytes of a loader.

    rows : bytes of the rows of two shuffle blocks and of a partial batch, with their numbers; a
        device copies batches from this memory
    overhead : bytes of the positions of the rows in their blocks, and of units being read
    """

    rows: int
    overhead: int


def loader_bytes(problem: ProblemShape, sizes: Sizes) -> LoaderBytes:
    """Return the bytes of two shuffle blocks of whole units, a partial batch and units being read.

    A unit that is being read is held in stored and in decoded form. Each of several ranks holds its
    share of the rows of a block, and the positions of all rows.
    """
    row_bytes, unit_rows = problem.row_bytes + ROW_ID_BYTES, problem.unit_rows
    unit_bytes = unit_rows * (row_bytes + POSITION_BYTES)
    units_per_block = max(1, sizes.loader_block_bytes // unit_bytes)
    block_rows = min(units_per_block * unit_rows, problem.n_rows)
    max_units = max(1, sizes.loader_in_flight_bytes // unit_bytes)
    n_reads = min(problem.readers or problem.threads, max_units)
    held_rows, n_positions = block_rows, 0
    if problem.rows_per_rank(block_rows) < block_rows:
        held_rows = min(block_rows, problem.rows_per_rank(block_rows) + unit_rows)
        n_positions = 4 * block_rows  # positions of all rows, and the rank's rows before each
    n_rows = 2 * held_rows + sizes.batch_size
    overhead = (n_rows + n_positions) * POSITION_BYTES + 2 * n_reads * problem.read_bytes
    return LoaderBytes(n_rows * row_bytes, overhead)
