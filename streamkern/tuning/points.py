"""The points of a search: a grid and its refinement, or what Optuna's sampler proposes.

In each round of refinement the bandwidth of the best combination gets two more neighbours: half
way, on the log scale, to its present ones; without one on one side, as far out as the one on the
other side. A best ridge at an end of those tried gets one more, as far out again; there is nothing
below 0.

Optuna's sampler proposes the same for the same seed and the same results. A search resumes by
asking it from the start, as recorded trainings are not done again.
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
"""Bandwidths, times the median distance between centers, or the bandwidth of the kernel."""
N_TRIALS = 40
BANDWIDTH_RANGE = [1 / 8, 8.0]  # the same for Optuna
RIDGE_RANGE = [1e-9, 1e-2]


@dataclass(frozen=True)
class SearchPoints:
    """The points of a search.

    bandwidths : None is "auto"
    refine : number of rounds
    n_trials : number of points that Optuna proposes between the ends of bandwidths and ridges; 0
        for a grid
    """

    kernels: list[Any]
    bandwidths: list[float] | None
    ridges: list[float]
    refine: int
    n_trials: int

    def count(self, original: TrialSettings) -> int:
        """Return the largest number of trainings per split, with those of the original settings."""
        if self.n_trials:  # and those that measure the median distance
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
        """Return pairs of the kernel, with known ratios of bandwidths, and a bandwidth to try."""
        if not notation.bandwidths(kernel):
            return [(kernel, None)]
        if self.bandwidths is not None:
            return [(kernel, bandwidth) for bandwidth in self.bandwidths]
        kernel, scale = trainings.scale(kernel, self.ridges[0])
        return [(kernel, scale if factor == 1 else neat(factor * scale)) for factor in GRID_FACTORS]

    def _train_proposals(self, table: SearchTable, trainings: Trainings) -> None:
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
    """Return two more bandwidths beside `best`, one of the ascending `tried`, if others exist."""
    if best is None or len(tried) < 2:
        return []
    index = tried.index(best)
    low = math.sqrt(tried[index - 1] * best) if index else best * best / tried[1]
    last = best == tried[-1]
    high = best * best / tried[index - 1] if last else math.sqrt(tried[index + 1] * best)
    return [width for width in (neat(low), neat(high)) if width not in tried]


def ridge_beyond(best: float, tried: list[float]) -> list[float]:
    """Return one more ridge, if `best` is at an end of the ascending `tried` other than 0."""
    above = [ridge for ridge in tried if ridge]
    if len(above) < 2 or best not in (above[-1], tried[0]) or not best:
        return []
    return [neat(best * best / above[-2 if best == above[-1] else 1])]


def neat(bandwidth: float) -> float:
    """Round to four digits: further ones have no influence."""
    return float(f"{bandwidth:.4g}")
