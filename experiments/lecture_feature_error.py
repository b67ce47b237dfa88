"""Error of random features against their number, for four ways to draw them. The lecture.

k(x, z) of a Gaussian kernel is approximated by D features, a cosine and a sine of each of D / 2
frequencies. With independent frequencies the largest error is O(D^-1/2) (Rahimi, Recht 2007).
Orthogonal frequencies (Yu and others 2016) and points of a Sobol sequence (Avron and others 2016),
which are not in the lecture, lower the error at the same cost. Fastfood (Le, Sarlos and Smola 2013)
draws frequencies whose products take O(D log d) operations instead of O(D d). Its features are
computed by the fast Hadamard transform, and its operations are counted. All are computed in NumPy;
streamkern's Fourier features have independent frequencies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import scipy.stats

from experiments.data import Data, Split
from experiments.exact import gaussian
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, clearly, exponent

ERROR_OF_K = "root mean square error of kernel values"
LARGEST = "largest error of kernel values"
OPERATIONS = "multiplications and additions a row"
OPERATED = {"independent": "all others", "Fastfood": "Fastfood"}
SIZES = (64, 256, 1024, 4096)
ROWS = 300
Draw = Callable[[Array, int, np.random.Generator], Array]


def independent(m: int, d: int, rng: np.random.Generator) -> Array:
    """Return (m, d) normal frequencies."""
    return rng.standard_normal((m, d))


def orthogonal(m: int, d: int, rng: np.random.Generator) -> Array:
    """Return (m, d) frequencies, orthogonal in groups of d, with the norms of normal ones."""
    groups = [np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(-(-m // d))]
    norms = np.sqrt(rng.chisquare(d, m))
    return np.asarray(np.concatenate(groups)[:m] * norms[:, None])


def sobol(m: int, d: int, rng: np.random.Generator) -> Array:
    """Return (m, d) frequencies at the points of a scrambled Sobol sequence."""
    sequence = scipy.stats.qmc.Sobol(d, seed=rng)
    uniform = sequence.random_base2(int(np.ceil(np.log2(m))))[:m]
    return np.asarray(scipy.stats.norm.ppf(np.clip(uniform, 1e-12, 1 - 1e-12)))


def fastfood(X: Array, m: int, rng: np.random.Generator) -> Array:
    """Return the (n, m) products of rows with m frequencies of Fastfood.

    They are S H G P H B x in groups of the next power of two above d: signs B, Hadamard matrices
    H, a permutation P, normal G, and S for the norms of normal frequencies.
    """
    n, d = X.shape
    size, groups = padded(d), []
    whole = np.concatenate([X, np.zeros((n, size - d))], axis=1)
    for _ in range(-(-m // size)):
        signs, G = rng.choice([-1.0, 1.0], size), rng.standard_normal(size)
        mixed = hadamard_transform(whole * signs)[:, rng.permutation(size)]
        norms = np.sqrt(rng.chisquare(size, size) / size) / np.linalg.norm(G)
        groups.append(hadamard_transform(mixed * G) * norms)
    return np.concatenate(groups, axis=1)[:, :m]


def padded(d: int) -> int:
    """Return the least power of two that is d or more."""
    return 1 << (d - 1).bit_length()


def hadamard_transform(X: Array) -> Array:
    """Return X H of rows (n, 2^k) in O(k 2^k) operations a row."""
    n, size = X.shape
    half = 1
    while half < size:
        X = X.reshape(n, -1, 2, half)
        X = np.concatenate([X[:, :, :1] + X[:, :, 1:], X[:, :, :1] - X[:, :, 1:]], axis=2)
        half *= 2
    return X.reshape(n, size)


def operations(label: str, D: int, d: int) -> float:
    """Return the operations of the frequencies' products with a row."""
    if label != "Fastfood":
        return float(D / 2 * d)
    size = padded(d)
    groups = -(-D // (2 * size))
    return float(groups * (2 * size * np.log2(size) + 3 * size))


def dense(frequencies: Callable[[int, int, np.random.Generator], Array]) -> Draw:
    """Return the function of (rows, m, rng) that multiplies rows with m frequencies."""
    return lambda X, m, rng: np.asarray(X @ frequencies(m, X.shape[1], rng).T)


WAYS: dict[str, Draw] = {
    "independent": dense(independent), "orthogonal": dense(orthogonal), "Sobol": dense(sobol),
    "Fastfood": fastfood,
}  # fmt: skip


def features(angles: Array) -> Array:
    """Return the (n, 2 m) cosines and sines of angles (n, m); their products are the kernel's."""
    both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return np.asarray(both / np.sqrt(angles.shape[1]))


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the error and operations against D, for four ways."""

    def run(split: Split, label: str, D: int) -> Iterator[Measurement]:
        X = split.scaled[0][:ROWS]
        rng = np.random.default_rng([split.seed, D, list(WAYS).index(label)])
        F = features(WAYS[label](X, D // 2, rng))
        gaps = F @ F.T - gaussian(X, X)
        yield Measurement(ERROR_OF_K, label, D, float(np.sqrt((gaps**2).mean())))
        yield Measurement(LARGEST, label, D, float(np.abs(gaps).max()))
        if label in OPERATED:
            yield Measurement(OPERATIONS, OPERATED[label], D, operations(label, D, X.shape[1]))

    for split in data.splits(options):
        for label in WAYS:
            for D in SIZES:
                work = 1e6 + 2.0 * ROWS**2 * D
                yield Point(f"{label}, D {D}, repetition {split.seed}", work,
                            partial(run, split, label, D))  # fmt: skip


def judge(results: Results) -> Verdict:
    """Judge the exponent of independent features, and the other ways against them."""
    means = {
        label: [float(results.at(label, D, ERROR_OF_K).mean()) for D in SIZES] for label in WAYS
    }
    slope = exponent(SIZES, means["independent"])
    peaks = [float(results.at("independent", D, LARGEST).mean()) for D in SIZES]
    largest = exponent(SIZES, peaks)
    base = results.at("independent", SIZES[-1], ERROR_OF_K)
    better = [k for k in WAYS if clearly(base - results.at(k, SIZES[-1], ERROR_OF_K))]
    more = 100 * (means["Fastfood"][-1] / means["independent"][-1] - 1)
    clear = clearly(results.at("Fastfood", SIZES[-1], ERROR_OF_K) - base)
    saved = operations("independent", SIZES[-1], 784) / operations("Fastfood", SIZES[-1], 784)
    return Verdict(
        "the mean and the largest error of independent features fall as D^-0.5 within 0.1, "
        "orthogonal ones are clearly better, and the error of Fastfood is at most 30 % larger",
        abs(slope + 0.5) < 0.1
        and abs(largest + 0.5) < 0.1
        and "orthogonal" in better
        and means["Fastfood"][-1] < 1.3 * means["independent"][-1],
        f"exponents {slope:.2f} and {largest:.2f}; at D = {SIZES[-1]}: "
        + ", ".join(f"{label} {values[-1]:.4f}" for label, values in means.items())
        + f", whose error is {more:.0f} % larger, {'clearly' if clear else 'not clearly'}"
        + f"; of 784 features Fastfood takes {saved:.0f} times fewer operations",
    )


EXPERIMENT = Experiment(
    source="Lecture, random features",
    claim="D random features approximate a kernel to O(D^-1/2), orthogonal ones better, and "
    "Fastfood nearly as well at fewer operations",
    x="features D",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=5, epochs=1),
    paper=Sizes(rows=2000, repetitions=5, epochs=1),
)
