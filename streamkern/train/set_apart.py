"""Rows set aside to calibrate a run by: whether there are such, and how many.

A tenth of the rows, and no more than tell enough. No row of them is trained on, judges a pass, or
has a say in any choice of the setup; see `calibrating`.
"""

from __future__ import annotations

from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig
from streamkern.stream.sources.base import BaseSource
from streamkern.stream.sources.mixture import stored_rows
from streamkern.stream.sources.validation import TO_CALIBRATE, set_aside

SHARE, MOST_ROWS = 0.1, 2000
"""With 2000 rows the coverage of 90 % intervals has a standard deviation of 0.7 %. On five sets of
classes, three seeds each, a tenth of the rows cost 0.1 % of the accuracy in the mean."""
FEWEST_ROWS = 5000
"""Of which "auto" sets a tenth aside; of fewer, fits would be the worse for it: with 20 classes and
2600 to 4000 rows a tenth of them was worth one point of accuracy."""


def check_calibrate(config: RunConfig, *, whole: bool, goes_on: bool) -> RunConfig:
    """The settings without calibration where "auto" finds that nothing can be set aside.

    whole : whether no other rows will follow. goes_on : from weights that were there before. Raises
    ConfigError where that is asked for.
    """
    asked, why = config.run.calibrate, None
    if not whole:
        why = "can not be used with partial_fit, to which rows set aside may come again"
    elif goes_on or config.solver.warm_start is not None:
        why = "can not be used with weights to go on from, which rows set aside may have trained"
    if why is None or asked is False:
        return config
    if asked is True:
        raise ConfigError(f"run.calibrate {why}; leave it out")
    return config.with_overrides({"run.calibrate": False})


def apart(config: RunConfig, source: BaseSource) -> tuple[BaseSource, BaseSource | None]:
    """(rows to train on, rows to calibrate by, without augmentation, or None)."""
    asked, stored = config.run.calibrate, stored_rows(source)
    n = stored.n_origins or stored.n_rows
    if not asked or (asked == "auto" and (source.classes is None or n < FEWEST_ROWS)):
        return source, None
    share, seed = min(SHARE, MOST_ROWS / n), config.run.random_state
    try:
        return set_aside(source, share, seed, TO_CALIBRATE)
    except ConfigError:
        if asked == "auto":  # rows that nobody can tell apart
            return source, None
        raise
