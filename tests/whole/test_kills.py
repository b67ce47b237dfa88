"""SIGKILL of every command at random instants; the same command again leaves the same bytes."""

from __future__ import annotations

import pytest

from benchmarks.kills import METHODS, run


@pytest.mark.full
@pytest.mark.parametrize("kills", [20, 1000])
def test_killed_commands_leave_what_undisturbed_ones_do(kills: int) -> None:
    """P1, P2, P3: one kill of each command at least, or as many as `python -m benchmarks.kills`."""
    outcomes = run(kills)
    assert {name: o.failures for name, o in outcomes.items() if o.failures} == {}
    assert all(outcome.ended for outcome in outcomes.values())
    assert sum(outcome.kills for outcome in outcomes.values()) >= kills
    assert {f"train {name}" for name in METHODS} < outcomes.keys()
