"""What one of several ranks does in training: a setup that one makes, and steps that all share.

The setup is made by one rank alone, in the run directory; then all of them begin as a resumed run
does, from the same files. Rank 0 writes, evaluates and is heard; the others have the same weights,
and make the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamkern.backend.ranks import Ranks
from streamkern.basics.stop import StopRequest, resumable
from streamkern.config.run_config import RunConfig
from streamkern.train.beginning import begun, run_directory
from streamkern.train.opened import Given
from streamkern.train.sinks import sinks_of


def make_setup(
    config: RunConfig, stop: StopRequest | None = None, *,
    continues: str | None = None, progress: bool | str = False,
) -> None:  # fmt: skip
    """Where the run directory has none yet; alone, before the ranks come together."""
    with (
        resumable(stop, kept=True, where=lambda: "in the setup") as request,
        begun(
            config, Given(), run_directory(config), request, progress, continues=continues
        ) as trainer,
    ):  # fmt: skip
        trainer.checkpoints.wait()
        trainer.run.backend.close()


def train_rank(
    config: RunConfig, ranks: Ranks, stop: StopRequest, *,
    continues: str | None = None, progress: bool | str = False,
) -> Mapping[str, Any]:  # fmt: skip
    """The run to its end, behind a setup. Returns figures and seconds, of each rank its own.

    Raises RankLostError where another rank is gone, and what `train` does.
    """
    first = ranks.rank == 0
    with (
        resumable(stop, kept=True, where=lambda: "before the next step") as request,
        begun(
            config, Given(ranks=ranks), run_directory(config, writable=first), request,
            progress if first else False, continues=continues,
            callbacks=sinks_of(config.run) if first else (),
        ) as trainer,
    ):  # fmt: skip
        result = trainer.run_to_end()
        trainer.run.backend.close()
    timing = result.timing | {"waited_s": ranks.waited_s}
    return {"metrics": result.metrics, "timing": timing, "samples": result.samples}
