"""What a run has come to, as the attributes of a fitted estimator: host arrays and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streamkern.kernels.fourier import FourierFeatures, of_features
from streamkern.planning.sizes import own_sizes
from streamkern.solver.precondition.step_rule import StepRule, largest
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.transforms import Transform, is_deterministic
from streamkern.train.steps import Result
from streamkern.train.warm_start import WarmStart


def attributes_of(result: Result) -> dict[str, Any]:
    """By name, centers in the order in which they were chosen. Copies: a run may go on."""
    model, meta = result.model, result.meta
    chosen = np.argsort(result.order)
    centers, kernel = np.asarray(result.Z)[chosen], model.op.kernel
    alpha = model.backend.to_host(model.weights)[chosen]
    # Fourier features have the bandwidth of the kernel they stand for.
    described = kernel.of if isinstance(kernel, FourierFeatures) else {}
    warm = WarmStart(
        "True", tuple(meta["row_shape"]), centers, alpha, meta["classes"], model.targets,
        meta["fit_intercept"], meta["target_columns"], of_features(meta["kernel"]), kernel.metric,
        encoder=meta.get("encoder"),
    )  # fmt: skip
    return {
        "centers_": centers,
        # Powers of two: nothing is rounded, and float64 holds what float32 may not.
        "dual_coef_": alpha if model.classes else alpha * model.targets.scale,
        "intercept_": model.targets.mean,
        "kernel_": kernel,
        "bandwidth_": described.get("bandwidth", kernel.bandwidth),
        "history_": result.history,
        "loss_curve_": result.losses,
        "validation_scores_": result.validation_scores or None,
        "n_iter_": result.epochs,
        "report_": _report(result),
        "_targets": model.targets,
        "_warm": warm,
        "_precision": model.op.precision,
        "_grid": model.op.grid,
        "_fixed": model.fixed,
        "_meta": meta,
        "_calibration": model.calibration,
        "_posterior": None if model.posterior is None else model.posterior.of_centers(chosen),
    }


def found_scaling(result: Result, stream: BaseSource) -> list[Transform]:
    """The scaling that a run put behind the transforms of its source."""
    return list(result.model.fixed[sum(map(is_deterministic, stream.feed_transforms)) :])


def _report(result: Result) -> dict[str, Any]:
    """What was decided, measured and reached, in one flat table."""
    report = _of_setup(result.meta) | {"samples": result.samples} | result.metrics
    if result.model.calibration is not None:
        report["calibration"] = result.model.calibration.describe()
    if result.model.posterior is not None:
        report["posterior"] = result.model.posterior.describe(result.model.targets.scale)
    if result.ridge:
        report["ridge"] = result.ridge
    if result.ridges is not None:
        report["ridges"] = np.asarray(result.ridges).tolist()
    if result.ended:
        report["ended"] = result.ended
    if result.skipped:
        report["skipped"] = list(result.skipped)
    return report


def _of_setup(meta: Mapping[str, Any]) -> dict[str, Any]:
    setup, sizes = meta["setup"], meta["sizes"]
    rules = [StepRule(**rule) for rule in setup["rules"]]
    return {
        "solver": sizes["solver"],
        **own_sizes(sizes),
        "scale": meta["scale"],
        **largest(setup["rules"]),
        **({"step_size": min(rule.eta(setup["batch_size"]) for rule in rules)} if rules else {}),
        **{k: v for k, v in setup.items() if k not in ("rules", "projection_rule", "jitters")},
    }
