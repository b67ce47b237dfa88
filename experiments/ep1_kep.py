"""EigenPro's kernel: preconditioned steps on k are plain steps on k_EP. Section 4 of EP1.

With the eigenpairs (lambda_i, e_i) of K / n and the top q removed, the kernel

    k_EP(x, z) = k(x, z) - sum_{i <= q} (1 - lambda_{q+1} / lambda_i) lambda_i e_i(x) e_i(z)

has the same functions, and its first q + 1 eigenvalues are lambda_{q+1}. e_i(x) is the Nystrom
extension k(x, X) v_i / (n lambda_i)^(1/2). Richardson's iteration on k_EP is EigenPro's on k: both
are computed here in float64. `feature_map` returns phi with phi(x) . phi(z) = k_EP(x, z) on the
rows, for any program that takes features.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import numpy as np

from experiments.data import Data, Split
from experiments.exact import KERNELS
from experiments.results import Array, Experiment, Measurement, Point, Results, Sizes, Verdict

SPECTRUM, GAP = "eigenvalue / largest", "largest difference of predictions"
STEPS = 30


def lowered(K: Array, q: int) -> tuple[Array, Array, Array]:
    """Return the top q eigenvalues of K, their vectors (n, q), and the shares that are removed.

    share_i = 1 - lambda_{q+1} / lambda_i.
    """
    values, U = np.linalg.eigh(K)
    values, U = values[::-1], U[:, ::-1]
    return values[:q], U[:, :q], 1 - values[q] / values[:q]


def k_ep(K_left: Array, K_right: Array, K_both: Array, top: tuple[Array, Array, Array]) -> Array:
    """Return k_EP between two sets of rows.

    K_left, K_right : (m, n) and (r, n) kernels of the sets with the n rows.
    K_both : (m, r) kernel of one set with the other.
    """
    values, U, share = top
    return np.asarray(K_both - (K_left @ U * (share / values)) @ (K_right @ U).T)


def feature_map(K: Array, top: tuple[Array, Array, Array]) -> Array:
    """Return (n, n) features of the rows whose products are k_EP: a root of it."""
    values, U = np.linalg.eigh(k_ep(K, K, K, top))
    return np.asarray(U * np.sqrt(np.maximum(values, 0)))


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Spectra of both kernels, and predictions of both iterations."""

    def compare(split: Split, name: str, q: int) -> Iterator[Measurement]:
        X, X_test = (rows[: options.rows] for rows in split.scaled)
        kernel, Y = KERNELS[name], split.targets
        K, K_test = kernel(X, X), kernel(X_test, X)
        top = lowered(K, q)
        K_ep, K_ep_test = k_ep(K, K, K, top), k_ep(K_test, K, K_test, top)
        spectra = [np.linalg.eigvalsh(A)[::-1] for A in (K, K_ep)]
        for label, values in zip((f"k, {name}", f"k_EP, {name}"), spectra, strict=True):
            for i in np.unique(np.geomspace(1, len(K) // 2, 24).astype(int)):
                yield Measurement(SPECTRUM, label, i, float(values[i - 1] / spectra[0][0]))
        step, (values, U, share) = 1 / spectra[1][0], top
        alpha, beta = np.zeros_like(Y), np.zeros_like(Y)
        for _ in range(STEPS):
            g = K @ alpha - Y
            alpha -= step * (g - U @ (share[:, None] * (U.T @ g)))  # EigenPro on k
            beta -= step * (K_ep @ beta - Y)  # Richardson on k_EP
        gap = np.abs(K_test @ alpha - K_ep_test @ beta).max()
        yield Measurement(GAP, name, q, float(gap))

    for split in data.splits(options):
        n, q = len(split.X), min(160, len(split.X) // 4)
        for name in KERNELS:
            key = f"{name}, repetition {split.seed}"
            yield Point(key, 60.0 * n**3, partial(compare, split, name, q))


def judge(results: Results) -> Verdict:
    """The flattened spectrum, and the difference of the two iterations."""
    gaps = {name: float(results.at(name, q, GAP).max()) for name in KERNELS
            for q in results.places(name, GAP)}  # fmt: skip
    flat = {}
    for name in KERNELS:
        places = results.places(f"k_EP, {name}", SPECTRUM)
        values = [results.at(f"k_EP, {name}", i, SPECTRUM).mean() for i in places]
        flat[name] = values[0] / values[len(places) // 2]
    return Verdict(
        "predictions of both iterations within 1e-8, and the leading eigenvalues of k_EP equal "
        "to 1e-6",
        max(gaps.values()) < 1e-8 and all(abs(ratio - 1) < 1e-6 for ratio in flat.values()),
        "differences " + ", ".join(f"{name} {gap:.1g}" for name, gap in gaps.items()),
    )


EXPERIMENT = Experiment(
    source="EP1, section 4",
    claim="EigenPro is Richardson's iteration with another kernel, whose leading eigenvalues are "
    "equal",
    x="number of the eigenvalue",
    x_of={GAP: "eigenvectors removed q"},
    points=points,
    judge=judge,
    stand_in=Sizes(rows=800, repetitions=2, epochs=1),
    paper=Sizes(rows=4800, repetitions=1, epochs=1),
)
