"""Generate the points of a search: a grid and its refinement, or proposals of Optuna's sampler.

Each round of refinement adds two bandwidths for the best point: on a log scale, half way to the
next smaller and to the next larger bandwidth tried. If the best bandwidth is the smallest or the
largest one tried, a bandwidth beyond it is added, at the distance of its neighbour on the other
side. If the best ridge is the smallest or the largest one tried, a ridge beyond it is added in the
same way. If a ridge of 0 was tried, it is the smallest: then nothing is added below the others.

Optuna's sampler is deterministic: it makes the same proposals for the same seed and results. So a
resumed search requests all proposals again, and does not repeat recorded trainings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from streamkern.kernels import notation
from streamkern.tuning.journal import optuna_package, quiet_optuna
from streamkern.tuning.table import SearchTable
from streamkern.tuning.trainings import Trainings, TrialSettings

GRID_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Bandwidths of the grid, relative to the bandwidth of the kernel or to the median distance between
centers."""
N_TRIALS = 40
"""Default number of points that Optuna proposes."""
BANDWIDTH_RANGE = (1 / 8, 8.0)
"""Smallest and largest bandwidth for Optuna, relative as in `GRID_FACTORS`."""
RIDGE_RANGE = (1e-9, 1e-2)
"""Smallest and largest ridge for Optuna."""


@dataclass(frozen=True)
class SearchPoints:
    """The points of a search.

    kernels : descriptions of the kernels
    bandwidths : ascending bandwidths; None for "auto"
    ridges : ascending ridges
    refine : number of rounds of refinement
    n_trials : number of points that Optuna proposes, with bandwidths and ridges between the
        smallest and the largest; 0 for a grid
    """

    kernels: list[Any]
    bandwidths: list[float] | None
    ridges: list[float]
    refine: int
    n_trials: int

    def count(self, original: TrialSettings) -> int:
        """Return the largest number of trainings per fold.

        original : the given settings, which are trained, too
        """
        if self.n_trials:
            n_measured = 0  # trainings that measure the median distance
            if self.bandwidths is None:
                n_measured = sum("auto" in notation.bandwidths(kernel) for kernel in self.kernels)
            return self.n_trials + n_measured + 1
        n_with_bandwidth = sum(1 for kernel in self.kernels if notation.bandwidths(kernel))
        n_without = len(self.kernels) - n_with_bandwidth
        n_bandwidths = len(GRID_FACTORS if self.bandwidths is None else self.bandwidths)
        n_grid = (n_with_bandwidth * n_bandwidths + n_without) * len(self.ridges)
        # A round refines a grid of at least two values: by two bandwidths, and by one ridge.
        n_per_round = 2 if n_with_bandwidth and n_bandwidths > 1 else 0
        if sum(ridge > 0 for ridge in self.ridges) > 1:
            n_per_round += 1
        n_original = 0 if self._is_in_grid(original) else 1
        return n_grid + n_per_round * self.refine + n_original

    def _is_in_grid(self, settings: TrialSettings) -> bool:
        """Return whether the grid is known to have these settings before any training."""
        kernel, bandwidth, ridge = settings
        if kernel not in self.kernels or ridge not in self.ridges:
            return False
        if bandwidth is None:
            return True
        if self.bandwidths is None:  # a grid around the bandwidth of the kernel, if it has one
            return "auto" not in notation.bandwidths(kernel)
        return bandwidth in self.bandwidths

    def train(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the points, and add them to the table."""
        if self.n_trials:
            self._train_proposals(table, trainings)
            return
        for kernel in self.kernels:
            for kernel_to_try, bandwidth in self._grid(trainings, kernel):
                for ridge in self.ridges:
                    table.add(trainings.evaluate((kernel_to_try, bandwidth, ridge)))
        for _ in range(self.refine):
            best = table.best_point()
            ridges = table.tried_values("ridge", best.kernel)
            for ridge in next_ridges(best.ridge, ridges):
                table.add(trainings.evaluate((best.kernel, best.bandwidth, ridge)))
            best = table.best_point()
            bandwidths = table.tried_values("bandwidth", best.kernel)
            for bandwidth in neighbour_bandwidths(best.bandwidth, bandwidths):
                table.add(trainings.evaluate((best.kernel, bandwidth, best.ridge)))

    def _grid(self, trainings: Trainings, kernel: Any) -> list[tuple[Any, float | None]]:
        """Return the pairs (kernel, bandwidth) to try for one kernel.

        Every part of a returned kernel has a number as bandwidth, unless it uses none.
        """
        if not notation.bandwidths(kernel):
            return [(kernel, None)]
        if self.bandwidths is not None:
            return [(kernel, bandwidth) for bandwidth in self.bandwidths]
        kernel, center = trainings.with_measured_bandwidth(kernel, self.ridges[0])
        grid = [center if k == 1 else round_to_four_digits(k * center) for k in GRID_FACTORS]
        return [(kernel, bandwidth) for bandwidth in grid]

    def _train_proposals(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the proposals of Optuna's sampler, and add them to the table."""
        optuna = optuna_package()
        with quiet_optuna(optuna):
            sampler = optuna.samplers.TPESampler(seed=trainings.candidates.seed)
            study = optuna.create_study(sampler=sampler)
        for _ in range(self.n_trials):
            trial = study.ask()
            point = trainings.evaluate(self._proposal(trial, trainings))
            table.add(point)
            loss = table.loss(point)
            failed = {"state": optuna.trial.TrialState.FAIL}
            study.tell(trial, **({"values": loss} if math.isfinite(loss) else failed))

    def _proposal(self, trial: Any, trainings: Trainings) -> TrialSettings:
        """Return kernel, bandwidth and ridge of a trial of Optuna."""
        kernel = self.kernels[trial.suggest_categorical("kernel", range(len(self.kernels)))]
        bandwidth, ridge = None, 0.0
        positive = [value for value in self.ridges if value]
        if positive:
            ridge = trial.suggest_float("ridge", positive[0], positive[-1], log=True)
        if notation.bandwidths(kernel):
            limits = BANDWIDTH_RANGE if self.bandwidths is None else self.bandwidths
            bandwidth = trial.suggest_float("bandwidth", limits[0], limits[-1], log=True)
            if self.bandwidths is None:  # the limits are relative to the median distance
                kernel, median_distance = trainings.with_measured_bandwidth(kernel, self.ridges[0])
                bandwidth *= median_distance
            bandwidth = round_to_four_digits(bandwidth)
        return kernel, bandwidth, round_to_four_digits(ridge)


def neighbour_bandwidths(best: float | None, bandwidths: list[float]) -> list[float]:
    """Return two bandwidths next to `best`, see the module docstring.

    Returns [] if `best` is None, or only one bandwidth was tried.

    bandwidths : ascending bandwidths that were tried, with `best`
    """
    if best is None or len(bandwidths) < 2:
        return []
    i = bandwidths.index(best)
    is_smallest, is_largest = i == 0, i == len(bandwidths) - 1
    smaller = best * best / bandwidths[1] if is_smallest else math.sqrt(bandwidths[i - 1] * best)
    larger = best * best / bandwidths[i - 1] if is_largest else math.sqrt(bandwidths[i + 1] * best)
    rounded = (round_to_four_digits(smaller), round_to_four_digits(larger))
    return [bandwidth for bandwidth in rounded if bandwidth not in bandwidths]


def next_ridges(best: float, ridges: list[float]) -> list[float]:
    """Return a list with a ridge beyond `best`.

    [] if `best` is 0 or not at an end of `ridges`, or if fewer than two ridges are above 0.

    ridges : ascending ridges that were tried, with `best`
    """
    positive = [ridge for ridge in ridges if ridge]
    if len(positive) < 2 or best == 0:
        return []
    if best == positive[-1]:
        neighbour = positive[-2]
    elif best == ridges[0]:
        neighbour = positive[1]
    else:
        return []
    return [round_to_four_digits(best * best / neighbour)]


def round_to_four_digits(value: float) -> float:
    """Return the value rounded to four significant digits; further digits have no influence."""
    return float(f"{value:.4g}")
