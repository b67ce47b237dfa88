"""Split the rows of a run into training and calibration rows.

With calibrate=True, a tenth of the rows is set aside; with "auto", a fiftieth of the rows of a
classification that has enough rows, or a tenth if few of these rows are distinct; but at most
`MAX_CALIBRATION_ROWS`. Calibration rows are not trained on, do not score epochs, and are used for
no choice of the setup. See `calibrating`.

If there are too few rows, "auto" sets none aside, and the calibration uses leave-one-out
predictions: each row is predicted by all others except copies of itself. If all rows are centers of
solver "direct", `KernelRidgeSolver.leave_one_out` computes them. For other solvers that come close
to the least-squares minimum, `leave_one_out_predictions` does. There are none

- for sgd and EigenPro, which may be far from the minimum.
- for rows that change from epoch to epoch, and for stored copies that differ, such as those of
  `augment`.

Leave-one-out predictions are slightly optimistic if a metric was learned from all rows, and still
better than calibration rows that are set aside; see docs/howto/probabilities.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError, DataError
from streamkern.basics.message import mention, render_message
from streamkern.config.run_config import RunConfig
from streamkern.losses.log_loss import LogLoss
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.split import TO_CALIBRATE, n_distinct_rows, split_rows

CALIBRATION_SHARE, MAX_CALIBRATION_ROWS = 0.1, 2000
"""Share of the rows that calibrate=True sets aside, and their largest number. With n rows, the
coverage of 90 % intervals has a standard deviation of 30 % / sqrt(n)."""
AUTO_CALIBRATION_SHARE = 0.02
"""Share of the rows of a classification that "auto" sets aside. At the smallest number of rows this
is 100 rows, which suffice to fit a temperature."""
MIN_CALIBRATED_ROWS, MIN_MEAN_ROWS_PER_CLASS = 5000, 500
"""Smallest number of rows, in total and per class on average, for "auto" to set some aside. With
fewer rows the fit would suffer; docs/howto/probabilities.md has the cost in accuracy."""
MIN_ROWS_RAREST_CLASS = round(1 / AUTO_CALIBRATION_SHARE)
"""Smallest number of rows of the rarest class for "auto", so that one of them is set aside and the
class keeps others."""
MIN_DISTINCT_ROWS = 50
"""Smallest number of distinct rows that "auto" sets aside. If there are fewer because of equal
rows, a tenth of the rows is set aside."""
MAX_CALIBRATED_CLASSES = 1000
"""Largest number of classes for which "auto" sets rows aside, because all their outputs are held in
memory."""
CALIBRATE_TRUE_REMEDY = "train with calibrate=True"
NO_MEMORY_TO_CALIBRATE = (
    f"as the memory has no room for reading some; raise it, and {CALIBRATE_TRUE_REMEDY}"
)
OTHER_ROWS_REMEDY = "train on rows that are in memory or in a store, with calibrate=True"


class CalibrationSplit(NamedTuple):
    """Training and calibration rows of a run.

    training_rows : rows to train on
    calibration_rows : rows to calibrate with, without augmentation, or None
    why_none : why there are no calibration rows, and the remedy, as part of a message
    leaves_rows_unused : whether rows are left out of the training rows although nothing is
        calibrated with them
    allows_leave_one_out : whether leave-one-out predictions may replace the calibration rows, if
        the solver can compute them; see `KernelRidgeSolver.leave_one_out`
    """

    training_rows: BaseSource
    calibration_rows: BaseSource | None
    why_none: str | None = None
    leaves_rows_unused: bool = False
    allows_leave_one_out: bool = False


def check_calibrate(config: RunConfig, *, complete: bool, has_initial_weights: bool) -> str | None:
    """Return why the settings rule out calibration rows, with the remedy; None if they do not.

    complete : whether no other rows will follow, as they may in `partial_fit`
    has_initial_weights : whether training starts from existing weights

    Raises ConfigError if calibration rows are ruled out although calibrate is True.
    """
    setting, reason = config.run.calibrate, None
    if not complete:
        reason = (
            "with partial_fit, to which rows set aside may come again; use fit, and "
            f"{CALIBRATE_TRUE_REMEDY}"
        )
    elif has_initial_weights:
        reason = (
            "with initial weights, which the rows set aside may have trained; fit from the start, "
            f"and {CALIBRATE_TRUE_REMEDY}"
        )
    if reason is not None and setting is True:
        raise ConfigError(
            f"{mention('run.calibrate')} cannot be used {reason.partition(';')[0]}", "leave it out"
        )
    if config.model.loss == LogLoss.name and setting == "auto" and reason is None:
        reason = f"as the probabilities follow from the loss; {CALIBRATE_TRUE_REMEDY}"
    return reason


def calibration_split(
    config: RunConfig,
    source: BaseSource,
    reason: str | None = None,
    *,
    keeps_calibration_rows: bool = False,
) -> CalibrationSplit:
    """Split the rows of a run into calibration rows and the rest.

    reason : reason not to calibrate, see `check_calibrate`
    keeps_calibration_rows : whether the run starts from the weights of an earlier run. With
        calibrate="auto" it then leaves out the rows that the earlier run set aside, because the
        same rows have to be chosen as centers.

    Raises ConfigError or DataError if calibrate is True, and the rows cannot be split.
    """
    is_auto, n_rows, why_none = config.run.calibrate == "auto", _n_without_copies(source), reason
    allows_left_out = is_auto and reason is None and source.classes is not None
    allows_left_out = allows_left_out and not _has_copies(source, n_rows)
    if is_auto and (keeps_calibration_rows or reason is None):
        reason = _why_too_few(source, n_rows)
    elif reason is None and not config.run.calibrate:
        reason = f"as calibrate=False asks for; {CALIBRATE_TRUE_REMEDY}"

    def without_rows(reason: str) -> CalibrationSplit:
        return CalibrationSplit(source, None, reason, allows_leave_one_out=allows_left_out)

    if reason is not None:
        return without_rows(why_none or reason)

    def split(share: float) -> tuple[BaseSource, BaseSource]:
        share = min(share, MAX_CALIBRATION_ROWS / n_rows)
        return split_rows(source, share, config.run.random_state, TO_CALIBRATE)

    try:
        training, calibration = split(AUTO_CALIBRATION_SHARE if is_auto else CALIBRATION_SHARE)
        if is_auto and n_distinct_rows(calibration) < MIN_DISTINCT_ROWS:
            training, calibration = split(CALIBRATION_SHARE)
    except (ConfigError, DataError) as error:
        if not is_auto:
            raise
        if isinstance(error, ConfigError):  # the source cannot split its rows
            reason = f"as {render_message(error.rule)}; {OTHER_ROWS_REMEDY}"
            return CalibrationSplit(source, None, reason)
        reason = 'as calibrate="auto" found too few different rows to set aside'
        return without_rows(why_none or f"{reason}; {CALIBRATE_TRUE_REMEDY}")
    if is_auto and _min_rows(config) > _n_without_copies(training):
        reason = 'because the settings need so many rows that calibrate="auto" sets none aside'
        return without_rows(f"{reason}; lower n_centers and the like")
    if why_none is not None:
        return CalibrationSplit(training, None, why_none, leaves_rows_unused=True)
    return CalibrationSplit(training, calibration)


def _has_copies(source: BaseSource, n: int) -> bool:
    """Return whether some rows of `source` are augmented copies, or copies that look different.

    n : number of rows without the copies
    """
    return source.n_rows > n or stored_rows(source).hides_copies


def _n_without_copies(source: BaseSource) -> int:
    """Return the number of rows without their copies."""
    stored_source = stored_rows(source)
    return stored_source.n_origins or stored_source.n_rows


def _why_too_few(source: BaseSource, n: int) -> str | None:
    """Return why calibrate="auto" trains on all `n` rows; None if it sets some rows aside."""
    stored_source, classes, reason = stored_rows(source), source.classes, None
    if classes is None:
        reason = "for numeric targets"
    elif n < MIN_CALIBRATED_ROWS:
        reason = f"if there are fewer than {MIN_CALIBRATED_ROWS:,} rows"
        if _has_copies(source, n):
            reason += ", and leave-one-out predictions need rows without copies"
    elif n < MIN_MEAN_ROWS_PER_CLASS * len(classes):
        reason = f"if there are fewer than {MIN_MEAN_ROWS_PER_CLASS:,} rows per class on average"
    elif len(classes) > MAX_CALIBRATED_CLASSES:
        reason = f"if there are more than {MAX_CALIBRATED_CLASSES:,} classes"
    elif source.weighted:
        reason = "if rows have sample weights, since few rows may have most of the weight"
    elif stored_source.totals is not None:
        counts = stored_source.totals * (n / stored_source.n_rows)  # rows of each class
        if counts[counts > 0].min() < MIN_ROWS_RAREST_CLASS:
            rarest = classes[int(np.argmin(np.where(counts > 0, counts, np.inf)))]
            reason = f"if a class, here {rarest!r}, has fewer than {MIN_ROWS_RAREST_CLASS} rows"
    if reason is None:
        return None
    return f'as calibrate="auto" sets none aside {reason}; {CALIBRATE_TRUE_REMEDY}'


def _min_rows(config: RunConfig) -> int:
    """Return the smallest number of rows that the user's settings require."""
    settings = (
        config.model.n_centers, config.solver.n_nystrom, config.solver.block_size,
        config.data.batch_size,
    )  # fmt: skip
    return max((count for count in settings if isinstance(count, int)), default=0)
