"""Setup of a solver from a resolved run: centers, bandwidth, samples, and the solver's arrays.

The result is returned as arrays and JSON values (`Assembled.arrays`, `.meta`), which `setup/` of a
run directory stores; `reassemble` makes the same solver from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from streamkern.backend.base import Array, Backend
from streamkern.basics.array_types import Floats, HostArray
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.solver import SolverConfig
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.importances import describe_metric
from streamkern.kernels.points import Grid, Points
from streamkern.kernels.products import KernelOperator
from streamkern.losses.losses import SQUARES
from streamkern.losses.own import recorded_loss
from streamkern.losses.scaled import scaled_loss
from streamkern.solver.base import Solver
from streamkern.solver.direct import Direct
from streamkern.solver.equations import geometric_mean, round_to_grid
from streamkern.solver.method import Report, Samples, Setup, Work
from streamkern.solver.precondition.noise import (
    NO_NOISE,
    NOISE_ROWS,
    Noise,
    find_noise,
    or_the_mean,
)
from streamkern.solver.precondition.samples import SampleRows, row_values
from streamkern.solver.ridge_curve import noise_of_more_rows
from streamkern.stream.target_scale import TargetScale
from streamkern.train.resolve.resolved_run import ResolvedRun
from streamkern.train.restart.parent_run import ParentRun
from streamkern.train.restart.run_snapshot import is_solver_array
from streamkern.train.restart.scaling import save_scaling
from streamkern.train.setup.broadcast import (
    broadcast_setup,
    mean,
    rank_solver_work,
    receive_setup,
    receive_shard,
)
from streamkern.train.setup.choose_centers import ChosenCenters, choose_centers, scatter_all
from streamkern.train.setup.choose_metric import LearnedMetric
from streamkern.train.setup.kernel_and_metric import choose_kernel_and_metric
from streamkern.train.setup.loss_start import LossFit, fit_loss, scale_start, setup_targets
from streamkern.train.setup.setup_rows import (
    SquareTargets,
    center_targets,
    draw_samples,
    n_effective,
    noise_gives_ridge,
)

SAMPLED_CENTERS = 256
"""Largest number of centers from whose kernel values the size of kernel values is estimated."""

_META_ENTRIES = (
    "kernel", "sizes", "setup", "classes", "row_shape", "columns", "target_columns", "encoder",
    "file_form", "n_outputs", "fit_intercept", "precision", "grid", "scaling", "scale", "backend",
    "warm_start", "facts", "uncalibrated", "left_out", "center_left_out", "loss",
)  # fmt: skip
"""Entries of the metadata of a setup."""


@dataclass
class Assembled:
    """A solver ready to step, with everything needed to make it again.

    arrays["Z"] : (p, d) transformed centers on the host, in storage order; row i is row
        arrays["order"][i] of the centers as selected
    """

    solver: Solver
    op: KernelOperator
    arrays: dict[str, Array]
    meta: dict[str, Any]

    @property
    def targets(self) -> TargetScale:
        """Mean and scale of the targets, which the feed removes and the model restores."""
        return TargetScale.from_arrays(self.arrays)

    @property
    def batch_size(self) -> int:
        """Number of rows per step."""
        return int(self.meta["setup"]["batch_size"])


def start(
    run: ResolvedRun, report: Report, warm: ParentRun | None = None,
    metric: LearnedMetric | None = None,
) -> Assembled:  # fmt: skip
    """Compute the setup, see `compute_setup`, and assemble the solver."""
    work, setup, arrays, meta = compute_setup(run, report, warm, metric)
    solver = run.method.assemble(work, replace(setup, sample_rows=arrays["sample_rows"]))
    op = work.op
    del work, setup
    run.backend.release()
    return Assembled(solver, op, arrays, meta)


def compute_setup(
    run: ResolvedRun, report: Report, warm: ParentRun | None = None,
    metric: LearnedMetric | None = None,
) -> tuple[Work[Any], Setup, dict[str, Array], dict[str, Any]]:  # fmt: skip
    """Return the parts that a solver is assembled from, see `Assembled`.

    If the centers are partitioned over ranks, the array "Z" is this rank's stripe of them.

    The order is: target scale; kernel and metric, from a few rows; centers; noise and ridge; if the
    loss is not squares, its parameters; and then the samples, and the setup of the method.

    warm : run whose weights and target scale this run starts from; None for a new model
    metric : metric that is already known, with its kernel if that is known too; None to choose both
    """
    dtype, search_dtype = _dtype_of(run.precision), _dtype_of(run.search_precision)
    loss, targets, facts = setup_targets(run, search_dtype, warm, report)
    few_rows, learned = choose_kernel_and_metric(run, search_dtype, loss, targets, report, metric)
    centers = choose_centers(run, dtype, report, learned.kernel, learned.metric)
    op, points = _operator_and_points(run, centers, run.precision)
    noise, n_eff, options, ridges = _estimate_noise(run, op, points, few_rows.read, targets, report)
    if warm is None and _float32_suffices(run, options, op, points):
        dtype, centers = search_dtype, centers._replace(Z=centers.Z.astype(search_dtype))
        op, points = _operator_and_points(run, centers, run.search_precision)
    fit: LossFit | None = None
    squares: SquareTargets | None = few_rows.bounded_targets
    if few_rows.bounded_targets is not None:
        facts["outliers"] = few_rows.bounded_targets.share
    if loss is not None:
        fit = fit_loss(run, loss, op, points, targets, few_rows, noise, warm)
        options = fit.with_ridge(options, n_eff, report)
        if fit.first_model is not None:
            targets, noise, squares = fit.first_model.targets, fit.noise, fit.first_model
    del few_rows  # and the rows that it caches
    partitioned = run.problem.center_ranks > 1
    if partitioned and squares is not None:  # replacing targets would take the centers of all ranks
        centers = centers._replace(rows=None)
    if partitioned and op.kernel.explicit:  # estimating the noise took all centers
        del points
        centers = centers._replace(Z=scatter_all(run, centers.Z)[0])
        points = op.points(run.backend.asarray(centers.Z), right=True)
    run.backend.release()
    known_targets = center_targets(run, dtype, targets, centers.rows, centers.Z, squares)
    seed, ranks = run.config.run.random_state, run.inputs.ranks
    work = Work(
        op, points, run.problem, run.sizes, options, seed, known_targets, noise,
        n_eff if fit is None else None, ranks,
    )  # fmt: skip
    sample_rows = np.empty(0, np.int64)

    def samples() -> tuple[SampleRows, SampleRows]:
        nonlocal sample_rows
        report("setup", {"doing": "sample"})
        sample, probe, sample_rows = draw_samples(run, dtype, targets, centers.rows, squares)
        report("setup", {"doing": "preconditioner"})
        return sample, probe

    setup = run.method.compute(work, _broadcast(work, centers, fit, samples), report)
    if fit is not None:
        targets = fit.apply_to(setup)
    setup.arrays |= {} if ridges is None else {"ridges": run.backend.asarray(ridges)}
    setup.arrays |= _judged_rows(run, centers.Z, learned.held_out)
    if n_eff is not None:
        options = options.with_ridge(setup.meta.setdefault("ridge", options.fixed_ridge))
    setup.meta |= facts | ({"learned_metric": learned.facts} if learned.facts else {})
    scale_arrays, scale_meta = save_scaling(run.data.fixed_transforms)
    arrays = {"Z": centers.Z, "shift": centers.shift, "order": centers.order}
    arrays |= {"sample_rows": sample_rows} | op.kernel.arrays() | targets.arrays() | setup.arrays
    meta = _meta(run, op, setup.meta, scale_meta)
    work = replace(work, options=options, loss=scaled_loss(run.backend, dtype, meta, arrays))
    return work, setup, arrays | scale_arrays, meta


def _judged_rows(run: ResolvedRun, Z: HostArray, held_out: HostArray | None) -> dict[str, Array]:
    """Return which of the rows Z (n, d) are judged, see `KernelRidgeSolver`; {} if all are.

    held_out : (h, d) rows from which the trees of the kernel were not grown; None without trees
    """
    if held_out is None or not run.method.takes_rows(run.sizes):
        return {}
    rows, others = (row_values(A.astype(np.float32)) for A in (Z, held_out))
    return {"judged": run.backend.asarray(np.isin(rows, others))}


def _broadcast(
    work: Work[Any], centers: ChosenCenters, fit: LossFit | None, samples: Samples
) -> Samples:
    """Broadcast the input of a setup to the other ranks, and return samples for this rank."""
    op = work.op
    kernel_meta = {
        "kernel": op.kernel.describe(), "precision": op.precision,
        "grid": op.grid and asdict(op.grid), "slope": 1.0 if fit is None else fit.slope,
    }  # fmt: skip
    arrays = {"shift": centers.shift} | op.kernel.arrays()
    if work.problem.center_ranks == 1:  # else each rank has its stripe
        arrays["Z"] = centers.Z
    return broadcast_setup(work, arrays, kernel_meta, samples)


def _operator_and_points(
    run: ResolvedRun, centers: ChosenCenters, precision: str
) -> tuple[KernelOperator, Points]:
    """Return the kernel operator in a precision, and the centers on the device in its form."""
    op = KernelOperator(centers.kernel, run.backend, precision, centers.shift, run.grid)
    return op, op.points(run.backend.asarray(centers.Z), right=True)


def _float32_suffices(
    run: ResolvedRun, options: SolverConfig, op: KernelOperator, points: Points
) -> bool:
    """Return whether float32 suffices for this ridge, although "auto" has chosen float64."""
    method, ridge = run.method, options.fixed_ridge
    if not run.sizes.widened or not isinstance(method, Direct):
        return False
    values = 1.0
    if op.kernel.geometry == "inner":  # the values of other kernels are at most 1
        K = run.backend.to_host(op.matrix(points[:SAMPLED_CENTERS], points[:SAMPLED_CENTERS]))
        values = max(1.0, float(np.sqrt((K**2).mean())))
    return not method.rounding_shows(run.problem, ridge, values)


def _dtype_of(precision: str) -> np.dtype[np.floating]:
    return np.dtype(np.float64 if precision == "float64" else np.float32)


def _estimate_noise(
    run: ResolvedRun, op: KernelOperator, points: Points, read_rows: Callable[[], SampleRows],
    targets: TargetScale, report: Report,
) -> tuple[Noise, float | None, SolverConfig, Floats | None]:  # fmt: skip
    """Return the noise of the targets, the effective number of rows, the settings and the ridges.

    The noise is `NO_NOISE` if neither the method nor the loss needs it. If the ridge follows from
    the noise, it is entered in the settings, and a method with a ridge for each output gets the
    ridges (c,). Otherwise the number of rows and the ridges are None.
    """
    method, options, n_eff, ridges = run.method, run.config.solver, None, None
    if not method.estimates_noise(run.problem):
        return NO_NOISE, n_eff, options, ridges
    rows = read_rows()
    each_output = method.ridge_per_output and run.problem.several_targets
    estimates_ridge = noise_gives_ridge(run, op, points, rows)
    if not (estimates_ridge or method.uses_center_targets or run.loss is not None):
        return NO_NOISE, n_eff, options, ridges
    noise_rows = rows if len(rows.X) <= NOISE_ROWS else rows.first_rows(NOISE_ROWS, run.backend)
    noise = find_noise(op, points, noise_rows, per_output=each_output)
    noise = or_the_mean(op, points, noise_rows, noise)
    if len(rows.X) > NOISE_ROWS:
        noise = noise_of_more_rows(op, points, rows, noise)
    facts: dict[str, Any] = {"variance": noise.variance, "tried": noise.trials}
    if estimates_ridge:
        n_eff = n_effective(run, op, op.dtype, targets)
        options = options.with_ridge(noise.penalty(n_eff))
        if noise.per_output:
            ridges = round_to_grid([of_output.penalty(n_eff) for of_output in noise.per_output])
            options = options.with_ridge(geometric_mean(ridges))
        facts |= {"worth": n_eff, "ridge": options.ridge}
    report("noise", facts)
    return noise, n_eff, options, ridges


def _meta(
    run: ResolvedRun, op: KernelOperator, setup: dict[str, Any], scaling: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the metadata of a run after its setup, as JSON values; describe the metric in
    `setup`."""
    data, source, kernel = run.data, run.data.source, op.kernel
    if kernel.metric is not None:
        with run.backend.single_threaded_blas():
            setup["metric"] = describe_metric(kernel.metric, data.feature_names, kernel.categorical)
    if kernel.categorical:
        names = data.feature_names
        setup["categorical"] = [[names[j], weight] for j, weight in kernel.categorical]
    if kernel.trees is not None:
        setup["trees"] = len(kernel.trees)
    source_facts = {"labels": source.label_dtype, "weight_column": source.weight_column}
    source_facts = {name: x for name, x in source_facts.items() if x is not None}  # many lack them
    return {
        "kernel": kernel.describe(),
        "sizes": run.sizes.as_record(),
        "setup": setup,
        "classes": _as_list(source.classes),
        "row_shape": list(source.row_shape),
        "columns": _as_list(source.columns),
        "target_columns": _as_list(source.target_columns),
        "encoder": source.encoder,
        "file_form": source.file_form,
        "n_outputs": run.problem.c,
        "fit_intercept": run.config.model.fit_intercept,
        "precision": op.precision,
        "grid": run.grid and asdict(run.grid),
        "scaling": scaling,
        "scale": data.scale,
        "backend": run.backend.describe(),
        "warm_start": None,
        "facts": source_facts | dict(run.inputs.facts),
        "uncalibrated": data.split.why_none,
        "left_out": data.split.allows_leave_one_out,
        "center_left_out": run.problem.left_out and run.method.reaches_minimum,
        "loss": recorded_loss(run.config.model.loss, run.problem.c),
    }


def _as_list(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


def reassemble(run: ResolvedRun, arrays: dict[str, HostArray], meta: dict[str, Any]) -> Assembled:
    """Return the solver that `start` returned, from its saved arrays and metadata.

    Raises KeyError if an entry of `meta` is missing that runs of version 0.1.0 have.
    """
    # Entries that runs of version 0.1.0 lack.
    defaults: dict[str, Any] = {
        "facts": {}, "encoder": None, "file_form": None, "uncalibrated": None, "left_out": False,
        "loss": SQUARES, "center_left_out": False,
    }  # fmt: skip
    meta = {name: (defaults | meta)[name] for name in _META_ENTRIES}
    op = operator(run.backend, arrays, meta, run.config.model.kernel)
    device = {name: run.backend.asarray(a) for name, a in arrays.items() if is_solver_array(name)}
    points = op.points(run.backend.asarray(arrays["Z"]), right=True)
    options = run.config.solver
    if "ridge" in meta["setup"]:
        options = options.with_ridge(meta["setup"]["ridge"])
    seed, ranks = run.config.run.random_state, run.inputs.ranks
    loss = scaled_loss(run.backend, op.dtype, meta, arrays)
    work = Work(op, points, run.problem, run.sizes, options, seed, ranks=ranks, loss=loss)
    solver = run.method.assemble(work, Setup(device, meta["setup"], arrays["sample_rows"]))
    return Assembled(solver, op, dict(arrays), meta)


def compute_setup_part(run: ResolvedRun) -> dict[str, Array]:
    """Compute this rank's part of the arrays of `compute_setup`, from the input that rank 0
    broadcasts."""
    ranks, own_centers = run.inputs.ranks, {}
    if run.problem.center_ranks > 1:
        p, continued = run.problem.p, run.inputs.continued_run
        if continued is not None and run.problem.reads_stripes:
            own_centers = {"Z": continued.stored_centers.read(ranks.stripe(p))}
        else:
            own_centers = {"Z": receive_shard(p, ranks)}
        mean(own_centers["Z"], run.problem.p, ranks)  # rank 0 sends the result with the setup
    arrays, meta = receive_setup(ranks)
    arrays |= own_centers
    op = operator(run.backend, arrays, meta, run.config.model.kernel)
    work, samples = rank_solver_work(run, op, arrays, meta)
    own_arrays = run.method.compute(work, samples, lambda event, fields: None).arrays
    scale_start(own_arrays, meta["slope"])
    return own_arrays | own_centers


def recorded_accelerator(meta: Mapping[str, Any]) -> str:
    """Return the accelerator setting for predictions. meta : metadata of the model's setup"""
    return "none" if meta["backend"].get("accelerator") == "none" else "auto"


def operator(
    backend: Backend, arrays: Mapping[str, HostArray], meta: Mapping[str, Any],
    kernel: Any = None,
) -> KernelOperator:  # fmt: skip
    """Return the kernel operator that a run was set up with.

    kernel : kernel of the settings. A `Kernel` object is used, because the metadata cannot describe
        the functions of a user-defined kernel; names and tables are ignored.

    Raises ConfigError if the kernel differs from the kernel of the training.
    """
    notation = meta["kernel"]
    is_fourier = notation["kernel"] == "fourier"
    trained = notation["of"] if is_fourier else notation
    if isinstance(kernel, Kernel):
        if kernel.is_open:
            kernel = kernel.with_bandwidth(trained["bandwidth"])
        if kernel.metric is None:  # the metric was learned, or given separately
            kernel = kernel.with_metric(arrays.get("metric"))
        if kernel.describe() != trained:
            raise ConfigError(
                f"{mention('kernel', kernel)} is not the kernel of training, {trained}",
                "give the kernel of the training",
            )
    elif not is_fourier:
        kernel = get_kernel(trained, metric=arrays.get("metric"), trees=arrays.get("trees"))
    if is_fourier:
        kernel = FourierFeatures(notation["n_features"], trained)
    grid = None if meta["grid"] is None else Grid(**meta["grid"])
    return KernelOperator(kernel, backend, meta["precision"], arrays["shift"], grid)
