"""Ranks on the GPUs of this machine: how many there are, and which GPU each one has."""

from __future__ import annotations

from collections.abc import Sequence

from streamkern.backend.devices import gpu_count, gpu_problem
from streamkern.basics.errors import ConfigError
from streamkern.config.run_config import RunConfig

EACH = "gpus"


def counted(config: RunConfig, *, elsewhere: bool = False) -> RunConfig:
    """Return the settings with `run.ranks` as a number: "gpus" becomes the number of GPUs here.

    elsewhere : whether the ranks run on a given cluster

    Raises ConfigError if there are no GPUs, or none may be used.
    """
    if config.run.ranks != EACH:
        return config
    if elsewhere or config.run.cluster is not None:
        raise ConfigError(
            "run.ranks='gpus' is one for each GPU of this machine, and a cluster has its own; give "
            "the number of its workers"
        )
    if config.run.device not in ("auto", "gpu"):
        raise ConfigError(
            f"run.ranks='gpus' computes on all GPUs, and run.device={config.run.device!r} is "
            "another; leave one of them out"
        )
    count = gpu_count()
    if not count:
        raise ConfigError(f"run.ranks='gpus', and there is none: {gpu_problem()}; give a number")
    return config.with_overrides({"run.ranks": count, "run.device": "gpu"})


def devices_of(config: RunConfig) -> Sequence[str]:
    """Return `run.device` of each rank of this machine; empty if the settings apply to all.

    Raises ConfigError if several ranks would share a GPU.
    """
    ranks, device = config.run.n_ranks, config.run.device
    count = 0 if device == "cpu" else gpu_count()
    if not count:
        return ()
    if device not in ("auto", "gpu") or ranks > count:
        raise ConfigError(
            f"run.ranks={ranks} with run.device={device!r} on this machine would compute on fewer "
            f"GPUs, of which it has {count}; set run.ranks='gpus', or run.device='cpu'"
        )
    return [f"gpu:{rank}" for rank in range(ranks)]
