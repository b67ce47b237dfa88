"""Check the GPUs of ranks on this machine."""

from __future__ import annotations

import pytest

from streamkern.basics.errors import ConfigError
from streamkern.cli import main
from streamkern.config.run_config import RunConfig
from streamkern.train import over_ranks
from streamkern.train.over_ranks import rank_devices, with_rank_count


def rank_settings(**run: object) -> RunConfig:
    """Return settings [run], the others at their defaults."""
    return RunConfig().with_overrides({f"run.{name}": value for name, value in run.items()})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine seem to have two GPUs."""
    monkeypatch.setattr(over_ranks, "gpu_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_gets_one_rank() -> None:
    actual = with_rank_count(rank_settings(ranks="gpus"))
    assert (actual.run.ranks, actual.run.device) == (2, "gpu")
    assert rank_devices(actual) == rank_devices(rank_settings(ranks=2)) == ["gpu:0", "gpu:1"]
    assert rank_devices(rank_settings(ranks=3, device="cpu")) == ()
    assert with_rank_count(actual) is actual


@pytest.mark.usefixtures("two_gpus")
def test_gpu_is_not_shared_between_ranks() -> None:
    """Check also that no GPU is taken that the settings do not name."""
    for config in (rank_settings(ranks=3), rank_settings(ranks=2, device="gpu:1")):
        with pytest.raises(ConfigError, match=r"and this machine has 2; give run\.ranks='gpus'"):
            rank_devices(config)
    with pytest.raises(ConfigError, match=r"cannot be used with .*device='cpu'"):
        with_rank_count(rank_settings(ranks="gpus", device="cpu"))
    for config, on_cluster in ((rank_settings(ranks="gpus", cluster="tcp://h:1"), False),
                             (rank_settings(ranks="gpus"), True)):  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be used on a cluster"):
            with_rank_count(config, on_cluster=on_cluster)


def test_missing_gpus_give_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check the error of Python and of the command."""
    monkeypatch.setattr(over_ranks, "gpu_count", lambda: 0)
    monkeypatch.setattr(over_ranks, "gpu_problem", lambda: "no driver")
    arguments = ["train", "--train", "x.zarr", "--run-dir", "run", "--ranks", "gpus"]
    assert main.run_command(arguments) == 2
    assert (
        "--ranks gpus needs a GPU, but none was found: no driver; give a number"
        in capsys.readouterr().err
    )
    assert rank_devices(rank_settings(ranks=2)) == ()
