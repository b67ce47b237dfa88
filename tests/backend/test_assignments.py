"""Check assignments by NumPy and CUDA source against arithmetic in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamkern.backend.assignments import Assignments
from streamkern.backend.base import Backend
from streamkern.kernels.points import preparation
from streamkern.solver import base, block_ridge, block_step
from tests import fake_cupy, host_cuda

USED = {
    f"{i} {assignments.name}": assignments
    for i, assignments in enumerate((
        base.AVERAGE, block_ridge.ADD_RIDGE, block_ridge.ADD_WITH_JITTER, block_step.MOVE_WEIGHTS,
        block_step.DAMP, block_step.DAMP_WEIGHTED, block_step.LEAVE_OWN,
        block_step.residual(0, 3, True), block_step.residual(0, 1, False),
        block_step.residual(16, 18, True),
    ))
}  # fmt: skip


def values(assignments: Assignments, dtype: Any) -> dict[str, Any]:
    """Return positive arrays (5, 3) of the inputs and the outputs, and a number for the others."""
    rng, numbers = np.random.default_rng(0), ("eta", "weight", "share", "ridge", "more")
    names = [*assignments.inputs, *assignments.outputs]
    return {
        name: 0.3 if name in numbers else rng.uniform(0.5, 2, (5, 3)).astype(dtype)
        for name in names
    }


@pytest.mark.parametrize("name", sorted(USED))
def test_merged_assignments_equal_separate_formulas(name: str) -> None:
    """Check in float64 that the result equals the separate formulas, to the last bit."""
    assignments = USED[name]
    inputs = values(assignments, np.float64)
    truth = dict(inputs)
    for target, value in assignments.lines:
        truth[target] = eval(value, {}, truth)
    Backend(1).assign(assignments, **inputs)
    for output in assignments.outputs:
        np.testing.assert_array_equal(inputs[output], truth[output])


@pytest.mark.skipif(host_cuda.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", sorted(USED))
def test_cuda_assignments_equal_numpy(name: str) -> None:
    assignments = USED[name]
    inputs = values(assignments, np.float32)
    on_device = {
        key: value.copy().view(fake_cupy.Array) if isinstance(value, np.ndarray) else value
        for key, value in inputs.items()
    }
    Backend(1).assign(assignments, **inputs)
    kernel = assignments.kernel(fake_cupy.modules()["cupy"])
    kernel(*assignments.arguments(on_device))
    for output in assignments.outputs:
        np.testing.assert_array_equal(np.asarray(on_device[output]), inputs[output])


def test_assignment_reads_overlapping_operand_before_writing() -> None:
    """Check that a target whose memory is part of a later operand is read before it is written."""
    x, y = np.array([3.0]), np.array([5.0])
    Backend(1).assign(Assignments("t", "x = (y + 1) * (x + y)"), x=x, y=y)
    assert x == 6 * 8


@pytest.mark.parametrize("doubled", [False, True])
def test_high_precision_points_are_two_halves(doubled: bool) -> None:
    X = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    names = [f"{side}{i}" for side in ("left", "right") for i in range(3)]
    outputs = {name: np.empty_like(X) for name in ("x", *names)}
    assignments = preparation(
        "high", x_is_moved=False, shifted=True, scaled=True, left=True, right=True, doubled=doubled
    )
    Backend(1).assign(assignments, X=X, shift=np.float32(0.5), factor=0.25, **outputs)
    expected_points = (X - np.float32(0.5)) * np.float32(0.25)
    h = expected_points.astype(np.float16).astype(np.float32)
    low = (expected_points - h).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(outputs["x"], h + low)
    factor = -2 if doubled else 1
    for name, part in zip(names, (h, h, low, h, low, h), strict=True):
        np.testing.assert_array_equal(outputs[name], part * (factor if "left" in name else 1))


@pytest.mark.skipif(host_cuda.nvrtc() is None, reason="needs NVIDIA's compiler")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", sorted(USED))
def test_assignments_compile_without_float64(name: str, architecture: str) -> None:
    assignments = USED[name]
    kernels: dict[str, Any] = {}

    class Library:
        @staticmethod
        def ElementwiseKernel(ins: str, outs: str, body: str, name: str, preamble: str) -> None:
            parameters = ", ".join(part.replace("T ", "T* ") for part in (*ins.split(","), outs))
            arrays = [part.split()[-1] for part in (*ins.split(","), *outs.split(","))]
            loads = " ".join(f"T& {x} = {x}_[i];" for x in arrays)
            parameters = ", ".join(f"T* {x}_" for x in arrays)
            kernels["text"] = (
                f'typedef float T; {preamble} extern "C" __global__ void run({parameters}) '
                f"{{ int i = threadIdx.x; {loads} {body} }}"
            )

    assignments.kernel(Library)
    code, log = host_cuda.compile_for(architecture, kernels["text"])
    assert code
    assert "spill" not in log or "0 bytes spill stores" in log
    assert ".f64" not in host_cuda.ptx_for(architecture, kernels["text"])
