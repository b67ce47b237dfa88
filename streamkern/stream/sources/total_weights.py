"""Check that the total weights which a source declares agree with the rows that it returns."""

from __future__ import annotations

import threading

import numpy as np

from streamkern.basics.warning import warn
from streamkern.store.sample_weights import add_totals

TOTAL_TOLERANCE = 0.1
"""Relative error of a total that is accepted, because a total may be an estimate."""
TOTAL_STANDARD_ERRORS = 6.0
"""Standard errors of a random total that are accepted in addition."""
MAX_PASSES = 4
"""Number of passes that are added up at the same time. Read-ahead overlaps two epochs, and other
reads may have other seeds."""
_LOCK = threading.Lock()


class TotalWeights:
    """Sums of the weights of each pass over a source, up to the first pass that read all units.

    Units may be read in any order, by several threads, and more than once. A process that reads
    only some of the units, such as a worker of a cluster, checks nothing.

    name : name of the total, for messages
    declared : (c,) totals by class, or (1,) for values, as in `BaseSource.totals`
    classes : names of the classes, or None for values
    n_units : number of units of the source
    """

    def __init__(
        self, name: str, declared: np.ndarray, classes: tuple[str, ...] | None, n_units: int
    ) -> None:
        self._name, self._declared, self._classes = name, declared, classes
        self._n_units, self._is_checked = n_units, False
        # For each pass: the units that it has read, and the sums over their rows.
        self._passes: dict[tuple[int, int], tuple[set[int], np.ndarray]] = {}

    def add(self, u: int, seed: int, epoch: int, y: np.ndarray, w: np.ndarray | None) -> None:
        """Add the targets and sample weights of unit u, or its rows if w is None.

        Warns if the unit completes a pass whose total differs from the declared one. That is no
        error, because random weights of related rows may differ more than independent ones.
        """
        if self._is_checked:
            return
        by_class, n_totals = self._classes is not None, len(self._declared)
        sums = np.zeros((3, n_totals))
        w = np.ones(len(y)) if w is None else w.astype(np.float64)
        for row, weights in zip(sums, (None, w, w**2), strict=True):
            add_totals(row, y, weights, by_class)
        with _LOCK:
            units, pass_sums = self._passes.setdefault(
                (seed, epoch), (set(), np.zeros((3, n_totals)))
            )
            if u not in units:
                units.add(u)
                pass_sums += sums
            if len(units) < self._n_units:
                while len(self._passes) > MAX_PASSES:
                    del self._passes[next(iter(self._passes))]
                return
            self._is_checked = True
            self._passes.clear()
        self._check(*pass_sums)

    def _check(self, rows: np.ndarray, weights: np.ndarray, squares: np.ndarray) -> None:
        """Warn if a total is wrong by more than rounding and chance explain.

        rows, weights, squares : (c,) or (1,) number of rows, and sums of w and w^2
        """
        n, declared = rows.sum(), self._declared
        variance = squares - weights**2 / n
        if self._classes is not None:  # a rare class may have no row in this epoch
            variance = np.maximum(variance, declared * weights.sum() / n)
        error = np.abs(weights - declared)
        allowed = TOTAL_TOLERANCE * declared + TOTAL_STANDARD_ERRORS * np.sqrt(variance.clip(0))
        is_wrong = (error > allowed) | ((declared == 0) & (weights > 0))
        if not is_wrong.any() or not weights.any():  # rows without a weight have their own error
            return
        k = int(np.argmax(is_wrong))
        of_class = "" if self._classes is None else f" for class {self._classes[k]!r}"
        sums = [float(f"{x:.6g}") for x in weights] if self._classes else f"{weights[0]:.6g}"
        warn(
            f"{self._name} is {declared[k]:.6g}{of_class}, but the weights of an epoch sum to "
            f"{weights[k]:.6g}; a wrong total scales all weights: give {sums} or, for random "
            "weights, their expectation"
        )
