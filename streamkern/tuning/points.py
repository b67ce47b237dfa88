"""Generate the points of a search: a grid and its refinement, or proposals of Optuna's sampler.

Each round of refinement adds two bandwidths for the best point: on a log scale, half way to the
next smaller and to the next larger bandwidth tried. If the best bandwidth is the smallest or the
largest one tried, a bandwidth beyond it is added, at the distance of its neighbour on the other
side. If the best ridge is the smallest or the largest one tried, a ridge beyond it is added in the
same way. If a ridge of 0 was tried, it counts as the smallest, and none is added below the others.

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
BANDWIDTH_RANGE = [1 / 8, 8.0]
"""Smallest and largest bandwidth for Optuna, relative as in `GRID_FACTORS`."""
RIDGE_RANGE = [1e-9, 1e-2]
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
        """Return the largest number of trainings per fold. original : the given settings"""
        if self.n_trials:  # plus the given settings, and trainings that measure median distances
            n_measured = sum("auto" in notation.bandwidths(kernel) for kernel in self.kernels)
            return self.n_trials + 1 + (n_measured if self.bandwidths is None else 0)
        n_with_bandwidth = sum(1 for kernel in self.kernels if notation.bandwidths(kernel))
        n_bandwidths = len(GRID_FACTORS if self.bandwidths is None else self.bandwidths)
        refines_ridge = sum(map(bool, self.ridges)) > 1
        per_round = 2 * bool(n_with_bandwidth and n_bandwidths > 1) + refines_ridge
        per_ridge = n_with_bandwidth * n_bandwidths + len(self.kernels) - n_with_bandwidth
        kernel, bandwidth, ridge = original
        in_grid = kernel in self.kernels and ridge in self.ridges
        if in_grid and bandwidth is not None:
            if self.bandwidths is None:
                in_grid = "auto" not in notation.bandwidths(kernel)
            else:
                in_grid = bandwidth in self.bandwidths
        return per_ridge * len(self.ridges) + per_round * self.refine + (not in_grid)

    def train(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the points, and add them to the table."""
        if self.n_trials:
            self._train_proposals(table, trainings)
            return
        for kernel in self.kernels:
            for kernel_to_try, bandwidth in self._grid(trainings, kernel):
                for ridge in self.ridges:
                    table.add(trainings.point((kernel_to_try, bandwidth, ridge)))
        for _ in range(self.refine):
            best = table.best()
            for ridge in ridge_beyond(best.ridge, table.tried("ridge", best.kernel)):
                table.add(trainings.point((best.kernel, best.bandwidth, ridge)))
            best = table.best()
            for bandwidth in neighbours(best.bandwidth, table.tried("bandwidth", best.kernel)):
                table.add(trainings.point((best.kernel, bandwidth, best.ridge)))

    def _grid(self, trainings: Trainings, kernel: Any) -> list[tuple[Any, float | None]]:
        """Return pairs (kernel, bandwidth) to try; the parts of the kernel have bandwidths."""
        if not notation.bandwidths(kernel):
            return [(kernel, None)]
        if self.bandwidths is not None:
            return [(kernel, bandwidth) for bandwidth in self.bandwidths]
        kernel, unit = trainings.scale(kernel, self.ridges[0])
        grid = [unit if factor == 1 else four_digits(factor * unit) for factor in GRID_FACTORS]
        return [(kernel, bandwidth) for bandwidth in grid]

    def _train_proposals(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the proposals of Optuna's sampler, and add them to the table."""
        optuna = optuna_package()
        with quiet_optuna(optuna):
            sampler = optuna.samplers.TPESampler(seed=trainings.candidates.seed)
            study = optuna.create_study(sampler=sampler)
        for _ in range(self.n_trials):
            trial = study.ask()
            point = trainings.point(self._proposal(trial, trainings))
            table.add(point)
            loss = table.loss(point)
            failed = {"state": optuna.trial.TrialState.FAIL}
            study.tell(trial, **({"values": loss} if math.isfinite(loss) else failed))

    def _proposal(self, trial: Any, trainings: Trainings) -> TrialSettings:
        """Return kernel, bandwidth and ridge of a trial of Optuna."""
        kernel = self.kernels[trial.suggest_categorical("kernel", range(len(self.kernels)))]
        bandwidth, ridge, positive = None, 0.0, [value for value in self.ridges if value]
        if positive:
            ridge = four_digits(trial.suggest_float("ridge", positive[0], positive[-1], log=True))
        if notation.bandwidths(kernel):
            limits, unit = BANDWIDTH_RANGE if self.bandwidths is None else self.bandwidths, 1.0
            factor = trial.suggest_float("bandwidth", limits[0], limits[-1], log=True)
            if self.bandwidths is None:
                kernel, unit = trainings.scale(kernel, self.ridges[0])
            bandwidth = four_digits(factor * unit)
        return kernel, bandwidth, ridge


def neighbours(best: float | None, tried: list[float]) -> list[float]:
    """Return two bandwidths next to `best`, see the module docstring; [] with fewer than two tried.

    tried : ascending bandwidths that were tried, with `best`
    """
    if best is None or len(tried) < 2:
        return []
    index = tried.index(best)
    smaller = math.sqrt(tried[index - 1] * best) if index else best * best / tried[1]
    is_largest = best == tried[-1]
    larger = best * best / tried[index - 1] if is_largest else math.sqrt(tried[index + 1] * best)
    return [
        bandwidth
        for bandwidth in (four_digits(smaller), four_digits(larger))
        if bandwidth not in tried
    ]


def ridge_beyond(best: float, tried: list[float]) -> list[float]:
    """Return a list with a ridge beyond `best`, or [] if `best` is 0 or not at an end of `tried`.

    tried : ascending ridges that were tried, with `best`
    """
    positive = [ridge for ridge in tried if ridge]
    if len(positive) < 2 or best not in (positive[-1], tried[0]) or not best:
        return []
    return [four_digits(best * best / positive[-2 if best == positive[-1] else 1])]


def four_digits(value: float) -> float:
    """Return the value rounded to four significant digits; further digits have no influence."""
    return float(f"{value:.4g}")
