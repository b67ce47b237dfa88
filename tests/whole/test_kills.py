"""SIGKILL of every command at random instants; the same command again leaves the same bytes."""

from __future__ import annotations

import pytest

from benchmarks.kills import METHODS, run


def _check(kills: int) -> None:
    outcomes = run(kills)
    assert {name: o.failures for name, o in outcomes.items() if o.failures} == {}
    assert all(outcome.ended for outcome in outcomes.values())
    assert sum(outcome.kills for outcome in outcomes.values()) >= kills
    assert {f"train {name}" for name in METHODS} < outcomes.keys()


@pytest.mark.full
def test_killed_commands_leave_what_undisturbed_ones_do() -> None:
    """P1, P2, P3: one kill of each at least; `python -m benchmarks.kills` takes a thousand."""
    _check(20)


@pytest.mark.full
def test_a_thousand_kills() -> None:
    _check(1000)
