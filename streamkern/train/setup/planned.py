"""Count the operations and estimate the times of a run, for `streamkern plan` and the run's log.

The events "start" and "resume" of the log record the plan, and the decisions of the setup.

In `OpCounts`, `wide_factors` are the FLOPs of float64 factorisations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from streamkern.losses.log_link import LogLink
from streamkern.planning.op_counts import NO_WORK, OpCounts
from streamkern.planning.sizes import method_sizes
from streamkern.solver.precondition.noise import NOISE_ROWS
from streamkern.solver.precondition.step_rule import max_over_blocks
from streamkern.solver.ridge_curve import noise_rows
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.patch_features import patches_among
from streamkern.stream.sources.sampling import SAMPLE_UNITS
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.resolve.training_data import auto_epochs
from streamkern.train.setup.choose_kernel import (
    candidate_kernels,
    must_choose_kernel,
    n_kernel_rows,
)
from streamkern.train.setup.choose_metric import metric_flops
from streamkern.train.setup.speeds import measure_speeds

PLANNED_RIDGES, PLANNED_BANDWIDTHS = 6, 6
"""Approximate numbers of ridges and of bandwidths that a search tries, in a plan."""


def planned_op_counts(run: ResolvedRun) -> dict[str, OpCounts]:
    """Return the operation counts of each phase, in the order of a run."""
    problem, method, counts = run.problem, run.method, dict[str, OpCounts]()
    if run.inputs.continued_run is None:  # else the kernel and the metric are taken over
        # With a log link, kernel and metric are chosen twice, see `kernel_and_metric`.
        choices = 2 if isinstance(run.loss, LogLink) else 1
        if problem.metric_rows:
            counts["metric"] = OpCounts(wide_factors=choices * metric_flops(run))
        if must_choose_kernel(run):
            kernels = choices * len(candidate_kernels(run))
            kernels *= 2 if problem.metric_rows else 1  # without a metric and in the learned one
            trials = PLANNED_RIDGES * PLANNED_BANDWIDTHS * kernels
            counts["kernel"] = _noise(n_kernel_rows(problem.n_rows)).scaled(trials)
    if problem.selection is not None:
        counts["centers"] = OpCounts(products=problem.selection.flops)
    counts["setup"], counts["training"] = method.op_counts(problem, run.sizes)
    if method.uses_center_targets or not problem.squares or method.estimates_ridge(problem):
        counts["setup"] += _noise(min(NOISE_ROWS, problem.n_rows)).scaled(PLANNED_RIDGES)
        n = noise_rows(problem)
        if n > NOISE_ROWS:  # one more factor, of more rows than the noise is estimated from
            counts["setup"] += OpCounts(wide_factors=n**3 / 3)
    return counts


def _noise(n: int) -> OpCounts:
    """Return the operations of trying one ridge on n rows: a Cholesky factor and its inverse."""
    return OpCounts(wide_factors=2 * n**3 / 3)


def planned_flops(run: ResolvedRun) -> dict[str, int]:
    """Return the FLOPs of each phase, including the patch features of the rows that it reads.

    In `expected_times`, the patch features are part of the measured time to prepare a row.
    """
    flops = {phase: counts.flops(run.problem) for phase, counts in planned_op_counts(run).items()}
    if patches := patches_among(run.data.fixed_transforms):
        row_flops = patches.row_flops(run.data.source.row_shape)
        n_setup_rows = run.problem.p + run.sizes.n_sample + run.sizes.n_probe
        flops["setup"] += row_flops * n_setup_rows
        flops["training"] += row_flops * run.problem.n_rows * run.method.n_epochs(run.problem)
    return flops


@dataclass(frozen=True)
class Times:
    """Expected times of a run, in seconds.

    setup : until the first step
    epoch : the steps of one epoch, without evaluations
    evaluation : one evaluation of the test rows; 0 without test rows
    whole : the sum over setup, epochs and evaluations
    speeds : measured speeds, in units of work per second, from which the times were computed
    """

    setup: float
    epoch: float
    evaluation: float
    whole: float
    speeds: dict[str, float]


def expected_times(run: ResolvedRun, test: BaseSource | None) -> Times:
    """Measure the speeds of this machine, and return the times that the run is expected to take.

    test : the test rows, or None
    """
    problem, epochs = run.problem, run.method.n_epochs(run.problem)
    before_training = planned_op_counts(run)
    training = before_training.pop("training")
    evaluation_counts = OpCounts(entries=problem.p * (0 if test is None else test.n_rows))
    speeds = measure_speeds(run, [*before_training.values(), training, evaluation_counts])
    kernels = len(candidate_kernels(run)) if must_choose_kernel(run) else 1
    setup = sum(before_training.values(), NO_WORK).seconds(speeds.compute)
    # The centers and the setup sample are each drawn from some units, which are read entirely.
    n_units = min(run.data.source.n_units, SAMPLE_UNITS)
    n_read = 2 * min(problem.n_rows, n_units * problem.unit_rows)
    setup += n_read * speeds.read_s + kernels * speeds.compile_s
    epoch_s, evaluation = training.seconds(speeds.compute) / epochs, 0.0
    epoch = speeds.streaming_seconds(problem.n_rows, epoch_s, problem)
    if test is not None:
        evaluation_s = evaluation_counts.seconds(speeds.compute)
        evaluation = speeds.streaming_seconds(test.n_rows, evaluation_s, problem)
    total = setup + epochs * epoch + _evaluations(run, epochs) * evaluation
    return Times(setup, epoch, evaluation, total, speeds.as_rates())


def _evaluations(run: ResolvedRun, epochs: int) -> int:
    """Return the number of evaluations of a run that has test rows."""
    settings, (per_epoch, _) = run.config.run, planned_batches(run)
    if settings.evaluate_every == "auto":
        return epochs + len(settings.evaluate_at)
    interval = settings.evaluate_every
    return (epochs * per_epoch // interval if interval else 0) + 1 + len(settings.evaluate_at)


def planned_batches(run: ResolvedRun) -> tuple[int, int]:
    """Return the number of batches of an epoch and of the whole run."""
    batches = math.ceil(run.problem.n_rows / run.sizes.batch_size)
    return batches, batches * run.method.n_epochs(run.problem)


def empty_steps(run: ResolvedRun) -> int:
    """Return the number of first steps that only accumulate sums, before the model changes from
    zero; 0 for a run that starts from weights."""
    if run.inputs.has_initial_weights(run.config):
        return 0
    return planned_batches(run)[0] * run.method.empty_epochs


def setup_decisions(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the decisions of the setup, short enough for a line of the log."""
    setup = meta["setup"]
    return {
        "solver": meta["sizes"]["solver"],
        **method_sizes(meta["sizes"]),
        **{k: v for k, v in setup.items() if k not in ("rules", "projection_rule", "jitters")},
        **max_over_blocks(setup["rules"]),
        **meta["kernel"],
    }


def run_plan(run: ResolvedRun, setup_s: float) -> dict[str, Any]:
    """Return the planned sizes and costs of a run, for its log.

    "of_samples" and "samples" are one number, the rows of all epochs, with copies: `info` shows the
    first beside the position, and the plan has the second beside its costs.

    setup_s : seconds of the setup
    """
    data, n_rows = run.config.data, run.data.source.n_rows
    epochs = run.method.n_epochs(run.problem)
    return {
        "epochs": epochs,
        "of_samples": epochs * n_rows,
        "train": list(data.train_urls),
        "test": data.test,
        "setup_s": setup_s,
        "plan": {
            "samples": epochs * run.problem.n_rows,
            "auto_epochs": auto_epochs(run.config, n_rows),
            "batches": planned_batches(run)[1],
            "peak_bytes": run.buffers.peak,
            "budget_bytes": run.budget_bytes,
            "device": run.backend.name,
            "threads": run.backend.threads,
            "flops": planned_flops(run),
        },
        **run.inputs.rank_addresses,
    }
