"""Test how ranks agree on whether they continue, and how often, by the length of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkern.backend.ranks import Communicator
from streamkern.basics.stop import StopRequest
from streamkern.train.loop import rank_coordinator
from streamkern.train.loop.rank_coordinator import GATHER_INTERVAL_STEPS, RankCoordinator


class CountingCommunicator(Communicator):
    """Communicator of one of several ranks, which counts its messages."""

    is_single, sent = False, 0

    def _total(self, own: Any) -> Any:
        self.sent += 1
        return own


def count_messages(
    step_s: float, n: int, monkeypatch: pytest.MonkeyPatch, at: tuple[int, ...] = ()
) -> int:
    """Return the number of messages in n steps. at : steps with a checkpoint"""
    clock, ranks = [0.0], CountingCommunicator()
    monkeypatch.setattr(rank_coordinator.time, "perf_counter", lambda: clock[0])
    agreement = RankCoordinator(ranks, StopRequest(install=False))
    solver = SimpleNamespace(sums_of_rows=lambda state: (), reduce_to_rank_0=lambda state: None)
    for step in range(1, n + 1):
        clock[0] += step_s
        position = SimpleNamespace(batch=step, step=step)
        steps: Any = SimpleNamespace(solver=solver, state=None, position=position)
        if agreement.sync_if_due(steps, is_forced=step in at):
            agreement.agree_on_end(None)
    return ranks.sent


class SecondRank(CountingCommunicator):
    """Communicator of a rank that receives what rank 0, which does not end the run, sends."""

    def broadcast_scalars(self, values: Any) -> np.ndarray:
        return np.array([0.0, 0.0, 1.0, 5.0])


def test_only_rank_0_decides_that_the_run_ends() -> None:
    coordinator = RankCoordinator(SecondRank(), StopRequest(install=False))
    assert coordinator.agree_on_end("its own reason", saves=False) == (None, True)


def test_short_steps_need_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the first step is measured, and that there is then a message for each tenth of a
    second."""
    assert count_messages(0.0125, 81, monkeypatch) == 1 + 10
    assert count_messages(1e-5, 1 + 10 * GATHER_INTERVAL_STEPS, monkeypatch) == 1 + 10
    assert count_messages(1e-5, 1 + GATHER_INTERVAL_STEPS, monkeypatch, at=(2, 7)) == 1 + 2


def test_long_step_is_followed_by_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_messages(0.2, 20, monkeypatch) == 20
