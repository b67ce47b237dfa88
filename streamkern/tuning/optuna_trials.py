"""Kernels, bandwidths and ridges that Optuna's sampler proposes, one after the other.

Optuna stores nothing: its sampler proposes the same for the same seed and the same results, so a
search resumes by asking it from the start, and recorded trials are not trained again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from streamkern.basics.optional import import_optional
from streamkern.kernels import notation
from streamkern.tuning.grid import neat, own_scale
from streamkern.tuning.table import SearchTable
from streamkern.tuning.trainings import Trainings, TrialKey

N_TRIALS = 40
BANDWIDTH_RANGE = [1 / 8, 8.0]  # times the median distance between centers, or the given bandwidth
RIDGE_RANGE = [1e-9, 1e-2]


def optuna_package() -> Any:
    """Return the package, or raise MissingDependencyError."""
    return import_optional("optuna", 'sampler="optuna"', "optuna")


@dataclass(frozen=True)
class Proposals:
    """A search whose points Optuna proposes.

    bandwidths, ridges : only their ends count; bandwidths None is "auto"
    """

    kernels: list[Any]
    bandwidths: list[float] | None
    ridges: list[float]
    n_trials: int

    def most(self, given: TrialKey) -> int:
        """Return the trainings per split, including given settings and those for a bandwidth."""
        own = sum("auto" in notation.bandwidths(kernel) for kernel in self.kernels)
        return self.n_trials + 1 + (own if self.bandwidths is None else 0)

    def knows(self, ridge: float) -> bool:
        """Return False: no proposal is known in advance."""
        return False

    def fill(self, table: SearchTable, trainings: Trainings) -> None:
        """Train the proposed points, and add them to the table."""
        study = _study(trainings.candidates.seed)
        for _ in range(self.n_trials):
            trial = study.ask()
            point = trainings.measured(*self._proposed(trial, trainings))
            table.add(point)
            loss = table.loss(point)
            # A diverged training is reported as failed.
            told = {"values": loss} if math.isfinite(loss) else {"state": _failed()}
            study.tell(trial, **told)

    def _proposed(self, trial: Any, trainings: Trainings) -> TrialKey:
        kernel = self.kernels[trial.suggest_categorical("kernel", range(len(self.kernels)))]
        above, width, ridge = [ridge for ridge in self.ridges if ridge], None, 0.0
        if above:
            ridge = neat(trial.suggest_float("ridge", above[0], above[-1], log=True))
        if notation.bandwidths(kernel):
            ends, scale = BANDWIDTH_RANGE if self.bandwidths is None else self.bandwidths, 1.0
            factor = trial.suggest_float("bandwidth", ends[0], ends[-1], log=True)
            if self.bandwidths is None:
                kernel, scale = own_scale(trainings, kernel, self.ridges[0])
            width = neat(factor * scale)
        return kernel, width, ridge


def _study(seed: int) -> Any:
    """Create a study in memory, without a message about it."""
    package = optuna_package()
    told = package.logging.get_verbosity()
    package.logging.set_verbosity(package.logging.WARNING)
    try:
        return package.create_study(sampler=package.samplers.TPESampler(seed=seed))
    finally:
        package.logging.set_verbosity(told)


def _failed() -> Any:
    return optuna_package().trial.TrialState.FAIL
