"""Gradient descent on the kernel after 1 to 81 920 iterations: the table in section 2 of EP1.

The model is f = sum_i alpha_i k(x_i, .) with a Gaussian kernel over all rows, and the iteration is
alpha <- alpha - eta (K alpha - y) from 0, in full batches, with eta = 1.5 / lambda_1 as in the
readme of the paper's code. No iteration is run: with K = V L V^T, t iterations lead to

    alpha_t = V diag((1 - (1 - eta lambda_i)^t) / lambda_i) V^T y,

which is exact in float64 for any t and costs one eigendecomposition. The L2 loss is the squared
error of a row, summed over the classes. The paper calls the training loss "roughly inverse to the
number of iterations", an exponent of -1; the exponents between the paper's numbers of iterations
are printed. The dashed curves are EigenPro's iteration with the exact preconditioner of q = 160
eigenvectors (at most an eighth of the rows): lambda_1, ..., lambda_q are lowered to lambda_q+1, and
eta = 1.5 / lambda_q+1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import scipy.linalg

from experiments.data import Data, Split
from experiments.exact import gaussian
from experiments.experiment import Experiment, Point, Sizes, Verdict
from experiments.results import Array, Measurement, Results, exponent

ITERATIONS = (1, 80, 1280, 10_240, 81_920)
LEVEL, STEP, LEAST = 160, 1.5, 1e-6
"""Eigenvectors and step size of EigenPro, and the smallest training loss that counts as nonzero."""
TRAIN, TEST, WRONG = "L2 loss on the training rows", "L2 loss on the test rows", "test error, %"
DESCENT = "gradient descent"
ROUGHLY = 0.33
"""Largest difference of an exponent from -1 that counts as roughly inverse."""


def learned_fraction(eigenvalues: Array, eta: Array | float, t: int) -> Array:
    """Return the share 1 - (1 - eta lambda)^t of each direction that t iterations learn."""
    x = np.maximum(eta * eigenvalues, 0)
    small = np.minimum(x, 0.5)
    return np.where(x < 0.5, -np.expm1(t * np.log1p(-small)), 1 - (1 - x) ** t)


def step_sizes(eigenvalues: Array, q: int) -> Array:
    """Return the step size of each direction; eigenvalues descend. q = 0 is gradient descent."""
    top = np.maximum(eigenvalues[:q], eigenvalues[q])
    lowered = np.concatenate([eigenvalues[q] / top, np.ones(len(eigenvalues) - q)])
    return np.asarray(STEP / eigenvalues[q] * lowered)


def places(options: argparse.Namespace) -> list[int]:
    """Return the paper's iterations, and iterations between them."""
    between = {2**k for k in range(17)}
    return sorted(set(ITERATIONS) if options.quick else between | set(ITERATIONS))


def points(data: Data, options: argparse.Namespace) -> Iterator[Point]:
    """Yield points of the losses of a repetition after all numbers of iterations."""

    def run(split: Split) -> Iterator[Measurement]:
        X, X_test = split.scaled
        values, V = scipy.linalg.eigh(gaussian(X, X), overwrite_a=True, check_finite=False)
        values, V = np.maximum(values[::-1], 1e-300), V[:, ::-1]
        inner, outer = V.T @ split.targets, gaussian(X_test, X) @ V
        q = min(LEVEL, len(X) // 8)
        for label, eta in (
            (DESCENT, step_sizes(values, 0)),
            (f"(EigenPro, q = {q})", step_sizes(values, q)),
        ):
            for t in places(options):
                part = learned_fraction(values, eta, t)[:, None]
                f = outer @ (part / values[:, None] * inner)
                left = float((((1 - part) * inner) ** 2).sum() / len(X))
                yield Measurement(TRAIN, label, t, max(left, LEAST))
                yield Measurement(TEST, label, t, test_loss(split, f))
                yield Measurement(data.measured, label, t, split.error(f))

    for split in data.splits(options):
        n = len(split.X)
        yield Point(f"repetition {split.seed}", 40 * n**3, partial(run, split))


def test_loss(split: Split, outputs: Array) -> float:
    """Return the squared error of a test row, summed over the classes, in the mean."""
    if split.classes is None:
        return split.error(outputs)
    return float(((outputs - split.test_targets) ** 2).sum(axis=1).mean())


def judge(results: Results) -> Verdict:
    """Compare the iterations to the least test loss and to the training loss at the end."""
    t = results.places(DESCENT, TEST)
    test = [results.at(DESCENT, k, TEST).mean() for k in t]
    best = t[int(np.argmin(test))]
    other = next(label for label in results.values[TEST] if label.startswith("(EigenPro"))
    end = results.at(DESCENT, t[-1], TRAIN).mean()
    fast = next(
        k for k in results.places(other, TRAIN) if results.at(other, k, TRAIN).mean() <= end
    )
    numbers = ", ".join(
        f"{results.at(DESCENT, k, TRAIN).mean():.3g} / {results.at(DESCENT, k, TEST).mean():.3g}"
        for k in ITERATIONS
    )
    falls = exponents([results.at(DESCENT, k, TRAIN).mean() for k in ITERATIONS])
    inverse = "seen" if all(map(is_roughly_inverse, falls)) else "not seen"
    return Verdict(
        f"the least test loss is reached at {ITERATIONS[3]} iterations or later",
        best >= ITERATIONS[3],
        f"least test loss {min(test):.3g} at {best:g} iterations; training / test loss after "
        f"{', '.join(map(str, ITERATIONS))} iterations {numbers}; between these the training loss "
        f"falls with the exponents {', '.join(f'{b:.2f}' for b in falls)}, so that it is roughly "
        f"inverse to the iterations is {inverse}; {other[1:-1]} has the training "
        f"loss of {t[-1]:g} iterations after {fast:g}",
    )


def is_roughly_inverse(exponent: float) -> bool:
    """Return whether a loss that falls by this exponent is roughly inverse to the iterations."""
    return abs(exponent + 1) <= ROUGHLY


def exponents(losses: Sequence[float]) -> list[float]:
    """Return the exponents of a loss between successive numbers of iterations of the paper."""
    return [exponent(ITERATIONS[k : k + 2], losses[k : k + 2]) for k in range(len(ITERATIONS) - 1)]


EXPERIMENT = Experiment(
    source="EP1, section 2, gradient descent on 10 000 rows",
    claim="gradient descent needs over 10 000 iterations to the least test loss, as much as a "
    "direct method",
    x="iterations",
    points=points,
    judge=judge,
    stand_in=Sizes(repetitions=3),
    paper=Sizes(rows=10_000, repetitions=1),
    published="""\
iterations              1         80        1280      10240     81920
MNIST-10k   train    4.07e-1   9.61e-2   2.60e-2   2.36e-3   2.17e-5
            test     4.07e-1   9.74e-2   4.59e-2   3.64e-2   3.55e-2
            error %    38.50      7.60      3.26      2.39      2.49
HINT-M-10k  train    8.25e-2   4.58e-2   3.08e-2   1.83e-2   4.21e-3
            test     7.98e-2   4.24e-2   3.34e-2   3.14e-2   3.42e-2""",
)
