"""What metric a run looks for, and why: what "auto" stands for is decided here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkern.config.model import LEARNED, METRICS, ROUGH_TO_SMOOTH
from streamkern.config.run_config import RunConfig
from streamkern.planning.memory import METRIC_FEATURES
from streamkern.train.training_data import Data

MIN_METRIC_ROWS = 2000
"""Of which "auto" looks for one. Of ten tables with fewer that no constant was looked at with, one
was found on airfoil's 1203 rows alone, with 1.19 and .69 of the squared error (two seeds)."""
MOST_OUTPUTS = 1000
"""Of which "auto" looks for one: of 16 features 1.4 TFLOP, and as many times more as outputs."""


class MetricMode(NamedTuple):
    """word : one of `LEARNED` where a metric is looked for, else "none" or "given". reason : why,
    in words."""

    word: str
    reason: str

    @property
    def learns(self) -> bool:
        """Whether one is looked for."""
        return self.word in LEARNED


LOOKED_FOR = MetricMode(
    "learn",
    "chosen, as the rows are those of a table and the bandwidth is open; "
    'model.metric="none" leaves it out',
)
NO_ROOM = MetricMode("none", "chosen, as looking for one does not fit the memory")


def metric_wish(config: RunConfig, data: Data, *, goes_on: bool = False) -> MetricMode:
    """Of these settings on these rows, by metadata. goes_on : whether from weights that are there,
    which have a metric, or none."""
    asked = config.model.metric
    if asked != "auto":
        return MetricMode(asked if asked in METRICS else "given", "as set")
    why_not = _why_not(config, data, goes_on)
    return LOOKED_FOR if why_not is None else MetricMode("none", f"chosen, as {why_not}")


def _why_not(config: RunConfig, data: Data, goes_on: bool) -> str | None:
    """Why "auto" is "none", of the settings and of the rows; None where it is not."""
    model, name = config.model, config.solver.name
    if goes_on:
        return "the run goes on from weights, and in their metric if they have one"
    if model.features != "kernel":
        return f"the model is one of {model.features} features"
    if not isinstance(model.kernel, str) or model.kernel not in ("auto", *ROUGH_TO_SMOOTH):
        return f"the kernel is none of {', '.join(ROUGH_TO_SMOOTH)}"
    if model.bandwidth != "auto":
        return "the bandwidth is set, which is one of distances without a metric"
    if not config.method.insensitive_to_conditioning:
        return f"solver {name} takes one kernel, and no wide ones"
    if config.run.precision == "integer":
        return "integers would not stay integers"
    return _why_no_table(data)


def _why_no_table(data: Data) -> str | None:
    source, rows = data.source, data.base.n_origins or data.base.n_rows
    if len(source.row_shape) != 1 or source.dtype == np.uint8 or data.pixels:
        return "the rows are taken for pixels"
    if not 2 <= data.d <= METRIC_FEATURES:
        return f"rows have {data.d:,} features, and not 2 to {METRIC_FEATURES}"
    if source.n_outputs > MOST_OUTPUTS:
        return f"of more than {MOST_OUTPUTS:,} outputs it takes minutes and hours to find"
    if rows < MIN_METRIC_ROWS:
        return f"of fewer than {MIN_METRIC_ROWS:,} rows hardly any has been found"
    return None
