"""Test arrays that are sharded over ranks: saved as a whole, and loaded in part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.ranks import Communicator
from streamkern.basics.errors import CheckpointError
from streamkern.rundir.chunked_array import ChunkedArray
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.setup.sharded_arrays import DeviceLoader, gather_and_save, stripes_in
from tests.rank_threads import on_threads

SIZES = {"H.0": 23, "H.1": 8, "L": 1}
WHOLE = {name: np.tril(np.random.default_rng(n).normal(size=(n, n))) for name, n in SIZES.items()}


def gather(ranks: Communicator, save: Callable[[dict[str, ChunkedArray]], object]) -> None:
    """Gather the arrays of `WHOLE` on rank 0, from the rows of this rank; `save` gets them."""
    arrays: dict[str, Any] = {"start": np.ones((9, 2))}
    for name, n in SIZES.items():
        rows = ranks.triangle(n)
        arrays[name] = WHOLE[name][rows, : rows.stop]
    stripes = stripes_in(arrays, ("H.", "L"), ranks)
    gather_and_save(stripes, ranks, Backend(threads=1), save)


@pytest.mark.parametrize("size", [2, 5, 9])
def test_gathered_arrays_equal_all_rows(size: int) -> None:
    """Check parts of any size, which several threads request at the same time."""
    saved = {name: np.full((n, n), np.nan) for name, n in SIZES.items()}

    def save(parts: dict[str, ChunkedArray]) -> None:
        def copy(name: str, part: slice) -> None:
            saved[name][part] = parts[name][part]

        assert {name: part.shape for name, part in parts.items()} == {
            k: (n, n) for k, n in SIZES.items()
        }
        expected = [
            (name, slice(i, min(i + 5, n))) for name, n in SIZES.items() for i in range(0, n, 5)
        ]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda arguments: copy(*arguments), expected))

    on_threads(size, lambda ranks: gather(ranks, save))
    for name, full in WHOLE.items():
        np.testing.assert_array_equal(saved[name], full)


def test_error_on_rank_0_ends_all_ranks() -> None:
    """Check that an error on rank 0, such as a full disk, is raised, and that no rank waits."""

    def save(parts: dict[str, ChunkedArray]) -> None:
        parts["H.0"][0:5]
        raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="the disk is full"):
        on_threads(3, lambda ranks: gather(ranks, save))


def test_lost_rank_ends_saving() -> None:
    """Check that threads which request more rows fail, too."""

    def lose_rank_1(ranks: Communicator) -> None:
        if ranks.rank == 1:
            ranks.allgather([23]), ranks.allgather([8]), ranks.allgather([1])
            raise ValueError("the rank is gone")
        gather(ranks, lambda parts: [parts["H.0"][i : i + 1] for i in range(23)])

    with pytest.raises(ValueError, match="the rank is gone"):
        on_threads(2, lose_rank_1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_stripe_equals_part_of_whole_array(tmp_path: Path, size: int) -> None:
    """Check chunks of any shape, with every byte verified and the memory of its share."""
    H = np.tril(np.random.default_rng(0).normal(size=(1500, 1500)))  # in chunks of 8 MiB
    with RunDirectory(tmp_path / "run") as run:
        run.write_config({})
        run.save_setup({"H.0": H, "start": H[:, :2].copy()}, {})
    ranks = Communicator()
    ranks.size = size
    for ranks.rank in range(size):
        arriving = DeviceLoader(
            Backend(threads=1), lambda name: True,
            lambda name, n: ranks.triangle(n) if name.startswith("H.") else None,
        )  # fmt: skip
        saved = RunDirectory(tmp_path / "run", writable=False).load_setup(arriving)
        assert saved is not None
        actual = arriving.arrays(saved)
        rows = ranks.triangle(1500)
        np.testing.assert_array_equal(actual["H.0"], H[rows, : rows.stop])
        np.testing.assert_array_equal(actual["start"], H[:, :2])
        assert actual["H.0"].size <= 1.01 * H.size / size
