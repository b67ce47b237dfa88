"""Check that a power loss leaves valid or refused files (requirements D3, P2 and P3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.power_loss import COMMANDS, replay


@pytest.mark.slow
@pytest.mark.full(all_but_every=3)
@pytest.mark.parametrize("name", COMMANDS)
def test_power_loss_leaves_valid_refused_or_resumable_state(name: str, tmp_path: Path) -> None:
    instants, counts = replay(COMMANDS[name], tmp_path / "d", sample=25)
    assert instants > 50
    assert counts.total() == 25


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_every_state_at_every_instant_is_valid(name: str, tmp_path: Path) -> None:
    instants, counts = replay(COMMANDS[name], tmp_path / "d")
    assert counts["whole"] >= 7
    assert counts.total() == 7 * instants
