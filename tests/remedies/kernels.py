"""Mistakes in kernels: their parameters, sums and products, metrics, precisions and slopes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import streamkern as sk
from streamkern.backend.devices import get_backend
from streamkern.kernels.base import Kernel, Sum
from streamkern.kernels.builtin import get_kernel
from streamkern.kernels.fourier import FourierFeatures, frequencies
from streamkern.kernels.notation import in_settings
from streamkern.kernels.own import checked_kernel_record
from streamkern.kernels.points import Grid
from streamkern.kernels.products import KernelOperator
from streamkern.kernels.slope import Slope
from streamkern.kernels.sparse import for_sparse_rows
from streamkern.kernels.tree_partitions import TreePartitions
from tests.remedies import Case, Do, X, Y, cases_of, fit_values, long_rows
from tests.remedies.training import trained

COVERED = ("kernels",)


class Own(Kernel):
    """A user-defined kernel. expression : of s, the scaled squared distance."""

    def __init__(self, bandwidth: float, expression: str | None = None) -> None:
        super().__init__(bandwidth)
        self.expression = expression


class Squares(Kernel):
    """1 / (1 + s)."""

    def profile(self, sq: Any, xp: Any) -> Any:
        return 1 / (1 + sq)


def kernel_cases() -> list[Case]:
    """Return mistakes in kernels that are made in Python: (words, wrong, right)."""
    gauss, laplace, l1 = sk.Gaussian(2.0), sk.Laplace(2.0), sk.LaplaceL1(2.0)
    metric, other = np.ones(3), np.array([1.0, 2.0, 3.0])
    moved, wide = gauss.with_metric(metric), {"kind": "gaussian", "bandwidth": 2.0}
    backend = get_backend("cpu", 1, "none")
    grid = Grid(1.0, 0)
    shift, own = np.zeros(3), Squares(2.0).describe()
    auto = {"bandwidth": "auto", "metric": "auto"}
    level = gauss.with_categorical([(2, 1.0)])
    nodes = np.array([[[2, 0.5, 1, 2], [0, 0, 1, 1], [0, 0, 2, 2]]])
    trees = TreePartitions(nodes, 1.0)
    split = gauss.with_trees(trees)

    def operator(kernel: Kernel, precision: str, on: Grid | None = None) -> Do:
        return lambda: KernelOperator(kernel, backend, precision, shift, on)

    return [
        ("is a custom class .*import its module first, or define the class",
         lambda: checked_kernel_record({"kind": "module:Class"}),
         lambda: checked_kernel_record({"kind": f"{__name__}:Squares"})),
        ("bandwidth=-1 must be a finite number above 0", lambda: sk.Gaussian(-1),
         lambda: sk.Gaussian(1)),
        ("degree=0 must be a whole number between 1 and", lambda: sk.Polynomial(0),
         lambda: sk.Polynomial(1)),
        ("give one number for each feature, .d,., or a matrix",
         lambda: sk.Gaussian(2.0, metric=["a"]), lambda: sk.Gaussian(2.0, metric=[1.0])),
        ("metric holds NaN or infinity; give finite numbers",
         lambda: sk.Gaussian(2.0, metric=[np.nan]), lambda: sk.Gaussian(2.0, metric=[1.0])),
        ("is for 2 features, but the points have 3; give one row for each feature",
         fit_values(X, Y, kernel=sk.Gaussian(2.0, metric=[1.0, 1.0]), **auto),
         fit_values(X, Y, kernel=sk.Gaussian(2.0, metric=metric), **auto)),
        (r"parts=\[\] must be kernels, at least one", lambda: Sum([]), lambda: Sum([gauss])),
        ("combine them with kernels of the L1 distance only", lambda: l1 + gauss,
         lambda: l1 + sk.LaplaceL1(3.0)),
        ("has a part that defines its own `columns`; leave that part out",
         lambda: FourierFeatures(4, gauss.describe()) + gauss, lambda: Sum([gauss])),
        ("has parts of different metrics.*give all parts the same metric, or set one",
         lambda: gauss.with_metric(metric) + laplace.with_metric(other),
         lambda: (gauss.with_metric(metric) + laplace.with_metric(metric),
                  (gauss + laplace).with_metric(other))),
        ("must be a list of one number for each part, 2 in all",
         lambda: Sum([gauss, laplace], weights=[1.0]),
         lambda: Sum([gauss, laplace], weights=[1.0, 2.0])),
        ("are all 0; give one above 0", lambda: Sum([gauss, laplace], weights=[0.0, 0.0]),
         lambda: Sum([gauss, laplace], weights=[0.0, 1.0])),
        ("gamma=3 must be at most 2", lambda: sk.Dispersal(1.0, 3), lambda: sk.Dispersal(1.0, 2)),
        ("must be even", lambda: frequencies(gauss, 3, 5, 0), lambda: frequencies(gauss, 3, 6, 0)),
        ("needs the grid of the features", operator(gauss, "integer"),
         operator(gauss, "integer", grid)),
        ("precision='half' is not known; use one of .*exact", operator(gauss, "half"),
         operator(gauss, "exact")),
        ("is for kernels of the Euclidean distance.*use 'exact' or 'float64'", operator(l1, "fast"),
         operator(l1, "exact")),
        ("requires untransformed features.*use 'auto'",
         operator(gauss.with_metric(metric), "integer", grid),
         lambda: trained({"run.precision": "auto"}, metric=metric)),
        ("use a kernel of the Euclidean distance", lambda: Slope(l1), lambda: Slope(gauss)),
        ("must be pairs of a feature and its weight; count the features from 0",
         lambda: gauss.with_categorical([3]), lambda: gauss.with_categorical([(3, 0.5)])),
        ("must name each feature once, by its number; count the features from 0, and leave repet",
         lambda: gauss.with_categorical([(0, 1.0), (0, 1.0)]),
         lambda: gauss.with_categorical([(0, 1.0)])),
        ("must have finite weights above 0; leave out features of weight 0",
         lambda: gauss.with_categorical([(0, 1.0), (1, 0.0)]),
         lambda: gauss.with_categorical([(0, 1.0)])),
        ("cannot have categorical features: .*; use a kernel of the Euclidean distance",
         lambda: l1.with_categorical([(0, 1.0)]), lambda: gauss.with_categorical([(0, 1.0)])),
        ("must name features from 0 to 2, .* have 3 features; name features of the points",
         lambda: gauss.with_categorical([(3, 1.0)]).features(3), lambda: level.features(3)),
        ("has a part with categorical features or trees; give them to the whole kernel",
         lambda: level + laplace, lambda: (gauss + laplace).with_categorical(level.categorical)),
        ("rounds features, .* leaves of trees, for equality; use 'exact' or 'float64'",
         operator(level, "fast"), operator(level, "exact")),
        ("compares some .* equality; give a kernel without categorical and trees, or .*nystrom",
         lambda: sk.KernelRegressor(level, features="fourier", n_features=8).fit(X, Y),
         lambda: (sk.KernelRegressor(gauss, features="fourier", n_features=8).fit(X, Y),
                  sk.KernelRegressor(level, features="nystrom", n_centers=20).fit(X, Y))),
        ("are no trees; give an array .trees, nodes, 4. of features, thresholds, left and right",
         lambda: TreePartitions(nodes[0], 1.0), lambda: TreePartitions(nodes, 1.0)),
        ("256 trees of 3 nodes are too many.*; give fewer or smaller trees",
         lambda: TreePartitions(np.repeat(nodes, 256, 0), 1.0),
         lambda: TreePartitions(np.repeat(nodes, 255, 0), 1.0)),
        ("of weight 0 need a finite weight above 0; leave the trees out, or raise the weight",
         lambda: TreePartitions(nodes, 0),
         lambda: (gauss.with_trees(None), TreePartitions(nodes, 0.1))),
        ("split 3 features, but the points have 2; give the points all features that the trees",
         lambda: split.features(2), lambda: split.features(3)),
        ("whose nodes a table cannot hold; give the Kernel object itself",
         lambda: get_kernel(split.describe()), lambda: get_kernel(split)),
        ("cannot have trees: .* of dense rows; use a kernel of the Euclidean distance",
         lambda: l1.with_trees(trees), lambda: gauss.with_trees(trees)),
        ("give its class an expression .see Kernel., or use a kernel that is built in",
         lambda: Slope(Own(2.0)), lambda: (Slope(Own(2.0, "exp(-s)")), Slope(gauss))),
        ("write the expression with numbers, s, .* and pow with a number as its exponent",
         lambda: Slope(Own(2.0, "pow(2, s)")), lambda: Slope(Own(2.0, "pow(s, 2)"))),
        ("cannot be differentiated because of 's \\*\\* 2'.*write the expression with numbers, s",
         lambda: Slope(Own(2.0, "s ** 2")), lambda: Slope(Own(2.0, "s * s"))),
        ("whose numbers a table cannot hold; give metric= as a second setting, or a Kernel object",
         lambda: get_kernel(moved.describe()),
         lambda: (get_kernel(moved.describe(), metric=moved.metric), get_kernel(moved))),
        ("set the bandwidth in all parts or in none, or leave bandwidth at .auto.",
         lambda: in_settings({"kind": "sum", "parts": ["laplace", wide]}, 1.0),
         lambda: (in_settings({"kind": "sum", "parts": [wide, wide]}, 1.0),
                  in_settings({"kind": "sum", "parts": ["laplace", "gaussian"]}, 1.0),
                  in_settings({"kind": "sum", "parts": ["laplace", wide]}, None))),
        ("has no bandwidth; give the kernel a number", operator(sk.Gaussian("auto"), "exact"),
         operator(gauss, "exact")),
        ("give it a number, or a table", lambda: 2 * sk.Laplace("auto"),
         lambda: (2 * laplace, get_kernel({"kind": "sum", "parts": ["laplace", "gaussian"]}))),
        ("import its module first, or define the class .a command imports it with --import elsew",
         lambda: get_kernel(own | {"kernel": "elsewhere.Squares"}), lambda: get_kernel(own)),
        ("define the class as it was in training",
         lambda: get_kernel(own | {"values": [1.0, 0.5, 0.2, 0.1]}), lambda: get_kernel(own)),
    ]  # fmt: skip


def setting_cases() -> list[Case]:
    """Return mistakes in what model.kernel says: (words, wrong, right)."""
    both = {"kind": "sum", "parts": ["laplace", {"kind": "gaussian", "bandwidth": 2.0}]}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ('has no "kind", the name of the kernel; give {"kind": "gaussian"}', {"name": "gaussian"},
         {"kind": "gaussian"}),
        ("kernel='gauss' is not known; use one of .*gaussian", {"kind": "gauss"},
         {"kind": "gaussian"}),
        ("has no parameter 'gamma'; it takes bandwidth", {"kind": "laplace", "gamma": 2.0},
         {"kind": "laplace", "bandwidth": 2.0}),
        ("needs parts, a list of names or tables of kernels", {"kind": "sum"}, both),
    ]  # fmt: skip

    def makes(kernel: dict[str, Any]) -> Do:
        return partial(trained, {"model.kernel": kernel, "model.bandwidth": "auto"})

    features: dict[str, Any] = {
        "model.features": "fourier", "model.n_centers": "auto", "model.bandwidth": "auto",
        "solver.name": "sgd", "solver.ridge": "auto",
    }  # fmt: skip
    sampled = (
        "does not support .*use one of .*gaussian.*, or features='nystrom'",
        lambda: trained(features | {"model.kernel": "polynomial"}),
        lambda: (trained(features | {"model.kernel": "gaussian", "model.n_features": 10}),
                 trained(features | {"model.kernel": "polynomial", "model.features": "nystrom"})),
    )  # fmt: skip
    return [sampled, *cases_of(makes, cases)]


def sparse_cases() -> list[Case]:
    """Return mistakes in kernels of sparse rows."""

    def fit(**given: Any) -> Do:
        return fit_values(long_rows(), Y, **given)

    scaled = sk.Gaussian(2.0, metric=np.ones(4))
    return [
        ("use a kernel of the Euclidean distance or of the inner product", fit(kernel="laplace_l1"),
         fit(kernel="linear", bandwidth="auto")),
        ("leave them out", lambda: for_sparse_rows(scaled),
         lambda: for_sparse_rows(scaled.with_metric(None))),
        ("use 'exact' or 'float64'", fit(precision="high"),
         lambda: (fit(precision="exact")(), fit(precision="float64")())),
    ]  # fmt: skip


TABLES = (kernel_cases, setting_cases, sparse_cases)
