"""From an opened run to a solver: centers, bandwidth, samples, and what is computed once.

All of it is returned as arrays and JSON values (`Assembled.arrays`, `.meta`), which is what
`setup/` of a run directory holds; `reassemble` makes the same solver from those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamkern.backend.base import Array, Backend
from streamkern.basics.errors import ConfigError
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.fourier import FourierFeatures
from streamkern.kernels.importances import describe_metric
from streamkern.kernels.points import Grid, Points
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import METRIC_ROWS
from streamkern.planning.sizes import Options
from streamkern.solver.base import Solver
from streamkern.solver.copies import COPIES, FEWEST, common_share, worth
from streamkern.solver.method import Report, Rows, Setup, Work
from streamkern.solver.precondition.known import Known, by_center
from streamkern.solver.precondition.noise import NO_NOISE, NOISE_ROWS, Noise, find_noise, unlike
from streamkern.stream.feed import prepare
from streamkern.stream.sources.base import Block
from streamkern.stream.sources.sampling import (
    choose_copies,
    choose_rows,
    origins_of,
    read_rows,
    sample_rows,
)
from streamkern.stream.sources.transforms import SETUP_EPOCH
from streamkern.stream.target_scale import TargetScale
from streamkern.train.arrivals import is_computed_with
from streamkern.train.center_rows import CenterRows, places_of
from streamkern.train.choose_centers import choose_centers
from streamkern.train.choose_kernel import find_kernel, is_open
from streamkern.train.choose_metric import NOT_LEARNED, Learned, copied_part, learn_metric, split
from streamkern.train.intercept import target_scale
from streamkern.train.opened import Run
from streamkern.train.phases import told
from streamkern.train.scaling import save_scaling

SAMPLE_STAGE = 2
COPIED_UNITS = 16
"""Read at most, `COPIES` times each, to tell what copies of a row have in common."""
_META = (
    "kernel", "sizes", "setup", "classes", "row_shape", "columns", "target_columns", "n_outputs",
    "fit_intercept", "precision", "grid", "scaling", "scale", "backend", "warm_start",
    "facts",
)  # fmt: skip


@dataclass
class Assembled:
    """A solver ready to step, and what it takes to make it again.

    arrays["Z"] : (p, d) transformed centers on the host, in kept order; kept row i was row
    arrays["order"][i] of the centers as chosen.
    """

    solver: Solver
    op: KernelOperator
    arrays: dict[str, Array]
    meta: dict[str, Any]

    @property
    def targets(self) -> TargetScale:
        """What is taken from the targets before, and added to f after."""
        return TargetScale.from_arrays(self.arrays)

    @property
    def batch_size(self) -> int:
        """Rows per step."""
        return int(self.meta["setup"]["batch_size"])


def start(
    run: Run, report: Report, targets: TargetScale | None = None, found: Learned | None = None
) -> Assembled:
    """Choose, sample, factor and measure. Reads the centers and one sample of the stream, and the
    targets where their mean is not known. targets, found : of the run whose weights are gone on
    from; of the latter the kernel where the bandwidth is left open.
    """
    config, data = run.config, run.data
    dtype = np.dtype(np.float64 if run.precision == "float64" else np.float32)
    inside = targets or target_scale(
        run.backend, data.source, data.weight_factors,
        fit_intercept=config.model.fit_intercept, seed=config.run.random_state, dtype=dtype,
    )  # fmt: skip
    few, learned = _looked_at(run, dtype, inside, report, found)
    chosen = choose_centers(run, dtype, report, learned.kernel, learned.metric)
    host_Z, order, kernel, known_rows = chosen
    Z = run.backend.asarray(host_Z)
    # A common shift changes no distance; without it raw pixels cost three digits of them.
    shift = host_Z.mean(axis=0, dtype=np.float64).astype(dtype)
    op = KernelOperator(kernel, run.backend, run.precision, shift, run.grid)
    points = op.points(Z, left=True, right=True)
    del Z  # a device needs the prepared rows only
    rows = np.empty(0, np.int64)

    def samples() -> tuple[Rows, Rows]:
        nonlocal rows
        sample, probe, rows = _samples(run, dtype, inside, known_rows)
        return sample, probe

    method = run.method
    noise, n, options = _noise(run, op, points, few, inside, report)
    few.cache_clear()
    run.backend.release()
    known = None
    if known_rows is not None:
        known = replace(_known(run, dtype, inside, known_rows), whole=run.problem.whole)
    work = Work(op, points, run.problem, run.sizes, options, known, noise, n)
    setup = method.compute(work, told(samples, report), report)
    if n is not None:
        ridge = setup.meta.setdefault("ridge", options.fixed_ridge)
        work = replace(work, options=replace(options, ridge=ridge))
    if learned.facts:
        setup.meta["learned_metric"] = learned.facts
    solver = method.assemble(work, setup, rows)
    del points, work
    run.backend.release()
    scale_arrays, scale_meta = save_scaling(data.fixed)
    arrays = {"Z": host_Z, "order": order, "shift": shift, "sample_rows": rows}
    arrays |= inside.arrays() | setup.arrays
    if kernel.metric is not None:
        arrays["metric"] = kernel.metric
        with run.backend.single_threaded_blas():
            setup.meta["metric"] = describe_metric(kernel.metric, data.source.columns)
    meta = _meta(run, kernel, setup.meta, scale_meta)
    return Assembled(solver, op, arrays | scale_arrays, meta)


def _noise(
    run: Run, op: KernelOperator, points: Points, few: Callable[[], Rows], targets: TargetScale,
    report: Report,
) -> tuple[Noise, float | None, Options]:  # fmt: skip
    """The noise of the targets, where the method asks; and where that is to say the ridge, rows
    that the run is worth, and the settings with a ridge for them."""
    method, options, n = run.method, run.config.options, None
    open_ridge = options.ridge is None
    if not method.asks_noise(run.problem, open_ridge=open_ridge):
        return NO_NOISE, n, options
    noise = find_noise(op, points, *few()[:3])
    facts: dict[str, Any] = {"variance": noise.variance, "tried": noise.tried}
    if method.asks_ridge(run.problem, open_ridge=open_ridge):
        n = _worth(run, op, op.dtype, targets)
        options = replace(options, ridge=noise.penalty(n))
        facts |= {"worth": n, "ridge": options.ridge}
    report("noise", facts)
    return noise, n, options


def _meta(
    run: Run, kernel: Kernel, setup: Mapping[str, Any], scaling: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is known of a run once it is set up, as JSON."""
    data = run.data
    return {
        "kernel": kernel.describe(),
        "sizes": asdict(run.sizes),
        "setup": setup,
        "classes": None if data.source.classes is None else list(data.source.classes),
        "row_shape": list(data.source.row_shape),
        "columns": _listed(data.source.columns),
        "target_columns": _listed(data.source.target_columns),
        "n_outputs": data.source.n_outputs,
        "fit_intercept": run.config.model.fit_intercept,
        "precision": run.precision,
        "grid": None if run.grid is None else asdict(run.grid),
        "scaling": scaling,
        "scale": data.scale,
        "backend": run.backend.describe(),
        "warm_start": None,
        "facts": dict(run.given.facts),
    }


def _listed(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


def reassemble(run: Run, arrays: dict[str, npt.NDArray[Any]], meta: dict[str, Any]) -> Assembled:
    """The same solver from what `start` returned; KeyError where an entry of meta is gone."""
    meta = {"facts": {}} | meta  # which runs of 0.1.0 have not
    meta = {name: meta[name] for name in _META}
    kernel = run.config.model.kernel
    op = operator(run.backend, arrays, meta, kernel if isinstance(kernel, Kernel) else None)
    device = {name: run.backend.asarray(a) for name, a in arrays.items() if is_computed_with(name)}
    points = op.points(run.backend.asarray(arrays["Z"]), left=True, right=True)
    options = run.config.options
    if "ridge" in meta["setup"]:
        options = replace(options, ridge=meta["setup"]["ridge"])
    work = Work(op, points, run.problem, run.sizes, options, ranks=run.given.ranks)
    solver = run.method.assemble(work, Setup(device, meta["setup"]), arrays["sample_rows"])
    return Assembled(solver, op, dict(arrays), meta)


def operator(
    backend: Backend, arrays: dict[str, npt.NDArray[Any]], meta: dict[str, Any],
    kernel: Kernel | None = None,
) -> KernelOperator:  # fmt: skip
    """The kernel operator that a run was set up with."""
    described = meta["kernel"]
    if described["kernel"] == "fourier":
        if kernel is not None and kernel.describe() != described["of"]:
            raise ConfigError(
                f"kernel={kernel!r} differs from the one trained with, {described['of']}"
            )
        kernel = FourierFeatures(described["n_features"], described["of"])
    elif kernel is None:
        kernel = get_kernel(described, metric=arrays.get("metric"))
    else:
        if kernel.metric is None:  # of a kernel without one it was learned, or given beside it
            kernel = kernel.with_metric(arrays.get("metric"))
        if kernel.describe() != described:
            raise ConfigError(f"kernel={kernel!r} differs from the one trained with, {described}")
    grid = None if meta["grid"] is None else Grid(**meta["grid"])
    return KernelOperator(kernel, backend, meta["precision"], arrays["shift"], grid)


def _known(run: Run, dtype: np.dtype[Any], targets: TargetScale, known: CenterRows) -> Known:
    """Targets and weights as solvers take them."""
    source = run.data.source
    _, Y, w = prepare(
        run.backend, known.block, run.data.weight_factors, transforms=(), dtype=dtype,
        seed=run.config.run.random_state, epoch=SETUP_EPOCH, n_outputs=source.n_outputs,
        classes=source.classes, targets=targets,
    )  # fmt: skip
    to_host = run.backend.to_host
    return by_center(
        run.backend, known.place, to_host(Y), None if w is None else to_host(w), p=run.problem.p,
        n_rows=source.n_rows,
    )  # fmt: skip


def _worth(run: Run, op: KernelOperator, dtype: np.dtype[Any], targets: TargetScale) -> float:
    """Independent rows that all rows of the run are worth."""
    problem, source = run.problem, run.data.source
    stored = source.n_origins if problem.repeats else problem.n_stored or problem.n_rows
    copies = _stored_copies(run) if problem.repeats else _drawn_copies(run)
    if op.kernel.explicit or copies is None:
        return problem.n_samples
    rho = common_share(op, _copies(run, copies, dtype, targets))
    return worth(stored, problem.n_samples, rho)


def _drawn_copies(run: Run) -> list[tuple[npt.NDArray[np.int64], int]]:
    """Rows and a seed, as often: the same rows, drawn anew."""
    source, seed = run.data.source, run.config.run.random_state
    wanted = min(NOISE_ROWS, source.n_rows)
    rows = choose_rows(source, wanted, seed, stage=SAMPLE_STAGE, max_units=COPIED_UNITS)
    rows = rows[unlike(origins_of(source, rows, SETUP_EPOCH))]
    # With another seed places of a mixture keep their rows.
    return [(rows, (seed + r) % (1 << 32)) for r in range(COPIES)]


def _stored_copies(run: Run) -> list[tuple[npt.NDArray[np.int64], int]] | None:
    """Rows of a store that holds several made from each; None where there are too few."""
    source, seed = run.data.source, run.config.run.random_state
    if not source.n_origins:
        return None
    found = choose_copies(
        source, NOISE_ROWS, COPIES, FEWEST, seed, SAMPLE_STAGE, COPIED_UNITS
    )  # fmt: skip
    return None if found is None else [(rows, seed) for rows in found]


def _copies(
    run: Run, copies: list[tuple[npt.NDArray[np.int64], int]], dtype: np.dtype[Any],
    targets: TargetScale,
) -> Iterator[tuple[Array, Array, Array | None]]:  # fmt: skip
    """See `copies.common_share`."""
    for rows, seed in copies:
        block = read_rows(run.data.source, rows, seed, SETUP_EPOCH)
        yield _through(run, block, dtype, targets, seed)


def _looked_at(
    run: Run, dtype: np.dtype[Any], targets: TargetScale, report: Report, found: Learned | None
) -> tuple[Any, Learned]:
    """A cached function that gives rows which predict each other, and what was found on such: the
    metric, and the kernel where it was open. found : where that is known."""
    few, learned = cache(partial(_few, run, dtype, targets)), found or NOT_LEARNED
    if found is None and run.metric is not None:
        learned = Learned(run.metric, None, {})
    elif found is None and run.wish.learns:
        report("setup", {"doing": "metric", "why": run.wish.reason})
        rows = _few(run, dtype, targets, METRIC_ROWS)
        learned, n = learn_metric(run, rows, targets, report), len(rows.X)
        if learned.metric is not None:  # from targets of other rows than these
            n_fit, n_held = split(n)
            judging = copied_part(rows, slice(n_held, min(n_held + NOISE_ROWS, n - n_fit)))
            few = cache(lambda: judging)
    if learned.kernel is None and is_open(run):
        report("setup", {"doing": "kernel"})
        kernel = find_kernel(run, few(), report, learned.metric).kernel
        learned = learned._replace(kernel=kernel)
    return few, learned


def _few(
    run: Run, dtype: np.dtype[Any], targets: TargetScale, most: int = NOISE_ROWS
) -> Rows:  # fmt: skip
    """Rows that predict each other: no two are made from one stored row, or are equal, and none is
    without weight."""
    wanted, seed = min(most, run.data.source.n_rows), run.config.run.random_state
    block = sample_rows(run.data.source, wanted, seed, stage=SAMPLE_STAGE, epoch=SETUP_EPOCH)
    block = block.take(unlike(origins_of(run.data.source, block.rows, SETUP_EPOCH), most))
    rows = merged(run.backend, _prepared(run, block, dtype, targets, None))
    if rows.root is None:
        return rows
    counted = np.flatnonzero(run.backend.to_host(rows.root))
    at = run.backend.asarray(counted)
    return rows if len(counted) == len(rows.X) else Rows(rows.X[at], rows.Y[at], rows.root[at])


def merged(backend: Backend, rows: Rows) -> Rows:
    """Each of the rows that are equal in X once, with their mean target and the sum of weights.

    Copies of a row, of a small store that is drawn often or of rows that were repeated to balance
    them, would tell how well a row is learned by heart.
    """
    X, Y = backend.to_host(rows.X), backend.to_host(rows.Y)
    w = np.ones(len(X))
    if rows.root is not None:
        w = np.asarray(backend.to_host(rows.root), np.float64) ** 2
    first, group = np.unique(
        np.ascontiguousarray(X).view((np.void, X.itemsize * X.shape[1])).reshape(-1),
        return_index=True, return_inverse=True,
    )[1:]  # fmt: skip
    if len(first) == len(X):
        return rows
    weights, sums = np.zeros(len(first)), np.zeros((len(first), Y.shape[1]))
    np.add.at(weights, group, w)
    np.add.at(sums, group, w[:, None] * Y)
    sums /= np.where(weights > 0, weights, 1)[:, None]
    order = np.argsort(first)
    parts = (X[first], sums, np.sqrt(weights))
    return Rows(*(backend.asarray(part[order], X.dtype) for part in parts))


def _samples(
    run: Run, dtype: np.dtype[Any], targets: TargetScale, known: CenterRows | None
) -> tuple[Rows, Rows, npt.NDArray[np.int64]]:
    """The setup sample, the probe, and the row numbers of the sample."""
    source, sizes, seed = run.data.source, run.sizes, run.config.run.random_state
    wanted = min(sizes.n_sample + sizes.n_probe, source.n_rows)
    block = sample_rows(source, wanted, seed, stage=SAMPLE_STAGE, epoch=SETUP_EPOCH)
    if run.in_order:  # no augmentation: the rows are what the stream delivers
        first = np.argsort(block.rows[: sizes.n_sample])
        order = np.concatenate([first, np.arange(sizes.n_sample, wanted)])
        block = block.take(order)
    X, Y, root, _, place = _prepared(run, block, dtype, targets, known)
    assert place is not None
    # Fewer rows than sample and probe together: the probe is all of them
    # (`sizes.sample_sizes`).
    s, h = slice(sizes.n_sample), slice(wanted - sizes.n_probe, None)
    shared = max(0, sizes.n_sample - h.start)
    sample, probe = (
        Rows(
            X[part],
            Y[part],
            None if root is None else root[part],
            fresh,
            place[part],
        )
        for part, fresh in ((s, 0), (h, shared))
    )
    return sample, probe, block.rows[s]


def _prepared(
    run: Run, block: Block, dtype: np.dtype[Any], targets: TargetScale, known: CenterRows | None
) -> Rows:
    """Rows as the stream brings them."""
    X, Y, w = _through(run, block, dtype, targets, run.config.run.random_state)
    root = None if w is None else run.backend.xp.sqrt(w)
    return Rows(X, Y, root, 0, places_of(block.rows, known))


def _through(
    run: Run, block: Block, dtype: np.dtype[Any], targets: TargetScale, seed: int
) -> tuple[Array, Array, Array | None]:
    """X, Y and w behind the transforms at the feed, with the draws of the setup."""
    source = run.data.source
    return prepare(
        run.backend, block, run.data.weight_factors, transforms=source.feed_transforms,
        dtype=dtype, seed=seed, epoch=SETUP_EPOCH, n_outputs=source.n_outputs,
        classes=source.classes, targets=targets,
    )  # fmt: skip
