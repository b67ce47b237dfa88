"""The attribute `report_` of a fitted estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streamkern.planning.sizes import method_sizes
from streamkern.solver.precondition.step_rule import StepRule, max_over_blocks
from streamkern.train.loop.step_loop import Result


def fit_report(result: Result) -> dict[str, Any]:
    """Return choices, measurements and results of a training, by name."""
    report = _setup_report(result.meta) | {"samples": result.samples} | result.metrics
    if result.model.calibration is not None and result.model.calibration.n_rows:
        report["calibration"] = result.model.calibration.describe()
    if result.model.posterior is not None:
        report["posterior"] = result.model.posterior.describe(result.model.targets.scale)
    if result.ridges is not None:
        report["ridges"] = np.asarray(result.ridges).tolist()
    if result.ended:
        report["ended"] = result.ended
    if result.skipped:
        report["skipped"] = list(result.skipped)
    return report


def _setup_report(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of `report_` that the setup determines."""
    setup, sizes = meta["setup"], meta["sizes"]
    rules = [StepRule(**rule) for rule in setup["rules"]]
    return {
        "solver": sizes["solver"],
        **method_sizes(sizes),
        "scale": meta["scale"],
        **max_over_blocks(setup["rules"]),
        **({"step_size": min(rule.eta(setup["batch_size"]) for rule in rules)} if rules else {}),
        **{k: v for k, v in setup.items() if k not in ("rules", "projection_rule", "jitters")},
    }
