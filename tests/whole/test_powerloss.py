"""D3, P2, P3: whatever a power cut leaves is whole or refused, and the same command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.powerloss import COMMANDS, replay


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_power_cut_leaves_what_is_right_refused_or_goes_on(name: str, tmp_path: Path) -> None:
    instants, counts = replay(COMMANDS[name], tmp_path / "d", sample=25)
    assert instants > 50
    assert counts.total() == 25


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_every_state_of_every_instant(name: str, tmp_path: Path) -> None:
    instants, counts = replay(COMMANDS[name], tmp_path / "d")
    assert counts["whole"] >= 7
    assert counts.total() == 7 * instants
