"""Arrays that come back in part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamkern.backend.base import Backend
from streamkern.backend.ranks import Communicator
from streamkern.rundir.run_directory import RunDirectory
from streamkern.train.setup.device_loader import DeviceLoader


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stripe_is_what_the_whole_has_there(tmp_path: Path, size: int) -> None:
    """Over chunks of any shape, each byte checked; it takes its share of the memory."""
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
        found = arriving.arrays(saved)
        rows = ranks.triangle(1500)
        np.testing.assert_array_equal(found["H.0"], H[rows, : rows.stop])
        np.testing.assert_array_equal(found["start"], H[:, :2])
        assert found["H.0"].size <= 1.01 * H.size / size
