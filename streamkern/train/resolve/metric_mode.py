"""Decide whether a run learns a metric, takes a given one, or uses none."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np

from streamkern.basics.array_types import Floats
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.centers.selectors import SELECTORS
from streamkern.config.model import LEARNED, METRICS, ROUGH_TO_SMOOTH
from streamkern.config.run_config import RunConfig
from streamkern.kernels.builtin import Kernel, get_kernel
from streamkern.kernels.categorical import MAX_CATEGORICAL
from streamkern.kernels.tree_partitions import placeholder_trees
from streamkern.planning.memory import MAX_FULL_METRIC_FEATURES
from streamkern.solver.methods import find
from streamkern.train.resolve.given_arrays import check_metric, open_metric
from streamkern.train.resolve.run_inputs import RunInputs
from streamkern.train.resolve.training_data import Data

MIN_METRIC_ROWS, MIN_METRIC_ROWS_OF_CLASSES = 256, 1000
"""Smallest number of rows for which "auto" learns a metric: for numeric targets, and for classes,
whose log losses do not distinguish metrics on fewer rows. See the tables of
docs/explanation/metric-measured.md."""
MAX_METRIC_OUTPUTS = 1000
"""Largest number of outputs for which "auto" learns a metric, as the cost is proportional to it."""


class MetricMode(NamedTuple):
    """The source of a run's metric.

    mode : one of `LEARNED` if a metric is learned, else "none" or "given"
    reason : text for the log and for a plan
    searches_trees : whether trees may be searched although no metric is learned, see
        `may_have_trees`
    """

    mode: str
    reason: str
    searches_trees: bool = False

    @property
    def learns(self) -> bool:
        """True if a metric is learned."""
        return self.mode in LEARNED

    @property
    def kind(self) -> str:
        """The form of the learned metric: "diagonal", "full", or "" if it is chosen."""
        return self.mode.removeprefix("learn").removeprefix("-")


CHOSEN_TO_LEARN = MetricMode(
    "learn",
    "chosen, as the rows are those of a table and the bandwidth is open; "
    'model.metric="none" leaves it out',
)
MIN_ROWS_FOR_TREES = 200
"""Smallest number of rows from which trees are grown."""
MAX_TREE_FEATURES = 2048
"""Largest number of features of rows from which trees are grown."""
MAX_TREE_OUTPUTS = 32
"""Largest number of outputs for which trees are grown."""
NO_MEMORY_FOR_METRIC = MetricMode("none", "chosen, as looking for one does not fit the memory")


def requested_metric_mode(
    config: RunConfig, data: Data, *, has_initial_weights: bool = False
) -> MetricMode:
    """Return the metric mode for the settings and the metadata of the rows.

    has_initial_weights : whether training starts from existing weights, which keep their metric
    """
    setting = config.model.metric
    if setting != "auto":
        return MetricMode(setting if setting in METRICS else "given", "as set")
    why_not = _why_not(config, data, has_initial_weights)
    if why_not is not None:
        return MetricMode("none", f"chosen, as {why_not}")
    why_not = _why_wrong_size(data)
    if why_not is not None:
        return MetricMode("none", f"chosen, as {why_not}", searches_trees=True)
    return CHOSEN_TO_LEARN


def _why_not(config: RunConfig, data: Data, has_initial_weights: bool) -> str | None:
    """Return why "auto" means "none", from settings and metadata; None if a metric is learned."""
    model, name = config.model, config.solver.name
    if has_initial_weights:
        return "the run starts from weights, and keeps their metric if they have one"
    if model.features != "kernel":
        return f"the model is one of {model.features} features"
    if not isinstance(model.kernel, str) or model.kernel not in ("auto", *ROUGH_TO_SMOOTH):
        return f"the kernel is none of {', '.join(ROUGH_TO_SMOOTH)}"
    if model.bandwidth != "auto":
        return "the bandwidth is set, which is meant for distances without a metric"
    if not find(name, model.features).insensitive_to_conditioning:
        return f"solver {name} cannot be used with wide kernels"
    if config.run.precision == "integer":
        return "integers would not stay integers"
    return _why_no_table(data)


def _why_no_table(data: Data) -> str | None:
    """Return why no metric is learned for rows of this kind; None if one may be learned."""
    source = data.source
    if data.sparse:
        return "the rows are sparse"
    if len(source.row_shape) != 1 or source.dtype == np.uint8 or data.pixels:
        return "the rows are taken for pixels"
    if source.n_outputs > MAX_METRIC_OUTPUTS:
        return f"for more than {MAX_METRIC_OUTPUTS:,} outputs it takes minutes or hours to learn"
    return None


def _why_wrong_size(data: Data) -> str | None:
    """Return why no metric is learned for this number of rows and features; None if one is
    learned."""
    if not 2 <= data.d <= MAX_FULL_METRIC_FEATURES:
        return f"rows have {data.d:,} features, and not 2 to {MAX_FULL_METRIC_FEATURES}"
    numeric_targets = data.source.classes is None
    min_rows = MIN_METRIC_ROWS if numeric_targets else MIN_METRIC_ROWS_OF_CLASSES
    if _n_distinct_rows(data) < min_rows:
        return f"with fewer than {min_rows:,} rows a metric is rarely better than none"
    return None


def _n_distinct_rows(data: Data) -> int:
    """Return the number of rows, where copies of a stored row count once."""
    return data.base.n_origins or data.base.n_rows


def kernel_in_metric(
    config: RunConfig, inputs: RunInputs, metric_mode: MetricMode, data: Data
) -> tuple[Kernel, Floats | None]:
    """Return the kernel with its metric, and the metric if model.metric or an array gives one.

    If a metric will be learned, the kernel gets a placeholder of its shape that takes no memory.

    Raises ConfigError if a metric cannot be used with these rows or with run.precision, and the
    errors of `open_centers` if the given one cannot be read.
    """
    # Without a metric.
    kernel = get_kernel(config.model.kernels[0])
    if metric_mode.mode == "none" and inputs.metric is None:
        return data.kernel_of(kernel), None
    if data.sparse:
        raise ConfigError(
            f"{mention('model.metric')} needs dense rows, but these are sparse",
            f"leave {mention('model.metric')} out",
        )
    if config.run.precision == "integer":
        raise ConfigError(
            f"{mention('model.metric')} transforms the features, but "
            f"{mention('run.precision', 'integer')} needs integers",
            "leave one of them out",
        )
    if not metric_mode.learns:  # the metric is given
        array = inputs.metric
        if array is None:
            array = open_metric(config, data.d)
        check_metric(array, data.d)
        if array.dtype.kind in "fiu" and not array.any():
            raise ConfigError(
                f"{mention('model.metric')} is 0 for all features",
                "give at least one feature a scale above 0",
            )
        kernel = kernel.with_metric(array)
        return kernel, kernel.metric
    # A broadcast number has the shape of the metric that will be learned, and takes no memory.
    shape = (data.d,) if metric_mode.kind == "diagonal" else (data.d, data.d)
    kernel = copy.copy(kernel)
    kernel.metric = np.broadcast_to(np.float64(1), shape)
    return kernel, None


def may_have_trees(
    config: RunConfig, data: Data, precision: str, origin: str, metric_mode: MetricMode
) -> bool:
    """Return whether the kernel of a run may get trees, see `choose_trees`.

    It may if the run may change its kernel, and learns a metric or would learn one from a table of
    another size, with at least `MIN_ROWS_FOR_TREES` rows, at most `MAX_TREE_FEATURES` features and
    `MAX_TREE_OUTPUTS` outputs.

    precision, origin : as in `_may_change_kernel`
    """
    return (
        (metric_mode.learns or metric_mode.searches_trees)
        and _may_change_kernel(config, data, precision, origin)
        and _n_distinct_rows(data) >= MIN_ROWS_FOR_TREES
        and data.d <= MAX_TREE_FEATURES
        and data.source.n_outputs <= MAX_TREE_OUTPUTS
    )


def looks_for_categorical(config: RunConfig, data: Data, precision: str, origin: str) -> bool:
    """Return whether a run searches for categorical features of its kernel.

    It does if the run may change its kernel, with at most `MAX_FULL_METRIC_FEATURES` features.

    precision, origin : as in `_may_change_kernel`
    """
    may_change = _may_change_kernel(config, data, precision, origin)
    return may_change and data.d <= MAX_FULL_METRIC_FEATURES


def _may_change_kernel(config: RunConfig, data: Data, precision: str, origin: str) -> bool:
    """Return whether a run may change the distance of its kernel, besides the metric.

    It may for the rows of a table if the settings leave kernel, bandwidth and metric open, if
    distances are computed in float32 or float64, and if the centers are rows. Means of rows would
    have values that no row has.

    origin : origin of the centers, see `centers_from`
    """
    model, selector = config.model, SELECTORS.get(origin)
    rows_are_centers = origin == "all" or (selector is not None and selector.selects_rows)
    return (
        rows_are_centers
        and model.kernel == "auto"
        and model.bandwidth == "auto"
        and model.metric in ("auto", *LEARNED)
        and model.features == "kernel"
        and precision in ("exact", "float64")
        and len(data.source.row_shape) == 1
        and data.source.dtype != np.uint8
        and not data.pixels
    )


def with_placeholders(kernel: Kernel, n_categorical: int, *, trees: bool) -> Kernel:
    """Return the kernel with all that a search may add to it, so that the plan has its memory.

    n_categorical : number of features that may be categorical
    trees : whether the kernel may also get trees, see `may_have_trees`
    """
    if n_categorical:
        features = range(min(n_categorical, MAX_CATEGORICAL))
        kernel = kernel.with_categorical([(j, 1.0) for j in features])
    return kernel.with_trees(placeholder_trees()) if trees else kernel
