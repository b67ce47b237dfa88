"""Broadcast the choices, the sample rows and the centers of a setup from rank 0.

The other ranks compute their rows of the preconditioner from them. If the ranks partition the
centers, rank 0 broadcasts these part by part, and each rank keeps its stripe: a range of
consecutive centers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from streamkern.backend.base import tiles
from streamkern.backend.ranks import Communicator
from streamkern.basics.array_types import HostArray, Ints
from streamkern.kernels.products import KernelOperator
from streamkern.planning.memory import BROADCAST_CENTER_BYTES
from streamkern.solver.method import Samples, Work
from streamkern.solver.precondition.noise import Noise
from streamkern.solver.precondition.samples import CenterTargets, SampleRows
from streamkern.train.resolve.resolved_run import ResolvedRun

HostArrays = Mapping[str, HostArray]
"""Arrays on the host, by name."""
CenterPart = tuple[Ints, HostArray]
"""Indices of centers, (m,), and these centers, (m, d)."""


def broadcast_setup(
    work: Work[Any], arrays: HostArrays, meta: Mapping[str, Any], samples: Samples
) -> Samples:
    """Return a function that calls `samples` on rank 0, and broadcasts the result and the work.

    arrays, meta : arrays and JSON values from which other ranks make the kernel operator; "Z", the
        centers, is among the arrays unless each rank has its stripe
    """
    if work.ranks.is_single:
        return samples

    def read() -> tuple[SampleRows, SampleRows]:
        (sample, probe), known_targets = samples(), work.center_targets
        fields = {"sample": sample._asdict(), "probe": probe._asdict()}
        if known_targets is not None:
            names = ("counts", "weights", "Y")
            fields["known"] = {name: getattr(known_targets, name) for name in names}
        arrays_sent = dict(arrays)
        for group, values in fields.items():
            for name, array in values.items():
                if array is not None and not np.isscalar(array):
                    arrays_sent[f"{group}.{name}"] = np.asarray(work.op.backend.to_host(array))
        meta_sent = dict(meta) | {
            "fresh": [sample.first_fresh, probe.first_fresh],
            "noise": asdict(replace(work.noise, trials=[])),
            "worth": work.n_effective_rows, "ridge": work.options.ridge,
            "known": None if known_targets is None
            else [known_targets.n_rows, known_targets.is_complete],
        }  # fmt: skip
        meta_sent["arrays"] = {
            name: [array.shape, array.dtype.str] for name, array in arrays_sent.items()
        }
        work.ranks.broadcast_bytes(
            json.dumps(meta_sent, default=lambda number: number.item()).encode()
        )
        for array in arrays_sent.values():
            work.ranks.broadcast(np.ascontiguousarray(array))
        return sample, probe

    return read


def receive_setup(ranks: Communicator) -> tuple[dict[str, HostArray], dict[str, Any]]:
    """Receive the arrays and the JSON values that rank 0 sends by `broadcast_setup`."""
    meta = json.loads(ranks.broadcast_bytes(b""))
    shapes = meta.pop("arrays")
    arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
    return {name: ranks.broadcast(array) for name, array in arrays.items()}, meta


def rank_solver_work(
    run: ResolvedRun,
    op: KernelOperator,
    arrays: dict[str, HostArray],
    meta: Mapping[str, Any],
) -> tuple[Work[Any], Samples]:
    """Return the work of a rank and its samples, from the results of `receive_setup`.

    The sample rows are removed from `arrays` when the function of the samples is called.
    """
    asarray = run.backend.asarray
    Z = op.points(asarray(arrays["Z"]), right=True)
    center_targets = None
    if meta["known"] is not None:
        n_rows, is_complete = meta["known"]
        weights, Y = (asarray(arrays[f"known.{name}"]) for name in ("weights", "Y"))
        center_targets = CenterTargets(arrays["known.counts"], weights, Y, n_rows, is_complete)
    options = run.config.solver.with_ridge(meta["ridge"])
    noise, worth = Noise(**meta["noise"]), meta["worth"]
    work = Work(
        op, Z, run.problem, run.sizes, options, run.config.run.random_state, center_targets, noise,
        worth, run.inputs.ranks,
    )  # fmt: skip

    def rows_of(group: str, fresh: int) -> SampleRows:
        X, Y = (asarray(arrays.pop(f"{group}.{name}")) for name in ("X", "Y"))
        root, index = (arrays.pop(f"{group}.{name}", None) for name in ("root", "center_index"))
        return SampleRows(X, Y, None if root is None else asarray(root), fresh, index)

    def samples() -> tuple[SampleRows, SampleRows]:
        return rows_of("sample", meta["fresh"][0]), rows_of("probe", meta["fresh"][1])

    return work, samples


def scatter(parts: Iterable[CenterPart], p: int, ranks: Communicator) -> HostArray:
    """Broadcast all centers from rank 0, and return its stripe, (q, d).

    Called on rank 0, while the other ranks call `receive_shard`.

    parts : all p centers, each of them once
    """

    def broadcast_parts() -> Iterator[CenterPart]:
        for indices, X in parts:
            for rows in tiles(len(X), max(1, BROADCAST_CENTER_BYTES // max(1, X[:1].nbytes))):
                part = np.ascontiguousarray(X[rows])
                ranks.broadcast_scalars([*part.shape, part.itemsize])
                yield ranks.broadcast(indices[rows].copy()), ranks.broadcast(part)
        ranks.broadcast_scalars([0, 0, 0])

    return _collect_stripe(broadcast_parts(), p, ranks)


def receive_shard(p: int, ranks: Communicator) -> HostArray:
    """Receive the centers that rank 0 broadcasts, and return the stripe of this rank, (q, d)."""

    def receive_parts() -> Iterator[CenterPart]:
        while True:
            m, d, itemsize = (int(size) for size in ranks.broadcast_scalars([0, 0, 0]))
            if not m:
                return
            X = np.empty((m, d), f"f{itemsize}")
            yield ranks.broadcast(np.empty(m, np.int64)), ranks.broadcast(X)

    return _collect_stripe(receive_parts(), p, ranks)


def _collect_stripe(parts: Iterable[CenterPart], p: int, ranks: Communicator) -> HostArray:
    """Return the stripe of this rank, (q, d), from parts of all centers."""
    own_range, stripe = ranks.stripe(p), None
    for indices, X in parts:
        if stripe is None:
            stripe = np.empty((own_range.stop - own_range.start, X.shape[1]), X.dtype)
        in_stripe = (indices >= own_range.start) & (indices < own_range.stop)
        stripe[indices[in_stripe] - own_range.start] = X[in_stripe]
    assert stripe is not None, "there are no centers"
    return stripe


def mean(Z: HostArray, p: int, ranks: Communicator) -> HostArray:
    """Return the mean of all centers, (d,) float64. Collective.

    One rank after the other adds its rows, one by one, to the sum of the ranks before. This is the
    order of `numpy.mean`; in another order, the result would depend on the number of ranks.

    Z : (q, d), the stripe of this rank
    """
    total = np.zeros(Z.shape[1])
    for turn in range(ranks.size):
        if turn == ranks.rank:
            for rows in tiles(len(Z), 1024):
                total = np.concatenate([total[None], Z[rows]]).sum(axis=0)
        total = ranks.allgather(total.tolist())[turn]
    return total / p
