"""How much to damp a block: mu, from what its sample teaches about other rows.

The ridge solution of a sample of s rows with penalty lambda |f|^2 beside the mean squared error is
the posterior mean of a Gaussian process whose noise has variance lambda s. The noise does not
change with the number of rows, so neither does lambda s: the best penalty falls like 1 / s.

Steps with the preconditioner (C + mu)^-1 and eta = m / ell take a run of n rows, averaged, about
where a penalty of mu ell / n would: a direction of variance sigma is learned at a rate of
sigma / (sigma + mu) / ell a row. A run has the penalty that suits its rows where

    mu ell(mu) = lambda s,

whatever n is. lambda is the one whose solution does best on rows held out, and ell, which falls as
mu grows, is measured there as well. A stream that repeats its rows k times is k n rows long but
holds the noise of n: its mu is k times that. With a ridge the steps need not be the penalty, and
mu = lambda is the fastest: below it ell grows, and what the steps win in directions of little
variance they lose in size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from streamkern.solver.precondition.held_out import vertex

# Powers of 10 of the covariance's scale.
START_EXPONENT, MIN_EXPONENT, MAX_EXPONENT = -4, -7, -1
UNLEARNED_SHARE = 0.25
"""Of the targets' variance: where a block leaves more to the others, its error is not noise."""
NOTABLE = 0.05
STEEPEST = -0.9
"""Of a leverage as a power of mu, where it is extrapolated."""
TINY = 1e-30


@dataclass(frozen=True)
class Trial:
    """At one damping: squared error on the rows held out, and the leverage of a block there."""

    error: float
    leverage: float


@dataclass(frozen=True)
class Damping:
    """penalty : best for the sample alone. mu : for the run. Both over the covariance's scale."""

    penalty: float
    mu: float


def choose_damping(
    measure: Callable[[float], Trial],
    unlearned: float,
    *,
    rows: int,
    n_blocks: int,
    epochs: int,
    ridge: bool,
) -> Damping:
    """The penalty that suits a sample, and the mu that suits the run.

    measure : of one block, at a damping. unlearned : squared error of the mean of the targets.
    rows : of the sample. epochs : times that the run sees each row. ridge : whether there is one.

    The error of one of several blocks holds what the others will explain. Where that is most of
    it, a penalty against it would be too much, and is looked for below the start only. Where none
    is better there, the start says nothing about mu.
    """
    start = measure(10.0**START_EXPONENT)
    whole = n_blocks == 1 or start.error < UNLEARNED_SHARE * unlearned
    trials = _descend(measure, start, whole)
    if not trials:
        return Damping(10.0**START_EXPONENT, 10.0**START_EXPONENT)
    exponent = vertex({at: trial.error for at, trial in trials.items()})
    penalty = 10.0**exponent
    if ridge and (whole or exponent < START_EXPONENT):
        return Damping(penalty, penalty)
    repeats = epochs if whole else 1
    mu = _balanced(trials, penalty * rows * repeats / n_blocks)
    return Damping(penalty, min(mu, penalty) if ridge else mu)


def _descend(measure: Callable[[float], Trial], start: Trial, both_ways: bool) -> dict[int, Trial]:
    """Trials at powers of 10, until one more does not lower the error, downwards not notably.

    More damping is the safer side. In data where rows have twins, rows held out are never new, and
    the error may fall a little all the way down.

    Those whose error is not finite, because rounding forbids the damping, are left out.
    """
    trials = {START_EXPONENT: start}

    def walk(step: int, end: int, gain: float) -> int:
        at = START_EXPONENT
        while at != end:
            trials[at + step] = measure(10.0 ** (at + step))
            if not trials[at + step].error < (1 - gain) * trials[at].error:
                break
            at += step
        return at

    if walk(-1, MIN_EXPONENT, NOTABLE) == START_EXPONENT and both_ways:
        walk(1, MAX_EXPONENT, 0.0)
    return {at: trial for at, trial in sorted(trials.items()) if math.isfinite(trial.error)}


def _balanced(trials: dict[int, Trial], product: float) -> float:
    """The mu with mu ell(mu) = product, the leverage by a power law between and past the trials."""
    exponents = np.array(list(trials), float)
    leverages = np.log10([max(trial.leverage, TINY) for trial in trials.values()])
    if len(trials) > 1:
        # One more trial on either side, as far away as matters. mu ell(mu) always rises.
        slopes = np.clip(np.diff(leverages) / np.diff(exponents), STEEPEST, 0)[[0, -1]]
        ends = np.array([MIN_EXPONENT - 1.0, MAX_EXPONENT + 1.0])
        beyond = leverages[[0, -1]] + slopes * (ends - exponents[[0, -1]])
        exponents = np.concatenate([ends[:1], exponents, ends[1:]])
        leverages = np.concatenate([beyond[:1], leverages, beyond[1:]])
    # Rounding may leave a leverage that falls faster than mu rises between two trials.
    products = np.maximum.accumulate(exponents + leverages)
    at = float(np.interp(math.log10(product), products, exponents))
    return float(10.0 ** min(max(at, MIN_EXPONENT), MAX_EXPONENT))
