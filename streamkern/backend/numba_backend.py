"""The CPU backend with element-wise passes compiled by Numba, which only this module uses.

NumPy passes over a tile of squared distances once per operation, four times for the Laplace kernel,
which takes longer than the GEMM for few features. Compiled, the whole profile is one pass with
vector instructions. The BLAS still computes the matrix products.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend, tiles
from streamkern.backend.expression import once, render
from streamkern.backend.numba_random import fills
from streamkern.basics.optional import install_command, on_demand

_f4 = np.float32
# The only fast-math flag allows fused multiply-add: NaN is kept, and sums keep their order.
_FLAGS = frozenset({"contract"})
# Largest number of columns of W for which the compiled product is faster than the BLAS.
THIN = 12
# Number of features that are added in one pass over a tile of L1 distances.
L1_FEATURES = 8
# Number of columns that are compared in one pass over a tile.
COUNTED_COLUMNS = 8


@cache
def numba_problem() -> str | None:
    """Return why Numba cannot be used, or None if it can.

    Imports Numba, because it may be installed in a version that does not match NumPy's.
    """
    if importlib.util.find_spec("numba") is None:
        return f"Numba is not installed ({install_command('fast')})"
    try:
        on_demand("numba")
    except Exception as error:  # usually an ImportError that names the required versions
        return f"Numba cannot be imported ({error})"
    return None


def jit(function: Callable[..., Any], flags: frozenset[str] = _FLAGS) -> Callable[..., Any]:
    """Return a function that is compiled at its first call, and runs without Python's GIL.

    flags : fast-math flags of LLVM.
    """
    njit = on_demand("numba").njit
    decorator: Callable[..., Any] = njit(nogil=True, fastmath=set(flags), error_model="numpy")
    compiled: Callable[..., Any] = decorator(function)
    return compiled


class CompiledBackend(Backend):
    """The CPU backend with compiled element-wise passes in float32; float64 is left to NumPy."""

    accelerator = "numba"
    norms_in_columns = False
    library_bytes = 144 << 20

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.fills = fills(jit)

    def describe(self) -> dict[str, object]:
        """Return the facts of `Backend` and Numba's version, because versions round differently."""
        return super().describe() | {"accelerator": f"numba {version('numba')}"}

    def apply_profile(
        self, kernel: Any, tile: Array, scale: float, norms: tuple[Array, Array] | None
    ) -> None:
        """Apply the profile in one pass if it has an expression without powers.

        NumPy computes powers faster, with vector instructions.
        """
        by_numpy = (
            kernel.expression is None or kernel.geometry == "l1" or "pow(" in kernel.expression
        )
        if by_numpy or tile.dtype != np.float32 or norms is None:
            super().apply_profile(kernel, tile, scale, norms)
        else:
            _profile(kernel.expression)(tile, *norms, _f4(scale))

    def l1_distances(self, A: Array, B: Array, out: Array) -> None:
        """Set out to the L1 distances, adding several features in each pass over a row."""
        if out.dtype != np.float32:
            super().l1_distances(A, B, out)
            return
        with self.workspace(B.shape[::-1], B.dtype) as Bt:
            Bt[...] = B.T
            out[...] = 0
            for start in range(0, A.shape[1], L1_FEATURES):
                features = slice(start, start + L1_FEATURES)
                _l1_part(len(Bt[features]))(A[:, features], Bt[features], out)

    def add_unequal(self, A: Array, B: Array, weights: Sequence[float], out: Array) -> None:
        """Add the weights of the columns in which rows differ, in one pass for all columns."""
        if out.dtype != np.float32:
            super().add_unequal(A, B, weights, out)
            return
        with self.workspace(B.shape[::-1], B.dtype) as Bt:
            Bt[...] = B.T
            _unequal(len(Bt))(A, Bt, np.array(weights, _f4), out)

    def add_count_of_unequal(self, A: Array, B: Array, weight: float, out: Array) -> None:
        """Add the weight of each unequal column, with a pass for every few columns."""
        if out.dtype != np.float32:
            super().add_count_of_unequal(A, B, weight, out)
            return
        with self.workspace(B.shape[::-1], B.dtype) as Bt:
            Bt[...] = B.T
            weights = np.full(COUNTED_COLUMNS, weight, _f4)
            for columns in tiles(len(Bt), COUNTED_COLUMNS):
                part = Bt[columns]
                _unequal(len(part))(A[:, columns], part, weights, out)

    def multiply_sparse(self, rows: Sequence[Array], columns: Sequence[Array], out: Array) -> None:
        """Set out to the product row by row; SciPy would first form a sparse result."""
        _sparse_product()(*rows, *columns, out)

    def add_product(self, tile: Array, W: Array, out: Array) -> None:
        """Add a product with few columns row by row, for which the BLAS is slower."""
        if W.shape[1] > THIN or tile.dtype != np.float32:
            super().add_product(tile, W, out)
            return
        with self.workspace(W.shape[::-1], W.dtype) as Wt:
            Wt[...] = W.T
            _thin_product(len(Wt))(tile, Wt, out)


@once
def _sparse_product() -> Callable[..., None]:
    """Return product(A's values, columns and row starts, the same of B, out): out = A @ B."""

    def product(
        A_values: Array, A_columns: Array, A_starts: Array,
        B_values: Array, B_columns: Array, B_starts: Array, out: Array,
    ) -> None:  # fmt: skip
        for i in range(out.shape[0]):
            row = out[i]
            row[:] = 0
            for e in range(A_starts[i], A_starts[i + 1]):
                value, k = A_values[e], A_columns[e]
                for q in range(B_starts[k], B_starts[k + 1]):
                    row[B_columns[q]] += value * B_values[q]

    return jit(product, frozenset())


@once
def _thin_product(c: int) -> Callable[[Array, Array, Array], None]:
    """Return product(tile (r, t), Wt (c, t), out (r, c)): out += tile @ Wt.T.

    The sums of a row are in registers, which is why the source is generated for c columns.
    """
    columns = range(c)
    source = (
        "def product(tile, Wt, out):\n"
        + "".join(f"    w{k} = Wt[{k}]\n" for k in columns)
        + "    for i in range(tile.shape[0]):\n"
        "        row = tile[i]\n"
        + "".join(f"        a{k} = f4(0)\n" for k in columns)
        + "        for j in range(row.size):\n"
        "            v = row[j]\n"
        + "".join(f"            a{k} += v * w{k}[j]\n" for k in columns)
        + "".join(f"        out[i, {k}] += a{k}\n" for k in columns)
    )
    return _jit_text("product", source, _FLAGS | {"reassoc"})


@once
def _l1_part(n: int) -> Callable[..., None]:
    """Return part(A (r, n), Bt (n, t), out (r, t)): out += sums of |a - b| over n features."""
    return _sum_of_terms("A, Bt, out", [f"abs(a{k} - b{k}[j])" for k in range(n)])


@once
def _unequal(n: int) -> Callable[..., None]:
    """Return part(A (r, n), Bt (n, t), w (n,), out (r, t)): out += w of the columns that differ."""
    terms = [f"(w{k} if a{k} != b{k}[j] else f4(0))" for k in range(n)]
    # The weights are loaded before the loops. Because `w` may overlap `out`, loads within the loop
    # would prevent vector instructions.
    weights = "".join(f"    w{k} = w[{k}]\n" for k in range(n))
    return _sum_of_terms("A, Bt, w, out", terms, weights)


def _sum_of_terms(arguments: str, terms: list[str], prologue: str = "") -> Callable[..., None]:
    """Return a compiled part(arguments), which adds the sum of the terms to each out[i, j].

    terms : for each column k of A, an expression of ak = A[i, k] and bk[j] = Bt[k, j].
    prologue : statements before the loops.
    """
    columns = range(len(terms))
    source = (
        f"def part({arguments}):\n{prologue}"
        + "".join(f"    b{k} = Bt[{k}]\n" for k in columns)
        + "    for i in range(out.shape[0]):\n"
        "        row = out[i]\n"
        + "".join(f"        a{k} = A[i, {k}]\n" for k in columns)
        + "        for j in range(row.size):\n"
        f"            row[j] += {' + '.join(terms)}\n"
    )
    return _jit_text("part", source)


def _jit_text(
    name: str, source: str, flags: frozenset[str] = _FLAGS, **functions: Any
) -> Callable[..., None]:
    """Compile the function `name` defined in `source`, where f4 is float32.

    functions : other functions that the source calls, by name.
    """
    names: dict[str, Any] = {"f4": _f4, **functions}
    exec(compile(source, f"<{name}>", "exec"), names)
    return jit(names[name], flags)


@once
def _profile(expression: str) -> Callable[[Array, Array, Array, np.float32], None]:
    """Return profile(tile of products, row norms, column norms, scale), which works in place.

    NaN is kept, and a negative distance becomes zero. The compiler removes the variables that the
    expression does not use.
    """
    source = (
        "def profile(tile, row_norms, column_norms, scale):\n"
        "    for i in range(tile.shape[0]):\n"
        "        row, norm = tile[i], row_norms[i]\n"
        "        for j in range(row.size):\n"
        "            p, x, z = row[j], norm, column_norms[j]\n"
        "            s = (x + z - f4(2) * p) * scale\n"
        "            s = f4(0) if s < f4(0) else s\n"
        f"            row[j] = {render(expression, 'f4({})')}\n"
    )
    return _jit_text("profile", source, sqrt=np.sqrt, cos=_cos(), exp=_exp())


@once
def _exp() -> Callable[..., Any]:
    """Return exp in float32, computed by arithmetic that compilers vectorise.

    The result is 0 for arguments below -87, and at most 2^127.5. It is 2^k times the Taylor
    polynomial of 2^r on |r| <= 1/2, which is accurate to 2e-8. The product x log2(e) is rounded
    once, so the relative error grows like |x| eps; for exp(x) <= 1, as in a kernel, the absolute
    error is below eps.
    """
    log2e, lowest, highest = _f4(1.44269504), _f4(-126.0), _f4(127.5)
    c1, c2, c3 = _f4(6.9314718e-1), _f4(2.4022651e-1), _f4(5.5504109e-2)
    c4, c5, c6 = _f4(9.6181291e-3), _f4(1.3333558e-3), _f4(1.5403530e-4)
    one, zero = _f4(1.0), _f4(0.0)

    def exp(x: Any) -> Any:
        y = x * log2e
        y = lowest if y < lowest else y  # NaN stays NaN in both comparisons
        y = highest if y > highest else y
        k = np.rint(y)
        r = y - k
        p = (((((c6 * r + c5) * r + c4) * r + c3) * r + c2) * r + c1) * r + one
        power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
        return zero if y <= lowest else p * power

    return jit(exp)


@once
def _cos() -> Callable[..., Any]:
    """Return cos in float32, computed by arithmetic that compilers vectorise, for |x| below 2^30.

    The result is (-1)^k times the Taylor polynomial on |x - k pi| <= pi / 2, which is accurate to
    1e-8. pi is the sum of three numbers, so that k pi is as accurate as x if k has fewer than 13
    bits.
    """
    per_pi = _f4(1 / np.pi)
    pi1, pi2, pi3 = _f4(3.140625), _f4(9.67502593994140625e-4), _f4(1.509957990978376432e-7)
    c1, c2, c3 = _f4(-1 / 2), _f4(1 / 24), _f4(-1 / 720)
    c4, c5, c6 = _f4(1 / 40320), _f4(-1 / 3628800), _f4(1 / 479001600)
    one = _f4(1.0)

    def cos(x: Any) -> Any:
        k = np.rint(x * per_pi)
        r = ((x - k * pi1) - k * pi2) - k * pi3
        q = r * r
        p = (((((c6 * q + c5) * q + c4) * q + c3) * q + c2) * q + c1) * q + one
        return p if (np.int32(k) & np.int32(1)) == 0 else -p

    return jit(cos)
