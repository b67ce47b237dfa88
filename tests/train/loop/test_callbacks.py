"""Test that callbacks receive the events of the log, can stop a run, and may fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkern.basics.errors import ConfigError, TrainingInterrupted
from streamkern.rundir.run_log import read_log
from streamkern.train.loop.callbacks import Callback, EpochEnd, TrainStart, check_callbacks
from streamkern.train.train import train
from tests.runs import (
    Array,
    array_source,
    assert_same_bits,
    final,
    finished,
    latest_step,
    settings,
    stopped,
    stream,
)

EPOCHS = {"data.epochs": 4}


class RecordingCallback(Callback):
    """Callback that keeps what it receives.

    fails : name of the event at which it raises an error; "pass" is the end of an epoch
    stops : epoch at whose end it stops the run
    """

    def __init__(self, fails: str = "", stops: int = 0) -> None:
        self.fails, self.stops = fails, stops
        self.events: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.passed: list[EpochEnd] = []
        self.weights: list[np.ndarray] = []
        self.error: BaseException | None = None

    def _receive(self, event: str) -> None:
        self.events.append(event)
        if event == self.fails:
            raise ZeroDivisionError(event)

    def begin(self, run: TrainStart) -> None:
        self.run = run
        self._receive("begin")

    def record(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))
        self._receive(record["event"])

    def pass_ended(self, passed: EpochEnd) -> bool:
        self.passed.append(passed)
        self.weights.append(np.array(passed.result().model.weights))
        self._receive("pass")
        return passed.epoch == self.stops

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self._receive("end")


def test_events_are_called_in_order() -> None:
    one, other = RecordingCallback(), RecordingCallback()
    config = settings(**EPOCHS, **{"run.evaluate_every": "auto"})
    result = finished(config, source=stream(), test=array_source(10, 5), callbacks=[one, other])
    assert one.events[0] == "begin"
    assert one.events[-1] == "end"
    assert one.events.count("pass") == 4
    assert one.events.count("evaluation") == 4
    assert one.events == other.events
    assert one.error is None
    assert [p.epoch for p in one.passed] == [1, 2, 3, 4]
    assert [p.last for p in one.passed] == [False] * 3 + [True]
    assert one.passed[0].figures == {
        k: v for k, v in result.history[0].items() if k not in ("step", "samples")
    }
    assert one.passed[-1].figures == result.metrics
    assert one.run.epochs == 4
    assert one.run.settings["data"]["epochs"] == 4
    assert one.run.setup["solver"] == "block"
    np.testing.assert_array_equal(one.weights[-1], np.asarray(result.model.weights))


def test_callbacks_receive_every_log_record(tmp_path: Path) -> None:
    callback = RecordingCallback()
    finished(settings(tmp_path, **EPOCHS), source=stream(), callbacks=[callback])
    logged = read_log(tmp_path / "log.jsonl")
    events = [{k: v for k, v in record.items() if k != "time"} for record in logged]
    assert [record["event"] for record in events].count("train") >= 1
    assert events[-len(callback.records) :] == callback.records
    assert callback.run.run_dir == str(tmp_path)


def test_callbacks_do_not_change_weights(tmp_path: Path) -> None:
    finished(settings(tmp_path / "a", **EPOCHS), source=stream())
    finished(settings(tmp_path / "b", **EPOCHS), source=stream(), callbacks=[RecordingCallback()])
    assert_same_bits(final(tmp_path / "a"), final(tmp_path / "b"))


def test_callback_can_stop_run(tmp_path: Path) -> None:
    callback, other = RecordingCallback(stops=2), RecordingCallback()
    result = finished(
        settings(tmp_path / "ended", **EPOCHS), source=stream(), callbacks=[other, callback]
    )
    assert result.epochs == 2
    assert result.ended == "RecordingCallback asked for no further epoch"
    assert other.events.count("pass") == 2
    two = finished(settings(**{"data.epochs": 2}), source=stream())
    np.testing.assert_array_equal(np.asarray(result.model.weights), np.asarray(two.model.weights))
    reloaded = finished(settings(tmp_path / "ended", **EPOCHS), source=stream())
    assert (reloaded.epochs, reloaded.ended) == (2, result.ended)


def test_stop_by_callback_survives_the_process(tmp_path: Path) -> None:
    config = settings(tmp_path, **EPOCHS)
    with pytest.raises(ZeroDivisionError):
        train(config, source=stream(), callbacks=[RecordingCallback(fails="finished", stops=2)])
    result = finished(config, source=stream())
    assert result.epochs == 2


@pytest.fixture(scope="module")
def uninterrupted_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    """Return the last state of a run that was not interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    finished(settings(path, **EPOCHS, **{"run.evaluate_every": 3}), source=stream())
    return final(path)


@pytest.mark.parametrize("fails", ["begin", "evaluation", "pass", "train", "end"])
def test_callback_exception_is_raised_and_run_resumes(
    fails: str, uninterrupted_run: dict[str, Array], tmp_path: Path
) -> None:
    often = {"run.evaluate_every": 3}
    config = settings(tmp_path / "failed", **EPOCHS, **often)
    observed = {"source": stream(), "test": array_source(10, 5)}
    failing, other = RecordingCallback(fails), RecordingCallback()
    with pytest.raises(ZeroDivisionError, match=f"^{fails}$"):
        train(config, **observed, callbacks=[other, failing])
    assert other.events[-1] == "end"
    assert failing.events[-1] == "end"
    if fails in ("evaluation", "pass"):  # what was done until then is saved
        assert latest_step(tmp_path / "failed") > 0
    finished(config, **observed, callbacks=[RecordingCallback()])
    assert_same_bits(final(tmp_path / "failed"), uninterrupted_run)


def test_resumed_run_reports_its_position(tmp_path: Path) -> None:
    config = settings(tmp_path, **EPOCHS)
    callback = RecordingCallback()
    stopped(config, 9, source=stream(), callbacks=[callback])
    assert isinstance(callback.error, TrainingInterrupted)
    second = RecordingCallback()
    finished(config, source=stream(), callbacks=[second])
    assert (second.run.step, second.run.epoch) == (9, 1)
    assert [p.epoch for p in second.passed] == [2, 3, 4]


@pytest.mark.parametrize("changed", [{}, {"run.evaluate_every": 0}, {"solver.name": "direct"}])
@pytest.mark.parametrize("epochs", [1, 3])
def test_last_epoch_metrics_belong_to_final_model(changed: dict[str, Any], epochs: int) -> None:
    callback = RecordingCallback()
    config = settings(**{"data.epochs": epochs, "run.evaluate_every": "auto"} | changed)
    result = finished(config, source=stream(), test=array_source(10, 5), callbacks=[callback])
    last = callback.passed[-1]
    assert [p.epoch for p in callback.passed] == [*range(1, result.epochs + 1)]
    assert last.last
    assert last.figures == result.metrics
    assert "test_accuracy" in last.figures
    np.testing.assert_array_equal(callback.weights[-1], np.asarray(result.model.weights))


def test_last_epoch_is_reported_after_resume(tmp_path: Path) -> None:
    config = settings(tmp_path, **EPOCHS)
    callback = RecordingCallback(fails="evaluation")
    observed = {"source": stream(), "test": array_source(10, 5)}
    with pytest.raises(ZeroDivisionError):
        train(config, **observed, callbacks=[callback])
    second = RecordingCallback()
    result = finished(config, **observed, callbacks=[second])
    assert second.passed[-1].last
    assert second.passed[-1].figures == result.metrics
    after = RecordingCallback()
    finished(config, **observed, callbacks=[after])
    assert after.passed == []


@pytest.mark.parametrize("invalid", [RecordingCallback, object(), print])
def test_objects_that_are_not_callbacks_are_refused(tmp_path: Path, invalid: Any) -> None:
    with pytest.raises(ConfigError, match=r"streamkern\.Callback"):
        train(settings(tmp_path / "run"), source=stream(), callbacks=[invalid])
    with pytest.raises(ConfigError, match=r"must be a list of callbacks; put a single"):
        train(settings(tmp_path / "run"), source=stream(), callbacks=RecordingCallback())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_subclass_without_a_method_of_callbacks_is_refused() -> None:
    """Check a name of another library, and methods of the class, a base class and an object."""

    class Misnamed(Callback):
        def on_epoch_end(self) -> None: ...

    class Derived(RecordingCallback): ...

    with pytest.raises(ConfigError, match=r"a Misnamed, which overrides no .*; override one of"):
        check_callbacks([Misnamed()])
    own = Misnamed()
    own.end = lambda error: None  # type: ignore[method-assign]
    valid = (RecordingCallback(), Derived(), own, Callback())
    assert check_callbacks(list(valid)) == valid
