"""Check the CUDA kernel that turns products into kernel values, on the host and on GPUs."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from streamkern.backend import epilogue as module
from streamkern.backend.epilogue import Epilogues, epilogue_source
from streamkern.kernels.builtin import Dispersal, Gaussian, Kernel, Laplace, Polynomial, get_kernel
from tests import fake_cupy, host_cuda
from tests.launches import counted, total
from tests.solver_problems import RADIAL

needs_compiler = pytest.mark.skipif(host_cuda.COMPILER is None, reason="needs a C++ compiler")
needs_nvrtc = pytest.mark.skipif(
    host_cuda.nvrtc() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
)
OTHERS: dict[str, Kernel] = {
    "dispersal": Dispersal(1.0, 1.3),
    "polynomial": Polynomial(3, 0.5, 2.0),
    "sum": 0.5 * Laplace(3.0) + Gaussian(2.0) * Polynomial(2),
}
KERNELS = {name: get_kernel(name) for name in RADIAL} | OTHERS
EXPRESSIONS = {name: str(kernel.expression) for name, kernel in KERNELS.items()}
# Turing, Ampere, Hopper, Blackwell.
ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
DTYPES = {"float": np.dtype(np.float32), "double": np.dtype(np.float64)}


def on_device(a: Any) -> Any:
    return np.asarray(a).view(fake_cupy.Array)


def launch_epilogue(name: str, tile: np.ndarray, *norms: Any, scale: float = 1.0) -> None:
    """Replace the products in a tile by the values of a kernel, by one launch on the host."""
    rows, cols = (on_device(np.asarray(a, tile.dtype)) for a in norms)
    epilogues = Epilogues(fake_cupy.modules()["cupy"])
    epilogues(EXPRESSIONS[name], on_device(tile), (rows, cols), scale)


def epilogue(name: str, dtype: Any, products: Any, *norms: Any, scale: float = 1.0) -> np.ndarray:
    """Return the values of a kernel for products (r, t) and norms (r,), (t,)."""
    tile = np.array(products, dtype)
    launch_epilogue(name, tile, *norms, scale=scale)
    return tile


def problem(dtype: Any, r: int, t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return products and norms; a few distances are negative."""
    rng = np.random.default_rng(0)
    tile_and_norms = rng.normal(size=(r, t)), rng.uniform(1, 9, r), rng.uniform(1, 9, t)
    product, rows, cols = (a.astype(dtype) for a in tile_and_norms)
    return product, rows, cols


@needs_compiler
@pytest.mark.parametrize("columns", [48, 50])  # rows that begin at multiples of 16 bytes, or not
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", RADIAL)
def test_epilogue_is_the_kernel_to_ten_ulp(name: str, dtype: Any, columns: int) -> None:
    """Check against the profile in float64 of distances that are rounded in the same places.

    The rounding of an exponent -t, here up to about 5, changes its exponential by t / 2 ulp.
    """
    product, rows, cols = problem(dtype, 40, columns)
    value = epilogue(name, dtype, product, rows, cols, scale=0.7)
    s = ((rows[:, None] + cols) - dtype(2) * product) * dtype(0.7)
    truth = get_kernel(name).profile(np.maximum(s, 0).astype(np.float64), np)
    assert value.dtype == dtype
    assert np.all(np.abs(value - truth) <= 10 * np.spacing(truth.astype(dtype)))


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_epilogue_of_products_is_the_kernel(name: str, dtype: Any) -> None:
    """Check up to a few roundings of the largest term, as NumPy sums in another order."""
    rng, kernel = np.random.default_rng(0), OTHERS[name]
    A, B = rng.normal(size=(40, 6)).astype(dtype), rng.normal(size=(50, 6)).astype(dtype)
    p, x, z = A @ B.T, (A * A).sum(axis=1), (B * B).sum(axis=1)
    value = epilogue(name, dtype, p, x, z)
    p, x, z = (a.astype(np.float64) for a in (p, x, z))
    truth = kernel.of_products(p.copy(), x[:, None], z, np)
    assert np.abs(value - truth).max() <= 20 * np.finfo(dtype).eps * np.abs(truth).max()


@needs_compiler
@pytest.mark.parametrize("name", RADIAL)
def test_epilogue_keeps_nan_and_takes_marked_rows_for_the_same(name: str) -> None:
    products = [[np.nan, np.inf, 6.0, 5.0]]  # NaN, marked, a distance below zero, zero
    value = epilogue(name, np.float32, products, [4.0], [6.0] * 4)
    np.testing.assert_array_equal(value, [[np.nan, 1.0, 1.0, 1.0]])


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("width", "offset", "columns"),
    [
        (1300, 0, 1300),  # several blocks of columns
        (1300, 4, 1290),  # aligned rows, the last columns one by one
        (1300, 1, 1290),  # rows that begin beside multiples of 16 bytes
        (1301, 4, 1290),  # the first row begins at a multiple of 16 bytes, others do not
        (7, 4, 1),  # a single column
    ],
)
def test_every_layout_has_the_same_bits(dtype: Any, width: int, offset: int, columns: int) -> None:
    """Check also that the entries beside a tile stay as they are."""
    products, rows, cols = problem(dtype, 9, columns)
    expected = np.concatenate(
        [epilogue("laplace", dtype, products[:, [j]], rows, cols[[j]]) for j in range(columns)], 1
    )
    memory = np.zeros(9 * width + 16, dtype)
    start = -memory.ctypes.data % 16 // memory.itemsize  # NumPy aligns to 16 bytes; be sure
    matrix = memory[start : start + 9 * width].reshape(9, width)
    matrix[...] = 7
    tile = matrix[:, offset : offset + columns]
    tile[...] = products
    launch_epilogue("laplace", tile, rows, cols)
    np.testing.assert_array_equal(tile, expected)
    matrix[:, offset : offset + columns] = 7
    assert np.all(matrix == 7)


@needs_compiler
@pytest.mark.parametrize(("shape", "max_blocks"), [((70_000, 3), 1 << 15), ((5, 3000), 2)])
def test_a_launch_of_few_blocks_reaches_every_row(
    shape: tuple[int, int], max_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check more rows than blocks along them, and rows of more blocks than the largest number."""
    monkeypatch.setattr(module, "MAX_BLOCKS", max_blocks)
    products, rows, cols = problem(np.float32, *shape)
    with counted() as launches:
        value = epilogue("gaussian", np.float32, products, rows, cols)
    assert total(launches) == 1
    s = np.maximum(rows[:, None] + cols - 2 * products, 0)
    np.testing.assert_allclose(value, np.exp(-s / 2), rtol=1e-6)


@needs_compiler
@pytest.mark.parametrize("odd", [0, 1])
def test_offsets_beyond_32_bits_are_computed(odd: int) -> None:
    """Check rows that begin more than 2^31 and 2^32 entries after the first one.

    The tile is a few columns of a matrix of which the system provides only the pages in use.
    """
    products, rows, cols = problem(np.float32, 4, 8)
    width = (3 << 29) + odd
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    with mmap.mmap(-1, 4 * (3 * width + 8), flags=flags) as memory:
        entries = np.frombuffer(memory, np.float32)
        tile = np.lib.stride_tricks.as_strided(entries, (4, 8), (4 * width, 4))
        tile[...] = products
        launch_epilogue("laplace", tile, rows, cols)
        value = tile.copy()
        del tile, entries
    np.testing.assert_array_equal(value, epilogue("laplace", np.float32, products, rows, cols))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_tile_is_not_launched(shape: tuple[int, int]) -> None:
    with counted() as launches:
        epilogue("laplace", np.float32, np.empty(shape), np.ones(shape[0]), np.ones(shape[1]))
    assert total(launches) == 0


def test_arrays_that_the_kernel_would_misread_are_refused() -> None:
    tile, rows, cols = problem(np.float32, 4, 6)
    for wrong_rows, wrong_cols in (
        (rows.astype(np.float64), cols), (rows, np.repeat(cols, 2)[::2]), (rows[:3], cols),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            Epilogues(None)("s", tile, (wrong_rows, wrong_cols), 1.0)
    with pytest.raises(AssertionError, match="rows must be contiguous"):
        Epilogues(None)("s", tile.T, (cols, rows), 1.0)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("T", DTYPES)
@pytest.mark.parametrize("name", sorted(EXPRESSIONS))
def test_epilogue_compiles_without_spills(name: str, T: str, architecture: str) -> None:
    code, log = host_cuda.compile_for(architecture, epilogue_source(EXPRESSIONS[name], DTYPES[T]))
    assert b"streamkern_epilogue" in code
    assert "0 bytes stack frame, 0 bytes spill stores" in log


@pytest.mark.parametrize(("T", "vector"), [("float", "v4.f32"), ("double", "v2.f64")])
@needs_nvrtc
@pytest.mark.parametrize("name", sorted(EXPRESSIONS))
def test_epilogue_accesses_16_bytes_and_keeps_floats_in_float(
    T: str, vector: str, name: str
) -> None:
    """Check that no constant is left in double precision, which would take many times as long."""
    code = host_cuda.ptx_for("sm_80", epilogue_source(EXPRESSIONS[name], DTYPES[T]))
    assert f"ld.global.{vector}" in code
    assert f"st.global.{vector}" in code
    assert ".local" not in code
    if T == "float":
        assert ".f64" not in code
