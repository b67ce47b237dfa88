"""Numba behind the methods of `backend.base`: the only module that names it.

NumPy passes over a tile of squared distances once per operation: four passes for the Laplace
kernel, about 1.0 ns an entry and thread, more than the GEMM takes at d = 16. Compiled, the whole
profile is one pass of vector instructions, about 0.23 ns, and the GEMMs stay with the BLAS.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.backend.expression import once, render
from streamkern.backend.numba_random import fills
from streamkern.basics.optional import install, on_demand
from streamkern.basics.randomness import Fills

_f4 = np.float32
# Fused multiply-add only: NaN is kept, and sums keep their order.
_FLAGS = frozenset({"contract"})
# Largest number of columns of W at which our product is faster than the BLAS: 0.3 ns against 0.4 ns
# an entry of the tile at 10 columns, the other way round at 16.
THIN = 12
# Features of a pass over L1 distances, for which each distance is loaded and stored once.
L1_FEATURES = 8


@cache
def numba_problem() -> str | None:
    """Return why compiled tiles cannot be used, or None. Imports Numba: versions may not match."""
    if importlib.util.find_spec("numba") is None:
        return f"Numba is not installed ({install('fast')})"
    try:
        on_demand("numba")
    except Exception as error:  # usually an ImportError that names the required versions
        return f"Numba cannot be imported ({error})"
    return None


def jit(function: Callable[..., Any], flags: frozenset[str] = _FLAGS) -> Callable[..., Any]:
    """Compile a function at its first call, to code that runs without the interpreter's lock."""
    njit = on_demand("numba").njit
    compiled: Callable[..., Any] = njit(nogil=True, fastmath=set(flags), error_model="numpy")
    made: Callable[..., Any] = compiled(function)
    return made


class CompiledBackend(Backend):
    """The CPU with compiled element-wise passes, in float32; float64 stays with NumPy."""

    accelerator = "numba"
    norms_in_columns = False
    library_bytes = 144 << 20

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.fills = _fills()

    def describe(self) -> dict[str, object]:
        """Return the description with the compiler's version: others may round differently."""
        return super().describe() | {"accelerator": f"numba {version('numba')}"}

    def apply_profile(
        self, kernel: Any, tile: Array, scale: float, norms: tuple[Array, Array] | None
    ) -> None:
        """Apply the profile in one pass if it has an expression. NumPy has vectorised powers."""
        plain = kernel.expression is None or kernel.geometry == "l1" or "pow(" in kernel.expression
        if plain or tile.dtype != np.float32 or norms is None:
            super().apply_profile(kernel, tile, scale, norms)
        else:
            _profile(kernel.expression)(tile, *norms, _f4(scale))

    def l1_distances(self, A: Array, B: Array, out: Array) -> None:
        """Set out to the L1 distances, several features in one pass over a row."""
        if out.dtype != np.float32:
            super().l1_distances(A, B, out)
            return
        with self.workspace(B.shape[::-1], B.dtype) as Bt:
            Bt[...] = B.T
            out[...] = 0
            for first in range(0, A.shape[1], L1_FEATURES):
                features = slice(first, first + L1_FEATURES)
                _l1_part(len(Bt[features]))(A[:, features], Bt[features], out)

    def add_unequal(self, A: Array, B: Array, weights: Sequence[float], out: Array) -> None:
        """Add the weights of all columns in one pass."""
        if out.dtype != np.float32:
            super().add_unequal(A, B, weights, out)
            return
        with self.workspace(B.shape[::-1], B.dtype) as Bt:
            Bt[...] = B.T
            _unequal(len(Bt))(A, Bt, np.array(weights, _f4), out)

    def multiply_sparse(self, rows: Sequence[Array], columns: Sequence[Array], out: Array) -> None:
        """Add up the products row by row: a fifth of the time of SciPy, which finds zeros first."""
        _sparse_product()(*rows, *columns, out)

    def add_product(self, tile: Array, W: Array, out: Array) -> None:
        """Add a thin product row by row: the BLAS is made for wider ones."""
        if W.shape[1] > THIN or tile.dtype != np.float32:
            super().add_product(tile, W, out)
            return
        with self.workspace(W.shape[::-1], W.dtype) as Wt:
            Wt[...] = W.T
            _thin_product(len(Wt))(tile, Wt, out)


@once
def _sparse_product() -> Callable[..., None]:
    """Return product(values, columns, starts of either side, out): out = rows @ columns."""

    def product(
        a: Array, places: Array, first: Array, b: Array, at: Array, start: Array, out: Array
    ) -> None:
        for i in range(out.shape[0]):
            row = out[i]
            row[:] = 0
            for e in range(first[i], first[i + 1]):
                v, f = a[e], places[e]
                for q in range(start[f], start[f + 1]):
                    row[at[q]] += v * b[q]

    return jit(product, frozenset())


@once
def _thin_product(c: int) -> Callable[[Array, Array, Array], None]:
    """Return product(tile (r, t), Wt (c, t), out (r, c)): out += tile @ Wt.T, sums in registers."""
    each = range(c)
    source = (
        "def product(tile, Wt, out):\n"
        + "".join(f"    w{k} = Wt[{k}]\n" for k in each)
        + "    for i in range(tile.shape[0]):\n"
        "        row = tile[i]\n"
        + "".join(f"        a{k} = f4(0)\n" for k in each)
        + "        for j in range(row.size):\n"
        "            v = row[j]\n"
        + "".join(f"            a{k} += v * w{k}[j]\n" for k in each)
        + "".join(f"        out[i, {k}] += a{k}\n" for k in each)
    )
    return _jit_text("product", source, _FLAGS | {"reassoc"})


@once
def _l1_part(n: int) -> Callable[..., None]:
    """Return part(A (r, n), Bt (n, t), out (r, t)): out += sums of |a - b| over n features."""
    return _sum_of_terms("A, Bt, out", [f"abs(a{k} - b{k}[j])" for k in range(n)])


@once
def _unequal(n: int) -> Callable[..., None]:
    """Return part(A (r, n), Bt (n, t), w (n,), out (r, t)): out += w of the unequal columns."""
    terms = [f"(w{k} if a{k} != b{k}[j] else f4(0))" for k in range(n)]
    # In locals: a load of w in the loop, which may be a part of `out`, keeps it from vectors.
    weights = "".join(f"    w{k} = w[{k}]\n" for k in range(n))
    return _sum_of_terms("A, Bt, w, out", terms, weights)


def _sum_of_terms(arguments: str, terms: list[str], first: str = "") -> Callable[..., None]:
    """Compile part(arguments): out[i, j] += the sum of the terms, of ak = A[i, k] and bk = Bt[k].

    terms : one expression for each column k of A
    first : statements before the loops
    """
    each = range(len(terms))
    source = (
        f"def part({arguments}):\n{first}"
        + "".join(f"    b{k} = Bt[{k}]\n" for k in each)
        + "    for i in range(out.shape[0]):\n"
        "        row = out[i]\n"
        + "".join(f"        a{k} = A[i, {k}]\n" for k in each)
        + "        for j in range(row.size):\n"
        f"            row[j] += {' + '.join(terms)}\n"
    )
    return _jit_text("part", source, _FLAGS)


def _jit_text(name: str, source: str, flags: frozenset[str]) -> Callable[..., None]:
    """Compile the function `name` defined in `source`, where f4 is float32."""
    names: dict[str, Any] = {"f4": _f4}
    exec(compile(source, f"<{name}>", "exec"), names)
    return jit(names[name], flags)


@once
def _fills() -> Fills:
    return fills(jit)


@once
def _profile(expression: str) -> Callable[[Array, Array, Array, np.float32], None]:
    """Return profile(tile of products, row norms, column norms, scale), which works in place.

    NaN is kept, and a negative distance taken as zero. The compiler removes what the expression
    does not use.
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
    names: dict[str, Any] = {"f4": _f4, "sqrt": np.sqrt, "cos": _cos(), "exp": _exp()}
    exec(compile(source, f"<profile {expression}>", "exec"), names)
    return jit(names["profile"])


@once
def _exp() -> Callable[..., Any]:
    """Return exp in float32 as arithmetic that compilers vectorise; 0 below -87, at most 2^127.5.

    2^k times the Taylor polynomial of 2^r on |r| <= 1/2, accurate to 2e-8. The product x log2(e) is
    rounded once, so the relative error grows like |x| eps: for a kernel's values that is less than
    eps in absolute terms.
    """
    log2e, lowest, highest = _f4(1.44269504), _f4(-126.0), _f4(127.5)
    c1, c2, c3 = _f4(6.9314718e-1), _f4(2.4022651e-1), _f4(5.5504109e-2)
    c4, c5, c6 = _f4(9.6181291e-3), _f4(1.3333558e-3), _f4(1.5403530e-4)
    one, zero = _f4(1.0), _f4(0.0)

    def exp(x: Any) -> Any:
        y = x * log2e
        y = lowest if y < lowest else y  # comparisons that NaN passes
        y = highest if y > highest else y
        k = np.rint(y)
        r = y - k
        p = (((((c6 * r + c5) * r + c4) * r + c3) * r + c2) * r + c1) * r + one
        power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
        return zero if y <= lowest else p * power

    return jit(exp)


@once
def _cos() -> Callable[..., Any]:
    """Return cos in float32 as arithmetic that compilers vectorise, for |x| below 2^30.

    (-1)^k times the Taylor polynomial on |x - k pi| <= pi / 2, accurate to 1e-8; pi in three
    summands, so that k pi is as accurate as x itself as long as k has fewer than 13 bits.
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
