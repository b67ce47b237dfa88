"""Small states for the tests of run directories; each is a function of its step."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamkern.rundir.run_directory import SavedGroup
from tests.runs import assert_same_bits


def state(step: int) -> dict[str, np.ndarray]:
    """Return the state that is saved at `step`, so that any process can check the state of
    another."""
    rng = np.random.default_rng([step, 7])
    return {
        "alpha": rng.standard_normal((500, 4)).astype(np.float32),
        "t": np.array(step),
        "zeros": np.zeros((3, 2)),
        "X_tmp": np.empty((0, 3)),
    }


def meta(step: int) -> dict[str, Any]:
    return {"step": step, "eta": 0.1 * step}


def assert_is_state(saved: SavedGroup | None, step: int | None = None) -> int:
    assert saved is not None
    assert step in (None, saved.step)
    assert saved.meta == meta(saved.step)
    assert_same_bits(saved.arrays, state(saved.step))
    return saved.step
