"""SIGKILL of every command at random instants; the same command again leaves the same bytes."""

from __future__ import annotations

import pytest

from benchmarks.kills import METHODS, run


@pytest.mark.full
@pytest.mark.parametrize("kills", [20, 1000])
def test_killed_commands_give_same_files_as_undisturbed_ones(kills: int) -> None:
    """Kill each command at least once, or as often as `python -m benchmarks.kills` does."""
    outcomes = run(kills)
    assert {name: o.failures for name, o in outcomes.items() if o.failures} == {}
    assert all(outcome.ended for outcome in outcomes.values())
    assert sum(outcome.kills for outcome in outcomes.values()) >= kills
    assert {f"train {name}" for name in METHODS} < outcomes.keys()
