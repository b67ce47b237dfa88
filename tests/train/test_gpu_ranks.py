"""Which GPU is whose, and what cannot be."""

from __future__ import annotations

import pytest

from streamkern.basics.errors import ConfigError
from streamkern.cli import main
from streamkern.config.run_config import RunConfig
from streamkern.train import gpu_ranks
from streamkern.train.gpu_ranks import counted, devices_of


def config(**run: object) -> RunConfig:
    return RunConfig().with_overrides({f"run.{name}": value for name, value in run.items()})


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "gpu_count", lambda: 2)


@pytest.mark.usefixtures("two")
def test_there_is_a_rank_for_each() -> None:
    """With a device of its own."""
    found = counted(config(ranks="gpus"))
    assert (found.run.ranks, found.run.device) == (2, "gpu")
    assert devices_of(found) == devices_of(config(ranks=2)) == ["gpu:0", "gpu:1"]
    assert devices_of(config(ranks=3, device="cpu")) == ()
    assert counted(found) is found


@pytest.mark.usefixtures("two")
def test_a_gpu_is_not_shared() -> None:
    """Nor taken beside what the settings say."""
    for given in (config(ranks=3), config(ranks=2, device="gpu:1")):
        with pytest.raises(
            ConfigError, match=r"fewer GPUs, of which it has 2; set run\.ranks='gpus'"
        ):
            devices_of(given)
    with pytest.raises(ConfigError, match="device='cpu' is another"):
        counted(config(ranks="gpus", device="cpu"))
    for given, elsewhere in ((config(ranks="gpus", cluster="tcp://h:1"), False),
                             (config(ranks="gpus"), True)):  # fmt: skip
        with pytest.raises(ConfigError, match="a cluster has its own"):
            counted(given, elsewhere=elsewhere)


def test_without_any_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the command as well."""
    monkeypatch.setattr(gpu_ranks, "gpu_count", lambda: 0)
    monkeypatch.setattr(gpu_ranks, "gpu_problem", lambda: "no driver")
    words = ["train", "--train", "x.zarr", "--run-dir", "run", "--ranks", "gpus"]
    assert main.run_command(words) == 2
    assert "--ranks gpus, and there is none: no driver; give a number" in capsys.readouterr().err
    assert devices_of(config(ranks=2)) == ()
