"""Rows set aside to calibrate a run by: whether there are such, and how many.

A tenth of the rows where that is asked for, and by itself a fiftieth of those of classes, where
there are enough of them; no more than tell enough. No row of them is trained on, judges a pass, or
has a say in any choice of the setup; see `calibrating`.

Of fewer rows, all of them centers of solver "direct", none is set aside, and each is predicted by
the others (`KernelRidgeSolver.left_out`), without equal rows of its class. Where copies are known
to differ, as those of `augment`, there is no such prediction. It is a little too good where a
metric was learned from all rows, and still the better way: the log loss on other rows was below
that with a tenth set aside in 29 of 31 fits to 100, 400 and 1500 rows of 13 tables, below that of
scikit-learn's CalibratedClassifierCV with three folds in 23, and below that of its
HistGradientBoostingClassifier in 29. Where the classes were drawn by chance it was .757, .697 and
.697, and equal probabilities have .693.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.split import TO_CALIBRATE, n_different, split_rows

CALIBRATION_SHARE, MOST_ROWS = 0.1, 2000
"""With 2000 rows the coverage of 90 % intervals has a standard deviation of 0.7 %."""
AUTO_SHARE = 0.02
"""What "auto" sets aside, of classes: 100 rows tell a temperature."""
MIN_CALIBRATED_ROWS, FEWEST_OF_EACH = 5000, 500
"""In all, and for each class in the mean, of which "auto" sets some aside: of fewer, fits would be
the worse for it. With the same kernel, a fiftieth of what is asked for here cost .04 points of
accuracy in the mean of 27 fits to nine sets, and .36 at most; on three real tables nothing, and .27
(`benchmarks.set_aside`)."""
FEWEST_OF_ANY = round(1 / AUTO_SHARE)
"""Of the rarest class: one of them is set aside, and no class is left without rows."""
FEWEST_DIFFERENT = 50
"""Rows that are set aside by "auto" and not equal to others; where equal rows leave fewer of them,
a tenth is set aside."""
MAX_CALIBRATED_CLASSES = 1000
"""Of which "auto" sets rows aside: their values are 100 MB."""
WITH_TRUE = "train with calibrate=True"
NO_ROOM_APART = f"as the memory has no room for reading some; raise it, and {WITH_TRUE}"
OTHER_ROWS = "train on rows that are in memory or in a store, with calibrate=True"


class Apart(NamedTuple):
    """left : rows to train on. aside : rows to calibrate by, without augmentation, or None.
    why_none : why there are none, and what to do, in words. unused : whether rows are set aside
    nevertheless. left_out : whether each row may be predicted by the others instead, where the
    solver can: see `KernelRidgeSolver.left_out`."""

    left: BaseSource
    aside: BaseSource | None
    why_none: str | None = None
    unused: bool = False
    left_out: bool = False


def check_calibrate(config: RunConfig, *, whole: bool, goes_on: bool) -> str | None:
    """Why nothing can be set aside, whatever the rows, and what to do; None where it can.

    whole : whether no other rows will follow. goes_on : from weights that were there before. Raises
    ConfigError where it is asked for nevertheless.
    """
    asked, why = config.run.calibrate, None
    if not whole:
        why = f"with partial_fit, to which rows set aside may come again; use fit, and {WITH_TRUE}"
    elif goes_on or config.solver.warm_start is not None:
        why = (
            "with weights to go on from, which rows set aside may have trained; begin anew, and "
            f"{WITH_TRUE}"
        )
    if why is not None and asked is True:
        raise ConfigError(f"run.calibrate can not be used {why.partition(';')[0]}; leave it out")
    return why


def calibration_split(
    config: RunConfig, source: BaseSource, why: str | None = None, *, warm: bool = False
) -> Apart:
    """The rows of a run that are set aside, and those that are left.

    why : none are to calibrate by; see `check_calibrate`. warm : the run goes on from weights over
    the same centers. With "auto" it leaves out the rows that the one before has set aside with the
    same settings, as centers are chosen among the others.
    """
    asked, n, cold = config.run.calibrate, _stored(source), why
    left_out = asked == "auto" and why is None and source.classes is not None
    left_out = left_out and not _has_copies(source, n)
    if warm and asked == "auto":
        why = _why_too_few(source, n)
    elif why is None and not asked:
        why = f"as calibrate=False asks for; {WITH_TRUE}"
    elif why is None and asked == "auto":
        why = _why_too_few(source, n)
    if why is not None:
        return Apart(source, None, cold or why, left_out=left_out)
    share = min(AUTO_SHARE if asked == "auto" else CALIBRATION_SHARE, MOST_ROWS / n)
    try:
        left, aside = split_rows(source, share, config.run.random_state, TO_CALIBRATE)
        if asked == "auto" and n_different(aside) < FEWEST_DIFFERENT:
            share = min(CALIBRATION_SHARE, MOST_ROWS / n)
            left, aside = split_rows(source, share, config.run.random_state, TO_CALIBRATE)
    except ConfigError as error:
        if asked == "auto":  # rows that nobody can tell apart
            return Apart(source, None, f"as {str(error).partition(';')[0]}; {OTHER_ROWS}")
        raise
    if asked == "auto" and _at_once(config) > _stored(left):
        why = 'as the settings ask for so many rows that calibrate="auto" sets none aside'
        why = f"{why}; lower n_centers and the like"
        return Apart(source, None, why, left_out=left_out)
    return Apart(left, aside) if cold is None else Apart(left, None, cold, unused=True)


def _has_copies(source: BaseSource, n: int) -> bool:
    """Return whether rows of `source` are made from others, which differ; n : those from none."""
    return source.n_rows > n or stored_rows(source).hides_copies


def _stored(source: BaseSource) -> int:
    """Rows that are there once, without their copies."""
    stored = stored_rows(source)
    return stored.n_origins or stored.n_rows


def _why_too_few(source: BaseSource, n: int) -> str | None:
    """Why "auto" leaves all `n` rows of `source` to training; None where it does not."""
    stored, classes, why = stored_rows(source), source.classes, None
    counts = stored.totals
    if classes is None:
        why = "of values"
    elif n < MIN_CALIBRATED_ROWS:
        why = f"of fewer than {MIN_CALIBRATED_ROWS:,} rows"
        if _has_copies(source, n):
            why += ", and a row is not judged by a fit to copies of it"
    elif n < FEWEST_OF_EACH * len(classes):
        why = f"of fewer than {FEWEST_OF_EACH:,} rows for each class in the mean"
    elif len(classes) > MAX_CALIBRATED_CLASSES:
        why = f"of more than {MAX_CALIBRATED_CLASSES:,} classes"
    elif source.weighted:
        why = "of rows with sample weights, which may be those of few"
    elif counts is not None:
        rows = counts * (n / stored.n_rows)
        if rows[rows > 0].min() < FEWEST_OF_ANY:
            rarest = classes[int(np.argmin(np.where(rows > 0, rows, np.inf)))]
            why = f"where a class, here {rarest!r}, has fewer than {FEWEST_OF_ANY} of them"
    return None if why is None else f'as calibrate="auto" sets none aside {why}; {WITH_TRUE}'


def _at_once(config: RunConfig) -> int:
    """Rows that there have to be at least, by what the user has set."""
    asked = (
        config.model.n_centers, config.solver.n_nystrom, config.solver.block_size,
        config.data.batch_size,
    )  # fmt: skip
    return max((count for count in asked if isinstance(count, int)), default=0)
