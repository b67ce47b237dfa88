"""Measure the processor time of a step on a GPU, except its launches, without a GPU.

    python -m benchmarks.host_step [--centers 60000] [--blocks 4 12 1] [--json FILE]

Needs CuPy, and no driver: its arrays are in the memory of the host, so they are made, sliced and
passed on as on a device, and nothing is launched. A figure is the processor time of this thread.
CuPy's own time for a launch, 5 to 10 us on a fast core, must be added for each of `launches`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import json_parser
from streamkern.backend.batch import Batch
from streamkern.backend.cupy_backend import CupyBackend
from streamkern.backend.epilogue import Epilogues
from streamkern.backend.row_major import RowMajor
from streamkern.backend.workspaces import SharedWorkspaces
from streamkern.basics.optional import on_demand
from streamkern.kernels.builtin import Laplace
from streamkern.kernels.points import Points, point_width
from streamkern.kernels.products import KernelOperator
from streamkern.solver.base import State
from streamkern.solver.block_step import BlockSolver
from streamkern.solver.precondition.block import SKETCH, BlockPreconditioner, block_slices
from streamkern.solver.precondition.step_rule import StepRule

ROWS, FEATURES, OUTPUTS, RIDGE = 64, 784, 10, 1e-9
REPEATS, STEPS, WARM = 15, 40, 20
FUNCTIONS = ("multiply", "subtract", "negative", "reciprocal", "divide", "add")


class Idle:
    """CuPy's functions on arrays of host memory; operations are counted and not run."""

    def __init__(self, cupy: Any) -> None:
        self._cupy, self.launches = cupy, 0
        self.ndarray = cupy.ndarray

        def counted(array: Any, *args: Any, **options: Any) -> Any:
            self.launches += 1
            return options.get("out", array)

        operators = ("__imul__", "__iadd__", "__isub__", "__itruediv__", "__mul__", "sum")
        methods = dict.fromkeys(operators, counted) | {"__setitem__": counted}
        self._kind: Any = type("HostArray", (cupy.ndarray,), methods)
        for name in FUNCTIONS:
            setattr(self, name, lambda *args, out=None, **options: counted(out))
        for name in ("ElementwiseKernel", "ReductionKernel", "RawKernel"):
            setattr(self, name, lambda *args, **options: counted)
        self.gemmEx = self.gemmStridedBatchedEx = counted
        self.zeros = self.empty

    def asarray(self, array: Any, dtype: Any = None) -> Any:
        """Return the array, which is of that dtype."""
        assert dtype in (None, array.dtype)
        return array

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        """Return an array whose memory nothing reads or writes: it has one element's."""
        memory = self._cupy.cuda.memory
        buffer = np.zeros(1)
        unowned = memory.UnownedMemory(buffer.ctypes.data, buffer.nbytes, buffer, 0)
        return self._kind(shape, dtype, memory.MemoryPointer(unowned, 0))


def idle_backend(library: Idle) -> CupyBackend:
    """Return a backend of that library, without a device."""
    backend: Any = object.__new__(CupyBackend)
    blas = SimpleNamespace(
        gemmEx=library.gemmEx, gemmStridedBatchedEx=library.gemmStridedBatchedEx,
        CUBLAS_COMPUTE_32F=68, CUBLAS_COMPUTE_64F=70, CUBLAS_OP_N=0, CUBLAS_OP_T=1,
        CUBLAS_GEMM_DEFAULT=-1,
    )  # fmt: skip
    types = {np.dtype(np.float16): 2, np.dtype(np.float32): 0, np.dtype(np.float64): 1}
    backend.xp, backend.name, backend.threads = library, "gpu:0", 1
    backend.blas = RowMajor(blas, types, lambda: 1)
    backend._workspaces = SharedWorkspaces(lambda: None)
    backend.epilogue, backend._assignments = Epilogues(library), {}
    backend._squares = {w: backend._sum_of_squares(w) for w in (False, True)}
    backend.active = nullcontext
    backend.asarray = lambda a, dtype=None: library.empty(np.shape(a), dtype or np.float32)
    made: CupyBackend = backend
    return made


def a_step(library: Idle, p: int, n_blocks: int) -> Callable[[], object]:
    """Return a step of p centers in so many blocks, with a ridge that is never evaluated again."""
    backend, empty, f4 = idle_backend(library), library.empty, np.float32
    op = KernelOperator(Laplace(20.0), backend, "high", np.zeros(FEATURES, f4))
    width = point_width(FEATURES, op.precision, backend, op.kernel)
    Z = Points(None, empty((p, width), np.float16), empty(p, f4), FEATURES)
    blocks = block_slices(p, -(-p // n_blocks))
    sizes = [block.stop - block.start for block in blocks]
    preconditioner = BlockPreconditioner(
        blocks, [empty((b, b), f4) for b in sizes],
        [StepRule(1e4, 18.0, 1.0, True, 5e3) for _ in blocks], 1e-5, [1e-6 for _ in blocks],
        sketches=[empty((b, SKETCH), f4) for b in sizes],
    )  # fmt: skip
    solver = BlockSolver(
        op, Z, preconditioner, seed=0, n_outputs=OUTPUTS, max_batch=ROWS, ridge=RIDGE
    )
    solver.ridge_term.stride = 1 << 60
    alpha, average = (empty((p, OUTPUTS), f4) for _ in range(2))
    state = State(alpha, average, steps=1, pending=solver._pending())
    batch = Batch(empty((ROWS, FEATURES), f4), empty((ROWS, OUTPUTS), f4), np.arange(ROWS))
    return lambda: solver.step(state, batch)


def measure(p: int, n_blocks: int, repeats: int = REPEATS) -> dict[str, Any]:
    """Return the launches and the host's microseconds of a step."""
    library = Idle(on_demand("cupy"))
    step = a_step(library, p, n_blocks)
    for _ in range(WARM):
        step()
    library.launches, times = 0, []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(STEPS):
            step()
        times.append((time.thread_time() - start) / STEPS * 1e6)
    launches = library.launches / (repeats * STEPS)
    return {"centers": p, "blocks": n_blocks, "launches": launches, "host_us": median(times)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each number of blocks."""
    parser = json_parser(__doc__)
    parser.add_argument("--centers", type=int, default=60_000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 12, 1])
    args = parser.parse_args(arguments)
    found = [measure(args.centers, n) for n in args.blocks]
    for figures in found:
        print("  ".join(f"{name} {value:g}" for name, value in figures.items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
