"""Generate the points of a search: a grid and its refinement, or proposals of Optuna's sampler.

Each round of refinement adds two bandwidths for the best point: half way, on a log scale, to the
next smaller and the next larger bandwidth tried. If there is none on one side, the new one is as
far away as the next one on the other side. If the best ridge is the smallest or the largest one
tried, a ridge beyond it is added at the same distance as the one before it, except below 0.

Optuna's sampler is deterministic: it makes the same proposals for the same seed and results. A
search is resumed by asking it from the start, and recorded trainings are not repeated.
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
"""Bandwidths of the grid, relative to the kernel's own or to the median distance of centers."""
N_TRIALS = 40
"""Default number of points that Optuna proposes."""
BANDWIDTH_RANGE = [1 / 8, 8.0]
"""Smallest and largest bandwidth for Optuna, relative to the same."""
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
        """Return the largest number of trainings per split. original : the given settings"""
        if self.n_trials:  # plus the given settings, and trainings that measure median distances
            auto = sum("auto" in notation.bandwidths(kernel) for kernel in self.kernels)
            return self.n_trials + 1 + (auto if self.bandwidths is None else 0)
        with_width = sum(1 for kernel in self.kernels if notation.bandwidths(kernel))
        n_widths = len(GRID_FACTORS if self.bandwidths is None else self.bandwidths)
        more = 2 * bool(with_width and n_widths > 1) + (sum(map(bool, self.ridges)) > 1)
        each = with_width * n_widths + len(self.kernels) - with_width
        kernel, width, ridge = original
        inside = kernel in self.kernels and ridge in self.ridges
        if inside and width is not None:
            widths = notation.bandwidths(kernel)
            inside = "auto" not in widths if self.bandwidths is None else width in self.bandwidths
        return each * len(self.ridges) + more * self.refine + (not inside)

    def train(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the points, and add them to the table."""
        if self.n_trials:
            self._train_proposals(table, trainings)
            return
        for kernel in self.kernels:
            for scaled, bandwidth in self._grid(trainings, kernel):
                for ridge in self.ridges:
                    table.add(trainings.measured(scaled, bandwidth, ridge))
        for _ in range(self.refine):
            best = table.best()
            for ridge in ridge_beyond(best.ridge, table.tried("ridge", best.kernel)):
                table.add(trainings.measured(best.kernel, best.bandwidth, ridge))
            best = table.best()
            for width in neighbours(best.bandwidth, table.tried("bandwidth", best.kernel)):
                table.add(trainings.measured(best.kernel, width, best.ridge))

    def _grid(self, trainings: Trainings, kernel: Any) -> list[tuple[Any, float | None]]:
        """Return pairs of a kernel, whose parts have bandwidths, and a bandwidth to try."""
        if not notation.bandwidths(kernel):
            return [(kernel, None)]
        if self.bandwidths is not None:
            return [(kernel, bandwidth) for bandwidth in self.bandwidths]
        kernel, scale = trainings.scale(kernel, self.ridges[0])
        return [(kernel, scale if factor == 1 else neat(factor * scale)) for factor in GRID_FACTORS]

    def _train_proposals(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the proposals of Optuna's sampler, and add them to the table."""
        optuna = optuna_package()
        with quiet_optuna(optuna):
            sampler = optuna.samplers.TPESampler(seed=trainings.candidates.seed)
            study = optuna.create_study(sampler=sampler)
        for _ in range(self.n_trials):
            trial = study.ask()
            point = trainings.measured(*self._proposal(trial, trainings))
            table.add(point)
            loss = table.loss(point)
            diverged = {"state": optuna.trial.TrialState.FAIL}
            study.tell(trial, **({"values": loss} if math.isfinite(loss) else diverged))

    def _proposal(self, trial: Any, trainings: Trainings) -> TrialSettings:
        """Return kernel, bandwidth and ridge of a trial of Optuna."""
        kernel = self.kernels[trial.suggest_categorical("kernel", range(len(self.kernels)))]
        above, width, ridge = [ridge for ridge in self.ridges if ridge], None, 0.0
        if above:
            ridge = neat(trial.suggest_float("ridge", above[0], above[-1], log=True))
        if notation.bandwidths(kernel):
            ends, scale = BANDWIDTH_RANGE if self.bandwidths is None else self.bandwidths, 1.0
            factor = trial.suggest_float("bandwidth", ends[0], ends[-1], log=True)
            if self.bandwidths is None:
                kernel, scale = trainings.scale(kernel, self.ridges[0])
            width = neat(factor * scale)
        return kernel, width, ridge


def neighbours(best: float | None, tried: list[float]) -> list[float]:
    """Return two bandwidths beside `best`, see the module; [] with fewer than two tried.

    tried : ascending bandwidths that were tried, with `best`
    """
    if best is None or len(tried) < 2:
        return []
    index = tried.index(best)
    low = math.sqrt(tried[index - 1] * best) if index else best * best / tried[1]
    last = best == tried[-1]
    high = best * best / tried[index - 1] if last else math.sqrt(tried[index + 1] * best)
    return [width for width in (neat(low), neat(high)) if width not in tried]


def ridge_beyond(best: float, tried: list[float]) -> list[float]:
    """Return [a ridge beyond `best`] if it is the smallest or largest tried and not 0; else [].

    tried : ascending ridges that were tried, with `best`
    """
    above = [ridge for ridge in tried if ridge]
    if len(above) < 2 or best not in (above[-1], tried[0]) or not best:
        return []
    return [neat(best * best / above[-2 if best == above[-1] else 1])]


def neat(bandwidth: float) -> float:
    """Round to four significant digits; further digits have no influence."""
    return float(f"{bandwidth:.4g}")
