"""Sizes common to all methods: batches, samples, read-ahead.

This module computes with integers only, and holds no arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.planning.problem import MiB, ProblemShape

MIN_PROBE, MAX_PROBE = 512, 4096
MIN_BATCH, MAX_BATCH = 256, 4096
LOADERS = ((128 * MiB, 68 * MiB), (64 * MiB, 32 * MiB), (32 * MiB, 16 * MiB))
"""Bytes of a shuffle block and of the reads in flight, in the order tried: 64 MiB of rows with
their row numbers, in whole numbers of chunks of 4, 8 and 16 MiB; then smaller ones."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run, for any method; subclasses add those of their method.

    n_sample, n_probe : rows of the setup sample, and of the probe on which step sizes are measured.
    widened : whether the run computes in float64 although its kernel and metric were chosen in
        float32, because run.precision is "auto"
    """

    solver: str
    batch_size: int
    n_sample: int
    n_probe: int
    loader_block_bytes: int
    loader_in_flight_bytes: int
    widened: bool = field(default=False, kw_only=True)

    def recorded(self) -> dict[str, Any]:
        """Return the sizes as a run records them: without those that have their default, which
        earlier versions do not know."""
        defaults = {name: of.default for name, of in self.__dataclass_fields__.items()}
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}


def own_sizes(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of saved sizes that the method added to `Sizes`."""
    return {name: value for name, value in saved.items() if name not in Sizes.__dataclass_fields__}


def check_between(name: str, value: int | None, low: int, high: int, bound: str) -> None:
    """Raise ConfigError unless a size is None or between `low` and `high`.

    bound : text before `high` in the message, such as "n_rows="
    """
    if value is not None and not low <= value <= high:
        remedy = "lower" if value > high else "raise"
        limit = mention(f"{bound}{high}") if bound.endswith("=") else f"{bound}{high}"
        raise ConfigError(
            f"{mention(name, value)} must lie between {low} and {limit}", f"{remedy} it"
        )


def check_batch_size(problem: ProblemShape) -> None:
    """Raise ConfigError if a batch is set that has more rows than an epoch."""
    check_between("batch_size", problem.batch_size, 1, problem.n_rows, "n_rows=")


def halvings(fixed: int | None, start: int, end: int) -> list[int]:
    """Return the fixed size if set; otherwise `start` and its halves down to `end`."""
    if fixed is not None:
        return [fixed]
    sizes = [start]
    while sizes[-1] // 2 >= end:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def auto_batch(problem: ProblemShape) -> int:
    """Return the power of two nearest to p / 4, between 256 and 4096 and at most n.

    A step costs 2 p b c FLOPs and two passes over H for any m; with m = p / 4 that is a few per
    cent of the kernel product, and m stays below the critical batch size, so that no row is wasted.
    """
    return min(max(MIN_BATCH, min(near_quarter(problem.p), MAX_BATCH)), problem.n_rows)


def near_quarter(p: int) -> int:
    """Return the power of two nearest to p / 4."""
    return power_of_two(p / 4)


def power_of_two(size: float) -> int:
    """Return the nearest power of two, up to 2^19."""
    return min((1 << k for k in range(20)), key=lambda power: abs(power - size))


def batches(problem: ProblemShape, best: int | None = None) -> list[int]:
    """Return batch sizes to try, from the best to the smallest."""
    return halvings(problem.batch_size, best or auto_batch(problem), min(64, problem.n_rows))


def steps(problem: ProblemShape) -> int:
    """Return the number of steps of the run, with the batch size that is set, or else the best."""
    return -(-problem.n_rows // (problem.batch_size or auto_batch(problem))) * problem.epochs


def sample_sizes(n_rows: int, wanted: int, probe: int) -> tuple[int, int]:
    """Return the rows of the setup sample and of the probe; they overlap if the sum exceeds n_rows.

    With too few rows for a separate probe of `probe` rows, the sample is four fifths of the rows.
    The probe is then all rows, if they are few: the stream cycles over exactly these, so a step
    size that is measured on all of them is the bound itself and no estimate. Otherwise it is the
    remaining fifth.
    """
    if wanted + probe <= n_rows:
        return wanted, probe
    sample = max(1, n_rows * 4 // 5)
    return sample, n_rows if n_rows <= MAX_PROBE else min(n_rows - sample, MAX_PROBE)


def check_epochs(problem: ProblemShape, solver: str) -> None:
    """Raise ConfigError for a single epoch: the first pass of such a solver takes no step."""
    if problem.epochs < 2:
        raise ConfigError(
            f"{mention('data.epochs', problem.epochs)} must be at least 2 with solver {solver!r}, "
            "whose first pass is not a step yet",
            "set it to the steps wished for and 1 more, or leave it out",
        )
