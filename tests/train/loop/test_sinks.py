"""Test the files of TensorBoard and MLflow, which are read back."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from streamkern.basics.errors import ConfigError, MissingDependencyError
from streamkern.basics.optional import import_optional
from streamkern.rundir.run_log import read_log
from streamkern.train.loop import guard, sinks
from streamkern.train.loop.callbacks import TrainStart
from streamkern.train.loop.sinks import MLflow, TensorBoard, _parameters, numbers_in
from tests.runs import array_source, finished, settings, stopped, stream

EPOCHS = {"data.epochs": 3, "run.evaluate_every": "auto"}


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Return the newest value in the event files by (tag, step).

    A record is its length (8 bytes), a checksum (4), the event, and a checksum (4).
    """
    event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    values: dict[tuple[str, int], float] = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            values |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
            data = data[16 + length :]
    return values


def test_numbers_are_extracted_from_records() -> None:
    position = {"step": 80, "epoch": 1, "samples": 9}
    train = {"event": "train", **position, "train_mse": 3.0, "window": 1, "losses": [2.0, 3.0]}
    assert list(numbers_in(train | {"left_s": 5.0, "samples_per_s": 7})) == [
        ("train_mse", 2.0, 2 * guard.WINDOW), ("train_mse", 3.0, 3 * guard.WINDOW),
        ("samples_per_s", 7.0, 80),
    ]  # fmt: skip
    evaluation = {"event": "evaluation", **position, "test_mse": 0.5, "why": "x", "flag": True}
    assert list(numbers_in(evaluation)) == [("test_mse", 0.5, 80)]
    assert list(numbers_in({"event": "start", **position, "plan": 3})) == []


def test_parameters_contain_no_secret() -> None:
    reported = dict(
        _parameters({"data": {"train": ("https://h/x?sig=SECRET", "s3://b/y"), "epochs": 3}})
    )
    assert reported["data.epochs"] == "3"
    assert "s3://b/y" in reported["data.train"]
    assert "SECRET" not in reported["data.train"]


class _FakeMLflow:
    """Replacement of the module mlflow, whose server answers only while `answers` is True."""

    MlflowException = ConnectionError
    answers = True

    def MlflowClient(self, uri: str) -> Any:
        if not self.answers:
            raise ConnectionError(f"{uri} does not answer")
        return self

    def set_terminated(self, run_id: str, status: str) -> None:
        raise AssertionError(f"{run_id} has already ended")


def test_missing_mlflow_run_is_named_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = _FakeMLflow()
    monkeypatch.setattr(sinks, "import_optional", lambda *_: mlflow)
    sink = MLflow("https://user:SECRET@h/x")
    sink.run_id = "previous-run"
    mlflow.answers = False
    with pytest.raises(ConfigError, match="does not answer") as caught:
        sink.begin(TrainStart({}, {}, 0, 0, 1))
    sink.end(caught.value)
    assert "SECRET" not in str(caught.value)


def test_tensorboard_folder_contains_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    result = finished(
        settings(tmp_path / "run", **EPOCHS, **{"run.tensorboard": str(tmp_path / "tb")}),
        source=stream(), test=array_source(50, 5),
    )  # fmt: skip
    values = scalars(tmp_path / "tb")
    assert len(result.history) == 3
    for record in result.history:
        assert values["test_mse", record["step"]] == pytest.approx(record["test_mse"], rel=1e-6)
    losses = [value for (tag, _), value in sorted(values.items()) if tag == "train_mse"]
    records = read_log(tmp_path / "run" / "log.jsonl")
    logged_losses = [loss for record in records for loss in record.get("losses", ())]
    assert losses == pytest.approx(logged_losses, rel=1e-6)


def test_file_in_place_of_folder_is_refused_before_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "tb"):
        with pytest.raises(ConfigError, match=r"^folder='.*file.*' cannot be written to .*is a fi"):
            TensorBoard(folder)
        config = settings(tmp_path / "run", **EPOCHS, **{"run.tensorboard": str(folder)})
        with pytest.raises(ConfigError, match=r"^run\.tensorboard='.*' cannot be written to"):
            finished(config, source=stream())
        assert not (tmp_path / "run").exists()


def test_resumed_run_continues_its_tensorboard_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    config = settings(tmp_path / "run", **EPOCHS, **{"run.tensorboard": str(tmp_path / "tb")})
    stopped(config, 10, source=stream(), test=array_source(50, 5))
    result = finished(config, source=stream(), test=array_source(50, 5))
    values = scalars(tmp_path / "tb")
    shown = {step: value for (tag, step), value in values.items() if tag == "test_mse"}
    expected = {record["step"]: record["test_mse"] for record in result.history}
    assert len(expected) > 10  # `stopped` evaluates after each of its 10 steps
    assert shown == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of an MLflow store of files; skip the test without MLflow."""
    pytest.importorskip("mlflow", reason="needs mlflow, which brings forty packages")
    # Stores of files have to be allowed; stores in SQLite need more packages.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


@pytest.mark.filterwarnings("ignore")  # MLflow issues warnings of its own
def test_resumed_run_continues_its_mlflow_run(tmp_path: Path, mlflow_uri: str) -> None:
    client = import_optional("mlflow").MlflowClient(mlflow_uri)
    sink = MLflow(mlflow_uri, experiment="digits")
    config = settings(tmp_path / "run", **EPOCHS)
    stopped(config, 10, source=stream(), callbacks=[sink])
    run_id = sink.run_id
    assert run_id is not None
    assert client.get_run(run_id).info.status == "KILLED"
    result = finished(config, source=stream(), test=array_source(50, 5), callbacks=[sink])
    assert sink.run_id == run_id  # the same MLflow run is continued
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["solver.name"] == "block"
    assert run.data.params["data.epochs"] == "3"
    assert run.data.metrics["test_mse"] == result.metrics["test_mse"]
    shown = {m.step: m.value for m in client.get_metric_history(run_id, "test_mse")}
    assert shown.items() >= {r["step"]: r["test_mse"] for r in result.history[-2:]}.items()
    # A new run of the same experiment is another MLflow run.
    new_sink = MLflow(mlflow_uri, experiment="digits")
    finished(settings(**EPOCHS), source=stream(), callbacks=[new_sink])
    assert new_sink.run_id != run_id


@pytest.mark.filterwarnings("ignore")
def test_failed_run_has_failed_in_mlflow(mlflow_uri: str) -> None:
    def fail(record: dict[str, Any]) -> None:
        raise ZeroDivisionError

    sink = MLflow(mlflow_uri, experiment="digits")
    with pytest.raises(ZeroDivisionError):
        finished(
            settings(**EPOCHS), source=stream(), test=array_source(50, 5), callbacks=[sink],
            on_evaluation=fail,
        )  # fmt: skip
    assert sink.run_id is not None
    client = import_optional("mlflow").MlflowClient(mlflow_uri)
    assert client.get_run(sink.run_id).info.status == "FAILED"


@pytest.mark.filterwarnings("ignore")
def test_invalid_mlflow_uri_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow, which brings forty packages")
    config = settings(tmp_path / "run", **{"run.mlflow": "nowhere://x"})
    with pytest.raises(ConfigError, match=r"run\.mlflow=nowhere://x is not a place"):
        finished(config, source=stream())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "extra"), [(TensorBoard, "tensorboard"), (MLflow, "mlflow")])
def test_missing_package_is_reported_before_writing(
    tmp_path: Path, kind: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorboardX", "mlflow"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{extra}\]"):
        finished(settings(tmp_path / "run", **{f"run.{extra}": str(tmp_path / "x")}))
    assert not list(tmp_path.iterdir())
