"""Launches of a step on a GPU, counted on the stand-in: the host pays 5 to 50 us for each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import streamkern as sk
from streamkern.backend.batch import Batch
from streamkern.backend.devices import get_backend
from streamkern.stream.batch_reader import BatchReader
from streamkern.stream.feed import Feed
from streamkern.stream.sources.transforms import GaussianNoise, Scale
from streamkern.stream.target_scale import TargetScale
from tests import fake_cupy
from tests.host_cuda import COMPILER
from tests.launches import counted, total
from tests.plans import solver_settings
from tests.runs import CLASSES
from tests.solver_problems import RIDGED, SOLVERS, make_case, operator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

TRIANGLE_BYTES = 3 * 8 * 4
"""Blocks of 8 rows are halved twice with it, as those of 15 000 are with the bytes of a GPU, and a
block of 32 five times, once less than one of 60 000."""
LIMITS = {
    "blocks": 71, "blocks, recomputed": 85, "blocks, fourier": 67, "eigenpro3, resident": 66,
    "eigenpro3, inexact": 75, "eigenpro3": 31, "eigenpro4": 40,
}  # fmt: skip
"""Launches of a step, if they are more than 28; of six blocks of 6 or 7, of which one evaluates its
ridge, and with a projection in every step."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    monkeypatch.setattr("streamkern.backend.device_algebra.TRIANGLE_BYTES", TRIANGLE_BYTES)


def launches(
    name: str, ridge: float = 0.0, factor_dtype: str = "auto", **changes: Any
) -> list[Counter[str]]:  # fmt: skip
    """Return the launches of three steps after the first."""
    precision = "exact" if "fourier" in name else "high"
    options = solver_settings(damping=1e-3, ridge=ridge, factor_dtype=factor_dtype)
    with get_backend("gpu") as backend, backend.active():
        case = make_case(
            operator(precision=precision, backend=backend), name, options=options, **changes
        )
        solver = case.solver()
        state, n_launches = solver.init(), []
        for t in range(4):
            rows = case.batch(t % 2)  # whole batches
            X, Y = (backend.asarray(a[rows], solver.op.dtype) for a in (case.X, case.Y))
            with counted() as counts:
                solver.step(state, Batch(X, Y, rows))
            n_launches.append(counts)
    return n_launches[1:]


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_step_needs_few_launches(name: str) -> None:
    assert max(map(total, launches(name, 0.01 if name in RIDGED else 0.0))) <= LIMITS.get(name, 28)


@pytest.mark.parametrize(("classes", "limit"), [(CLASSES, 6), (None, 4)])
def test_a_batch_of_scaled_and_noisy_bytes_takes_few_launches(
    classes: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a cast, a scale, noise, and targets; whole images, of which a host scales few rows at
    a time."""
    monkeypatch.setattr("streamkern.stream.sources.transforms.SCALE_SLAB_ENTRIES", 100)
    rng = np.random.default_rng(0)
    X, ids = rng.integers(0, 256, (60, 4, 4, 1)).astype(np.uint8), rng.integers(0, 3, 60)
    data = sk.ArraySource(X, ids if classes else rng.normal(size=(60, 3)), classes=classes)
    source = sk.AugmentedSource(data, 1, [Scale("global"), GaussianNoise(0.3)])
    targets = TargetScale(np.full(3, 0.3), np.full(3, 2.0))
    with (
        get_backend("gpu") as backend,
        BatchReader(source, batch_size=20, seed=0) as reader,
        Feed(reader, backend, dtype=np.float32, seed=0, targets=targets) as feed,
    ):
        batches, n_launches = feed.epoch(0), []
        while len(n_launches) < 3:
            with backend.active(), counted() as counts:
                next(batches)
            n_launches.append(total(counts))
    assert max(n_launches[1:]) <= limit


def test_four_blocks_need_60_launches() -> None:
    """Check also at most 30 views of arrays; a small ridge is evaluated in few steps."""
    n_launches = launches("blocks", ridge=1e-6, block_size=8, p=32)
    assert max(map(total, n_launches)) <= 60
    assert max(counts["view"] for counts in n_launches) <= 30


def test_one_block_needs_40_launches() -> None:
    """Check also that factors in float16 take eight more."""
    plain, halves = (
        max(map(total, launches("block", factor_dtype=dtype, block_size=32, p=32)))
        for dtype in ("auto", "float16")
    )
    assert plain + 2 <= 40  # a halving more in both products
    assert halves <= plain + 8
