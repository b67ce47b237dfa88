"""Assign the GPUs of this machine to ranks."""

from __future__ import annotations

from collections.abc import Sequence

from streamkern.backend.devices import gpu_count, gpu_problem
from streamkern.basics.errors import ConfigError
from streamkern.basics.message import mention
from streamkern.config.run_config import RunConfig


def with_rank_count(config: RunConfig, *, on_cluster: bool = False) -> RunConfig:
    """Return the settings with run.ranks="gpus" replaced by the number of GPUs of this machine.

    on_cluster : whether the ranks run on a cluster that the caller has given

    Raises ConfigError if there are no GPUs, or if the settings exclude them.
    """
    if config.run.ranks != "gpus":
        return config
    if on_cluster or config.run.cluster is not None:
        raise ConfigError(
            f"{mention('run.ranks', 'gpus')} is for the GPUs of this machine, and cannot be used "
            "on a cluster",
            "give the number of its workers",
        )
    if config.run.device not in ("auto", "gpu"):
        raise ConfigError(
            f"{mention('run.ranks', 'gpus')} computes on all GPUs, and cannot be used with "
            f"{mention('run.device', config.run.device)}",
            "leave one of them out",
        )
    n_gpus = gpu_count()
    if not n_gpus:
        raise ConfigError(
            f"{mention('run.ranks', 'gpus')} needs a GPU, but none was found: {gpu_problem()}",
            "give a number",
        )
    return config.with_overrides({"run.ranks": n_gpus, "run.device": "gpu"})


def rank_devices(config: RunConfig) -> Sequence[str]:
    """Return run.device for each rank on this machine; () if all ranks use the CPU.

    Raises ConfigError if several ranks would share a GPU.
    """
    ranks, device = config.run.n_ranks, config.run.device
    n_gpus = 0 if device == "cpu" else gpu_count()
    if not n_gpus:
        return ()
    if device not in ("auto", "gpu") or ranks > n_gpus:
        raise ConfigError(
            f"{mention('run.ranks', ranks)} with {mention('run.device', device)} needs a GPU for "
            f"each rank, and this machine has {n_gpus}",
            f"give {mention('run.ranks', 'gpus')}, or {mention('run.device', 'cpu')}",
        )
    return [f"gpu:{rank}" for rank in range(ranks)]
